"""Programs of the CDNA kernels: arguments and grid, the same for both generations."""

import math

from heedful.core.base.arrays import ArraySpec, item_bytes
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.kernels.args.shared import ForwardIO, TileOrder
from heedful.launch.bind import groups, portable
from heedful.launch.bind.groups import Buffers
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar

GENERATIONS = {"gfx942": 3, "gfx950": 4}


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
    parameters = {
        "io": ForwardIO(
            *(groups.rows(buffers, name, _divisor(buffers[name])) for name in "qkv"),
            out=groups.split_rows(buffers, out, plan.is_split, _divisor(buffers[out])),
            lse=groups.split_row_vector(buffers, lse, plan.is_split),
            rest=groups.pointer(buffers, "partial_rest" if plan.is_split else "rest"),
        ),
        "sequences": groups.sequences(problem, buffers),
        "shape": groups.shape(problem),
        "mask": groups.mask(problem, buffers),
        "descales": groups.descales(problem, buffers),
        "order": TileOrder(
            tiles=Scalar(launch.numbers["tiles"]), l2_heads=None, splits=Scalar(sizes.num_splits)
        ),
        "tile": portable.tile(problem, config.block_m, config.block_n, _divisor(buffers["q"])),
        "scale_log2": groups.number(problem.scale * math.log2(math.e)),
        "GENERATION": GENERATIONS[plan.device.arch],
    }
    ref = KernelRef("heedful.kernels.cdna.forward", "forward", "gluon")
    return KernelCall(ref, launch.grid, parameters, {"num_warps": config.num_warps})


def _divisor(spec: ArraySpec) -> int:
    """The divisor of strides: loads are 16 bytes wide, as the gate promises."""
    return 16 // min(item_bytes(spec.dtype), 2)
