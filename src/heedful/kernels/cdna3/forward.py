"""Attention forward for CDNA3: two groups of four waves, one a stage behind the other.

A turn works off one tile of keys in four stages with a barrier after each, as on CDNA4; without
wide loads straight to LDS, the next tile passes through registers on its way. V is turned there,
four keys by a few columns a lane, because CDNA3 has no transposing LDS reads: once for all waves,
where each would else sort single elements.

Order of accesses, with t the number of a stage (4 i + stage) and the late group at epoch t + 1:
K of tile i is last read in epoch 4 i + 1, by the late group; K of tile i + 1 is stored from epoch
4 i + 2 to 4 i + 3 and read from 4 i + 4 on. V of tile i is last read in epoch 4 i + 3; that of tile
i + 1 is stored from 4 i + 4 to 4 i + 5 and read from 4 i + 6 on. So one buffer of each is enough.

Shapes: M query rows, N key rows, D head dim.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.cdna.fp8 import fp8_operand, split_sign, stored_keys
from heedful.kernels.cdna.softmax import LOWEST, follow, lane_sums, lift, row_max, slack, total
from heedful.kernels.cdna.tile import (
    fetch_layout,
    hide,
    last_keys,
    load_queries,
    store_results,
    work_of,
)


@gluon.jit
def _load(
    base,
    stride,
    tile,
    len_k,
    N: gl.constexpr,
    D: gl.constexpr,
    LAYOUT: gl.constexpr,
    IS_MASKED: gl.constexpr,
    WIDTH: gl.constexpr = 4,
):
    """One tile of K or V in registers; keys from len_k on are zeros. WIDTH: rows in the order of
    `stored_keys`; 4 changes nothing."""
    rows = stored_keys(gl.arange(0, N, gl.SliceLayout(1, LAYOUT)), WIDTH)
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    # The tile's base takes the 64-bit part, in scalar registers; offsets never change.
    base += (tile * N).to(gl.int64) * stride
    offsets = rows[:, None] * stride + dims[None, :]
    if IS_MASKED:
        mask = (rows < len_k - tile * N)[:, None]
        x_ND = gl.amd.cdna3.buffer_load(base, offsets, mask=mask, other=0.0)
    else:
        x_ND = gl.amd.cdna3.buffer_load(base, offsets)
    return x_ND


@gluon.constexpr_function
def mean_loss(dtype):
    """What `truncated` takes off on average, relatively: half a unit of the last place, over
    mantissas in [1, 2) whose logarithms are spread evenly."""
    if dtype.is_fp8():
        return 0.0
    digits = 7 if dtype == gl.bfloat16 else 10
    return 2.0**-digits / 2 * (0.5 / math.log(2.0))


@gluon.jit
def truncated(p_MN, dtype: gl.constexpr):
    """Probabilities in `dtype`, rounded towards zero: CDNA3 has no conversion to bfloat16, and
    that is the only one to float16 which packs two. Their bias is met by making them larger by
    `mean_loss`, at no cost, in the base of the exponents; so alone the largest stays exact."""
    if dtype == gl.bfloat16:
        bits = p_MN.to(gl.uint32, bitcast=True)
        return (bits >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    else:
        return p_MN.to(dtype, fp_downcast_rounding="rtz")


@gluon.constexpr_function
def truncation_lift(dtype):
    """The logarithm of the largest probability before it is truncated."""
    return lift(dtype) + math.log2(1 + mean_loss(dtype))


@gluon.jit
def _walk(
    begin,
    stop,
    last,
    q_MD,
    k,
    v,
    stride_kn,
    stride_vn,
    k_smem,
    v_smem,
    next_v_ND,
    last_M,
    len_k,
    scale_log2,
    base_M,
    l_ML,
    acc_MD,
    IS_MASKED: gl.constexpr,
):
    """Works off tiles [begin, stop); `last` is the last tile there is to load, and
    next_v_ND the values of tile `begin`."""
    MFMA: gl.constexpr = acc_MD.type.layout
    M: gl.constexpr = acc_MD.shape[0]
    N: gl.constexpr = k_smem.shape[0]
    D: gl.constexpr = k_smem.shape[1]
    DTYPE: gl.constexpr = q_MD.dtype
    LIFT: gl.constexpr = truncation_lift(DTYPE)
    HIGHEST: gl.constexpr = lift(DTYPE) + slack(DTYPE)
    K_LOAD: gl.constexpr = fetch_layout(D, gl.num_warps(), DTYPE)
    V_LOAD: gl.constexpr = turn_layout(N, D, DTYPE)
    V_WIDTH: gl.constexpr = values_width(DTYPE)
    # Of p, a lane holds four consecutive keys at a time: as an operand it stays where it is.
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MFMA, V_WIDTH)
    V_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MFMA, V_WIDTH)
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MFMA, 128 // DTYPE.primitive_bitwidth)
    for i in range(begin, stop):
        later = gl.minimum(i + 1, last)
        with gl.amd.warp_pipeline_stage("keys", priority=0):
            next_k_ND = _load(k, stride_kn, later, len_k, N, D, K_LOAD, IS_MASKED)
            k_DN = k_smem.permute([1, 0]).load(K_OPERAND)
            v_smem.store(next_v_ND)
        with gl.amd.warp_pipeline_stage("scores", priority=1):
            s_MN = gl.amd.cdna3.mfma(q_MD, k_DN, gl.zeros([M, N], gl.float32, MFMA))
        with gl.amd.warp_pipeline_stage("values", priority=0):
            next_v_ND = _load(v, stride_vn, later, len_k, N, D, V_LOAD, IS_MASKED, V_WIDTH)
            v_ND = v_smem.load(V_OPERAND)
            k_smem.store(next_k_ND)
            if IS_MASKED:
                s_MN = hide(s_MN, last_M - i * N, True)
            top_M = row_max(s_MN)
            base_M, l_ML, acc_MD = follow(base_M, top_M, scale_log2, l_ML, acc_MD, LIFT, HIGHEST)
            p_MN = gl.exp2(s_MN * scale_log2 - base_M[:, None])
            l_ML += lane_sums(p_MN)
            if DTYPE.is_fp8():
                p_MN = fp8_operand(p_MN, DTYPE, P_OPERAND)
            else:
                p_MN = gl.convert_layout(truncated(p_MN, DTYPE), P_OPERAND)
        with gl.amd.warp_pipeline_stage("output", priority=1):
            acc_MD = gl.amd.cdna3.mfma(p_MN, v_ND, acc_MD)
    return base_M, l_ML, acc_MD, next_v_ND


@gluon.constexpr_function
def turn_layout(rows, dim, dtype):
    """Who turns which part of V: four keys by a few columns a lane."""
    if not dtype.is_fp8():
        return gl.BlockedLayout([4, dim // 32], [2, 32], [8, 1], [1, 0])
    # Sixteen keys by 64 columns a wave, so that its writes meet all banks.
    lanes = [[4, 0], [8, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
    waves = [[0, d] for d in (64,) if d < dim] + [[n, 0] for n in (16, 32, 64) if n < rows]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0]], lanes, waves, [], [rows, dim]
    )


@gluon.constexpr_function
def keys_layout(rows, dim, dtype):
    """K in LDS, padded by 16 bytes after each row or, if longer, each 128 bytes, so that as many
    lanes as fill the 32 banks once, eight at 16 bytes, meet each once: those that write, which
    follow rows, as those that read down a column. A swizzle would do too, at an address register
    for every read."""
    bits = dtype.primitive_bitwidth
    return gl.PaddedSharedLayout.with_identity_for(
        [[max(dim, 1024 // bits), 128 // bits]], [rows, dim], [1, 0]
    )


@gluon.constexpr_function
def values_layout(rows, dim, dtype):
    """V in LDS, turned; likewise for sixteen lanes at 8 bytes or, fp8, eight at 16."""
    padding = [[rows, 32], [4 * rows, 16]] if dtype.is_fp8() else [[rows, 4]]
    return gl.PaddedSharedLayout.with_identity_for(padding, [rows, dim], [0, 1])


@gluon.constexpr_function
def values_width(dtype):
    """Keys side by side in an operand of V."""
    return 16 if dtype.is_fp8() else 4


@gluon.jit
def forward(
    q,
    k,
    v,
    q_descale,
    k_descale,
    v_descale,
    out,
    lse,
    cu_q,
    cu_k,
    scale_log2,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_os,
    stride_ob,
    stride_om,
    stride_oh,
    stride_ls,
    stride_lb,
    stride_lh,
    stride_qdb,
    stride_qdg,
    stride_kdb,
    stride_kdg,
    stride_vdb,
    stride_vdg,
    seqlen_q,
    seqlen_k,
    heads_q,
    heads,
    group,
    row_blocks,
    num_splits,
    align,
    shift,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """out (.., M, H, D) and, if wanted, lse (B, H, M) of BLOCK_M queries of one head; of several
    splits of the keys, partial ones with a leading split.

    scale_log2: makes raw scores logits in base 2. q_descale, k_descale, v_descale: float32 (B, G),
    with fp8. heads: batch times heads_q. group: query heads per KV head. align: 1 puts the diagonal
    at the last query and key, 0 at the first.
    """
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = k.dtype.element_ty
    MFMA: gl.constexpr = gl.amd.AMDMFMALayout(
        version=3,
        instr_shape=[32, 32, 128 // DTYPE.primitive_bitwidth],
        transposed=True,
        warps_per_cta=[WARPS, 1],
    )
    K_SHARED: gl.constexpr = keys_layout(BLOCK_N, HEAD_DIM, DTYPE)
    V_SHARED: gl.constexpr = values_layout(BLOCK_N, HEAD_DIM, DTYPE)
    V_WIDTH: gl.constexpr = values_width(DTYPE)
    work = work_of(
        cu_q,
        cu_k,
        seqlen_q,
        seqlen_k,
        heads_q,
        heads,
        group,
        row_blocks,
        num_splits,
        align,
        shift,
        BLOCK_M,
        BLOCK_N,
        IS_CAUSAL,
    )
    row0, len_q, len_k = work.row0, work.len_q, work.len_k
    if row0 >= len_q:
        return
    q = work.queries(q, stride_qb, stride_qm, stride_qh)
    k = work.keys(k, stride_kb, stride_kn, stride_kh)
    v = work.keys(v, stride_vb, stride_vn, stride_vh)
    out = work.queries(out + work.split * stride_os, stride_ob, stride_om, stride_oh)
    if lse is not None:
        lse = work.queries(lse + work.split * stride_ls, stride_lb, 1, stride_lh)

    q_MD = load_queries(
        q,
        stride_qm,
        row0,
        len_q,
        BLOCK_M,
        HEAD_DIM,
        gl.DotOperandLayout(0, MFMA, 128 // DTYPE.primitive_bitwidth),
    )
    if DTYPE.is_fp8():
        q_factor = work.factor(q_descale, stride_qdb, stride_qdg)
        k_factor = work.factor(k_descale, stride_kdb, stride_kdg)
        scale_log2, q_MD = split_sign(scale_log2 * q_factor * k_factor, q_MD)
    K_LOAD: gl.constexpr = fetch_layout(HEAD_DIM, WARPS, DTYPE)
    V_LOAD: gl.constexpr = turn_layout(BLOCK_N, HEAD_DIM, DTYPE)
    k_ND = _load(k, stride_kn, work.begin, len_k, BLOCK_N, HEAD_DIM, K_LOAD, True)
    v_ND = _load(v, stride_vn, work.begin, len_k, BLOCK_N, HEAD_DIM, V_LOAD, True, V_WIDTH)
    k_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, HEAD_DIM], K_SHARED)
    k_smem.store(k_ND)
    v_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, HEAD_DIM], V_SHARED)
    gl.barrier()
    rows_M = row0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, MFMA))
    last_M = last_keys(rows_M, len_k, work.off, IS_CAUSAL)
    base_M = gl.full([BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(1, MFMA))
    l_ML = lane_sums(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MFMA))
    acc_MD = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, MFMA)
    for masked in gl.static_range(2):
        base_M, l_ML, acc_MD, v_ND = _walk(
            work.hot if masked else work.begin,
            work.stop if masked else work.hot,
            work.stop - 1,
            q_MD,
            k,
            v,
            stride_kn,
            stride_vn,
            k_smem,
            v_smem,
            v_ND,
            last_M,
            len_k,
            scale_log2,
            base_M,
            l_ML,
            acc_MD,
            masked == 1,
        )
    l_M = total(l_ML, base_M)
    scale = work.factor(v_descale, stride_vdb, stride_vdg) * (1 + mean_loss(DTYPE))
    store_results(out, lse, stride_om, row0, len_q, base_M, l_M, acc_MD, scale)
