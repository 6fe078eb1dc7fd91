"""Programs of the decode kernel."""

from collections.abc import Mapping
from dataclasses import replace

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.problem import ITEM_BITS, AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.core.planning.splits import asked_splits
from heedful.core.registry.tiles import MERGE_ROWS, DecodeConfig, SharedKeysConfig, pow2
from heedful.kernels.args.decode import DecodeAppend, DecodeMerge, DecodeTile, DecodeWork
from heedful.kernels.args.shared import ForwardIO, KVLayout
from heedful.launch.bind import groups, portable_cache
from heedful.launch.bind.groups import Buffers, pointer
from heedful.launch.bind.portable import (
    clear_call,
    clear_outside_call,
    kernel_call,
    shared_divisor,
)
from heedful.launch.program.spec import KernelCall, Program, Scalar, absent

# One query of four heads, the most common step.
FEWEST_ROWS = 4
# Sequences that a program looks at at once. Of no more than a warp looks at no warp waits for
# another, which is 0.6 us of each call (H200, 2026-11-26): 32 in Triton's layout, 128 in the Hopper
# kernels' own.
LOOKS = (32, 128, 512)


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    sizes, config = plan.sizes(), plan.configs["decode.forward"]
    assert isinstance(config, DecodeConfig)
    if problem.varlen_q and not problem.batch:
        return Program((clear_outside_call(problem, buffers),), sizes.workspaces)
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    call = decode_call(problem, plan, config, sizes, buffers)
    return Program((call, *clear_calls(problem, buffers)), sizes.workspaces)


def step(plan: Plan, buffers: Buffers, interleaved: bool, position0: int) -> Program:
    """The forward, whose kernel appends and rotates first: see `launch.program.programs.step`."""
    sizes, config = plan.sizes(), plan.configs["decode.forward"]
    assert isinstance(config, DecodeConfig)
    given, append, names = appending(plan, buffers, interleaved, position0)
    given |= {w.name: w.buffer for w in sizes.workspaces}
    call = decode_call(plan.problem, plan, config, sizes, given, append)
    return Program((call,), sizes.workspaces).renamed(names)


def appending(
    plan: Plan, buffers: Buffers, interleaved: bool, position0: int
) -> tuple[dict[str, ArraySpec], DecodeAppend, dict[str, str]]:
    """(arrays of a kernel that appends, under the names of a forward's; what it appends; the
    call's own names of them)."""
    names = {"seqused_k": "cache_seqlens"}
    if "q_new" in buffers:
        names["q"] = "q_new"
    given = {**buffers, **{name: buffers[own] for name, own in names.items()}}
    problem = plan.problem
    append = portable_cache.within_decode(
        given, problem.page_size, interleaved, problem.mask.bounded, position0
    )
    return given, append, names


def clear_calls(problem: AttentionProblem, buffers: Buffers) -> tuple[KernelCall, ...]:
    """Rows past a used length of packed queries, which may lie beyond the longest sequence: the
    kernel does not come by there."""
    if not (problem.varlen_q and problem.used_q):
        return ()
    return (clear_call(problem, buffers, "q", "out", "lse"),)


def decode_call(
    problem: AttentionProblem,
    plan: Plan,
    config: DecodeConfig,
    sizes: Sizes,
    buffers: Buffers,
    append: DecodeAppend | None = None,
) -> KernelCall:
    """The kernel, over all sequences or over those that the plan says are short. append: what goes
    into the cache first."""
    launch = sizes.launches["decode.forward"]
    divisor = shared_divisor(buffers, ("q", "k", "v", "out"))
    call = kernel_call(
        "decode.kernel.decode",
        launch.grid,
        config,
        io=ForwardIO(
            *(groups.rows(buffers, name, divisor) for name in "qkv"),
            out=groups.split_rows(buffers, "out", False, divisor),
            lse=groups.split_row_vector(buffers, "lse", False),
            rest=pointer(buffers, "rest"),
        ),
        sequences=groups.sequences(
            problem, buffers, None if append is None else buffers["k_new"].shape[1]
        ),
        shape=groups.shape(problem),
        mask=groups.mask(problem, buffers),
        mods=groups.score_mods(problem, buffers),
        cache=_cache(problem, buffers, append is not None),
        descales=groups.descales(problem, buffers),
        work=_work(problem, plan, config, buffers, launch.numbers),
        append=append or absent(DecodeAppend),
        tile=_tile(problem, config),
        FETCH_AHEAD=config.fetch_ahead,
    )
    if config.registers and plan.device.vendor == "nvidia":
        call = replace(call, options={**call.options, "maxnreg": config.registers})
    return call


