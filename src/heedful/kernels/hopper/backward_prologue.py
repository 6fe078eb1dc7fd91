"""What comes ahead of the Hopper backward: delta of every query row, and cleared sums.

delta = rowsum(out * dout) - dlse, 0 in rows that saw nothing or are not in use. Shapes: M query
rows, E v dim.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from heedful.kernels.args.hopper_backward import (
    BackwardPrologueIO,
    FarRowsIO,
    HopperBackwardSizes,
)
from heedful.kernels.args.shared import Mask, ScoreMods, Sequences, Shape, Tile
from heedful.kernels.common.sequences import sequence
from heedful.kernels.hopper.backward_far_rows import far_rows, is_far, lse_log2
from heedful.kernels.hopper.backward_p_scale import p_scale_log2
from heedful.kernels.portable.backward_rows import row_deltas
from heedful.kernels.portable.scores import head_mods
from heedful.kernels.portable.sequences import Place, load_rows, place_of, row_base, wide
from heedful.kernels.portable.statistics import row_statistics


@triton.jit
def accum_begin(b, cu_seqlens, seqlen, BLOCK: tl.constexpr):
    """A sequence's first row where each has its rows rounded up to tiles, as
    `hopper.backward_tile.accum_begin` has it."""
    if cu_seqlens is not None:
        token, _, _ = sequence(b, cu_seqlens, None, None, seqlen)
        return (token // BLOCK + b) * BLOCK
    else:
        return wide(b) * (tl.cdiv(seqlen, BLOCK) * BLOCK)


@triton.jit
def backward_prologue(
    io: BackwardPrologueIO,
    far: FarRowsIO,
    seqs: Sequences,
    shape: Shape,
    mask: Mask,
    mods: ScoreMods,
    sizes: HopperBackwardSizes,
    tile: Tile,
    q_blocks,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """delta, laid out as lse; zeros in dq_accum, turns and tile_counter; far rows made anew. A
    program each for BLOCK_M rows of a query head, q_blocks of the longest sequence. D: columns of
    dq_accum. tile: of far rows."""
    # The kernel behind sets itself up meanwhile, and waits.
    cuda.gdc_launch_dependents()
    # From the last rows to the first, which the kernel behind adds to first: they are in the L2.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if io.tile_counter is not None and pid == 0:
        tl.store(io.tile_counter, 0)
    row0 = (pid % q_blocks) * BLOCK_M
    heads = sizes.heads_k * sizes.group
    h = wide(pid // q_blocks % heads)
    b = wide(pid // q_blocks // heads)
    token, len_q, stored_q = sequence(b, seqs.cu_q, seqs.used_q, None, seqs.seqlen_q)
    if row0 >= stored_q:
        return
    rows_M = row0 + tl.arange(0, BLOCK_M)
    places_M = b * io.lse.stride_b + h * io.lse.stride_h + token + rows_M
    # On its way before anything is stored, behind which the compiler keeps loads.
    lse_M = tl.load(io.lse.ptr + places_M, mask=rows_M < len_q, other=float("-inf"))
    accum_row = h * sizes.accum_rows + accum_begin(b, seqs.cu_q, seqs.seqlen_q, BLOCK_M) + row0
    sums = io.dq_accum + accum_row * D
    PART: tl.constexpr = D if D & (D - 1) == 0 else D // 3
    for part in tl.static_range(D // PART):
        at = sums + part * BLOCK_M * PART + tl.arange(0, BLOCK_M * PART)
        tl.store(at, tl.zeros([BLOCK_M * PART], tl.float32))
    if io.turns is not None:
        tl.store(io.turns + accum_row // BLOCK_M, 0)
    out = row_base(io.out, b, h, token)
    dout = row_base(io.dout, b, h, token)
    o_ME = load_rows(out, io.out.stride_n, row0, len_q, E, BLOCK_M, BLOCK_E, True)
    do_ME = load_rows(dout, io.dout.stride_n, row0, len_q, E, BLOCK_M, BLOCK_E, True)
    P_SCALE_LOG2: tl.constexpr = p_scale_log2(io.dout.ptr.dtype.element_ty)
    less_M = lse_log2(lse_M, P_SCALE_LOG2)
    reference_M = lse_M
    factor_M = tl.full([BLOCK_M], 1.0, tl.float32)
    far_M = is_far(less_M)
    # While out and dout are on their way.
    if tl.max(far_M.to(tl.int32), 0) != 0:
        HAS_BIAS: tl.constexpr = mods.bias.ptr is not None
        whole = place_of(b, h, h // sizes.group, seqs, shape, mask, HAS_BIAS)
        head = head_mods(mods.scale, whole.b, whole.h, mods, mask)
        m_M, l_M = row_statistics(far.q, far.k, row0, whole, head, mask, mods, tile)
        far_less_M, scale_M = far_rows(less_M, m_M, l_M, P_SCALE_LOG2)
        tl.store(far.dout_scale + places_M, scale_M, mask=far_M)
        less_M = tl.where(far_M, far_less_M, less_M)
        reference_M = tl.where(far_M, m_M, lse_M)
        factor_M = tl.where(far_M, 1.0 / l_M, 1.0)
    zero = wide(0)
    place = Place(b, h, zero, token, len_q, stored_q, zero, zero, zero, zero)
    delta_M = row_deltas(o_ME, do_ME, lse_M, io.dlse, place, rows_M, rows_M < len_q)
    stored_M = rows_M < stored_q
    tl.store(far.lse_log2 + places_M, less_M, mask=stored_M)
    tl.store(io.delta + places_M, delta_M, mask=stored_M)
    if far.reference is not None:
        tl.store(far.reference + places_M, reference_M, mask=stored_M)
        tl.store(far.factor + places_M, factor_M, mask=stored_M)
