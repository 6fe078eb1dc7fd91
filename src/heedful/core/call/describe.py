"""From a call to its AttentionProblem, or to a clear error.

These checks read shapes, strides, dtypes and plain values alone, so that every front end raises the
same errors, nothing waits for a device, and fake arrays can be checked. Every error names the
argument, what came and what is wanted. Shapes may hold symbols.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.numbers import FAR, LONGEST, check_length, check_window
from heedful.core.base.symbols import larger, smaller
from heedful.core.call.arguments import WHOLE, AttentionCall, Options, argument_name
from heedful.core.call.block_mask import check_blocks
from heedful.core.call.mask import mask_of
from heedful.core.call.numerics import are_scattered, has_documents, is_invariant
from heedful.core.call.operands import LENGTHS, SCALES, Operands
from heedful.core.call.problem import (
    ITEM_BITS,
    LATENT_ROW_BYTES,
    LATENT_ROW_DIM,
    LATENT_ROW_DIM_V,
    LATENT_ROWS,
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_V,
    AttentionProblem,
    default_out_dtype,
)
from heedful.core.call.storage import dense_rows, has_dense_rows, have_own_ranges, storage

FLOATS = ("float16", "bfloat16", "float32")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
# Cache storage -> its name in AttentionProblem; int4 is two values a byte.
QUANTIZED = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8",
    "uint8": "int4",
}
_FIRST_SCALE, _NO_SCALES = -len(SCALES), (None,) * len(SCALES)
_LAYOUTS = {
    ("q", "dense"): "(batch, seqlen_q, heads_q, head_dim)",
    ("k", "dense"): "(batch, seqlen_k, heads_k, head_dim)",
    ("v", "dense"): "(batch, seqlen_k, heads_k, head_dim_v)",
    ("q", "varlen"): "(total_q, heads_q, head_dim)",
    ("k", "varlen"): "(total_k, heads_k, head_dim)",
    ("v", "varlen"): "(total_k, heads_k, head_dim_v)",
    ("k", "paged"): "(num_pages, page_size, heads_k, head_dim)",
    ("v", "paged"): "(num_pages, page_size, heads_k, head_dim_v)",
    ("k", "kvcache"): "(batch_cache, seqlen_cache, heads_k, head_dim)",
    ("v", "kvcache"): "(batch_cache, seqlen_cache, heads_k, head_dim_v)",
}


def describe(call: AttentionCall) -> AttentionProblem:
    """The problem of a call, with everything about it checked, stored as kernels will get it.

    Raises TypeError or ValueError.
    """
    problem = check(call)
    q, k, v = (dense_rows(spec) for spec in call.x[:3])
    # Last: lengths are known to be equal by now, and with them strides.
    return replace(problem, **storage(q, k, v, call.out, problem.key_ranges > 0))


def check(call: AttentionCall) -> AttentionProblem:
    """As `describe`, for arrays without memory."""
    x, options = call.x, call.options
    _check_ranks(x, options)
    sizes = _Sizes.of(x, options)
    _check_arguments(x, options)
    dtype, kv_dtype = _check_dtypes(call)
    _check_shapes(x, options, sizes, kv_dtype)
    _check_lengths(x, options, sizes)
    _check_score_operands(x, sizes)
    if call.out is not None:
        if call.needs_grad:
            raise no_out()
        check_out(call.out, x.q, x.v)
    scale, varlen, packed_k = options.softmax_scale, options.kind == "varlen", len(x.k.shape) == 3
    drops, probs = options.dropout_p > 0, options.return_attn_probs
    problem = AttentionProblem(
        *sizes,
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=default_out_dtype(dtype) if call.out is None else call.out.dtype,
        scale=1.0 / math.sqrt(sizes.head_dim) if scale is None else scale,
        mask=mask_of(x, options),
        softcap=options.softcap,
        dropout_p=options.dropout_p,
        total_q=x.q.shape[0] if varlen else None,
        total_k=x.k.shape[0] if packed_k else None,
        used_q=x.seqused_q is not None,
        # Lengths of paged sequences are taken from cu_seqlens_k where seqused_k is absent.
        used_k=x.seqused_k is not None or (varlen and not packed_k),
        page_size=x.k.shape[1] if x.block_table is not None else 0,
        alibi=x.alibi_slopes is not None,
        bias=x.bias is not None,
        rel_bias=_check_rel_bias(x, sizes),
        sink=x.sink is not None,
        tree_mask=x.tree_mask is not None,
        kv_batch_idx=x.kv_batch_idx is not None,
        leftpad_k=x.leftpad_k is not None,
        q_offsets=x.q_offsets is not None,
        key_ranges=_check_ranges(x, options, sizes),
        own_ranges=have_own_ranges(x.key_ranges),
        documents=x.key_ranges is not None and has_documents(options.backend),
        block_mask=check_blocks(x, sizes),
        scattered=x.block_rows is not None and are_scattered(options.backend),
        kv_group=_check_scales(x, options, sizes, dtype, kv_dtype),
        kv_shift=x.k_shift is not None,
        needs_grad=call.needs_grad,
        bias_grad=call.bias_grad,
        rel_bias_grad=call.rel_bias_grad,
        return_lse=options.return_lse or probs,
        return_probs=probs and drops,
        max_scores=options.return_max_logits,
        deterministic=options.deterministic,
        num_splits=options.num_splits,
        v_in_k=call.v_in_k,
        # Without dropout the origin does not matter: all have the same plan and kernels.
        dropout_origin=tuple(options.dropout_origin) if drops and x.origins is None else WHOLE,
        origins=_check_origins(x, options, sizes) if drops else 0,
        invariant=is_invariant(options.backend),
    )
    problem.validate()
    _check_window(x, options, sizes)
    return problem


class _Sizes(NamedTuple):
    """Dimensions of one call, read from its arrays: the first fields of AttentionProblem."""

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int

    @classmethod
    def of(cls, x: Operands, options: Options) -> "_Sizes":
        q, k = x.q.shape, x.k.shape
        if options.kind == "varlen":
            batch = x.cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = options.max_seqlen_q, options.max_seqlen_k
        else:
            batch, seqlen_q, seqlen_k = q[0], q[1], k[1]
            if x.block_table is not None:
                seqlen_k = seqlen_k * x.block_table.shape[1]
        return cls(batch, q[-2], k[-2], seqlen_q, seqlen_k, q[-1], head_dim_v(x.v))


def _check_arguments(x: Operands, options: Options) -> None:
    """Raises where two results are asked for that no call gives, and where a packed call lacks an
    argument that it needs."""
    if options.return_max_logits and options.return_attn_probs:
        raise ValueError("return_attn_probs must be False with return_max_logits, got True")
    if options.kind != "varlen":
        return
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = getattr(options, name)
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}")
        check_length(name, value)
    if x.cu_seqlens_k is None and (x.block_table is None or x.seqused_k is None):
        raise ValueError(
            "cu_seqlens_k must be given, got None (only block_table with seqused_k does without it)"
        )


def check_device(name: str, device: Any, wanted: Any, peer: str = "q") -> None:
    """ValueError unless on `wanted`, the device of `peer`."""
    if device != wanted:
        raise ValueError(f"{name} must be on {wanted} like {peer}, got {device}")


def check_shape(name: str, shape: Sequence[int], wanted: Sequence[int], words: str) -> None:
    """ValueError unless the shape is the one wanted; `words` spells its dims."""
    if tuple(shape) != tuple(wanted):
        raise ValueError(f"{name} must have shape {words} = {tuple(wanted)}, got {tuple(shape)}")


def check_rank(name: str, shape: Sequence[int], layout: str) -> None:
    """ValueError unless there are as many dims as `layout` spells."""
    if len(shape) != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got shape {tuple(shape)}")


def check_dtype(name: str, dtype: str, *wanted: str) -> None:
    """TypeError unless the dtype is one of `wanted`."""
    if dtype not in wanted:
        hint = " (cast it: nothing is computed in float64)" if dtype == "float64" else ""
        raise TypeError(f"{name} must be {' or '.join(wanted)}, got {dtype}{hint}")


def check_last_dim(name: str, spec: ArraySpec) -> None:
    """ValueError unless the last dim has stride 1: this array is used in place."""
    if not has_dense_rows(spec):
        raise ValueError(
            f"{name} must be contiguous in its last dim, as it is used in place,"
            f" got strides {tuple(spec.strides)}"
        )


def check_writable(name: str, spec: ArraySpec) -> None:
    """ValueError where two elements share an address."""
    if any(s == 0 and n > 1 for s, n in zip(spec.strides, spec.shape, strict=True)):
        raise ValueError(
            f"{name} must not be expanded, as it is written,"
            f" got strides {tuple(spec.strides)} for shape {tuple(spec.shape)}"
        )


def _check_ranks(x: Operands, options: Options) -> None:
    q_kind = "varlen" if options.kind == "varlen" else "dense"
    k_kind = "paged" if x.block_table is not None else options.kind
    for operand, kind in (("q", q_kind), ("k", k_kind), ("v", k_kind)):
        spec, layout = getattr(x, operand), _LAYOUTS[operand, kind]
        if len(spec.shape) != layout.count(",") + 1:
            raise ValueError(
                f"{argument_name(operand, options.kind)} must be {layout},"
                f" got {len(spec.shape)} dims: {tuple(spec.shape)}"
            )
    for operand, rank in (("cu_seqlens_q", 1), ("block_table", 2)):
        spec = getattr(x, operand)
        if spec is not None and len(spec.shape) != rank:
            raise ValueError(f"{operand} must have {rank} dims, got shape {tuple(spec.shape)}")
    if options.kind == "varlen" and x.cu_seqlens_q.shape[0] < 1:
        raise ValueError("cu_seqlens_q must have shape (batch + 1,), got (0,)")


def _check_dtypes(call: AttentionCall) -> tuple[str, str]:
    """Names of the dtypes of q, and of keys and values."""
    x, kind = call.x, call.options.kind
    k_name, v_name = argument_name("k", kind), argument_name("v", kind)
    dtype = x.q.dtype
    check_dtype("q", dtype, *FLOATS, *FP8)
    if x.k.dtype == dtype:
        kv_dtype = dtype
    elif kind != "dense" and dtype in FLOATS and x.k.dtype in QUANTIZED:
        kv_dtype = LATENT_ROWS if has_latent_rows(x.k) else QUANTIZED[x.k.dtype]
    else:
        hint = ""
        if kind != "dense":
            hint = " or quantised (int8, uint8 = two int4 a byte, float8) under a float q"
        raise TypeError(f"{k_name} must be {dtype} like q{hint}, got {x.k.dtype}")
    if x.v.dtype != x.k.dtype:
        raise TypeError(f"{v_name} must be {x.k.dtype} like {k_name}, got {x.v.dtype}")
    if call.needs_grad and dtype in FP8:
        raise ValueError(f"q must not require a gradient in {dtype}: fp8 is forward only")
    if call.needs_grad and kv_dtype != dtype:
        raise ValueError(
            f"{k_name} of {x.k.dtype} must have a q without a gradient (use torch.no_grad()): calls"
            " over quantised keys are forward only"
        )
    return dtype, kv_dtype


def _check_shapes(x: Operands, options: Options, sizes: _Sizes, kv_dtype: str) -> None:
    """Raises ValueError unless the shapes of q, k and v match."""
    q, k, v = x.q.shape, x.k.shape, x.v.shape
    k_name, v_name = argument_name("k", options.kind), argument_name("v", options.kind)
    if options.kind == "dense" and k[0] != q[0]:
        raise ValueError(f"k must have q's batch {q[0]}, got {k[0]}")
    one_to_one = x.block_table is None and x.kv_batch_idx is None
    if options.kind == "kvcache" and one_to_one and k[0] != q[0]:
        raise ValueError(
            f"k_cache must have q's batch {q[0]} where neither cache_batch_idx nor"
            f" block_table is given, got {k[0]}"
        )
    if kv_dtype == LATENT_ROWS:
        _check_latent_rows(x, sizes, k_name, v_name)
    packing = 2 if kv_dtype == "int4" else 1
    for name, dim, most in (
        ("q", sizes.head_dim, MAX_HEAD_DIM),
        (v_name, sizes.head_dim_v, MAX_HEAD_DIM_V),
    ):
        if not 1 <= dim <= most:
            raise ValueError(f"{name} must have a head_dim of 1 to {most}, got {dim}")
    if kv_dtype != LATENT_ROWS and k[-1] * packing != sizes.head_dim:
        raise ValueError(
            f"{k_name} must have q's head_dim {sizes.head_dim}"
            + (" (two values a byte)" if packing == 2 else "")
            + f", got {k[-1] * packing}"
        )
    if tuple(v[:-1]) != tuple(k[:-1]):
        raise ValueError(
            f"{v_name} must match {k_name} in all but the head_dim, {tuple(k[:-1])},"
            f" got {tuple(v[:-1])}"
        )
    if sizes.heads_q < 1:
        raise ValueError("q must have at least one head, got 0")
    if sizes.heads_k < 1 or sizes.heads_q % sizes.heads_k:
        raise ValueError(
            f"{k_name} must have a number of heads that divides q's {sizes.heads_q},"
            f" got {sizes.heads_k}"
        )
    if options.kind == "kvcache" or x.block_table is not None:
        check_last_dim(k_name, x.k)
        check_last_dim(v_name, x.v)
    if x.block_table is not None:
        _check_pages(x, sizes, k_name)


def _check_latent_rows(x: Operands, sizes: _Sizes, k_name: str, v_name: str) -> None:
    """Raises ValueError unless q and v belong to rows of latent vectors."""
    words = f"beside {k_name} of {LATENT_ROW_BYTES} bytes a row"
    if sizes.head_dim != LATENT_ROW_DIM:
        raise ValueError(
            f"q must have a head_dim of {LATENT_ROW_DIM} {words}, got {sizes.head_dim}"
        )
    if not has_latent_rows(x.v):
        raise ValueError(
            f"{v_name} must be {k_name} itself {words}, which have the values, got"
            f" {x.v.shape[-1]} bytes a row"
        )
    for name in SCALES:
        if getattr(x, name) is not None:
            raise ValueError(f"{name} must be None {words}, which have scales, got an array")


def _check_pages(x: Operands, sizes: _Sizes, k_name: str) -> None:
    if x.k.shape[1] < 1:
        raise ValueError(f"{k_name} must have pages of at least one key, got page_size 0")
    check_dtype("block_table", x.block_table.dtype, "int32", "int64")
    size, pages = x.k.shape[1], x.block_table.shape[1]
    if size.__class__ is pages.__class__ is int and size * pages > LONGEST:
        raise ValueError(
            f"block_table must reach at most {LONGEST} keys of a sequence, as positions are int32,"
            f" got {pages} pages of {size}"
        )
    if x.block_table.shape[0] != sizes.batch:
        raise ValueError(
            f"block_table must have shape (batch, pages) with batch {sizes.batch},"
            f" got {tuple(x.block_table.shape)}"
        )
    if x.kv_batch_idx is not None:
        raise ValueError(
            "cache_batch_idx must be None with block_table (reorder the table's rows instead),"
            " got a tensor"
        )


def _check_lengths(x: Operands, options: Options, sizes: _Sizes) -> None:
    """Checks the arrays of ints that say where sequences lie."""
    for operand in LENGTHS:
        spec = getattr(x, operand)
        if spec is None:
            continue
        name = argument_name(operand, options.kind)
        check_dtype(name, spec.dtype, "int32", "int64")
        if operand.startswith("cu_"):
            # The batch size was read from one of them.
            check_shape(name, spec.shape, x.cu_seqlens_q.shape, "(batch + 1,)")
        else:
            check_shape(name, spec.shape, (sizes.batch,), "(batch,)")


def _check_window(x: Operands, options: Options, sizes: _Sizes) -> None:
    """Raises ValueError for a window of FAR or more if sequences are longer."""
    if all(side < FAR for side in options.window_size):
        return
    q, k = sizes.seqlen_q, sizes.seqlen_k
    if options.kind == "varlen":
        q = smaller(q, x.q.shape[0])
        k = smaller(k, x.k.shape[0]) if len(x.k.shape) == 3 else k
    check_window(tuple(options.window_size), larger(q, k))


def _check_score_operands(x: Operands, sizes: _Sizes) -> None:
    """Checks the arguments that modify scores: bias, ALiBi, sink, tree mask, dropout's seed."""
    batch, heads = sizes.batch, sizes.heads_q
    if x.bias is not None:
        check_dtype("bias", x.bias.dtype, *FLOATS, "bool")
        full = (batch, heads, sizes.seqlen_q, sizes.seqlen_k)
        bias = x.bias.shape
        fits = len(bias) <= 4 and all(
            n == 1 or n == whole for n, whole in zip(reversed(bias), reversed(full), strict=False)
        )
        if not fits:
            raise ValueError(
                "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) ="
                f" {full}, got {tuple(bias)}"
            )
    if x.alibi_slopes is not None:
        slopes = x.alibi_slopes
        check_dtype("alibi_slopes", slopes.dtype, "float32")
        if len(slopes.shape) == 1:
            check_shape("alibi_slopes", slopes.shape, (heads,), "(heads_q,)")
        else:
            check_shape("alibi_slopes", slopes.shape, (batch, heads), "(batch, heads_q)")
    if x.sink is not None:
        check_dtype("sink", x.sink.dtype, *FLOATS)
        check_shape("sink", x.sink.shape, (heads,), "(heads_q,)")
    if x.tree_mask is not None:
        tree = x.tree_mask
        check_dtype("tree_mask", tree.dtype, "bool")
        rows = 1 if tuple(tree.shape[:1]) == (1,) else batch
        shape = (rows, sizes.seqlen_q, sizes.seqlen_q)
        check_shape("tree_mask", tree.shape, shape, "(batch or 1, q_len, q_len)")
    if x.seed is not None:
        check_dtype("dropout_seed", x.seed.dtype, "int64")
        if x.seed.size != 1:
            raise ValueError(f"dropout_seed must have one element, got {tuple(x.seed.shape)}")


