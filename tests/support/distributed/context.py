"""Batches whose tokens are spread over ranks, and their results put together again."""

from typing import Any

import torch
import torch.distributed as dist

from heedful.distributed import ContextPlan, attention, plan
from heedful.reference.convert import as_numpy
from support.problems.budget import Results
from support.problems.cases import Case, build

# Documents: one that every rank gets chunks of, one of a single token, none, one at a tile's edge.
LENGTHS = (700, 1, 155, 0, 256)


def packed(**features: Any) -> Case:
    facts = {"heads_q": 8, "heads_k": 2, "head_dim": 16, "causal": True, "seed": 11} | features
    lengths = facts.pop("lengths", LENGTHS)
    longest = max(lengths)
    return Case(
        batch=len(lengths),
        seqlen_q=longest,
        seqlen_k=longest,
        lens_q=lengths,
        lens_k=lengths,
        varlen="qk",
        **facts,
    )


CASES = {
    "causal": packed(),
    "full": packed(causal=False),
    "window": packed(window=(100, 0)),
    "window both ways": packed(causal=False, window=(60, 40)),
    "window to the right": packed(causal=False, window=(-1, 30)),
    "first keys": packed(window=(100, 0, 40), sink=True),
    "sink": packed(sink=True),
    "softcap": packed(softcap=3.0),
    "ALiBi": packed(alibi="h"),
    "ALiBi of a window": packed(alibi="h", causal=False, window=(90, 30)),
    "ALiBi of all keys": packed(alibi="h", causal=False, softcap=3.0),
    "dropout": packed(dropout_p=0.2, window=(300, 0)),
    "bfloat16": packed(dtype="bfloat16", sink=True),
    "a head each": packed(heads_k=8, head_dim_v=16),
    "key ranges": packed(key_ranges=2, sink=True),
}


def planned(case: Case, strategy: str, layout: str) -> ContextPlan:
    """strategy: "copy" is "gather" that copies rows."""
    return plan(
        lengths=case.lens_q,
        heads_q=case.heads_q,
        heads_k=case.heads_k,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v or None,
        dtype=getattr(torch, case.dtype),
        layout=layout,
        strategy="gather" if strategy == "copy" else strategy,
        transport="copy" if strategy == "copy" else "send",
    )


def computed(
    rank: int, count: int, case: Case, strategy: str, layout: str, device: str = "cpu"
) -> Results | None:
    """The whole batch's results, put together from all ranks', on rank 0. device: "cuda" is each
    rank's own."""
    built = build(case, torch.device(device, rank) if device == "cuda" else device)
    made = planned(case, strategy, layout)
    x = built.x
    assert built.dout is not None and built.dlse is not None
    leaves = q, k, v = [made.shard(t).requires_grad_() for t in (x.q, x.k, x.v)]
    sink = None if x.sink is None else x.sink.clone().requires_grad_()
    out, lse = attention(
        q,
        k,
        v,
        made,
        case.dropout_p,
        None,
        case.causal,
        case.window,
        case.softcap,
        None if x.alibi_slopes is None else x.alibi_slopes[0],
        sink=sink,
        key_ranges=None if x.key_ranges is None else made.shard(x.key_ranges),
        dropout_seed=None if x.seed is None else int(x.seed),
        return_lse=True,
    )
    cotangents = [made.shard(built.dout), made.shard(built.dlse, dim=1)]
    wanted = [*leaves] if sink is None else [*leaves, sink]
    grads = torch.autograd.grad([out, lse], wanted, cotangents)
    dsink = grads[3] if sink is not None else None
    if dsink is not None:
        dist.all_reduce(dsink)
    whole = [made.unshard(t) for t in (out, *grads[:3])]
    whole_lse = made.unshard(lse, dim=1)
    if rank:
        return None
    found = dict(zip(("out", "dq", "dk", "dv"), whole, strict=True)) | {"lse": whole_lse}
    return Results(
        **{k: as_numpy(t) for k, t in (found | {"dsink": dsink}).items() if t is not None}
    )
