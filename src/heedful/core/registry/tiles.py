"""How kernels are cut: a typed config for each, whose fields are all there are."""

from dataclasses import dataclass, fields, replace
from typing import Literal, Self

from heedful.core.call.problem import AttentionProblem

# How a row's maximum moves: with every tile; only where scores pass a threshold; where sums
# overflowed, after the exponentials.
Rescale = Literal["exact", "threshold", "speculative"]

CONSUMER_ROWS = 64  # query rows of one consumer warp group
# Keys whose products add up in the matrix unit's accumulators before float32 takes over: an output
# all of one sign loses 1 % in 1024 (H200, 2026-11-20), and as much of that in fewer.
PROMOTION_KEYS = 512
# Query rows of a KV head from which on warps of its own kernel transpose its values: for 128 keys
# they take some 3 us, and 128 rows of queries 0.9 us.
TRANSPOSE_ROWS = 1024
# Triton from which on Gluon has inline assembly, which looks at scores.
_INLINE_ASM = (3, 9)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one kernel is cut: `block_m` query rows by `block_n` keys, for so many warps, with loads
    so many stages early."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2

    def group_rows(self, problem: AttentionProblem) -> int:
        """Rows of a tile that one query position takes: above 1, the query heads of a KV head lie
        beside each other in a tile, in as many rows as the next power of two."""
        return 1

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        """The config with all that the problem and the compiler's version decide."""
        return self

    def words(self) -> str:
        """The fields beyond the tile that differ from the defaults, as name=value."""
        own = [f for f in fields(self) if f.name not in _TILE_FIELDS]
        found = ((f.name, getattr(self, f.name)) for f in own if getattr(self, f.name) != f.default)
        return " ".join(f"{name}={value}" for name, value in found)


_TILE_FIELDS = frozenset(f.name for f in fields(TileConfig))


@dataclass(frozen=True, slots=True)
class PortableConfig(TileConfig):
    """A tile of a portable kernel."""


# Query rows of a KV head in a decode's tile, and of most of its calls.
DECODE_ROWS = 64
WIDE_DIM = 256  # head dim above which the decode kernel takes a head for wide
# Rows of a decode's tile that are merged at once, at most: portable/decode/results.py, and
# hopper/decode/results.py.
MERGE_ROWS, HOPPER_MERGE_ROWS = 8, 16


@dataclass(frozen=True, slots=True)
class SharedKeysConfig(TileConfig):
    """A tile of a kernel whose programs share the keys of all sequences by themselves.

    programs: for each unit of the device. least_tiles: tiles of keys of a program at least, unless
    a KV head then had fewer than `fewest_shares` programs. overhead: what a part costs beside its
    keys, in tiles of keys. merge_values: of all parts, that each thread merges at once.
    """

    programs: int = 2
    least_tiles: int = 4
    fewest_shares: int = 1
    overhead: int = 0
    merge_values: int = 32

    def kept_rows(self, problem: AttentionProblem) -> int:
        """Rows of a part's results that are kept for its merge: a power of two."""
        return self.block_m


def _few_rows(problem: AttentionProblem, block_m: int) -> int:
    """The power of two that a tile's rows are within."""
    rows = problem.seqlen_q * problem.group
    return next((most for most in (4, 8, 16, 32) if rows <= most), block_m)


@dataclass(frozen=True, slots=True)
class DecodeConfig(SharedKeysConfig):
    """A tile of the decode kernel, whose rows are the query heads of a KV head at each position.

    conversion: of stored values of 8 and 4 bits: 0 the compiler's, 1 by PTX, of sm_90 on, 2 by the
    fewest instructions: of integers a permutation and an fma, of floats to float16. merge_stages:
    how often `merge_values` are on their way, as many as loads take longer than sums. registers: of
    a thread at most, of NVIDIA parts alone; 0 = the compiler's choice. fetch_ahead: rows of a cache
    in one piece are brought to the L2 so many key tiles early, of NVIDIA parts alone; 0 = not.
    """

    conversion: int = 0
    merge_stages: int = 1
    registers: int = 0
    fetch_ahead: int = 0


@dataclass(frozen=True, slots=True)
class MlaConfig(SharedKeysConfig):
    """A tile of the MLA decode: 64 query rows by 128 keys, 64 for each of two consumers.

    query_boxes: of 64 columns, that consumers keep in registers. ahead: boxes of the next step's
    first scores that are queued after a step's last values. in_order: 1: the first consumer's
    product with the second block's values is queued after the second's. merge: 1: parts are merged
    by all programs that have one, each some rows, which takes programs that are at work at once.
    consumer_regs, producer_regs: registers of a thread.
    """

    merge_values: int = 128
    query_boxes: int = 0
    ahead: int = 0
    in_order: int = 0
    merge: int = 0
    consumer_regs: int = 240
    producer_regs: int = 24

    def kept_rows(self, problem: AttentionProblem) -> int:
        few = problem.seqlen_q * problem.group <= HOPPER_MERGE_ROWS
        return HOPPER_MERGE_ROWS if few else self.block_m


