"""Programs of the MLA decode."""

import math
from typing import Any

from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.core.sizes import Sizes
from heedful.core.tiles import HOPPER_MERGE_ROWS, MlaConfig, SharedKeysConfig
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.mla import MlaIO, MlaParams, MlaTile
from heedful.launch.bind import groups
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.decode import shared_work
from heedful.launch.bind.groups import Buffers
from heedful.launch.bind.hopper import SWIZZLE, key_map
from heedful.launch.bind.portable import shared_divisor
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar

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
    parameters = {
        "io": tensors(problem, buffers),
        "params": MlaParams(
            *shared_params(problem, config, buffers, launch.numbers["tiles"], at_once),
            tile=_tile(problem, config),
            sink=groups.pointer(buffers, "sink"),
            scale_log2=groups.number(problem.scale * math.log2(math.e)),
        ),
    }
    ref = KernelRef("heedful.kernels.hopper.mla", "mla", "gluon")
    # Where all merge each other's parts they wait for each other.
    waits = bool(config.merge) and problem.num_splits != 1
    options = {"num_warps": config.num_warps}
    return KernelCall(ref, launch.grid, parameters, options, cooperative=waits)


def tensors(problem: AttentionProblem, buffers: Buffers) -> MlaIO:
    """What a kernel over latent vectors reads and writes."""
    divisor = shared_divisor(buffers, ("q", "out"))
    return MlaIO(
        q=groups.rows(buffers, "q", divisor),
        k=key_map(problem, buffers, "k", BLOCK_KEYS, SWIZZLE),
        out=groups.split_rows(buffers, "out", False, divisor),
        lse=groups.split_row_vector(buffers, "lse", False),
    )


def shared_params(
    problem: AttentionProblem,
    config: SharedKeysConfig,
    buffers: Buffers,
    tiles: int,
    at_once: int,
) -> tuple[Any, ...]:
    """The first of its parameters, up to the work. at_once: see `shared_work`."""
    return (
        groups.sequences(problem, buffers),
        groups.shape(problem),
        groups.mask(problem, buffers),
        groups.kv_layout(problem.page_size, buffers),
        _kv_rows(problem, buffers),
        shared_work(problem, config, buffers, tiles, at_once),
    )


def _kv_rows(problem: AttentionProblem, buffers: Buffers) -> KVRows:
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
        COLUMNS=config.columns,
        AHEAD=config.ahead,
        IN_ORDER=config.in_order,
        MERGE=config.merge,
        CONSUMER_REGS=config.consumer_regs,
        PRODUCER_REGS=config.producer_regs,
    )
