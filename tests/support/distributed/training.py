"""A GPT that trains on packed documents, by one rank or with each batch spread over all."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from heedful import flash_attn_varlen_func
from heedful.demo.model import GPT, ModelSize
from heedful.distributed import ContextPlan, attention, plan
from support.runs.ranks import Ranks

VOCABULARY = 48
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Run:
    """size: of the model; documents, longest: of a batch; steps; every: of how many steps a loss is
    kept; order: draws the order in which a batch's documents are packed; fault: "" for none, "leak"
    where documents see those before them, "alone" where ranks do not average gradients."""

    size: ModelSize
    documents: int
    longest: int
    steps: int
    every: int
    order: int = 0
    fault: str = ""
    device: str = "cpu"


def batch_of(run: Run, step: int) -> tuple[list[int], Tensor]:
    """Lengths, and tokens one document after the other. Each repeats a few tokens of its own."""
    drawn = torch.Generator().manual_seed(step)
    documents = []
    for _ in range(run.documents):
        length = int(torch.randint(run.longest // 8, run.longest, (), generator=drawn))
        period = int(torch.randint(3, 12, (), generator=drawn))
        tokens = torch.randint(0, VOCABULARY, (period,), generator=drawn)
        documents.append(tokens.repeat(-(-length // period))[:length])
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(run.order))
    documents = [documents[index] for index in order.tolist()]
    return [len(tokens) for tokens in documents], torch.cat(documents)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x: (1, tokens, heads, dim); angles: (tokens, dim / 2)."""
    cos, sin = (part[None, :, None] for part in (angles.cos(), angles.sin()))
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def loss_of(run: Run, model: GPT, step: int, spread: bool) -> Tensor:
    """Of a whole batch; of a rank's part, scaled so that the mean over ranks is the batch's."""
    lengths, tokens = batch_of(run, step)
    places = torch.cat([torch.arange(n) for n in lengths])
    seen = [sum(lengths)] if run.fault == "leak" else lengths
    labels = torch.roll(tokens, -1)
    labels[torch.tensor(lengths).cumsum(0) - 1] = -100
    made: Any = None
    if spread:
        size = run.size
        dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
        heads: Any = {"heads_q": size.heads, "heads_k": size.heads_k or size.heads}
        made = plan(lengths=seen, head_dim=size.head_dim, dtype=dtype, **heads)
        tokens, labels, places = (made.shard(x) for x in (tokens, labels, places))
    tokens, labels, places = (x.to(run.device) for x in (tokens, labels, places))
    dim = run.size.head_dim
    waves = 1e4 ** (-torch.arange(0, dim, 2, device=run.device) / dim)
    attend = attending(seen, places[:, None] * waves, made, run.device)
    with torch.autocast(run.device, torch.bfloat16, enabled=run.device == "cuda"):
        logits = model(tokens[None], attend)[0]
    total = F.cross_entropy(logits.float(), labels, reduction="sum")
    return total * ((made.ranks if spread else 1) / (sum(lengths) - len(lengths)))


def attending(lengths: list[int], angles: Tensor, made: ContextPlan | None, device: str) -> Any:
    """The model's attention of packed documents."""
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (rotated(x, angles)[0] for x in (q, k))
        q, k = q.to(v.dtype), k.to(v.dtype)
        if made is not None:
            return attention(q, k, v[0], made, causal=True)[None]
        longest = max(lengths)
        out = flash_attn_varlen_func(q, k, v[0], starts, starts, longest, longest, causal=True)
        return out[None]

    return attend


def trained(rank: int, count: int, run: Run, spread: bool) -> list[float]:
    """The losses that are kept. Not spread: this rank computes whole batches."""
    torch.manual_seed(0)
    model = GPT(run.size, VOCABULARY).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    kept = []
    for step in range(run.steps):
        loss = loss_of(run, model, step, spread)
        optimizer.zero_grad()
        loss.backward()
        if spread and run.fault != "alone":
            grads = [x.grad for x in model.parameters() if x.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            parts = (flat / count).split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))
        optimizer.step()
        if step % run.every == run.every - 1:
            mean = loss.detach()
            if spread:
                dist.all_reduce(mean)
                mean /= count
            kept.append(float(mean))
    return kept


def by_themselves(rank: int, count: int, run: Run) -> list[float]:
    """As `trained`, by each rank alone and in another order than others."""
    return trained(rank, count, replace(run, order=run.order * count + rank), False)


def check(ranks: Ranks, run: Run) -> list[float]:
    """Losses over all ranks differ from one's as those of four packing orders do, and faults are
    seen. The losses of one."""
    alone: list[list[float]] = []
    while len(alone) < 4:
        order = len(alone) // len(ranks.processes)
        alone += ranks.run(by_themselves, replace(run, order=order))
    one, bound = alone[0], max(apart(a, b) for a, b in combinations(alone[:4], 2))
    found = {
        fault: apart(ranks.run(trained, replace(run, fault=fault), True)[0], one)
        for fault in ("", "leak", "alone")
    }
    assert found.pop("") <= bound, (found, bound)
    assert min(found.values()) > bound, (found, bound)
    return one


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
