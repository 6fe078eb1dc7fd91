"""The main loop for CDNA3, called by cdna/forward.py: two groups of four waves, one a stage behind
the other.

An iteration processes one tile of keys in four stages, with a barrier after each, as on CDNA4.
CDNA3 has no wide loads direct to LDS, so the next tile passes through registers. It has no
transposing LDS reads either. So V is transposed in registers, four keys by a few columns for each
lane: once for all waves, where each wave would otherwise sort single elements.

The order of accesses, where epoch t is the time of stage t (4 i + stage) of the early group, and
the late group's stage t is in epoch t + 1: K of tile i is last read in epoch 4 i + 1, by the late
group. K of tile i + 1 is stored in epochs 4 i + 2 and 4 i + 3, and read from 4 i + 4 on. V of tile
i is last read in epoch 4 i + 3. V of tile i + 1 is stored in epochs 4 i + 4 and 4 i + 5, and read
from 4 i + 6 on. So one buffer of each is enough.

Shapes: M query rows, N key rows, D head dim.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.cdna.fp8 import fp8_operand, stored_keys
from heedful.kernels.cdna.softmax import lane_sums, lift, no_keys, rescale, row_max, slack, total
from heedful.kernels.cdna.tile import apply_mask, fetch_layout, row_offsets


@gluon.constexpr_function
def products(dtype):
    """How many products the matrix unit sums in one instruction."""
    return 128 // dtype.primitive_bitwidth


@gluon.jit
def _load(
    x, n_block, len_k, LAYOUT: gl.constexpr, IS_MASKED: gl.constexpr, WIDTH: gl.constexpr = 4
):
    """One tile of K or V in registers; keys from len_k on are zeros. x: (base, stride, its memory
    in LDS). WIDTH: rows are in the order of `stored_keys`; 4 changes nothing."""
    base, stride, smem = x
    N: gl.constexpr = smem.shape[0]
    D: gl.constexpr = smem.shape[1]
    rows = stored_keys(gl.arange(0, N, gl.SliceLayout(1, LAYOUT)), WIDTH)
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    # The tile's base takes the 64-bit part, in scalar registers. Offsets never change.
    base += (n_block * N).to(gl.int64) * stride
    offsets = row_offsets(rows, stride, dims)
    if IS_MASKED:
        mask = (rows < len_k - n_block * N)[:, None]
        x_ND = gl.amd.cdna3.buffer_load(base, offsets, mask=mask, other=0.0)
    else:
        x_ND = gl.amd.cdna3.buffer_load(base, offsets)
    return x_ND


@gluon.constexpr_function
def mean_loss(dtype):
    """The mean relative loss of `truncated`: half a unit of the last place, averaged over mantissas
    in [1, 2) whose logarithms are spread evenly."""
    if dtype.is_fp8():
        return 0.0
    digits = 7 if dtype == gl.bfloat16 else 10
    return 2.0**-digits / 2 * (0.5 / math.log(2.0))


@gluon.jit
def truncated(p_MN, dtype: gl.constexpr):
    """Probabilities in `dtype`, rounded towards zero. CDNA3 has no conversion to bfloat16, and only
    this conversion to float16 packs two numbers. The base of the exponents makes probabilities
    larger by `mean_loss`, which cancels the bias at no cost. So only the largest probability stays
    exact."""
    if dtype == gl.bfloat16:
        bits = p_MN.to(gl.uint32, bitcast=True)
        return (bits >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    else:
        return p_MN.to(dtype, fp_downcast_rounding="rtz")


@gluon.constexpr_function
def truncation_lift(dtype):
    """log2 of the largest probability before it is truncated."""
    return lift(dtype) + math.log2(1 + mean_loss(dtype))


@gluon.jit
def _key_tiles(work, k, v, next_v_ND, q_MD, last_M, scale_log2, state, IS_MASKED: gl.constexpr):
    """Processes the key tiles that need a mask, or those before. k, v: as in `_load`. next_v_ND:
    values of the first tile. state: (base, sums, acc) of each row."""
    k_smem, v_smem = k[2], v[2]
    base_M, l_ML, acc_MD = state
    begin = work.full_end if IS_MASKED else work.begin
    end = work.end if IS_MASKED else work.full_end
    MFMA: gl.constexpr = acc_MD.type.layout
    M: gl.constexpr = acc_MD.shape[0]
    N: gl.constexpr = k_smem.shape[0]
    D: gl.constexpr = k_smem.shape[1]
    DTYPE: gl.constexpr = q_MD.dtype
    LIFT: gl.constexpr = truncation_lift(DTYPE)
    HIGHEST: gl.constexpr = lift(DTYPE) + slack(DTYPE)
    K_LOAD: gl.constexpr = fetch_layout(D, gl.num_warps(), DTYPE)
    V_LOAD: gl.constexpr = transpose_layout(N, D, DTYPE)
    V_WIDTH: gl.constexpr = values_width(DTYPE)
    # A lane holds four consecutive keys of p at a time, so p stays in its lanes as an operand.
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MFMA, V_WIDTH)
    V_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MFMA, V_WIDTH)
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MFMA, 128 // DTYPE.primitive_bitwidth)
    for i in range(begin, end):
        later = gl.minimum(i + 1, work.end - 1)
        with gl.amd.warp_pipeline_stage("keys", priority=0):
            next_k_ND = _load(k, later, work.seq.len_k, K_LOAD, IS_MASKED)
            k_DN = k_smem.permute([1, 0]).load(K_OPERAND)
            v_smem.store(next_v_ND)
        with gl.amd.warp_pipeline_stage("scores", priority=1):
            # S = Q K^T
            s_MN = gl.amd.cdna3.mfma(q_MD, k_DN, gl.zeros([M, N], gl.float32, MFMA))
        with gl.amd.warp_pipeline_stage("values", priority=0):
            next_v_ND = _load(v, later, work.seq.len_k, V_LOAD, IS_MASKED, V_WIDTH)
            v_ND = v_smem.load(V_OPERAND)
            k_smem.store(next_k_ND)
            if IS_MASKED:
                s_MN = apply_mask(s_MN, last_M - i * N, True)
            top_M = row_max(s_MN)
            base_M, l_ML, acc_MD = rescale(base_M, top_M, scale_log2, l_ML, acc_MD, LIFT, HIGHEST)
            p_MN = gl.exp2(s_MN * scale_log2 - base_M[:, None])
            l_ML += lane_sums(p_MN)
            if DTYPE.is_fp8():
                p_MN = fp8_operand(p_MN, DTYPE, P_OPERAND)
            else:
                p_MN = gl.convert_layout(truncated(p_MN, DTYPE), P_OPERAND)
        with gl.amd.warp_pipeline_stage("output", priority=1):
            # O += P V
            acc_MD = gl.amd.cdna3.mfma(p_MN, v_ND, acc_MD)
    return (base_M, l_ML, acc_MD), next_v_ND


@gluon.constexpr_function
def transpose_layout(rows, dim, dtype):
    """Which lane transposes which part of V: four keys by a few columns."""
    if not dtype.is_fp8():
        return gl.BlockedLayout([4, dim // 32], [2, 32], [8, 1], [1, 0])
    # A wave has sixteen keys by 64 columns, so that its writes use all banks.
    lanes = [[4, 0], [8, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
    waves = [[0, d] for d in (64,) if d < dim] + [[n, 0] for n in (16, 32, 64) if n < rows]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0]], lanes, waves, [], [rows, dim]
    )


@gluon.constexpr_function
def keys_layout(rows, dim, dtype):
    """K in LDS, padded by 16 bytes after each row or, if a row is shorter, after each 128 bytes.
    The eight lanes whose 16 bytes fill the 32 banks once then use different banks: both lanes that
    write along rows and lanes that read down a column. A swizzle would do this too, but with an
    address register for every read."""
    bits = dtype.primitive_bitwidth
    return gl.PaddedSharedLayout.with_identity_for(
        [[max(dim, 1024 // bits), 128 // bits]], [rows, dim], [1, 0]
    )


@gluon.constexpr_function
def values_layout(rows, dim, dtype):
    """V in LDS, transposed and padded likewise: for sixteen lanes of 8 bytes or, in fp8, eight of
    16."""
    padding = [[rows, 32], [4 * rows, 16]] if dtype.is_fp8() else [[rows, 4]]
    return gl.PaddedSharedLayout.with_identity_for(padding, [rows, dim], [0, 1])


@gluon.constexpr_function
def values_width(dtype):
    """Adjacent keys in an operand of V."""
    return 16 if dtype.is_fp8() else 4


@gluon.jit
def mainloop(work, k, v, q_MD, last_M, scale_log2, MFMA: gl.constexpr, BLOCK_N: gl.constexpr):
    """(base, sum, acc) of each row after all key tiles of the work tile. k and v are Rows."""
    HEAD_DIM: gl.constexpr = q_MD.shape[1]
    DTYPE: gl.constexpr = q_MD.dtype
    K_LOAD: gl.constexpr = fetch_layout(HEAD_DIM, gl.num_warps(), DTYPE)
    V_LOAD: gl.constexpr = transpose_layout(BLOCK_N, HEAD_DIM, DTYPE)
    V_WIDTH: gl.constexpr = values_width(DTYPE)
    K_SHARED: gl.constexpr = keys_layout(BLOCK_N, HEAD_DIM, DTYPE)
    V_SHARED: gl.constexpr = values_layout(BLOCK_N, HEAD_DIM, DTYPE)
    k_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, HEAD_DIM], K_SHARED)
    v_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, HEAD_DIM], V_SHARED)
    keys = work.keys(k), k.stride_n, k_smem
    values = work.keys(v), v.stride_n, v_smem
    k_ND = _load(keys, work.begin, work.seq.len_k, K_LOAD, True)
    v_ND = _load(values, work.begin, work.seq.len_k, V_LOAD, True, V_WIDTH)
    k_smem.store(k_ND)
    gl.barrier()
    state = no_keys(q_MD.shape[0], BLOCK_N, HEAD_DIM, MFMA)
    for masked in gl.static_range(2):
        state, v_ND = _key_tiles(
            work, keys, values, v_ND, q_MD, last_M, scale_log2, state, masked == 1
        )
    base_M, l_ML, acc_MD = state
    return base_M, total(l_ML, base_M), acc_MD
