"""The part of a plan that lengths change: grids, schedules, splits, scratch.

All pure. Lengths may be symbols: `smaller` and `larger` do not compare them, as min and max do.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import DeviceSpec
from heedful.core.base.frozen import dataclass
from heedful.core.base.symbols import if_above, larger, smaller
from heedful.core.call.problem import ITEM_BITS, LATENT_ROWS, AttentionProblem
from heedful.core.planning.splits import (
    asked_splits,
    backward_splits,
    choose_splits,
    even_shares,
    programs_of_known_parts,
    programs_of_parts,
    split_tail,
)
from heedful.core.registry.tiles import (
    CONSUMER_ROWS,
    DIAGONAL_PARTS,
    DIAGONAL_SUMS,
    HELD_NUMBERS,
    MERGE_PARTS,
    V_T_CHUNK,
    V_T_KEYS,
    HopperBackwardConfig,
    HopperConfig,
    HopperForwardConfig,
    HopperFp8Config,
    HopperWideConfig,
    PortablePartsConfig,
    SharedKeysConfig,
    TileConfig,
    pow2,
    product_dim,
    tile_dim,
)

if TYPE_CHECKING:
    from heedful.core.planning.plan import Plan

# How programs get their work tiles. dynamic: there is a program for each SM, which draws its next
# tile from a counter. static: it takes every n-th tile. single: there is a program for each tile.
Scheduler = Literal["dynamic", "static", "single"]

# The L2 head swizzle: heads of a group under a mask; how often the tiles of the last group fill the
# device; if heads have fewer tiles than this, all groups are that large (H200, 2026-11-22,
# measurements/hopper-forward.md).
_L2_HEADS, _L2_HEADS_FP8 = 4, 2
# With numerics="invariant" and lengths that only the device knows: if each SM has so many tiles,
# programs take all their parts in turn.
_LEAST_TURNS = 8
_LAST_WAVES = 2
_L2_GROUP_TILES = 8
# In the backward, key tiles share queries, dO and sums of dQ: these are to fill so much of L2, in
# percent.
_L2_SHARE = 40
# Without a mask, where key tiles take turns: so many heads begin key tiles together, since only one
# tile of a head can begin at a time. Under a causal mask all tiles begin, and more heads are slower
# (measurements/hopper-backward.md).
_HEADS_IN_TURN = 4


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch that a program needs for its own duration; `zeroed` if it must start as zeros, and
    `left_zero` if it then ends as zeros, too."""

    name: str
    buffer: ArraySpec
    zeroed: bool = False
    left_zero: bool = False

    @classmethod
    def of(cls, name: str, *shape: int, dtype: str = "float32", **facts: bool) -> "Workspace":
        """A dense array."""
        return cls(name, ArraySpec.contiguous(shape, dtype), **facts)


@dataclass(frozen=True, slots=True)
class LaunchSizes:
    """One kernel's grid, and the sizes of its work that it gets as arguments."""

    grid: tuple[int, int, int]
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that lengths change. num_splits: how many splits the keys have, 1 = not split.
    launches: by kernel, for those with tuned tiles and their helpers."""

    num_splits: int
    launches: Mapping[str, LaunchSizes]
    workspaces: tuple[Workspace, ...] = ()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def of(plan: "Plan", problem: AttentionProblem, direction: str, stored_k: int | None) -> Sizes:
    """The sizes of one direction of a plan. problem: may differ from the plan's in lengths."""
    if direction == "backward":
        return _backward(plan, problem, problem.seqlen_k if stored_k is None else stored_k)
    splits, partials = splits_of(plan, problem), ()
    if plan.is_split:
        partials = (
            Workspace.of("partial_out", splits, *problem.out_shape),
            Workspace.of("partial_lse", splits, *problem.lse_shape),
            Workspace.of("partial_rest", splits, *problem.lse_shape),
        )
    launches, workspaces = {}, []
    for kernel in plan.configs:
        if kernel in _FORWARD:
            more, scratch = _FORWARD[kernel](plan, problem, splits)
            launches |= more
            workspaces += scratch
    if "portable.scores" in plan.configs and problem.return_probs:
        config = plan.configs["portable.scores"]
        tiles_m = ceil_div(problem.seqlen_q, config.block_m)
        tiles_n = ceil_div(problem.seqlen_k, config.block_n)
        grid = (tiles_m * tiles_n * problem.batch * problem.heads_q, 1, 1)
        numbers = {"tiles_m": tiles_m, "tiles_n": tiles_n}
        launches["portable.scores"] = LaunchSizes(grid, numbers)
    return Sizes(splits, launches, (*workspaces, *partials))


