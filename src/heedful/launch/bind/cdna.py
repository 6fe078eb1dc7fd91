"""Programs of the CDNA kernels: argument order and grid, the same for both generations."""

import math
from collections.abc import Mapping

from heedful.core.arrays import ArraySpec, item_bytes
from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.core.sizes import Sizes
from heedful.launch.bind import portable
from heedful.launch.spec import (
    Argument,
    KernelCall,
    KernelRef,
    Pointer,
    Program,
    Scalar,
)

Buffers = Mapping[str, ArraySpec]

DESCALES = ("q_descale", "k_descale", "v_descale")
# Stands for "farther than any sequence reaches"; sums of three stay within 32 bits.
FAR = 1 << 29
# Buffer instructions reach 2^31 bytes from a tile's base: 256 rows of this many bytes.
WIDE_STRIDE = 1 << 23


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer; several splits of the keys give partial results,
    which the portable merge combines."""
    sizes = plan.sizes()
    # Tokens of no sequence have no program of the attention kernel.
    cleared = [portable.clear_outside_call(problem, buffers)] if problem.varlen_q else []
    if not plan.is_split:
        return Program((_call(problem, plan, sizes, buffers, "out", "lse"), *cleared))
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    call = _call(problem, plan, sizes, buffers, "partial_out", "partial_lse")
    return Program((call, *portable.combine(buffers).calls, *cleared), sizes.workspaces)


def _call(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers, out: str, lse: str
) -> KernelCall:
    config, launch = plan.configs["cdna.forward"], sizes.launches["cdna.forward"]
    heads = problem.batch * problem.heads_q
    arguments: dict[str, Argument] = {}
    constants: dict[str, object] = {}
    for parameter, name in {"q": "q", "k": "k", "v": "v", "out": out}.items():
        arguments[parameter] = Pointer(name, buffers[name].dtype)
    optional = {"lse": lse, "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k"}
    optional |= {name: name for name in DESCALES}
    for parameter, name in optional.items():
        if name in buffers:
            arguments[parameter] = Pointer(name, buffers[name].dtype, False)
        else:
            constants[parameter] = None
    arguments["scale_log2"] = Scalar(problem.scale * math.log2(math.e), "fp32")
    spec, lead = buffers[out], int(plan.is_split)
    part = ArraySpec(spec.shape[lead:], spec.strides[lead:], spec.dtype)
    for prefix, axes, tensor in (
        ("q", "bmh", buffers["q"]),
        ("k", "bnh", buffers["k"]),
        ("v", "bnh", buffers["v"]),
        ("o", "bmh", part),
    ):
        arguments |= _strides(prefix, axes, tensor)
    step, *strides = ArraySpec.contiguous((1, *problem.lse_shape), "float32").strides
    far = {
        "stride_os": spec.strides[0] if lead else 0,
        "stride_ls": step,
        "stride_lb": 0 if problem.varlen_q else strides[0],
        "stride_lh": strides[-2],
    }
    for name in DESCALES:
        step_b, step_g = buffers[name].strides if name in buffers else (0, 0)
        far |= {f"stride_{name[0]}db": step_b, f"stride_{name[0]}dg": step_g}
    arguments |= {name: Scalar(value, "i64") for name, value in far.items()}
    numbers = {
        "seqlen_q": problem.total_q if problem.varlen_q else problem.seqlen_q,
        "seqlen_k": portable.stored_keys(buffers, 0),
        "heads_q": problem.heads_q,
        "heads": heads,
        "group": problem.group,
        **launch.numbers,
        "num_splits": sizes.num_splits,
        "align": int(problem.mask.bottom_right),
        "shift": max(-FAR, min(problem.mask.shift, FAR)),
    }
    arguments |= {name: Scalar(value) for name, value in numbers.items()}
    constants |= {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "IS_CAUSAL": problem.mask.causal,
    }
    ref = KernelRef(plan.row("forward").code[plan.device.arch], "forward", "gluon")
    return KernelCall(ref, launch.grid, {**arguments, **constants}, {"num_warps": config.num_warps})


def _strides(prefix: str, axes: str, spec: ArraySpec) -> dict[str, Argument]:
    """Batch, row and head strides of (B, S, H, D) or (T, H, D); a row's is 32-bit, for offsets
    within a tile, and a dim of one element is never stepped over."""
    *batch, row, head, _ = spec.steps
    most = WIDE_STRIDE // item_bytes(spec.dtype)
    if abs(row) >= most:
        raise ValueError(f"{prefix} must have a row stride below {most} elements, got {row}")
    values = (batch[0] if batch else 0, row, head)
    # Loads are 16 bytes wide: the gate promises 16-byte strides.
    divisor = 16 // min(item_bytes(spec.dtype), 2)
    return {
        f"stride_{prefix}{axis}": Scalar(value, "i32" if axis in "mn" else "i64", divisor)
        for axis, value in zip(axes, values, strict=True)
    }
