"""Batches of packed queries over pages, as serving engines make them."""

from typing import Any

import torch


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
