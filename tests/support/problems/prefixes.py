"""Attention over a shared prefix and a cache, spelled out in float64."""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def whole_prefix(q: Tensor, prefix: Pair, cache: Pair, lengths: list[int]) -> Pair:
    """(out, lse) of causal queries (B, M, H, D) that see all of the prefix (P, G, D), and keys of
    the cache (B, S, G, D) up to their own place counted from each sequence's last key."""
    outs, lses = [], []
    for b, length in enumerate(lengths):
        used = max(length, 0)
        group = q.shape[2] // cache[0].shape[2]
        keys, values = (
            torch.cat([first, own[b, :used]]).double().repeat_interleave(group, 1)
            for first, own in zip(prefix, cache, strict=True)
        )
        scores = torch.einsum("mhd,nhd->hmn", q[b].double(), keys) * q.shape[-1] ** -0.5
        place = torch.arange(used)
        hidden = place > torch.arange(q.shape[1])[:, None] + used - q.shape[1]
        scores[..., prefix[0].shape[0] :].masked_fill_(hidden, -torch.inf)
        outs.append(torch.einsum("hmn,nhd->mhd", scores.softmax(-1), values))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)
