"""Attention and its gradients in NumPy float64, one sequence at a time, as the papers write them.

Forward: s = q k^T, p = softmax(s), o = dropout(p) v (Vaswani et al. 2017). Backward: the row sum
delta and lse in place of the stored softmax (FlashAttention-2, Dao 2023, section 3.1).

B batch, S seqlen, T tokens, H query head, G kv head, M query rows of one sequence, N its keys,
D qk dim, E v dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from heedful.core.call.operands import Gradients, Operands, own_shape
from heedful.core.call.problem import LATENT_ROWS, AttentionProblem
from heedful.reference.philox import keep_mask, keep_scale
from heedful.reference.quant import dequantize, unpack_int4, unpack_latent
from heedful.reference.sequences import Sequence, sequences


def forward(
    problem: AttentionProblem, x: Operands
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Output, natural-log LSE and, if the problem asks, the sign-coded probabilities or the largest
    scores.

    x: NumPy arrays laid out as Operands says (see `convert.as_numpy` for torch tensors).

    Returns float64 out (B, Sq, H, E) or (Tq, H, E); lse (B, H, Sq) or (H, Tq), with the sink and
    without the dropout; the largest scores, without the sink, like lse; or probs (B, H, Sq, Sk); or
    None. As in what flash-attn 2.x's tests read, an
    entry of probs is the normalised probability before dropout, negative where it is dropped; keys
    that are masked out, and whatever lies past a sequence's lengths, are 0.

    Raises ValueError where block_table meets kv_batch_idx.
    """
    out = _Forward(problem, x)
    for block in _blocks(problem, x):
        out.add(block)
    return out.results()


def backward(problem: AttentionProblem, x: Operands, dout, dlse=None) -> Gradients:
    """Analytic gradients of sum(out * dout) + sum(lse * dlse).

    dout: as out. dlse: as lse, or None. Rows without keys ignore both, but for the sink.

    Returns float64 gradients of the shapes of q, k and v; dbias if problem.bias_grad, with size 1
    where the bias's stride is 0 or its size 1; dsink (H,) if there is a sink; drel_bias as
    rel_bias, if problem.rel_bias_grad.

    Raises ValueError for quantised inputs, which have no gradient.
    """
    grads = _Backward(problem, x, dout, dlse)
    for block in _blocks(problem, x):
        grads.add(block)
    return grads.results()


def both(problem: AttentionProblem, x: Operands, dout, dlse=None):
    """`forward` and `backward` with the probabilities worked out once."""
    out, grads = _Forward(problem, x), _Backward(problem, x, dout, dlse)
    for block in _blocks(problem, x):
        out.add(block)
        grads.add(block)
    return *out.results(), grads.results()


class _Block(NamedTuple):
    """The heads of some KV heads of one sequence: what forward and backward share.

    heads, kv_heads: which they are. slope is d s / d (q k^T), drop the dropout's factor.
    """

    seq: Sequence
    heads: slice
    kv_heads: slice
    q_HMD: np.ndarray
    k_HND: np.ndarray
    v_HNE: np.ndarray
    slope_HMN: np.ndarray | float
    p_HMN: np.ndarray
    p_sink_HM: np.ndarray | float
    lse_HM: np.ndarray
    max_HM: np.ndarray
    drop_HMN: np.ndarray | float

    @property
    def rows(self) -> slice:
        """Its queries, among the tokens of all sequences."""
        return slice(self.seq.q_token, self.seq.q_token + self.seq.len_q)


