"""Programs of the MLA decode of few rows."""

import math

from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.core.tiles import HOPPER_MERGE_ROWS, MlaSwapConfig
from heedful.kernels.args.mla import MlaSwapParams, MlaSwapTile
from heedful.launch.bind import groups, mla
from heedful.launch.bind.groups import Buffers
from heedful.launch.spec import KernelCall, KernelRef, Program

KERNEL = "mla_swap_ab.forward"


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    sizes, config = plan.sizes(), plan.configs[KERNEL]
    assert isinstance(config, MlaSwapConfig)
    launch = sizes.launches[KERNEL]
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    at_once = min(config.kept_rows(problem), HOPPER_MERGE_ROWS) * problem.head_dim_v
    tile = MlaSwapTile(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_E=problem.head_dim_v,
        ROWS=config.kept_rows(problem),
        STAGES=config.num_stages,
        MERGE=config.merge,
        PRODUCER_REGS=config.producer_regs,
    )
    parameters = {
        "io": mla.tensors(problem, buffers),
        "params": MlaSwapParams(
            *mla.shared_params(problem, config, buffers, launch.numbers["tiles"], at_once),
            tile=tile,
            sink=groups.pointer(buffers, "sink"),
            scale_log2=groups.number(problem.scale * math.log2(math.e)),
        ),
    }
    ref = KernelRef("heedful.kernels.hopper.mla_swap_ab", "mla_swap_ab", "gluon")
    # Where all merge each other's parts they wait for each other.
    waits = bool(config.merge) and problem.num_splits != 1
    options = {"num_warps": config.num_warps}
    call = KernelCall(ref, launch.grid, parameters, options, cooperative=waits)
    return Program((call,), sizes.workspaces)
