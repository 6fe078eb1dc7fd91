"""Products of the backward over head dims that are no power of two: 96 columns are 64 and 32, 192
are 128 and 64. The last quarter of the tile in memory is zeros, which no product reads. A gradient
is a tuple with one tensor for each part.

M query rows, N keys (64), C columns of a part.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout, wait_products


@gluon.constexpr_function
def part_count(columns):
    """How many parts this many columns have."""
    return 1 if columns & (columns - 1) == 0 else 2


@gluon.constexpr_function
def part_columns(columns, part):
    """Columns of a part: a power of two."""
    if part_count(columns) == 1:
        return columns
    return columns // 3 if part else columns // 3 * 2


@gluon.constexpr_function
def share_columns(columns, block_m, share):
    """Columns of a share of a query tile's dQ, which is computed in two shares of about half each.
    With 64 queries they are parts or halves of the columns; with 128 queries they are halves of the
    rows."""
    if block_m > 64:
        return columns
    return columns // 2 if part_count(columns) == 1 else part_columns(columns, share)


@gluon.constexpr_function
def sum_count(columns):
    """How many pieces the epilogue adds of this many columns: parts, or pieces that fit a program's
    registers."""
    return columns // 128 if columns > 256 else part_count(columns)


@gluon.constexpr_function
def sum_columns(columns, piece):
    """Columns of a piece."""
    return 128 if columns > 256 else part_columns(columns, piece)


@gluon.jit
def part_of(rows, COLUMNS: gl.constexpr, part: gl.constexpr):
    """A part of the columns of rows in shared memory."""
    if part_count(COLUMNS) == 1:
        return rows
    else:
        return rows.slice(part * part_columns(COLUMNS, 0), part_columns(COLUMNS, part), dim=1)


@gluon.jit
def queue_transposed(keys, queries, COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Starts K Q^T or V dO^T, for 64 keys and a tile of queries."""
    x_NM = gl.zeros([ROWS, BLOCK_M], gl.float32, scores_layout(keys.dtype, BLOCK_M, gl.num_warps()))
    return add_transposed(keys, queries, x_NM, COLUMNS, False)


@gluon.jit
def add_transposed(keys, queries, x_NM, COLUMNS: gl.constexpr, ADDS: gl.constexpr = True):
    """Starts adding K Q^T or V dO^T to x or, unless ADDS, replacing x."""
    for part in gl.static_range(part_count(COLUMNS)):
        left = part_of(keys, COLUMNS, part)
        right = part_of(queries, COLUMNS, part).permute((1, 0))
        x_NM = warpgroup_mma(left, right, x_NM, use_acc=ADDS or part > 0, is_async=True)
    return x_NM


@gluon.jit
def no_gradients(COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Gradients of 64 keys, all 0."""
    layout: gl.constexpr = scores_layout(dtype, part_columns(COLUMNS, 0), gl.num_warps())
    made = (gl.zeros([ROWS, part_columns(COLUMNS, 0)], gl.float32, layout),)
    if part_count(COLUMNS) > 1:
        layout_1: gl.constexpr = scores_layout(dtype, part_columns(COLUMNS, 1), gl.num_warps())
        made = made + (gl.zeros([ROWS, part_columns(COLUMNS, 1)], gl.float32, layout_1),)
    return made


@gluon.jit
def queue_gradients(left_NM, queries, x_NC, COLUMNS: gl.constexpr):
    """Starts adding P^T dO or dS^T Q to gradients of 64 keys. left_NM: an operand in registers."""
    made = (warpgroup_mma(left_NM, part_of(queries, COLUMNS, 0), x_NC[0], is_async=True),)
    if part_count(COLUMNS) > 1:
        left_NM = gl.convert_layout(left_NM, gl.DotOperandLayout(0, x_NC[1].type.layout, 2))
        right = part_of(queries, COLUMNS, 1)
        made = made + (warpgroup_mma(left_NM, right, x_NC[1], is_async=True),)
    return made


@gluon.jit
def wait_for_gradients(x_NC, under_way: gl.constexpr = 0):
    """The gradients, once at most `under_way` products are still running."""
    if len(x_NC) == 1:
        return (wait_products(x_NC[0], under_way),)
    else:
        return wait_products(x_NC[0], under_way), wait_products(x_NC[1], under_way)


@gluon.jit
def scaled(x_NC, factor):
    """Gradients times a number."""
    made = (x_NC[0] * factor,)
    if len(x_NC) > 1:
        made = made + (x_NC[1] * factor,)
    return made
