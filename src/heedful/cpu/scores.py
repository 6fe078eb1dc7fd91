"""Code that forward and backward share: one tile of keys or values, of scores, of dropout.

Dimension key as in blocks.py. Scores stay in natural units: a row's maximum is then exact, and
with it the lse and the probability of a row's only key, and no bias overflows.
"""

import math
import threading

import torch

from heedful.core.base.far import far_lse
from heedful.core.call.operands import Operands
from heedful.core.call.problem import (
    LATENT_ROW_DIM_V,
    LATENT_ROW_GROUP,
    LATENT_ROWS,
    AttentionProblem,
)
from heedful.cpu.block_lists import shown
from heedful.cpu.blocks import Block, Scratch, query_rows, whole_vectors
from heedful.cpu.philox import keep_tile

LOG2E = math.log2(math.e)
# Tiles whose position masks are kept: along the diagonal they repeat.
REMEMBERED_MASKS = 8
# Least sides and greatest depth, with the column, of products that add a column's term last (MKL,
# AVX2 and AVX-512): in others a row's only score minus itself may differ from 0 by a rounding.
FOLDED_SIDE, FOLDED_DEPTH = 64, 256
# Terms of a score that are summed in one chain. A product adds term to term: the rounding error of
# 128 terms is 1.4 times that of two sums of 64, which take as long (one core of an AMD EPYC, MKL).
TERMS = 64
# Bytes of scratch that a thread keeps from call to call: fresh memory has to be mapped page by
# page, which took up to a tenth of a call of 2 MiB tensors.
KEPT = 16 << 20
# Bytes of keys and values of a block that a thread may hold in scratch precision.
HELD = 64 << 20

_threads = threading.local()


def _scratch_of_thread(double: bool) -> Scratch:
    """This thread's own, of float64 or of float32."""
    kept = _threads.__dict__.setdefault("scratch", {})
    if double not in kept:
        kept[double] = Scratch(torch.float64 if double else torch.float32)
    return kept[double]


class ThreadScratch:
    """A context with a thread's float32 scratch; at its end all but KEPT bytes are freed."""

    def __enter__(self) -> Scratch:
        self.scratch = _scratch_of_thread(False)
        return self.scratch

    def __exit__(self, *error) -> None:
        leave(self.scratch, error[0] is not None)


def leave(scratch: Scratch, failed: bool) -> None:
    """Frees scratch down to KEPT bytes; all of it after an error, which may have left tensors that
    later calls cannot use."""
    if failed:
        scratch.clear()
    else:
        scratch.trim(KEPT)