def _check_rel_bias(x: Operands, sizes: _Sizes) -> bool:
    """Whether scores have a bias by relative position."""
    if x.rel_bias is None:
        return False
    check_dtype("rel_bias", x.rel_bias.dtype, *FLOATS)
    shape = tuple(x.rel_bias.shape)
    check_rank("rel_bias", shape, "(heads_q, distances)")
    check_shape("rel_bias", shape, (sizes.heads_q, shape[1]), "(heads_q, distances)")
    if shape[1] < 1:
        raise ValueError(f"rel_bias must have an entry for at least one distance, got {shape}")
    return True


def _check_origins(x: Operands, options: Options, sizes: _Sizes) -> int:
    """By how much a column of origins counts, 0 without them."""
    if x.origins is None:
        return 0
    check_dtype("dropout_origin", x.origins.dtype, "int32", "int64")
    check_shape("dropout_origin", x.origins.shape, (sizes.batch, 4), "(batch, 4)")
    return 1 if options.dropout_origin[3] % 4 else 4


def _check_ranges(x: Operands, options: Options, sizes: _Sizes) -> int:
    """How many ranges of keys a row has, 0 without key_ranges."""
    ranges = x.key_ranges
    if ranges is None:
        return 0
    check_dtype("key_ranges", ranges.dtype, "int32")
    shape = tuple(ranges.shape)
    packed = options.kind == "varlen"
    words = "(total_q, 2 or 4)" if packed else "(batch or 1, heads_q or 1, seqlen_q, 2 or 4)"
    check_rank("key_ranges", shape, words)
    rows = (x.q.shape[0],)
    if not packed:
        batch, heads = (
            1 if n == 1 else whole
            for n, whole in zip(shape, (sizes.batch, sizes.heads_q), strict=False)
        )
        rows = batch, heads, sizes.seqlen_q
    check_shape("key_ranges", shape, (*rows, 4 if shape[-1] == 4 else 2), words)
    return shape[-1] // 2


