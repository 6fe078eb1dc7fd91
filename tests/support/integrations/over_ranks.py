"""Tiny models whose packed batch is spread over ranks by `with plan:`, beside the whole one."""

from typing import Any

import torch
import torch.distributed as dist

from heedful.distributed import ContextPlan, plan

LENGTHS = [150, 1, 70, 35]
VOCABULARY = 64


def planned(made: Any, **more: Any) -> ContextPlan:
    config = made.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return plan(
        lengths=LENGTHS,
        heads_q=config.num_attention_heads,
        heads_k=config.num_key_value_heads,
        head_dim=dim,
        dtype=torch.float32,
        **more,
    )


def ids() -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=drawn)


def whole_step(made: Any) -> tuple[torch.Tensor, float, list[torch.Tensor]]:
    """Logits, loss and gradients of the packed batch on one rank, with eager attention, but for
    gpt-oss, which lets documents see each other there."""
    is_leaky = made.config.model_type == "gpt_oss"
    made.set_attn_implementation("heedful" if is_leaky else "eager")
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    logits = made(input_ids=ids()[None], position_ids=positions[None], use_cache=False).logits[0]
    labels = torch.roll(ids(), -1)
    labels[torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return logits.detach(), float(loss), gradients(made, loss)


def gradients(made: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    made.zero_grad()
    loss.backward()
    return [x.grad.clone() for x in made.parameters() if x.grad is not None]


def spread_step(
    made: Any, batch: ContextPlan, call: Any = None
) -> tuple[torch.Tensor, float, list[torch.Tensor]]:
    """As `whole_step` by all ranks together. call: the model, as it is compiled."""
    made.set_attn_implementation("heedful")
    mine, labels = batch.shard(ids()), batch.shift_labels(ids())
    with batch:
        logits = (call or made)(
            input_ids=mine[None], position_ids=batch.positions()[None], use_cache=False
        ).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, labels) * batch.loss_scale
        found = gradients(made, loss)
    mean = loss.detach()
    for each in (*found, mean):
        dist.all_reduce(each)
        each /= batch.ranks
    return batch.unshard(logits), float(mean), found


def compared(
    rank: int, count: int, family: str, checkpointed: bool, more: dict[str, Any]
) -> tuple[list[float], dict[str, int]]:
    """The largest differences of logits, loss and gradients, and the layers' paths."""
    from heedful.integrations.transformers import is_registered, paths, register, reset_paths
    from support.integrations.language_models import model

    if not is_registered():
        register()
    torch.manual_seed(0)
    made = model(family)
    want = whole_step(made)
    if checkpointed:
        made.train()
        made.gradient_checkpointing_enable()
    reset_paths()
    got = spread_step(made, planned(made, **more))
    apart = [float((got[0] - want[0]).abs().max()), abs(got[1] - want[1])]
    pairs = zip(got[2], want[2], strict=True)
    apart.append(max(float((x - y).abs().max()) for x, y in pairs))
    return apart, dict(paths())
