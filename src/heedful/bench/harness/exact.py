"""Attention of some rows of one KV head, in float64 and as eager PyTorch has it, for the check.

Dimension key: H query heads of one KV head, M query rows, N keys, D qk dim, E v dim.
"""

from typing import NamedTuple

import torch

from heedful.bench.harness.cases import Case
from heedful.reference.eager import as_operand, twin_dtype

# Scores that a block holds.
BLOCK_BYTES = 512 * 1024**2


class Results(NamedTuple):
    """out (..., Sq, heads, E) and, of a backward, dq, dk and dv in the shapes of q, k and v."""

    out: torch.Tensor | None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


class Operands(NamedTuple):
    """q, dout (H, M, D or E), k, v (N, D or E) of one KV head; dout is None of a forward."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None = None


def exact(case: Case, x: Operands, rows: torch.Tensor, keys: torch.Tensor) -> Results:
    """The truth: out and dq of query rows `rows`, (H, rows, dim), dk and dv of keys `keys`,
    (1, keys, dim), in float64."""
    return _Head(case, x, torch.float64, torch.float64).results(rows, keys)


def eager(case: Case, x: Operands, rows: torch.Tensor, keys: torch.Tensor) -> Results:
    """The same as eager PyTorch computes it in the case's dtype: float32 products and sums, one
    product a head, everything that such code would store rounded."""
    return _Head(case, x, torch.float32, twin_dtype(x.q.dtype)).results(rows, keys)


class _Head:
    """Products and sums in `wide`; what is stored (scores, probabilities, results, their gradients)
    is rounded to `narrow`."""

    def __init__(self, case: Case, x: Operands, wide: torch.dtype, narrow: torch.dtype):
        self.case, self.wide, self.narrow = case, wide, narrow
        heads, self.len_q, _ = x.q.shape
        self.len_k, self.stored = x.k.shape[0], x.v.dtype
        self.q, self.dout = x.q.to(wide), None if x.dout is None else x.dout.to(wide)
        # A product a head, as eager code has it: all heads in one would be summed more exactly.
        self.k, self.v = (a.to(wide).expand(heads, -1, -1) for a in (x.k, x.v))
        self.block = max(1, BLOCK_BYTES // max(1, heads * self.len_k * wide.itemsize))

    def results(self, rows: torch.Tensor, keys: torch.Tensor) -> Results:
        parts = [self._of_rows(part) for part in rows.split(self.block)]
        whole = [torch.cat(pieces, 1) for pieces in zip(*parts, strict=True)]
        if self.dout is not None:
            whole += self._of_keys(keys)
        return Results(*whole)

    def _scores(self, rows: torch.Tensor, k_HND: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The scores of query rows with keys, (H, rows, keys); -inf where hidden."""
        s = (self.q[:, rows] @ k_HND.mT).to(self.narrow) * self.case.problem.scale
        hidden = _hidden(self.case, rows, keys, self.len_q, self.len_k)
        return (s if hidden is None else s.masked_fill_(hidden, -torch.inf)).to(self.wide)

    def _softmax(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Probabilities of query rows, (H, rows, N), and what makes them of scores: the largest
        and the sum, (H, rows, 1). Rows without keys have 0."""
        every = torch.arange(self.len_k, device=rows.device)
        s = self._scores(rows, self.k, every)
        largest = s.amax(-1, keepdim=True).clamp_(min=torch.finfo(self.wide).min)
        p = s.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True).clamp_(min=torch.finfo(self.wide).tiny)
        return p.div_(total).to(self.narrow), largest, total

    def _out(self, p_HMN: torch.Tensor) -> torch.Tensor:
        exactly = self.narrow == torch.float64
        weights = p_HMN if exactly else as_operand(p_HMN, self.stored)
        return (weights.to(self.wide) @ self.v).to(self.narrow)

    def _dout(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.dout is not None
        return self.dout[:, rows]

    def _delta(self, out_HME: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (out_HME.to(self.wide) * self._dout(rows)).sum(-1, keepdim=True)

    def _ds(self, p: torch.Tensor, rows: torch.Tensor, v: torch.Tensor, delta) -> torch.Tensor:
        """The gradient of scores before their scale, from the probabilities of the same keys."""
        dp = (self._dout(rows) @ v.mT).to(self.narrow).to(self.wide)
        ds = (p.to(self.wide) * (dp - delta)).to(self.narrow)
        return (ds * self.case.problem.scale).to(self.wide)

    def _of_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """out of query rows and, of a backward, dq."""
        p, _, _ = self._softmax(rows)
        out = self._out(p)
        if self.dout is None:
            return (out,)
        ds = self._ds(p, rows, self.v, self._delta(out, rows))
        return out, (ds @ self.k).to(self.narrow)

    def _of_keys(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of keys: all query rows have a share in them."""
        k, v = self.k[:, keys], self.v[:, keys]
        dk, dv = torch.zeros_like(k[0]), torch.zeros_like(v[0])
        for rows in torch.arange(self.len_q, device=keys.device).split(self.block):
            p, largest, total = self._softmax(rows)
            delta = self._delta(self._out(p), rows)
            del p
            p = (self._scores(rows, k, keys) - largest).exp_().div_(total).to(self.narrow)
            ds = self._ds(p, rows, v, delta)
            dk += (ds.mT @ self.q[:, rows]).sum(0)
            dv += (p.to(self.wide).mT @ self._dout(rows)).sum(0)
        return dk[None].to(self.narrow), dv[None].to(self.narrow)


def _hidden(case: Case, rows: torch.Tensor, keys: torch.Tensor, len_q: int, len_k: int):
    """Which scores the mask hides, bool (rows, keys); None where there is no mask."""
    mask = case.problem.mask
    if not mask.bounded:
        return None
    assert mask.first == 0, "no benchmark case has leading keys"
    distance = keys - rows[:, None] - mask.offset(len_q, len_k)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if mask.right >= 0:
        hidden |= distance > mask.right
    if mask.left >= 0:
        hidden |= distance < -mask.left
    return hidden
