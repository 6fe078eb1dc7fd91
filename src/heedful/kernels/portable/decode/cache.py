"""Loads keys and values of a cache as operands of products, in 16-bit words. A word holds one
value, two of 8 bits, or four of 4 bits.

The values of a word go to different operands: value i of all words of a row is one operand. So no
values move between threads, and the dims of the queries are loaded in the same order. The portable
decode kernel calls this. Shapes: N key rows, W words.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.kinds import Rows
from heedful.kernels.args.shared import Descale, ForwardIO
from heedful.kernels.common.keys import cache_row
from heedful.kernels.common.rows import wide
from heedful.kernels.common.sequences import within

# How stored values are converted to numbers. PLAIN uses Triton's own conversions, PTX the assembly
# of `conversion`. FMA uses the fewest instructions: integers by `conversion_by_fma`, 8-bit floats
# as float16 (`operand_type`).
PLAIN, PTX, FMA = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Words of a piece that one thread prefetches: two sectors of 32 bytes.
FETCHED = tl.constexpr(32)
# The bfloat16 numbers that `conversion_by_fma` makes are too small by this factor.
INTEGER_UNIT = tl.constexpr(64.0)


@triton.constexpr_function
def conversion(values, kind, is_bf16, i):
    """PTX that converts value i of two words to two numbers. kind: of 8-bit values: "int8", "e4m3"
    or "e5m2".

    An integer u >= 0 in the lowest bits of 1024 (float16) or 128 (bfloat16) increases that number
    by u; a signed integer is first made u by adding a bias. PTX converts 8-bit floats to float16
    only.
    """
    if values == 4:
        type_, magic = ("bf16x2", "0x43084308") if is_bf16 else ("f16x2", "0x64086408")
        return (
            f"{{ .reg .b32 t, m; shr.b32 t, $1, {4 * i}; and.b32 t, t, 0x000F000F;"
            f" xor.b32 t, t, {magic}; mov.b32 m, {magic}; sub.{type_} $0, t, m; }}"
        )
    if kind != "int8":
        select = "0x4431" if i else "0x4420"
        start = (
            f"{{ .reg .b32 t; .reg .b16 c, u; mov.b32 t, $1; prmt.b32 t, t, 0, {select};"
            f" mov.b32 {{c, u}}, t; cvt.rn.f16x2.{kind}x2 t, c;"
        )
        if not is_bf16:
            return start + " mov.b32 $0, t; }"
        return (
            start + " .reg .b16 x, y; .reg .f32 f, g; mov.b32 {x, y}, t;"
            " cvt.f32.f16 f, x; cvt.f32.f16 g, y; cvt.rn.bf16x2.f32 $0, g, f; }"
        )
    if is_bf16:
        # 128 plus the lowest seven bits, minus 128, or minus 256 if the sign is set.
        return (
            f"{{ .reg .b32 t, a, b; shr.b32 t, $1, {8 * i}; and.b32 a, t, 0x007F007F;"
            " or.b32 a, a, 0x43004300; and.b32 b, t, 0x00800080; or.b32 b, b, 0x43004300;"
            " sub.bf16x2 $0, a, b; }"
        )
    return (
        f"{{ .reg .b32 t, m; shr.b32 t, $1, {8 * i}; and.b32 t, t, 0x00FF00FF;"
        " xor.b32 t, t, 0x64806480; mov.b32 m, 0x64806480; sub.f16x2 $0, t, m; }"
    )


@triton.constexpr_function
def conversion_by_fma(values, is_bf16, i):
    """As `conversion`, for integers, by a permutation of bytes and one fma for two values.

    The sign of an integer becomes a bias, which the last instruction subtracts. An integer u >= 0
    in the lowest bits of 1024 increases a float16 by u. The lowest eight bits of a bfloat16 whose
    other bits are 0 are u * 2^-133, subnormal or not; times the largest power of two, this is u /
    64.
    """
    if values == 2:
        # Each byte of a word goes below a zero byte, or below the byte that makes a float16 from
        # 1024 on.
        above, select = ("0", "0x4341" if i else "0x4240"), "0x7371" if i else "0x7270"
        if is_bf16:
            return (
                "{ .reg .b32 t; xor.b32 t, $1, 0x80808080;"
                f" prmt.b32 t, t, {above[0]}, {above[1]};"
                " .reg .b32 a, c; mov.b32 a, 0x7F007F00; mov.b32 c, 0xC000C000;"
                " fma.rn.bf16x2 $0, t, a, c; }"
            )
        return (
            "{ .reg .b32 t; xor.b32 t, $1, 0x80808080;"
            f" prmt.b32 t, t, 0x64646464, {select};"
            " .reg .b32 m; mov.b32 m, 0x64806480; sub.f16x2 $0, t, m; }"
        )
    # Four bits that lie above four zero bits count sixteen times.
    mask, sign = ("0x00F000F0", 0x800080) if i % 2 else ("0x000F000F", 0x80008)
    sign |= 0 if is_bf16 else 0x64006400
    start = "{ .reg .b32 t, a, c; mov.b32 t, $1;" + (" shr.b32 t, t, 8;" if i >= 2 else "")
    start += f" lop3.b32 t, t, {mask}, 0x{sign:08X}, 0x6A;"  # (t & mask) ^ sign
    if is_bf16:
        by, less, type_ = "0x7D007D00" if i % 2 else "0x7F007F00", "0xBE00BE00", "bf16x2"
    else:
        by, less = ("0x2C002C00", "0xD480D480") if i % 2 else ("0x3C003C00", "0xE408E408")
        type_ = "f16x2"
    return f"{start} mov.b32 a, {by}; mov.b32 c, {less}; fma.rn.{type_} $0, t, a, c; }}"


@triton.constexpr_function
def is_by_fma(values, stored, method):
    """Whether `conversion_by_fma` converts these stored values."""
    return method == FMA.value and (values == 4 or (values == 2 and not stored.is_fp8()))


@triton.constexpr_function
def unit_of(values, stored, dtype, method):
    """The factor for scores and results of stored values, as their conversion leaves them."""
    is_short = is_by_fma(values, stored, method) and dtype == tl.bfloat16
    return INTEGER_UNIT.value if is_short else 1.0


@triton.constexpr_function
def is_float16(values, stored, method):
    """Whether stored values become float16, because that takes the fewest instructions."""
    return method == FMA.value and values == 2 and stored.is_fp8()


@triton.constexpr_function
def operand_type(values, stored, dtype, method, has_scales):
    """The dtype of keys or values in a product, and of the other operand. dtype: that of the
    queries.

    8-bit floats become float16 by two instructions, exactly; three more would make them bfloat16.
    has_scales: the other operand was multiplied by scales of rows, or the values by scales of
    groups. Such numbers may be outside of float16's range, so the product stays in `dtype`.
    """
    if method == FMA.value and values == 2 and stored.is_fp8() and not has_scales:
        return tl.float16
    return dtype


@triton.constexpr_function
def kind_of(stored):
    """The name of an 8-bit type for `conversion`."""
    if not stored.is_fp8():
        return "int8"
    return "e5m2" if "e5" in str(stored) else "e4m3"


@triton.constexpr_function
def assembly(values, stored, is_bf16, method, i):
    """The PTX that converts value i of two words."""
    if is_by_fma(values, stored, method):
        return conversion_by_fma(values, is_bf16, i)
    return conversion(values, kind_of(stored), is_bf16, i)


@triton.jit
def value_of_words(
    words,
    VALUES: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
    CONVERSION: tl.constexpr,
    i: tl.constexpr,
):
    """Value i of every word, as DTYPE. STORED: the dtype of stored values; VALUES = 4 stands for
    int4."""
    if VALUES == 1:
        return words.to(DTYPE)
    elif CONVERSION:
        IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
        text: tl.constexpr = assembly(VALUES, STORED, IS_BF16, CONVERSION, i)
        if IS_BF16:
            return tl.inline_asm_elementwise(
                text, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                text, "=r,r", [words], tl.float16, is_pure=True, pack=2
            )
    elif VALUES == 4:
        nibbles = ((words.to(tl.int32) >> (4 * i)) & 15) ^ 8
        return (nibbles - 8).to(tl.float32).to(DTYPE)
    elif STORED.is_fp8():
        bits = ((words >> (8 * i)) & 255).to(tl.uint8)
        return bits.to(STORED, bitcast=True).to(tl.float32).to(DTYPE)
    else:
        # Sign extension: the bits are shifted up, then arithmetically down.
        return ((words << (8 - 8 * i)) >> 8).to(tl.float32).to(DTYPE)


@triton.constexpr_function
def has_own_scales(v_in_k, kv_group):
    """Whether rows of keys have scales of their own, and behind them columns of bfloat16: latent
    vectors in rows of bytes. Values that lie in keys have no other scales of groups."""
    return v_in_k and kv_group > 0


@triton.constexpr_function
def stored_type(element, owns):
    """The dtype of stored values. owns: whether rows are bytes that have scales of their own."""
    return tl.float8e4nv if owns else element


@triton.constexpr_function
def rest_words(v_in_k, head_dim, head_dim_v, values):
    """Words of a row of keys past the values that lie in it, rounded up to what a product takes; 0
    if there are none, or if values are stored separately."""
    words = -(-(head_dim - head_dim_v) // values)
    if not v_in_k or not words:
        return 0
    return max(16, 1 << (words - 1).bit_length())


@triton.jit
def word_pointer(ptr, VALUES: tl.constexpr):
    """The same address as a pointer to 16-bit words."""
    if VALUES == 1:
        return ptr
    else:
        return ptr.to(tl.pointer_type(tl.int16))


@triton.jit
def in_words(stride, BITS: tl.constexpr):
    """A stride of stored elements, converted to words."""
    if BITS == 8:
        return stride // 2
    else:
        return stride


class KeyRows(NamedTuple):
    """The rows of a tile of keys [N], of KV head g. entry, row: page or batch entry, and row in it,
    as `key_rows` finds them. exists: which of the rows the sequence has."""

    entry: Any
    row: Any
    exists: Any
    g: Any


@triton.constexpr_function
def holds_rows(block_m, values, stored):
    """Whether the offsets of a tile's rows stay in registers from tile to tile. The conversion of
    integers and the outputs of many rows leave no registers for them."""
    return block_m < 16 or (block_m == 16 and (values == 1 or stored.is_fp8()))


@triton.jit
def key_rows(block, exists, place, params, HOLDS: tl.constexpr):
    """The rows of tile `block` of a sequence's keys: page or batch entry, and row in it.

    The row is the sum of a number and a tensor [N]. If HOLDS, and without pages, the tensor is the
    same for all tiles. A page number that does not exist is clamped to the first or the last page.
    """
    N: tl.constexpr = params.tile.BLOCK_N
    within_N = tl.arange(0, N)
    if params.cache.table is None:
        if HOLDS:
            rows = wide(place.seq.token_k + block * N), wide(within_N)
        else:
            rows = wide(0), wide(place.seq.token_k + (block * N + within_N))
        return KeyRows(cache_row(params.cache, place.b), rows, exists, place.g)
    else:
        rows = place.seq.token_k + (block * N + within_N)
        table = params.cache.table + place.b * params.cache.stride_tableb
        page = tl.load(table + rows // params.cache.page_size, mask=exists, other=0)
        entry = within(page, 0, params.cache.entries - 1).to(tl.int64)
        return KeyRows(entry, (wide(0), wide(rows % params.cache.page_size)), exists, place.g)


@triton.jit
def load_words(
    x: Rows,
    keys,
    slice_words,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    ACROSS: tl.constexpr = False,
):
    """Words of rows of keys or values, from word `slice_words` on: [N, BLOCK] or, if ACROSS,
    [BLOCK, N]. They are zero where no row exists, and past DIM values."""
    BITS: tl.constexpr = x.ptr.dtype.element_ty.primitive_bitwidth
    base = word_pointer(x.ptr, VALUES) + keys.g * in_words(x.stride_h, BITS) + slice_words
    first, rows = keys.row
    base += first * in_words(x.stride_n, BITS)
    offsets = rows * in_words(x.stride_n, BITS)
    if keys.entry.type.is_block():
        offsets += keys.entry * in_words(x.stride_b, BITS)
    else:
        base += keys.entry * in_words(x.stride_b, BITS)
    words = tl.arange(0, BLOCK)
    if ACROSS:
        ptrs = base + offsets[None, :] + words[:, None]
        ok = keys.exists[None, :]
    else:
        ptrs = base + offsets[:, None] + words[None, :]
        ok = keys.exists[:, None]
    if DIM != BLOCK * VALUES:
        inside = slice_words * VALUES + words * VALUES < DIM
        ok &= inside[:, None] if ACROSS else inside[None, :]
    return tl.load(ptrs, mask=ok, other=0)


@triton.jit
def fetch_rows(x: Rows, first, place, params, DIM: tl.constexpr):
    """Prefetches a tile of rows of all KV heads, from row `first` of a sequence on, to the L2.
    The program of each head prefetches one part, as many bytes as it reads. It does so only if
    heads are adjacent in memory: a cache line then has rows of several heads, whose programs would
    read it at different times."""
    VALUES: tl.constexpr = params.tile.VALUES
    BITS: tl.constexpr = x.ptr.dtype.element_ty.primitive_bitwidth
    ROW: tl.constexpr = DIM // VALUES  # words
    PIECES: tl.constexpr = params.tile.BLOCK_N * ROW // FETCHED
    stride_n = in_words(x.stride_n, BITS)
    pieces = tl.maximum(params.shape.heads_k * ROW // FETCHED, 1)
    piece = place.g * PIECES + tl.arange(0, PIECES)
    row = piece // pieces
    offsets = row * stride_n.to(tl.int32) + piece % pieces * FETCHED
    entry = cache_row(params.cache, place.b)
    base = word_pointer(x.ptr, VALUES) + entry * in_words(x.stride_b, BITS)
    base += wide(place.seq.token_k + first) * stride_n
    ok = (first + row < place.seq.len_k) & (in_words(x.stride_h, BITS) == ROW)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [(base + offsets).to(tl.int64), ok.to(tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_tile(io: ForwardIO, block, place, params):
    """Prefetches a tile of keys and of values to the L2 cache, by `fetch_rows`."""
    first = block * params.tile.BLOCK_N
    fetch_rows(io.k, first, place, params, params.tile.HEAD_DIM)
    if not params.tile.V_IN_K:
        fetch_rows(io.v, first, place, params, params.tile.HEAD_DIM_V)


@triton.jit
def descale_rows(x, descale: Descale, keys):
    """(address, offsets [N]) of rows in descale array `x`."""
    first, rows = keys.row
    x += first * descale.stride_n
    offsets = rows * descale.stride_n
    if keys.entry.type.is_block():
        offsets += keys.entry * descale.stride_b
    else:
        x += keys.entry * descale.stride_b
    return x, offsets


@triton.jit
def group_values(x, descale: Descale, keys, index):
    """The elements of descale array `x` for group `index` of rows, [N]."""
    base, offsets = descale_rows(x + keys.g * descale.stride_h + index, descale, keys)
    return tl.load(base + offsets, mask=keys.exists, other=0.0)


@triton.jit
def slice_scales(x: Rows, descale: Descale, keys, index, DIM: tl.constexpr):
    """The scales of slice `index` of rows, [N]; those of rows of bytes lie behind DIM values."""
    if descale.ptr is not None:
        return group_values(descale.ptr, descale, keys, index)
    else:
        first, rows = keys.row
        base = x.ptr.to(tl.pointer_type(tl.float32)) + (keys.g * x.stride_h // 4 + DIM // 4 + index)
        base += first * (x.stride_n // 4)
        scale_N = base + rows * (x.stride_n // 4) + keys.entry * (x.stride_b // 4)
        return tl.load(scale_N, mask=keys.exists, other=0.0)


@triton.jit
def load_rest(x: Rows, keys, FIRST: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """The columns of bfloat16 in rows of bytes, from byte FIRST on: [N, COLUMNS]."""
    words = load_words(x, keys, FIRST // 2, 2 * COLUMNS, COLUMNS, 2).to(tl.bfloat16, bitcast=True)
    if tl.bfloat16 == DTYPE:
        return words
    else:
        return words.to(tl.float32).to(DTYPE)


@triton.jit
def of_each_value(
    x, descale: Descale, keys, i: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, params
):
    """The elements of descale array `x` for value i of each word of rows, [N, BLOCK]."""
    x, offsets = descale_rows(x + keys.g * descale.stride_h, descale, keys)
    KV_GROUP: tl.constexpr = params.descales.KV_GROUP
    VALUES: tl.constexpr = params.tile.VALUES
    WORDS: tl.constexpr = KV_GROUP // VALUES
    # All words of a group have one scale, which is loaded once.
    SPREADS: tl.constexpr = KV_GROUP % VALUES == 0 and BLOCK % max(WORDS, 1) == 0
    if SPREADS:
        GROUPS: tl.constexpr = BLOCK // WORDS
        groups = tl.arange(0, GROUPS)
        ok = keys.exists[:, None] & (groups < DIM // KV_GROUP)[None, :]
        loaded = tl.load(x + (offsets[:, None] + groups[None, :]), mask=ok, other=0.0)
        N: tl.constexpr = loaded.shape[0]
        return tl.reshape(tl.broadcast_to(loaded[:, :, None], [N, GROUPS, WORDS]), [N, BLOCK])
    else:
        dims = tl.arange(0, BLOCK) * VALUES + i
        ok = keys.exists[:, None] & (dims < DIM)[None, :]
        return tl.load(x + (offsets[:, None] + (dims // KV_GROUP)[None, :]), mask=ok, other=0.0)


@triton.jit
def dequantized(
    values, descale: Descale, keys, i: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr, params
):
    """Value i of each word, times its scale and plus its shift; the result is still to be
    multiplied by UNIT."""
    BLOCK: tl.constexpr = values.shape[1]
    scale = of_each_value(descale.ptr, descale, keys, i, DIM, BLOCK, params)
    scaled = values.to(tl.float32) * scale
    if descale.shift is not None:
        shift = of_each_value(descale.shift, descale, keys, i, DIM, BLOCK, params)
        scaled += shift / UNIT
    return scaled.to(values.dtype)
