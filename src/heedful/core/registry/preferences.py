"""By default a kernel leaves some calls to another that takes them too and is faster there
(core/planning/plan.py). All measurements are in measurements/decode.md."""

from dataclasses import replace
from typing import NamedTuple

from heedful.core.base.device import DeviceSpec
from heedful.core.base.symbols import opaque
from heedful.core.call.problem import ITEM_BITS, AttentionProblem
from heedful.core.registry.tiles import DECODE_ROWS


class Preferred(NamedTuple):
    """The backend that is faster, or whose bits are asked for, the reason, and its variant, "" for
    any. asks: the call that it must take, if that is not the call itself."""

    backend: str
    why: str
    variant: str = ""
    asks: AttentionProblem | None = None


def in_every_layout(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """With numerics="invariant" the options of a call decide on its kernel. How its tensors lie
    does not: another kernel would give other bits. So the Hopper forward is preferred if it takes
    the call in some layout, and refuses others."""
    if not problem.invariant:
        return None
    asks = replace(
        problem,
        aligned=True,
        even_rows=True,
        page_size=16 * bool(problem.page_size),
        leftpad_k=problem.leftpad_k and not problem.page_size,
    )
    words = "with numerics='invariant' for these options, in every layout"
    return Preferred("hopper", words, "forward", asks)


# The forward takes 16-bit calls with more rows of a KV head than these: over any keys, and over
# keys of one length.
MOST_DECODE_ROWS, DECODE_ROWS_OF_ONE_LENGTH = 32, 16
# The same for packed queries over a cache: two tiles of the Hopper decode.
MOST_PACKED_ROWS = 2 * DECODE_ROWS


def many_rows(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """Calls with more rows than the decode kernels are fast for.

    One warp multiplies in the decode kernel, one warpgroup in the Hopper decode, several warpgroups
    in the forward: the forward takes 0.54 of the Hopper decode's time for 64 rows of 1 x 8192 keys
    ("The Hopper decode beside others"). The forward neither packs heads of packed queries over a
    cache nor splits their keys, so that decodes keep two tiles of those ("Packed queries of two and
    four tiles over paged caches")."""
    rows = problem.seqlen_q * problem.group
    over_cache = problem.varlen_q and not problem.varlen_k
    most = MOST_PACKED_ROWS if over_cache else MOST_DECODE_ROWS
    if rows > most and ITEM_BITS[problem.dtype] == 16:
        words = f"for {rows} query rows of a KV head: more than {most}"
        return Preferred("hopper", words)
    return None


def many_rows_of_one_length(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """Calls with 17 to 32 rows over keys of one length, where the forward is the faster of both: it
    takes 0.73 of the Hopper decode's time over 1 x 8192 keys ("The Hopper decode beside others",
    "Keys of one length for 32 rows of a KV head")."""
    rows = problem.seqlen_q * problem.group
    if ITEM_BITS[problem.kv_dtype] != 16 or problem.ragged_k or problem.varlen_q:
        return None
    if not DECODE_ROWS_OF_ONE_LENGTH < rows <= MOST_DECODE_ROWS:
        return None
    return Preferred("hopper", f"for {rows} query rows of a KV head over keys of one length")


def packed_keys(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """Packed keys: the Hopper decode and the portable decode have not been compared over them."""
    return Preferred("decode", "for packed keys", "portable") if problem.varlen_k else None


def keys_of_one_length(problem: AttentionProblem, device: DeviceSpec) -> Preferred | None:
    """16-bit keys of one length, over which the Hopper forward is no slower than the decode kernel:
    where the KV heads of all sequences fill the device, and over few long sequences, whose keys it
    splits. It takes 0.93 of the decode kernel's time over 1 x 8192 keys ("Few sequences")."""
    if ITEM_BITS[problem.kv_dtype] != 16 or problem.ragged_k or problem.varlen_q:
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