def _check_scales(x: Operands, options: Options, sizes: _Sizes, dtype: str, kv_dtype: str) -> int:
    """Checks descales and shifts; returns how many values share one scale, 0 for scales per
    head."""
    if x[_FIRST_SCALE:] == _NO_SCALES:
        return 0
    quantized = kv_dtype != dtype
    for operand in SCALES:
        spec = getattr(x, operand)
        if spec is None:
            continue
        is_of_q = operand == "q_descale"
        if (is_of_q or not quantized) and (ITEM_BITS[dtype] > 8 or operand.endswith("shift")):
            wanted = "a quantised cache" if operand.endswith("shift") else "fp8 q, k and v"
            if options.kind == "kvcache":
                wanted = "a quantised or fp8 cache"
            elif options.kind == "varlen" and not is_of_q:
                wanted = "quantised or fp8 k and v"
            raise ValueError(f"{operand} must be None without {wanted}, got one beside {kv_dtype}")
        check_dtype(operand, spec.dtype, "float32")
    check_pair("k_shift", x.k_shift, "v_shift", x.v_shift)
    if x.k_shift is not None:
        for name in ("k", "v"):
            if getattr(x, f"{name}_descale") is None:
                raise ValueError(f"{name}_descale must be given with {name}_shift, got None")
    # Sizes may be symbols, which no set holds.
    both = (_scale_group(name, x, sizes) for name in ("k", "v"))
    groups = [group for group in both if group is not None]
    if x.q_descale is not None:
        _check_head_scale("q_descale", x.q_descale, sizes)
    if len(groups) > 1 and groups[0] != groups[1]:
        raise ValueError(
            "v_descale must share as many values a scale as k_descale, got"
            f" {' and '.join(str(group or 'a head') for group in sorted(groups, key=str))}"
        )
    group = groups[0] if groups else 0
    if group:
        check_pair("k_descale", x.k_descale, "v_descale", x.v_descale)
    return group or 0


