"""What a kernel that is not asked for by name leaves to another, which is faster there."""

from heedful.core.device import DeviceSpec
from heedful.core.problem import ITEM_BITS, AttentionProblem
from heedful.core.symbols import opaque
from heedful.core.tiles import WIDE_DIM

# Rows of a KV head up to which, and keys below which, the decode kernel is as fast: its tiles have
# 16 rows and not 64, and a step of the MLA kernel is 128 keys.
FEW_LATENT_ROWS, FEW_LATENT_KEYS = 16, 8192


def few_latent_keys(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """16 heads over 64 x 1024 keys take 43.6 us and not 41.4, over 1 x 8192 they take 32.6 and not
    49.6 (H200, 2026-11-23); between the two nothing was timed."""
    if problem.seqlen_q * problem.group > FEW_LATENT_ROWS:
        return None
    if _are_few_keys(problem.seqlen_k):
        return (
            f"decode is preferred for {FEW_LATENT_ROWS} rows over less than {FEW_LATENT_KEYS} keys"
        )
    return None


@opaque
def _are_few_keys(keys: int) -> bool:
    return keys < FEW_LATENT_KEYS


def _is_for_hopper(problem: AttentionProblem, device: DeviceSpec) -> bool:
    """Whether the Hopper forward would take what the decode kernel leaves."""
    if device.arch != "sm_90" or ITEM_BITS[problem.dtype] == 8:
        return False
    wide = max(problem.head_dim, problem.head_dim_v) > WIDE_DIM
    return not (wide or problem.quantized_kv or problem.tree_mask or problem.page_size % 16)


def many_rows(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Decode's products are those of one warp. Of more than 32 rows of a KV head it was not timed
    beside the Hopper forward, whose products are a warpgroup's."""
    rows = problem.seqlen_q * problem.group
    if rows > 32 and _is_for_hopper(problem, device):
        return f"hopper is preferred for {rows} query rows of a KV head: more than 32"
    return None


def reads_as_fast(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Of 16-bit keys of one length, of which each KV head of a sequence is enough for a place of
    the device, the Hopper forward reads 64 x 8192 as fast, 16 x 16384 for 32 rows in 253 us and
    not 269 (H200, 2026-11-23). Of few sequences it splits them: 1 x 8192 of 4 rows takes 21.0 and
    not 22.5, 4 x 8192 47.4 and not 48.3, 1 x 4096 15.4 both (D128, 2026-11-25). Else where it would
    split them, or lengths differ, decode is faster or nothing was timed."""
    if not _is_for_hopper(problem, device) or problem.ragged_k or problem.varlen_q:
        return None
    if _are_enough(problem.batch * problem.heads_k, device.units):
        return "hopper is preferred for as many KV heads of one length as fill the device"
    timed = problem.head_dim == 128 and problem.mask.left < 0 and problem.seqlen_q == 1
    if timed and _are_few_and_long(problem.batch, problem.seqlen_k):
        return "hopper is preferred for up to 4 sequences of one length of 8192 keys and more"
    return None


@opaque
def _are_few_and_long(sequences: int, keys: int) -> bool:
    return 0 < sequences <= 4 and keys >= 8192


@opaque
def _are_enough(heads: int, units: int) -> bool:
    return 2 * heads > units
