"""Batches of packed queries over pages, as serving engines make them."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from support.captures import graph_capture


def served(
    lens_q: list[int], lens_k: list[int], capacity: int, longest: int, tokens: int = 0
) -> dict[str, Any]:
    """A call over pages of 16 that hold `capacity` keys of each sequence; `tokens` of q in all, of
    which those of no sequence come last. longest: queries that a sequence may have."""
    batch, many = len(lens_q), -(-capacity // 16)
    q = torch.randn(tokens or sum(lens_q), 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(batch * many, 16, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"
    )
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor([0, *lens_q], device="cuda").cumsum(0).int(),
        "cu_seqlens_k": None,
        "max_seqlen_q": longest,
        "max_seqlen_k": capacity,
        "causal": True,
        "block_table": torch.randperm(batch * many, device="cuda").int().view(batch, many),
        "seqused_k": torch.tensor(lens_k, dtype=torch.int32, device="cuda"),
        "return_lse": True,
    }


def replayed(
    call: dict[str, Any], mixes: Sequence[list[int]], step: Callable[[], tuple[Tensor, Tensor]]
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Captures `step` of a call, and replays it three times with each mix, which are the queries of
    its sequences, and other used lengths: (mix, out, lse). Both were NaN before."""
    step()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out, lse = step()
    drawn, most = random.Random(0), call["max_seqlen_k"]
    for mix in [*mixes] * 3:
        used = [max(n, drawn.choice((0, 1, 700, most))) for n in mix]
        call["cu_seqlens_q"].copy_(torch.tensor([0, *mix]).cumsum(0))
        call["seqused_k"].copy_(torch.tensor(used))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        yield mix, out, lse
