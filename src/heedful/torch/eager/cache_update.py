"""The update of a KV cache before attention: it writes new keys and values and applies rotary
positions. It is plain torch, for CPUs and torch.compile, and reads no value back; `cache_step` does
the same on GPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful.core.call.arguments import CacheUpdate
from heedful.core.call.operands import Operands
from heedful.core.call.problem import LATENT_ROW_BYTES
from heedful.torch.base.arrays import dtype_name
from heedful.torch.base.forked import on_own_thread
from heedful.torch.operands.quant import group_scales, pack_latent, packed_values

_USED = Operands._fields.index("seqused_k")
_new = tuple.__new__


def with_used(x: Operands, used: Tensor) -> Operands:
    """x with other lengths, in a fifth of the time of _replace."""
    return _new(Operands, (*x[:_USED], used, *x[_USED + 1 :]))


def used_keys(x: Operands, start: Tensor, new: int) -> Tensor:
    """The number of keys of each sequence after `new` ones are written from row `start` of its
    storage on; 0 or less where `start` is negative."""
    used = torch.where(start < 0, start, start + new) if new else start
    return used if x.leftpad_k is None else used - x.leftpad_k.to(torch.int32)


def update_cache(
    x: Operands, update: CacheUpdate, start: Tensor, advance: bool, sees_values: bool = False
) -> Operands:
    """Writes the new keys and values into the cache, in plain torch; returns x with q rotated.

    start: int32 (B,), the row of the first one in each sequence's storage. advance: whether queries
    have successive positions, or all that of the first new key. sees_values: as in `append_kv`.
    """
    k, v, cos, sin, _, interleaved, _ = update
    if cos is not None:
        position = start + update.position0 if update.position0 else start
        k = rotate(k, cos, sin, position, interleaved)
        x = x._replace(q=rotate(x.q, cos, sin, position, interleaved, advance))
    if is_latent(x.k, k):
        k = v = pack_latent(torch.cat([v, k[..., v.shape[-1] :]], -1))
    k, k_scales = stored(x.k, k, x.k_descale, x.k_shift)
    v, v_scales = stored(x.v, v, x.v_descale, x.v_shift)
    scales = [*k_scales, *v_scales]
    append_kv(x.k, x.v, k, v, start, x.kv_batch_idx, x.block_table, sees_values, scales)
    return x


def is_latent(cache: Tensor, new: Tensor) -> bool:
    """Whether new keys and values become rows of latent vectors, which have both."""
    return cache.dtype == torch.uint8 != new.dtype and cache.shape[-1] == LATENT_ROW_BYTES


def stored(
    cache: Tensor, new: Tensor, scale: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The numbers that a cache stores for new values (B, S, G, dim); and, with groups, the arrays
    of scales and shifts, each with its new entries."""
    if new.dtype == cache.dtype:
        return new, []
    storage = "int4" if cache.dtype == torch.uint8 else dtype_name(cache.dtype)
    if scale is not None and scale.dim() > 2:
        size = new.shape[-1] // scale.shape[-1]
        new_scale, new_shift = group_scales(new, storage, size, shift is not None)
        shifts = [] if shift is None or new_shift is None else [(shift, new_shift)]
        return packed_values(new, storage, new_scale, new_shift), [(scale, new_scale), *shifts]
    batch, _, heads, _ = new.shape
    if scale is None:
        scale = new.new_ones((), dtype=torch.float32)
    factor, add = (
        t if t is None else t.expand(batch, heads)[:, None, :, None] for t in (scale, shift)
    )
    assert factor is not None
    return packed_values(new, storage, factor, add), []


def update_plainly(advance: bool, x: Operands, update: CacheUpdate, start: Tensor) -> Operands:
    """As `update_cache`, on a CPU."""
    return on_own_thread(update_cache, x, update, start, advance, True)


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
    sees_values: bool,
    scales: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Writes k and v (B, S, G, dim) after the tokens that each sequence has in its cache.

    cache_seqlens: (B,) storage row of a sequence's first new token; a sequence of negative length
    gets none. The caches are (rows, capacity, G, dim), with rows chosen by cache_batch_idx (B,), or
    pages found through block_table. Tokens outside of them are dropped. sees_values: whether the
    values of tensors may be read, which neither a graph nor a transform allows. scales: arrays of
    scales and shifts, shaped like the caches, each with its new entries.
    """
    if not (k.numel() and k_cache.numel()):
        return
    batch, seqlen = k.shape[:2]
    position = cache_seqlens.long()[:, None] + torch.arange(seqlen, device=k.device)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    kept = (cache_seqlens[:, None] >= 0) & (position < capacity)
    position = position.clamp(0, capacity - 1)
    if block_table is None:
        row = cache_batch_idx
        if row is None:
            row = torch.arange(batch, device=k.device)
        entry = row[:, None].expand(position.shape).long()
    else:
        entry = block_table.gather(1, position // k_cache.shape[1]).long()
        position = position % k_cache.shape[1]
    last = k_cache.shape[0] - 1
    kept = (kept & (entry >= 0) & (entry <= last)).flatten()
    where = entry.clamp(0, last).flatten(), position.flatten()
    written = ((k_cache, k), (v_cache, v), *scales)
    arrays = tuple(array for array, _ in written)
    tokens = tuple(rows.flatten(0, 1) for _, rows in written)
    if not (sees_values and bool(kept.all())):
        where, tokens = _only_kept(kept, where, tokens, arrays)
    for array, token in zip(arrays, tokens, strict=True):
        array.index_put_(where, token)


def _only_kept(kept: Tensor, where: tuple, tokens: tuple, caches: tuple) -> tuple[tuple, tuple]:
    """Places and tokens, where those that are not `kept` repeat the first kept one. So their number
    does not depend on values. If none is kept, they write what the cache has."""
    # With a dim, since a graph would need the value of an index.
    first = kept.int().argmax(0, keepdim=True)
    places = tuple(torch.where(kept, axis, axis[first]) for axis in where)
    written = []
    for token, cache in zip(tokens, caches, strict=True):
        instead = torch.where(kept.any(), token[first], cache[where[0][first], where[1][first]])
        written.append(torch.where(kept[:, None, None], token, instead))
    return places, tuple(written)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, start: Tensor, interleaved: bool, advance: bool = True
) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of the first 2 * cos.shape[1] dims of each head.

    x: (B, S, heads, D). cos, sin: (positions, rotary_dim / 2). start: int (B,), the position of
    each sequence's first token; the others follow, or, without advance, have the same. interleaved:
    pairs of dims are neighbours (GPT-J), else one of each half (GPT-NeoX). Computed in float32.
    """
    half = cos.shape[1]
    position = start.long()[:, None]
    if advance:
        position = position + torch.arange(x.shape[1], device=x.device)
    # For sequences of negative length, or beyond the storage, any position will do.
    position = position.clamp(0, cos.shape[0] - 1)
    c, s = (table[position].float()[:, :, None] for table in (cos, sin))
    turned = x[..., : 2 * half].float()
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * c - second * s, first * s + second * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)
