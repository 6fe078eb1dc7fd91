"""What forward and backward recompute alike: one tile of keys or values, of scores, of dropout.

Dimension key as in blocks.py. Scores stay in natural units: a row's maximum is then exact, and
with it the lse and the probability of a row's only key, and no bias overflows.
"""

import math

import torch

from heedful.core.operands import Operands
from heedful.core.problem import AttentionProblem
from heedful.cpu.blocks import Block, Scratch, whole_vectors
from heedful.cpu.philox import keep_tile

LOG2E = math.log2(math.e)
# Masked tiles whose hidden scores are remembered: the diagonal repeats itself.
REMEMBERED_MASKS = 8


class Tiles:
    """Loads and computes tiles of one call; owns its scratch."""

    def __init__(self, problem: AttentionProblem, x: Operands):
        self.problem, self.x = problem, x
        self.scratch = Scratch(torch.float64 if x.q.dtype == torch.float64 else torch.float32)
        self.low = _low_precision(problem, x)
        self.seed = int(x.seed.reshape(-1)[0]) if problem.dropout_p > 0 else 0
        self._hidden: dict[tuple, torch.Tensor] = {}

    def load_q(self, block: Block, rows: range) -> torch.Tensor:
        """Queries as real values, (B G, R M, D)."""
        q = block.load_queries(self.x.q, rows, self.scratch, "q")
        if self.x.q_descale is not None:
            b, g = block.batches, block.kv_heads
            q *= self.x.q_descale[b.start : b.stop, g.start : g.stop].reshape(-1, 1, 1)
        return q

    def load_k(self, block: Block, cols: range) -> torch.Tensor:
        """Keys as real values, (B G, N, D)."""
        return self._load(block, cols, "k", self.x.k, self.x.k_descale, self.x.k_shift)

    def load_v(self, block: Block, cols: range, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Values as real values, (B G, N, E), in scratch precision or `dtype`."""
        return self._load(block, cols, "v", self.x.v, self.x.v_descale, self.x.v_shift, dtype)

    def rounded(self, tile: torch.Tensor, name: str) -> torch.Tensor:
        """A tile as an operand of `add_product`: in self.low if there is one."""
        return (
            tile
            if self.low is None
            else self.scratch.take(name, *tile.shape, dtype=self.low).copy_(tile)
        )

    def add_product(self, acc, a, b, alpha: float = 1.0, begin: bool = False) -> None:
        """acc += alpha a b, for a and b in self.low or in scratch precision; acc is in the latter.
        begin: what acc holds counts for nothing.

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

    def _load(self, block: Block, cols: range, name: str, storage, descale, shift, dtype=None):
        stored = block.keys(storage, cols)
        if self.problem.kv_dtype == "int4":
            stored = unpack_int4(stored)
        stored = stored.transpose(1, 2)
        tile = self.scratch.take(name, *stored.shape, dtype=dtype).copy_(stored)
        for factor, apply in ((descale, tile.mul_), (shift, tile.add_)):
            if factor is None:
                continue
            if self.problem.kv_group:
                own = block.keys(factor, cols).transpose(1, 2)
                apply(own.repeat_interleave(self.problem.kv_group, -1))
            else:
                b, g = block.batches, block.kv_heads
                apply(factor[b.start : b.stop, g.start : g.stop, None, None])
        return tile.flatten(0, 1)

    def scores(
        self, block: Block, rows: range, cols: range, masked: bool, q, k
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores (B G, R M, N), -inf where hidden, and with softcap tanh's own tile.

        masked: whether the position may hide any of them.
        """
        problem, x = self.problem, self.x
        s = self.scratch.take("s", block.heads, q.shape[1], len(cols))
        tanh = None
        if problem.softcap > 0:
            tanh = self.scratch.take("tanh", *s.shape)
            multiply(tanh, q, k.mT, alpha=problem.scale / problem.softcap)
            tanh.tanh_()
            torch.mul(tanh, problem.softcap, out=s)
        else:
            multiply(s, q, k.mT, alpha=problem.scale)
        s_heads = self.by_head(block, s, rows)
        if x.alibi_slopes is not None:
            slopes = block.split(x.alibi_slopes)[..., None, None]
            s_heads.addcmul_(slopes, self._distance(block, rows, cols).abs(), value=-1.0)
        if x.bias is not None:
            bias = block.split(x.bias)[..., rows.start : rows.stop, cols.start : cols.stop]
            s_heads.add_(bias)
        if masked:
            s_heads.masked_fill_(self._hidden_by_position(block, rows, cols), -torch.inf)
        if x.tree_mask is not None:
            s_heads.masked_fill_(self._hidden_by_tree(block, rows, cols), -torch.inf)
        return s, tanh

    def by_head(self, block: Block, tile: torch.Tensor, rows: range) -> torch.Tensor:
        """A tile (B G, R M, ...) as (B, G, R, M, ...)."""
        b, g = len(block.batches), len(block.kv_heads)
        return tile.view(b, g, self.problem.group, len(rows), *tile.shape[2:])

    def dropped(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """Which probabilities dropout takes: bool (B G, R M, N)."""
        keep = keep_tile(
            self.seed,
            self.problem.dropout_p,
            block.batches,
            block.query_heads,
            rows,
            cols,
            self.problem.dropout_origin,
        )
        return ~keep.reshape(block.heads, -1, len(cols))

    def _distance(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """j - i - off of every score of the tile, in scratch precision, (M, N)."""
        off = self.problem.mask.offset(block.len_q, block.len_k)
        i = torch.arange(rows.start, rows.stop, dtype=self.scratch.dtype)
        j = torch.arange(cols.start, cols.stop, dtype=self.scratch.dtype)
        return (j - off) - i[:, None]

    def _hidden_by_position(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """Which scores the causal mask or window hides: bool (M, N)."""
        mask = self.problem.mask
        off = mask.offset(block.len_q, block.len_k)
        first = max(0, min(mask.first - cols.start, len(cols)))
        key = (cols.start - rows.start - off, first, len(rows), len(cols))
        if key not in self._hidden:
            i, j = torch.arange(len(rows))[:, None], torch.arange(len(cols))
            distance = j - i + key[0]
            hidden = torch.zeros(distance.shape, dtype=torch.bool)
            if mask.left >= 0:
                hidden |= (distance < -mask.left) & (j >= first)
            if mask.right >= 0:
                hidden |= distance > mask.right
            if len(self._hidden) >= REMEMBERED_MASKS:
                self._hidden.clear()
            self._hidden[key] = hidden
        return self._hidden[key]

    def _hidden_by_tree(self, block: Block, rows: range, cols: range) -> torch.Tensor:
        """Which scores tree_mask hides: bool (B, 1, 1, M, N)."""
        b, old = block.batches, block.len_k - block.len_q
        hidden = torch.zeros(len(b), len(rows), len(cols), dtype=torch.bool)
        new = range(max(cols.start, old), max(cols.stop, old))
        seen = self.x.tree_mask[b.start : b.stop, rows.start : rows.stop]
        hidden[..., new.start - cols.start :] = ~seen[..., new.start - old : new.stop - old]
        return hidden[:, None, None]


def _low_precision(problem: AttentionProblem, x: Operands) -> torch.dtype | None:
    """bfloat16 where torch multiplies it in hardware: probabilities and dS are rounded to it.

    Scores and dP, which exp and a subtraction magnify the errors of, are always float32 products.
    """
    plain = x.q.dtype == x.k.dtype == x.v.dtype == torch.bfloat16
    if plain and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return None


def multiply(out, a, b, beta: float = 0.0, alpha: float = 1.0) -> None:
    """out = beta out + alpha a b for each of the matrices of a tile."""
    out.baddbmm_(a, b, beta=beta, alpha=alpha)


def exp_(s: torch.Tensor) -> torch.Tensor:
    """e^s of a scratch tensor, in place.

    By exp2: torch hands exp to MKL, which on AMD takes four times as long. Over whole vectors: what
    is left of them torch computes by another function, so that bits would depend on the place.
    """
    vectors = s.as_strided((whole_vectors(s.numel()),), (1,))
    vectors.mul_(LOG2E).exp2_()
    return s


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 (..., dim / 2) -> int8 (..., dim), the even value from the low nibble."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2).to(torch.int8)
    return (nibbles ^ 8) - 8
