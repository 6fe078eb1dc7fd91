"""From the tensors and arguments of a call to its AttentionProblem, or to a clear error.

Metadata only (types, shapes, strides, dtypes, devices), so that nothing waits for the device and
the same code serves fake tensors. Every error names the argument, what came and what is wanted.
"""

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from heedful.core.mask import MaskSpec
from heedful.core.operands import Operands
from heedful.core.problem import (
    ITEM_BITS,
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_V,
    AttentionProblem,
    default_out_dtype,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# Cache storage -> its name in AttentionProblem; int4 is two values a byte.
QUANTIZED = {
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
    torch.uint8: "int4",
}
# Operands of floating point that have no gradient.
CONSTANTS = ("alibi_slopes", "q_descale", "k_descale", "v_descale", "k_shift", "v_shift")


class Options(NamedTuple):
    """The Python arguments of one call.

    kind: "dense", "varlen" or "kvcache", which decides the layouts and the names in messages.
    max_seqlen_q, max_seqlen_k: of varlen calls, else None.
    """

    kind: str
    max_seqlen_q: Any
    max_seqlen_k: Any
    dropout_p: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    deterministic: Any
    return_attn_probs: Any
    return_lse: Any
    num_splits: Any
    backend: Any
    dropout_origin: Any


# What flash_attn_with_kvcache calls things, where that differs from our own names.
_KVCACHE_NAMES = {
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "cache_seqlens",
    "kv_batch_idx": "cache_batch_idx",
    "leftpad_k": "cache_leftpad",
}
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


def argument_name(operand: str, kind: str) -> str:
    """The public argument that an operand comes from."""
    if operand == "seed":
        return "dropout_seed"
    return _KVCACHE_NAMES.get(operand, operand) if kind == "kvcache" else operand


def describe(
    x: Operands,
    options: Options,
    needs_grad: bool = False,
    bias_grad: bool = False,
    out: Tensor | None = None,
    storage: dict[str, bool] | None = None,
) -> AttentionProblem:
    """The problem of a call, with everything about it checked.

    x: the tensors as the caller gave them. out: the tensor to write, if any. storage: the facts of
    `adapt.storage`, where they are not the usual ones. needs_grad, bias_grad: whether autograd
    records this call, and will want the bias's gradient.

    Raises TypeError or ValueError.
    """
    _check_arguments(options)
    mask = MaskSpec.of(options.causal, options.window_size)
    check_tensors(x, options)
    _check_ranks(x, options)
    sizes = _Sizes.of(x, options)
    dtype, kv_dtype = _check_dtypes(x, options, needs_grad)
    _check_shapes(x, options, sizes, kv_dtype)
    _check_lengths(x, options, sizes)
    _check_score_operands(x, options, sizes, needs_grad)
    kv_group = _check_scales(x, options, sizes, dtype, kv_dtype)
    out_dtype = default_out_dtype(dtype)
    if out is not None:
        out_dtype = check_out(out, x, (*x.q.shape[:-1], sizes.head_dim_v), needs_grad)
    problem = AttentionProblem(
        **sizes._asdict(),
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=out_dtype,
        scale=_scale(options, sizes),
        mask=mask,
        kv_group=kv_group,
        needs_grad=needs_grad,
        bias_grad=bias_grad,
        **(storage or {}),
        **_presence(x, options),
        **_asked(options),
    )
    problem.validate()
    return problem


def _scale(options: Options, sizes: "_Sizes") -> float:
    if options.softmax_scale is None:
        return 1.0 / math.sqrt(sizes.head_dim)
    return options.softmax_scale


def _presence(x: Operands, options: Options) -> dict[str, Any]:
    """Facts of the problem that are whether an operand is there, and how it is stored."""
    packed_k = x.k.dim() == 3
    return {
        "total_q": x.q.shape[0] if options.kind == "varlen" else None,
        "total_k": x.k.shape[0] if packed_k else None,
        "used_q": x.seqused_q is not None,
        # Lengths of paged sequences are taken from cu_seqlens_k where seqused_k is absent.
        "used_k": x.seqused_k is not None or (options.kind == "varlen" and not packed_k),
        "page_size": x.k.shape[1] if x.block_table is not None else 0,
        "alibi": x.alibi_slopes is not None,
        "bias": x.bias is not None,
        "sink": x.sink is not None,
        "tree_mask": x.tree_mask is not None,
        "kv_batch_idx": x.kv_batch_idx is not None,
        "leftpad_k": x.leftpad_k is not None,
        "kv_shift": x.k_shift is not None,
    }


def _asked(options: Options) -> dict[str, Any]:
    """Facts of the problem that are Python arguments."""
    return {
        "softcap": options.softcap,
        "dropout_p": options.dropout_p,
        "return_lse": options.return_lse or options.return_attn_probs,
        "return_probs": options.return_attn_probs and options.dropout_p > 0,
        "deterministic": options.deterministic,
        "num_splits": options.num_splits,
        # Without a mask to draw, all places are one: the same plan and kernels.
        "dropout_origin": tuple(options.dropout_origin) if options.dropout_p > 0 else (0, 0, 0, 0),
    }


class _Sizes(NamedTuple):
    """Dimensions of one call, read off its tensors, by their names in AttentionProblem."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int

    @classmethod
    def of(cls, x: Operands, options: Options) -> "_Sizes":
        packing = 2 if x.k.dtype == torch.uint8 else 1
        if options.kind == "varlen":
            batch = x.cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = options.max_seqlen_q, options.max_seqlen_k
        else:
            batch, seqlen_q, seqlen_k = x.q.shape[0], x.q.shape[1], x.k.shape[1]
            if x.block_table is not None:
                seqlen_k = seqlen_k * x.block_table.shape[1]
        return cls(
            batch,
            seqlen_q,
            seqlen_k,
            x.q.shape[-2],
            x.k.shape[-2],
            x.q.shape[-1],
            x.v.shape[-1] * packing,
        )


def _check_arguments(options: Options) -> None:
    """Ranges of the Python arguments that AttentionProblem and MaskSpec do not know by name; their
    types are those that `plain.plain_options` leaves."""
    if options.kind != "varlen":
        return
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = getattr(options, name)
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}")


def wrong_type(name: str, wanted: str, value) -> NoReturn:
    """Raises the TypeError of an argument that is not what is wanted."""
    shown = "" if isinstance(value, Tensor) else f" ({value!r:.60})"
    raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}{shown}")


def check_tensor(name: str, value, device: torch.device | None = None, like: str = "q") -> None:
    """TypeError unless a dense tensor, ValueError unless on `device`, that of `like`."""
    if not isinstance(value, Tensor):
        wrong_type(name, "a torch.Tensor", value)
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {value.layout}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} like {like}, got {value.device}")


def check_shape(name: str, tensor: Tensor, shape: tuple, words: str) -> None:
    """ValueError unless `tensor` has this shape; `words` spells its dims."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} must have shape {words} = {tuple(shape)}, got {tuple(tensor.shape)}"
        )