def check_pair(name: str, value: Any, other_name: str, other: Any) -> None:
    """ValueError where one of the two is there without the other."""
    if (value is None) != (other is None):
        missing, present = (name, other_name) if value is None else (other_name, name)
        raise ValueError(f"{missing} must be given with {present}, got None")


def _scale_group(name: str, x: Operands, sizes: _Sizes) -> int | None:
    """How many values share a scale of `name`_descale: 0 for one per head, None without scales."""
    stored, scale = getattr(x, name), getattr(x, f"{name}_descale")
    shift = getattr(x, f"{name}_shift")
    if scale is None:
        return None
    dim = sizes.head_dim if name == "k" else sizes.head_dim_v
    if len(scale.shape) < 3:
        _check_head_scale(f"{name}_descale", scale, sizes)
        if shift is not None:
            _check_head_scale(f"{name}_shift", shift, sizes)
        return 0
    groups = scale.shape[-1]
    words = "(num_pages, page_size" if x.block_table is not None else "(batch_cache, seqlen_cache"
    wanted = (*stored.shape[:-1], groups)
    check_shape(f"{name}_descale", scale.shape, wanted, f"{words}, heads_k, groups)")
    if groups < 1 or dim % groups:
        raise ValueError(f"{name}_descale must have groups that divide {dim}, got {groups}")
    if shift is not None:
        check_shape(f"{name}_shift", shift.shape, scale.shape, f"of {name}_descale")
    return dim // groups


