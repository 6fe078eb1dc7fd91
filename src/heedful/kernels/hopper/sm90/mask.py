"""Masks scores, or probabilities, of keys that a row does not see. M query rows, N keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.block_lists import bits_visible
from heedful.kernels.hopper.sm90.block_range import listed_tile, needs_mask
from heedful.kernels.hopper.sm90.compat import HAS_INLINE_ASM, inline_asm
from heedful.kernels.hopper.sm90.sequences import query_position


@gluon.constexpr_function
def _outside(keys, tests, value):
    """Assembly that sets a thread's scores of two rows to `value` where a key passes one of the
    tests. "le" compares with the first key to mask, "gt" with the first key to show."""
    # ptxas: columns are immediates. LLVM would compute a tensor of columns before all loops, and
    # keep it.
    count = keys // 2
    operands = [(2 * (count + i) + row, test) for i, test in enumerate(tests) for row in range(2)]
    bounds = [(f"${operand}", test) for operand, test in operands]
    fill = {float("inf"): "0f7F800000", float("-inf"): "0fFF800000", 0.0: "0f00000000"}[value]
    lines = [
        "{ .reg .pred p; .reg .b32 t, b<4>; mov.u32 t, %laneid; and.b32 t, t, 3; shl.b32 t, t, 1;"
    ]
    lines += [f"sub.s32 b{i}, {bound}, t;" for i, (bound, _) in enumerate(bounds)]
    for i in range(count):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        source = f"${count + i}"
        for b in range(row, len(bounds), 2):
            lines.append(f"setp.{bounds[b][1]}.s32 p, b{b}, {column};")
            lines.append(f"selp.f32 ${i}, {fill}, {source}, p;")
            source = f"${i}"
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _tests(has_start, has_stop):
    """The tests of `_outside` for these bounds, in the order of operands."""
    return ("le",) * has_stop + ("gt",) * has_start


@gluon.constexpr_function
def _kinds(operands):
    """Constraints of the assembly: scores, written to other registers than they are read from, and
    the bounds."""
    return ("=&f", "f", *("r",) * (operands - 1))


@gluon.jit
def mask_outside(s_MN, start_M, stop_M, FILL: gl.constexpr = float("-inf")):
    """A warpgroup's scores or probabilities, with keys outside [start, stop) set to FILL. One of
    the two bounds may be None."""
    if HAS_INLINE_ASM:
        operands = (s_MN,)
        if stop_M is not None:
            operands = operands + (stop_M,)
        if start_M is not None:
            operands = operands + (start_M,)
        tests: gl.constexpr = _tests(start_M is not None, stop_M is not None)
        text: gl.constexpr = _outside(s_MN.shape[1], tests, FILL)
        return inline_asm(text, _kinds(len(operands)), operands, s_MN.type, is_pure=True)
    else:
        key_N = gl.arange(0, s_MN.shape[1], layout=gl.SliceLayout(0, s_MN.type.layout))
        if stop_M is not None:
            s_MN = gl.where(key_N[None, :] < stop_M[:, None], s_MN, FILL)
        if start_M is not None:
            s_MN = gl.where(key_N[None, :] >= start_M[:, None], s_MN, FILL)
        return s_MN


@gluon.constexpr_function
def _outside_both(keys, value):
    """As `_outside`, for keys outside of two ranges: of each the first key to show and the first to
    mask, of two rows."""
    count = keys // 2
    fill = {float("-inf"): "0fFF800000", 0.0: "0f00000000"}[value]
    lines = [
        "{ .reg .pred p, q; .reg .b32 t, b<8>; mov.u32 t, %laneid; and.b32 t, t, 3;"
        " shl.b32 t, t, 1;"
    ]
    lines += [f"sub.s32 b{i}, ${2 * count + i}, t;" for i in range(8)]
    for i in range(count):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        lines.append(
            f"setp.le.s32 p, b{row}, {column}; setp.gt.and.s32 p, b{2 + row}, {column}, p;"
        )
        lines.append(f"setp.le.s32 q, b{4 + row}, {column};")
        lines.append(f"setp.gt.and.s32 q, b{6 + row}, {column}, q; or.pred p, p, q;")
        lines.append(f"selp.f32 ${i}, ${count + i}, {fill}, p;")
    return " ".join(lines) + " }"


@gluon.jit
def mask_outside_both(s_MN, start_M, stop_M, start2_M, stop2_M, FILL: gl.constexpr):
    """As `mask_outside`, for keys outside of both [start, stop) and [start2, stop2)."""
    if HAS_INLINE_ASM:
        text: gl.constexpr = _outside_both(s_MN.shape[1], FILL)
        operands = (s_MN, start_M, stop_M, start2_M, stop2_M)
        return inline_asm(text, ("=&f", "f", "r", "r", "r", "r"), operands, s_MN.type, is_pure=True)
    else:
        key_N = gl.arange(0, s_MN.shape[1], layout=gl.SliceLayout(0, s_MN.type.layout))[None, :]
        in_first = (key_N >= start_M[:, None]) & (key_N < stop_M[:, None])
        in_second = (key_N >= start2_M[:, None]) & (key_N < stop2_M[:, None])
        return gl.where(in_first | in_second, s_MN, FILL)


@gluon.jit
def ranges_at(params, tile, rows):
    """Where the ranges of these rows of a work tile lie."""
    base = params.mask.ranges.ptr + tile.batch.to(gl.int64) * params.mask.ranges.stride_b
    base += tile.head.to(gl.int64) * params.mask.ranges.stride_h
    base += tile.seq.token_q.to(gl.int64) * params.mask.ranges.stride_m
    return base + rows * params.mask.ranges.stride_m


@gluon.jit
def range_start(at_M, exists_M, least_M, col):
    """The first key to show of the ranges at these addresses, counted from `col` on. least_M: a
    bound on it, counted so."""
    start_M = gl.maximum(gl.load(at_M, mask=exists_M, other=0), 0) - col
    return gl.maximum(start_M, least_M)


@gluon.jit
def range_stop(at_M, exists_M, stop_M, col):
    """As `range_start`, the first key to mask."""
    end_M = gl.maximum(gl.load(at_M + 1, mask=exists_M, other=0), 0) - col
    return gl.minimum(end_M, stop_M)


@gluon.jit
def mask_one_range(
    s_MN, keys, at_M, exists_M, least_M, stop_M, j, col, FILL: gl.constexpr = float("-inf")
):
    """Scores of key tile j, from key `col` on, with keys outside of the ranges at these addresses
    set to FILL. A tile that one bound crosses is rarely crossed by the other."""
    if j >= keys.full_end:
        stop_M = range_stop(at_M, exists_M, stop_M, col)
        s_MN = mask_outside(s_MN, None, stop_M, FILL)
    if j < keys.full_begin:
        start_M = range_start(at_M, exists_M, least_M, col)
        s_MN = mask_outside(s_MN, start_M, None, FILL)
    return s_MN


@gluon.jit
def mask_ranges(
    s_MN, keys, diagonal_M, stop_M, params, tile, row, j, FILL: gl.constexpr = float("-inf")
):
    """Scores of key tile j with keys outside of the rows' key_ranges, and of the window, set to
    FILL. stop_M: the first key to mask by position, counted from the tile's first on, as diagonal_M
    is."""
    col = j * params.tile.BLOCK_N
    M: gl.constexpr = s_MN.shape[0]
    rows_M = row + gl.arange(0, M, layout=gl.SliceLayout(1, s_MN.type.layout))
    exists_M = rows_M < tile.seq.len_q
    at_M = ranges_at(params, tile, rows_M)
    least_M = gl.full([M], 0, gl.int32, gl.SliceLayout(1, s_MN.type.layout))
    if params.mask.HAS_LEFT:
        least_M = diagonal_M - params.mask.left
    if params.mask.RANGES == 1:
        return mask_one_range(s_MN, keys, at_M, exists_M, least_M, stop_M, j, col, FILL)
    else:
        start_M = range_start(at_M, exists_M, least_M, col)
        start2_M = range_start(at_M + 2, exists_M, least_M, col)
        if (keys.first_end <= keys.begin) & (j >= keys.begin):
            # A tile of the later run: of a row's two ranges only the one that begins later shows
            # keys of it.
            at_M += gl.where(start2_M >= start_M, 2, 0)
            s_MN = mask_one_range(s_MN, keys, at_M, exists_M, least_M, stop_M, j, col, FILL)
        else:
            end_M = range_stop(at_M, exists_M, stop_M, col)
            end2_M = range_stop(at_M + 2, exists_M, stop_M, col)
            s_MN = mask_outside_both(s_MN, start_M, end_M, start2_M, end2_M, FILL)
        return s_MN


@gluon.constexpr_function
def _by_bits(keys, value):
    """Assembly that keeps a thread's scores of two rows where the words of bits of these rows show
    the key, and sets others to `value`. A word has 32 keys."""
    # ptxas: shifted once by the lane's first column, all other shifts are immediates.
    count, words = keys // 2, keys // 16
    fill = {float("-inf"): "0fFF800000", 0.0: "0f00000000"}[value]
    lines = [
        f"{{ .reg .pred p; .reg .b32 t, x, b<{words}>; mov.u32 t, %laneid; and.b32 t, t, 3;"
        " shl.b32 t, t, 1;"
    ]
    lines += [f"shr.b32 b{i}, ${2 * count + i}, t;" for i in range(words)]
    for i in range(count):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        bit = 1 << column % 32
        lines.append(f"and.b32 x, b{column // 32 * 2 + row}, {bit}; setp.ne.s32 p, x, 0;")
        lines.append(f"selp.f32 ${i}, ${count + i}, {fill}, p;")
    return " ".join(lines) + " }"


@gluon.jit
def mask_by_bits(s_MN, params, bits, row, col, FILL: gl.constexpr):
    """Scores of rows from `row` on and keys from `col` on, with keys that these bits hide set to
    FILL. bits: the index of a tile in the pool."""
    M: gl.constexpr = s_MN.shape[0]
    N: gl.constexpr = s_MN.shape[1]
    layout: gl.constexpr = s_MN.type.layout
    rows_M = row + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    if HAS_INLINE_ASM:
        WORDS: gl.constexpr = params.mask.blocks.SIDE // 32
        base = params.mask.blocks.bits + bits.to(gl.int64) * (params.mask.blocks.SIDE * WORDS)
        at_M = base + (
            rows_M % params.mask.blocks.SIDE * WORDS + col % params.mask.blocks.SIDE // 32
        )
        operands = (s_MN,)
        for word in gl.static_range(N // 32):
            operands = operands + (gl.load(at_M + word),)
        text: gl.constexpr = _by_bits(N, FILL)
        return inline_asm(text, _kinds(len(operands)), operands, s_MN.type, is_pure=True)
    else:
        cols_N = col + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
        shown_MN = bits_visible(bits, rows_M[:, None], cols_N[None, :], params.mask.blocks)
        return gl.where(shown_MN, s_MN, FILL)


@gluon.jit
def mask_listed(s_MN, params, tile, row, j, FILL: gl.constexpr):
    """Scores of place j in the list of rows from `row` on, with keys set to FILL that bits or
    positions hide."""
    N: gl.constexpr = params.tile.BLOCK_N
    M: gl.constexpr = s_MN.shape[0]
    rows: gl.constexpr = gl.SliceLayout(1, s_MN.type.layout)
    col, bits = listed_tile(params, tile, row, j)
    if bits >= 0:
        s_MN = mask_by_bits(s_MN, params, bits, row, col, FILL)
    diagonal = row + tile.seq.off - col
    stop = tile.seq.len_k - col
    hides = stop < N
    stop_M = gl.full([M], 0, gl.int32, rows) + stop
    start_M = None
    if params.mask.HAS_RIGHT:
        hides = hides | (diagonal + params.mask.right + 1 < N)
        stop_M = gl.minimum(
            stop_M, gl.arange(0, M, layout=rows) + (diagonal + params.mask.right + 1)
        )
    if params.mask.HAS_LEFT:
        hides = hides | (diagonal + (M - 1) - params.mask.left > 0)
        start_M = gl.arange(0, M, layout=rows) + (diagonal - params.mask.left)
    if hides:
        s_MN = mask_outside(s_MN, start_M, stop_M, FILL)
    return s_MN


@gluon.jit
def apply_mask(s_MN, keys, params, tile, row, j, FILL: gl.constexpr = float("-inf")):
    """Scores or probabilities of query rows from `row` on and key tile j, with unseen keys set to
    FILL."""
    if params.mask.blocks.SIDE:
        return mask_listed(s_MN, params, tile, row, j, FILL)
    else:
        return mask_by_position(s_MN, keys, params, tile, row, j, FILL)


@gluon.jit
def mask_by_position(s_MN, keys, params, tile, row, j, FILL: gl.constexpr):
    """`apply_mask` of rows that have no list."""
    col = j * params.tile.BLOCK_N
    M: gl.constexpr = s_MN.shape[0]
    layout: gl.constexpr = s_MN.type.layout
    stop_M = gl.full([M], 0, gl.int32, gl.SliceLayout(1, layout)) + (tile.seq.len_k - col)
    place_M = query_position(params, gl.arange(0, M, layout=gl.SliceLayout(1, layout)))
    diagonal_M = place_M + (query_position(params, row) + tile.seq.off - col)
    if params.mask.HAS_RIGHT:
        stop_M = gl.minimum(stop_M, diagonal_M + (params.mask.right + 1))
    if params.mask.RANGES:
        return mask_ranges(s_MN, keys, diagonal_M, stop_M, params, tile, row, j, FILL)
    elif not params.mask.HAS_LEFT:
        return mask_outside(s_MN, None, stop_M, FILL)
    elif params.tile.V_TRANSPOSED:
        # fp8 masks few tiles, where a branch for each bound would cost more than both bounds do.
        return mask_outside(s_MN, diagonal_M - params.mask.left, stop_M, FILL)
    elif params.mask.first is None:
        # A tile that one bound of a window crosses is rarely crossed by the other.
        if j >= keys.full_end:
            s_MN = mask_outside(s_MN, None, stop_M, FILL)
        if j < keys.full_begin:
            s_MN = mask_outside(s_MN, diagonal_M - params.mask.left, None, FILL)
        return s_MN
    else:
        N: gl.constexpr = s_MN.shape[1]
        key_N = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
        within_MN = key_N[None, :] >= (diagonal_M - params.mask.left)[:, None]
        within_MN = within_MN | (key_N < params.mask.first - col)[None, :]
        return gl.where(within_MN & (key_N[None, :] < stop_M[:, None]), s_MN, FILL)


@gluon.jit
def apply_mask_if_needed(s_MN, keys, params, tile, row, j):
    """Scores of key tile j with unseen keys at -inf; the same scores if all keys are seen."""
    if needs_mask(keys, j):
        s_MN = apply_mask(s_MN, keys, params, tile, row, j)
    return s_MN