def check_dtype(name: str, tensor: Tensor, *wanted: torch.dtype) -> None:
    """TypeError unless the dtype is one of `wanted`."""
    if tensor.dtype not in wanted:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
        raise TypeError(f"{name} must be {names}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_last_dim(name: str, tensor: Tensor) -> None:
    """ValueError unless the last dim has stride 1: this tensor is used in place."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dim, as it is used in place,"
            f" got strides {tuple(tensor.stride())}"
        )


def check_writable(name: str, tensor: Tensor) -> None:
    """ValueError where two elements share an address."""
    if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"{name} must not be expanded, as it is written,"
            f" got strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}"
        )


def check_tensors(x: Operands, options: Options) -> None:
    """Every operand a dense tensor on q's device, or absent where it may be."""
    check_tensor("q", x.q)
    for operand, value in zip(Operands._fields, x, strict=True):
        if value is not None or operand in ("k", "v"):
            check_tensor(argument_name(operand, options.kind), value, x.q.device)
    if options.kind == "varlen":
        check_tensor("cu_seqlens_q", x.cu_seqlens_q, x.q.device)
        if x.cu_seqlens_k is None and (x.block_table is None or x.seqused_k is None):
            raise ValueError(
                "cu_seqlens_k must be given, got None"
                " (only block_table with seqused_k does without it)"
            )


def _check_ranks(x: Operands, options: Options) -> None:
    q_kind = "varlen" if options.kind == "varlen" else "dense"
    k_kind = "paged" if x.block_table is not None else options.kind
    for operand, kind in (("q", q_kind), ("k", k_kind), ("v", k_kind)):
        tensor, layout = getattr(x, operand), _LAYOUTS[operand, kind]
        if tensor.dim() != layout.count(",") + 1:
            raise ValueError(
                f"{argument_name(operand, options.kind)} must be {layout},"
                f" got {tensor.dim()} dims: {tuple(tensor.shape)}"
            )
    for operand, rank in (("cu_seqlens_q", 1), ("block_table", 2)):
        tensor = getattr(x, operand)
        if tensor is not None and tensor.dim() != rank:
            raise ValueError(f"{operand} must have {rank} dims, got shape {tuple(tensor.shape)}")
    if options.kind == "varlen" and x.cu_seqlens_q.shape[0] < 1:
        raise ValueError("cu_seqlens_q must have shape (batch + 1,), got (0,)")


def _check_dtypes(x: Operands, options: Options, needs_grad: bool) -> tuple[str, str]:
    """Names of the dtypes of q and of keys and values."""
    names = [argument_name(operand, options.kind) for operand in ("k", "v")]
    check_dtype("q", x.q, *FLOATS, *FP8)
    dtype = str(x.q.dtype).removeprefix("torch.")
    if x.k.dtype == x.q.dtype:
        kv_dtype = dtype
    elif options.kind == "kvcache" and x.q.dtype in FLOATS and x.k.dtype in QUANTIZED:
        kv_dtype = QUANTIZED[x.k.dtype]
    else:
        hint = ""
        if options.kind == "kvcache":
            hint = " or quantised (int8, uint8 = two int4 a byte, float8) under a float q"
        raise TypeError(
            f"{names[0]} must be {dtype} like q{hint}, got {str(x.k.dtype).removeprefix('torch.')}"
        )
    if x.v.dtype != x.k.dtype:
        wanted = str(x.k.dtype).removeprefix("torch.")
        raise TypeError(
            f"{names[1]} must be {wanted} like {names[0]},"
            f" got {str(x.v.dtype).removeprefix('torch.')}"
        )
    if needs_grad and x.q.dtype in FP8:
        raise ValueError(f"q must not require a gradient in {dtype}: fp8 is forward only")
    return dtype, kv_dtype


def _check_shapes(x: Operands, options: Options, sizes: _Sizes, kv_dtype: str) -> None:
    """q, k and v against each other."""
    k_name, v_name = (argument_name(operand, options.kind) for operand in ("k", "v"))
    if options.kind == "dense" and x.k.shape[0] != x.q.shape[0]:
        raise ValueError(f"k must have q's batch {x.q.shape[0]}, got {x.k.shape[0]}")
    one_to_one = x.block_table is None and x.kv_batch_idx is None
    if options.kind == "kvcache" and one_to_one and x.k.shape[0] != x.q.shape[0]:
        raise ValueError(
            f"k_cache must have q's batch {x.q.shape[0]} where neither cache_batch_idx nor"
            f" block_table is given, got {x.k.shape[0]}"
        )
    packing = 2 if kv_dtype == "int4" else 1
    for name, dim, most in (
        ("q", sizes.head_dim, MAX_HEAD_DIM),
        (v_name, sizes.head_dim_v, MAX_HEAD_DIM_V),
    ):
        if not 1 <= dim <= most:
            raise ValueError(f"{name} must have a head_dim of 1 to {most}, got {dim}")
    if x.k.shape[-1] * packing != sizes.head_dim:
        raise ValueError(
            f"{k_name} must have q's head_dim {sizes.head_dim}"
            + (" (two values a byte)" if packing == 2 else "")
            + f", got {x.k.shape[-1] * packing}"
        )
    if x.v.shape[:-1] != x.k.shape[:-1]:
        raise ValueError(
            f"{v_name} must match {k_name} in all but the head_dim, {tuple(x.k.shape[:-1])},"
            f" got {tuple(x.v.shape[:-1])}"
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
        if x.k.shape[1] < 1:
            raise ValueError(f"{k_name} must have pages of at least one key, got page_size 0")
        check_dtype("block_table", x.block_table, torch.int32)
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
    """The int32 tensors that say where sequences lie."""
    for operand in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        _check_int_vector(operand, x, options, sizes.batch)
    _check_int_vector("kv_batch_idx", x, options, sizes.batch)
    _check_int_vector("leftpad_k", x, options, sizes.batch)


def _check_int_vector(operand: str, x: Operands, options: Options, batch: int) -> None:
    tensor, name = getattr(x, operand), argument_name(operand, options.kind)
    if tensor is None:
        return
    check_dtype(name, tensor, torch.int32)
    more = operand.startswith("cu_")
    check_shape(name, tensor, (batch + more,), "(batch + 1,)" if more else "(batch,)")


def _check_score_operands(x: Operands, options: Options, sizes: _Sizes, needs_grad: bool) -> None:
    """What modifies scores: bias, ALiBi, sink, tree mask, dropout's seed."""
    if x.bias is not None:
        check_dtype("bias", x.bias, *FLOATS)
        full = (sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k)
        own = x.bias.shape
        fits = len(own) <= 4 and all(
            n == 1 or n == whole for n, whole in zip(reversed(own), reversed(full), strict=False)
        )
        if not fits:
            raise ValueError(
                "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) ="
                f" {full}, got {tuple(own)}"
            )
    if x.alibi_slopes is not None:
        check_dtype("alibi_slopes", x.alibi_slopes, torch.float32)
        if x.alibi_slopes.dim() == 1:
            check_shape("alibi_slopes", x.alibi_slopes, (sizes.heads_q,), "(heads_q,)")
        else:
            shape = (sizes.batch, sizes.heads_q)
            check_shape("alibi_slopes", x.alibi_slopes, shape, "(batch, heads_q)")
    if x.sink is not None:
        check_dtype("sink", x.sink, torch.float32)
        check_shape("sink", x.sink, (sizes.heads_q,), "(heads_q,)")
    if x.tree_mask is not None:
        check_dtype("tree_mask", x.tree_mask, torch.bool)
        batch = 1 if x.tree_mask.shape[:1] == (1,) else sizes.batch
        shape = (batch, sizes.seqlen_q, sizes.seqlen_q)
        check_shape("tree_mask", x.tree_mask, shape, "(batch or 1, q_len, q_len)")
    if x.seed is not None:
        check_dtype("dropout_seed", x.seed, torch.int64)
        if x.seed.numel() != 1:
            raise ValueError(f"dropout_seed must have one element, got {tuple(x.seed.shape)}")
    if needs_grad:
        check_constants(x)


def wanting(x: Operands) -> str:
    """The operand that requires a gradient though none is computed for it; "" if there is none."""
    for operand in CONSTANTS:
        tensor = getattr(x, operand)
        if tensor is not None and tensor.requires_grad:
            return operand
    return ""


def check_constants(x: Operands) -> None:
    """ValueError where a gradient is wanted that is not computed."""
    operand = wanting(x)
    if operand:
        raise no_gradient(operand)


def no_gradient(operand: str) -> ValueError:
    """What to raise where the gradient of one of CONSTANTS is wanted."""
    return ValueError(
        f"{operand} must not require a gradient, as none is computed for it, got one that does"
        f" (pass {operand}.detach(), or call under torch.no_grad())"
    )


def _check_scales(x: Operands, options: Options, sizes: _Sizes, dtype: str, kv_dtype: str) -> int:
    """Descales and shifts; returns the values that share one scale, 0 for scales per head."""
    quantized = kv_dtype != dtype
    for operand in ("q_descale", "k_descale", "v_descale", "k_shift", "v_shift"):
        tensor = getattr(x, operand)
        if tensor is None:
            continue
        if not quantized and (ITEM_BITS[dtype] > 8 or operand.endswith("shift")):
            wanted = "a quantised cache" if operand.endswith("shift") else "fp8 q, k and v"
            if options.kind == "kvcache":
                wanted = "a quantised or fp8 cache"
            raise ValueError(f"{operand} must be None without {wanted}, got one beside {kv_dtype}")
        check_dtype(operand, tensor, torch.float32)
    if (x.k_shift is None) != (x.v_shift is None):
        missing, given = ("k", "v") if x.k_shift is None else ("v", "k")
        raise ValueError(f"{missing}_shift must be given with {given}_shift, got None")
    if (x.k_shift is not None) and (x.k_descale is None or x.v_descale is None):
        missing = "k" if x.k_descale is None else "v"
        raise ValueError(f"{missing}_descale must be given with {missing}_shift, got None")
    groups = {_scale_group(name, x, sizes) for name in ("k", "v")} - {None}
    if x.q_descale is not None:
        _check_head_scale("q_descale", x.q_descale, sizes)
    if len(groups) > 1:
        raise ValueError(
            "v_descale must share as many values a scale as k_descale, got"
            f" {' and '.join(str(group or 'a head') for group in sorted(groups, key=str))}"
        )
    group = groups.pop() if groups else 0
    if group and (x.k_descale is None or x.v_descale is None):
        missing, given = ("k", "v") if x.k_descale is None else ("v", "k")
        raise ValueError(f"{missing}_descale must be given with {given}_descale, got None")
    return group or 0


def _scale_group(name: str, x: Operands, sizes: _Sizes) -> int | None:
    """Values that share a scale of `name`_descale: 0 for one per head, None without scales."""
    stored, scale = getattr(x, name), getattr(x, f"{name}_descale")
    shift = getattr(x, f"{name}_shift")
    if scale is None:
        return None
    dim = sizes.head_dim if name == "k" else sizes.head_dim_v
    if scale.dim() < 3:
        _check_head_scale(f"{name}_descale", scale, sizes)
        if shift is not None:
            _check_head_scale(f"{name}_shift", shift, sizes)
        return 0
    groups = scale.shape[-1]
    words = "(num_pages, page_size" if x.block_table is not None else "(batch_cache, seqlen_cache"
    check_shape(
        f"{name}_descale", scale, (*stored.shape[:-1], groups), f"{words}, heads_k, groups)"
    )
    if groups < 1 or dim % groups:
        raise ValueError(f"{name}_descale must have groups that divide {dim}, got {groups}")
    if shift is not None:
        check_shape(f"{name}_shift", shift, scale.shape, f"of {name}_descale")
    return dim // groups


def _check_head_scale(name: str, scale: Tensor, sizes: _Sizes) -> None:
    if scale.dim() <= 1 and scale.numel() == 1:
        return
    check_shape(name, scale, (sizes.batch, sizes.heads_k), "() or (batch, heads_k)")


def check_seed(seed: Any, device: torch.device) -> None:
    """dropout_seed as `plain.plain_seed` leaves it: None, an int or a tensor on the device."""
    if seed is None:
        return
    if isinstance(seed, Tensor):
        return check_tensor("dropout_seed", seed, device)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"dropout_seed must fit 64 bits, got {seed}")


def check_out(out: Any, x: Operands, shape: tuple, needs_grad: bool) -> str:
    """The name of out's dtype, once `out` is known to be a place for the result."""
    check_tensor("out", out, x.q.device)
    if needs_grad or out.requires_grad:
        raise ValueError(
            "out must be None where a gradient is wanted (autograd needs an output of its own; or"
            " use torch.no_grad()), got a tensor"
        )
    wanted = FLOATS if x.q.dtype in FP8 else (x.q.dtype,)
    check_dtype("out", out, *wanted)
    check_shape("out", out, shape, "of q with v's head_dim")
    check_last_dim("out", out)
    check_writable("out", out)
    return str(out.dtype).removeprefix("torch.")
