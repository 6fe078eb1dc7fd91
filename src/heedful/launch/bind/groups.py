"""Fills the groups of kernel arguments (`kernels.args`) from a problem and its arrays: one function
for each group, for all families of kernels. Operands that a call lacks, and their strides, are
None.
"""

from collections.abc import Mapping
from typing import Any

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.numbers import FAR
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.sizes import Sizes
from heedful.kernels.args import kinds, shared
from heedful.launch.spec import Group, Pointer, Scalar, absent, declared

Buffers = Mapping[str, ArraySpec]

# In-tile offsets are 32-bit: rows of a tile (at most 256) times a stride below this.
WIDE_STRIDE = 1 << 22


def with_scratch(buffers: Buffers, sizes: Sizes) -> Buffers:
    """The call's arrays and the scratch of a launch."""
    return {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}


def wrapped(word: int) -> int:
    """A 32-bit word as the signed integer with the same bits."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def pointer(buffers: Buffers, name: str, aligned: bool = False) -> Pointer | None:
    """The address of an array, or None. aligned: whether the compiler may assume a multiple of 16
    bytes."""
    spec = buffers.get(name)
    return None if spec is None else Pointer(name, spec.dtype, aligned)


def scalars(**values: int) -> dict[str, Scalar]:
    """32-bit whole numbers by name."""
    return {name: Scalar(value) for name, value in values.items()}


def number(value: float) -> Scalar:
    """A 32-bit number."""
    return Scalar(value, "fp32")


def stride(value: int, divisor: int = 1) -> Scalar:
    """A 64-bit stride."""
    return Scalar(value, "i64", divisor)


def row_stride(value: int, divisor: int = 1) -> Scalar:
    """A stride of rows: in 32 bits if offsets within a tile fit into them, else in 64."""
    return Scalar(value, "i32" if abs(value) < WIDE_STRIDE else "i64", divisor)


def token_strides(spec: ArraySpec) -> tuple[int, int, int]:
    """(batch, row, head) strides. Packed tokens have a batch stride of 0; pages count as the
    batch."""
    *batch, row, head, _ = spec.steps
    return batch[0] if batch else 0, row, head


def lse_strides(spec: ArraySpec) -> tuple[int, int]:
    """(batch, head) strides of a (B, H, S) or (H, T) array."""
    b, h = (0, spec.strides[0]) if len(spec.shape) == 2 else spec.strides[:2]
    return b, h


def rows(buffers: Buffers, name: str, divisor: int = 1) -> kinds.Rows:
    """A (B, S, H, D) or (T, H, D) tensor whose strides are multiples of `divisor`. A divisor above
    1 promises an aligned address, too."""
    if name not in buffers:
        return absent(kinds.Rows)
    b, n, h = token_strides(buffers[name])
    strides = stride(b, divisor), row_stride(n, divisor), stride(h, divisor)
    return kinds.Rows(pointer(buffers, name, divisor > 1), *strides)


def split_rows(
    buffers: Buffers, name: str, divisor: int = 1, is_split: bool = False
) -> kinds.SplitRows:
    """As `rows`, for an array that has a leading dim of splits if is_split."""
    one, step = _of_split(buffers[name], is_split)
    pointer, *strides = rows({name: one}, name, divisor)
    return kinds.SplitRows(pointer, stride(step, divisor), *strides)


def _of_split(spec: ArraySpec, is_split: bool) -> tuple[ArraySpec, int]:
    """The array of one split, and the stride from one to the next."""
    lead = int(is_split)
    one = ArraySpec(spec.shape[lead:], spec.strides[lead:], spec.dtype)
    return one, spec.strides[0] if is_split else 0


def row_vector(buffers: Buffers, name: str) -> kinds.RowVector:
    """A float32 (B, H, S) or (H, T) array whose last stride is 1."""
    spec = buffers.get(name)
    if spec is None:
        return absent(kinds.RowVector)
    return kinds.RowVector(pointer(buffers, name), *map(stride, lse_strides(spec)))


def split_row_vector(buffers: Buffers, name: str, is_split: bool = False) -> kinds.SplitRowVector:
    """As `row_vector`, for an array that has a leading dim of splits if is_split."""
    if name not in buffers:
        return absent(kinds.SplitRowVector)
    one, step = _of_split(buffers[name], is_split)
    pointer, *strides = row_vector({name: one}, name)
    return kinds.SplitRowVector(pointer, stride(step), *strides)


def row_array(buffers: Buffers, name: str) -> kinds.RowArray:
    """A (B, H, S) or (H, T) array with any strides, as autograd may return it."""
    spec = buffers.get(name)
    if spec is None:
        return absent(kinds.RowArray)
    b, h, m = spec.strides if len(spec.strides) == 3 else (0, *spec.strides)
    return kinds.RowArray(pointer(buffers, name), stride(b), stride(h), row_stride(m))


def score_array(buffers: Buffers, name: str) -> kinds.ScoreArray:
    """A (B, H, M, N) array with any strides."""
    spec = buffers.get(name)
    if spec is None:
        return absent(kinds.ScoreArray)
    b, h, m, n = spec.steps
    return kinds.ScoreArray(
        pointer(buffers, name), stride(b), stride(h), row_stride(m), row_stride(n)
    )


def relative_bias(buffers: Buffers) -> kinds.RelativeBias:
    """rel_bias, (H, distances)."""
    spec = buffers.get("rel_bias")
    if spec is None:
        return absent(kinds.RelativeBias)
    last = Scalar(spec.shape[1] - 1)
    return kinds.RelativeBias(pointer(buffers, "rel_bias"), stride(spec.steps[0]), last)


# By the declared kind of a field: the function that fills it, with or without a divisor of strides.
_WITH_DIVISOR = {(kinds.Rows,): rows, (kinds.SplitRows,): split_rows}
_MAKE = {
    (): pointer,
    (kinds.RowVector,): row_vector,
    (kinds.SplitRowVector,): split_row_vector,
    (kinds.RowArray,): row_array,
    (kinds.ScoreArray,): score_array,
}


def arrays(group: type[Group], buffers: Buffers, divisor: int = 1, /, **others: Any) -> Group:
    """A group of arrays that have the names of its fields, each as the group declares it. divisor:
    of the strides of rows. others: the fields that are filled in another way."""
    filled = {}
    for name, _, kind in declared(group):
        if name in others:
            continue
        if kind in _WITH_DIVISOR:
            filled[name] = _WITH_DIVISOR[kind](buffers, name, divisor)
        else:
            filled[name] = _MAKE[kind](buffers, name)
    return group(**filled, **others)


def names_of_rows(group: type) -> list[str]:
    """The fields that are rows."""
    return [name for name, _, kind in declared(group) if kind == (kinds.Rows,)]


def constants(group: type[Group], *sources: Any, **others: Any) -> Group:
    """A group of constants: `BLOCK_M` is the `block_m` of the first source that has one. others:
    the fields that are named otherwise. Raises AttributeError for a field that nothing gives."""
    filled = {}
    for name, _, _ in declared(group):
        if name not in others:
            field = name.lower()
            filled[name] = getattr(next((x for x in sources if hasattr(x, field)), group), field)
    return group(**filled, **others)


def stored_keys(buffers: Buffers, page_size: int) -> int:
    """Keys that each sequence has room for in storage; of packed keys, the total. A cache without
    pages or rows has room for none."""
    k = buffers["k"].shape
    if len(k) == 3 or not k[0]:
        return k[0]
    return buffers["block_table"].shape[1] * page_size if page_size else k[1]


def sequences(
    problem: AttentionProblem, buffers: Buffers, new_k: int | None = None
) -> shared.Sequences:
    """The group that says where sequences lie, and how long they can be. new_k: rows that the
    kernel appends."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")
    seqlen_q = buffers["q"].shape[0] if problem.varlen_q else problem.seqlen_q
    seqlen_k = stored_keys(buffers, problem.page_size)
    pointers = (pointer(buffers, n) for n in names)
    new = None if new_k is None else Scalar(new_k)
    return shared.Sequences._make((*pointers, Scalar(seqlen_q), Scalar(seqlen_k), new))


