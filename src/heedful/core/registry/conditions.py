"""The conditions that rows of configs.py ask of a problem."""

from heedful.core.base.symbols import opaque
from heedful.core.call.problem import ITEM_BITS, MAX_HEAD_DIM_V, AttentionProblem

# The SMs of an H200, and the least SMs of a tile whose parts are merged by all.
MLA_SMS, MLA_LEAST_SMS = 132, 6
# The least SMs of a tile of up to 32 rows.
MLA_SWAP_LEAST_SMS = 8


def float32(problem: AttentionProblem) -> bool:
    """IEEE products of float32 run on the FMA units, with their operands in registers."""
    return problem.dtype == "float32"


def register_pressure(problem: AttentionProblem) -> int:
    """How many features hold a register or an address per score; loads of single elements count
    twice, since none of them can be copied asynchronously."""
    per_score = (problem.bias, problem.dropout_p > 0, problem.tree_mask)
    return sum((*per_score, not problem.aligned, not problem.aligned))


def some_pressure(problem: AttentionProblem) -> bool:
    return register_pressure(problem) == 1


def high_pressure(problem: AttentionProblem) -> bool:
    return register_pressure(problem) > 1


def always(problem: AttentionProblem) -> bool:
    return True


def wider_keys(problem: AttentionProblem) -> bool:
    """Head dims of Q and K that no value has (MLA's 576): their rest is a product of its own."""
    return problem.head_dim > MAX_HEAD_DIM_V


def wider_keys_under_pressure(problem: AttentionProblem) -> bool:
    return wider_keys(problem) and (problem.bias or register_pressure(problem) > 1)


def any_pressure(problem: AttentionProblem) -> bool:
    return register_pressure(problem) > 0


def no_pages(problem: AttentionProblem) -> bool:
    """Pages fill tiles of a power of two columns, not of 192, and never keys and values as one."""
    return not problem.page_size


def in_pages(problem: AttentionProblem) -> bool:
    return problem.page_size > 0


def narrow_values(problem: AttentionProblem) -> bool:
    return problem.head_dim > 128 >= problem.head_dim_v and no_pages(problem)


def drops(problem: AttentionProblem) -> bool:
    return problem.dropout_p > 0


def holds_more(problem: AttentionProblem) -> bool:
    """Than probabilities until dP is there: what was dropped, or how much of a score a cap left."""
    return drops(problem) or problem.softcap > 0


def in_order(problem: AttentionProblem) -> bool:
    return problem.deterministic


def holds_more_in_order(problem: AttentionProblem) -> bool:
    return holds_more(problem) and in_order(problem)


def masked(problem: AttentionProblem) -> bool:
    return problem.mask.bounded


def eight_bit(problem: AttentionProblem) -> bool:
    return problem.dtype.startswith("float8")


def packs(problem: AttentionProblem) -> bool:
    """Whether query heads may share a tile, and few rows are in use without. Terms that are added
    to the scores, and draws for them, go by head; packed sequences' maps have no dim to spare."""
    score_mods = problem.alibi or problem.bias or problem.dropout_p > 0
    few = problem.seqlen_q <= 64 and 1 < problem.group <= 64
    return few and not (score_mods or problem.varlen_q)


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
    """Tiles that see few keys, or unlike many: what fills and drains between them counts."""
    return problem.mask.left >= 0 or problem.varlen_q


def uneven_masks(problem: AttentionProblem) -> bool:
    return problem.mask.bounded and uneven(problem) and no_pages(problem)


def slopes(problem: AttentionProblem) -> bool:
    return problem.alibi


def scaled_by_row(problem: AttentionProblem) -> bool:
    """Whether scales are of heads or whole rows, of over 64 values, not of float32: as measured."""
    by_row = problem.kv_group in (0, problem.head_dim)
    return by_row and problem.head_dim > 64 and problem.dtype != "float32"


def heads_share_lines(problem: AttentionProblem) -> bool:
    """Whether a line of memory, of 128 bytes, has rows of two heads of a cache in one piece;
    scaled as measured."""
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
    """Whether caches have room for 4096 keys and more: a load that is made once for all keys of a
    piece is then worth a microsecond."""
    return problem.seqlen_k >= 4096


def merge_outlasts_waiting(problem: AttentionProblem) -> bool:
    """Whether one program would merge for longer than all wait for each other: a tile may have as
    many parts as it has SMs. H200, 2026-11-25: 1 x 8192 keys of 128 heads take 30 us in place of
    61, 8 x 8192 55 in place of 59; of 16 heads 1 x 131072 take 72 in place of 94, 8 x 8192 45 in
    place of 43. Not where the caller decides on the splits: the same bits in any batch."""
    rows = problem.seqlen_q * problem.group
    tiles = problem.batch * problem.heads_k * -(-rows // 64)
    return problem.num_splits == 0 and bool(are_many_to_merge(tiles, rows))


def all_merge_sooner(problem: AttentionProblem) -> bool:
    """Whether one program would merge a tile of up to 32 rows for longer than all programs wait for
    each other. 1 x 8192 keys of 16 heads then take 0.63 of the time, 64 x 8192 take longer:
    measurements/decode.md, "MLA of few rows, whose products have keys as rows"."""
    tiles = problem.batch * problem.heads_k
    return problem.num_splits == 0 and bool(have_many_sms(tiles))


@opaque
def have_many_sms(tiles: int) -> bool:
    """Whether each tile has many of an H200's SMs."""
    return tiles > 0 and MLA_SMS // tiles >= MLA_SWAP_LEAST_SMS


@opaque
def are_many_to_merge(tiles: int, rows: int) -> bool:
    """SMs that a tile has, of an H200's 132, times its rows."""
    return tiles > 0 and MLA_SMS // tiles * min(64, rows) >= 64 * MLA_LEAST_SMS
