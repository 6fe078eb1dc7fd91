"""One attention call as frozen facts: no tensors, no framework. It has all that decides which
kernel runs, and how. It lacks addresses and strides, which only the kernel reads."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from heedful.core.base.frozen import dataclass
from heedful.core.base.numbers import check_factor, real, truth, whole, wholes
from heedful.core.call.mask import MaskSpec

ITEM_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "int4": 4,
    "fp8_ds_mla": 8,
}
# Latent vectors in rows of bytes, as FlashMLA and vLLM name and store them: 512 values of e4m3, a
# float32 scale for each 128 of them, and 64 columns of bfloat16 for rotary positions, which are key
# alone (https://github.com/deepseek-ai/FlashMLA).
LATENT_ROWS = "fp8_ds_mla"
LATENT_ROW_BYTES, LATENT_ROW_DIM, LATENT_ROW_DIM_V, LATENT_ROW_GROUP = 656, 576, 512, 128
# The largest head dim of V and the output, and that of Q and K, which in MLA have more columns than
# V, for rotary positions.
MAX_HEAD_DIM_V, MAX_HEAD_DIM = 512, 576
NO_SCALE = 1e-30  # replaces all that is nearer to 0
NEAR_BYTES = 1 << 23


def default_out_dtype(dtype: str) -> str:
    """The default dtype of an output: that of the inputs, or bfloat16 for 8-bit inputs."""
    return "bfloat16" if ITEM_BITS.get(dtype) == 8 else dtype


class Lengths(NamedTuple):
    """The fields of AttentionProblem in which two calls of one kind may differ."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int | None = None
    total_k: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The facts of one call.

    batch, heads_q, heads_k, seqlen_q, seqlen_k: sizes; the lengths are the largest of the batch.
    head_dim, head_dim_v: of Q and K, and of V and the output. total_q, total_k: packed tokens, None
    where that side is (batch, seqlen, ...). dtype, kv_dtype, out_dtype: names as in torch and
    NumPy; int4 is two values a byte, fp8_ds_mla a row of LATENT_ROW_BYTES. scale: multiplies q k^T,
    at least NO_SCALE in size. softcap: 0 is off. dropout_p: 0 is off. used_q, used_k: per-sequence
    lengths inside the given storage (seqused, cache_seqlens). page_size: keys a page of a paged
    cache, 0 if not paged. alibi, bias, rel_bias, sink, tree_mask, kv_batch_idx, leftpad_k,
    q_offsets: whether the call has them. key_ranges: how many ranges of keys each row has, 0
    without such a mask; own_ranges: whether heads have ranges of their own; documents: whether
    these ranges are said to be those of documents (`Documents`). block_mask: rows and keys of a
    tile of the block mask, 0 without one; scattered: whether its lists are said to be scattered
    (`BlockMask`). kv_group: how many values share one scale of a quantised cache, 0 for a scale per
    head or none. kv_shift: the quantised cache has a zero shift per scale. needs_grad, bias_grad,
    rel_bias_grad: whether a backward will follow, and whether it computes the gradients of these
    two. return_lse: whether the caller reads the log-sum-exp. return_probs: the sign-coded dropped
    probabilities are wanted (tests). max_scores: the largest score of each row is wanted, without
    the sink. keeps_rest: the rounding error of the log-sum-exp is wanted beside it, for a merge on
    a GPU. deterministic: the backward must be bit-equal from run to run. num_splits: 0 = choose, 1
    = do not split the keys, n = split them in n. aligned: all bases and strides are multiples of 16
    bytes. even_rows: the batch stride of K and V (or the stride of pages) is a multiple of the row
    stride, and less than 2^30 rows. near_rows: rows of Q, K, V and the output begin less than
    NEAR_BYTES apart. rows_follow: beside key_ranges, their rows of a batch entry follow those of
    the entry before. v_in_k: V is a view of the first head_dim_v values of each row of K (MLA).
    dropout_origin: (batch, head, row, column) of this call's first score in the whole problem, so
    that a shard draws the mask that the unsharded call would. origins: 4 where each sequence has
    its own place, whose columns count in fours, 1 where they do not, 0 without. invariant: a row's
    bits depend on its query, on the keys and values that it sees, on their positions and on
    options, and on nothing else (numerics="invariant").
    """

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    kv_dtype: str
    out_dtype: str
    scale: float
    mask: MaskSpec = MaskSpec()
    softcap: float = 0.0
    dropout_p: float = 0.0
    total_q: int | None = None
    total_k: int | None = None
    used_q: bool = False
    used_k: bool = False
    page_size: int = 0
    alibi: bool = False
    bias: bool = False
    rel_bias: bool = False
    sink: bool = False
    tree_mask: bool = False
    kv_batch_idx: bool = False
    leftpad_k: bool = False
    q_offsets: bool = False
    key_ranges: int = 0
    own_ranges: bool = False
    documents: bool = False
    block_mask: int = 0
    scattered: bool = False
    kv_group: int = 0
    kv_shift: bool = False
    needs_grad: bool = False
    bias_grad: bool = False
    rel_bias_grad: bool = False
    return_lse: bool = False
    return_probs: bool = False
    max_scores: bool = False
    keeps_rest: bool = False
    deterministic: bool = False
    num_splits: int = 0
    aligned: bool = True
    even_rows: bool = True
    near_rows: bool = True
    rows_follow: bool = True
    v_in_k: bool = False
    dropout_origin: tuple[int, int, int, int] = (0, 0, 0, 0)
    origins: int = 0
    invariant: bool = False

    def __post_init__(self):
        # Rounded to float32 the scale might be 0, and 0 times a hidden score, which is -inf, would
        # be NaN.
        if abs(self.scale) < NO_SCALE:
            object.__setattr__(self, "scale", NO_SCALE)

    @classmethod
    def dense(
        cls,
        batch: int,
        seqlen_q: int,
        seqlen_k: int,
        heads_q: int,
        heads_k: int | None = None,
        head_dim: int = 128,
        dtype: str = "bfloat16",
        causal: bool = False,
        **facts,
    ) -> "AttentionProblem":
        """A plain problem from few words, for the command line, benchmarks and tests; numbers may
        be NumPy's.

        Raises TypeError or ValueError naming the argument.
        """
        heads_k = heads_q if heads_k is None else heads_k
        head_dim = whole("head_dim", head_dim)
        facts |= {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        facts |= {"heads_q": heads_q, "heads_k": heads_k, "head_dim": head_dim, "dtype": dtype}
        facts.setdefault("head_dim_v", head_dim)
        facts.setdefault("kv_dtype", dtype)
        facts.setdefault("out_dtype", default_out_dtype(dtype))
        facts.setdefault("scale", 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0)
        facts.setdefault("mask", MaskSpec.of(causal))
        problem = cls(**{name: _plain(name, value) for name, value in facts.items()})
        problem.validate()
        return problem

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.batch, self.seqlen_q, self.seqlen_k, self.total_q, self.total_k)

    def at(self, lengths: Lengths) -> "AttentionProblem":
        """The same problem with other lengths, in a third of the time of `replace`."""
        problem = object.__new__(AttentionProblem)
        for name, put, get in _SLOTS:
            put(problem, getattr(lengths, name) if name else get(self))
        return problem

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_k

    @property
    def is_masked(self) -> bool:
        """Whether a query may see less than all keys of its sequence."""
        return self.mask.bounded or self.key_ranges > 0 or self.block_mask > 0

    @property
    def varlen_q(self) -> bool:
        return self.total_q is not None

    @property
    def varlen_k(self) -> bool:
        return self.total_k is not None

    @property
    def ragged_k(self) -> bool:
        """Whether keys end where a sequence ends and not where its storage does."""
        return bool(self.varlen_k or self.used_k or self.leftpad_k or self.page_size)

    @property
    def out_shape(self) -> tuple[int, ...]:
        rows = (self.batch, self.seqlen_q) if self.total_q is None else (self.total_q,)
        return *rows, self.heads_q, self.head_dim_v

    @property
    def probs_shape(self) -> tuple[int, ...]:
        return self.batch, self.heads_q, self.seqlen_q, self.seqlen_k

    @property
    def makes_lse(self) -> bool:
        """Whether the caller, a backward or a further result needs the log-sum-exp."""
        wanted = self.return_probs or self.max_scores or self.keeps_rest
        return self.return_lse or self.needs_grad or wanted

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.total_q is not None:
            return self.heads_q, self.total_q
        return self.batch, self.heads_q, self.seqlen_q

    @property
    def quantized_kv(self) -> bool:
        """Whether keys and values are stored in fewer bits than queries."""
        return ITEM_BITS[self.kv_dtype] <= 8 < ITEM_BITS[self.dtype]

    def features(self) -> frozenset[str]:
        """The features that this call asks of a kernel beyond plain dense attention: names in
        FEATURES."""
        return frozenset(self._features())

    def _features(self) -> Iterator[str]:
        mask = self.mask
        if mask.causal:
            yield "causal"
        elif mask.bounded:
            yield "window"
        if mask.first:
            yield "first_keys"
        by_distance = self.alibi or self.rel_bias
        if (mask.bounded or by_distance) and (mask.shift or not mask.bottom_right):
            yield "diagonal"
        yield from (name for name in _FLAGS if getattr(self, name))
        if self.softcap > 0:
            yield "softcap"
        if self.dropout_p > 0:
            yield "dropout"
        if self.varlen_q or self.varlen_k:
            yield "varlen"
        if self.used_q or self.used_k:
            yield "seqused"
        if self.page_size:
            yield "paged"
        if self.group > 1:
            yield "gqa"
        if self.head_dim != self.head_dim_v:
            yield "head_dims_differ"
        if ITEM_BITS[self.dtype] == 16 and self.out_dtype != self.dtype:
            yield "float_out"
        if ITEM_BITS[self.dtype] == 8:
            yield "fp8"
        if self.quantized_kv:
            yield "quantized_kv"
        if self.num_splits > 1:
            yield "split_kv"
        if self.needs_grad:
            yield "backward"
        if self.deterministic and self.needs_grad:
            yield "deterministic"
        if not self.aligned:
            yield "unaligned"
        ragged = self.used_k or self.leftpad_k or self.page_size
        if ragged and not self.varlen_k and not self.even_rows:
            yield "uneven_rows"

    def gathered(self) -> "AttentionProblem":
        """The same call on dense keys that were copied out of their pages."""
        return replace(self, page_size=0, total_k=None, used_k=True, even_rows=True)

    def validate(self) -> None:
        """Raises ValueError naming the argument for values that no attention call can have."""
        for name in ("batch", "seqlen_q", "seqlen_k", "page_size", "kv_group"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.heads_q < 1 or self.heads_k < 1 or self.heads_q % self.heads_k:
            raise ValueError(
                "q must have a whole multiple of k's heads,"
                f" got {self.heads_q} query and {self.heads_k} key heads"
            )
        for name, dim, most in (
            ("q", self.head_dim, MAX_HEAD_DIM),
            ("v", self.head_dim_v, MAX_HEAD_DIM_V),
        ):
            if not 1 <= dim <= most:
                raise ValueError(f"{name} must have a head_dim of 1 to {most}, got {dim}")
        for name in ("dtype", "kv_dtype", "out_dtype"):
            if getattr(self, name) not in ITEM_BITS:
                raise ValueError(
                    f"{name} must be one of {', '.join(ITEM_BITS)}, got {getattr(self, name)}"
                )
        if not math.isfinite(self.scale):
            raise ValueError(f"softmax_scale must be finite, got {self.scale}")
        check_factor("softmax_scale", self.scale)
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"softcap must be finite and >= 0 (0 = off), got {self.softcap}")
        check_factor("softcap", self.softcap, zero="off")
        if not 0.0 <= self.dropout_p <= 1.0:
            raise ValueError(f"dropout_p must be within [0, 1], got {self.dropout_p}")
        if len(self.dropout_origin) != 4:
            raise ValueError(
                f"dropout_origin must be (batch, head, row, column), got {self.dropout_origin}"
            )
        if self.num_splits < 0:
            raise ValueError(
                f"num_splits must be >= 0, got {self.num_splits}"
                " (0 = choose, 1 = do not split, n = split in n)"
            )

    def flops(self, backward: bool = False) -> int:
        """The FLOPs: two for each multiply-add over visible pairs, of 2 products forward and 5
        backward."""
        pairs = self.batch * self.heads_q * self.mask.count_visible(self.seqlen_q, self.seqlen_k)
        if backward:
            return pairs * (6 * self.head_dim + 4 * self.head_dim_v)
        return pairs * 2 * (self.head_dim + self.head_dim_v)

    def bytes(self, backward: bool = False) -> int:
        """The fewest bytes that must move: each input read once, each output written once."""
        rows_q = self.total_q if self.total_q is not None else self.batch * self.seqlen_q
        rows_k = self.total_k if self.total_k is not None else self.batch * self.seqlen_k
        q = rows_q * self.heads_q * self.head_dim * ITEM_BITS[self.dtype] // 8
        out = rows_q * self.heads_q * self.head_dim_v * ITEM_BITS[self.out_dtype] // 8
        dims = self.head_dim + self.head_dim_v
        kv = rows_k * self.heads_k * dims * ITEM_BITS[self.kv_dtype] // 8
        lse = rows_q * self.heads_q * 4
        # The backward reads q, k, v, out, dout, lse and writes dq, dk, dv.
        return 2 * (q + kv + out) + lse if backward else q + kv + out + lse

    def key(self) -> str:
        """One readable, stable line that names the problem: what differs from the defaults."""
        parts = [
            f"{self.batch}x{self.seqlen_q}x{self.seqlen_k}",
            f"h{self.heads_q}/{self.heads_k}",
            f"d{self.head_dim}"
            + (f"/{self.head_dim_v}" if "head_dims_differ" in self.features() else ""),
            self.dtype if self.kv_dtype == self.dtype else f"{self.dtype}/{self.kv_dtype}",
        ]
        skip = {"batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"}
        skip |= {"dtype", "kv_dtype", "out_dtype", "scale", "mask"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in skip and value != field.default:
                parts.append(field.name if value is True else f"{field.name}={value}")
        if self.mask != MaskSpec():
            parts.append("causal" if self.mask == MaskSpec.of(True) else _mask_words(self.mask))
        return " ".join(parts)


def _mask_words(mask: MaskSpec) -> str:
    words = f"window={mask.left},{mask.right}" + (f",{mask.first}" if mask.first else "")
    words += "" if mask.bottom_right else ",top-left"
    return words + (f",shift={mask.shift}" if mask.shift else "")


# For each field: its name if it is one of Lengths, and how it is written and read.
_SLOTS = [
    (field.name if field.name in Lengths._fields else "", slot.__set__, slot.__get__)
    for field in fields(AttentionProblem)
    for slot in [getattr(AttentionProblem, field.name)]
]
_KINDS = {field.name: field.type for field in fields(AttentionProblem)}


def _plain(name: str, value: Any) -> Any:
    """A fact as a plain Python value. Raises TypeError naming it."""
    kind = _KINDS.get(name)
    if name == "dropout_origin":
        return wholes(name, value)
    if value is None and kind == int | None:
        return None
    if kind in (int, int | None):
        return whole(name, value)
    if kind is float:
        return real(name, value)
    if kind is bool:
        return truth(name, value)
    return value


# The features of calls, as reasons and the documentation call them.
FEATURES = {
    "causal": "causal mask",
    "window": "sliding window",
    "first_keys": "leading keys that stay visible beside a window",
    "diagonal": "shifted or top-left mask diagonal",
    "alibi": "ALiBi slopes",
    "bias": "additive bias",
    "rel_bias": "bias by relative position",
    "sink": "sink logits",
    "softcap": "softcap",
    "dropout": "dropout",
    "origins": "a place in the dropout mask of each sequence",
    "return_lse": "returned log-sum-exp",
    "return_probs": "returned probabilities",
    "max_scores": "returned largest scores",
    "varlen": "packed sequences",
    "seqused": "lengths used of each sequence",
    "paged": "paged KV cache",
    "kv_batch_idx": "cache rows by index",
    "leftpad_k": "left-padded cache",
    "q_offsets": "a mask diagonal of each sequence",
    "tree_mask": "tree mask over the new tokens",
    "key_ranges": "key ranges of rows",
    "block_mask": "block mask",
    "gqa": "fewer KV heads than query heads",
    "head_dims_differ": "V of another head dim than Q and K",
    "float_out": "float32 output of 16-bit inputs",
    "fp8": "fp8 inputs",
    "quantized_kv": "quantised KV cache",
    "split_kv": "forced split of the keys (num_splits > 1)",
    "backward": "a later backward",
    "bias_grad": "gradient of the bias",
    "rel_bias_grad": "gradient of the bias by relative position",
    "deterministic": "deterministic backward",
    "unaligned": "bases or strides off 16 bytes",
    "uneven_rows": "batch strides of K or V that are no multiples of row strides, or 2^30 rows",
}

# Facts that are features by themselves.
_FLAGS = (
    "alibi",
    "bias",
    "rel_bias",
    "sink",
    "tree_mask",
    "kv_batch_idx",
    "leftpad_k",
    "q_offsets",
    "key_ranges",
)
_FLAGS += (
    "block_mask",
    "origins",
    "return_lse",
    "return_probs",
    "max_scores",
    "bias_grad",
    "rel_bias_grad",
)
