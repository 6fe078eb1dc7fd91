"""What happens to a KV cache before attention: new keys and values go in, and rotary positions are
applied. On a GPU by two programs; elsewhere, and for torch.compile, in plain torch. Neither reads a
value back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from heedful.core.arrays import ArraySpec
from heedful.core.call import CacheUpdate
from heedful.core.operands import Operands
from heedful.core.plan import Plan
from heedful.launch.bind import portable_cache
from heedful.torch.adapt import dense_rows
from heedful.torch.arrays import array_spec
from heedful.torch.execute import Executable, address_of, allocator, current_device
from heedful.torch.forked import on_own_thread

_USED = Operands._fields.index("seqused_k")
_TABLES = "rotary_cos", "rotary_sin"
# Names, as the programs know them, of operands, what an update holds, the start and the lengths.
_APPENDED = {"k": "k_new", "v": "v_new", "cache_seqlens": ""}
_GIVEN = (
    *Operands._fields,
    *[_APPENDED.get(name, name) for name in CacheUpdate._fields],
    "cache_seqlens",
    "seqused",
)
_new = tuple.__new__


def with_used(x: Operands, used: Tensor) -> Operands:
    """x with other lengths: a fifth of the time of _replace."""
    return _new(Operands, (*x[:_USED], used, *x[_USED + 1 :]))


def used_keys(x: Operands, start: Tensor, new: int) -> Tensor:
    """Keys that each sequence has once `new` ones are written from `start` in its storage on; none,
    0 or less, where `start` is negative."""
    used = torch.where(start < 0, start, start + new) if new else start
    return used if x.leftpad_k is None else used - x.leftpad_k


def update_cache(
    x: Operands, update: CacheUpdate, start: Tensor, advance: bool, sees_values: bool = False
) -> Operands:
    """Writes the new keys and values into the cache, in plain torch; returns x with q rotated.

    start: int32 (B,), where they go in each sequence's storage. advance: whether queries have a
    position each, or all that of the first new key. sees_values: as `append_kv` has it.
    """
    k, v, cos, sin, _, interleaved, _ = update
    if cos is not None:
        position = start + update.position0 if update.position0 else start
        k = rotate(k, cos, sin, position, interleaved)
        x = x._replace(q=rotate(x.q, cos, sin, position, interleaved, advance))
    append_kv(x.k, x.v, k, v, start, x.kv_batch_idx, x.block_table, sees_values)
    return x


def updater(x: Operands, update: CacheUpdate, advance: bool, plan: Plan):
    """What changes the cache for one kind of call: a function of (x, update, start)."""
    if plan.device.vendor == "cpu":
        return partial(_update_plainly, advance)
    return DeviceUpdate(x, update, advance, plan.device.arch)


def _update_plainly(advance: bool, x: Operands, update: CacheUpdate, start: Tensor) -> Operands:
    return on_own_thread(update_cache, x, update, start, advance, True)


class DeviceUpdate:
    """As `update_cache`, for one kind of call on one GPU; compiles when it is made. It also counts
    the keys that there are then, which takes torch a launch of its own."""

    def __init__(self, x: Operands, update: CacheUpdate, advance: bool, arch: str):
        self._new_used = allocator((x.q.shape[0],), torch.int32, x.q.device)
        self._new_rotated = allocator(x.q.shape, x.q.dtype, x.q.device)
        self._index = x.q.device.index
        interleaved, position0 = bool(update.rotary_interleaved), update.position0
        start = x.q.new_empty(x.q.shape[0], dtype=torch.int32)
        tensors = _named(x, update, start, start)
        self._pick = _picker((*x, *update, start, start), tensors)
        self._appends, self._turns = bool(update.k.numel()), bool(x.q.numel())
        buffers = {name: array_spec(tensor) for name, tensor in tensors.items()}
        page_size = x.k.shape[1] if x.block_table is not None else 0
        program = portable_cache.append_kv(buffers, page_size, interleaved, position0)
        self._append = Executable.of(program, arch, x.q.device, list(tensors))
        self._rotate = None
        if update.rotary_cos is not None:
            turned = {name: buffers[name] for name in ("cache_seqlens", "rotary_cos", "rotary_sin")}
            turned["q"] = array_spec(dense_rows(x.q))
            turned["rotated"] = ArraySpec.contiguous(x.q.shape, turned["q"].dtype)
            program = portable_cache.rotary(turned, interleaved, advance, position0)
            self._rotate = Executable.of(program, arch, x.q.device, list(turned))
            self._tables = tuple([list(tensors).index(name) for name in _TABLES])

    def __call__(self, x: Operands, update: CacheUpdate, start: Tensor) -> Operands:
        if current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(x, update, start)
        used, pick = self._new_used(), self._pick
        if pick is None:
            tensors = tuple(_named(x, update, start, used).values())
        else:
            tensors = pick((*x, *update, start, used))
        if self._appends:
            self._append.run([*map(address_of, tensors)])
        else:
            used = used_keys(x, start, 0)
        if self._rotate is None or not self._turns:
            return with_used(x, used)
        rotated = self._new_rotated()
        cos, sin = self._tables
        turned = start, tensors[cos], tensors[sin], dense_rows(x.q), rotated
        self._rotate.run([*map(address_of, turned)])
        return _new(Operands, (rotated, *x[1:_USED], used, *x[_USED + 1 :]))


def _picker(given: Sequence, tensors: dict[str, Tensor]) -> Callable[[tuple], tuple] | None:
    """What picks the tensors, as `_named` has them, from what is given as `_GIVEN` says; None where
    some are copies."""
    places = [_GIVEN.index(name) for name in tensors]
    pairs = zip(places, tensors.values(), strict=True)
    return itemgetter(*places) if all([given[place] is t for place, t in pairs]) else None


def _named(x: Operands, update: CacheUpdate, start: Tensor, used: Tensor) -> dict[str, Tensor]:
    """Tensors by the names that the programs know, rows of the new ones contiguous."""
    tensors = {"k_new": dense_rows(update.k), "v_new": dense_rows(update.v), "k": x.k, "v": x.v}
    tensors |= {"cache_seqlens": start, "seqused": used}
    if update.rotary_cos is not None:
        tensors["rotary_cos"] = update.rotary_cos.contiguous()
        tensors["rotary_sin"] = update.rotary_sin.contiguous()
    if x.block_table is not None:
        tensors["block_table"] = x.block_table
    if x.kv_batch_idx is not None:
        tensors["kv_batch_idx"] = x.kv_batch_idx
    if x.leftpad_k is not None:
        tensors["leftpad_k"] = dense_rows(x.leftpad_k)
    return tensors


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
    sees_values: bool,
) -> None:
    """Writes k and v (B, S, G, dim) behind the tokens that each sequence has in its cache.

    cache_seqlens: (B,) storage position of a sequence's first new token; a sequence of negative
    length gets none. Caches: rows (rows, capacity, G, dim) picked by cache_batch_idx (B,), or pages
    through block_table. What would lie outside of them is dropped. sees_values: whether tensors may
    be looked into, which neither a graph nor a transform allows.
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
    tokens = k.flatten(0, 1), v.flatten(0, 1)
    if not (sees_values and bool(kept.all())):
        where, tokens = _only_kept(kept, where, tokens, (k_cache, v_cache))
    k_cache.index_put_(where, tokens[0])
    v_cache.index_put_(where, tokens[1])


def _only_kept(kept: Tensor, where: tuple, tokens: tuple, caches: tuple) -> tuple[tuple, tuple]:
    """Places and tokens in which those that are not `kept` repeat the first that is. So many are
    written as there are, without a look at how many that is. If none is kept, they write what is
    there."""
    # With a dim, or a graph would want to know its number.
    first = kept.int().argmax(0, keepdim=True)
    places = tuple(torch.where(kept, axis, axis[first]) for axis in where)
    found = []
    for token, cache in zip(tokens, caches, strict=True):
        instead = torch.where(kept.any(), token[first], cache[where[0][first], where[1][first]])
        found.append(torch.where(kept[:, None, None], token, instead))
    return places, tuple(found)


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
    # Sequences of negative length, or beyond the storage, have no position: any will do.
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
