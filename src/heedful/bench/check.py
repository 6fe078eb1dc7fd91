"""No figure without a result that is right: every peer's output is checked against float64.

The budget is that of the test-suite: an error may be at most twice what eager PyTorch makes in the
same dtype on the same inputs (three times for gradients) plus one rounding of the output's dtype,
in the maximum (the larger of the two slices') and as RMS; what eager makes of 8-bit inputs,
reference/eager.py says. Checked are all rows of the first and the last (batch, KV head), or (packed
sequence, KV head), all the query heads of that KV head included; the reference walks them in blocks
of rows, so that the longest cases fit.

Dimension key: H query heads of one KV head, M query rows, N keys, D qk dim, E v dim.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from heedful.bench.cases import Case
from heedful.bench.peers import Inputs
from heedful.reference.budget import Error, allowed
from heedful.reference.eager import as_operand, twin_dtype

# Scores that a block of the reference holds.
_BLOCK_BYTES = 512 * 1024**2


class Results(NamedTuple):
    """out (..., Sq, heads, E) and, of a backward, dq, dk and dv in the shapes of q, k and v."""

    out: torch.Tensor
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


@dataclass(frozen=True)
class Slice:
    """One (batch, KV head) of a case: the truth and the budget of each result. rows: of the batch
    row, the tokens of its sequence."""

    batch: int
    rows: slice
    kv_head: int
    group: int
    exact: Results
    largest: dict[str, float]
    rms: dict[str, float]

    def of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This slice of a peer's result, (H or 1, rows, dim) in float64."""
        heads = slice(self.kv_head * self.group, (self.kv_head + 1) * self.group)
        if name in ("dk", "dv"):
            heads = slice(self.kv_head, self.kv_head + 1)
        return whole[self.batch, self.rows, heads].transpose(0, 1).double()


class Checker:
    """The reference of one case, computed once for all peers."""

    def __init__(self, case: Case, inputs: Inputs):
        p = case.problem
        wanted = {(0, 0), (p.batch - 1, p.heads_k - 1)}
        self.slices = [_slice(case, inputs, *where) for where in sorted(wanted)]
        # One draw's largest error says little: in float32 that of two slices differs by half. So a
        # result may err as far as either slice allows.
        budgets = [part.largest for part in self.slices]
        largest = {name: max(budget[name] for budget in budgets) for name in budgets[0]}
        self.slices = [replace(part, largest=largest) for part in self.slices]

    def why_wrong(self, got: Results) -> str | None:
        """What is outside its budget, or None."""
        for part in self.slices:
            for name, exact in part.exact._asdict().items():
                whole = getattr(got, name)
                if exact is None or whole is None:
                    continue
                reason = _why_outside(part, name, part.of(name, whole), exact)
                if reason:
                    return reason
        return None


def _why_outside(part: Slice, name: str, got: torch.Tensor, exact: torch.Tensor) -> str | None:
    where = f"{name} of batch {part.batch}, KV head {part.kv_head}"
    if got.shape != exact.shape:
        return f"{where} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    if not got.isfinite().all():
        return f"{where} is not finite"
    largest, rms = _errors(got, exact)
    for kind, found, bound in (
        ("largest", largest, part.largest[name]),
        ("rms", rms, part.rms[name]),
    ):
        if not found <= bound:
            return f"{where}: {kind} error {found:.3g} exceeds its budget {bound:.3g}"
    return None


def _errors(got: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    difference = (got - exact).abs()
    return float(difference.max()), float(difference.square().mean().sqrt())


def _slice(case: Case, inputs: Inputs, sequence: int, kv_head: int) -> Slice:
    p, batch, rows = case.problem, sequence, slice(None)
    if case.lengths:
        batch, rows = 0, slice(*case.starts[sequence : sequence + 2])
    heads = slice(kv_head * p.group, (kv_head + 1) * p.group)
    q_HMD, dout_HME = (x[batch, rows, heads].transpose(0, 1) for x in (inputs.q, inputs.dout))
    operands = (q_HMD, inputs.k[batch, rows, kv_head], inputs.v[batch, rows, kv_head])
    if case.direction == "backward":
        operands += (dout_HME,)
    exact = attend(case, torch.float64, torch.float64, *operands)
    twin = attend(case, torch.float32, twin_dtype(inputs.q.dtype), *operands)
    largest, rms = {}, {}
    half_eps = torch.finfo(getattr(torch, p.out_dtype)).eps / 2
    for name, want in exact._asdict().items():
        if want is None:
            continue
        eager = Error(*_errors(getattr(twin, name).double(), want))
        once = Error(
            half_eps * float(want.abs().max()), half_eps * float(want.square().mean().sqrt())
        )
        budget = allowed(name, eager, once)
        largest[name], rms[name] = budget.largest, budget.rms
    return Slice(batch, rows, kv_head, p.group, exact, largest, rms)


def attend(
    case: Case,
    wide: torch.dtype,
    narrow: torch.dtype,
    q_HMD: torch.Tensor,
    k_ND: torch.Tensor,
    v_NE: torch.Tensor,
    dout_HME: torch.Tensor | None = None,
) -> Results:
    """Attention of the query heads of one KV head, and its gradients if dout is given.

    Products and sums are computed in `wide`; what eager code would store (scores, probabilities,
    results, their gradients) is rounded to `narrow`. dk and dv have a leading dim of 1.
    """
    heads, rows, _ = q_HMD.shape
    keys = k_ND.shape[0]
    block = max(1, min(rows, _BLOCK_BYTES // (heads * keys * wide.itemsize)))
    k, v = k_ND.to(wide), v_NE.to(wide)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    outs, dqs = [], []
    for begin in range(0, rows, block):
        part = slice(begin, begin + block)
        q = q_HMD[:, part].to(wide)
        s = (q @ k.T).to(narrow) * case.problem.scale
        p = torch.softmax(_masked(case, s, begin, rows, keys).to(wide), -1).to(narrow)
        weights = p if narrow == torch.float64 else as_operand(p, v_NE.dtype)
        out = (weights.to(wide) @ v).to(narrow)
        outs.append(out)
        if dout_HME is None:
            continue
        dout = dout_HME[:, part].to(wide)
        dp = (dout @ v.T).to(narrow).to(wide)
        delta = (out.to(wide) * dout).sum(-1, keepdim=True)
        ds = (p.to(wide) * (dp - delta)).to(narrow)
        dqk = (ds * case.problem.scale).to(wide)
        dqs.append((dqk @ k).to(narrow))
        dk += (dqk.mT @ q).sum(0)
        dv += (p.to(wide).mT @ dout).sum(0)
    out = torch.cat(outs, 1)
    if dout_HME is None:
        return Results(out)
    return Results(out, torch.cat(dqs, 1), dk[None].to(narrow), dv[None].to(narrow))


def _masked(case: Case, s_HMN: torch.Tensor, begin: int, rows: int, keys: int) -> torch.Tensor:
    mask = case.problem.mask
    if not mask.bounded:
        return s_HMN
    assert mask.first == 0, "no benchmark case has leading keys"
    i = torch.arange(begin, begin + s_HMN.shape[1], device=s_HMN.device)[:, None]
    distance = torch.arange(keys, device=s_HMN.device) - i - mask.offset(rows, keys)
    hidden = (
        distance > mask.right if mask.right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    )
    if mask.left >= 0:
        hidden |= distance < -mask.left
    return s_HMN.masked_fill(hidden, -torch.inf)
