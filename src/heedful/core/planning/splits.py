"""How many splits of the keys to make, so that a small grid fills the device.

A pure function of figures: the same problem on the same device always splits the same way.
"""

from functools import lru_cache
from typing import NamedTuple

from heedful.core.base.device import DeviceSpec
from heedful.core.base.symbols import if_above, larger, opaque, smaller
from heedful.core.call.problem import ITEM_BITS, AttentionProblem
from heedful.core.registry.tiles import HopperBackwardConfig

MAX_SPLITS = 128
MAX_BACKWARD_SPLITS = 16
# The limit of a grid's second axis, which counts splits.
LARGEST_AXIS = 65535
# Counts of splits that are compared, besides those that fill the device once, twice and so on up to
# WAVES times.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WAVES = 4
# The fewest splits are taken whose time exceeds the best by no more than this fraction.
WORTH = 0.98
MIB = 1 << 20


class Costs(NamedTuple):
    """Microseconds, from which the time of a split forward is estimated. launch: for the kernel's
    launch. key_tile: for a key tile of any size. products: for 2**20 multiply-adds in a tile.
    memory: for 2**20 bytes that each program of a full device reads. results: for 2**14 results of
    a work tile. combine: for the combine's launch. partials: for 2**20 bytes of partial results,
    which are written and read again.
    """

    launch: float
    key_tile: float
    products: float
    memory: float
    results: float
    combine: float
    partials: float


# The costs of the Hopper forward on an H200, 2026-11-25: tools/fit_splits.py fits them to one half
# of tests/recordings/splits.csv, and tests hold out the other. Elsewhere their ratios are a guess.
COSTS = Costs(
    launch=6.8,
    key_tile=0.38,
    products=0.47,
    memory=32.0,
    results=1.1,
    combine=3.2,
    partials=0.92,
)


