"""How the arrays of a call are stored, as kernels get them."""

from collections.abc import Sequence

from heedful.core.base.arrays import ArraySpec, item_bytes
from heedful.core.base.symbols import if_above
from heedful.core.call.arguments import argument_name
from heedful.core.call.operands import LENGTHS, Operands
from heedful.core.call.problem import NEAR_BYTES


def has_dense_rows(spec: ArraySpec) -> bool:
    """Whether rows are contiguous."""
    return not spec.shape or spec.strides[-1] == 1 or spec.shape[-1] <= 1


def dense_rows(spec: ArraySpec) -> ArraySpec:
    """The array, or, if the stride of its last dim is not 1, the copy that kernels get."""
    if has_dense_rows(spec):
        return spec
    return ArraySpec.contiguous(spec.shape, spec.dtype, spec.device)


# The dtypes in which kernels get operands that may come in others.
_CASTS = {"sink": "float32", **dict.fromkeys((*LENGTHS, "origins", "block_table"), "int32")}


def casts(x: Operands) -> dict[str, str]:
    """The dtypes to which operands are cast before kernels get them, by name."""
    operands = ((name, dtype, getattr(x, name)) for name, dtype in _CASTS.items())
    return {n: dtype for n, dtype, spec in operands if spec is not None and spec.dtype != dtype}


def copies(x: Operands, kind: str = "dense") -> tuple[str, ...]:
    """Notes for the user about the arrays that are copied or cast. kind: as in `Options`."""
    notes = [
        f"{name} is copied: its last dim has stride {spec.strides[-1]}"
        for name, spec in zip("qkv", x[:3], strict=True)
        if not has_dense_rows(spec)
    ]
    notes += [
        f"{argument_name(name, kind)} is cast to {dtype} by a launch of its own"
        for name, dtype in casts(x).items()
    ]
    if x.bias is not None and x.bias.dtype == "bool":
        dtype = mask_dtype(x.q.dtype)
        notes.append(f"bias is written as {dtype} by a launch of its own: it is bool")
    return tuple(notes)


def mask_dtype(q: str) -> str:
    """The dtype in which kernels get a bool bias: that of the queries, `q`, if it has 16 bits, else
    bfloat16."""
    return q if item_bytes(q) == 2 else "bfloat16"


def storage(
    q: ArraySpec, k: ArraySpec, v: ArraySpec, out: ArraySpec | None, by_ranges: bool = False
) -> dict[str, bool]:
    """The problem's facts about addresses and strides. by_ranges: whether there are key_ranges."""
    specs = (q, k, v) if out is None else (q, k, v, out)
    return {
        "aligned": all(map(_is_aligned, specs)),
        "even_rows": _has_even_rows(k) and _has_even_rows(v),
        "near_rows": _are_near(specs),
        "rows_follow": not by_ranges or all(map(rows_follow, specs)),
    }


def rows_follow(spec: ArraySpec) -> bool:
    """Whether the rows of each batch entry of (B, S, ...) follow those of the entry before."""
    shape, strides = spec.shape, spec.strides
    return bool(len(shape) != 4 or strides[0] == shape[1] * strides[1] or shape[0] <= 1)


def have_own_ranges(ranges: ArraySpec | None) -> bool:
    """Whether heads have key_ranges of their own."""
    return ranges is not None and len(ranges.shape) == 4 and bool(ranges.steps[1] != 0)


def extent(spec: ArraySpec) -> int:
    """The bytes from the start of the first element to the end of the last."""
    if 0 in spec.shape:
        return 0
    last = sum([(size - 1) * step for size, step in zip(spec.shape, spec.strides, strict=True)])
    return (last + 1) * item_bytes(spec.dtype)


def may_share(one: ArraySpec, other: ArraySpec, apart: int) -> bool:
    """Whether two arrays may have bytes in common; False only if they certainly have none. apart:
    bytes from the start of one to that of the other. If one array lies in the gaps of the other
    (keys and values in one cache, columns of one matrix), both have rows at the same steps: modulo
    such a step, each is one interval of bytes.
    """
    if not -extent(other) < apart < extent(one):
        return False
    dims = [_dims(spec) for spec in (one, other)]
    for period in {step for array in dims for _, step in array}:
        widths = []
        for spec, array in zip((one, other), dims, strict=True):
            if any(step > period and step % period for _, step in array):
                break
            inner = sum([(size - 1) * step for size, step in array if step < period])
            widths.append(inner + item_bytes(spec.dtype))
        else:
            between = apart % period
            if widths[0] <= between and between + widths[1] <= period:
                return False
    return True


def _dims(spec: ArraySpec) -> list[tuple[int, int]]:
    """Size and step, in bytes, of each dim that is stepped over."""
    item = item_bytes(spec.dtype)
    pairs = zip(spec.shape, spec.strides, strict=True)
    return [(size, step * item) for size, step in pairs if size > 1 and step > 0]


def _are_near(specs: Sequence[ArraySpec]) -> bool:
    """Whether rows of all these begin less than NEAR_BYTES, a power of two, apart."""
    apart = alone = 0
    for spec in specs:
        if len(spec.shape) > 2:
            step = abs(spec.strides[-3]) * item_bytes(spec.dtype)
            apart, alone = apart | step, alone | if_above(spec.shape[-3], 1, step, 0)
    # Steps of dense arrays do not depend on the lengths; that of a single row does not matter.
    return bool(apart < NEAR_BYTES or alone < NEAR_BYTES)


def _has_even_rows(spec: ArraySpec) -> bool:
    """Whether the row stride divides the batch stride of (B, S, H, D), with 30 bits for a row."""
    shape = spec.shape
    if len(shape) != 4:
        return True
    batch, row = spec.strides[:2]
    # Strides first: for dense arrays they decide whatever the lengths.
    if row > 0 and not batch % row and batch // row * shape[0] < 1 << 30:
        return True
    return bool(shape[0] <= 1 or shape[1] <= 1)


def are_mappable(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Whether the strides allow a tensor map over rows: they are multiples of 16 bytes, and no dim
    is broadcast. item: bytes of an element."""
    steps = 0
    for axis in range(len(shape) - 1):
        if shape[axis] > 1:
            if strides[axis] <= 0:
                return False
            steps |= strides[axis]
    return not steps * item % 16


def _is_aligned(spec: ArraySpec) -> bool:
    """Whether base and strides are multiples of 16 bytes."""
    shape, strides, steps = spec.shape, spec.strides, 0
    for axis in range(len(shape) - 1):
        steps |= if_above(shape[axis], 1, strides[axis], 0)
    return spec.aligned and not steps * item_bytes(spec.dtype) % 16
