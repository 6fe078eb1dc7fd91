"""Programs of the CDNA kernels: argument order and grid, the same for both generations."""

import math
from collections.abc import Mapping

from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.launch.spec import (
    Argument,
    BufferSpec,
    KernelCall,
    KernelRef,
    Pointer,
    Program,
    Scalar,
)

Buffers = Mapping[str, BufferSpec]

MODULES = {"gfx942": "heedful.kernels.cdna3.forward", "gfx950": "heedful.kernels.cdna4.forward"}
# Stands for "farther than any sequence reaches"; sums of three stay within 32 bits.
FAR = 1 << 29
# Loads are 16 bytes wide: the gate promises 16-byte strides.
STRIDE_DIVISOR = 8


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    config = plan.configs["cdna.forward"]
    row_blocks = -(-problem.seqlen_q // config.block_m)
    heads = problem.batch * problem.heads_q
    arguments: dict[str, Argument] = {}
    constants: dict[str, object] = {}
    for name in ("q", "k", "v", "out"):
        arguments[name] = Pointer(name, buffers[name].dtype)
    absent = {"lse": "lse", "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k"}
    for parameter, name in absent.items():
        if name in buffers:
            arguments[parameter] = Pointer(name, buffers[name].dtype, False)
        else:
            constants[parameter] = None
    arguments["scale_log2"] = Scalar(problem.scale * math.log2(math.e), "fp32")
    for axes, name in (("bmh", "q"), ("bnh", "k"), ("bnh", "v"), ("bmh", "out")):
        arguments |= _strides(name[0], axes, buffers[name])
    lse = BufferSpec.contiguous(problem.lse_shape, "float32").strides
    arguments["stride_lb"] = Scalar(0 if problem.varlen_q else lse[0], "i64")
    arguments["stride_lh"] = Scalar(lse[-2], "i64")
    numbers = {
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "heads_q": problem.heads_q,
        "heads": heads,
        "group": problem.group,
        "row_blocks": row_blocks,
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
    ref = KernelRef(MODULES[plan.device.arch], "forward", "gluon")
    options = {"num_warps": config.num_warps, "waves_per_eu": config.get("waves_per_eu", 0)}
    call = KernelCall(ref, (row_blocks * heads, 1, 1), arguments, constants, options)
    return Program((call,))


def _strides(prefix: str, axes: str, spec: BufferSpec) -> dict[str, Argument]:
    """Batch, row and head strides of (B, S, H, D) or (T, H, D); a row's is 32-bit, for offsets
    within a tile, and a dim of one element is never stepped over."""
    pairs = zip(spec.shape[:-1], spec.strides[:-1], strict=True)
    *batch, row, head = (stride if size > 1 else 0 for size, stride in pairs)
    values = (batch[0] if batch else 0, row, head)
    return {
        f"stride_{prefix}{axis}": Scalar(value, "i32" if axis in "mn" else "i64", STRIDE_DIVISOR)
        for axis, value in zip(axes, values, strict=True)
    }