def splits_of(plan: "Plan", problem: AttentionProblem) -> int:
    """How many splits a split plan makes of the keys of these lengths."""
    config = plan.forward_config
    if isinstance(config, SharedKeysConfig):
        return asked_splits(problem, config.block_n) if problem.num_splits else 1
    if not plan.is_split:
        return 1
    if config is None:
        return asked_splits(problem, 1)
    return best_splits(config, problem, plan.device)


def best_splits(config: TileConfig, problem: AttentionProblem, device: DeviceSpec) -> int:
    """The splits that `choose_splits` gives for the tiles of a forward, or those chosen by hand."""
    if isinstance(config, HopperForwardConfig) and config.part_keys:
        return 1 if config.key_splits else _programs_of_parts(config, problem, device.units)
    if isinstance(config, HopperForwardConfig) and config.key_splits:
        return config.key_splits
    rows = config.group_rows(problem)
    if isinstance(config, PortablePartsConfig):
        tiles = problem.batch * problem.heads_q * ceil_div(problem.seqlen_q, config.block_m)
        return programs_of_parts(tiles, ceil_div(problem.seqlen_k, config.part_keys), device.units)
    return choose_splits(problem, device, config.block_m, config.block_n, rows)


def _programs_of_parts(config: HopperForwardConfig, problem: AttentionProblem, units: int) -> int:
    """How many programs of the Hopper forward share the parts of a tile's keys."""
    tiles, parts = hopper_tiles(config, problem), config.parts(problem)
    if problem.varlen_q or problem.used_q or problem.ragged_k:
        return programs_of_parts(tiles, parts, units * _LEAST_TURNS)
    causal = int(problem.mask.right >= 0 and problem.mask.left < 0)
    return programs_of_known_parts(tiles, parts, units, problem.seqlen_q, problem.seqlen_k, causal)


