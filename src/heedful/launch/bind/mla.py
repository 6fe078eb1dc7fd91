"""Programs of the MLA decode."""

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import LaunchSizes, Sizes
from heedful.core.registry.tiles import MlaConfig, MlaSwapConfig
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.mla import MlaIO, MlaSwapTile, MlaTile
from heedful.launch.bind import groups, split_kv
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.groups import Buffers
from heedful.launch.bind.hopper import SWIZZLE, key_map
from heedful.launch.bind.portable import shared_divisor
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar

KERNEL = "mla.forward"
_REF = KernelRef("heedful.kernels.hopper.mla.kernel", "mla", "gluon")
CONSUMERS = 2
BLOCK_KEYS = 64  # of a consumer


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    return split_kv.forward(problem, plan, buffers, _call)


def _call(problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers) -> KernelCall:
    config = plan.configs[KERNEL]
    assert isinstance(config, MlaConfig)
    tile = MlaTile(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_E=problem.head_dim_v // CONSUMERS,
        ROWS=config.kept_rows(problem),
        QUERY_BOXES=config.query_boxes,
        AHEAD=config.ahead,
        IN_ORDER=config.in_order,
        MERGE=config.merge,
        CONSUMER_REGS=config.consumer_regs,
        PRODUCER_REGS=config.producer_regs,
    )
    return latent_call(_REF, problem, config, sizes.launches[KERNEL], buffers, tile)


def latent_call(
    ref: KernelRef,
    problem: AttentionProblem,
    config: MlaConfig | MlaSwapConfig,
    launch: LaunchSizes,
    buffers: Buffers,
    tile: MlaTile | MlaSwapTile,
) -> KernelCall:
    """The launch of a kernel over latent vectors."""
    divisor = shared_divisor(buffers, ("q", "out"))
    io = MlaIO(
        q=groups.rows(buffers, "q", divisor),
        k=key_map(problem, buffers, "k", BLOCK_KEYS, SWIZZLE),
        **split_kv.results(buffers, divisor),
    )
    rows = _kv_rows(problem, buffers)
    return split_kv.hopper_call(ref, problem, config, launch, buffers, io, rows, tile)


def _kv_rows(problem: AttentionProblem, buffers: Buffers) -> KVRows:
    """How the map of keys, in which the values lie, numbers its rows."""
    rows = Scalar(maps.rows_between(buffers["k"])) if problem.ragged_k else 0
    no_page = maps.no_page({**buffers, "v": buffers["k"]}) if problem.page_size else None
    return KVRows(rows, None, IS_RAGGED=problem.ragged_k, NO_PAGE=no_page)
