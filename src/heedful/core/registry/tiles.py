"""The tiles of kernels: a typed config for each, whose fields are all of its options."""

from dataclasses import fields, replace
from typing import Literal, Self

from heedful.core.base.frozen import dataclass
from heedful.core.base.symbols import larger
from heedful.core.call.problem import AttentionProblem

# When a row gets a new reference: with every tile; where scores pass a threshold; or where sums
# overflowed, after the exponentials.
Rescale = Literal["exact", "threshold", "speculative"]

CONSUMER_ROWS = 64  # query rows of one consumer warpgroup
# The WGMMA accumulators add up products over so many keys before float32 sums take over: an output
# all of one sign loses 1 % over 1024 keys (H200, 2026-11-20), and a part of this over fewer.
PROMOTION_KEYS = 512
# Query rows of a KV head from which on warps of the attention kernel transpose its values: for 128
# keys this takes about 3 us, and 128 rows of queries take 0.9 us.
TRANSPOSE_ROWS = 1024
# The Triton from which on Gluon has inline assembly, which the votes on scores use.
_INLINE_ASM = (3, 9)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tiles of one kernel: `block_m` query rows by `block_n` keys, `num_warps` warps, and loads
    `num_stages` stages ahead."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2

    def group_rows(self, problem: AttentionProblem) -> int:
        """Rows of a tile that one query position takes. Above 1, the query heads of a KV head share
        a tile, padded to the next power of two."""
        return 1

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        """The config with all that the problem and the compiler's version decide."""
        return self

    def words(self) -> str:
        """The other fields that differ from their defaults, as name=value."""
        others = ((f, getattr(self, f.name)) for f in fields(self) if f.name not in _TILE_FIELDS)
        return " ".join(f"{f.name}={value}" for f, value in others if value != f.default)


_TILE_FIELDS = frozenset(f.name for f in fields(TileConfig))


@dataclass(frozen=True, slots=True)
class PortableConfig(TileConfig):
    """A tile of a portable kernel. It divides a tile of a block mask."""

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        most = problem.block_mask or max(self.block_m, self.block_n)
        return replace(self, block_m=min(self.block_m, most), block_n=min(self.block_n, most))


# Keys of a part where bits do not depend on how a call is made; a sequence's parts begin at
# multiples of it.
PART_KEYS = 8192
# A row's floats beside its output that programs hold between parts: three numbers, eight times.
HELD_NUMBERS = 24


@dataclass(frozen=True, slots=True)
class PortablePartsConfig(PortableConfig):
    """A tile of the portable forward with numerics="invariant". part_keys: after so many keys a
    part ends; parts are merged one after the other."""

    part_keys: int = 0


# Query rows of a KV head in a decode's tile, and of most of its calls.
DECODE_ROWS = 64
WIDE_DIM = 256  # head dim above which the decode kernel has wide heads
# Rows of a decode's tile that are merged at once, at most: portable/decode/results.py, and
# hopper/decode/results.py.
MERGE_ROWS, HOPPER_MERGE_ROWS = 8, 16


@dataclass(frozen=True, slots=True)
class SharedKeysConfig(TileConfig):
    """A tile of a kernel whose programs share the keys of all sequences by themselves. programs:
    how many for each SM. least_tiles: the least key tiles of a program, unless a KV head then had
    fewer than `fewest_shares` programs. overhead: the cost of a segment without its keys, in key
    tiles. merge_values: how many values of all segments each thread merges at once.
    """

    programs: int = 2
    least_tiles: int = 4
    fewest_shares: int = 1
    overhead: int = 0
    merge_values: int = 32

    def kept_rows(self, problem: AttentionProblem) -> int:
        """Rows of a segment's partial results that are stored for the merge: a power of two."""
        return self.block_m


def _few_rows(problem: AttentionProblem, block_m: int) -> int:
    """The rows of a tile, rounded up to a power of two."""
    rows = problem.seqlen_q * problem.group
    return next((most for most in (4, 8, 16, 32) if rows <= most), block_m)


@dataclass(frozen=True, slots=True)
class DecodeConfig(SharedKeysConfig):
    """A tile of the decode kernel, whose rows are the query heads of a KV head at each position.

    conversion: how stored values of 8 and 4 bits are converted: 0 by the compiler, 1 by PTX (from
    sm_90 on), 2 by the fewest instructions: integers by a permutation and an fma, floats to
    float16. merge_stages: how many loads of `merge_values` are in flight in a merge. registers: the
    most of a thread, on NVIDIA parts; 0 = the compiler's choice. fetch_ahead: how many key tiles
    early rows of a dense cache are prefetched into the L2, on NVIDIA parts; 0 = not.
    """

    conversion: int = 0
    merge_stages: int = 1
    registers: int = 0
    fetch_ahead: int = 0


