"""Attention over ranks inside of what torch has: compiled code, checkpoints, DTensors, FSDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.distributed import ContextPlan, attention, plan, traced
from support.runs.ranks import Ranks

LENGTHS = [300, 1, 211]
HEADS, HEADS_K, DIM = 4, 2, 16
STRATEGIES = ["gather", "heads", "ring"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def planned(lengths: list[int] = LENGTHS, **more: Any) -> ContextPlan:
    shape = {"heads_q": HEADS, "heads_k": HEADS_K, "head_dim": DIM, "dtype": torch.float32}
    return plan(lengths=lengths, **shape, **more)


def drawn(made: ContextPlan) -> list[Any]:
    """This rank's q, k, v and dout."""
    whole = torch.Generator().manual_seed(0)
    counts = HEADS, HEADS_K, HEADS_K, HEADS
    rows = (torch.randn(made.total_tokens, n, DIM, generator=whole) for n in counts)
    return [made.shard(x).requires_grad_() for x in rows]


def results(call: Any, made: ContextPlan, sink: Tensor) -> list[Tensor]:
    q, k, v, dout = drawn(made)
    out, lse = call(q, k, v, made, sink)
    wanted = q, k, v, sink
    return [out, lse, *torch.autograd.grad([out, lse], wanted, [dout.detach(), lse.sin().detach()])]


def layer(q, k, v, made: ContextPlan, sink: Tensor) -> Any:
    """Rows see keys of a window, but for the first of each document in some."""
    rows = torch.arange(q.shape[0], dtype=torch.int32)
    ranges = torch.stack([rows % 7 * 20, torch.full_like(rows, 10**6)], -1)
    more: Any = {"window_size": (200, 0), "key_ranges": ranges, "sink": sink}
    return attention(q * 1.5, k, v, made, causal=True, **more, return_lse=True)


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(found, wanted, strict=True))


def compiled(rank: int, count: int, strategy: str) -> list[tuple[float, int]]:
    """How far results of compiled code are from others, for two plans, and how often it had been
    compiled until then."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, found = CompileCounterWithBackend("aot_eager"), []
    call = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for lengths in (LENGTHS, [77, 400, 130, 64, 2]):
        made, sink = planned(lengths, strategy=strategy), torch.zeros(HEADS, requires_grad=True)
        distance = apart(results(call, made, sink), results(layer, made, sink))
        found.append((distance, counter.frame_count))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_code_has_no_break_and_takes_another_plan_as_it_is(ranks, strategy):
    for (first, frames), (second, frames_after) in ranks.run(compiled, strategy):
        assert first == second == 0
        assert frames == frames_after > 0


def compiled_batch(rank: int, count: int) -> float:
    """As `compiled`, of rows that are a batch of 4 dims, without a log-sum-exp."""
    made = planned([256, 256], layout="zigzag")
    rows = [x.detach().unflatten(0, (2, -1)).requires_grad_() for x in drawn(made)]

    def call(q, k, v):
        return attention(q, k, v, made, causal=True)

    found = []
    for each in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        out = each(*rows[:3])
        found.append([out, *torch.autograd.grad(out, rows[:3], rows[3].detach())])
    return apart(*found)


def test_compiled_code_takes_a_batch_of_four_dims(ranks):
    assert ranks.run(compiled_batch) == [0.0, 0.0]


def checkpointed(rank: int, count: int, strategy: str, reentrant: bool) -> float:
    made, sink = planned(strategy=strategy), torch.zeros(HEADS, requires_grad=True)

    def again(*given: Any) -> Any:
        return checkpoint(layer, *given, use_reentrant=reentrant)

    return apart(results(again, made, sink), results(layer, made, sink))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_computes_the_same_again(ranks, strategy, reentrant):
    if reentrant:
        # torch.autograd.grad does not go through such.
        found = ranks.run(by_backward, strategy)
    else:
        found = ranks.run(checkpointed, strategy, False)
    assert found == [0.0, 0.0]


def by_backward(rank: int, count: int, strategy: str) -> float:
    found = []
    for is_kept in (False, True):
        made, sink = planned(strategy=strategy), torch.zeros(HEADS, requires_grad=True)
        q, k, v, dout = drawn(made)
        given = q, k, v, made, sink
        out, _ = layer(*given) if is_kept else checkpoint(layer, *given, use_reentrant=True)
        out.backward(dout.detach())
        found.append([out, *(x.grad for x in (q, k, v, sink))])
    return apart(*found)


def sharded(rank: int, count: int) -> dict[str, Any]:
    """Results of DTensors of 3 dims and of 4, and what is said of others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (count,))
    made = planned(layout="contiguous")
    q, k, v, dout = (x.detach() for x in drawn(made))
    rows = made.total_tokens

    def part(x: Tensor, where: Any = None) -> Any:
        shape = torch.Size([rows, *x.shape[1:]])
        return DTensor.from_local(
            x, mesh, [where or Shard(0)], shape=shape, stride=(x[0].numel(), DIM, 1)
        ).requires_grad_()

    leaves = one, two, three = [part(x) for x in (q, k, v)]
    out, lse = attention(one, two, three, made, causal=True, return_lse=True)
    grads: Any = torch.autograd.grad(out, leaves, part(dout).detach())
    for x in (q, k, v):
        x.requires_grad_()
    want, want_lse = attention(q, k, v, made, causal=True, return_lse=True)
    wanted = torch.autograd.grad(want, (q, k, v), dout)
    errors = []
    for wrong in (leaves[0], q), (part(q.detach(), Replicate()), leaves[1]):
        with pytest.raises(ValueError) as caught:
            attention(wrong[0], wrong[1], leaves[2], made)
        errors.append(str(caught.value))
    return {
        "placements": [str(x.placements) for x in (out, lse, *grads)],
        "shapes": [tuple(x.shape) for x in (out, lse, *grads)],
        "whole": apart([out.full_tensor()], [made.unshard(want)]),
        "apart": apart([x.to_local() for x in (out, lse, *grads)], [want, want_lse, *wanted]),
        "errors": errors,
    }


