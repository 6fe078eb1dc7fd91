"""Programs of the MLA decode of few rows."""

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.core.registry.tiles import MlaSwapConfig
from heedful.kernels.args.mla import MlaSwapTile
from heedful.launch.bind import mla, split_kv
from heedful.launch.bind.groups import Buffers
from heedful.launch.spec import KernelCall, KernelRef, Program

KERNEL = "mla_swap_ab.forward"
_REF = KernelRef("heedful.kernels.hopper.mla.swap_ab", "mla_swap_ab", "gluon")


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    return split_kv.forward(problem, plan, buffers, _call)


def _call(problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers) -> KernelCall:
    config = plan.configs[KERNEL]
    assert isinstance(config, MlaSwapConfig)
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
    return mla.latent_call(_REF, problem, config, sizes.launches[KERNEL], buffers, tile)
