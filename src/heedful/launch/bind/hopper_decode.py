"""Programs of the Hopper decode."""

import math
from typing import Any

from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.core.sizes import LEAST_COLUMNS, Sizes
from heedful.core.tiles import HopperDecodeConfig, pow2
from heedful.kernels.args.decode import DecodeWork
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.hopper_decode import (
    HopperDecodeAppend,
    HopperDecodeIO,
    HopperDecodeParams,
    HopperDecodeTile,
)
from heedful.launch.bind import groups
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.decode import appending, may_be_empty, shared_work
from heedful.launch.bind.groups import Buffers, pointer
from heedful.launch.bind.hopper import SWIZZLE, page_rows
from heedful.launch.bind.portable import shared_divisor
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar, TensorMap, absent

KERNEL = "hopper_decode.forward"
ROWS_AT_ONCE = 16  # of a tile, whose parts are merged at once (decode_results.py)


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    sizes = plan.sizes()
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    append = absent(HopperDecodeAppend)
    return Program((_call(problem, plan, sizes, buffers, append),), sizes.workspaces)


def step(plan: Plan, buffers: Buffers, interleaved: bool, position0: int) -> Program:
    """The forward, whose kernel appends and rotates first: see `launch.programs.step`."""
    sizes = plan.sizes()
    given, append, names = appending(plan, buffers, interleaved, position0)
    given |= {w.name: w.buffer for w in sizes.workspaces}
    own = HopperDecodeAppend(append.rotary, append.io, append.advance)
    call = _call(plan.problem, plan, sizes, given, own, given["k_new"].shape[1])
    return Program((call,), sizes.workspaces).renamed(names)


def _call(
    problem: AttentionProblem,
    plan: Plan,
    sizes: Sizes,
    buffers: Buffers,
    append: HopperDecodeAppend,
    new: int | None = None,
) -> KernelCall:
    launch, config = sizes.launches[KERNEL], plan.configs[KERNEL]
    assert isinstance(config, HopperDecodeConfig)
    divisor = shared_divisor(buffers, ("q", "out"))
    parameters = {
        "io": HopperDecodeIO(
            q=groups.rows(buffers, "q", divisor),
            **_maps(problem, config, buffers),
            out=groups.split_rows(buffers, "out", False, divisor),
            lse=groups.split_row_vector(buffers, "lse", False),
        ),
        "params": HopperDecodeParams(
            seqs=groups.sequences(problem, buffers, new),
            shape=groups.shape(problem),
            mask=groups.mask(problem, buffers),
            kv=groups.kv_layout(problem.page_size, buffers, is_written=new is not None),
            kv_rows=_kv_rows(problem, buffers),
            work=_work(problem, config, buffers, launch.numbers["tiles"]),
            tile=_tile(problem, config),
            sink=pointer(buffers, "sink"),
            scale_log2=groups.number(problem.scale * math.log2(math.e)),
        ),
        "append": append,
    }
    ref = KernelRef("heedful.kernels.hopper.decode", "decode", "gluon")
    # Where all merge each other's parts they wait for each other.
    waits = bool(config.merge) and problem.num_splits != 1
    options = {"num_warps": config.num_warps}
    if config.registers:
        options["maxnreg"] = config.registers
    return KernelCall(ref, launch.grid, parameters, options, cooperative=waits)


def _maps(
    problem: AttentionProblem, config: HopperDecodeConfig, buffers: Buffers
) -> dict[str, TensorMap]:
    """Keys and values in boxes of a tile each or, in pages, of 64 columns of rows that divide a
    page."""
    make = maps.packed_map if problem.ragged_k else maps.dense_map
    found = {}
    for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v)):
        rows, width = config.block_n, _columns(dim)
        if problem.page_size:
            rows, width = min(rows, page_rows(problem.page_size)), SWIZZLE
        found[name] = make(name, buffers[name], rows, width)
    return found


def _kv_rows(problem: AttentionProblem, buffers: Buffers) -> KVRows:
    k_rows: Any = 0
    v_rows: Any = 0
    if problem.ragged_k:
        k_rows, v_rows = (Scalar(maps.rows_between(buffers[name])) for name in ("k", "v"))
    no_page = maps.no_page(buffers) if problem.page_size else None
    return KVRows(k_rows, v_rows, IS_RAGGED=problem.ragged_k, NO_PAGE=no_page)


def _columns(dim: int) -> int:
    """Of a tile, a power of two, of which those past the head dim are zeros."""
    return pow2(dim, LEAST_COLUMNS)


def _work(
    problem: AttentionProblem, config: HopperDecodeConfig, buffers: Buffers, tiles: int
) -> DecodeWork:
    at_once = min(config.kept_rows(problem), ROWS_AT_ONCE) * _columns(problem.head_dim_v)
    work = shared_work(problem, config, buffers, tiles, at_once)
    return work._replace(SKIPS_EMPTY=may_be_empty(buffers))


def _tile(problem: AttentionProblem, config: HopperDecodeConfig) -> HopperDecodeTile:
    return HopperDecodeTile(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=_columns(problem.head_dim),
        BLOCK_E=_columns(problem.head_dim_v),
        STAGES=config.num_stages,
        ROWS=config.kept_rows(problem),
        MERGE=config.merge,
        PRODUCER_REGS=config.producer_regs,
    )
