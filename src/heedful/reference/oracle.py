"""Attention and its gradients in NumPy float64, one sequence at a time, as the papers write them.

Forward: s = q k^T, p = softmax(s), o = dropout(p) v (Vaswani et al. 2017). Backward: the row sum
delta and lse in place of the stored softmax (FlashAttention-2, Dao 2023, section 3.1).

B batch, S seqlen, T tokens, H query head, G kv head, M query rows of one sequence, N its keys,
D qk dim, E v dim.
"""

from typing import NamedTuple

import numpy as np

from heedful.core.operands import Gradients, Operands, own_shape
from heedful.core.problem import AttentionProblem
from heedful.reference.philox import keep_mask, keep_scale
from heedful.reference.quant import dequantize, unpack_int4
from heedful.reference.sequences import Sequence, sequences


def forward(
    problem: AttentionProblem, x: Operands
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Output, natural-log LSE and, if problem.return_probs, the sign-coded probabilities.

    x: NumPy arrays laid out as Operands says (see `convert.as_numpy` for torch tensors).

    Returns float64 out (B, Sq, H, E) or (Tq, H, E); lse (B, H, Sq) or (H, Tq), with the sink and
    without the dropout; probs (B, H, Sq, Sk) or None. As in what flash-attn 2.x's tests read, an
    entry of probs is the normalised probability before dropout, negative where it is dropped; keys
    that are masked out, and whatever lies past a sequence's lengths, are 0.

    Raises ValueError where block_table meets kv_batch_idx.
    """
    q_THD = _tokens(x.q, packed=x.q.ndim == 3)
    out_THE = np.zeros((*q_THD.shape[:2], problem.head_dim_v))
    lse_HT = np.full((problem.heads_q, len(q_THD)), -np.inf)
    probs = None
    if problem.return_probs:
        probs = np.zeros((problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k))
    for seq in sequences(problem, x):
        c = _sequence_forward(problem, x, seq)
        rows = slice(seq.q_token, seq.q_token + seq.len_q)
        out_THE[rows] = ((c.p_HMN * c.drop_HMN) @ c.v_HNE).swapaxes(0, 1)
        lse_HT[:, rows] = c.lse_HM
        if probs is not None:
            signed = np.where(c.drop_HMN > 0, c.p_HMN, -c.p_HMN) if problem.dropout_p else c.p_HMN
            probs[seq.batch, :, : seq.len_q, : seq.len_k] = signed
    return out_THE.reshape(*x.q.shape[:-1], problem.head_dim_v), _lse_shaped(problem, lse_HT), probs


def backward(problem: AttentionProblem, x: Operands, dout, dlse=None) -> Gradients:
    """Analytic gradients of sum(out * dout) + sum(lse * dlse).

    dout: as out. dlse: as lse, or None. Rows without keys ignore both, but for the sink.

    Returns float64 gradients of the shapes of q, k and v; dbias if problem.bias_grad, with size 1
    where the bias's stride is 0 or its size 1; dsink (H,) if there is a sink.

    Raises ValueError for quantised inputs, which have no gradient.
    """
    if x.q_descale is not None or x.k_descale is not None or x.v_descale is not None:
        raise ValueError("gradients need q, k and v without descales")
    q_THD = _tokens(x.q, packed=x.q.ndim == 3)
    dout_THE = np.asarray(dout, np.float64).reshape(*q_THD.shape[:2], problem.head_dim_v)
    dlse_shape = (problem.heads_q, len(q_THD))
    if dlse is None:
        dlse_HT = np.zeros(dlse_shape)
    else:
        dlse = np.asarray(dlse, np.float64)
        dlse_HT = dlse if dlse.ndim == 2 else dlse.swapaxes(0, 1).reshape(dlse_shape)
    dq, dk, dv = (np.zeros(a.shape) for a in (x.q, x.k, x.v))
    dq_THD, dk_TGD, dv_TGE = dq.reshape(q_THD.shape), _flat(dk), _flat(dv)
    bias_shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    dbias = np.zeros(bias_shape) if problem.bias_grad else None
    dsink = None if x.sink is None else np.zeros(problem.heads_q)
    for seq in sequences(problem, x):
        c = _sequence_forward(problem, x, seq)
        rows = slice(seq.q_token, seq.q_token + seq.len_q)
        do_HME, dlse_HM1 = dout_THE[rows].swapaxes(0, 1), dlse_HT[:, rows, None]
        dp_HMN = c.drop_HMN * (do_HME @ c.v_HNE.swapaxes(1, 2))
        delta_HM1 = (c.p_HMN * dp_HMN).sum(-1, keepdims=True)
        ds_HMN = c.p_HMN * (dp_HMN - delta_HM1 + dlse_HM1)
        dqk_HMN = ds_HMN * c.slope_HMN
        dq_THD[rows] = (dqk_HMN @ c.k_HND).swapaxes(0, 1)
        dk_HND = dqk_HMN.swapaxes(1, 2) @ c.q_HMD
        dv_HNE = (c.p_HMN * c.drop_HMN).swapaxes(1, 2) @ do_HME
        keys = _key_tokens(seq)
        np.add.at(dk_TGD, keys, _sum_group(problem, dk_HND))
        np.add.at(dv_TGE, keys, _sum_group(problem, dv_HNE))
        if dbias is not None:
            dbias[seq.batch, :, : seq.len_q, : seq.len_k] = ds_HMN
        if dsink is not None:
            sink_H1 = np.asarray(x.sink, np.float64)[:, None]
            p_sink_HM1 = np.exp(sink_H1 - _finite(c.lse_HM))[..., None]
            dsink += (p_sink_HM1 * (dlse_HM1 - delta_HM1)).sum((1, 2))
    if dbias is not None:
        for axis, size in enumerate(own_shape(x.bias.shape, x.bias.strides)):
            if size == 1:
                dbias = dbias.sum(axis, keepdims=True)
    return Gradients(dq, dk, dv, dbias, dsink)


class _SequenceForward(NamedTuple):
    """What forward and backward share: slope is d s / d (q k^T), drop the dropout's factor."""

    q_HMD: np.ndarray
    k_HND: np.ndarray
    v_HNE: np.ndarray
    slope_HMN: np.ndarray | float
    p_HMN: np.ndarray
    lse_HM: np.ndarray
    drop_HMN: np.ndarray | float


def _sequence_forward(problem: AttentionProblem, x: Operands, seq: Sequence) -> _SequenceForward:
    q_HMD, k_HND, v_HNE = _gather(problem, x, seq)
    s_HMN = (q_HMD @ k_HND.swapaxes(1, 2)) * problem.scale
    slope_HMN = problem.scale
    if problem.softcap > 0:
        tanh_HMN = np.tanh(s_HMN / problem.softcap)
        s_HMN = problem.softcap * tanh_HMN
        slope_HMN = problem.scale * (1 - tanh_HMN**2)
    i, j = np.arange(seq.len_q)[:, None], np.arange(seq.len_k)[None, :]
    if x.alibi_slopes is not None:
        slopes = np.asarray(x.alibi_slopes, np.float64)[seq.batch, :, None, None]
        s_HMN = s_HMN - slopes * np.abs(i + problem.mask.offset(seq.len_q, seq.len_k) - j)
    if x.bias is not None:
        full = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        bias = np.broadcast_to(x.bias, full)[seq.batch, :, : seq.len_q, : seq.len_k]
        s_HMN = s_HMN + np.asarray(bias, np.float64)
    s_HMN = np.where(visible(problem, x, seq), s_HMN, -np.inf)
    lse_HM = _logsumexp(s_HMN, x.sink)
    p_HMN = np.exp(s_HMN - _finite(lse_HM)[..., None])
    drop_HMN = 1.0
    if problem.dropout_p > 0:
        sizes = (problem.heads_q, seq.len_q, seq.len_k)
        seed, p = int(np.asarray(x.seed).reshape(-1)[0]), problem.dropout_p
        keep = keep_mask(seed, p, seq.batch, *sizes, problem.dropout_origin)
        drop_HMN = keep * keep_scale(p)
    return _SequenceForward(q_HMD, k_HND, v_HNE, slope_HMN, p_HMN, lse_HM, drop_HMN)


def visible(problem: AttentionProblem, x: Operands, seq: Sequence) -> np.ndarray:
    """Which key each query of one sequence sees, by position and tree_mask: bool (M, N).

    tree_mask: of the last len_q keys, query i sees the c-th iff tree_mask[b, i, c]; it sees all
    keys before those, and the positional mask applies too.
    """
    mask = problem.mask
    i, j = np.arange(seq.len_q)[:, None], np.arange(seq.len_k)[None, :]
    distance = j - i - mask.offset(seq.len_q, seq.len_k)
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


def _gather(problem: AttentionProblem, x: Operands, seq: Sequence):
    """q (H, M, D), k (H, N, D), v (H, N, E) of one sequence: real values, heads repeated."""
    keys, group = _key_tokens(seq), problem.group
    q = _tokens(x.q, packed=x.q.ndim == 3)[seq.q_token : seq.q_token + seq.len_q]
    q = np.asarray(q, np.float64)
    if x.q_descale is not None:
        q = q * np.repeat(np.asarray(x.q_descale, np.float64)[seq.batch], group)[:, None]
    k = _dequantized(problem, x.k, x.k_descale, x.k_shift, seq.batch, keys)
    v = _dequantized(problem, x.v, x.v_descale, x.v_shift, seq.batch, keys)
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))
    return tuple(a.swapaxes(0, 1) for a in (q, k, v))


