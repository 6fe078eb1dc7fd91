"""Programs of the Hopper decode."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import LEAST_COLUMNS, Sizes
from heedful.core.registry.tiles import (
    HOPPER_MERGE_ROWS,
    HopperDecodeConfig,
    MlaConfig,
    MlaSwapConfig,
    pow2,
)
from heedful.kernels.args.decode import DecodeWork
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.hopper_decode import (
    HopperDecodeAppend,
    HopperDecodeIO,
    HopperDecodeParams,
    HopperDecodeTile,
)
from heedful.kernels.args.mla import MlaSwapTile, MlaTile
from heedful.launch.bind import groups
from heedful.launch.bind.decode import appending, clear_calls, shared_work, skips_empty
from heedful.launch.bind.groups import Buffers, pointer
from heedful.launch.bind.hopper import key_map
from heedful.launch.bind.hopper_groups import kv_rows
from heedful.launch.bind.portable import shared_divisor
from heedful.launch.program.spec import KernelCall, KernelRef, Program, absent

KERNEL = "hopper_decode.forward"
_MODULES = {"decode": "decode.kernel", "mla": "mla.kernel", "mla_swap_ab": "mla.swap_ab"}


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    sizes = plan.sizes()
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    call = decode_call(problem, plan, sizes, buffers)
    return Program((call, *clear_calls(problem, buffers)), sizes.workspaces)


def step(plan: Plan, buffers: Buffers, interleaved: bool, position0: int) -> Program:
    """The forward, whose kernel appends and rotates first: see `launch.program.programs.step`."""
    sizes = plan.sizes()
    given, append, names = appending(plan, buffers, interleaved, position0)
    given |= {w.name: w.buffer for w in sizes.workspaces}
    own = HopperDecodeAppend(append.rotary, append.io, append.advance)
    call = decode_call(plan.problem, plan, sizes, given, own, given["k_new"].shape[1])
    return Program((call,), sizes.workspaces).renamed(names)


def decode_call(
    problem: AttentionProblem,
    plan: Plan,
    sizes: Sizes,
    buffers: Buffers,
    append: HopperDecodeAppend | None = None,
    new: int | None = None,
) -> KernelCall:
    """The kernel, over all sequences or over those that the plan says are short. append: what goes
    into the cache first; new: rows of that."""
    launch, config = sizes.launches[KERNEL], plan.configs[KERNEL]
    assert isinstance(config, HopperDecodeConfig)
    divisor = shared_divisor(buffers, ("q", "out"))
    parameters = {
        "io": HopperDecodeIO(
            q=groups.rows(buffers, "q", divisor),
            k=key_map(problem, buffers, "k", config.block_n, _columns(problem.head_dim)),
            v=key_map(problem, buffers, "v", config.block_n, _columns(problem.head_dim_v)),
            out=groups.split_rows(buffers, "out", False, divisor),
            lse=groups.split_row_vector(buffers, "lse", False),
            rest=pointer(buffers, "rest"),
        ),
        "params": shared_params(
            problem,
            buffers,
            kv_rows(problem, buffers),
            _work(problem, config, buffers, launch.numbers),
            _tile(problem, config),
            new,
        ),
        "append": append or absent(HopperDecodeAppend),
    }
    call = shared_keys_call("decode", launch.grid, parameters, problem, config)
    if config.registers:
        call = replace(call, options={**call.options, "maxnreg": config.registers})
    return call


def shared_params(
    problem: AttentionProblem,
    buffers: Buffers,
    rows: KVRows,
    work: DecodeWork,
    tile: HopperDecodeTile | MlaTile | MlaSwapTile,
    new: int | None = None,
) -> HopperDecodeParams:
    """What the roles of a Hopper kernel share whose programs share the keys. rows: how its maps
    number them. new: rows of a call that appends."""
    return HopperDecodeParams(
        seqs=groups.sequences(problem, buffers, new),
        shape=groups.shape(problem),
        mask=groups.mask(problem, buffers),
        kv=groups.kv_layout(problem.page_size, buffers, is_written=new is not None),
        kv_rows=rows,
        work=work,
        tile=tile,
        sink=pointer(buffers, "sink"),
        scale_log2=groups.number(problem.scale * math.log2(math.e)),
    )


def shared_keys_call(
    kernel: str,
    grid: tuple[Any, ...],
    parameters: Mapping[str, Any],
    problem: AttentionProblem,
    config: HopperDecodeConfig | MlaConfig | MlaSwapConfig,
) -> KernelCall:
    """The launch of such a kernel, in kernels/hopper."""
    ref = KernelRef(f"heedful.kernels.hopper.{_MODULES[kernel]}", kernel, "gluon")
    # Where all merge each other's parts they wait for each other.
    waits = bool(config.merge) and problem.num_splits != 1
    options = {"num_warps": config.num_warps}
    return KernelCall(ref, grid, parameters, options, cooperative=waits)


def _columns(dim: int) -> int:
    """Of a tile, a power of two, of which those past the head dim are zeros."""
    return pow2(dim, LEAST_COLUMNS)


def _work(
    problem: AttentionProblem,
    config: HopperDecodeConfig,
    buffers: Buffers,
    numbers: Mapping[str, int],
) -> DecodeWork:
    at_once = min(config.kept_rows(problem), HOPPER_MERGE_ROWS) * _columns(problem.head_dim_v)
    work = shared_work(problem, config, buffers, numbers, at_once)
    return work._replace(SKIPS_EMPTY=skips_empty(problem, buffers))


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
        FEW_ROWS=config.fewest_rows(problem),
        MERGE=config.merge,
        PRODUCER_REGS=config.producer_regs,
    )
