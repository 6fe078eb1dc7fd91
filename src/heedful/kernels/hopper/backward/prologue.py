"""The prologue of the backward: delta of every query row, cleared sums of dQ, and rows far from 0.

delta = rowsum(out * dout) - dlse, and 0 in rows that saw nothing or are not in use. The kernel is
`backward_prologue`, launched by `launch/bind/hopper_backward.py` before each main kernel. Shapes: M
query rows, E v dim.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from heedful.kernels.args.hopper_backward import (
    BackwardPrologueIO,
    FarRowsIO,
    HopperBackwardSizes,
)
from heedful.kernels.args.kinds import RowVector
from heedful.kernels.args.shared import PortableParams
from heedful.kernels.common.rows import load_head_rows, load_rows, row_base, wide
from heedful.kernels.common.scores import (
    finite_or_zero,
    first_statistics,
    head_mods,
    modified_scores,
    product_of_rows,
)
from heedful.kernels.common.sequences import (
    Place,
    Seqlens,
    place_of,
    sequence,
    tile_of_sequences,
)
from heedful.kernels.common.statistics import row_deltas, row_statistics
from heedful.kernels.common.tile_range import any_tile, key_tile, key_tiles
from heedful.kernels.hopper.backward.far_rows import far_rows, is_far, lse_log2
from heedful.kernels.hopper.backward.p_scale import p_scale_log2


@triton.jit
def accum_begin(b, cu_seqlens, seqlen, BLOCK: tl.constexpr):
    """A sequence's first row in dq_accum, where each sequence is rounded up to whole tiles;
    `hopper.backward.tile.accum_begin` is the same in the main kernel."""
    if cu_seqlens is not None:
        token, _, _ = sequence(b, cu_seqlens, None, None, seqlen)
        return (token // BLOCK + b) * BLOCK
    else:
        return wide(b) * (tl.cdiv(seqlen, BLOCK) * BLOCK)


@triton.jit
def dense_place(place, sizes: HopperBackwardSizes):
    """Where a sequence's rows lie in results of the forward: as they do, or in the batch entry of
    which the sequence is a piece."""
    if sizes.entry_rows is None:
        return place
    else:
        seq = place.seq
        entry = seq.token_q // sizes.entry_rows
        seq = Seqlens(
            token_q=seq.token_q - entry * sizes.entry_rows,
            len_q=seq.len_q,
            stored_q=seq.stored_q,
            token_k=seq.token_k,
            len_k=seq.len_k,
            stored_k=seq.stored_k,
            off=seq.off,
        )
        return Place(wide(entry), place.h, place.g, seq)


@triton.jit
def row_places(lse: RowVector, rows_M, place, sizes: HopperBackwardSizes, seqlen_q):
    """(where rows of a sequence are in lse, where in scratch of one number a row): the same places,
    unless the sequence is a piece of a batch entry."""
    dense = dense_place(place, sizes)
    places_M = dense.b * lse.stride_b + dense.h * lse.stride_h + dense.seq.token_q + rows_M
    if sizes.entry_rows is None:
        return places_M, places_M
    else:
        return places_M, place.h * seqlen_q + place.seq.token_q + rows_M


@triton.jit
def logit_statistics(far: FarRowsIO, row0, place, head, params, scale_log2, softcap_scale):
    """(maximum, sum of 2^(logit - maximum)) of a tile of query rows over all keys that they see,
    and over the sink. Logits are those of consumers, in base 2: raw scores times scale_log2 or,
    with softcap, their tanh (hopper/sm90/score_mods.py) times it. The maximum is rounded to
    float32, and the sum belongs to the rounded one: exponents are fused multiply-adds."""
    M: tl.constexpr = params.tile.BLOCK_M
    N: tl.constexpr = params.tile.BLOCK_N
    D: tl.constexpr = params.tile.HEAD_DIM
    BLOCK_D: tl.constexpr = params.tile.BLOCK_D
    b, h, token, count = place.b, place.h, place.seq.token_q, place.seq.len_q
    q_MD = load_head_rows(far.q, b, h, token, row0, count, D, M, BLOCK_D)
    keys = row_base(far.k, b, place.g, place.seq.token_k)
    rows_M = row0 + tl.arange(0, M)
    top_M, sum_M = first_statistics(0, place, params, False)
    tiles = key_tiles(row0, place, params.mask, params.tile)
    first = tiles.first_end - tiles.first_begin
    # ptxas: few calls run this loop, so it has one stage.
    for visit in tl.range(0, first + (tiles.end - tiles.begin), num_stages=1):
        col0, mods = key_tile(any_tile(visit, tiles), row0, place, head, params, True)
        k_ND = load_rows(keys, far.k.stride_n, col0, place.seq.len_k, D, N, BLOCK_D, True)
        s_MN = product_of_rows(q_MD, k_ND, params.tile.PRECISION, False)
        if params.mods.HAS_SOFTCAP:
            s_MN = 1.0 - 2.0 / (1.0 + tl.exp2(s_MN * softcap_scale))
        s_MN = modified_scores(s_MN, rows_M, row0, col0, place, mods, params, False, True)
        new_M = tl.maximum(top_M, tl.max(s_MN, 1) * scale_log2)
        base_M = finite_or_zero(new_M)
        p_MN = tl.exp2(tl.fma(s_MN, scale_log2, -base_M[:, None]))
        sum_M = sum_M * tl.exp2(top_M - base_M) + tl.sum(p_MN, 1)
        top_M = new_M
    return top_M, sum_M


@triton.jit
def tell_far_rows(
    lse: RowVector,
    far: FarRowsIO,
    row0,
    place,
    params,
    sizes: HopperBackwardSizes,
    scale_log2,
    softcap_scale,
    P_SCALE_LOG2: tl.constexpr,
):
    """Recomputes those rows of a tile that are far from 0, and stores their numbers."""
    # ptxas: values that cross the branch to here would take registers, so all inputs are loaded
    # again.
    rows_M = row0 + tl.arange(0, params.tile.BLOCK_M)
    lse_places_M, places_M = row_places(lse, rows_M, place, sizes, params.seqs.seqlen_q)
    lse_M = tl.load(lse.ptr + lse_places_M, mask=rows_M < place.seq.len_q, other=float("-inf"))
    less_M = lse_log2(lse_M, P_SCALE_LOG2)
    far_M = is_far(less_M)
    head = head_mods(params.mods.scale, place.b, place.h, params)
    top_M, sum_M = logit_statistics(far, row0, place, head, params, scale_log2, softcap_scale)
    less_M, scale_M = far_rows(less_M, top_M, sum_M, P_SCALE_LOG2)
    tl.store(far.lse_log2 + places_M, less_M, mask=far_M)
    tl.store(far.dout_scale + places_M, scale_M, mask=far_M)
    if far.reference is not None:
        m_M, l_M = row_statistics(far.q, far.k, row0, place, head, params)
        tl.store(far.reference + places_M, m_M, mask=far_M)
        tl.store(far.factor + places_M, 1.0 / l_M, mask=far_M)


@triton.jit
def backward_prologue(
    io: BackwardPrologueIO,
    far: FarRowsIO,
    params: PortableParams,
    sizes: HopperBackwardSizes,
    q_blocks,
    scale_log2,
    softcap_scale,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Stores delta in the layout of lse; sets dq_accum, turns and tile_counter to 0; recomputes far
    rows.

    The grid has one program for BLOCK_M rows of a query head, q_blocks of the longest sequence, or
    of all sequences where these are pieces of batch entries. D: columns of dq_accum. params.tile:
    the tile of far rows. scale_log2, softcap_scale: as in HopperScoreMods, of the main kernel.
    """
    # Meanwhile the next kernel starts its set-up, then waits.
    cuda.gdc_launch_dependents()
    # Programs go from the last rows to the first. The next kernel adds to the first ones first,
    # which are then in the L2 cache.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if io.tile_counter is not None and pid == 0:
        tl.store(io.tile_counter, 0)
    row0 = (pid % q_blocks) * BLOCK_M
    heads = sizes.heads_k * sizes.group
    h = wide(pid // q_blocks % heads)
    b = wide(pid // q_blocks // heads)
    cu_q, seqlen_q = params.seqs.cu_q, params.seqs.seqlen_q
    if sizes.sequences is not None:
        b, row0 = tile_of_sequences(pid % q_blocks, cu_q, sizes.sequences, BLOCK_M)
        b = wide(b)
    token, len_q, stored_q = sequence(b, cu_q, params.seqs.used_q, None, seqlen_q)
    if row0 >= stored_q:
        return
    rows_M = row0 + tl.arange(0, BLOCK_M)
    zero = wide(0)
    seq = Seqlens(
        token_q=token,
        len_q=len_q,
        stored_q=stored_q,
        token_k=zero,
        len_k=zero,
        stored_k=zero,
        off=zero,
    )
    place = Place(b, h, zero, seq)
    lse_places_M, places_M = row_places(io.lse, rows_M, place, sizes, seqlen_q)
    accum_row = h * sizes.accum_rows + accum_begin(b, cu_q, seqlen_q, BLOCK_M) + row0
    sums = io.dq_accum + accum_row * D
    PART: tl.constexpr = D if D & (D - 1) == 0 else D // 3
    for part in tl.static_range(D // PART):
        places = sums + part * BLOCK_M * PART + tl.arange(0, BLOCK_M * PART)
        tl.store(places, tl.zeros([BLOCK_M * PART], tl.float32))
    if io.turns is not None:
        tl.store(io.turns + accum_row // BLOCK_M, 0)
    out = row_base(io.out, b, h, token)
    dout = row_base(io.dout, b, h, token)
    o_ME = load_rows(out, io.out.stride_n, row0, len_q, E, BLOCK_M, BLOCK_E, True)
    do_ME = load_rows(dout, io.dout.stride_n, row0, len_q, E, BLOCK_M, BLOCK_E, True)
    lse_M = tl.load(io.lse.ptr + lse_places_M, mask=rows_M < len_q, other=float("-inf"))
    P_SCALE_LOG2: tl.constexpr = p_scale_log2(io.dout.ptr.dtype.element_ty)
    dense = dense_place(place, sizes)
    delta_M = row_deltas(o_ME, do_ME, lse_M, io.dlse, dense, rows_M, rows_M < len_q)
    less_M = lse_log2(lse_M, P_SCALE_LOG2)
    far_M = is_far(less_M)
    tl.store(io.delta + places_M, delta_M, mask=rows_M < stored_q)
    near_M = (rows_M < stored_q) & (far_M == 0)
    tl.store(far.lse_log2 + places_M, less_M, mask=near_M)
    if far.reference is not None:
        tl.store(far.reference + places_M, lse_M, mask=near_M)
        tl.store(far.factor + places_M, tl.full([BLOCK_M], 1.0, tl.float32), mask=near_M)
    if tl.max(far_M.to(tl.int32), 0) != 0:
        HAS_BIAS: tl.constexpr = params.mods.bias.ptr is not None
        g = h // sizes.group
        whole = place_of(b, h, g, params.seqs, params.shape, params.mask, HAS_BIAS)
        for row in range(row0, row0 + BLOCK_M, params.tile.BLOCK_M):
            tell_far_rows(
                io.lse, far, row, whole, params, sizes, scale_log2, softcap_scale, P_SCALE_LOG2
            )