class _Forward:
    """The results of a forward, filled block by block."""

    def __init__(self, problem: AttentionProblem, x: Operands):
        self._problem, self._shape = problem, (*x.q.shape[:-1], problem.head_dim_v)
        tokens = len(_tokens(x.q, packed=x.q.ndim == 3))
        self._out_THE = np.zeros((tokens, problem.heads_q, problem.head_dim_v))
        self._lse_HT = np.full((problem.heads_q, tokens), -np.inf)
        self._max_HT = np.full((problem.heads_q, tokens), -np.inf)
        self._probs = None
        if problem.return_probs:
            shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
            self._probs = np.zeros(shape)

    def add(self, c: _Block) -> None:
        out_HME = (c.p_HMN * c.drop_HMN) @ c.v_HNE
        self._out_THE[c.rows, c.heads] = out_HME.swapaxes(0, 1)
        self._lse_HT[c.heads, c.rows] = c.lse_HM
        self._max_HT[c.heads, c.rows] = c.max_HM
        if self._probs is not None:
            dropout = self._problem.dropout_p
            signed = np.where(c.drop_HMN > 0, c.p_HMN, -c.p_HMN) if dropout else c.p_HMN
            self._probs[c.seq.batch, c.heads, : c.seq.len_q, : c.seq.len_k] = signed

    def results(self):
        lse = _lse_shaped(self._problem, self._lse_HT)
        more = self._probs
        if self._problem.max_scores:
            more = _lse_shaped(self._problem, self._max_HT)
        return self._out_THE.reshape(self._shape), lse, more


class _Backward:
    """The gradients, filled block by block."""

    def __init__(self, problem: AttentionProblem, x: Operands, dout, dlse):
        if x.q_descale is not None or x.k_descale is not None or x.v_descale is not None:
            raise ValueError("gradients need q, k and v without descales")
        self._problem, self._x = problem, x
        tokens, heads = len(_tokens(x.q, packed=x.q.ndim == 3)), problem.heads_q
        self._dout_THE = np.asarray(dout, np.float64).reshape(tokens, heads, problem.head_dim_v)
        self._dlse_HT = np.zeros((heads, tokens))
        if dlse is not None:
            dlse = np.asarray(dlse, np.float64)
            flat = dlse if dlse.ndim == 2 else dlse.swapaxes(0, 1)
            self._dlse_HT = flat.reshape(heads, tokens)
        self._dq, self._dk, self._dv = (np.zeros(a.shape) for a in (x.q, x.k, x.v))
        shape = (problem.batch, heads, problem.seqlen_q, problem.seqlen_k)
        self._dbias = np.zeros(shape) if problem.bias_grad else None
        self._dsink = None if x.sink is None else np.zeros(heads)
        self._drel_bias = np.zeros(x.rel_bias.shape) if problem.rel_bias_grad else None

    def add(self, c: _Block) -> None:
        do_HME = self._dout_THE[c.rows, c.heads].swapaxes(0, 1)
        dlse_HM1 = self._dlse_HT[c.heads, c.rows, None]
        dp_HMN = c.drop_HMN * (do_HME @ c.v_HNE.swapaxes(1, 2))
        delta_HM1 = (c.p_HMN * dp_HMN).sum(-1, keepdims=True)
        ds_HMN = c.p_HMN * (dp_HMN - delta_HM1 + dlse_HM1)
        dqk_HMN = ds_HMN * c.slope_HMN
        dq_THD = _tokens(self._dq, packed=self._dq.ndim == 3)
        dq_THD[c.rows, c.heads] = (dqk_HMN @ c.k_HND).swapaxes(0, 1)
        dk_HND = dqk_HMN.swapaxes(1, 2) @ c.q_HMD
        dv_HNE = (c.p_HMN * c.drop_HMN).swapaxes(1, 2) @ do_HME
        keys = _key_tokens(c.seq)
        for grad, one_HND in ((self._dk, dk_HND), (self._dv, dv_HNE)):
            np.add.at(_flat(grad)[:, c.kv_heads], keys, _sum_group(self._problem, one_HND))
        if self._dbias is not None:
            self._dbias[c.seq.batch, c.heads, : c.seq.len_q, : c.seq.len_k] = ds_HMN
        if self._drel_bias is not None:
            entries_MN = entries_of(self._problem, self._x, c.seq)
            np.add.at(self._drel_bias[c.heads].T, entries_MN, np.moveaxis(ds_HMN, 0, -1))
        if self._dsink is not None:
            of_row_HM = c.p_sink_HM * (dlse_HM1 - delta_HM1)[..., 0]
            self._dsink[c.heads] += of_row_HM.sum(1)

    def results(self) -> Gradients:
        dbias = self._dbias
        if dbias is not None:
            for axis, size in enumerate(own_shape(self._x.bias.shape, self._x.bias.strides)):
                if size == 1:
                    dbias = dbias.sum(axis, keepdims=True)
        return Gradients(self._dq, self._dk, self._dv, dbias, self._dsink, self._drel_bias)


