"""How many splits of the keys to make, so that a small grid fills the device.

A pure function of figures: the same problem on the same device always splits the same way.
"""

from functools import lru_cache
from typing import NamedTuple

from heedful.core.base.device import DeviceSpec
from heedful.core.base.symbols import larger, opaque, smaller
from heedful.core.call.problem import ITEM_BITS, AttentionProblem

MAX_SPLITS = 128
MAX_BACKWARD_SPLITS = 16
# A grid's second axis, which splits are in, ends there.
LARGEST_AXIS = 65535
# Counts that are compared, besides those that fill the device once, twice and so on up to WAVES
# times: of more, finer ones are no faster.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WAVES = 4
# The fewest splits whose time is within this share of the best.
WORTH = 0.98
MIB = 1 << 20


class Costs(NamedTuple):
    """Microseconds that a forward in splits takes.

    launch: of the kernel. key_tile: of a key tile of any size. products: of 2**20 products of a
    query's and a key's values in a tile. memory: of 2**20 bytes that each program of a full device
    reads. results: of 2**14 results of a work tile. combine: of the combine's launch. partials: of
    2**20 bytes of partial results, which are written and read again.
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
    """A forward before its keys are split.

    programs: work tiles of all rows. tiles: key tiles that each goes through. block_m, block_n:
    rows and keys of a tile. dims: of a key and its value together. item_bits: of one of theirs.
    readers: programs that read the same keys. results: of the whole call.
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
        """Microseconds with the keys in so many splits, on so many units.

        A wave of programs takes a unit each. They share the memory's bandwidth: a tile's loads
        outlast its products where many programs run. Both overlap, but not perfectly. The sum of
        their cubes models that.
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
    """The grid of a forward with tiles of so many rows and keys, as `choose_splits` has them."""
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
    tiles, into parts of ceil(tiles / splits) tiles. With more splits than tiles that is one tile,
    however many splits there are, and merges skip empty parts. So a batch's longest sequence, which
    decides here, changes no other one's result. If there are two or more, at least two are left:
    one would be another kernel.
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

    rows: query rows that one program takes. pack: rows that one position takes, above 1 those of
    all query heads of a KV head.
    """
    if problem.num_splits:
        return asked_splits(problem, block_n)
    return _best(*grid_of(problem, rows, block_n, pack), device.units)


def candidates(programs: int, tiles: int, units: int) -> list[int]:
    """Counts of splits worth comparing. Several counts leave programs the same share of the tiles.
    The least of these is taken, since all its splits have work."""
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
    """The fewest splits that take no longer than the best, but for a share."""
    return _fewest(_times(*grid[:-1], units, costs), grid.results)


def _fewest(known: tuple, results: int) -> int:
    counts, times, each = known
    times = [time + own * results for time, own in zip(times, each, strict=True)]
    worth = min(times) / WORTH
    return next(n for n, time in zip(counts, times, strict=True) if time <= worth)
    raise AssertionError("the best is worth it")


@lru_cache(4096)
def _times(*figures) -> tuple[list[int], list[float], list[float]]:
    """Counts of splits that are compared, the time of each but for partial results, and that of one
    result. Lengths of as many tiles have these alike, and differ in results alone."""
    *shape, units, costs = figures
    grid = Grid(*shape, results=0)
    counts = candidates(grid.programs, grid.tiles, units)
    each = [costs.partials * n * 4 / MIB if n > 1 else 0.0 for n in counts]
    return counts, [grid.time(n, units, costs) for n in counts], each


# The cost of a work tile of the Hopper backward beside its visits, in visits: for keys, values and
# results; of split visits, for results in float32 that are summed later, too. The fewest splits
# whose time is within this share of the best (measurements/hopper-backward.md).
TILE_VISITS, SPLIT_VISITS = 2, 6
BACKWARD_WORTH = 0.9


@opaque
@lru_cache(4096)
def choose_backward_splits(tiles: int, visits: int, units: int, is_triangle: bool) -> int:
    """The number of parts into which to split the visits of a key tile, so that work tiles fill the
    device evenly.

    tiles: key tiles of all heads. visits: of one that every query sees. is_triangle: tiles are of
    any length up to the longest, as under a diagonal, and drawn from the longest; else they are
    alike, and fill the device in waves.
    """

    def time(splits: int) -> float:
        beside = SPLIT_VISITS if splits > 1 else TILE_VISITS
        programs = tiles * splits
        if not is_triangle:
            return -(-programs // units) * (-(-visits // splits) + beside)
        longest = visits / splits
        times = [longest + beside, programs * (longest / 2 + beside) / units]
        if programs > units:
            # The program that drew the shortest of the first wave draws the longest of the second.
            # From two waves on the mean above is no less.
            times.append(2 * (longest * (1 - units / programs) + beside))
        return max(times)

    counts = range(1, max(1, min(MAX_BACKWARD_SPLITS, visits)) + 1)
    best = min(map(time, counts))
    return next(n for n in counts if time(n) * BACKWARD_WORTH <= best)