def heads_in_l2(problem: AttentionProblem, device: DeviceSpec) -> int:
    """Query heads whose keys and values together fill half of L2."""
    dims = problem.head_dim + problem.head_dim_v
    head_bytes = larger(1, problem.seqlen_k * dims * ITEM_BITS[problem.kv_dtype] // 8)
    l2_heads = problem.group * larger(1, device.l2_bytes // 2 // head_bytes)
    return larger(1, smaller(l2_heads, problem.batch * problem.heads_q))


# Hopper


def scheduler_of(
    config: HopperConfig, problem: AttentionProblem, device: DeviceSpec, splits: int
) -> Scheduler:
    """Dynamic under a mask, where tiles take different times, and for packed queries, whose tiles
    only the device can count. Static where tiles take about the same time. Single (a program for
    each tile) where neither is known to be faster."""
    if isinstance(config, HopperWideConfig):
        return "single"
    if problem.varlen_q:
        return "dynamic"
    # Numbers of parts may differ, or programs hold results between them.
    if (splits > 1 or problem.used_q or problem.ragged_k) and config.parts(problem) > 1:
        return "dynamic"
    if problem.used_q or problem.ragged_k:
        return "single"
    if not problem.is_masked:
        return "static"
    is_one_wave = hopper_tiles(config, problem) * splits <= device.units
    return "static" if is_one_wave else "dynamic"


def _head_tiles(config: HopperConfig, problem: AttentionProblem) -> int:
    """Tiles of queries of one head. For packed sequences, whose lengths only the device knows, it
    is an upper bound."""
    if problem.total_q is not None:
        return problem.total_q // config.block_m + problem.batch
    return problem.batch * ceil_div(problem.seqlen_q * config.group_rows(problem), config.block_m)


def work_heads(config: HopperConfig, problem: AttentionProblem) -> int:
    """Heads of one batch entry that have separate tiles."""
    return problem.heads_k if config.group_rows(problem) > 1 else problem.heads_q


def hopper_tiles(config: HopperConfig, problem: AttentionProblem) -> int:
    """Tiles of queries of all heads."""
    return _head_tiles(config, problem) * work_heads(config, problem)


def _l2_swizzle(plan: "Plan", config: HopperConfig, problem: AttentionProblem) -> dict[str, int]:
    """The number of heads in an L2 group, whose tiles are given out the longest first, and the
    number of such groups before the last, which takes the remaining heads. Without a mask a group
    is one head, so that K and V stay in L2. Under a mask a group has a few heads. The last group
    has enough heads that its short tiles fill the time of its longest, as far as L2 has room. Where
    heads have few tiles, all groups are as large. Packed queries have no such last group: only the
    device knows their tiles, and the last sequences are short.
    """
    heads = work_heads(config, problem)
    if not problem.varlen_q:
        heads *= problem.batch
    if not problem.is_masked:
        return {"l2_heads": 1, "l2_groups": heads - 1}
    few = _L2_HEADS_FP8 if ITEM_BITS[problem.dtype] == 8 else _L2_HEADS
    if problem.varlen_q:
        return {"l2_heads": few, "l2_groups": (heads - 1) // few}
    tiles = hopper_tiles(config, problem) // heads
    last = ceil_div(_LAST_WAVES * plan.device.units, tiles)
    # With many keys and few queries all tiles take about the same time in any case.
    last = smaller(last, larger(few, heads_in_l2(problem, plan.device)))
    width = if_above(_L2_GROUP_TILES, tiles, last, few)
    return {"l2_heads": width, "l2_groups": (larger(last, heads) - last) // width}


def _hopper_forward(plan: "Plan", problem: AttentionProblem, splits: int):
    config = plan.configs[_hopper_kernel(plan)]
    assert isinstance(config, HopperConfig)
    tiles = hopper_tiles(config, problem)
    programs = tiles * splits
    if plan.scheduler != "single":
        programs = smaller(programs, plan.device.units)
    numbers = {
        "row_blocks": ceil_div(problem.seqlen_q * config.group_rows(problem), config.block_m),
        "tiles": tiles,
        **_l2_swizzle(plan, config, problem),
    }
    launches = {_hopper_kernel(plan): LaunchSizes((programs, 1, 1), numbers)}
    if problem.invariant and plan.is_split:
        launches["portable.merge_parts"] = _merge_parts(problem)
    workspaces = []
    if plan.in_turn:
        columns = tile_dim(problem.head_dim_v) + HELD_NUMBERS
        workspaces.append(Workspace.of("held", programs, config.block_m, columns))
    if plan.scheduler == "dynamic":
        # An earlier kernel sets the counter.
        ahead = isinstance(config, HopperFp8Config) and not config.transposes_v
        zeroed = not (ahead or problem.varlen_q)
        workspaces.append(Workspace.of("tile_counter", 1, dtype="int32", zeroed=zeroed))
    if problem.varlen_q:
        capacity = _head_tiles(config, problem)
        launch, varlen_tiles = _varlen_scheduler(plan, problem, capacity, **_short_q(plan))
        launches |= launch
        workspaces.append(varlen_tiles)
    if problem.key_ranges:
        launches["hopper.key_hulls"], hulls = _key_hulls(problem)
        workspaces.append(hulls)
    if isinstance(config, HopperFp8Config):
        more, scratch = _transpose_v(config, problem)
        launches |= more
        workspaces += scratch
    return launches, workspaces


def _varlen_scheduler(plan: "Plan", problem: AttentionProblem, capacity: int, **more: int):
    """The launch that lists up to so many work tiles, and where it does. more: other numbers."""
    grid = (problem.batch + plan.device.units, 1, 1)
    launch = LaunchSizes(grid, {"capacity": capacity, **more})
    tiles = Workspace.of("varlen_tiles", 1 + 2 * capacity, dtype="int32")
    return {"hopper.varlen_scheduler": launch}, tiles


def _key_hulls(problem: AttentionProblem) -> tuple[LaunchSizes, Workspace]:
    """The kernel that finds what each 64 rows see by their key_ranges, and what it stores."""
    blocks = ceil_div(problem.seqlen_q, CONSUMER_ROWS)
    entries = seen_entries(problem, CONSUMER_ROWS)
    grid = (blocks * problem.batch * problem.heads_q, 1, 1)
    launch = LaunchSizes(grid, {"blocks": blocks, "entries": entries})
    return launch, Workspace.of("key_hulls", entries * problem.heads_q, 8, dtype="int32")


def _hopper_kernel(plan: "Plan") -> str:
    return next(kernel for kernel in plan.configs if kernel.startswith("hopper."))


def _transpose_v(config: HopperFp8Config, problem: AttentionProblem):
    """Scratch for V with keys innermost: (B, G, E, positions), packed (1, G, E, positions)."""
    entries, blocks = problem.batch, ceil_div(problem.seqlen_k, V_T_KEYS)
    if problem.total_k is not None:
        entries, blocks = 1, problem.total_k // V_T_KEYS + problem.batch
    shape = (entries, problem.heads_k, problem.head_dim_v, blocks * V_T_KEYS)
    workspaces = [Workspace.of("v_t", *shape, dtype=problem.kv_dtype)]
    if config.transposes_v:
        chunks = problem.batch * problem.heads_k * ceil_div(problem.seqlen_k, V_T_CHUNK)
        counts = Workspace.of("v_t_counts", 1 + chunks, dtype="int32", zeroed=True)
        return {}, [counts, *workspaces]
    grid = (blocks * problem.heads_k * entries, 1, 1)
    return {"hopper.transpose_v": LaunchSizes(grid, {"blocks": blocks})}, workspaces


# CDNA and portable


def _cdna_forward(plan: "Plan", problem: AttentionProblem, splits: int):
    tiles = ceil_div(problem.seqlen_q, plan.configs["cdna.forward"].block_m)
    grid = (tiles * problem.batch * problem.heads_q, splits, 1)
    return {"cdna.forward": LaunchSizes(grid, {"tiles": tiles})}, ()


def _portable_forward(plan: "Plan", problem: AttentionProblem, splits: int):
    tiles = ceil_div(problem.seqlen_q, plan.configs["portable.forward"].block_m)
    if problem.varlen_q:
        # Programs without a tile clear tokens of no sequence.
        tiles = larger(1, tiles)
    grid = (tiles * problem.batch * problem.heads_q, splits, 1)
    numbers = {"tiles": tiles, "l2_heads": heads_in_l2(problem, plan.device)}
    launches = {"portable.forward": LaunchSizes(grid, numbers)}
    if problem.invariant and plan.is_split:
        launches["portable.merge_parts"] = _merge_parts(problem)
    return launches, ()


def _merge_parts(problem: AttentionProblem) -> LaunchSizes:
    """The merge of parts of the keys."""
    tiles = larger(1, ceil_div(problem.seqlen_q, MERGE_PARTS.rows))
    heads = problem.batch * problem.heads_q
    return LaunchSizes((tiles * heads, 1, 1), {"tiles": tiles, "l2_heads": larger(1, heads)})


# Columns of partial results: at least four values for each of 16 words.
LEAST_COLUMNS = 64


def _short_q(plan: "Plan") -> dict[str, int]:
    """The bound of short sequences, which both kernels of a mixed batch get."""
    return {"short_q": plan.short_q} if plan.short_q else {}


def _decode_tiles(
    plan: "Plan", config: SharedKeysConfig, problem: AttentionProblem
) -> tuple[int, int]:
    """Row tiles of a KV head: of each sequence, or, if packed, of all, as many as there can be. And
    the work tiles of a line."""
    if plan.short_q:
        tiles = ceil_div(plan.short_q * problem.group, config.block_m)
        return tiles, tiles * problem.batch
    if problem.total_q is not None:
        tiles = problem.total_q * problem.group // config.block_m + problem.batch
        return tiles, tiles
    tiles = ceil_div(problem.seqlen_q * problem.group, config.block_m)
    return tiles, tiles * problem.batch


def _shared_keys(
    plan: "Plan",
    problem: AttentionProblem,
    _splits: int,
    kernel: str,
    evens: bool = False,
    consumers: int = 1,
    halves: bool = False,
):
    """Programs that fill the device, the same number for each line of work tiles, or fewer if there
    is less to do. Scratch for two segments of each share, or, if the caller fixes the splits, for
    all segments of a row tile.

    evens: whether shares are those of `even_shares`, a few less where equal lengths then have
    fewer segments. In a mixed batch nobody knows how many sequences are short, so there they are
    not. consumers: how many share the columns; each has its own scratch and counters.
    halves: whether partial results are float16, over values of 8 bits that a head has one scale
    for, which they lack."""
    config, heads = plan.configs[kernel], problem.heads_k
    assert isinstance(config, SharedKeysConfig)
    tiles, all_units = _decode_tiles(plan, config, problem)
    # Lines of a KV head, and work tiles of a line.
    rows, units = (1, all_units) if problem.total_q is not None else (tiles, problem.batch)
    key_tiles = larger(1, ceil_div(problem.seqlen_k, config.block_n))
    parts = ceil_div(key_tiles, config.least_tiles)
    parts = larger(parts, smaller(key_tiles, config.fewest_shares))
    splits = asked_splits(problem, config.block_n)
    if splits:
        parts = smaller(parts, splits)
    lines = rows * heads
    places = larger(1, plan.device.units * config.programs // larger(1, lines))
    if evens and not plan.short_q:
        places = even_shares(places, problem.batch)
    shares = smaller(places, units * parts)
    programs, units = shares * lines, units * lines
    numbers = {"tiles": tiles, **_short_q(plan)}
    launches = {kernel: LaunchSizes((programs, 1, 1), numbers)}
    if problem.num_splits == 1:
        return launches, ()
    slots = consumers * (units * splits if splits else 2 * programs)
    kept = config.kept_rows(problem)
    dim = pow2(problem.head_dim_v // consumers, LEAST_COLUMNS)
    dtype = "float16" if halves and problem.kv_dtype != LATENT_ROWS else "float32"
    return launches, (
        Workspace.of("partial_out", slots, kept, dim, dtype=dtype),
        Workspace.of("partial_sums", slots, kept, 2),
        # Counters of the finished segments of each work tile: 0 again after the merge.
        Workspace.of("counts", consumers * units, dtype="int32", zeroed=True, left_zero=True),
    )


_FORWARD = {
    "mla.forward": partial(_shared_keys, kernel="mla.forward", evens=True, consumers=2),
    "mla_swap_ab.forward": partial(_shared_keys, kernel="mla_swap_ab.forward", evens=True),
    "mla_converting.forward": partial(_shared_keys, kernel="mla_converting.forward", evens=True),
    "mla_converting_pair.forward": partial(
        _shared_keys,
        kernel="mla_converting_pair.forward",
        evens=True,
        consumers=2,
        halves=True,
    ),
    "decode.forward": partial(_shared_keys, kernel="decode.forward"),
    "hopper_decode.forward": partial(_shared_keys, kernel="hopper_decode.forward", evens=True),
    "hopper_decode.wide_forward": partial(
        _shared_keys, kernel="hopper_decode.wide_forward", evens=True
    ),
    "hopper.forward": _hopper_forward,
    "hopper.wide_forward": _hopper_forward,
    "hopper.fp8_forward": _hopper_forward,
    "cdna.forward": _cdna_forward,
    "portable.forward": _portable_forward,
}


def _backward(plan: "Plan", problem: AttentionProblem, stored_k: int) -> Sizes:
    """Sizes of the portable backward. The gradient of a bias has other tiles, by the bias's
    shape."""
    delta = Workspace.of("delta", *problem.lse_shape)
    if plan.backward == "hopper":
        launches, workspaces = _hopper_backward(plan, problem, stored_k)
        return Sizes(1, launches, (delta, *workspaces))
    if "portable.backward_keys" not in plan.configs:
        return Sizes(1, {})
    keys, queries = (plan.configs[f"portable.backward_{which}"] for which in ("keys", "queries"))
    tiles_n = ceil_div(stored_k, keys.block_n)
    tiles_m = ceil_div(problem.seqlen_q, queries.block_m)
    l2_heads = heads_in_l2(problem, plan.device)
    launches = {
        "portable.backward_queries": LaunchSizes(
            (tiles_m * problem.batch * problem.heads_q, 1, 1),
            {"tiles": tiles_m, "l2_heads": l2_heads},
        ),
        "portable.backward_keys": LaunchSizes(
            (tiles_n * problem.batch * problem.heads_k, 1, 1),
            {"tiles": tiles_n, "l2_heads": larger(1, l2_heads // problem.group)},
        ),
    }
    workspaces = [delta, replace(delta, name="near"), *references(problem)]
    if problem.key_ranges:
        entries = problem.heads_q * seen_entries(problem, queries.block_m)
        workspaces.append(Workspace.of("seen_keys", entries, 8, dtype="int32"))
    if problem.rel_bias_grad:
        windows = ceil_div(problem.seqlen_q + problem.seqlen_k, DIAGONAL_SUMS.rows)
        columns = windows * DIAGONAL_SUMS.rows
        sums = Workspace.of("diagonal_sums", DIAGONAL_PARTS, problem.heads_q, columns)
        workspaces.append(sums)
    return Sizes(1, launches, tuple(workspaces))


def seen_entries(problem: AttentionProblem, rows: int) -> int:
    """Tiles of `rows` queries of one head, as many as there can be."""
    if problem.total_q is not None:
        return problem.total_q // rows + problem.batch
    return problem.batch * ceil_div(problem.seqlen_q, rows)


def references(problem: AttentionProblem) -> tuple[Workspace, Workspace]:
    """Scratch for two numbers of each row: the reference that the backward subtracts from scores,
    and the factor of the probabilities."""
    rows = problem.lse_shape
    return Workspace.of("reference", *rows), Workspace.of("factor", *rows)


def _hopper_backward(plan: "Plan", problem: AttentionProblem, stored_k: int):
    """A work tile is a key tile of a KV head. Sums of dQ have rows for whole tiles of queries. For
    packed queries, whose lengths only the device knows, there are as many as there can be."""
    kernel = plan.variant_of("backward").configs[0]
    config = plan.configs[kernel]
    assert isinstance(config, HopperBackwardConfig)
    rows = config.block_m
    q_blocks, key_blocks = (ceil_div(problem.seqlen_q, rows), ceil_div(stored_k, config.block_n))
    head_tiles = problem.batch * key_blocks
    if problem.total_k is not None:
        head_tiles = problem.total_k // config.block_n + problem.batch
    tiles = head_tiles * problem.heads_k
    all_heads = problem.heads_k * (1 if problem.varlen_k else problem.batch)
    row = 2 * (problem.head_dim + problem.head_dim_v) + 4 * problem.head_dim
    head_bytes = larger(1, problem.seqlen_q * problem.group * row)
    heads = plan.device.l2_bytes * _L2_SHARE // 100 // head_bytes
    if problem.deterministic and not problem.mask.bounded:
        heads = larger(heads, _HEADS_IN_TURN)
    if config.heads_innermost:
        # Half of the key tiles of so many heads begin together, on all SMs.
        heads = 2 * plan.device.units // larger(1, key_blocks)
    heads = larger(1, smaller(heads, all_heads))
    least_tiles = tiles
    if problem.total_k is not None:
        least_tiles = larger(1, problem.total_k // config.block_n * problem.heads_k)
    splits = config.splits or backward_splits(
        problem, plan.device.units // config.programs, least_tiles, (rows, config.block_n), stored_k
    )
    last = 1
    if config.heads_innermost:
        last = heads
    elif problem.is_masked and not problem.varlen_k:
        # Where one head fills L2, several at once take what they share from memory: with 64 heads
        # over 8 and 4 x 8192 keys 1.8 % more time, with 32 over 4 and 16384 keys 16 %.
        waves = smaller(1, config.last_waves)
        waves = if_above(head_bytes, plan.device.l2_bytes, waves, config.last_waves)
        last = larger(1, ceil_div(waves * plan.device.units, key_blocks * splits))
    groups = larger(0, all_heads - last) // heads
    tail, tail_splits = split_tail(config, problem, plan.device, tiles, q_blocks, splits)
    programs = tiles * splits
    if config.draws:
        programs = smaller(programs, plan.device.units)
    rows_programs = q_blocks * problem.batch * problem.heads_q
    order = {"tiles": tiles, "key_blocks": key_blocks, "l2_heads": heads, "l2_groups": groups}
    order["splits"] = splits
    if tail:
        order |= {"splits": tail_splits, "whole": tiles - tail}
    launches = {
        "hopper.backward_prologue": LaunchSizes((rows_programs, 1, 1), {"q_blocks": q_blocks}),
        kernel: LaunchSizes((programs, 1, 1), order),
    }
    numbers = {"q_blocks": q_blocks}
    rows_programs += tail * (config.block_n // CONSUMER_ROWS)
    if splits > 1:
        numbers["k_blocks"] = ceil_div(stored_k, CONSUMER_ROWS)
        rows_programs += numbers["k_blocks"] * problem.batch * problem.heads_k
    launches["hopper.backward_epilogue"] = LaunchSizes((rows_programs, 1, 1), numbers)
    blocks = seen_entries(problem, rows)
    columns, columns_v = product_dim(problem.head_dim), product_dim(problem.head_dim_v)
    workspaces = [
        Workspace.of("dq_accum", problem.heads_q, blocks * rows, columns),
        Workspace.of("lse_log2", *problem.lse_shape),
        Workspace.of("dout_scale", *problem.lse_shape),
    ]
    if problem.sink:
        # The sink's gradient is computed by another kernel.
        workspaces += references(problem)
    if config.draws:
        # The prologue clears both.
        workspaces.append(Workspace.of("tile_counter", 1, dtype="int32"))
    if problem.deterministic:
        workspaces.append(Workspace.of("turns", problem.heads_q * blocks, dtype="int32"))
    if splits > 1:
        dims = splits, problem.heads_k, head_tiles * config.block_n, columns + columns_v
        workspaces.append(Workspace.of("partials", *dims))
    if tail:
        dims = tail_splits, 1, tail * config.block_n, columns + columns_v
        workspaces.append(Workspace.of("partials", *dims))
    if problem.key_ranges:
        launches["hopper.key_hulls"], hulls = _key_hulls(problem)
        numbers = {"blocks": key_blocks, "entries": head_tiles}
        grid = (key_blocks * problem.batch * problem.heads_k, 1, 1)
        launches["hopper.query_hulls"] = LaunchSizes(grid, numbers)
        entries = head_tiles * problem.heads_k
        of_keys = Workspace.of("query_hulls", entries, 4 + config.hides_rows, dtype="int32")
        workspaces += [hulls, of_keys]
    if problem.varlen_k:
        launch, varlen_tiles = _varlen_scheduler(plan, problem, head_tiles)
        launches |= launch
        workspaces.append(varlen_tiles)
    return launches, workspaces
