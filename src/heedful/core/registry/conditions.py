"""The conditions under which rows of configs.py apply to a problem."""

from collections.abc import Callable, Sequence

from heedful.core.base.symbols import opaque
from heedful.core.call.problem import ITEM_BITS, LATENT_ROWS, MAX_HEAD_DIM_V, AttentionProblem

H200_SMS = 132
# The SMs of an H200, and the least SMs per row tile for which all programs merge.
MLA_SMS, MLA_LEAST_SMS = H200_SMS, 6
# The same for tiles of up to 32 rows.
MLA_SWAP_LEAST_SMS = 8
# The same for tiles of 64 rows over keys of 8 bits.
MLA_PAIR_LEAST_SMS = 4


def all_of(when: Sequence[Callable[[AttentionProblem], bool]]):
    """A condition: whether all of `when` accept the problem."""

    def fits(problem: AttentionProblem) -> bool:
        return all(accepts(problem) for accepts in when)

    return fits


def float32(problem: AttentionProblem) -> bool:
    """IEEE products of float32 run on the FMA units, with their operands in registers."""
    return problem.dtype == "float32"


def invariant(problem: AttentionProblem) -> bool:
    """The same tiles for every way of a call."""
    return problem.invariant


def invariant_packs(problem: AttentionProblem) -> bool:
    return problem.invariant and packs(problem)


def invariant_packs_in_one(problem: AttentionProblem) -> bool:
    return problem.invariant and packs_in_one(problem)


def invariant_few_rows(problem: AttentionProblem) -> bool:
    return problem.invariant and few_rows(problem)


def invariant_float32(problem: AttentionProblem) -> bool:
    return problem.invariant and float32(problem)


def register_pressure(problem: AttentionProblem) -> int:
    """How many features hold a register or an address per score; loads of single elements count
    twice, since none of them can be copied asynchronously."""
    per_score = (
        problem.bias,
        problem.rel_bias,
        problem.dropout_p > 0,
        problem.tree_mask,
        problem.block_mask > 0,
    )
    return sum((*per_score, not problem.aligned, not problem.aligned))


def some_pressure(problem: AttentionProblem) -> bool:
    return register_pressure(problem) == 1


def high_pressure(problem: AttentionProblem) -> bool:
    return register_pressure(problem) > 1


def always(problem: AttentionProblem) -> bool:
    return True


def wider_keys(problem: AttentionProblem) -> bool:
    """Head dims of Q and K above those of values (MLA's 576): the columns beyond are a separate
    product."""
    return problem.head_dim > MAX_HEAD_DIM_V


def wider_keys_under_pressure(problem: AttentionProblem) -> bool:
    return wider_keys(problem) and (
        problem.bias or problem.rel_bias or register_pressure(problem) > 1
    )


def any_pressure(problem: AttentionProblem) -> bool:
    return register_pressure(problem) > 0


def quantised(problem: AttentionProblem) -> bool:
    return problem.quantized_kv


def rows_of_bytes(problem: AttentionProblem) -> bool:
    """Latent vectors in rows of bytes, each slice of which is two products."""
    return problem.kv_dtype == LATENT_ROWS


def quantised_packs(problem: AttentionProblem) -> bool:
    return problem.quantized_kv and packs(problem)


def quantised_few_rows(problem: AttentionProblem) -> bool:
    return problem.quantized_kv and few_rows(problem)


def no_pages(problem: AttentionProblem) -> bool:
    """No pages: tiles that pages fill have a power of two columns, not 192, and keys and values
    apart."""
    return not problem.page_size


def in_pages(problem: AttentionProblem) -> bool:
    return problem.page_size > 0


def narrow_values(problem: AttentionProblem) -> bool:
    return problem.head_dim > 128 >= problem.head_dim_v and no_pages(problem)


def drops(problem: AttentionProblem) -> bool:
    return problem.dropout_p > 0


def lists_of_128(problem: AttentionProblem) -> bool:
    """A block mask in tiles of 128 rows: work tiles are no larger, and their keys no more."""
    return problem.block_mask == 128