def test_dtensors_sharded_along_their_rows_come_back_so(ranks):
    rows = sum(LENGTHS)
    for found in ranks.run(sharded):
        assert found["placements"] == [f"(Shard(dim={dim}),)" for dim in (0, 1, 0, 0, 0)]
        of_k = (rows, HEADS_K, DIM)
        assert found["shapes"] == [
            (rows, HEADS, DIM),
            (HEADS, rows),
            (rows, HEADS, DIM),
            of_k,
            of_k,
        ]
        assert found["apart"] == found["whole"] == 0
        assert "k must be a DTensor" in found["errors"][0]
        assert "q must be placed as (Shard(dim=0),)" in found["errors"][1]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, (HEADS + 2 * HEADS_K) * DIM)
        self.out = nn.Linear(HEADS * DIM, 8)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        heads = self.into(x).unflatten(-1, (-1, DIM)).split((HEADS, HEADS_K, HEADS_K), 1)
        return x + self.out(attend(*heads).flatten(1))


def by_fsdp(rank: int, count: int) -> float:
    """How far gradients of a model whose weights are sharded too are from the whole's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, made = nn.ModuleList([Layer(), Layer()]), planned()
    x = torch.randn(made.total_tokens, 8)
    alone = planned_alone(rank)

    def loss(rows: Tensor, batch: ContextPlan) -> Tensor:
        for each in model:
            rows = each(rows, lambda q, k, v: attention(q, k, v, batch, causal=True))
        return rows.square().mean() * (batch.tokens * batch.ranks / batch.total_tokens)

    loss(x, alone).backward()
    wanted = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    mesh = init_device_mesh("cpu", (count,))
    for each in model:
        fully_shard(each, mesh=mesh)
    loss(made.shard(x), made).backward()
    found: list[Any] = [weight.grad for weight in model.parameters()]
    return apart([grad.full_tensor() for grad in found], wanted)


def planned_alone(rank: int) -> ContextPlan:
    """Of a group of this rank alone."""
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    return planned(group=groups[rank])


def test_weights_may_be_sharded_by_fsdp(ranks):
    assert max(ranks.run(by_fsdp)) < 1e-6


def test_traced_gradients_are_contiguous_as_those_that_are_computed():
    shapes = {"q": (9, HEADS, DIM), "k": (9, HEADS_K, DIM), "v": (9, HEADS_K, DIM)}
    q, k, v = (torch.zeros(h, n, d).transpose(0, 1) for n, h, d in shapes.values())
    out, lse, sink = torch.zeros(shapes["q"]), torch.zeros(HEADS, 9), torch.zeros(HEADS)
    for given in (sink, None):
        *grads, dsink = traced._fake_backward(out, lse, out, lse, q, k, v, given, None, None, 0)
        assert [tuple(grad.shape) for grad in grads] == [*shapes.values()]
        assert all(grad.is_contiguous() for grad in grads)
        assert dsink.shape == (0 if given is None else HEADS,)
