"""How many splits of the keys to make, so that a small grid fills the device.

A pure function of figures: the same problem on the same device always splits the same way.
"""

from functools import lru_cache

from heedful.core.device import DeviceSpec
from heedful.core.problem import AttentionProblem
from heedful.core.symbols import opaque

MAX_SPLITS = 128
MAX_BACKWARD_SPLITS = 16
# The fewest splits whose time is within this share of the best: each costs the combine a row.
WORTH = 0.95
# The combine reads and writes partial results: not for fewer key tiles than this a split.
LEAST_TILES = 2
# What the combine's launch costs, as values of keys that one program goes through in its time:
# 2 us, or 512 keys of 64 dims (H200, 2026-11-20).
COMBINE_VALUES = 512 * 64


def choose_splits(
    problem: AttentionProblem, device: DeviceSpec, rows: int, block_n: int, pack: int
) -> int:
    """The number of splits: 1 where the grid of row tiles fills the device by itself.

    rows: query rows that one program takes. pack: rows that one position takes, above 1 those of
    all query heads of a KV head. A wave of programs takes one place per unit; the time
    of n splits is waves(n) * tiles per split, and of the combine from two on; the fewest splits
    within WORTH of the best win.
    """
    if problem.num_splits:
        return problem.num_splits
    heads = problem.heads_k if pack > 1 else problem.heads_q
    programs = problem.batch * heads * -(-problem.seqlen_q * pack // rows)
    tiles = -(-problem.seqlen_k // block_n)
    return _best(programs, tiles, device.units, COMBINE_VALUES // (block_n * problem.head_dim))


# What a work tile of the Hopper backward costs beside its visits, in visits: for keys, values and
# results; of split visits, for results in float32 that are summed later, too. The fewest splits
# whose time is within this share of the best (docs/lab/hopper-backward.md).
TILE_VISITS, SPLIT_VISITS = 2, 6
BACKWARD_WORTH = 0.9


@opaque
@lru_cache(4096)
def choose_backward_splits(tiles: int, visits: int, units: int, is_triangle: bool) -> int:
    """In how many parts to split the visits of a key tile, so that work tiles fill the device
    evenly.

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
            # Who drew the shortest of the first wave draws the longest of the second. From two
            # waves on the mean above is no less.
            times.append(2 * (longest * (1 - units / programs) + beside))
        return max(times)

    counts = range(1, max(1, min(MAX_BACKWARD_SPLITS, visits)) + 1)
    best = min(map(time, counts))
    return next(n for n in counts if time(n) * BACKWARD_WORTH <= best)


@opaque
@lru_cache(4096)
def _best(programs: int, tiles: int, units: int, combine: int) -> int:
    counts = range(1, min(MAX_SPLITS, tiles // LEAST_TILES) + 1)
    if programs == 0 or programs * 2 > units or not counts:
        return 1

    def time(splits: int) -> int:
        waves = -(-programs * splits // units)
        return waves * -(-tiles // splits) + combine * (splits > 1)

    best = min(map(time, counts))
    fewest = next(n for n in counts if time(n) * WORTH <= best)
    # Uneven shares leave a last split without work: use the number that the share really needs.
    return -(-tiles // -(-tiles // fewest))
