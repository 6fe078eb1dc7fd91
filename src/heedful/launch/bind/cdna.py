"""Programs of the CDNA kernels: arguments and grid, the same for both generations."""

import math

from heedful.core.base.arrays import ArraySpec, item_bytes
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.kernels.args.shared import TileOrder
from heedful.launch.bind import groups, portable
from heedful.launch.bind.groups import Buffers, with_scratch
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar

GENERATIONS = {"gfx942": 3, "gfx950": 4}


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse if there is such a buffer. If the keys are split, they
    store partial results, which the portable merge combines."""
    sizes = plan.sizes()
    # No program of the attention kernel handles tokens of no sequence.
    cleared = [portable.clear_outside_call(problem, buffers)] if problem.varlen_q else []
    buffers = with_scratch(buffers, sizes)
    merge = [portable.combine_call(buffers)] if plan.is_split else []
    call = _call(problem, plan, sizes, buffers)
    return Program((call, *merge, *cleared), sizes.workspaces)


def _call(problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers) -> KernelCall:
    config, launch = plan.configs["cdna.forward"], sizes.launches["cdna.forward"]
    out = "partial_out" if plan.is_split else "out"
    results = groups.split_rows(buffers, out, _divisor(buffers[out]), plan.is_split)
    io = portable.forward_io(buffers, _divisor(buffers["q"]), plan.is_split)
    parameters = {
        "io": io._replace(out=results),
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
    """A divisor of all strides, in elements: loads are 16 bytes wide, and a gate has checked that
    strides allow them."""
    return 16 // min(item_bytes(spec.dtype), 2)