def _check_head_scale(name: str, scale: ArraySpec, sizes: _Sizes) -> None:
    if len(scale.shape) <= 1 and scale.size == 1:
        return
    check_shape(name, scale.shape, (sizes.batch, sizes.heads_k), "() or (batch, heads_k)")


def check_seed(seed: int) -> None:
    """ValueError for a dropout_seed of more than 64 bits."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"dropout_seed must fit 64 bits, got {seed}")


def head_dim_v(v: ArraySpec) -> int:
    """Values in a row of v, of which one byte may hold two."""
    if has_latent_rows(v):
        return LATENT_ROW_DIM_V
    return v.shape[-1] * (2 if v.dtype == "uint8" else 1)


def has_latent_rows(stored: ArraySpec) -> bool:
    """Whether an array has rows of `LATENT_ROWS`. As int4 they would have too many values."""
    return stored.dtype == "uint8" and stored.shape[-1] == LATENT_ROW_BYTES


def check_out(out: ArraySpec, q: ArraySpec, v: ArraySpec) -> None:
    """TypeError or ValueError unless `out` is a place for the result of q and v. Float32 rounds
    nothing: parts of the keys are merged after."""
    check_dtype(
        "out", out.dtype, *(FLOATS if q.dtype in FP8 else dict.fromkeys((q.dtype, "float32")))
    )
    check_shape("out", out.shape, (*q.shape[:-1], head_dim_v(v)), "of q with v's head_dim")
    check_last_dim("out", out)
    check_writable("out", out)


def check_results(problem: AttentionProblem, dout, dlse, out, lse) -> None:
    """TypeError or ValueError unless a backward's arrays have the shapes and dtypes of the call's
    results; dlse may be None."""
    of_out, of_lse = (problem.out_shape, problem.out_dtype), (problem.lse_shape, "float32")
    words = "of the call's result"
    for name, spec, (shape, dtype) in (
        ("dout", dout, of_out),
        ("dlse", dlse, of_lse),
        ("out", out, of_out),
        ("lse", lse, of_lse),
    ):
        if spec is not None:
            check_dtype(name, spec.dtype, dtype)
            check_shape(name, spec.shape, shape, words)


def check_packed(
    packed: bool, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, leftpad_k
) -> None:
    """ValueError for an argument of packed sequences in a call without them, or the other way
    round."""
    if packed:
        if leftpad_k is not None:
            raise ValueError("leftpad_k must be None beside cu_seqlens_q, got one")
        return
    alone = {"cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
    alone |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    for name, value in alone.items():
        if value is not None:
            raise ValueError(f"cu_seqlens_q must be given with {name}, got None")


def no_out() -> ValueError:
    """The error for a call with `out` that needs a gradient."""
    return ValueError(
        "out must be None where a gradient is wanted (autograd needs an output of its own; or"
        " use torch.no_grad()), got a tensor"
    )
