"""Checks every result against float64 before it gets a figure. For every batch entry (or packed
sequence) and every head it compares rows: the first, the last, and one drawn from every STRIDE of
them, so that no tile of a kernel is left out. All values must be finite.

The budget is that of the test-suite: an error may be at most twice what eager PyTorch makes in the
same dtype on the same inputs (three times for gradients) plus one rounding of the output's dtype,
in the maximum and as RMS; reference/eager.py defines eager attention on 8-bit inputs. Rows of an
output that see few keys and rows that see many, whose values are smaller, have separate budgets:
those that see 1 key, 2 to 3, 4 to 7 ... A budget is the largest of DRAWS pairs (entry, KV head) of
equal lengths. If a case has fewer and a result is outside, more inputs are drawn.

Dimension key: P (entry, KV head) of equal lengths, R rows, H heads of each.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from heedful.bench.harness.cases import Case
from heedful.bench.harness.exact import Operands, Results, eager, exact
from heedful.bench.harness.peers import Inputs, draw
from heedful.reference.budget import DRAWS, Error, allowed

# One row of so many is compared, and at least so many of a sequence.
STRIDE, LEAST_ROWS = 64, 16
# The reason for a result that is finite, but not exact enough.
OUTSIDE = "outside of its error budget"
# By band of rows, see the module's docstring.
Budget = dict[int, Error]


@dataclass
class Group:
    """The pairs (entry, KV head) of a case with equal lengths.

    batches, starts, kv_heads (P): the batch row, the first token in it, the KV head of each.
    rows, keys (P, R): positions that are compared, of queries and of keys. bands: by result, which
    rows have one budget, (P, R). exact: by result, (P, R, H, dim).
    """

    len_q: int
    len_k: int
    batches: torch.Tensor
    starts: torch.Tensor
    kv_heads: torch.Tensor
    rows: torch.Tensor
    keys: torch.Tensor
    bands: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]
    budgets: dict[str, tuple[Budget, Budget]] = field(default_factory=dict)

    def of(self, name: str, whole: torch.Tensor, group: int) -> torch.Tensor:
        """The rows of a whole result that are compared, (P, R, H or 1, dim) in float64."""
        positions, heads = (self.keys, 1) if name in ("dk", "dv") else (self.rows, group)
        chosen = self.kv_heads[:, None] * heads + torch.arange(heads, device=whole.device)
        tokens = self.starts[:, None] + positions
        return whole[self.batches[:, None, None], tokens[..., None], chosen[:, None]].double()


class Checker:
    """The reference of one case on some inputs, computed once for all peers.

    most_draws: how many draws of inputs the budget may rest on, 1 for these inputs alone.
    """

    def __init__(self, case: Case, inputs: Inputs, most_draws: int = DRAWS):
        self.case, self.inputs = case, inputs
        self.groups = _groups(case, inputs)
        fewest = min(len(group.batches) for group in self.groups)
        self._draws, self._most_draws = 1, min(most_draws, -(-DRAWS // fewest))

    def why_wrong(self, got: Results) -> str | None:
        """A message about a result that is missing, unexpected, not finite or outside of its
        budget, or None."""
        reason = self._unsound(got)
        if reason is None:
            reason = self._outside(got)
            while reason is not None and self._draw_again():
                reason = self._outside(got)
        return reason

    def _unsound(self, got: Results) -> str | None:
        """A message about an error that no budget excuses."""
        p, inputs = self.case.problem, self.inputs
        wanted = {"out": (*inputs.q.shape[:-1], p.head_dim_v)}
        if self.case.direction == "backward":
            gradients = zip(("dq", "dk", "dv"), inputs[:3], strict=True)
            wanted |= {name: tuple(x.shape) for name, x in gradients}
        for name, whole in got._asdict().items():
            shape = wanted.get(name)
            if whole is None and shape is None:
                continue
            if whole is None:
                return f"{name} is missing"
            if shape is None:
                return f"{name} was not asked for"
            if whole.shape != shape:
                return f"{name} has shape {tuple(whole.shape)}, not {shape}"
            dtype = p.out_dtype if name == "out" else p.dtype
            if whole.dtype != getattr(torch, dtype):
                return f"{name} has dtype {whole.dtype}, not torch.{dtype}"
            if any(_shares_memory(whole, x) for x in inputs):
                return f"{name} is the memory of an input"
            if not whole.isfinite().all():
                return f"{name} is not finite: {_first_of(~whole.isfinite())}"
        return None

    def _outside(self, got: Results) -> str | None:
        for group in self.groups:
            for name, want in group.exact.items():
                mine = group.of(name, getattr(got, name), self.case.problem.group)
                reason = _why_outside(group, name, mine, want)
                if reason:
                    return f"{name} of {reason}"
        return None

    def _draw_again(self) -> bool:
        """Raises the budgets to eager PyTorch's errors on other inputs; False if no more may be
        drawn."""
        if self._draws >= self._most_draws:
            return False
        inputs = draw(self.case, self.inputs.q.device, seed=1009 + self._draws)
        for group, other in zip(self.groups, _groups(self.case, inputs), strict=True):
            for name, both in group.budgets.items():
                for mine, more in zip(both, other.budgets[name], strict=True):
                    # The same rows are compared, so the bands are the same.
                    mine |= {band: error.worst(more[band]) for band, error in mine.items()}
        self._draws += 1
        return True


class Parts:
    """Some parts of a result, each of which is a case with a reference of its own.

    shape: of the whole result. live: so many of its first dim are no padding, which is 0.
    """

    def __init__(self, shape: Sequence[int], live: int | None = None):
        self.shape, self.live = tuple(shape), live
        self.parts: list[tuple[str, tuple, Checker]] = []

    def add(self, words: str, place: tuple, case: Case, inputs: Inputs) -> None:
        """Looks at this part, too. place: where it is in the result, (1, rows, heads, dim) or
        without the first dim. inputs: its own; dout is not looked at."""
        self.parts.append((words, place, Checker(case, inputs)))

    def why_wrong(self, out: torch.Tensor) -> str | None:
        """A message about what is no result or outside of its budget, or None."""
        if tuple(out.shape) != self.shape:
            return f"out has shape {tuple(out.shape)}, not {self.shape}"
        if not out.isfinite().all():
            return "out is not finite"
        if self.live is not None and out[self.live :].any():
            return "padded rows are not 0"
        for words, place, checker in self.parts:
            part = out[place]
            reason = checker.why_wrong(Results(part if part.dim() == 4 else part[None]))
            if reason is not None:
                return f"{words}: {reason}"
        return None


def sampled(count: int, generator: random.Random) -> list[int]:
    """Rows to compare of `count`: the first, the last, and one of every STRIDE."""
    strata = min(count, max(LEAST_ROWS, -(-count // STRIDE)))
    edges = [n * count // strata for n in range(strata + 1)]
    inner = [generator.randrange(begin, end) for begin, end in pairwise(edges)]
    return [0, *inner, count - 1]


def _groups(case: Case, inputs: Inputs) -> list[Group]:
    """References, exact results and budgets of a case on these inputs."""
    p = case.problem
    lengths = [(n, n) for n in case.lengths] or [(p.seqlen_q, p.seqlen_k)] * p.batch
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for sequence, size in enumerate(lengths):
        place = (0, case.starts[sequence]) if case.lengths else (sequence, 0)
        places.setdefault(size, []).append(place)
    return [_group(case, inputs, *size, alike) for size, alike in places.items()]


def _group(
    case: Case, inputs: Inputs, len_q: int, len_k: int, places: list[tuple[int, int]]
) -> Group:
    device, heads_k = inputs.q.device, case.problem.heads_k
    # The same rows for every peer and draw of inputs; others for every entry and head.
    generator = random.Random(0)
    parts = [(*place, kv_head) for place in places for kv_head in range(heads_k)]
    batches, starts, kv_heads = torch.tensor(parts, device=device).unbind(1)
    rows, keys = (
        torch.tensor([sampled(length, generator) for _ in parts], device=device)
        for length in (len_q, len_k)
    )
    # Not of gradients: eager has its probabilities from a softmax, a kernel from the log-sum-exp,
    # which of a late row, whose keys few others see, is the less exact.
    bands = {name: torch.zeros_like(keys) for name in ("dk", "dv")}
    bands |= {"out": _band(case, rows, len_q, len_k), "dq": torch.zeros_like(rows)}
    group = Group(len_q, len_k, batches, starts, kv_heads, rows, keys, bands, {})
    twins: dict[str, list[torch.Tensor]] = {}
    truths: dict[str, list[torch.Tensor]] = {}
    for number, part in enumerate(parts):
        x = _operands(case, inputs, *part, len_q, len_k)
        for made, reference in ((truths, exact), (twins, eager)):
            results = reference(case, x, rows[number], keys[number])
            for name, result in results._asdict().items():
                if result is not None:
                    made.setdefault(name, []).append(result.transpose(0, 1).double())
    half_eps = torch.finfo(getattr(torch, case.problem.out_dtype)).eps / 2
    for name, truth in truths.items():
        want, band = torch.stack(truth), bands[name]
        group.exact[name] = want
        errors = _worst_part(_errors(torch.stack(twins[name]) - want, band))
        sizes = _worst_part(_errors(want, band))
        once = {b: Error(half_eps * e.largest, half_eps * e.rms) for b, e in sizes.items()}
        group.budgets[name] = errors, once
    return group


def _operands(
    case: Case, inputs: Inputs, batch: int, start: int, kv_head: int, len_q: int, len_k: int
) -> Operands:
    """The inputs of one KV head of one sequence."""
    group = case.problem.group
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q, dout = (x[batch, start : start + len_q, heads].transpose(0, 1) for x in inputs[::3])
    k, v = (x[batch, start : start + len_k, kv_head] for x in inputs[1:3])
    return Operands(q, k, v, dout if case.direction == "backward" else None)


def _band(case: Case, rows: torch.Tensor, len_q: int, len_k: int) -> torch.Tensor:
    """The logarithm to base 2, rounded down, of how many keys each row sees; -1 of none."""
    mask = case.problem.mask
    diagonal = rows + mask.offset(len_q, len_k)
    begin, end = torch.zeros_like(rows), torch.full_like(rows, len_k)
    if mask.left >= 0:
        begin = (diagonal - mask.left).clamp(min=0)
    if mask.right >= 0:
        end = (diagonal + mask.right + 1).clamp(max=len_k)
    seen = (end - begin).clamp(min=0)
    return (2 * seen + 1).log2().floor().long() - 1


def _errors(difference: torch.Tensor, band: torch.Tensor) -> dict[int, torch.Tensor]:
    """By band, what each (entry, KV head) errs: (2, P), as maximum and as RMS.

    difference: (P, R, H, dim). band: (P, R).
    """
    largest = difference.abs().amax((2, 3))
    mean_square = difference.square().mean((2, 3))
    by_band = {}
    for number in band.unique().tolist():
        inside = band == number
        rms = ((mean_square * inside).sum(1) / inside.sum(1).clamp(min=1)).sqrt()
        by_band[number] = torch.stack([(largest * inside).amax(1), rms])
    return by_band


def _worst_part(errors: dict[int, torch.Tensor]) -> Budget:
    return {band: Error(*of.amax(1).tolist()) for band, of in errors.items()}


def _why_outside(group: Group, name: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    errors, once = group.budgets[name]
    for band, of in _errors(got - want, group.bands[name]).items():
        budget = allowed(name, errors[band], once[band])
        for kind, each, bound in zip(
            ("largest", "rms"), of, (budget.largest, budget.rms), strict=True
        ):
            part = int(each.argmax())
            if not float(each[part]) <= bound:
                return (
                    f"{_place(group, part)} is {OUTSIDE}: {kind} error {float(each[part]):.3g},"
                    f" allowed {bound:.3g}"
                )
    return None


def _place(group: Group, part: int) -> str:
    batch, start = int(group.batches[part]), int(group.starts[part])
    where = f"batch {batch}" if not start else f"the sequence from token {start}"
    return f"{where}, KV head {int(group.kv_heads[part])}"


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _first_of(wrong: torch.Tensor) -> str:
    """How many elements are wrong, and where the first one is."""
    return f"{int(wrong.sum())} elements, the first at {tuple(wrong.nonzero()[0].tolist())}"
