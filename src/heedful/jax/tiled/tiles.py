"""One sequence of a call in tiles: the code that the tiled forward and backward share.

Everything that a length decides is traced. G KV heads, R query heads of each, M query rows of a
tile, N keys of a tile, D qk dim, E v dim; tiles of queries are (G, R, M, .).
"""

from dataclasses import dataclass, field

import jax
from jax import Array, lax
from jax import numpy as jnp

from heedful.core.base.numbers import FAR
from heedful.core.call.operands import Operands
from heedful.core.call.problem import LATENT_ROWS, AttentionProblem
from heedful.jax.operands.quant import latent_values, unpack_int4
from heedful.jax.tiled.philox import keep_tile

# Sides of a tile of scores. Fixed, so that a sequence's bits do not depend on its batch.
ROWS, KEYS = 128, 256
_HIGHEST = lax.Precision.HIGHEST


def product(equation: str, a: Array, b: Array) -> Array:
    """A float32 product with IEEE terms."""
    return jnp.einsum(equation, a, b, precision=_HIGHEST, preferred_element_type=jnp.float32)


def tile_sizes(problem: AttentionProblem) -> tuple[int, int]:
    """Rows and keys of a tile: of short sequences no more than they have."""
    return max(1, min(ROWS, problem.seqlen_q)), max(1, min(KEYS, problem.seqlen_k))