class Grid(NamedTuple):
    """A forward before its keys are split. programs: its work tiles. tiles: key tiles of each.
    block_m, block_n: rows and keys of a tile. dims: the head dims of K and V together. item_bits:
    bits of an element. readers: how many programs read the same keys. results: how many numbers the
    output has.
    """

    programs: int
    tiles: int
    block_m: int
    block_n: int
    dims: int
    item_bits: int
    readers: int
    results: int

    def time(self, splits: int, units: int, costs: Costs) -> float:
        """Microseconds with `splits` splits of the keys on `units` SMs. In a wave each program has
        one SM. Programs share the memory's bandwidth: where many run, a tile's loads take longer
        than its products. Both overlap, but not perfectly. The cube root of the sum of their cubes
        models that.
        """
        share = -(-self.tiles // splits)
        products = self.block_m * self.block_n * self.dims / 2 / MIB
        compute = costs.key_tile + costs.products * products
        alone = costs.memory * self.block_n * self.dims * self.item_bits / 8 / MIB
        stored = costs.results * self.block_m * self.dims / 2**15

        def wave(programs: int) -> float:
            loads = alone * programs / units / self.readers
            return share * (compute**3 + loads**3) ** (1 / 3) + stored

        full, rest = divmod(self.programs * splits, units)
        time = costs.launch + full * wave(units) + (wave(rest) if rest else 0)
        if splits > 1:
            time += costs.combine + costs.partials * self.results * splits * 4 / MIB
        return time


def grid_of(problem: AttentionProblem, rows: int, block_n: int, pack: int) -> Grid:
    """The grid of a forward. rows, block_n, pack: as in `choose_splits`."""
    heads, beside = (problem.heads_k, 1) if pack > 1 else (problem.heads_q, problem.group)
    row_tiles = -(-problem.seqlen_q * pack // rows)
    return Grid(
        programs=problem.batch * heads * row_tiles,
        tiles=-(-problem.seqlen_k // block_n),
        block_m=rows,
        block_n=block_n,
        dims=problem.head_dim + problem.head_dim_v,
        item_bits=ITEM_BITS[problem.kv_dtype],
        readers=row_tiles * beside,
        results=problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim_v,
    )


def asked_splits(problem: AttentionProblem, block_n: int) -> int:
    """num_splits, or the number of tiles of `block_n` keys of the longest sequence if that is less.

    No bit of a result depends on which of them it is. Every kernel cuts a sequence by its own
    tiles, into splits of ceil(tiles / splits) tiles. If there are more splits than tiles, a split
    is one tile, and merges skip empty splits. So the batch's longest sequence, which decides here,
    does not change the result of another. If two or more are asked for, at least two remain, since
    an unsplit forward is another kernel.
    """
    if problem.num_splits <= 2:
        return problem.num_splits
    keys = problem.seqlen_k
    if problem.total_k is not None:
        keys = smaller(keys, problem.total_k)
    return smaller(min(problem.num_splits, LARGEST_AXIS), larger(2, -(-keys // block_n)))


def choose_splits(
    problem: AttentionProblem, device: DeviceSpec, rows: int, block_n: int, pack: int
) -> int:
    """The number of splits: 1 where the grid of row tiles fills the device by itself.

    rows: query rows that one program takes. pack: rows of a tile that one position takes; above 1,
    the query heads of a KV head share a tile.
    """
    if problem.num_splits:
        return asked_splits(problem, block_n)
    return _best(*grid_of(problem, rows, block_n, pack), device.units)


@opaque
def programs_of_parts(tiles: int, parts: int, units: int) -> int:
    """How many programs share the parts of a tile's keys, where parts end at fixed positions: one
    for each part, or one for all of them if there are as many tiles as SMs. No bit depends on it.
    """
    return parts if 0 < tiles < units and 1 < parts <= LARGEST_AXIS else 1


@opaque
def programs_of_known_parts(
    tiles: int, parts: int, units: int, seqlen_q: int, seqlen_k: int, is_causal: int
) -> int:
    """`programs_of_parts` where lengths are known: in turn, unless the SMs then wait for each other
    for longer than partial results cost, which is an eighth of the time. Tiles of a causal mask
    take different times; others are given out in waves.

    Measured in measurements/hopper-forward.md, "What numerics that no call changes cost". It was
    not timed between one and 1.9 tiles an SM.
    """
    if tiles <= 0 or not 1 < parts <= LARGEST_AXIS:
        return 1
    work, wait = tiles, -(-tiles // units) * units
    if is_causal and 2 * seqlen_q > seqlen_k:
        work, wait = tiles * (2 * seqlen_k - seqlen_q), units * 2 * seqlen_k
    return 1 if 8 * wait <= 9 * work else parts


def even_shares(places: int, batch: int) -> int:
    """Shares of a line of `batch` work tiles: one share for each work tile, or the same number for
    each, if less than a sixteenth of the places then stays idle. Equal lengths then have fewer
    segments."""
    batch = larger(1, batch)
    few = -(-batch // -(-batch // places))
    shares = if_above(batch, places, few, places // batch * batch)
    return if_above(16 * shares, 15 * places, shares, places)


def candidates(programs: int, tiles: int, units: int) -> list[int]:
    """Counts of splits worth comparing. With several counts the largest split has as many tiles.
    The least of these counts is taken, since all its splits have work."""
    full = units // max(1, programs)
    wanted = {*COUNTS, *range(full, WAVES * full + 1, full or 1)} - {0}
    shares = {-(-tiles // count) for count in wanted if count <= min(MAX_SPLITS, tiles)}
    return sorted(-(-tiles // share) for share in shares)


@opaque
def _best(*figures: int) -> int:
    programs, tiles, *_, units = figures
    if not 0 < programs <= units or tiles <= 1:
        return 1
    return _fewest(_times(*figures[:-2], units, COSTS), figures[-2])


def fewest(grid: Grid, units: int, costs: Costs = COSTS) -> int:
    """The fewest splits whose time is close to the best."""
    return _fewest(_times(*grid[:-1], units, costs), grid.results)


def _fewest(known: tuple, results: int) -> int:
    counts, times, each = known
    times = [time + cost * results for time, cost in zip(times, each, strict=True)]
    worth = min(times) / WORTH
    return next(n for n, time in zip(counts, times, strict=True) if time <= worth)


@lru_cache(4096)
def _times(*figures) -> tuple[list[int], list[float], list[float]]:
    """The counts of splits that are compared, the time of each without partial results, and the
    time of one partial result. Lengths with the same number of tiles differ only in the number of
    results."""
    *shape, units, costs = figures
    grid = Grid(*shape, results=0)
    counts = candidates(grid.programs, grid.tiles, units)
    each = [costs.partials * n * 4 / MIB if n > 1 else 0.0 for n in counts]
    return counts, [grid.time(n, units, costs) for n in counts], each


# The cost of a work tile of the Hopper backward without its visits, in units of a visit: for keys,
# values and results; and with splits, also for float32 results that are summed later. The fewest
# splits are taken whose time exceeds the best by no more than this fraction
# (measurements/hopper-backward.md).
TILE_VISITS, SPLIT_VISITS = 2, 6
BACKWARD_WORTH = 0.9
# Tiles that are left at the end are split. Each split has results in float32.
MAX_TAIL_SPLITS = 4


@opaque
@lru_cache(4096)
def choose_backward_splits(tiles: int, visits: int, units: int, whole: int) -> int:
    """Into how many splits to cut the visits of a key tile, so that work tiles fill the device
    evenly. tiles: key tiles of all heads. visits: those of the longest. whole: how many tiles are
    as long, or nearly; the others have any length up to the longest, as keys under the diagonal of
    a causal mask. Tiles are drawn the longest first.
    """

    def time(splits: int) -> float:
        beside = SPLIT_VISITS if splits > 1 else TILE_VISITS
        programs, full = tiles * splits, whole * splits
        longest = -(-visits // splits) if whole else visits / splits

        def length(place: int) -> float:
            return longest * (1 - max(0, place - full) / max(1, programs - full)) + beside

        times = [(longest * (full + programs) / 2 + programs * beside) / units]
        # A program that draws the first tile of a wave has drawn one of each wave before, none of
        # them shorter. The last wave with a whole tile and the next take longest.
        last = max(0, full - 1) // units
        for wave in (0, last, last + 1):
            if wave * units < programs:
                times.append((wave + 1) * length(wave * units))
        return max(times)

    counts = range(1, max(1, min(MAX_BACKWARD_SPLITS, visits)) + 1)
    best = min(map(time, counts))
    return next(n for n in counts if time(n) * BACKWARD_WORTH <= best)


class Seen(NamedTuple):
    """The visits of a sequence's key tiles that a mask leaves. visits: query tiles of the longest;
    whole: how many key tiles have as many."""

    visits: int
    whole: int


def seen_keys(queries: int, keys: int, block_m: int, block_n: int, left: int, right: int) -> Seen:
    """`Seen` of one sequence, whose last query lies on its last key. left, right: the mask's
    bounds, -1 for none."""
    visits, tiles = -(-queries // block_m), -(-keys // block_n)
    if right < 0:
        return Seen(visits, tiles)
    if left >= 0:
        # Each key is seen from as many places, beside the ends.
        return Seen(smaller(visits, (block_n + left + right - 1) // block_m + 1), tiles)
    # All queries see the keys that lie before them.
    visits = smaller(visits, -(-(keys + right) // block_m))
    return Seen(visits, smaller(tiles, larger(0, keys - queries + right) // block_n))


def backward_splits(
    problem: AttentionProblem, units: int, tiles: int, blocks: tuple[int, int], stored_k: int
) -> int:
    """How many splits the visits of a key tile have. tiles: the fewest of all heads; packed
    sequences have tiles of any length up to the longest's, whatever the mask. blocks: rows and keys
    of a tile."""
    if problem.varlen_k:
        visits = -(-problem.seqlen_q // blocks[0])
        return choose_backward_splits(tiles, visits * problem.group, units, 0)
    mask = problem.mask
    seen = seen_keys(problem.seqlen_q, stored_k, *blocks, mask.left, mask.right)
    whole = seen.whole * problem.batch * problem.heads_k
    return choose_backward_splits(tiles, seen.visits * problem.group, units, whole)


@opaque
@lru_cache(4096)
def choose_tail_splits(tiles: int, visits: int, units: int) -> int:
    """Into how many splits to cut the visits of those key tiles that are left once all SMs have had
    as many, where tiles are equal. Other arguments as of `choose_backward_splits`."""
    rest = tiles % units
    if tiles < units or not rest:
        return 1

    def time(splits: int) -> float:
        beside = SPLIT_VISITS if splits > 1 else TILE_VISITS
        return -(-rest * splits // units) * (-(-visits // splits) + beside)

    return min(range(1, max(1, min(MAX_TAIL_SPLITS, visits)) + 1), key=time)


def split_tail(
    config: HopperBackwardConfig,
    problem: AttentionProblem,
    device: DeviceSpec,
    tiles: int,
    q_blocks: int,
    splits: int,
) -> tuple[int, int]:
    """How many work tiles, the last ones, are split while others are not, and how many splits they
    have: (0, 1) for none. They are those that are left once all SMs have had as many. Under a mask
    short tiles fill the time of long ones. Only the device knows the tiles of packed sequences."""
    is_free = config.draws and splits == 1 and not (problem.is_masked or problem.deterministic)
    if config.tail_splits == 1 or not is_free or problem.ragged_k or problem.varlen_q:
        return 0, 1
    tail_splits = config.tail_splits
    if not tail_splits:
        tail_splits = choose_tail_splits(tiles, q_blocks * problem.group, device.units)
    return (tiles % device.units, tail_splits) if tail_splits > 1 else (0, 1)