def lists_of_64(problem: AttentionProblem) -> bool:
    return problem.block_mask == 64


def holds_more(problem: AttentionProblem) -> bool:
    """Whether the backward holds more than probabilities until dP is there: what was dropped, or
    the derivative of the softcap."""
    return drops(problem) or problem.softcap > 0


def in_order(problem: AttentionProblem) -> bool:
    return problem.deterministic


def invariant_in_order(problem: AttentionProblem) -> bool:
    return problem.invariant and in_order(problem)


def holds_more_in_order(problem: AttentionProblem) -> bool:
    return holds_more(problem) and in_order(problem)


def short_walks(problem: AttentionProblem) -> bool:
    """Whether few query tiles visit a key tile: by a window, or under a causal mask, where a KV
    head has fewer than 4096 rows of queries, or an H200 has an SM for each key tile, so that visits
    are split. Where dK leaves through the memory of its keys, those of the next tile but one wait
    for it (measurements/hopper-backward.md, "D128 with tails in splits, by default")."""
    rows = problem.seqlen_q * problem.group
    tiles = problem.batch * problem.heads_k * -(-problem.seqlen_k // 128)
    return problem.is_masked and (problem.mask.left >= 0 or rows < 4096 or tiles <= H200_SMS)


def masked(problem: AttentionProblem) -> bool:
    return problem.is_masked


def eight_bit(problem: AttentionProblem) -> bool:
    return problem.dtype.startswith("float8")


def packs(problem: AttentionProblem) -> bool:
    """Whether query heads may share a tile, and otherwise few of its rows would be in use. They may
    not with a bias, ALiBi or dropout, which differ by head, nor with packed sequences, whose tensor
    maps have no dim left."""
    biases = problem.bias or problem.rel_bias
    score_mods = problem.alibi or biases or problem.dropout_p > 0
    few = problem.seqlen_q <= 64 and 1 < problem.group <= 64
    return few and not (score_mods or problem.varlen_q or problem.key_ranges)


def packs_in_one(problem: AttentionProblem) -> bool:
    rows = problem.seqlen_q << (problem.group - 1).bit_length()
    return packs(problem) and rows <= 64


def few_rows(problem: AttentionProblem) -> bool:
    return problem.seqlen_q <= 64


def two_tiles_of_rows(problem: AttentionProblem) -> bool:
    return problem.seqlen_q <= 128


def small_grid(problem: AttentionProblem) -> bool:
    """Whether tiles of 128 rows leave half of an H200's 132 SMs idle, and the keys are too few to
    be worth splitting: 1024 x 1024 of 4 heads took 27 us in 8 splits (2026-11-20). Not where the
    caller decides on the splits."""
    tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // 128)
    return problem.num_splits == 0 and bool(are_few(tiles, problem.seqlen_k))


@opaque
def are_few(tiles: int, keys: int) -> bool:
    return tiles <= 66 and keys <= 2048


def uneven(problem: AttentionProblem) -> bool:
    """Whether tiles see few keys, or different numbers: then the start and end of a tile matter."""
    return bool(problem.mask.left >= 0 or problem.varlen_q or problem.key_ranges)


def uneven_masks(problem: AttentionProblem) -> bool:
    return problem.is_masked and uneven(problem) and no_pages(problem)


def slopes(problem: AttentionProblem) -> bool:
    return problem.alibi


def scaled_by_row(problem: AttentionProblem) -> bool:
    """Whether scales are those of heads or whole rows of over 64 values, and queries are not
    float32: only this was measured."""
    by_row = problem.kv_group in (0, problem.head_dim)
    return by_row and problem.head_dim > 64 and problem.dtype != "float32"


def heads_share_lines(problem: AttentionProblem) -> bool:
    """Whether a line of memory, 128 bytes, has rows of two heads of a dense cache, with scales as
    measured."""
    bits = ITEM_BITS[problem.kv_dtype]
    are_half = all(dim * bits == 64 * 8 for dim in (problem.head_dim, problem.head_dim_v))
    in_one_piece = problem.heads_k > 1 and not problem.page_size
    return are_half and in_one_piece and scaled_by_row(problem)


def small_pages(problem: AttentionProblem) -> bool:
    return problem.page_size % 64 > 0


def sixteen_rows(problem: AttentionProblem) -> bool:
    return problem.seqlen_q * problem.group <= 16


def several_tiles_of_rows(problem: AttentionProblem) -> bool:
    return problem.seqlen_q * problem.group > 64


def long_caches(problem: AttentionProblem) -> bool:
    """Whether caches have room for 4096 keys or more: a load that is made once for all keys of a
    segment is then worth its microsecond."""
    return problem.seqlen_k >= 4096


def short_caches(problem: AttentionProblem) -> bool:
    """Whether caches have room for 4096 keys at most: more programs with fewer keys each are then
    sooner done (measurements/decode.md, "MLA with partial results in the order of threads")."""
    return problem.seqlen_k <= 4096


def merge_outlasts_waiting(problem: AttentionProblem) -> bool:
    """Whether one program would merge for longer than all programs would wait for each other: a row
    tile may have as many segments as SMs. H200, 2026-11-25: 128 heads over 1 x 8192 keys take 30 us
    instead of 61, over 8 x 8192 55 instead of 59; 16 heads over 1 x 131072 take 72 instead of 94,
    over 8 x 8192 45 instead of 43. Not where the caller fixes the splits, which promises the same
    bits in any batch."""
    rows = problem.seqlen_q * problem.group
    tiles = problem.batch * problem.heads_k * -(-rows // 64)
    return problem.num_splits == 0 and bool(are_many_to_merge(tiles, rows))


def all_merge_sooner(problem: AttentionProblem) -> bool:
    """Whether one program would merge a tile of up to 32 rows for longer than all programs would
    wait for each other. If all merge, 16 heads over 1 x 8192 keys take 0.63 of the time; over 64 x
    8192 they take longer: measurements/decode.md, "MLA of few rows, whose products have keys as
    rows"."""
    tiles = problem.batch * problem.heads_k
    return problem.num_splits == 0 and bool(have_many_sms(tiles))


def all_merge_sooner_in_lines(problem: AttentionProblem) -> bool:
    """The same where a sequence may have several tiles of 32 rows. Each of them, of each KV head,
    has programs of its own, and all must run at once."""
    lines = problem.heads_k * -(-problem.seqlen_q * problem.group // 32)
    return all_merge_sooner(problem) and bool(have_many_sms(lines))


def pairs_merge_sooner(problem: AttentionProblem) -> bool:
    """The same for tiles of 64 rows over keys of 8 bits: measurements/decode.md, "MLA over e4m3
    with 64 rows a tile"."""
    tiles = problem.batch * problem.heads_k * -(-problem.seqlen_q * problem.group // 64)
    return problem.num_splits == 0 and bool(have_some_sms(tiles))


def tiles_merge_sooner(problem: AttentionProblem) -> bool:
    """The same for tiles of more than 32 rows over keys of 16 bits: 128 heads over 16 x 8192 keys
    take 0.94 of the time (H200, 2026-11-28). For fewer rows as `merge_outlasts_waiting`."""
    many = problem.seqlen_q * problem.group > 32
    return merge_outlasts_waiting(problem) or (many and pairs_merge_sooner(problem))


@opaque
def have_some_sms(tiles: int) -> bool:
    """Whether each of so many row tiles has some of an H200's SMs."""
    return tiles > 0 and MLA_SMS // tiles >= MLA_PAIR_LEAST_SMS


@opaque
def have_many_sms(tiles: int) -> bool:
    """Whether each of so many row tiles has many of an H200's SMs."""
    return tiles > 0 and MLA_SMS // tiles >= MLA_SWAP_LEAST_SMS


@opaque
def are_many_to_merge(tiles: int, rows: int) -> bool:
    """Whether the SMs per row tile, of an H200's 132, times its rows are many."""
    return tiles > 0 and MLA_SMS // tiles * min(64, rows) >= 64 * MLA_LEAST_SMS