class Tiles:
    """A context that loads and computes tiles of one call, in its thread's scratch; at its end all
    but KEPT bytes of that are freed."""

    def __init__(self, problem: AttentionProblem, x: Operands):
        self.problem, self.x = problem, x
        self.scratch = _scratch_of_thread(x.q.dtype == torch.float64)
        self.low = low_precision(x)
        # The |lse| from which on probabilities are made from maximum and sum.
        self.far_lse = far_lse(x.q.element_size())
        # The factor of queries before their products with keys.
        self.q_scale = problem.scale / problem.softcap if problem.softcap > 0 else problem.scale
        # Whether scores are plain products of queries and keys.
        mods = x.alibi_slopes, x.bias, x.rel_bias
        self.plain = problem.softcap == 0 and all(mod is None for mod in mods)
        self.seed = int(x.seed.reshape(-1)[0]) if problem.dropout_p > 0 else 0
        self._hidden: dict[tuple, torch.Tensor] = {}
        # The block whose keys are held, which of them, and what is held of them by name.
        self._holder: Block | None = None
        self._seen = range(0)
        self._held: dict[str, torch.Tensor] = {}
        self._parts: dict[tuple[str, range], torch.Tensor] = {}

    def load_q(self, block: Block, rows: range, name: str = "q") -> torch.Tensor:
        """Queries as real values times q_scale, (B G, R M, D + 1); the last column is for `refer`.

        name: of the scratch buffer."""
        q = block.load_queries(self.x.q, rows, self.scratch, name, column=True)
        values = q[..., :-1]
        values *= self.q_scale
        if self.x.q_descale is not None:
            b, g = block.batches, block.kv_heads
            values *= self.x.q_descale[b.start : b.stop, g.start : g.stop].reshape(-1, 1, 1)
        return q

    def __enter__(self) -> "Tiles":
        return self

    def __exit__(self, *error) -> None:
        leave(self.scratch, error[0] is not None)

    def hold_keys(self, block: Block) -> None:
        """Loads keys and values of the block once for all query tiles, if there are several and the
        keys are not too many."""
        if block is self._holder:
            return
        self._holder, self._held, self._parts, self._seen = block, {}, {}, range(0)
        if block.len_q <= query_rows(self.problem):
            return
        seen = block.seen()
        dims = self.problem.head_dim + self.problem.head_dim_v
        if block.heads * len(seen) * dims * self.scratch.dtype.itemsize <= HELD:
            self._seen = seen

    def load_k(self, block: Block, cols: range) -> torch.Tensor:
        """Keys as real values, and a column of ones, (B G, N, D + 1)."""
        x = self.x
        return self._load(block, cols, "k", x.k, x.k_descale, x.k_shift, ones=True)

    def load_v(
        self, block: Block, cols: range, dtype: torch.dtype | None = None, ones: bool = False
    ) -> torch.Tensor:
        """Values as real values, (B G, N, E), in scratch precision or `dtype`; with `ones`, a
        column of ones follows, (B G, N, E + 1)."""
        x = self.x
        return self._load(block, cols, "v", x.v, x.v_descale, x.v_shift, dtype, ones)

    def rounded(self, tile: torch.Tensor, name: str) -> torch.Tensor:
        """A tile as an operand of `add_product`: in self.low if there is one."""
        return (
            tile
            if self.low is None
            else self.scratch.take(name, *tile.shape, dtype=self.low).copy_(tile)
        )

    def add_product(self, acc, a, b, alpha: float = 1.0, begin: bool = False) -> None:
        """acc += alpha a b, for a and b in self.low or in scratch precision; acc is in the latter.
        begin: what acc holds is ignored.

        A product of low-precision tiles is summed in float32 and rounded once per tile.
        """
        if self.low is None:
            multiply(acc, a, b, beta=0 if begin else 1, alpha=alpha)
            return
        product = self.scratch.take("product", *acc.shape, dtype=self.low)
        multiply(product, a, b)
        if begin:
            torch.mul(product, alpha, out=acc)
        else:
            acc.add_(product, alpha=alpha)

    def _load(self, block: Block, cols: range, name: str, *where, **more) -> torch.Tensor:
        """Keys `cols` of a storage, from what is held of it if the block's keys are."""
        if not (block is self._holder and self._seen):
            return self._read(block, cols, name, *where, **more)
        part = self._parts.get((name, cols))
        if part is None:
            if name not in self._held:
                self._held[name] = self._read(block, self._seen, name, *where, **more)
            begin = self._seen.start
            part = self._held[name][:, cols.start - begin : cols.stop - begin]
            self._parts[name, cols] = part
        return part

    def _read(
        self, block: Block, cols: range, name: str, storage, descale, shift, dtype=None, ones=False
    ) -> torch.Tensor:
        """Keys `cols` of a storage as real values, with a column of ones if asked for."""
        stored = block.keys(storage, cols)
        if self.problem.kv_dtype == "int4":
            stored = unpack_int4(stored)
        if self.problem.kv_dtype == LATENT_ROWS:
            dim = self.problem.head_dim if name == "k" else self.problem.head_dim_v
            stored = latent_values(stored)[..., :dim]
        stored = stored.transpose(1, 2)
        as_is = stored.dtype == (dtype or self.scratch.dtype) and descale is None and shift is None
        if as_is and not ones:
            return stored.flatten(0, 1)
        *sizes, dim = stored.shape
        whole = self.scratch.take(name, *sizes, dim + ones, dtype=dtype)
        tile = whole[..., :dim].copy_(stored)
        whole[..., dim:].fill_(1.0)
        for factor, apply in ((descale, tile.mul_), (shift, tile.add_)):
            if factor is None:
                continue
            if self.problem.kv_group:
                part = block.keys(factor, cols).transpose(1, 2)
                apply(part.repeat_interleave(self.problem.kv_group, -1))
            else:
                b, g = block.batches, block.kv_heads
                apply(factor[b.start : b.stop, g.start : g.stop, None, None])
        return whole.flatten(0, 1)

    def refer(self, q: torch.Tensor, reference: torch.Tensor) -> None:
        """Stores minus the reference, which `probabilities` subtracts from scores, in the last
        column of a query tile."""
        torch.neg(reference, out=q[..., -1:])

    def scores(self, block: Block, rows: range, cols: range, masked: bool, q, k) -> torch.Tensor:
        """Scores (B G, R M, N), -inf where hidden.

        masked: whether the position may hide any of them.
        """
        s, _ = self._seen_scores(block, rows, cols, q, k)
        if masked:
            heads = self.by_head(block, s, rows)
            # Hidden scores that are infinite or no number would not become -inf by addition.
            self._clear(heads, block, rows, cols)
            heads.add_(self._hidden_by_position(block, rows, cols))
        self._hide(block, rows, cols, s, -torch.inf)
        return s

    def probabilities(
        self, block: Block, rows: range, cols: range, masked: bool, q, k, reference
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """e^(scores - reference) (B G, R M, N), 0 where hidden, and with softcap tanh's own tile.

        reference: (B G, R M, 1), also stored in q by `refer`. masked: whether the position may hide
        any.

        The scores are those that `scores` gives, to the bit: of forward and backward alike.
        """
        tanh = None
        if self.plain and q.shape[-1] - 1 <= TERMS and self.is_folded(q, k):
            p = self.scratch.take("s", block.heads, q.shape[1], len(cols))
            multiply(p, q, k.mT)
        else:
            p, tanh = self._seen_scores(block, rows, cols, q, k)
            p.sub_(reference)
        exp_(p)
        if masked:
            self._clear(self.by_head(block, p, rows), block, rows, cols)
        self._hide(block, rows, cols, p, 0.0)
        return p, tanh

    def _seen_scores(
        self, block: Block, rows: range, cols: range, q, k
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores as if none were hidden, and with softcap the tile of tanh."""
        problem, x = self.problem, self.x
        s = self.scratch.take("s", block.heads, q.shape[1], len(cols))
        dim = q.shape[-1] - 1
        for begin in range(0, dim, TERMS):
            end = min(begin + TERMS, dim)
            multiply(s, q[..., begin:end], k[..., begin:end].mT, beta=float(begin > 0))
        tanh = None
        if problem.softcap > 0:
            tanh = torch.tanh(s, out=self.scratch.take("tanh", *s.shape))
            torch.mul(tanh, problem.softcap, out=s)
        if x.alibi_slopes is not None:
            slopes = block.split(x.alibi_slopes)[..., None, None]
            distance = self._distance(block, rows, cols).abs()
            self.by_head(block, s, rows).addcmul_(slopes, distance, value=-1.0)
        if x.rel_bias is not None:
            self.by_head(block, s, rows).add_(self._relative(block, rows, cols))
        if x.bias is not None:
            bias = block.split(x.bias)[..., rows.start : rows.stop, cols.start : cols.stop]
            self.by_head(block, s, rows).add_(bias)
        return s, tanh

    def _relative(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """The entries of rel_bias of a tile, (1, G, R, M, N): diagonals are windows of one row."""
        heads = block.query_heads
        of_heads = self.x.rel_bias[heads.start : heads.stop]
        least, last = self.least_entry(block, rows, cols), of_heads.shape[1] - 1
        count = len(rows) + len(cols) - 1
        # From the greatest diagonal, that of the last query and the first key, to the least.
        entry = torch.arange(least + count - 1, least - 1, -1, device="cpu").clamp_(0, last)
        windows = of_heads[:, entry].to(self.scratch.dtype).unfold(-1, len(cols), 1)
        return windows.flip(1).unflatten(0, (1, len(block.kv_heads), -1))

    def least_entry(self, block: Block, rows: range, cols: range) -> int:
        """The entry of rel_bias of a tile's first query and last key, of which there may be none:
        each later query or earlier key has the next."""
        off = block.mask.offset(block.len_q, block.len_k)
        return rows.start + off - (cols.stop - 1) + self.x.rel_bias.shape[1] // 2

    def is_folded(self, a, b) -> bool:
        """Whether a product a b^T may include the last columns of a and b, where b's is ones: this
        adds a's last column to every term of a row, and saves a pass over the product."""
        (_, rows, depth), cols = a.shape, b.shape[1]
        fits = rows >= FOLDED_SIDE and cols >= FOLDED_SIDE and depth <= FOLDED_DEPTH
        return fits and self.scratch.dtype == torch.float32

    def by_head(self, block: Block, tile: torch.Tensor, rows: range) -> torch.Tensor:
        """A tile (B G, R M, ...) as (B, G, R, M, ...)."""
        b, g = len(block.batches), len(block.kv_heads)
        return tile.view(b, g, self.problem.group, len(rows), *tile.shape[2:])

    def dropped(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """Which probabilities dropout takes: bool (B G, R M, N)."""
        batches, origin = block.batches, self.problem.dropout_origin
        if block.seq is not None:
            batches, origin = range(1), block.seq.origin
        which = self.seed, self.problem.dropout_p, batches, block.query_heads, rows, cols
        keep = keep_tile(*which, origin)
        return ~keep.reshape(block.heads, -1, len(cols))

    def _distance(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """j - i - off of every score of the tile, in scratch precision, (M, N)."""
        off = block.mask.offset(block.len_q, block.len_k)
        i = torch.arange(rows.start, rows.stop, dtype=self.scratch.dtype, device="cpu")
        j = torch.arange(cols.start, cols.stop, dtype=self.scratch.dtype, device="cpu")
        return (j - off) - i[:, None]

    def _sides(self, block: Block, rows: range, cols: range) -> tuple[int, int]:
        """The first key minus the position of the first query among all keys, and how many leading
        keys of the tile no window hides."""
        mask = block.mask
        off = mask.offset(block.len_q, block.len_k)
        first = max(0, min(mask.first - cols.start, len(cols)))
        return cols.start - rows.start - off, first

    def _clear(self, heads: torch.Tensor, block: Block, rows: range, cols: range) -> None:
        """Zeros where the causal mask or window hides, in a tile (B, G, R, M, N)."""
        mask, (distance, first) = block.mask, self._sides(block, rows, cols)
        if mask.right >= 0:
            heads.tril_(mask.right - distance)
        if mask.left >= 0 and first < len(cols):
            heads[..., first:].triu_(-mask.left - distance - first)

    def _hidden_by_position(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """-inf where the causal mask or window hides, else 0: (M, N)."""
        mask, (distance, first) = block.mask, self._sides(block, rows, cols)
        key = distance, first, len(rows), len(cols)
        if key not in self._hidden:
            hidden = torch.full(key[2:], -torch.inf, dtype=self.scratch.dtype, device="cpu")
            hidden.triu_(mask.right - distance + 1 if mask.right >= 0 else len(cols))
            if mask.left >= 0 and first < len(cols):
                earlier = torch.full_like(hidden[:, first:], -torch.inf)
                hidden[:, first:] += earlier.tril_(-mask.left - distance - first - 1)
            if len(self._hidden) >= REMEMBERED_MASKS:
                self._hidden.clear()
            self._hidden[key] = hidden
        return self._hidden[key]

    def _hide(self, block: Block, rows: range, cols: range, tile, value: float) -> None:
        """Fills in what tree_mask, key_ranges and lists of tiles hide."""
        heads = self.by_head(block, tile, rows)
        if self.x.tree_mask is not None:
            heads.masked_fill_(self._hidden_by_tree(block, rows, cols), value)
        if self.x.key_ranges is not None:
            j = torch.arange(cols.start, cols.stop, dtype=torch.int32, device="cpu")
            begin, end = block.ranges(rows)[..., None].unbind(-2)
            heads.masked_fill_(~((begin <= j) & (j < end)).any(-2), value)
        if self.x.block_rows is not None:
            heads.masked_fill_(~shown(block, rows, cols), value)

    def _hidden_by_tree(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """Which scores tree_mask hides: bool (B, 1, 1, M, N)."""
        b, old = block.batches, block.len_k - block.len_q
        hidden = torch.zeros(len(b), len(rows), len(cols), dtype=torch.bool, device="cpu")
        new = range(max(cols.start, old), max(cols.stop, old))
        seen = self.x.tree_mask[b.start : b.stop, rows.start : rows.stop]
        hidden[..., new.start - cols.start :] = ~seen[..., new.start - old : new.stop - old]
        return hidden[:, None, None]


def low_precision(x: Operands) -> torch.dtype | None:
    """bfloat16 where torch multiplies it in hardware: probabilities and dS are rounded to it.

    Scores and dP are always float32 products, since exp and a subtraction magnify their errors.
    """
    plain = x.q.dtype == x.k.dtype == torch.bfloat16
    if plain and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return None


def slack(lse: torch.Tensor) -> torch.Tensor:
    """By how much rounding may change log-sum-exps of the same scores: these are alike."""
    return (lse.abs() + 1.0) * 2.0**-20


def multiply(out, a, b, beta: float = 0.0, alpha: float = 1.0) -> None:
    """out = beta out + alpha a b for each of the matrices of a tile."""
    out.baddbmm_(a, b, beta=beta, alpha=alpha)


def exp_(s: torch.Tensor) -> torch.Tensor:
    """e^s of a scratch tensor, in place.

    By exp2: torch hands exp to MKL, which takes four times as long on AMD, and on Intel up to 100
    times where results underflow. It runs over whole vectors: torch computes the last elements,
    fewer than a vector, by another function, so that bits would depend on the place.
    """
    size = whole_vectors(s.numel())
    vectors = s if size == s.numel() else s.as_strided((size,), (1,))
    vectors.mul_(LOG2E).exp2_()
    return s


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 (..., dim / 2) -> int8 (..., dim), the even value from the low nibble."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2).to(torch.int8)
    return (nibbles ^ 8) - 8


def latent_values(packed: torch.Tensor) -> torch.Tensor:
    """float32 (..., 576) of rows (..., 656)."""
    ends = LATENT_ROW_DIM_V + LATENT_ROW_DIM_V // LATENT_ROW_GROUP * 4
    values = packed[..., :LATENT_ROW_DIM_V].contiguous().view(torch.float8_e4m3fn).float()
    scale = packed[..., LATENT_ROW_DIM_V:ends].contiguous().view(torch.float32)
    rotary = packed[..., ends:].contiguous().view(torch.bfloat16).float()
    latent = values.unflatten(-1, (-1, LATENT_ROW_GROUP)) * scale[..., None]
    return torch.cat([latent.flatten(-2), rotary], -1)
