"""The arguments that the Hopper kernels share, and the kernel ahead of packed queries."""

import math
from collections.abc import Mapping

from heedful.core.arrays import ArraySpec, item_bytes
from heedful.core.problem import AttentionProblem
from heedful.core.sizes import LaunchSizes, Sizes, work_heads
from heedful.core.tiles import VARLEN_SCHEDULER, HopperConfig, pow2
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.spec import Argument, KernelCall, KernelRef, Pointer, Scalar

Buffers = Mapping[str, ArraySpec]

# Stands for "farther than any sequence reaches"; sums of three stay within 32 bits.
FAR = 1 << 29


class Call:
    """Collects the kernel's arguments; those of features that a call lacks are constants None."""

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.arguments: dict[str, Argument] = {}
        self.constants: dict[str, object] = {}

    def pointers(self, **names: str) -> None:
        """Parameters that take a small array's address: parameter = buffer name."""
        for parameter, name in names.items():
            if name in self.buffers:
                self.arguments[parameter] = Pointer(name, self.buffers[name].dtype, False)
            else:
                self.constants[parameter] = None

    def floats(self, **values: float) -> None:
        self.arguments |= {name: Scalar(value, "fp32") for name, value in values.items()}

    def ints(self, **values: int) -> None:
        self.arguments |= {name: Scalar(value) for name, value in values.items()}

    def ints_if(self, has: bool, **values: int) -> None:
        """As ints, where the feature that reads them is there."""
        if has:
            self.ints(**values)
        else:
            self.constants |= dict.fromkeys(values)

    def strides_if(self, has: bool, divisor: int = 1, **values: int) -> None:
        """64-bit strides of an array that is there only if `has`."""
        if has:
            strides = {name: Scalar(value, "i64", divisor) for name, value in values.items()}
            self.arguments |= strides
        else:
            self.constants |= dict.fromkeys(values)

    def strides_of(self, name: str, **axes: int) -> None:
        """64-bit strides of a small array, parameter = axis, where it is there."""
        spec = self.buffers.get(name)
        if spec is None:
            self.constants |= dict.fromkeys(axes)
        else:
            values = {parameter: spec.strides[axis] for parameter, axis in axes.items()}
            self.strides_if(True, **values)


def add_common(
    call: Call, problem: AttentionProblem, config: HopperConfig, launch: LaunchSizes
) -> None:
    """Adds what every call has: sizes, mask, scales, and how its work is scheduled."""
    call.pointers(
        sink_ptr="sink",
        cu_q="cu_seqlens_q",
        cu_k="cu_seqlens_k",
        varlen_tiles="varlen_tiles",
        tile_counter="tile_counter",
    )
    call.floats(**_scales(problem))
    call.ints(
        heads=work_heads(config, problem),
        group=1 if config.group_rows(problem) > 1 else problem.group,
        seqlen_q=problem.seqlen_q,
        total_q=problem.total_q or problem.batch * problem.seqlen_q,
        **launch.numbers,
        **_mask(problem),
    )


def varlen_scheduler_call(
    problem: AttentionProblem,
    config: HopperConfig,
    sizes: Sizes,
    buffers: Buffers,
    results: Mapping[str, str],
) -> KernelCall:
    """What comes ahead of the attention kernel for packed queries: their tiles put in order, and
    tokens of no sequence cleared in `results`, the buffers of "lse", perhaps one for each split of
    the keys, and of "out" or none."""
    call, launch = Call(buffers), sizes.launches["hopper.varlen_scheduler"]
    call.pointers(
        cu_q="cu_seqlens_q",
        cu_k="cu_seqlens_k",
        varlen_tiles="varlen_tiles",
        tile_counter="tile_counter",
    )
    call.pointers(lse=results["lse"])
    out = buffers[results["out"]] if "out" in results else None
    if out is None:
        call.constants |= dict.fromkeys(("out", "stride_om", "stride_oh"))
    else:
        call.arguments["out"] = Pointer(results["out"], out.dtype)
        # Maps want rows and heads that begin at multiples of 16 bytes.
        divisor = maps.STRIDE_BYTES // item_bytes(problem.out_dtype)
        row, head = (maps.stride(out, axis) for axis in (0, 1))
        call.strides_if(True, divisor, stride_om=row, stride_oh=head)
    total_q = buffers["q"].shape[0]
    call.ints(
        total_q=total_q,
        total_k=buffers["k"].shape[0],
        batch=problem.batch,
        # Those of every split lie one after the other.
        heads=problem.heads_q * (1 if out is not None else sizes.num_splits),
        **launch.numbers,
    )
    dim = problem.head_dim_v
    constants = call.constants | {"ROWS": config.block_m, "BLOCK": VARLEN_SCHEDULER.rows}
    constants |= {"DIM": dim, "BLOCK_E": pow2(dim)}
    ref = KernelRef("heedful.kernels.hopper.varlen_scheduler", "schedule_varlen_tiles")
    options = {"num_warps": VARLEN_SCHEDULER.num_warps}
    return KernelCall(ref, launch.grid, {**call.arguments, **constants}, options)


def _scales(problem: AttentionProblem) -> dict[str, float]:
    """Raw scores times scale_log2 are logits in base 2; under softcap the kernel takes
    tanh(s scale / softcap) first, through 2^(s softcap_scale)."""
    log2e = math.log2(math.e)
    scale, softcap_scale = problem.scale * log2e, 0.0
    if problem.softcap > 0:
        softcap_scale = 2.0 * log2e * problem.scale / problem.softcap
        scale = problem.softcap * log2e
    return {"scale_log2": scale, "softcap_scale": softcap_scale}


def _mask(problem: AttentionProblem) -> dict[str, int]:
    mask = problem.mask
    return {
        "left": min(mask.left, FAR) if mask.left >= 0 else FAR,
        "right": min(mask.right, FAR) if mask.right >= 0 else FAR,
        "shift": max(-FAR, min(mask.shift, FAR)),
        "align": int(mask.bottom_right),
    }
