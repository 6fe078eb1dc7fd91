"""Programs of the MLA decode of few rows."""

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.registry.tiles import HOPPER_MERGE_ROWS, MlaSwapConfig
from heedful.kernels.args.mla import MlaSwapTile
from heedful.launch.bind import mla
from heedful.launch.bind.decode import shared_work
from heedful.launch.bind.groups import Buffers
from heedful.launch.bind.hopper_decode import shared_keys_call, shared_params
from heedful.launch.program.spec import Program

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
    work = shared_work(problem, config, buffers, launch.numbers, at_once)
    parameters = {
        "io": mla.tensors(problem, buffers),
        "params": shared_params(problem, buffers, mla.kv_rows(problem, buffers), work, tile),
    }
    call = shared_keys_call("mla_swap_ab", launch.grid, parameters, problem, config)
    return Program((call,), sizes.workspaces)