def heads_fill_boxes(problem: AttentionProblem) -> bool:
    """Whether the query heads of a KV head fill boxes of 64 rows of a tensor map, or as many boxes
    of positions."""
    return problem.group & (problem.group - 1) == 0


@dataclass(frozen=True, slots=True)
class MlaConfig(SharedKeysConfig):
    """A tile of the MLA decode: 64 query rows by 128 keys, 64 for each of two consumers.
    query_boxes: how many boxes of 64 columns of queries consumers keep in registers. ahead: how
    many boxes of the next step's first scores are queued after a step's last values. in_order: if
    1, the first consumer's product with the second block's values is queued after the second
    consumer's. merge: if 1, all programs that have a segment merge some of the rows, for which all
    programs must run at once. query_map: if 1, queries come by a tensor map, where
    `heads_fill_boxes`. thread_order: if 1, partial results lie in scratch in
    the order of threads. consumer_regs, producer_regs: registers of a thread.
    """

    merge_values: int = 128
    query_boxes: int = 0
    query_map: int = 1
    thread_order: int = 0
    ahead: int = 0
    in_order: int = 0
    merge: int = 0
    consumer_regs: int = 240
    producer_regs: int = 24

    def kept_rows(self, problem: AttentionProblem) -> int:
        few = problem.seqlen_q * problem.group <= HOPPER_MERGE_ROWS and not self.thread_order
        return HOPPER_MERGE_ROWS if few else self.block_m

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        return replace(self, query_map=int(self.query_map and heads_fill_boxes(problem)))


@dataclass(frozen=True, slots=True)
class MlaSwapConfig(SharedKeysConfig):
    """A tile of the MLA decode for few rows: 16 or 32 query rows by 64 keys. num_stages: blocks of
    64 keys. merge, producer_regs: as in `MlaConfig`."""

    merge_values: int = 128
    merge: int = 0
    producer_regs: int = 88

    def kept_rows(self, problem: AttentionProblem) -> int:
        return _few_rows(problem, self.block_m)


@dataclass(frozen=True, slots=True)
class MlaConvertingConfig(MlaSwapConfig):
    """The same over latent vectors of 8 bits. registers: as in `HopperDecodeConfig`."""

    merge_values: int = 64
    producer_regs: int = 24
    registers: int = 128


@dataclass(frozen=True, slots=True)
class MlaConvertingPairConfig(MlaSwapConfig):
    """A tile of 64 query rows by 128 keys of 8 bits, 64 for each of two consumers. query_map,
    thread_order: as in `MlaConfig`. consumer_regs: registers of a thread."""

    query_map: int = 1
    thread_order: int = 0

    def kept_rows(self, problem: AttentionProblem) -> int:
        return self.block_m if self.thread_order else _few_rows(problem, self.block_m)

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        return replace(self, query_map=int(self.query_map and heads_fill_boxes(problem)))

    consumer_regs: int = 240
    producer_regs: int = 24


@dataclass(frozen=True, slots=True)
class HopperDecodeConfig(SharedKeysConfig):
    """A tile of the Hopper decode: 64 query rows, of one consumer. num_stages: stages of keys, and
    of values; of wide heads, which have 16 or 32 rows, of both. merge: as in `MlaConfig`.
    registers: those of a thread when a program begins, 0 = as many as there are; then the producer
    keeps `producer_regs` and the consumer takes the others.
    """

    merge_values: int = 64
    merge: int = 0
    registers: int = 128
    producer_regs: int = 88

    def kept_rows(self, problem: AttentionProblem) -> int:
        return _few_rows(problem, self.block_m)

    def fewest_rows(self, problem: AttentionProblem) -> int:
        """The same for a sequence with the fewest queries: a packed one may have one."""
        if problem.varlen_q:
            problem = problem.at(problem.lengths._replace(seqlen_q=1))
        return self.kept_rows(problem)


@dataclass(frozen=True, slots=True)
class CdnaForwardConfig(TileConfig):
    """A tile of the CDNA forward."""


