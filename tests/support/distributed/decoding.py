"""Steps of decoding whose keys are spread over ranks, beside one rank that has them all."""

from typing import Any

import torch
from torch import Tensor

from heedful import flash_attn_with_kvcache
from heedful.distributed import attention_with_kvcache

HEADS, HEADS_K, DIM, CAPACITY = 8, 2, 16, 128
# Keys of each sequence on each of three ranks; more ranks have as many as the first.
_HELD = [[40, 0, 0, 7], [13, 90, 0, 0], [64, 5, 0, 1]]


def held(count: int) -> Tensor:
    """int32 (ranks, sequences)."""
    return torch.tensor([_HELD[rank % 3] for rank in range(count)], dtype=torch.int32)


def drawn(count: int, tokens: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """What all ranks have together."""
    source, batch = torch.Generator().manual_seed(0), held(count).shape[1]
    shapes = {
        "q": (batch, tokens, HEADS, DIM),
        "k": (batch, tokens, HEADS_K, DIM),
        "v": (batch, tokens, HEADS_K, DIM),
        "caches": (2, count, batch, CAPACITY, HEADS_K, DIM),
    }
    return {
        name: torch.randn(shape, generator=source).to(device, dtype)
        for name, shape in shapes.items()
    }


def one_cache(parts: Tensor) -> Tensor:
    """Each sequence's keys one after the other. parts: (ranks, batch, capacity, heads, dim)."""
    whole = parts.new_zeros((parts.shape[1], len(parts) * CAPACITY, *parts.shape[3:]))
    for row, counts in enumerate(held(len(parts)).T.tolist()):
        keys = torch.cat([part[row, :count] for part, count in zip(parts, counts, strict=True)])
        whole[row, : len(keys)] = keys
    return whole


def paged(cache: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pages of a cache, and their block table, in another order."""
    pages = cache.view(-1, size, *cache.shape[2:])
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(1)).to(cache.device)
    table = torch.argsort(order).int().view(cache.shape[0], -1)
    return pages[order].contiguous(), table


def stepped(
    rank: int,
    count: int,
    tokens: int,
    owner: int | None,
    has_sink: bool,
    pages: int,
    name: str,
    device: str = "cpu",
) -> list[float]:
    """How far out, lse and what is appended are from those of one rank, in units of the dtype's
    rounding of the largest value."""
    dtype = getattr(torch, name)
    x, lengths = drawn(count, tokens, dtype, device), held(count).to(device)
    sink = torch.linspace(-1, 2, HEADS, device=device) if has_sink else None
    whole = [one_cache(parts) for parts in x["caches"]]
    new = {} if owner is None else {"k": x["k"], "v": x["v"]}
    want, want_lse = flash_attn_with_kvcache(
        x["q"].float(),
        *(cache.float() for cache in whole),
        **{side: rows.float() for side, rows in new.items()},
        cache_seqlens=lengths.sum(0).int(),
        causal=owner is not None,
        sink=sink,
        return_softmax_lse=True,
    )
    k_cache, v_cache = mine = [parts[rank].clone() for parts in x["caches"]]
    more: dict[str, Any] = {}
    if pages:
        k_cache, more["block_table"] = paged(k_cache, pages)
        v_cache, _ = paged(v_cache, pages)
    given = new if rank == owner else {}
    out, lse = attention_with_kvcache(
        x["q"],
        k_cache,
        v_cache,
        **given,
        owner=owner,
        cache_seqlens=lengths[rank],
        sink=sink,
        return_lse=True,
        **more,
    )
    assert out.dtype == dtype
    if rank == owner and not pages:
        for cache, rows in zip(mine, (x["k"], x["v"]), strict=True):
            for row, length in enumerate(lengths[rank].tolist()):
                assert torch.equal(cache[row, length : length + tokens], rows[row])
    eps = torch.finfo(dtype).eps
    pairs = (out, want), (lse, want_lse)
    # Rows without keys have -inf in both.
    return [
        float((a.float() - b).nan_to_num(0.0, posinf=9e9, neginf=9e9).abs().max())
        / float(b.nan_to_num(neginf=0.0).abs().max())
        / eps
        for a, b in pairs
    ]