def _dequantized(problem: AttentionProblem, stored, descale, shift, batch: int, keys):
    """The real values of `keys` (N,) of a storage: (N, G, dim)."""
    values = _flat(stored)[keys]
    if problem.kv_dtype == "int4":
        values = unpack_int4(values)
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


def _logsumexp(s_HMN, sink) -> np.ndarray:
    """Over keys and the sink logit, (H, M); -inf for nothing at all."""
    top = np.max(s_HMN, axis=-1, initial=-np.inf)
    if sink is not None:
        sink_H1 = np.asarray(sink, np.float64)[:, None]
        top = np.maximum(top, sink_H1)
    safe = _finite(top)
    total = np.exp(s_HMN - safe[..., None]).sum(-1)
    if sink is not None:
        total = total + np.exp(sink_H1 - safe)
    with np.errstate(divide="ignore"):
        return safe + np.log(total)


def _finite(a: np.ndarray) -> np.ndarray:
    """-inf, which only a row without keys has, becomes 0: then exp(-inf - 0) = 0, not NaN."""
    return np.where(np.isneginf(a), 0.0, a)


def _sum_group(problem: AttentionProblem, grad_HND) -> np.ndarray:
    """Gradients of the query heads of each kv head added up: (N, G, dim)."""
    _, n, dim = grad_HND.shape
    return grad_HND.reshape(problem.heads_k, problem.group, n, dim).sum(1).swapaxes(0, 1)


def _lse_shaped(problem: AttentionProblem, lse_HT) -> np.ndarray:
    if problem.varlen_q:
        return lse_HT
    return lse_HT.reshape(problem.heads_q, problem.batch, problem.seqlen_q).swapaxes(0, 1)