@dataclass(frozen=True, slots=True)
class HopperConfig(TileConfig):
    """The fields of both Hopper forwards. num_stages: stages of keys. q_stages: stages of queries,
    0 = one for each consumer. consumer_regs, producer_regs: registers of a thread, None = as many
    as the others leave. pingpong: consumers take turns at products and softmax. rescale: see
    Rescale.
    """

    consumer_regs: int | None = None
    producer_regs: int = 24
    q_stages: int = 0
    pingpong: bool = False
    rescale: Rescale = "threshold"

    @property
    def consumers(self) -> int:
        return self.block_m // CONSUMER_ROWS

    def parts(self, problem: AttentionProblem) -> int:
        """How many parts of fixed bounds the longest sequence's keys have."""
        return 1

    @property
    def query_stages(self) -> int:
        return self.q_stages or self.consumers


@dataclass(frozen=True, slots=True)
class HopperForwardConfig(HopperConfig):
    """A tile of the Hopper forward for 16-bit inputs. v_stages: stages of values, 0 = as many as of
    keys. kv_share_stages: keys and values take turns in the same stages. pack_gqa: query heads of a
    KV head share a tile. out_in_q: results are stored through the shared memory of the queries.
    tail_d, tail_e: a tile of queries and keys, or one of values, has 192 columns in three boxes of
    64. stored_stages: stages of keys, and of values, as a quantised cache stores them; 0 = they
    need no conversion. key_splits: a number of splits to measure; 0 = as core/planning/splits.py
    chooses. part_keys: as of `PortablePartsConfig`; one key split then stands for programs that
    take all parts in turn. cuts_rows: dense rows with key_ranges are packed sequences, cut where
    rows part.
    """

    v_stages: int = 0
    kv_share_stages: bool = False
    pack_gqa: bool = False
    out_in_q: bool = False
    tail_d: bool = False
    tail_e: bool = False
    stored_stages: int = 0
    key_splits: int = 0
    part_keys: int = 0
    cuts_rows: bool = False

    @property
    def value_stages(self) -> int:
        return self.v_stages or self.num_stages

    def parts(self, problem: AttentionProblem) -> int:
        return larger(1, -(-problem.seqlen_k // self.part_keys)) if self.part_keys else 1

    def group_rows(self, problem: AttentionProblem) -> int:
        return 1 << (problem.group - 1).bit_length() if self.pack_gqa else 1

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        tail_d, tail_e = (
            128 < dim <= 192 and not (problem.page_size or problem.quantized_kv)
            for dim in (problem.head_dim, problem.head_dim_v)
        )
        # To compute scores again is cheap only where nothing is loaded for them, and rare only
        # where scores do not grow from tile to tile, as they do under ALiBi up to the diagonal.
        drops = (1.0 - problem.dropout_p) * 2.0**32 < 2.0**32
        rescale = self.rescale
        has_more = problem.bias or problem.rel_bias or problem.alibi
        if rescale == "speculative" and (has_more or drops or tail_d):
            rescale = "threshold"
        if triton is not None and triton < _INLINE_ASM:
            rescale = "exact"
        fits = _results_fit(problem, tail_d, tail_e)
        made = replace(
            self,
            tail_d=tail_d,
            tail_e=tail_e,
            rescale=rescale,
            out_in_q=self.out_in_q and fits,
            cuts_rows=self.cuts_rows and may_cut_rows(problem),
        )
        if not problem.block_mask:
            return made
        # Rows of a tile have one list, and its entries are whole numbers of steps.
        block_m, block_n = (min(n, problem.block_mask) for n in (self.block_m, self.block_n))
        return replace(made, block_m=block_m, block_n=block_n, pack_gqa=False)


@dataclass(frozen=True, slots=True)
class HopperWideConfig(HopperForwardConfig):
    """A tile of the Hopper forward of wide heads. A cluster has a program for each 64 of `block_m`
    rows. num_stages: stages of parts of keys, of 128 columns."""

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        return self


def _results_fit(problem: AttentionProblem, tail_d: bool, tail_e: bool) -> bool:
    """Whether a consumer's results fit, box by box, into the shared memory of its queries."""
    v_dim = tile_dim(problem.head_dim_v)
    if tail_d:
        return tail_e or v_dim == 128
    return not tail_e and tile_dim(problem.head_dim) == v_dim


# Head dims that a shared-memory tile can have; for others, TMA fills in zeros.
TILE_DIMS = (64, 128, 256)


def tile_dim(dim: int) -> int:
    """The width of the shared-memory tile that holds a head dim."""
    return next(width for width in TILE_DIMS if dim <= width)


@dataclass(frozen=True, slots=True)
class HopperFp8Config(HopperConfig):
    """A tile of the Hopper forward for fp8 inputs.

    votes_last: the overflow vote follows the wait for P V. prefetches_tile: consumers get the next
    work tile while their last P V runs. sums_in_regs: float32 sums are in registers and not in
    shared memory. transposes_v: warps of this kernel transpose V, and not a kernel before it.
    """

    votes_last: bool = False
    prefetches_tile: bool = False
    sums_in_regs: bool = False
    transposes_v: bool = False

    @property
    def promotion_interval(self) -> int:
        """Key tiles between two promotions."""
        return PROMOTION_KEYS // self.block_n

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        # Not for packed sequences, whose blocks are found by search, nor where so few queries use V
        # that the transpose takes longer than they. Float32 results of wide values leave no room
        # for tiles to be transposed.
        few = problem.seqlen_q * problem.group < TRANSPOSE_ROWS
        packed = problem.varlen_k or problem.varlen_q
        wide = problem.out_dtype == "float32" and problem.head_dim_v > 64
        transposes = self.transposes_v and not (few or packed or wide)
        return replace(self, transposes_v=transposes)


@dataclass(frozen=True, slots=True)
class HopperBackwardConfig(TileConfig):
    """A tile of the Hopper backward: a step of `block_m` queries, past `block_n` keys that stay.
    Consumers share these keys and each makes one gradient of them (wide); or each has its own keys
    and makes dQ, too (pair); or another warpgroup makes dQ. There, with 64 keys, consumers share
    them and take visits in turn.

    programs: those of a cluster, which share a work tile's columns (halves). num_stages: stages of
    queries. dout_stages, ds_stages, k_stages: stages of dO, of dS, and of the
    keys of work tiles. consumer_regs, dq_regs, producer_regs: registers of a thread; dq_regs None
    where consumers make dQ. draws: a program for each SM draws work tiles; otherwise each work tile
    has a program. last_waves: under a mask, how often the tiles of the last L2 group fill the
    device, so that its short tiles fill the time of its longest; 0: all groups are equal. splits:
    how many splits the visits of a key tile have, each a work tile; 0: core/planning/splits.py
    chooses. heads_innermost: under a causal mask, all query heads of a KV head visit a key tile
    with one query tile after the other, and half of the key tiles go from the last query tile.
    hides_rows: by key_ranges, query tiles of which some rows see all of a key tile, and the others
    nothing, need no mask.
    tail_splits: without a mask, how many splits those work tiles have that are left once all SMs
    have had as many; 0: core/planning/splits.py chooses. dk_in_keys: dK is stored through the
    shared memory of its keys, in dense calls where these have two stages. rotates: without a mask,
    each key tile's visits begin with another query tile; under a causal mask those that need no
    mask, where heads are not innermost. cuts_rows: as of `HopperForwardConfig`, without a sink; no
    rows are hidden by `hides_rows` then.
    """

    dout_stages: int = 2
    ds_stages: int = 2
    k_stages: int = 2
    consumer_regs: int = 208
    dq_regs: int | None = 72
    producer_regs: int = 24
    programs: int = 1
    draws: bool = False
    last_waves: int = 0
    splits: int = 1
    heads_innermost: bool = False
    hides_rows: bool = False
    tail_splits: int = 1
    dk_in_keys: bool = False
    rotates: bool = False
    cuts_rows: bool = False

    def _may_rotate(self, problem: AttentionProblem) -> bool:
        mask = problem.mask
        is_causal = mask.right >= 0 and mask.left < 0 and not self.heads_innermost
        return _is_dense(problem) and (is_causal or not problem.is_masked)

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        cuts_rows = self.cuts_rows and may_cut_rows(problem) and not problem.sink
        made = replace(
            self,
            heads_innermost=self.heads_innermost and _is_triangle(problem),
            hides_rows=self.hides_rows and _has_one_range(problem) and not cuts_rows,
            rotates=self.rotates and self._may_rotate(problem),
            cuts_rows=cuts_rows,
        )
        if self.dq_regs is not None and self.block_n == CONSUMER_ROWS:
            # Each has two stages of queries, and work tiles half as many keys.
            return replace(made, block_m=CONSUMER_ROWS, num_stages=4, dk_in_keys=False)
        # Two stages of wide keys would fill shared memory, where the words of a block mask lie.
        fits = problem.block_mask == 0 or problem.head_dim <= 64
        made = made if fits else replace(made, k_stages=1)
        dk_in_keys = made.dk_in_keys and made.k_stages > 1 and _is_dense(problem)
        return replace(made, dk_in_keys=dk_in_keys)


def _is_dense(problem: AttentionProblem) -> bool:
    """Whether no feature of a call takes registers of the backward's loop beside the mask's."""
    is_modified = problem.softcap or problem.dropout_p or problem.key_ranges or problem.block_mask
    return not (is_modified or problem.ragged_k or problem.varlen_q or problem.deterministic)


def _has_one_range(problem: AttentionProblem) -> bool:
    """Whether each row has one range of keys, and no list."""
    return problem.key_ranges == 1 and problem.block_mask == 0


def may_cut_rows(problem: AttentionProblem) -> bool:
    """Whether rows of dense sequences with one range each may be cut where they part: under a
    causal mask, whose diagonal is that of each piece."""
    mask = problem.mask
    is_square = problem.seqlen_q == problem.seqlen_k and mask.right == 0 and mask.shift == 0
    ragged = problem.varlen_q or problem.varlen_k or problem.used_q or problem.ragged_k
    modified = problem.alibi or problem.bias or problem.rel_bias or problem.dropout_p > 0
    others = problem.q_offsets or problem.invariant or problem.out_dtype != problem.dtype
    plain = not (ragged or modified or others or problem.num_splits > 1)
    stored = problem.near_rows and problem.rows_follow
    return _has_one_range(problem) and not problem.own_ranges and is_square and plain and stored


def _is_triangle(problem: AttentionProblem) -> bool:
    """Whether query heads share keys under a causal mask of sequences of one length."""
    mask = problem.mask
    others = problem.varlen_q or problem.varlen_k or problem.key_ranges or problem.block_mask
    is_causal = mask.right >= 0 and mask.left < 0
    return is_causal and problem.group > 1 and not (others or problem.deterministic)


def backward_dim(dim: int) -> int:
    """Columns of a tile of the Hopper backward in shared memory."""
    return pow2(dim, 64)


def product_dim(dim: int) -> int:
    """Columns that products of the Hopper backward read: all of a tile, or all but the last quarter
    of zeros. Tiles of 512 columns are halves, which are all read."""
    tile = backward_dim(dim)
    return tile // 4 * 3 if 64 < tile < 512 and dim <= tile // 4 * 3 else tile


# Kernels of one tile for all devices: what they read and write once is all that counts. Values that
# 4 warps keep in 16 registers each: 8 KiB of float32.
_TILE_VALUES = 2048


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """A tile of a kernel without products: the rows of one program, and its warps."""

    rows: int
    num_warps: int = 4
    num_stages: int = 1


def pow2(n: int, least: int = 16) -> int:
    """n rounded up to a power of two, at least `least`: block sizes are powers of two, and a dot's
    at least 16."""
    return max(least, 1 << (n - 1).bit_length())


def combine_rows(head_dim_v: int, rows: int, splits: int) -> tuple[RowsConfig, int]:
    """The tile of the merge of splits, and how many splits it loads at once. rows: query rows of a
    head."""
    dim = pow2(head_dim_v)
    if rows > 1:
        return RowsConfig(max(1, min(16, _TILE_VALUES // 2 // dim))), 8
    if splits == 1:
        return RowsConfig(1, num_warps=1 if dim <= 512 else 4), 1
    # If there are few rows, more splits at once: at most 64 values a thread.
    return RowsConfig(1), max(8, min(64, 4 * _TILE_VALUES // dim))


def cache_rows(*dims: int) -> RowsConfig:
    """The tile of the kernels that append to a cache and that rotate queries, for these head
    dims."""
    return RowsConfig(_TILE_VALUES // pow2(max(dims)))


CLEAR_UNUSED = RowsConfig(16)
SINK_GRADIENTS = RowsConfig(1024)
# Diagonals of scores that a program sums; into how many parts of the sequences a sum is divided, so
# that short ones keep the device busy.
DIAGONAL_SUMS = RowsConfig(128)
DIAGONAL_PARTS = 4
DIAGONAL_GRADIENTS = RowsConfig(256)
MERGE_PARTS = RowsConfig(16)
# Programs that share the tokens outside of all packed sequences: about one for each SM.
CLEARING_PROGRAMS = 128
VARLEN_SCHEDULER = RowsConfig(1024)  # sequences that a program looks at at once
# Dense rows with key_ranges are cut at most once in so many; blocks of these that programs of the
# two kernels look at at once.
CUT_ROWS = 128
PART_BLOCKS, CUT_BLOCKS = RowsConfig(8), RowsConfig(512)
# The kernel that transposes V before fp8 attention: keys of a block, at multiples of which packed
# sequences begin; packed sequences that a program looks at at once.
V_T_KEYS = 128
TRANSPOSE_SEQUENCES = 256
# Warps that transpose V themselves: boxes of V_T_KEYS x V_T_DIMS; so many keys of a head are
# reported together.
V_T_DIMS = 64
V_T_CHUNK = 1024
