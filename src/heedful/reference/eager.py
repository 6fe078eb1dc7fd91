"""The eager twin: attention as plain PyTorch computes it in dtype T, for error budgets.

Products and sums inside a matmul are float32; every intermediate that eager code would store
(scores, probabilities, outputs, their gradients) is rounded to T. Formulas and dimension key are
the oracle's.

`far_scores` is for rows whose scores T cannot distinguish or represent: scores then stay in
float32, and probabilities of a row with a large lse are computed from its maximum and sum, since a
float32 lse of 1e9 has lost the logarithm of the sum.

fp8 inputs: T is bfloat16, and probabilities are rounded to e4m3 scaled by that type's maximum.
Quantised keys and values are dequantised to T first.
"""

from typing import NamedTuple

import numpy as np
import torch

from heedful.core.base.far import far_lse
from heedful.core.call.operands import Gradients, Operands, own_shape
from heedful.core.call.problem import LATENT_ROWS, AttentionProblem
from heedful.reference import oracle
from heedful.reference.convert import as_numpy
from heedful.reference.philox import keep_mask, keep_scale
from heedful.reference.quant import unpack_int4, unpack_latent
from heedful.reference.sequences import Sequence, sequences

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def forward(
    problem: AttentionProblem, x: Operands, far_scores: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As `oracle.forward`, on torch tensors: out and probs in T, lse and scores float32."""
    twin = twin_dtype(x.q.dtype)
    q_THD = _flat(x.q)
    out_THE = q_THD.new_zeros((*q_THD.shape[:2], problem.head_dim_v), dtype=twin)
    lse_HT = torch.full((problem.heads_q, len(q_THD)), -torch.inf, device=x.q.device)
    probs, max_HT = None, torch.full_like(lse_HT, -torch.inf)
    if problem.return_probs:
        shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        probs = out_THE.new_zeros(shape)
    for seq in sequences(problem, x):
        c = _sequence_forward(problem, x, seq, far_scores)
        rows = slice(seq.q_token, seq.q_token + seq.len_q)
        out_THE[rows] = c.out_HME.transpose(0, 1)
        lse_HT[:, rows] = c.lse_HM
        max_HT[:, rows] = c.max_HM
        if probs is not None:
            signed = torch.where(c.drop_HMN > 0, c.p_HMN, -c.p_HMN)
            probs[seq.batch, :, : seq.len_q, : seq.len_k] = signed
    more = _lse_shaped(problem, max_HT) if problem.max_scores else probs
    return out_THE.reshape(*x.q.shape[:-1], problem.head_dim_v), _lse_shaped(problem, lse_HT), more


def backward(
    problem: AttentionProblem, x: Operands, dout, dlse=None, far_scores: bool = False
) -> Gradients:
    """As `oracle.backward`, on torch tensors: gradients in the dtypes of their inputs."""
    dout_THE = _flat(dout)
    dlse_HT = torch.zeros(problem.heads_q, len(dout_THE), device=x.q.device)
    if dlse is not None:
        dlse_HT = dlse if dlse.ndim == 2 else dlse.transpose(0, 1).reshape(dlse_HT.shape)
    dq, dk, dv = (torch.zeros(a.shape, dtype=a.dtype, device=a.device) for a in (x.q, x.k, x.v))
    dq_THD, dk_TGD, dv_TGE = _flat(dq), _flat(dk), _flat(dv)
    full = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    ds_all = torch.zeros(full, device=dq.device) if problem.bias_grad else None
    dsink = None if x.sink is None else torch.zeros_like(x.sink)
    drel_bias = None
    if problem.rel_bias_grad:
        drel_bias = torch.zeros_like(x.rel_bias, dtype=torch.float32)
    for seq in sequences(problem, x):
        c = _sequence_forward(problem, x, seq, far_scores)
        rows = slice(seq.q_token, seq.q_token + seq.len_q)
        do_HME, dlse_HM1 = dout_THE[rows].transpose(0, 1), dlse_HT[:, rows, None]
        dp_HMN = _matmul(do_HME, c.v_HNE.mT) * c.drop_HMN
        delta_HM1 = (c.out_HME.float() * do_HME.float()).sum(-1, keepdim=True)
        ds_HMN = (c.p_HMN.float() * (dp_HMN.float() - delta_HM1 + dlse_HM1)).to(dq.dtype)
        dqk_HMN = (ds_HMN * c.slope_HMN).to(dq.dtype)
        dq_THD[rows] = _matmul(dqk_HMN, c.k_HND).transpose(0, 1)
        keys = _key_tokens(seq, dq.device)
        dk_HND = _matmul(dqk_HMN.mT, c.q_HMD)
        dv_HNE = _matmul((c.p_HMN * c.drop_HMN).mT, do_HME)
        dk_TGD.index_add_(0, keys, _sum_group(problem, dk_HND))
        dv_TGE.index_add_(0, keys, _sum_group(problem, dv_HNE))
        if ds_all is not None:
            ds_all[seq.batch, :, : seq.len_q, : seq.len_k] = ds_HMN
        if drel_bias is not None:
            entries = _entries(problem, x, seq).flatten()
            drel_bias.index_add_(1, entries, ds_HMN.float().flatten(1))
        if x.sink is not None and dsink is not None:
            dsink += (c.p_sink_HM1 * (dlse_HM1 - delta_HM1)).sum((1, 2))
    dbias = None if ds_all is None else _reduced(ds_all, x.bias)
    if drel_bias is not None and x.rel_bias is not None:
        drel_bias = drel_bias.to(x.rel_bias.dtype)
    return Gradients(dq, dk, dv, dbias, dsink, drel_bias)


class _SequenceForward(NamedTuple):
    """The part that forward and backward share; as in the oracle."""

    q_HMD: torch.Tensor
    k_HND: torch.Tensor
    v_HNE: torch.Tensor
    slope_HMN: torch.Tensor | float
    p_HMN: torch.Tensor
    p_sink_HM1: torch.Tensor | float  # 0 without a sink
    lse_HM: torch.Tensor
    max_HM: torch.Tensor
    drop_HMN: torch.Tensor
    out_HME: torch.Tensor


def _sequence_forward(
    problem: AttentionProblem, x: Operands, seq: Sequence, far_scores: bool
) -> _SequenceForward:
    q_HMD, k_HND, v_HNE = _gather(problem, x, seq)
    twin, device = twin_dtype(x.q.dtype), x.q.device
    stored = torch.float32 if far_scores else twin
    s_HMN = _matmul(q_HMD, k_HND.mT, stored) * problem.scale
    slope_HMN = problem.scale
    if problem.softcap > 0:
        tanh_HMN = torch.tanh(s_HMN / problem.softcap)
        s_HMN = tanh_HMN * problem.softcap
        slope_HMN = (1 - tanh_HMN * tanh_HMN) * problem.scale
    if x.alibi_slopes is not None:
        i = torch.arange(seq.len_q, device=device)[:, None]
        j = torch.arange(seq.len_k, device=device)
        distance = (i + seq.offset - j).abs()
        s_HMN = s_HMN - (x.alibi_slopes[seq.batch, :, None, None] * distance).to(stored)
    if x.rel_bias is not None:
        s_HMN = s_HMN + x.rel_bias[:, _entries(problem, x, seq)]
    if x.bias is not None:
        full = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        bias_HMN = x.bias.expand(full)[seq.batch, :, : seq.len_q, : seq.len_k]
        if bias_HMN.dtype == torch.bool:
            s_HMN = s_HMN.masked_fill(~bias_HMN, -torch.inf)
        else:
            # A wider bias makes wider scores, as torch promotes them: T might not represent it.
            s_HMN = s_HMN + bias_HMN
    masks = "tree_mask", "key_ranges", "block_rows", "block_keys", "block_bits"
    on_host = x._replace(**{name: as_numpy(getattr(x, name)) for name in masks})
    visible = oracle.visible(problem, on_host, seq)
    if x.key_ranges is not None:
        visible = visible & oracle.in_ranges(on_host, seq)
    if x.block_rows is not None:
        visible = visible & oracle.in_blocks(on_host, seq)
    seen = torch.from_numpy(visible).to(device)
    s_HMN = s_HMN.masked_fill(~seen, -torch.inf)
    p_HMN, p_sink_HM1, lse_HM = _softmax(
        s_HMN.float(), x.sink, far_lse(x.q.element_size()) if far_scores else None
    )
    p_HMN = p_HMN.to(twin)
    drop_HMN = _drop(problem, x, seq, device).to(twin)
    weights_HMN = as_operand(p_HMN * drop_HMN, x.q.dtype)
    out_HME = _matmul(weights_HMN, v_HNE, twin)
    max_HM = s_HMN.new_full(s_HMN.shape[:2], -torch.inf)
    if s_HMN.shape[2]:
        max_HM = s_HMN.amax(-1)
    probabilities = p_HMN, p_sink_HM1, lse_HM, max_HM
    return _SequenceForward(q_HMD, k_HND, v_HNE, slope_HMN, *probabilities, drop_HMN, out_HME)


def _entries(problem: AttentionProblem, x: Operands, seq: Sequence) -> torch.Tensor:
    """Which entry of rel_bias each score of one sequence has: (M, N)."""
    return torch.from_numpy(oracle.entries_of(problem, x, seq)).to(x.q.device)


def _softmax(s_HMN: torch.Tensor, sink: torch.Tensor | None, far: float | None):
    """Probabilities of keys (H, M, N) and of the sink (H, M, 1), 0 without one; lse (H, M). far:
    from this |lse| on probabilities are computed from maximum and sum; None means never."""
    parts = s_HMN
    if sink is not None:
        parts = torch.cat([s_HMN, sink[:, None, None].expand(-1, s_HMN.shape[1], 1)], -1)
    lse_HM = torch.logsumexp(parts, -1)
    empty_HM1 = lse_HM[..., None] == -torch.inf
    p = torch.exp(parts - lse_HM[..., None].masked_fill(empty_HM1, 0.0))
    if far is not None:
        is_far_HM1 = (lse_HM.abs() >= far)[..., None] & ~empty_HM1
        p = torch.where(is_far_HM1, torch.softmax(parts, -1), p)
    return (p, 0.0, lse_HM) if sink is None else (p[..., :-1], p[..., -1:], lse_HM)


def _drop(problem: AttentionProblem, x: Operands, seq: Sequence, device) -> torch.Tensor:
    """The dropout's factor on each probability; a 1 without dropout."""
    if problem.dropout_p == 0:
        return torch.ones((), device=device)
    sizes = (problem.heads_q, seq.len_q, seq.len_k)
    seed, p = int(x.seed.reshape(-1)[0]), problem.dropout_p
    keep = keep_mask(seed, p, 0, *sizes, seq.origin)
    return torch.from_numpy((keep * keep_scale(p)).astype(np.float32)).to(device)


def twin_dtype(stored: torch.dtype) -> torch.dtype:
    """T for inputs of this stored dtype."""
    return torch.bfloat16 if stored in FP8 else stored


def as_operand(weights: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Probabilities as an operand of the product with V, for inputs of this stored dtype."""
    if stored not in FP8:
        return weights
    top = torch.finfo(stored).max
    return (weights.float() * top).to(stored).float() / top


def _matmul(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Float32 products and sums, then one rounding."""
    return (a.float() @ b.float()).to(dtype or a.dtype)


def _gather(problem: AttentionProblem, x: Operands, seq: Sequence):
    """q (H, M, D), k (H, N, D), v (H, N, E) of one sequence, heads repeated."""
    keys, group = _key_tokens(seq, x.q.device), problem.group
    q = _flat(x.q)[seq.q_token : seq.q_token + seq.len_q]
    if x.q_descale is not None:
        q = q.float() * x.q_descale[seq.batch].repeat_interleave(group)[:, None]
    k = _dequantized(problem, x.k, x.k_descale, x.k_shift, seq.batch, keys)
    v = _dequantized(problem, x.v, x.v_descale, x.v_shift, seq.batch, keys)
    # fp8 values times a descale stay in float32: the product is inside the matmul.
    twin = torch.float32 if x.q.dtype in FP8 else x.q.dtype
    # Rows of latent vectors have columns that are key alone.
    v = v[..., : problem.head_dim_v]
    q, k, v = (a.to(twin).transpose(0, 1) for a in (q, k, v))
    return q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)


def _dequantized(problem: AttentionProblem, stored, descale, shift, batch: int, keys):
    """The values of `keys` (N,) of a storage in float32, or as stored without descales."""
    values = _flat(stored)
    values = (values.float() if stored.dtype in FP8 else values)[keys]
    if problem.kv_dtype == "int4":
        values = torch.from_numpy(unpack_int4(values.cpu().numpy())).to(stored.device)
    if problem.kv_dtype == LATENT_ROWS:
        values = torch.from_numpy(unpack_latent(values.cpu().numpy())).float().to(stored.device)
    for factor, combine in ((descale, torch.mul), (shift, torch.add)):
        if factor is not None and problem.kv_group:
            spread = _flat(factor)[keys].repeat_interleave(problem.kv_group, -1)
            values = combine(values.float(), spread)
        elif factor is not None:
            values = combine(values.float(), factor[batch][:, None])
    return values


def _key_tokens(seq: Sequence, device) -> torch.Tensor:
    return torch.tensor(
        [token + n for token, count in seq.k_spans for n in range(count)],
        dtype=torch.long,
        device=device,
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """(T, heads, dim) of a packed, a (B, S, heads, dim) or a paged tensor."""
    return tensor if tensor.ndim == 3 else tensor.reshape(-1, *tensor.shape[2:])


def _sum_group(problem: AttentionProblem, grad_HND: torch.Tensor) -> torch.Tensor:
    """The sum of gradients over the query heads of each kv head: (N, G, dim)."""
    _, n, dim = grad_HND.shape
    return grad_HND.reshape(problem.heads_k, problem.group, n, dim).sum(1).transpose(0, 1)


def _reduced(ds: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    shape = own_shape(tuple(bias.shape), bias.stride())
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return (ds.sum(axes, keepdim=True) if axes else ds).to(bias.dtype)


def _lse_shaped(problem: AttentionProblem, lse_HT: torch.Tensor) -> torch.Tensor:
    if problem.varlen_q:
        return lse_HT
    shape = (problem.heads_q, problem.batch, problem.seqlen_q)
    return lse_HT.reshape(shape).transpose(0, 1)
