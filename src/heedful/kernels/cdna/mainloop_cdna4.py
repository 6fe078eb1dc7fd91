"""The main loop for CDNA4, called by cdna/forward.py: two groups of four waves, one a stage behind
the other.

An iteration processes one tile of keys in four stages, with a barrier after each. While one group
keeps the matrix units busy, the other reads LDS and computes exponentials. K and V come by loads
direct to LDS, one tile ahead, each in two buffers. V is read by transposing LDS loads.

The order of accesses, where epoch t is the time of stage t (4 i + stage) of the early group, and
the late group's stage t is in epoch t + 1: the load of K of tile i + 1 begins in stage 4 i, and it
is first read in epoch 4 i + 4. The late group must have waited for its share one barrier earlier,
at the latest in epoch 4 i + 3, its stage 4 i + 2. So each wave waits for K at the end of stage 2
and, by the same reasoning, for V at the end of stage 0. Each time, one younger load stays in
flight. A buffer is loaded again three epochs after its last read.

Shapes: M query rows, N key rows of half a tile, D head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.cdna.fp8 import fp8_operand, side_by_side, stored_keys
from heedful.kernels.cdna.softmax import lane_sums, lift, no_keys, rescale, row_max, slack, total
from heedful.kernels.cdna.tile import apply_mask, row_offsets

copy = gl.amd.cdna4.async_copy


@gluon.constexpr_function
def keys_layout(mfma, rows, dim, dtype):
    """K in LDS, so that a wave's reads use all banks alike."""
    operand = gl.DotOperandLayout(1, mfma, 128 // dtype.primitive_bitwidth)
    padded = gl.amd.cdna4.compute_efficient_padded_shared_layout(operand, [dim, rows], dtype)
    bases = [[row, d] for d, row in padded.offset_bases]
    return gl.PaddedSharedLayout(padded.interval_padding_pairs, bases, [], [rows, dim])


@gluon.constexpr_function
def values_layout(mfma, rows, dim, dtype):
    """V in LDS, likewise for transposing reads."""
    operand = gl.DotOperandLayout(1, mfma, values_width(dtype))
    return gl.amd.cdna4.compute_efficient_padded_shared_layout(operand, [rows, dim], dtype, False)


@gluon.constexpr_function
def values_width(dtype):
    """Adjacent keys in an operand of V: the 8 bytes that a transposing read gives a lane."""
    return 64 // dtype.primitive_bitwidth


@gluon.constexpr_function
def products(dtype):
    """How many products the matrix unit sums in one instruction."""
    return 64 if dtype.is_fp8() else 16


@gluon.jit
def multiply(a, b, c):
    """a b + c."""
    if a.dtype.is_fp8():
        # This form, here without scales, is the only one that sums 64 products, at twice the speed
        # of 16.
        return gl.amd.cdna4.mfma_scaled(a, None, "e4m3", b, None, "e4m3", c)
    else:
        return gl.amd.cdna3.mfma(a, b, c)


@gluon.constexpr_function
def direct_layout(shared, warps, dtype):
    """Which lane loads what, for loads direct to LDS. The hardware writes a wave's 64 times 16
    bytes contiguously, so the order in LDS decides."""
    bases = shared.offset_bases
    items = (128 // dtype.primitive_bitwidth).bit_length() - 1
    lanes, waves = items + 6, items + 6 + warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        bases[:items] + bases[waves:], bases[items:lanes], bases[lanes:waves], [], shared.shape
    )


@gluon.jit
def _fetch(x, stage, n_block, len_k, IS_MASKED: gl.constexpr, WIDTH: gl.constexpr = 4):
    """Starts loading one tile of K or V; keys from len_k on become zeros. x: (base, stride, two
    stages in LDS). WIDTH: rows are in the order of `stored_keys`; 4 changes nothing."""
    base, stride, stages = x
    smem = stages.index(stage)
    N: gl.constexpr = smem.shape[0]
    D: gl.constexpr = smem.shape[1]
    LAYOUT: gl.constexpr = direct_layout(smem.type.layout, gl.num_warps(), smem.dtype)
    rows = stored_keys(gl.arange(0, N, gl.SliceLayout(1, LAYOUT)), WIDTH)
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    # The tile's base takes the 64-bit part, in scalar registers. Offsets never change.
    base += (n_block * N).to(gl.int64) * stride
    offsets = row_offsets(rows, stride, dims)
    if IS_MASKED:
        mask = (rows < len_k - n_block * N)[:, None]
        copy.buffer_load_to_shared(smem, base, offsets, mask=mask)
    else:
        copy.buffer_load_to_shared(smem, base, offsets)
    copy.commit_group()


@gluon.jit
def _key_tiles(work, k, v, q_MD, last_M, scale_log2, state, IS_MASKED: gl.constexpr):
    """Processes the key tiles that need a mask, or those before. k, v: as in `_fetch`. state:
    (base, sums, acc) of each row."""
    k_smem, v_smem = k[2], v[2]
    base_M, l_ML, acc_MD = state
    begin = work.full_end if IS_MASKED else work.begin
    end = work.end if IS_MASKED else work.full_end
    MFMA: gl.constexpr = acc_MD.type.layout
    M: gl.constexpr = acc_MD.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    DTYPE: gl.constexpr = q_MD.dtype
    LIFT: gl.constexpr = lift(DTYPE)
    HIGHEST: gl.constexpr = LIFT + slack(DTYPE)
    V_WIDTH: gl.constexpr = values_width(DTYPE)
    JOINED: gl.constexpr = DTYPE.is_fp8()
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MFMA, 128 // DTYPE.primitive_bitwidth)
    # A lane holds four consecutive keys of p at a time, so p stays in its lanes as an operand.
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MFMA, V_WIDTH)
    V_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MFMA, V_WIDTH)
    zeros_MN = gl.zeros([M, HALF], gl.float32, MFMA)
    for i in range(begin, end):
        now = i & 1
        later = gl.minimum(i + 1, work.end - 1)
        with gl.amd.warp_pipeline_stage("keys", priority=0):
            _fetch(k, 1 - now, later, work.seq.len_k, IS_MASKED)
            tile = k_smem.index(now)
            ka_DN = copy.load_shared_relaxed(tile.slice(0, HALF).permute([1, 0]), K_OPERAND)
            kb_DN = copy.load_shared_relaxed(tile.slice(HALF, HALF).permute([1, 0]), K_OPERAND)
        copy.wait_group(1)
        with gl.amd.warp_pipeline_stage("scores", priority=1):
            # S = Q K^T
            sa_MN = multiply(q_MD, ka_DN, zeros_MN)
            sb_MN = multiply(q_MD, kb_DN, zeros_MN)
        with gl.amd.warp_pipeline_stage("values", priority=0):
            _fetch(v, 1 - now, later, work.seq.len_k, IS_MASKED, V_WIDTH)
            tile = v_smem.index(now)
            if JOINED:
                v_ND = copy.load_shared_relaxed(tile, V_OPERAND)
            else:
                va_ND = copy.load_shared_relaxed(tile.slice(0, HALF), V_OPERAND)
                vb_ND = copy.load_shared_relaxed(tile.slice(HALF, HALF), V_OPERAND)
            if IS_MASKED:
                sa_MN = apply_mask(sa_MN, last_M - i * BLOCK_N, False)
                sb_MN = apply_mask(sb_MN, last_M - (i * BLOCK_N + HALF), False)
            top_M = row_max(gl.maximum(sa_MN, sb_MN))
            base_M, l_ML, acc_MD = rescale(base_M, top_M, scale_log2, l_ML, acc_MD, LIFT, HIGHEST)
            xb_MN = sb_MN * scale_log2 - base_M[:, None]
            pa_MN = gl.exp2(sa_MN * scale_log2 - base_M[:, None])
        copy.wait_group(1)
        with gl.amd.warp_pipeline_stage("output", priority=1):
            # Half of the exponentials run beside the first products, half beside the other group's.
            pb_MN = gl.exp2(xb_MN)
            l_ML += lane_sums(pa_MN + pb_MN)
            if JOINED:
                p_MN = fp8_operand(side_by_side(pa_MN, pb_MN), DTYPE, P_OPERAND)
                # O += P V
                acc_MD = multiply(p_MN, v_ND, acc_MD)
            else:
                pa_MN = gl.convert_layout(pa_MN.to(DTYPE), P_OPERAND)
                pb_MN = gl.convert_layout(pb_MN.to(DTYPE), P_OPERAND)
                # O += P V
                acc_MD = multiply(pa_MN, va_ND, acc_MD)
                acc_MD = multiply(pb_MN, vb_ND, acc_MD)
    return base_M, l_ML, acc_MD


