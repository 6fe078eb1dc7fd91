"""Programs of the MLA decodes: of a kernel for any number of rows, and of one for few."""

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.core.registry.tiles import MlaConfig, MlaSwapConfig
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.mla import MlaIO, MlaSwapTile, MlaTile
from heedful.launch.bind import groups, split_kv
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.groups import Buffers
from heedful.launch.bind.hopper import SWIZZLE, key_map
from heedful.launch.bind.portable import shared_divisor
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar

BLOCK_KEYS = 64  # of a consumer
# By variant: the kernel, its tile, and how many consumers share the columns of values.
_KERNELS: dict[str, tuple[KernelRef, type, int]] = {
    "mla": (KernelRef("heedful.kernels.hopper.mla.kernel", "mla", "gluon"), MlaTile, 2),
    "mla_swap_ab": (
        KernelRef("heedful.kernels.hopper.mla.swap_ab", "mla_swap_ab", "gluon"),
        MlaSwapTile,
        1,
    ),
}


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse if there is such a buffer."""
    return split_kv.forward(problem, plan, buffers, _call)


def _call(problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers) -> KernelCall:
    (kernel, config), (ref, group, consumers) = *plan.configs.items(), _KERNELS[plan.variant]
    assert isinstance(config, MlaConfig | MlaSwapConfig)
    divisor = shared_divisor(buffers, ("q", "out"))
    keys = key_map(problem, buffers, "k", BLOCK_KEYS, SWIZZLE)
    tile = groups.constants(
        group,
        problem,
        config,
        BLOCK_E=problem.head_dim_v // consumers,
        ROWS=config.kept_rows(problem),
        **({"STAGES": config.num_stages} if consumers == 1 else {}),
    )
    io = groups.arrays(MlaIO, buffers, divisor, k=keys)
    rows = _kv_rows(problem, buffers)
    launch = sizes.launches[kernel]
    return split_kv.hopper_call(ref, problem, config, launch, buffers, io, rows, tile)


def _kv_rows(problem: AttentionProblem, buffers: Buffers) -> KVRows:
    """The group that says how the tensor map of keys, in which the values lie, numbers its rows."""
    rows = Scalar(maps.rows_between(buffers["k"])) if problem.ragged_k else 0
    no_page = maps.no_page({**buffers, "v": buffers["k"]}) if problem.page_size else None
    return KVRows(rows, None, IS_RAGGED=problem.ragged_k, NO_PAGE=no_page)