# Scores of a block: few enough that its arrays stay in a core's cache.
_BLOCK_SCORES = 1 << 18


def _blocks(problem: AttentionProblem, x: Operands) -> Iterator[_Block]:
    """Every sequence and head once, as many KV heads at a time as a cache holds."""
    for seq in sequences(problem, x):
        shared = (visible(problem, x, seq), *_gather(problem, x, seq))
        scores = max(1, problem.group * seq.len_q * seq.len_k)
        count = max(1, _BLOCK_SCORES // scores)
        for first in range(0, problem.heads_k, count):
            kv_heads = slice(first, min(first + count, problem.heads_k))
            yield _block(problem, x, seq, kv_heads, *shared)


def _block(problem: AttentionProblem, x: Operands, seq: Sequence, kv_heads: slice, seen, q, k, v):
    """A block of `_blocks`. seen (M, N); q (H, M, D), k (G, N, D), v (G, N, E) of all heads."""
    heads = slice(kv_heads.start * problem.group, kv_heads.stop * problem.group)
    q_HMD = q[heads]
    k_HND, v_HNE = (np.repeat(a[kv_heads], problem.group, axis=0) for a in (k, v))
    s_HMN = (q_HMD @ k_HND.swapaxes(1, 2)) * problem.scale
    slope_HMN = problem.scale
    if problem.softcap > 0:
        tanh_HMN = np.tanh(s_HMN / problem.softcap)
        s_HMN = problem.softcap * tanh_HMN
        slope_HMN = problem.scale * (1 - tanh_HMN**2)
    i, j = np.arange(seq.len_q)[:, None], np.arange(seq.len_k)[None, :]
    if x.alibi_slopes is not None:
        slopes = np.asarray(x.alibi_slopes, np.float64)[seq.batch, heads, None, None]
        s_HMN = s_HMN - slopes * np.abs(i + seq.offset - j)
    if x.rel_bias is not None:
        s_HMN = s_HMN + np.asarray(x.rel_bias, np.float64)[heads][:, entries_of(problem, x, seq)]
    if x.bias is not None:
        full = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        bias = np.broadcast_to(x.bias, full)[seq.batch, heads, : seq.len_q, : seq.len_k]
        if bias.dtype == bool:
            seen = seen & bias
        else:
            s_HMN = s_HMN + np.asarray(bias, np.float64)
    if x.key_ranges is not None:
        seen = seen & in_ranges(x, seq)[heads if x.key_ranges.ndim == 4 else ...]
    if x.block_rows is not None:
        seen = seen & in_blocks(x, seq)[heads]
    s_HMN = np.where(seen, s_HMN, -np.inf)
    softmax = _softmax(s_HMN, None if x.sink is None else x.sink[heads])
    max_HM = s_HMN.max(-1, initial=-np.inf)
    drop_HMN = 1.0
    if problem.dropout_p > 0:
        sizes = (heads.stop - heads.start, seq.len_q, seq.len_k)
        seed, p = int(np.asarray(x.seed).reshape(-1)[0]), problem.dropout_p
        batch, head, row, col = seq.origin
        origin = (batch, head + heads.start, row, col)
        drop_HMN = keep_mask(seed, p, 0, *sizes, origin) * keep_scale(p)
    return _Block(seq, heads, kv_heads, q_HMD, k_HND, v_HNE, slope_HMN, *softmax, max_HM, drop_HMN)


def visible(problem: AttentionProblem, x: Operands, seq: Sequence) -> np.ndarray:
    """Which key each query of one sequence sees, by position and tree_mask: bool (M, N).

    tree_mask: of the last len_q keys, query i sees the c-th iff tree_mask[b, i, c]; it sees all
    keys before those, and the positional mask applies too.
    """
    mask = problem.mask
    i, j = np.arange(seq.len_q)[:, None], np.arange(seq.len_k)[None, :]
    distance = j - i - seq.offset
    seen = np.ones(distance.shape, bool)
    if mask.left >= 0:
        seen &= (distance >= -mask.left) | (j < mask.first)
    if mask.right >= 0:
        seen &= distance <= mask.right
    if x.tree_mask is not None:
        new = j - (seq.len_k - seq.len_q)
        tree = np.asarray(x.tree_mask)[seq.batch if len(x.tree_mask) > 1 else 0]
        seen &= (new < 0) | tree[i, np.maximum(new, 0)]
    return seen


def entries_of(problem: AttentionProblem, x: Operands, seq: Sequence) -> np.ndarray:
    """Which entry of rel_bias each score of one sequence has: int (M, N). Query i and key j have
    that of i + off - j, counted from the middle one, R // 2 of R; the first and the last stand for
    all before and after."""
    last = x.rel_bias.shape[1] - 1
    i, j = np.arange(seq.len_q)[:, None], np.arange(seq.len_k)[None, :]
    off = seq.offset
    return np.clip(i + off - j + (last + 1) // 2, 0, last)


def in_ranges(x: Operands, seq: Sequence) -> np.ndarray:
    """Which key each query of one sequence sees by key_ranges: bool (H, M, N), or (1, M, N) of
    packed sequences. A row of (a, b) or (a, b, c, d) shows keys j with a <= j < b or c <= j < d."""
    if x.key_ranges.ndim == 2:
        ranges = np.asarray(x.key_ranges)[None, seq.q_token : seq.q_token + seq.len_q]
    else:
        ranges = np.asarray(x.key_ranges)[seq.batch, :, : seq.len_q]
    j = np.arange(seq.len_k)
    pairs = (ranges[..., None, i : i + 2] for i in range(0, ranges.shape[-1], 2))
    shown = [(pair[..., 0] <= j) & (j < pair[..., 1]) for pair in pairs]
    return np.logical_or.reduce(shown)


def in_blocks(x: Operands, seq: Sequence) -> np.ndarray:
    """Which key each query of one sequence sees by a block mask: bool (H, M, N). A list of a tile
    of queries has tiles of keys: those with an index show what bits of that index say, the others
    all of their keys; tiles that it lacks show none."""
    lists, words = np.asarray(x.block_rows)[seq.batch], np.asarray(x.block_bits)
    (heads, tiles, _), (_, side, _), tiles_k = lists.shape, words.shape, x.block_keys.shape[2]
    bits = (words[..., None] >> np.arange(32) & 1).reshape(-1, side, side) != 0
    shown = np.zeros((heads, tiles, side, tiles_k, side), bool)
    for h, m in np.ndindex(heads, tiles):
        for n, index in lists[h, m, 2:].reshape(-1, 2)[: lists[h, m, :2].sum()]:
            shown[h, m, :, n] = bits[index] if index >= 0 else True
    return shown.reshape(heads, tiles * side, tiles_k * side)[:, : seq.len_q, : seq.len_k]


def _gather(problem: AttentionProblem, x: Operands, seq: Sequence):
    """q (H, M, D), k (G, N, D), v (G, N, E) of one sequence: real values."""
    keys = _key_tokens(seq)
    q = _tokens(x.q, packed=x.q.ndim == 3)[seq.q_token : seq.q_token + seq.len_q]
    q = np.asarray(q, np.float64)
    if x.q_descale is not None:
        q = q * np.repeat(np.asarray(x.q_descale, np.float64)[seq.batch], problem.group)[:, None]
    k = _dequantized(problem, x.k, x.k_descale, x.k_shift, seq.batch, keys)
    v = _dequantized(problem, x.v, x.v_descale, x.v_shift, seq.batch, keys)
    # Rows of latent vectors have columns that are key alone.
    v = v[..., : problem.head_dim_v]
    return tuple(a.swapaxes(0, 1) for a in (q, k, v))


def _dequantized(problem: AttentionProblem, stored, descale, shift, batch: int, keys):
    """The real values of `keys` (N,) of a storage: (N, G, dim)."""
    values = _flat(stored)[keys]
    if problem.kv_dtype == "int4":
        values = unpack_int4(values)
    if problem.kv_dtype == LATENT_ROWS:
        values = unpack_latent(values)
    pick = (lambda a: _flat(a)[keys]) if problem.kv_group else (lambda a: a[batch])
    descale, shift = (None if a is None else pick(a) for a in (descale, shift))
    return dequantize(values, descale, shift, problem.kv_group)


def _key_tokens(seq: Sequence) -> np.ndarray:
    """The storage token of every key of a sequence, (N,)."""
    runs = [np.arange(token, token + count) for token, count in seq.k_spans]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


def _tokens(array, packed: bool) -> np.ndarray:
    """(T, heads, dim) of a packed or a (B, S, heads, dim) array."""
    return array if packed else array.reshape(-1, *array.shape[2:])


def _flat(array) -> np.ndarray:
    """The tokens of a key storage: packed (T, G, dim), or (B, S, G, dim), or pages."""
    return _tokens(array, packed=array.ndim == 3)


def _softmax(s_HMN, sink) -> tuple[np.ndarray, np.ndarray | float, np.ndarray]:
    """Probabilities of keys (H, M, N) and of the sink logit (H, M), 0 without one; lse (H, M), -inf
    for nothing at all. By maximum and sum: at 1e30 even float64 loses the sum's logarithm."""
    top = np.max(s_HMN, axis=-1, initial=-np.inf)
    sink_H1 = None if sink is None else np.asarray(sink, np.float64)[:, None]
    if sink_H1 is not None:
        top = np.maximum(top, sink_H1)
    safe = _finite(top)
    p_HMN = np.exp(s_HMN - safe[..., None])
    total, p_sink_HM = p_HMN.sum(-1), 0.0
    if sink_H1 is not None:
        p_sink_HM = np.exp(sink_H1 - safe)
        total = total + p_sink_HM
    with np.errstate(divide="ignore"):
        lse_HM = safe + np.log(total)
    some_HM = np.where(total > 0, total, 1.0)
    return p_HMN / some_HM[..., None], p_sink_HM / some_HM, lse_HM


def _finite(a: np.ndarray) -> np.ndarray:
    """-inf, which only a row without keys has, becomes 0: then exp(-inf - 0) = 0, not NaN."""
    return np.where(np.isneginf(a), 0.0, a)


def _sum_group(problem: AttentionProblem, grad_HND) -> np.ndarray:
    """Gradients of the query heads of each kv head added up: (N, G, dim)."""
    heads, n, dim = grad_HND.shape
    grouped = grad_HND.reshape(heads // problem.group, problem.group, n, dim)
    return grouped.sum(1).swapaxes(0, 1)


def _lse_shaped(problem: AttentionProblem, lse_HT) -> np.ndarray:
    if problem.varlen_q:
        return lse_HT
    return lse_HT.reshape(problem.heads_q, problem.batch, problem.seqlen_q).swapaxes(0, 1)