def _cache(problem: AttentionProblem, buffers: Buffers, is_written: bool) -> KVLayout:
    """Pages of a power of two keys are known when compiling: a division less for each key."""
    cache = groups.kv_layout(problem.page_size, buffers, is_written)
    size = problem.page_size
    return cache._replace(page_size=size) if size and size & (size - 1) == 0 else cache


def _work(
    problem: AttentionProblem,
    plan: Plan,
    config: DecodeConfig,
    buffers: Buffers,
    numbers: Mapping[str, int],
) -> DecodeWork:
    words = _words(problem, problem.head_dim_v, slices(problem, problem.head_dim_v))
    at_once = min(_rows(problem, config), MERGE_ROWS) * words
    work = shared_work(
        problem,
        config,
        buffers,
        numbers,
        at_once,
        merge_stages=config.merge_stages,
        awaits_stores=plan.device.arch.startswith("gfx9"),  # CDNA
    )
    return work._replace(SKIPS_EMPTY=skips_empty(problem, buffers))


def skips_empty(problem: AttentionProblem, buffers: Buffers) -> bool:
    """Whether sequences may have no keys, and then are no units: they have as many as are said, or
    as storage has. Packed queries are units whatever their keys."""
    names = ("cu_seqlens_k", "seqused_k", "leftpad_k")
    return not problem.varlen_q and any(name in buffers for name in names)


def shared_work(
    problem: AttentionProblem,
    config: SharedKeysConfig,
    buffers: Buffers,
    numbers: Mapping[str, int],
    at_once: int,
    merge_stages: int = 1,
    awaits_stores: bool = False,
) -> DecodeWork:
    """The work of kernels whose programs share the keys. numbers: those of the launch. at_once:
    values of one part that are merged at once. merge_stages, awaits_stores: see `DecodeMerge`."""
    merged = config.merge_values * 32 * config.num_warps // at_once
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")
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
        SKIPS_EMPTY=False,
        OVERHEAD=config.overhead,
        FEWEST_PARTS=config.fewest_parts,
        LOOKS=next((n for n in LOOKS if problem.batch <= n), LOOKS[-1]),
    )


def _tile(problem: AttentionProblem, config: DecodeConfig) -> DecodeTile:
    slices_d, slices_e = (slices(problem, d) for d in (problem.head_dim, problem.head_dim_v))
    once = loads_once(problem)
    words_e = _words(problem, problem.head_dim_v, slices_e)
    return DecodeTile(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=words_e if once else _words(problem, problem.head_dim, slices_d),
        BLOCK_E=words_e,
        SLICES_D=slices_d,
        SLICES_E=slices_e,
        VALUES=values(problem),
        ROWS=_rows(problem, config),
        CONVERSION=config.conversion,
        V_IN_K=once,
    )


def loads_once(problem: AttentionProblem) -> bool:
    """Whether values are taken from keys: they are there, a power of two of them, and no group has
    a scale of its own."""
    dim = problem.head_dim_v
    return problem.v_in_k and not problem.kv_group and dim >= 64 and not dim & (dim - 1)


def _rows(problem: AttentionProblem, config: DecodeConfig) -> int:
    """The fewest that are worth their own case of lengths, or the tile's."""
    return FEWEST_ROWS if problem.seqlen_q * problem.group <= FEWEST_ROWS else config.block_m


def values(problem: AttentionProblem) -> int:
    """Stored values of a word."""
    return 16 // ITEM_BITS[problem.kv_dtype]


def _words(problem: AttentionProblem, dim: int, slices: int) -> int:
    return pow2(-(-dim // (slices * values(problem))))


def slices(problem: AttentionProblem, dim: int) -> int:
    """How many products a row of keys or values is: one for each scale, if each has 16 words."""
    group, each = problem.kv_group, values(problem)
    words = group // each
    if not group or group >= dim or group % each or words < 16 or words & (words - 1):
        return 1
    return dim // group
