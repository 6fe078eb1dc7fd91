"""Batches of sequences with few queries and with many, as serving engines make them: two kernels
share the sequences. The device decides which kernel handles a sequence, by its number of queries.
This module decides whether to use the pair, by sizes alone."""

from heedful.core.base.device import DeviceSpec
from heedful.core.base.symbols import opaque
from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.preferences import Preferred
from heedful.core.registry.tiles import DECODE_ROWS, pow2

# The kernels that may handle the short sequences.
SHORT_KERNELS = ("decode.forward", "hopper_decode.forward")
# The most queries that a short sequence of a mixed batch has: a token and a draft of 15.
SHORT_QUERIES = 16
# Here a tile of the portable decode has the rows of one query, and each tile reads the keys: four
# tiles took 1.2 times as long as the Hopper forward (124 sequences of 16 queries over 4096 keys
# beside 4 prefills, H200, 2026-11-24).
SHORT_TILES = 2


def queries_of_few_tiles(problem: AttentionProblem) -> int:
    """The most queries of a sequence that the portable decode handles in a mixed batch. These times
    the query heads of a KV head are no more rows than it takes, in SHORT_TILES tiles. Over caches
    of few bits tiles have 8 rows."""
    least = 8 if problem.quantized_kv and problem.head_dim <= 128 else 16
    rows = min(DECODE_ROWS, SHORT_TILES * pow2(problem.group, least))
    return min(SHORT_QUERIES, rows // problem.group)


def queries_of_a_tile(problem: AttentionProblem) -> int:
    """The most queries of a sequence that the Hopper decode handles: one tile holds all its
    rows."""
    return min(SHORT_QUERIES, DECODE_ROWS // problem.group)


def sequences_of_both_kinds(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    if not problem.varlen_q:
        return "queries that are not packed: all sequences have as many"
    if problem.group > DECODE_ROWS:
        return f"{problem.group} query heads a KV head: takes up to {DECODE_ROWS}"
    return None


def some_fill_few_tiles(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """Leaves calls to the Hopper forward unless some sequences may be short enough for the portable
    decode."""
    return _some_are_short(problem, device, queries_of_few_tiles(problem))


def some_fill_a_tile(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """Leaves calls to the Hopper forward unless some sequences may be short enough for the Hopper
    decode."""
    return _some_are_short(problem, device, queries_of_a_tile(problem))


def _some_are_short(problem: AttentionProblem, device: DeviceSpec, short: int) -> Preferred | None:
    """If no sequence is short, one kernel of the pair runs for nothing."""
    if problem.total_q is None or not short or device.arch != "sm_90":
        return None
    if not (problem.page_size or problem.used_k):
        return Preferred("hopper", "without a cache, where few queries have few keys")
    if _is_at_most(problem.seqlen_q, short):
        return Preferred("hopper", "where all sequences have few queries")
    tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // 128)
    if problem.num_splits == 0 and _leave_half(tiles, device.units):
        return Preferred(
            "hopper", "where tiles leave half of the device idle: it splits their keys"
        )
    if not _has_short(problem.total_q, problem.batch, problem.seqlen_q, short):
        return Preferred("hopper", "where most sequences are about as long as the longest")
    return None


@opaque
def _is_at_most(queries: int, most: int) -> bool:
    return queries <= most


@opaque
def _leave_half(tiles: int, units: int) -> bool:
    return 2 * tiles <= units


@opaque
def _has_short(total: int, batch: int, longest: int, short: int) -> bool:
    """Whether some sequences are likely short: the total is at most half of that of equal lengths.
    Or as many sequences as possible have the longest length, and the others then have at most
    `short` queries each."""
    long = total // max(1, longest)
    others, rest = batch - long, total - long * longest
    return 2 * total <= batch * longest or (others > 0 and rest <= short * others)