@dataclass
class Sequence:
    """One sequence b of the batch: where it lies, and how long it is.

    b: int32 (). len_q, len_k: int32 (). q_begin: its first token in storage that is flattened to
    tokens. origin: uint32 (4,), where the call's first score lies, or the problem's.
    """

    problem: AttentionProblem
    x: Operands
    b: Array
    origin: Array | None = None
    len_q: Array = field(init=False)
    len_k: Array = field(init=False)
    q_begin: Array = field(init=False)
    k_begin: Array = field(init=False)

    def __post_init__(self):
        p, x, b = self.problem, self.x, self.b
        self.q_begin, room_q = b * p.seqlen_q, jnp.int32(p.seqlen_q)
        if x.cu_seqlens_q is not None:
            self.q_begin = x.cu_seqlens_q[b]
            room_q = x.cu_seqlens_q[b + 1] - self.q_begin
        pad = jnp.int32(0) if x.leftpad_k is None else x.leftpad_k[b]
        if x.block_table is not None:
            stored, first = x.block_table.shape[1] * p.page_size, jnp.int32(0)
        elif x.cu_seqlens_k is not None:
            first = x.cu_seqlens_k[b]
            stored = x.cu_seqlens_k[b + 1] - first
        else:
            stored = x.k.shape[1]
            row = b if x.kv_batch_idx is None else x.kv_batch_idx[b]
            first = row * x.k.shape[1]
        self.k_begin = first + pad
        room_k = stored - pad
        self.len_q = _used(x.seqused_q, b, room_q, p.seqlen_q)
        self.len_k = _used(x.seqused_k, b, room_k, p.seqlen_k)

    @property
    def offset(self) -> Array:
        """The diagonal's."""
        mask = self.problem.mask
        if self.x.q_offsets is not None:
            return jnp.clip(self.x.q_offsets[self.b], 1 - FAR, FAR - 1)
        shift = jnp.int32(mask.shift)
        return shift + self.len_k - self.len_q if mask.bottom_right else shift

    def rows(self, first, count: int) -> Array:
        """Indices of the queries of a tile."""
        return first + jnp.arange(count, dtype=jnp.int32)

    def query_tokens(self, rows: Array, tokens: int) -> Array:
        """The storage tokens of queries; for those past the end `tokens`, an index that does not
        exist."""
        return jnp.where(rows < self.len_q, self.q_begin + rows, tokens)

    def key_tokens(self, cols: Array, tokens: int) -> Array:
        """The storage tokens of keys; for those past the end `tokens`, an index that does not
        exist."""
        x, where = self.x, self.k_begin + cols
        if x.block_table is not None:
            size = self.problem.page_size
            page = jnp.clip(where // size, 0, x.block_table.shape[1] - 1)
            where = x.block_table[self.b, page] * size + where % size
        return jnp.where((cols < self.len_k) & (where >= 0), where, tokens)

    def key_range(self, first, count: int, tile: int) -> tuple[Array, Array]:
        """The key tiles [begin, end) that any of `count` queries sees by position."""
        mask, off = self.problem.mask, self.offset
        last = jnp.minimum(first + count, self.len_q) - 1
        end, begin = self.len_k, jnp.int32(0)
        if mask.right >= 0:
            end = jnp.clip(last + off + mask.right + 1, 0, self.len_k)
        if mask.left >= 0 and not mask.first:
            begin = jnp.clip(first + off - mask.left, 0, end)
        end = jnp.where(last < first, 0, end)
        if self.x.key_ranges is not None:
            ranges = self._ranges(self.rows(first, count))
            shows = ranges[..., 0] < ranges[..., 1]
            begin = jnp.maximum(begin, jnp.where(shows, ranges[..., 0], self.len_k).min())
            end = jnp.minimum(end, jnp.where(shows, ranges[..., 1], 0).max())
        return begin // tile, jnp.maximum(begin // tile, (end + tile - 1) // tile)

    def query_range(self, first, count: int, tile: int) -> tuple[Array, Array]:
        """The query tiles [begin, end) that see any of `count` keys by position."""
        mask, off = self.problem.mask, self.offset
        last = jnp.minimum(first + count, self.len_k) - 1
        begin, end = jnp.int32(0), self.len_q
        if mask.right >= 0:
            begin = jnp.clip(first - off - mask.right, 0, self.len_q)
        if mask.left >= 0:
            bound = jnp.clip(last - off + mask.left + 1, 0, self.len_q)
            end = jnp.where(first < mask.first, end, bound)
        end = jnp.where(last < first, 0, end)
        return begin // tile, jnp.maximum(begin // tile, (end + tile - 1) // tile)

    def load_rows(self, tensor: Array, rows: Array) -> Array:
        """Rows of a tensor with q's layout, in float32, 0 past the end: (G, R, M, dim)."""
        p, flat = self.problem, tensor.reshape(-1, *tensor.shape[-2:])
        tile = _taken(flat, self.query_tokens(rows, flat.shape[0])).astype(jnp.float32)
        tile = tile.reshape(rows.shape[0], p.heads_k, p.group, tensor.shape[-1])
        return tile.transpose(1, 2, 0, 3)

    def load_row_vector(self, tensor: Array, rows: Array) -> Array:
        """Rows of a float32 array laid out as lse, 0 past the end: (G, R, M)."""
        p = self.problem
        if tensor.ndim == 3:
            vector, where = tensor[self.b], rows
        else:
            vector, where = tensor, self.q_begin + rows
        where = jnp.where(rows < self.len_q, where, vector.shape[-1])
        tile = jnp.take(vector, where, axis=-1, mode="fill", fill_value=0)
        return tile.reshape(p.heads_k, p.group, rows.shape[0])

    def load_keys(self, name: str, cols: Array) -> Array:
        """Keys or values of a tile, as real numbers in float32, 0 past the end: (G, N, dim)."""
        p, x = self.problem, self.x
        stored = self._stored(getattr(x, name), cols)
        if p.kv_dtype == "int4":
            stored = unpack_int4(stored)
        if p.kv_dtype == LATENT_ROWS:
            stored = latent_values(stored)[..., : p.head_dim if name == "k" else p.head_dim_v]
        tile = stored.astype(jnp.float32)
        for what, apply in (("descale", jnp.multiply), ("shift", jnp.add)):
            factor = getattr(x, f"{name}_{what}", None)
            if factor is None:
                continue
            if p.kv_group:
                factor = jnp.repeat(self._stored(factor, cols), p.kv_group, axis=-1)
            else:
                factor = _per_head(factor, self.b, p)[None]
            tile = apply(tile, factor)
        tile = jnp.where((cols < self.len_k)[:, None, None], tile, 0.0)
        return tile.transpose(1, 0, 2)

    def _stored(self, storage: Array, cols: Array) -> Array:
        """(N, G, dim) of a storage (.., tokens, G, dim), 0 past the end."""
        flat = storage.reshape(-1, *storage.shape[-2:])
        return _taken(flat, self.key_tokens(cols, flat.shape[0]))

    def scores(self, rows: Array, cols: Array, q: Array, k: Array) -> tuple[Array, Array | None]:
        """Scores (G, R, M, N), -inf where hidden, and with softcap the tile of tanh. q: multiplied
        by its descale, but not by the scale.
        """
        p, x = self.problem, self.x
        s = product("grmd,gnd->grmn", q, k) * p.scale
        tanh = None
        if p.softcap > 0:
            tanh = jnp.tanh(s / p.softcap)
            s = tanh * p.softcap
        if x.alibi_slopes is not None:
            slopes = jnp.broadcast_to(x.alibi_slopes, (p.batch, p.heads_q))[self.b]
            distance = jnp.abs(rows[:, None] + self.offset - cols[None]).astype(jnp.float32)
            s = s - self._by_group(slopes)[..., None, None] * distance[None, None]
        if x.rel_bias is not None:
            s = s + self._by_group(x.rel_bias[:, self.entries(rows, cols)].astype(jnp.float32))
        if x.bias is not None:
            s = s + self._by_group(self._bias_tile(rows, cols))
        seen = self._seen(rows, cols)[None, None]
        if x.key_ranges is not None:
            ranges, j = self._ranges(rows)[..., None], cols[None, None, None]
            shown = ((ranges[..., 0, :] <= j) & (j < ranges[..., 1, :])).any(-2)
            seen &= self._by_group(shown)
        if x.block_rows is not None:
            seen &= self._by_group(self._listed(rows, cols))
        return jnp.where(seen, s, -jnp.inf), tanh

    def _ranges(self, rows: Array) -> Array:
        """The key_ranges of queries, as pairs: (H or 1, M, pairs, 2); those of the last past it."""
        ranges = self.x.key_ranges
        if ranges.ndim == 2:
            of_batch, rows = ranges[None], self.q_begin + rows
        else:
            of_batch = ranges[self.b if ranges.shape[0] > 1 else 0]
        of_batch = jnp.take(of_batch, rows, axis=1, mode="clip")
        return of_batch.reshape(*of_batch.shape[:2], -1, 2)

    def _listed(self, rows: Array, cols: Array) -> Array:
        """Which keys a block mask shows to the queries: (H or 1, M, N)."""
        lists, bits = self.x.block_rows, self.x.block_bits
        side, tiles = bits.shape[1], max(1, self.x.block_keys.shape[2])
        of_rows = lists[self.b if lists.shape[0] > 1 else 0]
        of_rows = jnp.take(of_rows, rows // side, axis=1, mode="clip")
        pairs = of_rows[..., 2:].reshape(*of_rows.shape[:2], -1, 2)
        used = jnp.arange(pairs.shape[2])[None, None] < of_rows[..., :2].sum(-1, keepdims=True)
        tile = jnp.where(used, pairs[..., 0], tiles)
        h, m, _ = jnp.indices(tile.shape)
        table = jnp.full((*tile.shape[:2], tiles), -2, jnp.int32)
        table = table.at[h, m, tile].set(pairs[..., 1], mode="drop")
        index = jnp.take(table, cols // side, axis=2, mode="clip")
        row, col = (rows % side)[None, :, None], (cols % side)[None, None]
        shown = bits[jnp.maximum(index, 0), row, col // 32] >> (col % 32) & 1
        return (shown != 0) & (index > -2) | (index == -1)

    def _seen(self, rows: Array, cols: Array) -> Array:
        """Which keys the queries see: (M, N)."""
        mask = self.problem.mask
        seen = (rows < self.len_q)[:, None] & (cols < self.len_k)[None]
        distance = cols[None] - rows[:, None] - self.offset
        if mask.right >= 0:
            seen &= distance <= mask.right
        if mask.left >= 0:
            seen &= (distance >= -mask.left) | (cols < mask.first)[None]
        if self.x.tree_mask is not None:
            tree = self.x.tree_mask
            of_batch = tree[self.b if tree.shape[0] > 1 else 0]
            new = cols - (self.len_k - self.len_q)
            told = jnp.take(of_batch, jnp.clip(rows, 0, of_batch.shape[0] - 1), axis=0)
            told = jnp.take(told, jnp.clip(new, 0, of_batch.shape[1] - 1), axis=1)
            seen &= told | (new < 0)[None]
        return seen

    def entries(self, rows: Array, cols: Array) -> Array:
        """Which entry of rel_bias each score of a tile has: (M, N)."""
        count = self.x.rel_bias.shape[1]
        return jnp.clip(rows[:, None] + self.offset - cols[None] + count // 2, 0, count - 1)

    def bias_index(self, rows: Array, cols: Array) -> tuple[Array, ...]:
        """Which elements of the bias (b, h, M, N) a tile has: an index for each dim, which is 0
        where the bias repeats."""
        shape = self.x.bias.shape
        heads = jnp.arange(shape[1], dtype=jnp.int32)
        index = (self.b[None], heads, rows, cols)
        return tuple(
            i if n > 1 or dim == 1 else jnp.zeros(1, jnp.int32)
            for dim, (i, n) in enumerate(zip(index, shape, strict=True))
        )

    def _bias_tile(self, rows: Array, cols: Array) -> Array:
        """(H or 1, M or 1, N or 1) of the bias, float32, 0 past its ends."""
        b, _, m, n = self.bias_index(rows, cols)
        tile = self.x.bias[b[0]]
        if 0 in tile.shape:
            # A tile of no keys has one column.
            tile = jnp.zeros((tile.shape[0], 1, 1), tile.dtype)
        tile = jnp.take(tile, m, axis=1, mode="fill", fill_value=0)
        return jnp.take(tile, n, axis=2, mode="fill", fill_value=0).astype(jnp.float32)

    def _by_group(self, per_head: Array) -> Array:
        """(H or 1, ...) as (G, R, ...) or (1, 1, ...)."""
        p = self.problem
        if per_head.shape[0] == 1 and p.heads_q > 1:
            return per_head[None]
        return per_head.reshape(p.heads_k, p.group, *per_head.shape[1:])

    def query_descale(self) -> Array | None:
        """(G, 1, 1, 1), or None."""
        if self.x.q_descale is None:
            return None
        return _per_head(self.x.q_descale, self.b, self.problem)[..., None, None]

    def kept(self, rows: Array, cols: Array) -> Array:
        """Which probabilities dropout keeps: bool (G, R, M, N)."""
        p, word = self.problem, jnp.uint32
        batch, head, row, column = self._place()
        keep = keep_tile(
            self.x.seed,
            p.dropout_p,
            batch,
            jnp.arange(p.heads_q, dtype=word) + head,
            rows.astype(word) + row,
            cols.astype(word) + column,
        )
        return keep.reshape(p.heads_k, p.group, *keep.shape[1:])

    def _place(self) -> tuple[Array, ...]:
        """uint32 (batch, head, row, column) of its first score in the mask of dropout."""
        p, origin = self.problem, self.origin
        if p.origins:
            batch, head, row, column = self.x.origins[self.b].astype(jnp.uint32)
            return batch, head, row, column * p.origins
        if origin is None:
            origin = jnp.array(p.dropout_origin, jnp.uint32)
        return self.b.astype(jnp.uint32) + origin[0], origin[1], origin[2], origin[3]


def _used(used: Array | None, b: Array, room, most: int) -> Array:
    """The length of a sequence: at least 0, and no more than there is room for."""
    length = room if used is None else jnp.minimum(used[b], room)
    return jnp.clip(length, 0, most).astype(jnp.int32)


def _taken(flat: Array, tokens: Array) -> Array:
    """Tokens of a storage (tokens, heads, dim), zeros for those that it lacks."""
    if not flat.shape[0]:
        return jnp.zeros((tokens.shape[0], *flat.shape[1:]), flat.dtype)
    taken = jnp.take(flat, tokens, axis=0, mode="clip")
    return jnp.where((tokens < flat.shape[0])[:, None, None], taken, jnp.zeros_like(taken))


def _per_head(scale: Array, b: Array, problem: AttentionProblem) -> Array:
    """(G, 1) of a scale of one element or (B, G)."""
    if scale.size == 1 and scale.ndim < 2:
        return jnp.broadcast_to(scale.reshape(1, 1), (problem.heads_k, 1))
    return jnp.broadcast_to(scale, (problem.batch, problem.heads_k))[b][:, None]


def each_sequence(batch: int, body, state):
    """state after body(b, state) of each sequence in turn; body also returns what is stacked."""
    return jax.lax.scan(lambda s, b: body(b, s), state, jnp.arange(batch, dtype=jnp.int32))