def shape(problem: AttentionProblem) -> shared.Shape:
    """Sizes of the whole call."""
    p = problem
    return shared.Shape(*map(Scalar, (p.batch, p.heads_q, p.heads_k, p.seqlen_q, p.seqlen_k)))


def row_ranges(buffers: Buffers) -> kinds.RowArray:
    """key_ranges, (B, H, S, pairs) or packed (T, pairs)."""
    spec = buffers.get("key_ranges")
    if spec is None:
        return absent(kinds.RowArray)
    b, h, m = spec.steps[:-1] if len(spec.shape) == 4 else (0, 0, spec.steps[0])
    return kinds.RowArray(pointer(buffers, "key_ranges"), stride(b), stride(h), row_stride(m))


def block_lists(problem: AttentionProblem, buffers: Buffers, name: str) -> shared.BlockLists:
    """The group of a block mask's lists. name: block_rows or block_keys."""
    spec = buffers.get(name)
    if spec is None:
        return absent(shared.BlockLists)
    b, h, m, _ = spec.steps
    others = problem.used_q or problem.varlen_q or problem.ragged_k or problem.key_ranges
    return shared.BlockLists(
        ptr=pointer(buffers, name),
        stride_b=stride(b),
        stride_h=stride(h),
        stride_m=row_stride(m),
        width=Scalar((spec.shape[-1] - 2) // 2),
        bits=pointer(buffers, "block_bits"),
        pool=Scalar(buffers["block_bits"].shape[0]),
        tiles=Scalar(spec.shape[2]) if problem.varlen_q or problem.varlen_k else None,
        SIDE=problem.block_mask,
        IS_PLAIN=not (problem.mask.bounded or others or problem.tree_mask),
        IS_EXACT=False,
    )


def mask(problem: AttentionProblem, buffers: Buffers) -> shared.Mask:
    """The group that says which keys a query sees. A side without a bound is FAR."""
    spec = problem.mask
    tree = buffers.get("tree_mask")
    # A tree mask of batch 1 is for all sequences.
    batch_stride = tree.strides[0] if tree and tree.shape[0] > 1 else 0
    return shared.Mask(
        left=Scalar(min(spec.left, FAR) if spec.left >= 0 else FAR),
        right=Scalar(min(spec.right, FAR) if spec.right >= 0 else FAR),
        first=Scalar(min(spec.first, FAR)),
        bottom_right=Scalar(int(spec.bottom_right)),
        shift=Scalar(max(-FAR, min(spec.shift, FAR))),
        offsets=pointer(buffers, "q_offsets"),
        tree=shared.TreeMask(
            pointer(buffers, "tree_mask"),
            stride(batch_stride) if tree else None,
            row_stride(tree.strides[1]) if tree else None,
        ),
        blocks=block_lists(problem, buffers, "block_rows"),
        ranges=row_ranges(buffers),
        HAS_LEFT=spec.left >= 0,
        HAS_RIGHT=spec.right >= 0,
        RANGES=problem.key_ranges or None,
    )


def score_mods(problem: AttentionProblem, buffers: Buffers) -> shared.ScoreMods:
    """The group of operands that turn raw products into scores."""
    alibi = buffers.get("alibi_slopes")
    return shared.ScoreMods(
        scale=number(problem.scale),
        softcap=number(problem.softcap),
        alibi=pointer(buffers, "alibi_slopes"),
        stride_alibib=stride(alibi.strides[0]) if alibi else None,
        bias=score_array(buffers, "bias"),
        relative=relative_bias(buffers),
        sink=pointer(buffers, "sink"),
        HAS_SOFTCAP=problem.softcap > 0,
        IS_ADJUSTED=is_adjusted(problem),
    )


def is_adjusted(problem: AttentionProblem) -> bool:
    """Whether scores are computed in natural units. Raw products will not do where a score is
    modified or the scale is not positive, nor in float32, where folding the scale into the exponent
    would lose digits."""
    return bool(
        problem.softcap > 0
        or problem.alibi
        or problem.bias
        or problem.rel_bias
        or problem.scale <= 0
        or problem.dtype == "float32"
    )


def has_dropout(problem: AttentionProblem) -> bool:
    """Whether any probability is dropped. If keeping one is certain after rounding, none is: its
    threshold, 2^32, would not fit into a 32-bit word."""
    return (1.0 - problem.dropout_p) * 2.0**32 < 2.0**32


def dropout(problem: AttentionProblem, buffers: Buffers) -> shared.Dropout:
    """The group that says which probabilities are dropped, and the factor of the others: at p = 1
    none is kept."""
    keep = 1.0 - problem.dropout_p
    scale = number(1.0 / keep if keep > 0 else 0.0)
    if not has_dropout(problem):
        return shared.Dropout(None, None, scale, *[None] * 5, IS_ON=False, IS_QUAD=False)
    origin = problem.dropout_origin
    # After the seed in memory, if the device decides which shard this is.
    is_read = problem.origins or ("seed" in buffers and buffers["seed"].shape == (5,))
    return shared.Dropout(
        pointer(buffers, "seed"),
        Scalar(wrapped(int(keep * 2.0**32))),
        scale,
        *(None if is_read else Scalar(wrapped(o)) for o in origin),
        origins=pointer(buffers, "origins") if problem.origins else None,
        IS_ON=True,
        IS_QUAD=origin[3] % 4 == 0 and problem.origins != 1,
    )


def kv_layout(page_size: int, buffers: Buffers, is_written: bool = False) -> shared.KVLayout:
    """The group that says where keys lie in a cache. is_written: whether the kernel writes into the
    cache; it then needs its size."""
    table = buffers.get("block_table")
    is_cache = is_written or table is not None or "kv_batch_idx" in buffers
    return shared.KVLayout(
        table=pointer(buffers, "block_table"),
        stride_tableb=stride(table.strides[0]) if table else None,
        page_size=Scalar(page_size) if table else None,
        entries=Scalar(buffers["k"].shape[0]) if is_cache else None,
        batch_idx=pointer(buffers, "kv_batch_idx"),
    )


def descales(problem: AttentionProblem, buffers: Buffers) -> shared.Descales:
    """The group of descales: (B, G), or stored like the keys as (.., rows, G, groups)."""
    q = descale(buffers, "q", 0)
    k, v = (descale(buffers, name, problem.kv_group) for name in "kv")
    return shared.Descales(q, k, v, KV_GROUP=problem.kv_group, IS_INT4=problem.kv_dtype == "int4")


def descale(buffers: Buffers, name: str, group: int) -> shared.Descale:
    """Descales of q, k or v. group: how many values share one; 0 is one for each head."""
    spec = buffers.get(f"{name}_descale")
    if spec is None:
        return absent(shared.Descale)
    pointers = pointer(buffers, f"{name}_descale"), pointer(buffers, f"{name}_shift")
    if not group:
        b, h = spec.strides
        return shared.Descale(*pointers, row_stride(b), None, row_stride(h))
    b, n, h = token_strides(spec)
    return shared.Descale(*pointers, stride(b), row_stride(n), stride(h))
