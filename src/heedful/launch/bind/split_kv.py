"""The common part of programs whose kernels share all keys of a call (kernels/split_kv)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import LaunchSizes, Sizes
from heedful.core.planning.splits import asked_splits
from heedful.core.registry.tiles import (
    HOPPER_MERGE_ROWS,
    HopperDecodeConfig,
    MlaConfig,
    MlaSwapConfig,
    SharedKeysConfig,
)
from heedful.kernels.args.decode import DecodeMerge, DecodeWork
from heedful.kernels.args.hopper import KVRows
from heedful.kernels.args.hopper_decode import HopperDecodeParams, HopperDecodeTile
from heedful.kernels.args.mla import (
    MlaConvertingPairTile,
    MlaConvertingTile,
    MlaSwapTile,
    MlaTile,
)
from heedful.kernels.args.portable import CacheAppend
from heedful.launch.bind import groups, portable_cache
from heedful.launch.bind.groups import Buffers, pointer, with_scratch
from heedful.launch.bind.portable import clear_call
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar

# How many sequences' lengths a program reads at once. If a call has no more sequences than one warp
# reads, no warp waits for another, which saves 0.6 us of each call (H200, 2026-11-26): 32 in
# Triton's layout, 128 in that of the Hopper kernels.
LOOKS = (32, 128, 512)
# Makes the kernel's launch from a problem, its plan, its sizes, its arrays with scratch, and the
# group of new keys and values.
MakeCall = Callable[[AttentionProblem, Plan, Sizes, Buffers], KernelCall]
MakeStep = Callable[[AttentionProblem, Plan, Sizes, Buffers, CacheAppend], KernelCall]


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers, make: MakeCall) -> Program:
    """The launches that compute out, and lse if there is such a buffer."""
    sizes = plan.sizes()
    buffers = with_scratch(buffers, sizes)
    call = make(problem, plan, sizes, buffers)
    return Program((call, *clear_calls(problem, buffers)), sizes.workspaces)


def step(
    plan: Plan, buffers: Buffers, interleaved: bool, position0: int, make: MakeStep
) -> Program:
    """The forward, whose kernel appends and rotates first: see `launch.program.programs.step`."""
    sizes, problem = plan.sizes(), plan.problem
    # The names that a forward's arrays have in such a call.
    names = {"seqused_k": "cache_seqlens"}
    if "q_new" in buffers:
        names["q"] = "q_new"
    arrays = {**buffers, **{name: buffers[source] for name, source in names.items()}}
    append = portable_cache.within_decode(
        arrays, problem.page_size, interleaved, problem.mask.bounded, position0
    )
    call = make(problem, plan, sizes, with_scratch(arrays, sizes), append)
    return Program((call,), sizes.workspaces).renamed(names)


def clear_calls(problem: AttentionProblem, buffers: Buffers) -> tuple[KernelCall, ...]:
    """Launches that clear rows past seqused_q of packed queries: they may lie beyond the longest
    sequence, where the kernel has no tiles."""
    if not (problem.varlen_q and problem.used_q):
        return ()
    return (clear_call(problem, buffers, "q", "out", "lse"),)


def skips_empty(problem: AttentionProblem, buffers: Buffers) -> bool:
    """Whether there may be sequences without keys, which then have no work tile. With packed
    queries they have one, too."""
    names = ("cu_seqlens_k", "seqused_k", "leftpad_k")
    return not problem.varlen_q and any(name in buffers for name in names)


def work(
    problem: AttentionProblem,
    config: SharedKeysConfig,
    buffers: Buffers,
    numbers: Mapping[str, int],
    at_once: int,
    merge_stages: int = 1,
    awaits_stores: bool = False,
    clears_empty: bool = True,
) -> DecodeWork:
    """The group of shares and segments. numbers: those of the launch's sizes. at_once: how many
    values of one segment are merged at once. merge_stages, awaits_stores: see `DecodeMerge`.
    clears_empty: whether the kernel clears rows of sequences without keys."""
    merged = config.merge_values * 32 * config.num_warps // at_once
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")
    names += ("q_offsets",)
    return DecodeWork(
        merge=DecodeMerge(
            partial_out=pointer(buffers, "partial_out", True),
            partial_sums=pointer(buffers, "partial_sums", True),
            counts=pointer(buffers, "counts", True),
            PARTS=max(1, min(32, merged)),
            STAGES=merge_stages,
            AWAITS_STORES=awaits_stores,
        ),
        splits=Scalar(asked_splits(problem, config.block_n)) if problem.num_splits else None,
        tiles=Scalar(numbers["tiles"]),
        least=Scalar(config.least_tiles + config.overhead),
        short_q=Scalar(numbers["short_q"]) if "short_q" in numbers else None,
        IS_UNIFORM=not any(name in buffers for name in names),
        SKIPS_EMPTY=clears_empty and skips_empty(problem, buffers),
        OVERHEAD=config.overhead,
        FEWEST_SHARES=config.fewest_shares,
        LOOKS=next((n for n in LOOKS if problem.batch <= n), LOOKS[-1]),
    )


def hopper_call(
    ref: KernelRef,
    problem: AttentionProblem,
    config: HopperDecodeConfig | MlaConfig | MlaSwapConfig,
    launch: LaunchSizes,
    buffers: Buffers,
    io: Any,
    rows: KVRows,
    tile: HopperDecodeTile | MlaTile | MlaSwapTile | MlaConvertingTile | MlaConvertingPairTile,
    new: int | None = None,
    clears_empty: bool = False,
    **more: Any,
) -> KernelCall:
    """The launch of a Hopper kernel. rows: how its tensor maps number keys and values. new: the
    group of new keys and values. clears_empty: as in `work`. more: further parameters of the
    kernel."""
    at_once = min(tile.ROWS, HOPPER_MERGE_ROWS) * tile.BLOCK_E
    params = HopperDecodeParams(
        seqs=groups.sequences(problem, buffers, new),
        shape=groups.shape(problem),
        mask=groups.mask(problem, buffers),
        kv=groups.kv_layout(problem.page_size, buffers, is_written=new is not None),
        kv_rows=rows,
        work=work(problem, config, buffers, launch.numbers, at_once, clears_empty=clears_empty),
        tile=tile,
        sink=pointer(buffers, "sink"),
        scale_log2=groups.number(problem.scale * math.log2(math.e)),
    )
    # If all programs merge, they wait for each other.
    waits = bool(config.merge) and problem.num_splits != 1
    parameters = {"io": io, "params": params, **more}
    options = {"num_warps": config.num_warps}
    return KernelCall(ref, launch.grid, parameters, options, cooperative=waits)


def within_registers(call: KernelCall, registers: int) -> KernelCall:
    """The launch with at most so many registers a thread; 0 lets the compiler choose."""
    return replace(call, options={**call.options, "maxnreg": registers}) if registers else call