@gluon.jit
def mainloop(work, k, v, q_MD, last_M, scale_log2, MFMA: gl.constexpr, BLOCK_N: gl.constexpr):
    """(base, sum, acc) of each row after all key tiles of the work tile. k and v are Rows."""
    HEAD_DIM: gl.constexpr = q_MD.shape[1]
    DTYPE: gl.constexpr = q_MD.dtype
    K_SHARED: gl.constexpr = keys_layout(MFMA, BLOCK_N, HEAD_DIM, DTYPE)
    V_SHARED: gl.constexpr = values_layout(MFMA, BLOCK_N, HEAD_DIM, DTYPE)
    V_WIDTH: gl.constexpr = values_width(DTYPE)
    k_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, HEAD_DIM], K_SHARED)
    v_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, HEAD_DIM], V_SHARED)
    keys = work.keys(k), k.stride_n, k_smem
    values = work.keys(v), v.stride_n, v_smem
    _fetch(keys, work.begin & 1, work.begin, work.seq.len_k, True)
    _fetch(values, work.begin & 1, work.begin, work.seq.len_k, True, V_WIDTH)
    copy.wait_group(0)
    gl.barrier()
    state = no_keys(q_MD.shape[0], BLOCK_N // 2, HEAD_DIM, MFMA)
    for masked in gl.static_range(2):
        state = _key_tiles(work, keys, values, q_MD, last_M, scale_log2, state, masked == 1)
    # Loads that are still in flight must not land in the LDS of the next workgroup.
    copy.wait_group(0)
    base_M, l_ML, acc_MD = state
    return base_M, total(l_ML, base_M), acc_MD
