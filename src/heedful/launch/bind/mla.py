"""Programs of the MLA decode."""

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.core.registry.tiles import HOPPER_MERGE_ROWS, MlaConfig
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.mla import MlaIO, MlaTile
from heedful.launch.bind import groups
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.decode import shared_work
from heedful.launch.bind.groups import Buffers, pointer
from heedful.launch.bind.hopper import SWIZZLE, key_map
from heedful.launch.bind.hopper_decode import shared_keys_call, shared_params
from heedful.launch.bind.portable import shared_divisor
from heedful.launch.program.spec import KernelCall, Program, Scalar

CONSUMERS = 2
BLOCK_KEYS = 64  # of a consumer


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    sizes, config = plan.sizes(), plan.configs["mla.forward"]
    assert isinstance(config, MlaConfig)
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    return Program((_call(problem, config, sizes, buffers),), sizes.workspaces)


def _call(
    problem: AttentionProblem, config: MlaConfig, sizes: Sizes, buffers: Buffers
) -> KernelCall:
    launch = sizes.launches["mla.forward"]
    at_once = HOPPER_MERGE_ROWS * (problem.head_dim_v // CONSUMERS)
    work = shared_work(problem, config, buffers, launch.numbers, at_once)
    parameters = {
        "io": tensors(problem, buffers),
        "params": shared_params(
            problem, buffers, kv_rows(problem, buffers), work, _tile(problem, config)
        ),
    }
    return shared_keys_call("mla", launch.grid, parameters, problem, config)


def tensors(problem: AttentionProblem, buffers: Buffers) -> MlaIO:
    """What a kernel over latent vectors reads and writes."""
    divisor = shared_divisor(buffers, ("q", "out"))
    return MlaIO(
        q=groups.rows(buffers, "q", divisor),
        k=key_map(problem, buffers, "k", BLOCK_KEYS, SWIZZLE),
        out=groups.split_rows(buffers, "out", False, divisor),
        lse=groups.split_row_vector(buffers, "lse", False),
        rest=pointer(buffers, "rest"),
    )


def kv_rows(problem: AttentionProblem, buffers: Buffers) -> KVRows:
    """How the map of keys, in which the values lie, numbers its rows."""
    rows = Scalar(maps.rows_between(buffers["k"])) if problem.ragged_k else 0
    no_page = maps.no_page({**buffers, "v": buffers["k"]}) if problem.page_size else None
    return KVRows(rows, None, IS_RAGGED=problem.ragged_k, NO_PAGE=no_page)


def _tile(problem: AttentionProblem, config: MlaConfig) -> MlaTile:
    return MlaTile(
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