@dataclass(frozen=True, slots=True)
class MlaSwapConfig(SharedKeysConfig):
    """A tile of the MLA decode of few rows: 16 or 32 query rows by 64 keys. num_stages: blocks of
    64 keys. merge, producer_regs: as of `MlaConfig`."""

    merge_values: int = 128
    merge: int = 0
    producer_regs: int = 88

    def kept_rows(self, problem: AttentionProblem) -> int:
        return _few_rows(problem, self.block_m)


@dataclass(frozen=True, slots=True)
class HopperDecodeConfig(SharedKeysConfig):
    """A tile of the Hopper decode: 64 query rows, of one consumer. num_stages: of keys, and of
    values.

    merge: as of `MlaConfig`. registers: of a thread as a program begins, 0 = all that there are;
    the producer keeps `producer_regs` and the consumer takes the others.
    """

    merge_values: int = 64
    merge: int = 0
    registers: int = 128
    producer_regs: int = 88

    def kept_rows(self, problem: AttentionProblem) -> int:
        return _few_rows(problem, self.block_m)

    def fewest_rows(self, problem: AttentionProblem) -> int:
        """The same of a sequence of the fewest queries: packed ones may have one."""
        if problem.varlen_q:
            problem = problem.at(problem.lengths._replace(seqlen_q=1))
        return self.kept_rows(problem)


@dataclass(frozen=True, slots=True)
class CdnaForwardConfig(TileConfig):
    """A tile of the CDNA forward."""


@dataclass(frozen=True, slots=True)
class HopperConfig(TileConfig):
    """The fields that both Hopper forwards have.

    num_stages: of keys. q_stages: tiles of queries of one consumer in flight, 0 = one for each
    consumer. consumer_regs, producer_regs: registers of a thread, None = what is left. pingpong:
    consumers take turns at products and softmax. rescale: see Rescale.
    """

    consumer_regs: int | None = None
    producer_regs: int = 24
    q_stages: int = 0
    pingpong: bool = False
    rescale: Rescale = "threshold"

    @property
    def consumers(self) -> int:
        return self.block_m // CONSUMER_ROWS

    @property
    def query_stages(self) -> int:
        return self.q_stages or self.consumers


@dataclass(frozen=True, slots=True)
class HopperForwardConfig(HopperConfig):
    """A tile of the Hopper forward for 16-bit inputs.

    v_stages: of values, 0 = as of keys. kv_share_stages: keys and values take turns in the same
    stages. pack_gqa: query heads of a KV head share a tile. out_in_q: results leave through the
    memory of the queries. tail_d, tail_e: a tile of queries and keys, or one of values, is three
    boxes of 64 columns, since a box has a power of two of them; pages fill tiles of a power of two.
    key_splits: in how many parts the keys are split, to be measured; 0 = as core/planning/splits.py
    has it.
    """

    v_stages: int = 0
    kv_share_stages: bool = False
    pack_gqa: bool = False
    out_in_q: bool = False
    tail_d: bool = False
    tail_e: bool = False
    key_splits: int = 0

    @property
    def value_stages(self) -> int:
        return self.v_stages or self.num_stages

    def group_rows(self, problem: AttentionProblem) -> int:
        return 1 << (problem.group - 1).bit_length() if self.pack_gqa else 1

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        tail_d, tail_e = (
            128 < dim <= 192 and not problem.page_size
            for dim in (problem.head_dim, problem.head_dim_v)
        )
        # Scores made anew are cheap only where nothing is loaded for them, and seldom only where
        # they do not grow from tile to tile, as ALiBi makes them up to the diagonal.
        drops = (1.0 - problem.dropout_p) * 2.0**32 < 2.0**32
        rescale = self.rescale
        if rescale == "speculative" and (problem.bias or problem.alibi or drops or tail_d):
            rescale = "threshold"
        if triton is not None and triton < _INLINE_ASM:
            rescale = "exact"
        fits = _results_fit(problem, tail_d, tail_e)
        return replace(
            self, tail_d=tail_d, tail_e=tail_e, rescale=rescale, out_in_q=self.out_in_q and fits
        )


def _results_fit(problem: AttentionProblem, tail_d: bool, tail_e: bool) -> bool:
    """Whether a consumer's results fit, box by box, where its queries were."""
    v_dim = tile_dim(problem.head_dim_v)
    if tail_d:
        return tail_e or v_dim == 128
    return not tail_e and tile_dim(problem.head_dim) == v_dim


# Head dims that a shared-memory tile can have; in between, tensor maps fill with zeros.
TILE_DIMS = (64, 128, 256)


def tile_dim(dim: int) -> int:
    """The width of the shared-memory tile that holds a head dim."""
    return next(width for width in TILE_DIMS if dim <= width)


