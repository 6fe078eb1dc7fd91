"""Attention by a tiled `lax.scan`: what JAX runs on a CPU. Memory is linear in the lengths.

One sequence after the other, each in tiles of queries and keys, by the online softmax
(FlashAttention-2, Dao 2023). Scores are float32 in natural units; key tiles that no query sees cost
nothing.
"""

from typing import NamedTuple

from jax import Array, lax
from jax import numpy as jnp

from heedful.core.base.far import far_lse
from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.problem import AttentionProblem
from heedful.jax.tiled.philox import keep_scale
from heedful.jax.tiled.tiles import Sequence, each_sequence, product, tile_sizes

_INF = jnp.inf


def forward(
    problem: AttentionProblem, x: Operands, origin: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """out, lse float32 and, if the problem asks, sign-coded probabilities or the largest scores.

    x: as in Operands, but broadcast dims have size 1, and the seed is uint32 (2,), low word first.
    origin: uint32 (4,) in place of the problem's dropout_origin.
    """
    p = problem
    out = jnp.zeros(p.out_shape, p.out_dtype)
    lse = jnp.full(p.lse_shape, -_INF, jnp.float32)
    probs = jnp.zeros(p.probs_shape, p.out_dtype) if p.return_probs else None
    if not (p.batch and p.seqlen_q and x.q.size):
        return out, lse, lse if p.max_scores else probs

    def sequence(b, state):
        seq = Sequence(p, x, b, origin)
        return _forward_of(seq, state), None

    (out, lse), _ = each_sequence(p.batch, sequence, (out, lse))
    if probs is not None and probs.size:
        probs = _probs(p, x, lse, origin)
    if p.max_scores:
        return out, lse, _statistics(p, x._replace(sink=None), lse, origin)[0]
    return out, lse, probs


def _forward_of(seq: Sequence, state):
    """out and lse with the rows of one sequence in place."""
    p = seq.problem
    m_tile, n_tile = tile_sizes(p)

    def query_tile(index, state):
        rows = seq.rows(index * m_tile, m_tile)
        o, lse = _attend(seq, rows, n_tile)
        return _store(seq, rows, state[0], o), _store_vector(seq, rows, state[1], lse)

    tiles = (seq.len_q + m_tile - 1) // m_tile
    return lax.fori_loop(0, tiles, query_tile, state)


def _queries(seq: Sequence, rows: Array) -> Array:
    """A tile of q times its descale."""
    q, descale = seq.load_rows(seq.x.q, rows), seq.query_descale()
    return q if descale is None else q * descale


def _attend(seq: Sequence, rows: Array, n_tile: int) -> tuple[Array, Array]:
    """Output (G, R, M, E) and log-sum-exp (G, R, M) of a tile of queries."""
    p = seq.problem
    q = _queries(seq, rows)
    begin, end = seq.key_range(rows[0], rows.shape[0], n_tile)
    shape = (p.heads_k, p.group, rows.shape[0])
    empty = (
        jnp.full(shape, -_INF, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, p.head_dim_v), jnp.float32),
    )

    def key_tile(index, state):
        cols = index * n_tile + jnp.arange(n_tile, dtype=jnp.int32)
        s, _ = seq.scores(rows, cols, q, seq.load_keys("k", cols))
        m, total, acc = state
        top = jnp.maximum(m, s.max(-1))
        shift = _finite(top)
        e = jnp.exp(s - shift[..., None])
        rescale = jnp.exp(m - shift)
        total = total * rescale + e.sum(-1)
        if p.dropout_p > 0:
            e = jnp.where(seq.kept(rows, cols), e, 0.0)
        values = product("grmn,gne->grme", e, seq.load_keys("v", cols))
        return top, total, acc * rescale[..., None] + values

    if p.num_splits > 1:
        # Splits are merged in order, each with a separate softmax. No split is empty: there are at
        # most as many as tiles. This sequence's tiles alone decide, so that no neighbour changes a
        # bit.
        tiles = end - begin
        each = jnp.maximum(1, (tiles + p.num_splits - 1) // p.num_splits)

        def part(index, state):
            first = begin + index * each
            part_state = lax.fori_loop(first, jnp.minimum(first + each, end), key_tile, empty)
            return _merged(state, part_state)

        state = lax.fori_loop(0, (tiles + each - 1) // each, part, empty)
    else:
        state = lax.fori_loop(begin, end, key_tile, empty)
    if seq.x.sink is not None:
        state = _merged(state, (*_of_sink(seq, shape), jnp.zeros_like(empty[2])))
    m, total, acc = state
    is_empty = total == 0
    total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -_INF, _finite(m) + jnp.log(total))
    return acc * (keep_scale(p.dropout_p) / total)[..., None], lse


def _of_sink(seq: Sequence, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Maximum and sum of the sink alone in each row (G, R, M)."""
    sink = jnp.broadcast_to(seq.x.sink.reshape(*shape[:2], 1), shape)
    return sink, jnp.exp(sink - _finite(sink))


def _merged(one, other):
    """Two states of an online softmax as one: maximum, sum and, if they have it, output."""
    top = jnp.maximum(one[0], other[0])
    a, b = (jnp.exp(state[0] - _finite(top)) for state in (one, other))
    sums = one[1] * a + other[1] * b
    outs = (x * a[..., None] + y * b[..., None] for x, y in zip(one[2:], other[2:], strict=True))
    return (top, sums, *outs)


def _finite(top: Array) -> Array:
    """0 in place of the -inf of a row without keys, so that exp(-inf - it) is 0 and not NaN."""
    return jnp.where(top == -_INF, 0.0, top)


def _store(seq: Sequence, rows: Array, tensor: Array, tile: Array) -> Array:
    """A tensor of q's layout after a tile (G, R, M, dim) is written into it."""
    flat = tensor.reshape(-1, *tensor.shape[-2:])
    where = seq.query_tokens(rows, flat.shape[0])
    heads = tile.transpose(2, 0, 1, 3).reshape(rows.shape[0], *flat.shape[1:])
    stored = flat.at[where].set(heads.astype(flat.dtype), mode="drop", unique_indices=False)
    return stored.reshape(tensor.shape)


def _store_vector(seq: Sequence, rows: Array, tensor: Array, tile: Array) -> Array:
    """An array of lse's layout after a tile (G, R, M) is written into it."""
    flat = tile.reshape(-1, rows.shape[0])
    if tensor.ndim == 2:
        where = seq.query_tokens(rows, tensor.shape[-1])
        return tensor.at[:, where].set(flat, mode="drop")
    where = jnp.where(rows < seq.len_q, rows, tensor.shape[-1])
    return tensor.at[seq.b, :, where].set(flat.T, mode="drop")


class _Softmax(NamedTuple):
    """The vectors from which probabilities are computed again, with the layout of lse: e^(scores -
    reference) times weight. +inf and 1 for rows without keys, whose probabilities are then 0."""

    reference: Array
    weight: Array


def _softmax(p: AttentionProblem, x: Operands, lse: Array, origin: Array | None) -> _Softmax:
    """By lse, and a weight of 1. A float32 lse far from 0 has lost the logarithm of the sum: such
    rows get their maximum, and one over their sum, both from their scores, and times the share of
    these keys where lse is of more."""
    is_far = (jnp.abs(lse) >= far_lse(x.q.dtype.itemsize)) & jnp.isfinite(lse)

    def anew():
        m, total = _statistics(p, x, lse, origin)
        # Rows may see no key here, and keys elsewhere.
        has_keys = is_far & (total > 0)
        m, total = jnp.where(has_keys, m, lse), jnp.where(has_keys, total, 1.0)
        apart = m + jnp.log(total) - lse
        is_all = jnp.abs(apart) <= (jnp.abs(lse) + 1.0) * 2.0**-20
        return m, jnp.where(is_all | ~has_keys, 1.0, jnp.exp(apart)) / total

    reference, weight = lax.cond(is_far.any(), anew, lambda: (lse, jnp.ones_like(lse)))
    return _Softmax(jnp.where(reference == -_INF, _INF, reference), weight)


def _statistics(p: AttentionProblem, x: Operands, lse: Array, origin: Array | None):
    """Maximum and sum of rows, laid out as lse; lse and 1 in tokens of no sequence."""

    def sequence(b, state):
        return _statistics_of(Sequence(p, x, b, origin), state), None

    return each_sequence(p.batch, sequence, (lse, jnp.ones_like(lse)))[0]


def norms(
    p: AttentionProblem, x: Operands, lse: Array, origin: Array | None = None
) -> tuple[Array, Array]:
    """(reference, sum) of each row, float32 and laid out as lse: its exponentials, summed, are
    e^reference times sum. lse and 1 or, where lse is far from 0, maximum and sum."""
    if not (p.batch and p.seqlen_q and x.q.size):
        return lse, jnp.ones_like(lse)
    by = _softmax(p, x, lse, origin)
    return jnp.where(lse == -_INF, lse, by.reference), 1.0 / by.weight


def _statistics_of(seq: Sequence, state):
    """Maximum and sum of rows, laid out as lse, with the rows of one sequence in place."""
    m_tile, n_tile = tile_sizes(seq.problem)

    def query_tile(index, state):
        rows = seq.rows(index * m_tile, m_tile)
        q = _queries(seq, rows)
        begin, end = seq.key_range(rows[0], m_tile, n_tile)
        shape = (seq.problem.heads_k, seq.problem.group, m_tile)

        def key_tile(index, state):
            cols = index * n_tile + jnp.arange(n_tile, dtype=jnp.int32)
            s, _ = seq.scores(rows, cols, q, seq.load_keys("k", cols))
            largest = s.max(-1)
            return _merged(state, (largest, jnp.exp(s - _finite(largest)[..., None]).sum(-1)))

        empty = jnp.full(shape, -_INF, jnp.float32), jnp.zeros(shape, jnp.float32)
        made = lax.fori_loop(begin, end, key_tile, empty)
        if seq.x.sink is not None:
            made = _merged(made, _of_sink(seq, shape))
        m, total = (
            _store_vector(seq, rows, old, vector) for old, vector in zip(state, made, strict=True)
        )
        return m, total

    tiles = (seq.len_q + m_tile - 1) // m_tile
    return lax.fori_loop(0, tiles, query_tile, state)


def _probs(p: AttentionProblem, x: Operands, lse: Array, origin: Array | None) -> Array:
    """Probabilities from the log-sum-exp, negative where dropped: (B, H, Sq, Sk)."""
    rows, cols = (jnp.arange(n, dtype=jnp.int32) for n in (p.seqlen_q, p.seqlen_k))
    by = _softmax(p, x, lse, origin)

    def sequence(b, state):
        seq = Sequence(p, x, b, origin)
        e, _ = _probabilities(seq, rows, cols, by, _queries(seq, rows), seq.load_keys("k", cols))
        e = jnp.where(seq.kept(rows, cols), e, -e)
        return state, e.reshape(p.probs_shape[1:]).astype(p.out_dtype)

    return each_sequence(p.batch, sequence, None)[1]


def _probabilities(seq: Sequence, rows, cols, by: _Softmax, q, k) -> tuple[Array, Array | None]:
    """Normalised probabilities of a tile, 0 where hidden, and with softcap tanh's own tile."""
    s, tanh = seq.scores(rows, cols, q, k)
    reference, weight = (seq.load_row_vector(vector, rows)[..., None] for vector in by)
    return jnp.exp(s - reference) * weight, tanh


def backward(
    problem: AttentionProblem,
    x: Operands,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None = None,
    origin: Array | None = None,
) -> Gradients:
    """Gradients of the inputs from those of out and lse (None is zero), in the dtypes and shapes of
    the inputs; with dbias if problem.bias_grad, drel_bias if problem.rel_bias_grad."""
    p = problem
    wide = (jnp.zeros(t.shape, jnp.float32) for t in x[:3])
    dbias = jnp.zeros(x.bias.shape, jnp.float32) if p.bias_grad else None
    drel_bias = jnp.zeros(x.rel_bias.shape, jnp.float32) if p.rel_bias_grad else None
    dsink = None if x.sink is None else jnp.zeros(x.sink.shape, jnp.float32)
    state = (*wide, dbias, dsink, drel_bias)
    if p.batch and p.seqlen_q and x.q.size:
        by = _softmax(p, x, lse, origin)

        def sequence(b, state):
            seq = Sequence(p, x, b, origin)
            return _Backward(seq, out, by, dout, dlse).of(state), None

        state, _ = each_sequence(p.batch, sequence, state)
    dq, dk, dv, dbias, dsink, drel_bias = state
    dq, dk, dv = (grad.astype(t.dtype) for grad, t in zip((dq, dk, dv), x[:3], strict=True))
    dbias = None if dbias is None else dbias.astype(x.bias.dtype)
    drel_bias = None if drel_bias is None else drel_bias.astype(x.rel_bias.dtype)
    return Gradients(dq, dk, dv, dbias, dsink, drel_bias)


class _Backward:
    """The gradients of one sequence."""

    def __init__(self, seq: Sequence, out, by: _Softmax, dout, dlse):
        self.seq, self.out, self.by, self.dout, self.dlse = seq, out, by, dout, dlse
        self.m_tile, self.n_tile = tile_sizes(seq.problem)
        self.keep_scale = keep_scale(seq.problem.dropout_p)

    def of(self, state):
        """The state with this sequence's gradients added. dk and dv are sums over query tiles, dq
        over key tiles."""
        seq = self.seq
        tiles = (seq.len_k + self.n_tile - 1) // self.n_tile
        dq, dk, dv, dbias, dsink, drel_bias = lax.fori_loop(0, tiles, self._key_tile, state)
        if dsink is not None:
            rows = (seq.len_q + self.m_tile - 1) // self.m_tile
            dsink = lax.fori_loop(0, rows, self._sink_tile, dsink)
        return dq, dk, dv, dbias, dsink, drel_bias

    def _delta(self, rows: Array) -> Array:
        """rowsum(dO * O) - dlse, (G, R, M)."""
        seq = self.seq
        delta = (seq.load_rows(self.out, rows) * seq.load_rows(self.dout, rows)).sum(-1)
        if self.dlse is not None:
            delta = delta - seq.load_row_vector(self.dlse, rows)
        return delta

    def _sink_tile(self, index, dsink):
        rows = self.seq.rows(index * self.m_tile, self.m_tile)
        sink = self.seq.x.sink.reshape(*_heads(self.seq.problem), 1)
        reference, weight = (self.seq.load_row_vector(vector, rows) for vector in self.by)
        # In a row without keys the reference is +inf, and this 0.
        share = jnp.exp(sink - reference) * weight
        share = jnp.where((rows < self.seq.len_q)[None, None], share, 0.0)
        return dsink - (share * self._delta(rows)).sum(-1).reshape(dsink.shape)

    def _key_tile(self, index, state):
        seq, p = self.seq, self.seq.problem
        dq, dk, dv, dbias, dsink, drel_bias = state
        cols = index * self.n_tile + jnp.arange(self.n_tile, dtype=jnp.int32)
        k, v = seq.load_keys("k", cols), seq.load_keys("v", cols)

        def query_tile(index, sums):
            return self._pair(seq.rows(index * self.m_tile, self.m_tile), cols, k, v, sums)

        begin, end = seq.query_range(cols[0], self.n_tile, self.m_tile)
        empty = jnp.zeros_like(k), jnp.zeros_like(v)
        sums = lax.fori_loop(begin, end, query_tile, (dq, *empty, dbias, drel_bias))
        dq, dk_tile, dv_tile, dbias, drel_bias = sums
        dk, dv = self._add_keys(dk, cols, dk_tile), self._add_keys(dv, cols, dv_tile)
        assert p.heads_k == k.shape[0]
        return dq, dk, dv, dbias, dsink, drel_bias

    def _pair(self, rows, cols, k, v, sums):
        """One query tile against one key tile: five products."""
        seq, p = self.seq, self.seq.problem
        dq, dk, dv, dbias, drel_bias = sums
        q, do = seq.load_rows(seq.x.q, rows), seq.load_rows(self.dout, rows)
        e, tanh = _probabilities(seq, rows, cols, self.by, q, k)
        dp = product("grme,gne->grmn", do, v)
        dropped = e
        if p.dropout_p > 0:
            keep = seq.kept(rows, cols)
            dropped, dp = (jnp.where(keep, t * self.keep_scale, 0.0) for t in (e, dp))
        dv = dv + product("grmn,grme->gne", dropped, do)
        ds = e * (dp - self._delta(rows)[..., None])
        if dbias is not None:
            dbias = self._add_bias(dbias, rows, cols, ds)
        if drel_bias is not None:
            drel_bias = self._add_relative(drel_bias, rows, cols, ds)
        if tanh is not None:
            ds = ds * (1.0 - tanh * tanh)
        ds = ds * p.scale
        dk = dk + product("grmn,grmd->gnd", ds, q)
        dq = self._add_rows(dq, rows, product("grmn,gnd->grmd", ds, k))
        return dq, dk, dv, dbias, drel_bias

    def _add_rows(self, dq: Array, rows: Array, tile: Array) -> Array:
        flat = dq.reshape(-1, *dq.shape[-2:])
        where = self.seq.query_tokens(rows, flat.shape[0])
        heads = tile.transpose(2, 0, 1, 3).reshape(rows.shape[0], *flat.shape[1:])
        return flat.at[where].add(heads, mode="drop").reshape(dq.shape)

    def _add_keys(self, grad: Array, cols: Array, tile: Array) -> Array:
        """Sequences may share keys: in pages they do."""
        flat = grad.reshape(-1, *grad.shape[-2:])
        where = self.seq.key_tokens(cols, flat.shape[0])
        return flat.at[where].add(tile.transpose(1, 0, 2), mode="drop").reshape(grad.shape)

    def _add_bias(self, dbias: Array, rows: Array, cols: Array, ds: Array) -> Array:
        """Adds ds (G, R, M, N) to the bias's gradient, summed over the dims that it repeats."""
        ds = ds.reshape(1, -1, *ds.shape[2:])
        for dim in (1, 2, 3):
            if dbias.shape[dim] == 1:
                ds = ds.sum(dim, keepdims=True)
        b, h, m, n = self.seq.bias_index(rows, cols)
        where = b[:, None, None, None], h[:, None, None], m[:, None], n
        return dbias.at[where].add(ds, mode="drop")

    def _add_relative(self, drel_bias: Array, rows: Array, cols: Array, ds: Array) -> Array:
        """Adds ds (G, R, M, N) along its diagonals to the gradient of rel_bias."""
        ds = ds.reshape(drel_bias.shape[0], *ds.shape[2:])[..., ::-1]
        _, m, n = ds.shape
        # A row of n + m elements begins one further than the row before, in rows of one less.
        padded = jnp.pad(ds, ((0, 0), (0, 0), (0, m))).reshape(-1, m * (n + m))
        sums = padded[:, : m * (n + m - 1)].reshape(-1, m, n + m - 1).sum(1)
        count = drel_bias.shape[1]
        least = rows[0] + self.seq.offset - cols[-1] + count // 2
        entries = jnp.clip(least + jnp.arange(n + m - 1), 0, count - 1)
        return drel_bias.at[:, entries].add(sums)


def _heads(p: AttentionProblem) -> tuple[int, int]:
    return p.heads_k, p.group
