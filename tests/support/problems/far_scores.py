"""Rows whose scores are far from 0 and close together, by a bias, by q and k, by ALiBi: problems
and one check of them, for every backend and device.

Operands lie on a lattice: small integers times powers of two, so that float32 has every score
exactly, and a kernel that rounds none of them meets the float64 oracle. A far bias of 1e30 and more
takes lesser scores in with it, in float32 and float64 alike.

A problem counts only where its results are sharp: their error budget is below 5 % of the largest
value that is wanted (see `sharp_below`). What is not sharp is looked at for soundness alone.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import heedful.torch as heedful
from heedful.core.call.problem import ITEM_BITS
from heedful.reference.budget import (
    DRAWS,
    Error,
    Results,
    allowed,
    judge,
    rounding,
    twin_results,
)
from heedful.reference.convert import as_numpy
from support.problems.budget import Backend, backend_results, oracle_results
from support.problems.cases import Built, Case, build

LEAST = {name: torch.finfo(getattr(torch, name)).min for name in ("float32", "bfloat16", "float16")}
# Bits of integers that float32 has exactly, one left for sums on the way.
BITS = 23
# From here on a bias takes scores in with it, in float64 as well.
ABSORBING = 1e29
# log2 of the units of scores that are about 1e6, 1e7 and 1e8.
SCORES = (20, 23, 26)
# Where a far bias lies: on all scores, whole rows, parts of rows, the first keys of a sequence.
WHERE = ("all", "rows", "parts", "left")


@dataclass(frozen=True)
class Far:
    """A case and how far its scores are.

    score: q and k make scores of integers times 2^score. below: all of them are negative. bias:
    numbers that a bias in `bias_dtype` (the case's by default) adds, drawn anew for each score,
    `where`; 0 elsewhere. hidden: some scores are -inf, and some whole rows. far_sink: the sink is
    about as far as the scores. slope: log2 of ALiBi's unit. prefix: keys at the front that all
    sequences share.
    """

    case: Case
    score: int | None = None
    below: bool = False
    bias: tuple[float, ...] = ()
    bias_dtype: str = ""
    where: str = "all"
    hidden: bool = False
    far_sink: bool = False
    slope: int | None = None
    prefix: int = 0

    def __str__(self) -> str:
        default = Far(self.case)
        words = [
            f"{name}={value}".replace(" ", "")
            for name, value in vars(self).items()
            if name != "case" and value != getattr(default, name)
        ]
        return "-".join([*words, str(self.case)])

    @property
    def fine(self) -> int:
        """log2 of the least difference of two scores: sums of them fill no more than BITS."""
        far = [math.log2(abs(value)) for value in self.bias if abs(value) < ABSORBING]
        if self.score is not None:
            far.append(self.score + 1)
        if self.slope is not None:
            far.append(self.slope + 11)
        return max([-2, *(math.ceil(bits) + 1 - BITS for bits in far)])


def far(case: Case, bias: Iterable[float] = (), dims: str = "bhqk", **how: Any) -> Far:
    """A far problem of a case, with the softmax_scale and the bias that it takes.

    bias: as Far has it; dims: which of "bhqk" it really has.
    """
    made = Far(replace(case, bias=dims if bias else ""), bias=tuple(bias), **how)
    kind = made.bias_dtype or ("bfloat16" if ITEM_BITS[case.dtype] == 8 else case.dtype)
    if any(abs(b) > -LEAST[kind] for b in made.bias):
        raise ValueError(f"{kind} does not hold a bias of {made.bias}")
    if case.softcap and made.score is None and any(abs(b) < ABSORBING for b in made.bias):
        raise ValueError("tanh leaves the lattice: softcap takes a bias that takes scores in")
    if case.softcap and made.score is not None:
        # Scores of 0 and the cap: tanh(32) is 1.
        made = replace(made, score=made.score + 5, case=replace(case, softcap=2.0**made.score))
    # float16 holds no queries of 2^15 and more.
    top = made.fine if made.score is None else made.score
    scale = max(-3, top - 12) if case.dtype == "float16" else -3
    return replace(made, case=replace(made.case, scale=2.0**scale))


def built(problem: Far, device: torch.device | str = "cpu", draw: int = 0) -> Built:
    """Tensors of a problem; another `draw` changes values only."""

    def edit(case, x, dout, dlse, values):
        return _Edit(problem, case, values).of(x, dout, dlse)

    return build(problem.case, device, draw, edit)


class _Edit:
    """Lattice values in place of random ones."""

    def __init__(self, problem: Far, case: Case, values: torch.Generator):
        self.problem, self.case, self.values = problem, case, values
        self.scale = round(math.log2(case.scale))

    def of(self, x, dout, dlse):
        """Operands, dout and dlse."""
        problem, case = self.problem, self.case
        columns = torch.randperm(case.head_dim, generator=self.values)[:4]
        coarse, fine = columns[0::2], columns[1::2]
        x = self._with_scales(x)
        self._set_k(x, coarse, fine)
        self._set_q(x, coarse, fine)
        if problem.bias:
            x = x._replace(bias=self._bias(x.bias))
        if x.alibi_slopes is not None:
            unit = problem.fine if problem.slope is None else problem.slope
            own = x.alibi_slopes[:1] if "b" not in case.alibi else x.alibi_slopes
            slopes = self._integers(own.shape, 0 if problem.slope is None else 1, 2) * 2.0**unit
            x = x._replace(alibi_slopes=slopes.expand(x.alibi_slopes.shape))
        if problem.far_sink:
            x = x._replace(sink=self._sink(x.sink))
        if case.dtype == "float16" and case.backward:
            # Gradients of k are as large as q, those of q as the scale, and fit float16.
            top = problem.fine if problem.score is None else problem.score
            for tensor in (dout, dlse):
                if tensor is not None:
                    tensor.mul_(2.0 ** min(0, 12 - top))
        return x, dout, dlse

    def _integers(self, shape, low: int, high: int) -> torch.Tensor:
        """Float32 integers of [low, high]."""
        return torch.randint(low, high + 1, tuple(shape), generator=self.values).float()

    def _with_scales(self, x):
        """Descales that are powers of two; shifts are left out of the columns that scores read."""
        if x.q_descale is not None:
            x.q_descale.fill_(2.0 ** (self._exponent(x) - self.scale))
            x.k_descale.fill_(1.0)
        elif x.k_descale is not None:
            x.k_descale.fill_(0.25)
            if x.k_shift is not None:
                x.k_shift.copy_(self._integers(x.k_shift.shape, -1, 1) * 0.25)
        return x

    def _exponent(self, x) -> int:
        """log2 of the largest unit of scores."""
        return self.problem.fine if self.problem.score is None else self.problem.score

    def _set_k(self, x, coarse, fine) -> None:
        case, problem = self.case, self.problem
        shape = (*x.k.shape[:-1], case.head_dim)
        k = torch.randn(shape, generator=self.values)
        if case.kv_dtype:
            k = self._integers(shape, -3, 3)
        for columns in (coarse, fine):
            k[..., columns] = self._integers((*shape[:-1], len(columns)), -1, 1)
        if problem.below and len(coarse):
            k[..., coarse[0]] = 1.0
        if problem.prefix:
            k[:, : problem.prefix] = k[:1, : problem.prefix].clone()
            x.v[:, : problem.prefix] = x.v[:1, : problem.prefix].clone()
        if case.kv_dtype == "int4":
            stored = k.to(torch.int32)
            k = (stored[..., 0::2] & 0xF) | ((stored[..., 1::2] & 0xF) << 4)
        x.k.copy_(k)

    def _set_q(self, x, coarse, fine) -> None:
        """Queries that are 0 in all but a few columns: the others of k are whatever they are."""
        problem = self.problem
        q = torch.zeros(x.q.shape)
        # log2 of what a product of stored integers is worth, but for q's own unit.
        worth = self.scale - (2 if self.case.kv_dtype else 0)
        if x.q_descale is not None:
            worth = self._exponent(x)
        if problem.score is not None and len(coarse):
            whole = self._integers((*q.shape[:-1], len(coarse)), -1, 1)
            if problem.below:
                whole.zero_()
                whole[..., 0] = self._integers(q.shape[:-1], -2, -1)
            q[..., coarse] = whole * 2.0 ** (problem.score - worth)
        # Sums of 8-bit products have 14 bits.
        if problem.score is None or ITEM_BITS[self.case.dtype] != 8:
            some = self._integers((*q.shape[:-1], len(fine)), -1, 2)
            q[..., fine] = some * 2.0 ** (problem.fine - worth)
        x.q.copy_(q)

    def _bias(self, old: torch.Tensor) -> torch.Tensor:
        """A far bias of the dims that the old one has."""
        problem, case = self.problem, self.case
        full = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
        own = [n if name in case.bias else 1 for n, name in zip(full, "bhqk", strict=True)]
        dtype = getattr(torch, problem.bias_dtype) if problem.bias_dtype else old.dtype
        chosen = torch.randint(0, len(problem.bias), own, generator=self.values)
        bias = torch.tensor(problem.bias, dtype=torch.float64)[chosen]
        bias = torch.where(self._where(own), bias, 0.0)
        if problem.hidden:
            some = torch.rand(own, generator=self.values) < 0.2
            rows = torch.rand((*own[:3], 1), generator=self.values) < 0.15
            bias = bias.masked_fill(some | rows, -math.inf)
        return bias.to(dtype).expand(full)

    def _where(self, own: list[int]) -> torch.Tensor:
        where, values = self.problem.where, self.values
        rows = torch.rand((*own[:3], 1), generator=values)
        if where == "all":
            return torch.ones(own, dtype=torch.bool)
        if where == "rows":
            return (rows < 0.5).expand(own)
        if where == "left":
            keys = torch.randint(0, own[3] + 1, (own[0], 1, 1, 1), generator=values)
            return (torch.arange(own[3]) < keys).expand(own)
        # Parts of most rows; of some all, of some none.
        some = torch.rand(own, generator=values) < 0.5
        return (some | (rows < 0.2)) & (rows < 0.9)

    def _sink(self, old: torch.Tensor) -> torch.Tensor:
        """About where the scores are: on a far bias, or where the largest of q and k are."""
        problem, heads = self.problem, old.shape
        if self.case.softcap and problem.score is not None:
            base = torch.full(heads, self.case.softcap)
        elif problem.bias:
            drawn = torch.randint(0, len(problem.bias), heads, generator=self.values)
            base = torch.tensor(problem.bias, dtype=torch.float64)[drawn]
            if problem.bias_dtype or old.dtype != torch.float32:
                base = base.to(getattr(torch, problem.bias_dtype or self.case.dtype)).double()
        elif problem.score is not None:
            base = torch.full(heads, (-1.0 if problem.below else 2.0) * 2.0**problem.score)
        else:
            base = torch.zeros(heads)
        near = self._integers(heads, -1, 1) * 2.0**problem.fine
        # The lowest number of a dtype less 1 may be none.
        return (base.double() + near).clamp(LEAST["float32"], -LEAST["float32"]).float()


@dataclass(frozen=True)
class Verdict:
    """What a check found. sharp: results that count. wrong: what is outside, in words."""

    problem: Far
    sharp: frozenset[str]
    wrong: str

    @property
    def counts(self) -> bool:
        """Whether the problem counts: what is wrong does, and else its output and dV are sharp."""
        needed = {"out", "dv"} if self.problem.case.backward else {"out"}
        return bool(self.wrong) or needed <= self.sharp


def sharp_below(case: Case) -> float:
    """Which part of the largest value that is wanted a budget stays below. The twin of 8-bit values
    rounds probabilities by up to 6 %."""
    return 0.2 if ITEM_BITS[case.dtype] == 8 else 0.05


def _is_sharp(name: str, want, twin: Error, dtype: str, below: float) -> bool:
    """Whether a result's budget is below that part of the largest finite value."""
    finite = abs(want[abs(want) < math.inf])
    largest = float(finite.max()) if finite.size else 0.0
    return allowed(name, twin, rounding(want, dtype)).largest < below * largest


def verdict(problem: Far, results: Callable[[Built], Results], device="cpu") -> Verdict:
    """Judges what `results` gives for a problem: see `by_backend` and
    `support.runs.api.results`."""
    first = built(problem, device)
    try:
        got = results(first)
    except Exception as error:
        error.add_note(f"the problem was {problem}")
        raise
    want, dtype = oracle_results(first), first.problem.out_dtype
    sharp, wrong = frozenset[str](), ""
    for draws in (1, DRAWS):
        # More draws widen budgets: of results that are outside by one.
        twins = list(_twin_errors(problem, first, want, device, draws))
        judged = judge(got, want, dtype, twins)
        below = sharp_below(problem.case)
        sharp = frozenset(
            name
            for name, exact in want.present().items()
            if _is_sharp(name, exact, twins[-1][name], dtype, below)
        )
        # Unsound results have no budget.
        wrong = "\n".join(
            j.wrong for n, j in judged.items() if j.wrong and (j.budget is None or n in sharp)
        )
        if not wrong:
            break
    return Verdict(problem, sharp, wrong)


def _twin_errors(problem: Far, first: Built, want: Results, device, draws: int):
    """The twin's errors by result, the worst so far, draw by draw."""
    errors: dict[str, Error] = {}
    for draw in range(draws):
        one = built(problem, device, draw) if draw else first
        truth = oracle_results(one) if draw else want
        got = twin_results(one.problem, one.x, one.dout, one.dlse, far_scores=True)
        for name, exact in truth.present().items():
            error = Error.between(getattr(got, name), exact)
            errors[name] = error.worst(errors.get(name, error))
        yield dict(errors)


def by_backend(backend: Backend) -> Callable[[Built], Results]:
    """`verdict`'s results of a budget's `Backend`."""
    return lambda one: backend_results(backend, one)


def by_shared_prefix(
    prefix: int, call: Callable[..., Any] = heedful.flash_attn_with_kvcache, **more: Any
) -> Callable[[Built], Results]:
    """`verdict`'s results of flash_attn_with_kvcache over dense keys, of which the first `prefix`
    are shared by all sequences and given as such. call: the function, or what was made of it. more:
    further arguments."""

    def results(one: Built) -> Results:
        x, case = one.x, one.case
        out, lse = call(
            x.q,
            x.k[:, prefix:],
            x.v[:, prefix:],
            softmax_scale=case.scale,
            causal=case.causal,
            num_splits=case.num_splits,
            sink=x.sink,
            shared_prefix=(x.k[0, :prefix], x.v[0, :prefix]),
            return_softmax_lse=True,
            **more,
        )
        return Results(as_numpy(out), as_numpy(lse))

    return results


def check(problem: Far, results: Callable[[Built], Results], device="cpu") -> None:
    """AssertionError unless a problem counts, and every sharp result is within its budget."""
    found = verdict(problem, results, device)
    assert not found.wrong, f"{problem}\n{found.wrong}"
    assert found.counts, f"{problem} does not count: sharp are {sorted(found.sharp)}"


@dataclass
class Tally:
    """Of many problems: how many were drawn, how many counted, which are outside."""

    drawn: int = 0
    counted: int = 0
    sharp: dict[str, int] = field(default_factory=dict)
    outside: list[Verdict] = field(default_factory=list)

    def add(self, found: Verdict) -> None:
        self.drawn += 1
        self.counted += found.counts
        for name in found.sharp:
            self.sharp[name] = self.sharp.get(name, 0) + 1
        if found.wrong:
            self.outside.append(found)

    def __str__(self) -> str:
        """How many of what, and the first few that are outside."""
        sharp = ", ".join(f"{name} {count}" for name, count in sorted(self.sharp.items()))
        lines = [
            f"{self.counted} of {self.drawn} problems count, {len(self.outside)} are outside;"
            f" sharp: {sharp}"
        ]
        lines += [f"{found.problem}\n    {found.wrong}" for found in self.outside[:8]]
        return "\n".join(lines)


def run_many(
    problems: Iterable[Far], results: Callable[[Built], Results], count: int, device="cpu"
) -> Tally:
    """Checks problems until `count` of them counted."""
    tally = Tally()
    for problem in problems:
        tally.add(verdict(problem, results, device))
        if tally.counted >= count:
            break
    return tally


LATENT = Case(
    seqlen_q=1,
    dtype="bfloat16",
    backward=False,
    heads_q=16,
    heads_k=1,
    head_dim=576,
    head_dim_v=512,
    v_in_k=True,
)
# Queries and keys of several tiles of 16, and a multiple of nothing.
SMALL = Case(seqlen_q=21, seqlen_k=53, heads_q=2, heads_k=1, head_dim=16)


def grid(base: Case = SMALL) -> list[Far]:
    """Every kind of far scores once, of a case with a backward."""
    biases = (-1e4, -1e9, -1e30, LEAST["float32"], LEAST["bfloat16"], LEAST["float16"], 1e30)
    found = [
        far(base, (bias,), dims, bias_dtype="float32", where=where)
        for bias in biases
        for where, dims in (("all", "q"), ("rows", "bhqk"), ("parts", "hqk"))
    ]
    causal = replace(base, causal=True, seqlen_q=base.seqlen_k)
    found += [far(causal, (bias,), "bk", bias_dtype="float32", where="left") for bias in biases]
    several = (-1e9, -1e30, LEAST["float32"])
    found += [far(base, several, bias_dtype="float32", where=where, hidden=True) for where in WHERE]
    found += [
        far(base, score=score, below=below) for score in (*SCORES, 27) for below in (False, True)
    ]
    sinks = replace(base, sink=True)
    found += [far(sinks, (b,), bias_dtype="float32", far_sink=True) for b in (-1e9, -1e30, 1e30)]
    found += [far(sinks, (-1e30,), bias_dtype="float32", where="rows")]
    found += [far(sinks, score=20, far_sink=True), far(sinks, score=26, below=True, far_sink=True)]
    found += [
        far(replace(base, alibi="bh"), slope=20),
        far(replace(base, alibi="h", causal=True), score=23),
        far(replace(sinks, alibi="bh", causal=True), slope=20, far_sink=True),
        far(replace(base, alibi="bh"), (-1e9,), bias_dtype="float32", where="rows"),
        far(replace(base, softcap=2.0), (-1e30,), bias_dtype="float32", where="rows"),
        far(replace(base, softcap=1.0), score=20),
        far(replace(base, dropout_p=0.25), (-1e9,), bias_dtype="float32"),
        far(replace(base, varlen="qk", batch=3), (-1e30,), bias_dtype="float32", where="rows"),
        far(replace(base, varlen="qk", batch=3, causal=True), score=26),
        far(replace(base, window=(9, 3)), (-1e9,), bias_dtype="float32"),
        far(replace(base, used="qk", heads_q=6, heads_k=2), (LEAST[base.dtype],), "q"),
    ]
    return found


def forward_grid(base: Case = SMALL) -> list[Far]:
    """What has no backward: splits, pages, quantised caches, latent vectors."""
    base = replace(base, backward=False)
    found = [
        far(replace(base, num_splits=splits), score=score, below=below)
        for splits in (2, 3)
        for score in SCORES
        for below in (False, True)
    ]
    found += [
        far(replace(base, num_splits=splits), (bias,), bias_dtype="float32", where=where)
        for splits, bias, where in ((2, -1e9, "all"), (3, -1e30, "rows"), (2, 1e30, "parts"))
    ]
    few = replace(base, seqlen_q=2, seqlen_k=203, heads_q=6, heads_k=2)
    sinks = replace(few, sink=True, num_splits=3)
    found += [far(sinks, score=26, far_sink=True), far(sinks, score=20, below=True, far_sink=True)]
    found += [
        far(replace(few, page_size=16, causal=True), score=20),
        far(replace(few, page_size=7, used="k", num_splits=2), score=26),
        far(replace(few, alibi="bh", num_splits=2), slope=20),
        far(replace(few, kv_dtype="int8"), score=23),
        far(replace(few, kv_dtype="int8", kv_group=8, kv_shift=True, num_splits=2), score=20),
        far(replace(few, kv_dtype="int4", kv_group=8, head_dim=32), score=26),
        far(replace(few, kv_dtype="float8_e4m3fn"), score=20),
    ]
    found += latent_grid()
    return found


def decode_grid(dtype: str = "float16") -> list[Far]:
    """The part of `forward_grid` that decode kernels take: without a bias, of 16 bits."""
    base = replace(SMALL, dtype=dtype, seqlen_q=2, seqlen_k=203, heads_q=6, heads_k=2)
    return [problem for problem in forward_grid(base) if not problem.bias]


def latent_grid(dtype: str = "float16") -> list[Far]:
    """MLA's head dims: values are the first columns of keys."""
    base = replace(LATENT, dtype=dtype, seqlen_k=131, seqlen_q=2)
    return [
        far(replace(base, num_splits=2), score=20),
        far(replace(base, causal=True, page_size=16), score=26, below=True),
    ]


def prefix_grid(dtype: str = "float32") -> list[Far]:
    """What `by_shared_prefix` takes: a prefix of as many keys as `Far.prefix` says."""
    base = replace(
        SMALL, dtype=dtype, backward=False, seqlen_q=3, seqlen_k=93, batch=3, head_dim=64
    )
    sink = replace(base, sink=True, heads_q=4)
    found = [far(base, score=score, below=below) for score in SCORES for below in (False, True)]
    found += [far(sink, score=score, below=True, far_sink=True) for score in SCORES]
    found.append(far(replace(base, causal=True, num_splits=2), score=23))
    return [replace(problem, prefix=40) for problem in found]


def prefixed_latents(dtype: str = "float16") -> list[Far]:
    """The same of MLA's head dims."""
    return [replace(p, prefix=40) for p in latent_grid(dtype) if not p.case.page_size]
