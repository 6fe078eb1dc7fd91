"""What a kernel that is not asked for by name leaves to another, which is faster there, if that one
takes it (core/plan.py)."""

from typing import NamedTuple

from heedful.core.device import DeviceSpec
from heedful.core.problem import ITEM_BITS, AttentionProblem
from heedful.core.symbols import opaque
from heedful.core.tiles import DECODE_ROWS


class Preferred(NamedTuple):
    """Another backend, and for what."""

    backend: str
    why: str


# Rows of a KV head above which 16-bit calls are the forward's, and above which those over keys of
# one length are.
MOST_DECODE_ROWS, DECODE_ROWS_OF_ONE_LENGTH = 32, 16
# The same of packed queries over a cache: two tiles of the Hopper decode.
MOST_PACKED_ROWS = 2 * DECODE_ROWS


def many_rows(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """Decode's products are those of one warp. Of more than 32 rows of a KV head it was not timed
    beside the Hopper forward, whose products are a warpgroup's. The Hopper decode takes longer:
    64 rows of 16 x 16384 keys 244.4 us in place of 236.6, of 1 x 8192 37.3 in place of 20.2 (H200,
    2026-11-26).

    Packed queries over a cache are neither packed with their heads by the forward nor split: 64
    rows of 124 x 4096 keys take it 1387.6 us, the Hopper decode 500.6 and the portable one 666.5;
    of 8 x 8192 185.2, 75.1 and 104.5; of 1 x 8192 36.9, 37.5 and 53.8; 40 rows of 64 x 8192 2303.7,
    492.5 and 667.1. Two tiles still take the Hopper decode less: 128 rows of 124 x 4096 1009 us in
    place of 1412, of 8 x 8192 90 and 191, of 64 x 1024 144 and 202, of 1 x 8192 33 and 38; 80 rows
    of 64 x 8192 980 and 4494. Four take it more: 256 rows of 124 x 4096 2025 and 1459 (pages, D128,
    H200, 2026-11-26)."""
    rows = problem.seqlen_q * problem.group
    over_cache = problem.varlen_q and not problem.varlen_k
    most = MOST_PACKED_ROWS if over_cache else MOST_DECODE_ROWS
    if rows > most and ITEM_BITS[problem.dtype] == 16:
        words = f"for {rows} query rows of a KV head: more than {most}"
        return Preferred("hopper", words)
    return None


def many_rows_of_one_length(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """The forward and the Hopper decode over keys of one length, D128 (H200, 2026-11-26): 32 rows
    of 8 x 2048 take 23.2 and 24.1 us, of 16 x 16384 235.6 and 238.9, of 1 x 8192 18.4 and 25.1, of
    64 x 2048 126.9 and 125.7; 4 rows of 64 x 8192 484.4 and 474.8, of 8 x 1024 14.8 and 14.9. In
    another process decode took 27.3 us of the first, the forward 23.3; of the second 256.0 and
    241.3, of 64 x 2048 140.5 and 129.3."""
    rows = problem.seqlen_q * problem.group
    if ITEM_BITS[problem.dtype] != 16 or problem.ragged_k or problem.varlen_q:
        return None
    if not DECODE_ROWS_OF_ONE_LENGTH < rows <= MOST_DECODE_ROWS:
        return None
    return Preferred("hopper", f"for {rows} query rows of a KV head over keys of one length")


def packed_keys(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """Keys that are packed are those of a call without a cache. The Hopper decode has not been
    timed beside the portable one over such."""
    return Preferred("decode", "for packed keys") if problem.varlen_k else None


def keys_of_one_length(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """Where 16-bit keys have one length the Hopper forward is faster, or as fast:

    - if each KV head of a sequence is enough for a place of the device: 16 x 16384 for 32 rows in
      253 us and not 269 (H200, 2026-11-23).
    - of few sequences, whose keys it splits: 1 x 8192 in 21.0 us and not 22.5, 4 x 8192 in 47.4 and
      not 48.3; 1 x 4096 takes both 15.4 (D128, one query, H200, 2026-11-25).
    """
    if ITEM_BITS[problem.dtype] != 16 or problem.ragged_k or problem.varlen_q:
        return None
    if _are_enough(problem.batch * problem.heads_k, device.units):
        return Preferred("hopper", "for as many KV heads of one length as fill the device")
    timed = problem.head_dim == 128 and problem.mask.left < 0 and problem.seqlen_q == 1
    if timed and _are_few_and_long(problem.batch, problem.seqlen_k):
        words = "for up to 4 sequences of one length of 8192 keys and more"
        return Preferred("hopper", words)
    return None


@opaque
def _are_few_and_long(sequences: int, keys: int) -> bool:
    return 0 < sequences <= 4 and keys >= 8192


@opaque
def _are_enough(heads: int, units: int) -> bool:
    return 2 * heads > units
