"""Tensor maps of the Hopper kernels.

Dense tensors are mapped as (batch, head, row, dim). Packed sequences need rows past the end of each
to read as zeros and never to be written, from one map for all: see `packed_map`.
"""

from collections.abc import Mapping

from heedful.core.base.arrays import ArraySpec, item_bytes
from heedful.core.base.symbols import Symbol, if_above
from heedful.core.registry.tiles import CONSUMER_ROWS
from heedful.launch.spec import TensorMap as Map

SWIZZLE_BYTES = 128  # one swizzled row of shared memory
# The divisor that TMA wants of strides, those of dims of one element too.
STRIDE_BYTES = 16


def layout(spec: ArraySpec, rank: int, width: int) -> str:
    """The layout of a TMA box `width` elements wide, swizzled as widely as that allows."""
    item = item_bytes(spec.dtype)
    swizzle = min(SWIZZLE_BYTES, width * item)
    return (
        f"NVMMASharedLayout(swizzle_byte_width={swizzle if swizzle > 16 else 0},"
        f" element_bitwidth={8 * item}, rank={rank},"
        " transposed=False, fp4_padded=False, cga_layout=[])"
    )


def dense_map(name: str, spec: ArraySpec, rows: int, dim: int) -> Map:
    """(B, S, H, D) as (B, H, S, D): reads past a sequence give zeros, writes there are dropped."""
    order = (0, 2, 1, 3)
    shape = tuple(spec.shape[axis] for axis in order)
    strides = tuple(stride(spec, axis) for axis in order)
    return Map(name, spec.dtype, shape, strides, (1, 1, rows, dim), layout(spec, 4, dim))


def grouped_map(name: str, spec: ArraySpec, group: int, pack: int, dim: int) -> Map:
    """(B, S, H, D) as (B, G, S, H / G, D): a box has all query heads of a KV head, in `pack` rows
    for each position; rows beyond the group are out of bounds."""
    batch, heads = spec.shape[0], spec.shape[2] // group
    of_batch, of_row, of_head = (stride(spec, axis) for axis in range(3))
    return Map(
        name,
        spec.dtype,
        (batch, heads, spec.shape[1], group, spec.shape[3]),
        (of_batch, group * of_head, of_row, of_head, 1),
        (1, 1, CONSUMER_ROWS // pack, pack, dim),
        layout(spec, 5, dim),
    )


def packed_map(name: str, spec: ArraySpec, rows: int, dim: int) -> Map:
    """(T, H, D) seen as (2^30, end, H, row, D), so that every sequence ends where it ends.

    Row r of a sequence of n that ends at token e is row 2^30 - n + r of the fourth dimension: past
    2^30 the map is out of bounds. The first two coordinates, 2^30 and e, bring the address back:
    2^30 (2^34 - s) + e s + (2^30 - n + r) s = 2^64 + (e - n + r) s elements, and addresses wrap.
    The trick is that of Triton's `tools/ragged_tma.py`.

    (B, S, H, D) is mapped likewise, with batch entries `rows_between` rows apart. A box that would
    end after the last of them is out of bounds.
    """
    tokens, heads = row_stride(spec), stride(spec, -2)
    far = end = 0x7FFF0000
    if len(spec.shape) == 4:
        end = max(0, spec.shape[0] - 1) * rows_between(spec) + spec.shape[1] + 1
    return Map(
        name,
        spec.dtype,
        (far, end, spec.shape[-2], 1 << 30, spec.shape[-1]),
        ((1 << 34) - tokens, tokens, heads, tokens, 1),
        (1, 1, 1, rows, dim),
        layout(spec, 5, dim),
    )


# Most caches have fewer pages: kernels are compiled for this bound.
MANY_PAGES = 1 << 20


def no_page(buffers: Mapping[str, ArraySpec]) -> int:
    """A page number that does not exist: a power of two above those of all pages. Its rows still
    have 31-bit numbers, since the pages have fewer than 2^30 rows
    (`AttentionProblem.even_rows`)."""
    pages = buffers["k"].shape[0]
    rows = max(1, *(rows_between(buffers[name]) for name in ("k", "v")))
    most = 1 << ((1 << 31) // rows).bit_length() - 1
    return min(most, max(MANY_PAGES, 1 << (pages - 1).bit_length()))


def row_stride(spec: ArraySpec) -> int:
    """The stride of the rows of (B, S, H, D) or (T, H, D). If batch entries have one row each, it
    is the batch stride."""
    if len(spec.shape) == 4 and spec.shape[1] == 1 and spec.shape[0] > 1:
        return spec.strides[0] or _least_stride(spec)
    return stride(spec, -3)


def stride(spec: ArraySpec, axis: int) -> int:
    """A stride in elements; that of a dim of one element may be anything."""
    axis %= len(spec.shape)
    if axis == len(spec.shape) - 1:
        return spec.strides[axis]
    own, least = spec.strides[axis], _least_stride(spec)
    chosen, step = if_above(spec.shape[axis], 1, own, least), own
    if isinstance(own, Symbol):
        step = own.step
    if isinstance(chosen, Symbol) and step > 0 and step % least == 0:
        # Whether it matters depends on the lengths; one expression serves both.
        return own
    return chosen


def _least_stride(spec: ArraySpec) -> int:
    return STRIDE_BYTES // item_bytes(spec.dtype)


def rows_between(spec: ArraySpec) -> int:
    """Rows from one batch entry or page of (B, S, H, D) to the next, for a map that has rows but no
    batch dim. The planner has checked that it is a whole number (`AttentionProblem.even_rows`)."""
    return 0 if spec.shape[0] == 1 else spec.strides[0] // row_stride(spec)
