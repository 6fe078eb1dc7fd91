"""What happens to a KV cache before attention, in plain torch: new keys and values go in, and
rotary positions are applied. No value is read back, so that it compiles and captures.
"""

import torch
from torch import Tensor


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Writes k and v (B, S, G, dim) behind the tokens that each sequence has in its cache.

    cache_seqlens: (B,) storage position of a sequence's first new token. Caches: rows
    (rows, capacity, G, dim) picked by cache_batch_idx (B,), or pages through block_table.
    """
    batch, seqlen = k.shape[:2]
    position = cache_seqlens[:, None] + torch.arange(seqlen, device=k.device)
    if block_table is None:
        row = torch.arange(batch, device=k.device) if cache_batch_idx is None else cache_batch_idx
        where = (row[:, None].expand(position.shape).long(), position.long())
    else:
        page_size = k_cache.shape[1]
        page = block_table.gather(1, (position // page_size).long())
        where = (page.long(), (position % page_size).long())
    k_cache.index_put_(where, k)
    v_cache.index_put_(where, v)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, start: Tensor, interleaved: bool, advance: bool = True
) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of the first 2 * cos.shape[1] dims of each head.

    x: (B, S, heads, D). cos, sin: (positions, rotary_dim / 2). start: int (B,), the position of
    each sequence's first token; the next ones follow, or have the same if not advance.
    interleaved: pairs are neighbours (GPT-J), else halves (GPT-NeoX). Computed in float32.
    """
    half = cos.shape[1]
    position = start.long()[:, None]
    if advance:
        position = position + torch.arange(x.shape[1], device=x.device)
    c, s = (table[position].float()[:, :, None] for table in (cos, sin))
    turned = x[..., : 2 * half].float()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * c - second * s, first * s + second * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)
