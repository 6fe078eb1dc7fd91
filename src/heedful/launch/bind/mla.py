"""Programs of the MLA decodes: of a kernel for any number of rows, of one for few, and of one over
latent vectors of 8 bits."""

from typing import Any

from heedful.core.base.arrays import ArraySpec, item_bytes
from heedful.core.call.problem import (
    LATENT_ROW_BYTES,
    LATENT_ROW_DIM_V,
    LATENT_ROW_GROUP,
    LATENT_ROWS,
    AttentionProblem,
)
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.core.registry.tiles import MlaConfig, MlaConvertingConfig, MlaSwapConfig
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.mla import (
    MlaConvertingPairTile,
    MlaConvertingTile,
    MlaIO,
    MlaSwapTile,
    MlaTile,
    StoredLatentIO,
)
from heedful.launch.bind import groups, split_kv
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.groups import Buffers
from heedful.launch.bind.hopper import SWIZZLE, key_map
from heedful.launch.bind.portable import shared_divisor
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar, TensorMap

BLOCK_KEYS = 64  # of a consumer
# Numbers of a row of bytes, by dtype: its values and their scales; all of it as bfloat16, whose
# last are the columns past the values.
_ROW_NUMBERS = {
    "float8_e4m3fn": LATENT_ROW_DIM_V,
    "float32": LATENT_ROW_DIM_V // 4 + LATENT_ROW_DIM_V // LATENT_ROW_GROUP,
    "bfloat16": LATENT_ROW_BYTES // 2,
}
# By variant: the module of its kernel, its tile, its arrays, and how many consumers share the
# columns of values.
_KERNELS: dict[str, tuple[str, type, type, int]] = {
    "mla": ("kernel", MlaTile, MlaIO, 2),
    "mla_swap_ab": ("swap_ab", MlaSwapTile, MlaIO, 1),
    "mla_converting": ("converting", MlaConvertingTile, StoredLatentIO, 1),
    "mla_converting_pair": ("converting_pair", MlaConvertingPairTile, StoredLatentIO, 2),
}


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse if there is such a buffer."""
    return split_kv.forward(problem, plan, buffers, _call)


def _call(problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers) -> KernelCall:
    ((kernel, config),) = plan.configs.items()
    module, group, arrays, consumers = _KERNELS[plan.variant]
    ref = KernelRef(f"heedful.kernels.hopper.mla.{module}", plan.variant, "gluon")
    assert isinstance(config, MlaConfig | MlaSwapConfig)
    divisor = shared_divisor(buffers, ("q", "out"))
    facts: dict[str, Any] = {} if isinstance(config, MlaConfig) else {"STAGES": config.num_stages}
    registers = config.registers if isinstance(config, MlaConvertingConfig) else 0
    keys: dict[str, Any] = {"q_map": _query_map(problem, config, buffers)}
    if arrays is StoredLatentIO:
        keys |= _stored_maps(problem, buffers)
        keys |= {f"{name}_descale": groups.descale(buffers, name, 0) for name in "kv"}
        is_rows = problem.kv_dtype == LATENT_ROWS
        rest = (LATENT_ROW_BYTES // 2 - SWIZZLE) if is_rows else problem.head_dim_v
        facts |= {"REST_COLUMN": rest, "SCALE_COLUMN": problem.head_dim_v // 4}
    else:
        keys |= {"k": key_map(problem, buffers, "k", BLOCK_KEYS, SWIZZLE)}
    tile = groups.constants(
        group,
        problem,
        config,
        BLOCK_E=problem.head_dim_v // consumers,
        ROWS=config.kept_rows(problem),
        MERGE=config.merge + 2 * getattr(config, "thread_order", 0),
        **facts,
    )
    io = groups.arrays(arrays, buffers, divisor, **keys)
    rows = _kv_rows(problem, buffers)
    launch = sizes.launches[kernel]
    call = split_kv.hopper_call(ref, problem, config, launch, buffers, io, rows, tile)
    return split_kv.within_registers(call, registers)


def _query_map(
    problem: AttentionProblem, config: MlaConfig | MlaSwapConfig, buffers: Buffers
) -> TensorMap | None:
    """The tensor map of queries, in boxes of a tile's rows by 64 columns; None where consumers load
    them by themselves."""
    if not getattr(config, "query_map", 0):
        return None
    pack = min(maps.CONSUMER_ROWS, problem.group)
    return maps.grouped_map("q", buffers["q"], problem.group, pack, SWIZZLE)


def _stored_maps(problem: AttentionProblem, buffers: Buffers) -> dict[str, TensorMap | None]:
    """The tensor maps of keys of 8 bits, by the fields of `StoredLatentIO`."""

    def made(dtype: str, columns: int) -> TensorMap:
        spec = buffers["k"]
        if problem.kv_dtype == LATENT_ROWS:
            item = item_bytes(dtype)
            shape = (*spec.shape[:-1], _ROW_NUMBERS[dtype])
            strides = (*(step // item for step in spec.strides[:-1]), 1)
            spec = ArraySpec(shape, strides, dtype)
        return key_map(problem, {"k": spec}, "k", BLOCK_KEYS, columns)

    keys = made("float8_e4m3fn", maps.SWIZZLE_BYTES)
    if problem.kv_dtype != LATENT_ROWS:
        return {"k": keys, "rest_k": made("float8_e4m3fn", SWIZZLE), "scales": None}
    scales = LATENT_ROW_DIM_V // LATENT_ROW_GROUP
    return {"k": keys, "rest_k": made("bfloat16", SWIZZLE), "scales": made("float32", scales)}


def _kv_rows(problem: AttentionProblem, buffers: Buffers) -> KVRows:
    """The group that says how the tensor map of keys, in which the values lie, numbers its rows."""
    rows = Scalar(maps.rows_between(buffers["k"])) if problem.ragged_k else 0
    no_page = maps.no_page({**buffers, "v": buffers["k"]}) if problem.page_size else None
    return KVRows(rows, None, IS_RAGGED=problem.ragged_k, NO_PAGE=no_page)
