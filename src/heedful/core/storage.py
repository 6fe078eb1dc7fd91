"""How the arrays of a call are stored: what kernels get of them, and what a plan depends on."""

from heedful.core.arrays import ArraySpec, item_bytes
from heedful.core.call import AttentionCall
from heedful.core.operands import Operands

SCALES = ("q_descale", "k_descale", "v_descale", "k_shift", "v_shift")


def has_dense_rows(spec: ArraySpec) -> bool:
    """Whether rows are contiguous."""
    return spec.strides[-1] == 1 or spec.shape[-1] <= 1


def dense_rows(spec: ArraySpec) -> ArraySpec:
    """The array, or where its last dim has another stride than 1 the copy that kernels get."""
    if has_dense_rows(spec):
        return spec
    return ArraySpec.contiguous(spec.shape, spec.dtype, spec.device)


def copies(x: Operands) -> tuple[str, ...]:
    """What a user should know about the arrays that are copied."""
    return tuple(
        f"{name} is copied: its last dim has stride {spec.strides[-1]}"
        for name, spec in zip("qkv", x[:3], strict=True)
        if not has_dense_rows(spec)
    )


def storage(q: ArraySpec, k: ArraySpec, v: ArraySpec, out: ArraySpec | None) -> dict[str, bool]:
    """The problem's facts that are about bases and strides."""
    return {
        "aligned": all(_is_aligned(spec) for spec in (q, k, v, out) if spec is not None),
        "even_rows": _has_even_rows(k) and _has_even_rows(v),
    }


def _has_even_rows(spec: ArraySpec) -> bool:
    """Whether the row stride divides the batch stride of (B, S, H, D), with 30 bits for a row."""
    shape = spec.shape
    if len(shape) != 4 or shape[0] <= 1 or shape[1] <= 1:
        return True
    batch, row = spec.strides[:2]
    return row > 0 and not batch % row and batch // row * shape[0] < 1 << 30


def _is_aligned(spec: ArraySpec) -> bool:
    """Whether base and strides are multiples of 16 bytes."""
    if not spec.aligned:
        return False
    item = item_bytes(spec.dtype)
    for size, stride in zip(spec.shape[:-1], spec.strides, strict=False):
        if stride * item % 16 and size > 1:
            return False
    return True


def kind_of(call: AttentionCall) -> tuple:
    """What a plan may depend on of a checked call but for its lengths, and what follows from them:
    the same for calls that differ in these alone. Hashable."""
    x, options = call.x, call.options._replace(max_seqlen_q=None, max_seqlen_k=None)
    kinds = [
        None if spec is None else _kind(spec, axes)
        for spec, axes in zip(x, _LENGTH_AXES[options.kind, x.block_table is not None], strict=True)
    ]
    even = _has_even_rows(x.k) and _has_even_rows(x.v)
    out = None if call.out is None else _kind(call.out, 1 if options.kind == "varlen" else 2)
    return options, call.needs_grad, call.bias_grad, even, out, *kinds


def _length_axes(kind: str, paged: bool) -> Operands:
    """How many axes of each operand, from the first on, are lengths."""
    rows = 1 if kind == "varlen" else 2
    keys = 1 if paged else rows
    axes = dict.fromkeys(Operands._fields, 1)
    axes |= {"q": rows, "k": keys, "v": keys, "bias": 4, "block_table": 2, "tree_mask": 3}
    axes |= {"alibi_slopes": 2, "sink": 0, "seed": 0, "q_descale": 2}
    axes |= {name: 2 for name in SCALES}
    return Operands(**axes)


_LENGTH_AXES = {
    (kind, paged): _length_axes(kind, paged)
    for kind in ("dense", "varlen", "kvcache")
    for paged in (False, True)
}


def _kind(spec: ArraySpec, lengths: int) -> tuple:
    """What is the same of an array whose first axes have other lengths. Of a length: whether there
    are none, one or several. Of a stride: how far it is a multiple of 2, and its room."""
    shape, strides = spec.shape, spec.strides
    return (
        spec.dtype,
        spec.aligned,
        spec.device,
        shape[lengths:],
        *[size if size < 2 else 2 for size in shape[:lengths]],
        *[
            (stride & -stride & 15 or (stride and 16), stride >> 31) if size > 1 else 0
            for size, stride in zip(shape, strides, strict=True)
        ],
    )
