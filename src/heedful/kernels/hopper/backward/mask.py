"""Masks probabilities of queries that do not see a key. M query rows, N keys (64).

With key_ranges, a query has one word for each key tile: bytes from which a key's sum tells whether
it is seen. A range [a, b) of the tile's keys, each bound at most 128, has the bytes 128 - a and b.
Those of key k are k and 127 - k. Both sums have their highest bit set if a <= k < b, and none
carries into the next byte. Two ranges have four bytes. The producer makes the words, and they lie
beside the log-sum-exps.

With a block mask, a query has a bit for each key: a word for every 32 keys of the key tile, which
all keys of a warp are among. These, too, are the producer's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.mma import ROWS

FAR: gl.constexpr = gl.constexpr(1 << 30)
# The word of a query whose range holds all 128 keys of a tile.
ALL_KEYS: gl.constexpr = gl.constexpr(128 | 128 << 8)


@gluon.constexpr_function
def _hidden(queries, tests):
    """Assembly: 0 for the probabilities of a thread's two keys that pass one of these tests. "gt"
    compares with the first query to show, "le" with the first query to mask."""
    # ptxas: columns are immediates as in sm90/mask.py. Numbers change in place: no registers are
    # left.
    count = queries // 2
    operands = [(2 * (count + i) + row, test) for i, test in enumerate(tests) for row in range(2)]
    lines = [
        "{ .reg .pred p; .reg .b32 t, b<4>; mov.u32 t, %laneid; and.b32 t, t, 3; shl.b32 t, t, 1;"
    ]
    lines += [f"sub.s32 b{i}, ${operand}, t;" for i, (operand, _) in enumerate(operands)]
    for i in range(count):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        for b in range(row, len(operands), 2):
            lines.append(f"setp.{operands[b][1]}.s32 p, b{b}, {column};")
            lines.append(f"selp.f32 ${i}, 0f00000000, ${i}, p;")
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _in_place(queries, bounds):
    """Constraints: probabilities stay in their registers, and each bound has two numbers."""
    count = queries // 2
    ties = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + ties + ["r"] * (2 * bounds))


@gluon.constexpr_function
def _hidden_by_words(queries, ranges):
    """Assembly: 0 for probabilities of a thread's two keys that no range of a query shows."""
    count = queries // 2
    lines = ["{ .reg .pred p; .reg .b32 t, u;"]
    for i in range(count):
        row, query = i // 2 % 2, i // 4 * 2 + i % 2
        key = f"${2 * count + count // 2 + row}"
        lines.append(f"add.s32 t, ${2 * count + query}, {key};")
        if ranges == 1:
            lines.append("not.b32 t, t; and.b32 t, t, 0x8080; setp.eq.s32 p, t, 0;")
        else:
            lines.append("shr.u32 u, t, 8; and.b32 u, u, t; and.b32 u, u, 0x800080;")
            lines.append("setp.ne.s32 p, u, 0;")
        lines.append(f"selp.f32 ${i}, ${i}, 0f00000000, p;")
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _words_in_place(queries):
    """Constraints: probabilities stay in their registers."""
    count = queries // 2
    ties = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + ties + ["r"] * (count // 2 + 2))


@gluon.jit
def hide_by_words(p_NM, words_M, params, CONSUMER):
    """As `hide_queries`, for queries with key_ranges."""
    M: gl.constexpr = p_NM.shape[1]
    RANGES: gl.constexpr = params.mask.RANGES
    key_N = gl.arange(0, ROWS, layout=gl.SliceLayout(1, p_NM.type.layout)) + CONSUMER * ROWS
    bytes_N = key_N | (127 - key_N) << 8
    if RANGES == 2:
        bytes_N = bytes_N | bytes_N << 16
    text: gl.constexpr = _hidden_by_words(M, RANGES)
    operands: gl.constexpr = _words_in_place(M)
    return inline_asm(text, operands, [p_NM, words_M, bytes_N], p_NM.type, is_pure=True)


@gluon.constexpr_function
def _hidden_by_bits(queries):
    """Assembly: 0 for probabilities of a thread's two keys whose bit in the query's word is 0."""
    count = queries // 2
    lines = ["{ .reg .pred p; .reg .b32 t;"]
    for i in range(count):
        row, query = i // 2 % 2, i // 4 * 2 + i % 2
        bit = f"${2 * count + count // 2 + row}"
        lines.append(f"and.b32 t, ${2 * count + query}, {bit}; setp.ne.s32 p, t, 0;")
        lines.append(f"selp.f32 ${i}, ${i}, 0f00000000, p;")
    return " ".join(lines) + " }"


@gluon.jit
def hide_by_bits(p_NM, words_M):
    """As `hide_queries`, for queries of which a bit of these words tells whether they see a key: of
    the 32 keys that this thread's are among."""
    M: gl.constexpr = p_NM.shape[1]
    key_N = gl.arange(0, ROWS, layout=gl.SliceLayout(1, p_NM.type.layout))
    text: gl.constexpr = _hidden_by_bits(M)
    operands: gl.constexpr = _words_in_place(M)
    return inline_asm(text, operands, [p_NM, words_M, 1 << (key_N % 32)], p_NM.type, is_pure=True)


@gluon.jit
def bits_below(count_M):
    """A word whose lowest bits are set, so many of the 32."""
    return gl.where(count_M > 31, -1, (1 << gl.minimum(gl.maximum(count_M, 0), 31)) - 1)


@gluon.jit
def list_words(index, rows_M, col, params, tile):
    """The words of queries and the 32 keys from `col` on: which of them the query sees by the tile
    of bits of this index, and by position."""
    blocks = params.mask.blocks
    SIDE: gl.constexpr = blocks.SIDE
    WORDS: gl.constexpr = SIDE // 32
    place_M = rows_M + tile.seq.off - col
    at = blocks.bits + gl.maximum(index, 0).to(gl.int64) * (SIDE * WORDS) + col % SIDE // 32
    words_M = gl.load(at + rows_M % SIDE * WORDS, mask=(index >= 0) & (rows_M >= 0), other=-1)
    words_M = gl.where(index < -1, 0, words_M) & bits_below(tile.seq.len_k - col + 0 * rows_M)
    if params.mask.HAS_RIGHT:
        words_M &= bits_below(place_M + params.mask.right + 1)
    if params.mask.HAS_LEFT:
        words_M &= ~bits_below(place_M - params.mask.left)
    return words_M


@gluon.jit
def word_of(first_M, end_M, place_M, col, params, tile):
    """The bytes of a range of each query, by where keys from `col` on lie in it. place_M: of the
    query's diagonal."""
    first_M = gl.maximum(first_M, 0)
    end_M = gl.minimum(gl.maximum(end_M, 0), tile.seq.len_k)
    if params.mask.HAS_LEFT:
        first_M = gl.maximum(first_M, place_M - params.mask.left)
    if params.mask.HAS_RIGHT:
        end_M = gl.minimum(end_M, place_M + params.mask.right + 1)
    first_M = gl.minimum(gl.maximum(first_M - col, 0), 128)
    end_M = gl.minimum(gl.maximum(end_M - col, 0), 128)
    return (128 - first_M) | end_M << 8


@gluon.jit
def range_words(bounds, rows_M, params, tile):
    """The words of queries at a key tile. bounds: the two or four numbers of each query."""
    place_M = rows_M + tile.seq.off
    words_M = word_of(bounds[0], bounds[1], place_M, tile.col, params, tile)
    if params.mask.RANGES == 2:
        words_M |= word_of(bounds[2], bounds[3], place_M, tile.col, params, tile) << 16
    return words_M


@gluon.jit
def hide_queries(p_NM, params, tile, row, CONSUMER):
    """Probabilities of queries from `row` on, with 0 where a query does not see a key or the key
    does not exist."""
    M: gl.constexpr = p_NM.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, p_NM.type.layout)
    key_N = tile.col + CONSUMER * ROWS + gl.arange(0, ROWS, layout=layout)
    start_N = gl.full([ROWS], 0, gl.int32, layout)
    if params.mask.HAS_RIGHT:
        start_N = key_N - (tile.seq.off + params.mask.right + row)
    start_N = gl.where(key_N < tile.seq.len_k, start_N, FAR)
    if not params.mask.HAS_LEFT:
        text: gl.constexpr = _hidden(M, ("gt",))
        operands: gl.constexpr = _in_place(M, 1)
        return inline_asm(text, operands, [p_NM, start_N], p_NM.type, is_pure=True)
    else:
        stop_N = key_N - (tile.seq.off - params.mask.left + row) + 1
        text: gl.constexpr = _hidden(M, ("gt", "le"))
        operands: gl.constexpr = _in_place(M, 2)
        return inline_asm(text, operands, [p_NM, start_N, stop_N], p_NM.type, is_pure=True)