@dataclass(frozen=True, slots=True)
class HopperFp8Config(HopperConfig):
    """A tile of the Hopper forward for fp8 inputs.

    votes_last: whether sums overflowed is asked after the wait for P V. prefetches_tile: consumers
    get the next work tile while their last P V runs. sums_in_regs: float32 sums are in registers
    and not in shared memory. transposes_v: its own warps transpose V, and not a kernel before it.
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
        # Not of packed sequences, whose blocks are found by search, nor where few queries use what
        # is transposed, so that to transpose takes longer than they. Float32 results of wide
        # values leave no room for tiles that wait to be transposed.
        few = problem.seqlen_q * problem.group < TRANSPOSE_ROWS
        packed = problem.varlen_k or problem.varlen_q
        wide = problem.out_dtype == "float32" and problem.head_dim_v > 64
        own = self.transposes_v and not (few or packed or wide)
        return replace(self, transposes_v=own)


@dataclass(frozen=True, slots=True)
class HopperBackwardConfig(TileConfig):
    """A tile of the Hopper backward: a step of `block_m` queries, past `block_n` keys that stay.
    Consumers share these keys and each makes one gradient of them (wide); or each has its own keys
    and makes dQ, too (pair); or another warpgroup makes dQ.

    num_stages: of queries. dout_stages, ds_stages, k_stages: of the output's gradients, of those of
    the scores, and of work tiles' keys. consumer_regs, dq_regs, producer_regs: registers of a
    thread; dq_regs None where consumers make dQ. draws: programs for the units of
    the device draw their work tiles; else each work tile has a program. last_waves: under a mask,
    how often the tiles of the last L2 group are to fill the device, so that its short tiles outlast
    its longest; 0: groups are alike. splits: in how many parts the visits of a key tile are split,
    each a work tile; 0: as many as even out the schedule.
    """

    dout_stages: int = 2
    ds_stages: int = 2
    k_stages: int = 2
    consumer_regs: int = 208
    dq_regs: int | None = 72
    producer_regs: int = 24
    draws: bool = False
    last_waves: int = 0
    splits: int = 1

    def fitted(self, problem: AttentionProblem, triton: tuple[int, ...] | None) -> Self:
        # Bits of dropout change their layout through shared memory, which wide keys twice fill.
        drops = problem.dropout_p > 0 and problem.head_dim > 64
        return replace(self, k_stages=1) if drops else self


def backward_dim(dim: int) -> int:
    """Columns of a tile of the Hopper backward in shared memory."""
    return pow2(dim, 64)


def product_dim(dim: int) -> int:
    """Columns of which the Hopper backward makes products: all of a tile, or all but a last quarter
    of zeros."""
    tile = backward_dim(dim)
    return tile // 4 * 3 if tile > 64 and dim <= tile // 4 * 3 else tile


# Kernels of one tile for all devices: what they read and write once is all that counts. Values
# that 4 warps keep in 16 registers each: 8 KiB of float32.
_TILE_VALUES = 2048


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Rows that one program takes of a kernel without products, with this many warps."""

    rows: int
    num_warps: int = 4
    num_stages: int = 1


def pow2(n: int, least: int = 16) -> int:
    """The power of two at or above n: block sizes are powers of two, a dot's at least 16."""
    return max(least, 1 << (n - 1).bit_length())


def combine_rows(head_dim_v: int, rows: int, splits: int) -> tuple[RowsConfig, int]:
    """The tile of the merge of splits of so many query rows of a head, and the splits that it loads
    at once."""
    dim = pow2(head_dim_v)
    if rows > 1:
        return RowsConfig(max(1, min(16, _TILE_VALUES // 2 // dim))), 8
    if splits == 1:
        return RowsConfig(1, num_warps=1 if dim <= 512 else 4), 1
    # More splits in place of rows that are not there: 64 values a thread at most.
    return RowsConfig(1), max(8, min(64, 4 * _TILE_VALUES // dim))


def cache_rows(*dims: int) -> RowsConfig:
    """The tile of the kernels that append to a cache, and that rotate queries, for these head
    dims."""
    return RowsConfig(_TILE_VALUES // pow2(max(dims)))


CLEAR_UNUSED = RowsConfig(16)
SINK_GRADIENTS = RowsConfig(1024)
# Programs that share what lies outside of all packed sequences: about one for each unit of a GPU.
CLEARING_PROGRAMS = 128
VARLEN_SCHEDULER = RowsConfig(1024)  # sequences that a program looks at at once
# The kernel that transposes V before fp8 attention: keys of a block, at multiples of which packed
# sequences begin; packed sequences that a program looks at at once.
V_T_KEYS = 128
TRANSPOSE_SEQUENCES = 256
# Warps that transpose V themselves: boxes of V_T_KEYS x V_T_DIMS; so many keys of a head are
# reported together.
V_T_DIMS = 64
V_T_CHUNK = 1024
