"""Runs the grid on a device: every backend there is for it, against the oracle's budget."""

import datetime
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from heedful.bench.harness.cases import Case
from heedful.bench.harness.peers import find
from heedful.bench.harness.run import Outcome, measure
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry import by_hand, capability
from heedful.reference.budget import (
    DRAWS,
    Error,
    Judgement,
    Results,
    judge,
    oracle_results,
    twin_results,
)
from heedful.reference.convert import as_numpy
from heedful.torch.base.device import device_spec, toolchain
from heedful.torch.eager import backends
from heedful.validation.grid import Built, Entry, build


@dataclass(frozen=True)
class Verdict:
    """One problem on one backend.

    judged: by result. skipped: why the backend does not take the problem, or nothing.
    failed: what it raised, or nothing.
    """

    backend: str
    problem: str
    backward: bool = False
    judged: dict[str, Judgement] | None = None
    skipped: str = ""
    failed: str = ""

    @property
    def wrong(self) -> list[str]:
        """Everything that is wrong, in words."""
        bad = [j.wrong for j in (self.judged or {}).values() if j.wrong]
        return [self.failed, *bad] if self.failed else bad

    def record(self) -> dict:
        """As plain data, for the report: errors beside their budgets."""
        facts = {"backend": self.backend, "problem": self.problem, "backward": self.backward}
        if self.skipped:
            return {**facts, "skipped": self.skipped}
        results = {name: asdict(j) for name, j in (self.judged or {}).items()}
        return {**facts, "passed": not self.wrong, "wrong": self.wrong, "results": results}


def backends_of(device: torch.device) -> list[str]:
    """Every backend of PyTorch with a kernel for this device's architecture, best first; in place
    of those that were named by variant once, their variants."""
    spec, families = device_spec(device), {backend for backend, _ in capability.ALIASES.values()}
    variants = [v for v in capability.VARIANTS if v.serves("torch") and v.level(spec) is not None]
    return list(
        dict.fromkeys(
            by_hand.named(v.backend, v.name) if v.backend in families else v.backend
            for v in variants
        )
    )


def asked_of(words: str, names: list[str]) -> list[str]:
    """Which of `names` a comma list asks for: a backend stands for its variants, and variants have
    their aliases. Raises ValueError naming what is not among them."""
    chosen_names: list[str] = []
    for word in words.split(","):
        label = capability.label(*capability.ALIASES.get(word, (word, "")))
        chosen = [name for name in names if label in (str(name), name.partition("/")[0])]
        if not chosen:
            raise ValueError(f"must be among {', '.join(names)}, got {word!r}")
        chosen_names += chosen
    return list(dict.fromkeys(chosen_names))


def gated(device: torch.device) -> frozenset[str]:
    """The backends that a record of this device can speak for: those with a kernel that the
    planner takes only when asked and that nobody has measured on such hardware."""
    spec = device_spec(device)
    variants = [v for v in capability.VARIANTS if not v.by_default]
    return frozenset(v.backend for v in variants if v.level(spec) not in (None, "run"))


def verdicts(entries: list[Entry], names: list[str], device: torch.device) -> Iterator[Verdict]:
    """Every entry on every backend, the oracle computed once an entry."""
    for entry in entries:
        reference = _Reference(entry, device)
        for backend in names:
            yield reference.verdict(backend)


class _Reference:
    """An entry, its truth and its twin's errors, computed when first asked for and kept."""

    def __init__(self, entry: Entry, device: torch.device):
        self._entry, self._device = entry, device
        self._built = build(entry, device)
        self._want: Results | None = None
        self._errors: list[dict[str, Error]] = []

    def verdict(self, backend: str) -> Verdict:
        built, reasons = self._takes(backend)
        if built is None:
            return Verdict(backend, self._entry.name, skipped=reasons)
        backward = built.dout is not None
        try:
            got = _compute(backend, built)
        except Exception as error:  # whatever a kernel raises is its verdict
            words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return Verdict(backend, self._entry.name, backward, failed=words)
        want = self._wanted()
        if not backward:
            want = Results(want.out, want.lse if built.problem.return_lse else None)
        judged = judge(got, want, built.problem.out_dtype, self._draws())
        return Verdict(backend, self._entry.name, backward, judged)

    def _takes(self, backend: str) -> tuple[Built | None, str]:
        """The problem with its backward, or as much of it as the backend takes: its forward, its
        output alone."""
        reasons = ""
        spec, tools = device_spec(self._device), toolchain()
        whole = self._built
        for built in (whole, _forward_only(whole, True), _forward_only(whole, False)):
            try:
                plan(built.problem, spec, tools, backend)
                return built, ""
            except ValueError as error:
                reasons = str(error)
        return None, reasons

    def _wanted(self) -> Results:
        if self._want is None:
            self._want = _results(oracle_results, self._built)
        return self._want

    def _draws(self) -> Iterator[dict[str, Error]]:
        for draw in range(DRAWS):
            if draw == len(self._errors):
                built = self._built if draw == 0 else build(self._entry, self._device, draw)
                want = self._wanted() if draw == 0 else _results(oracle_results, built)
                got, before = _results(twin_results, built), self._errors[-1:]
                errors = {n: Error.between(getattr(got, n), w) for n, w in want.present().items()}
                if before:
                    errors = {n: error.worst(before[0][n]) for n, error in errors.items()}
                self._errors.append(errors)
            yield self._errors[draw]


def _results(function, built: Built) -> Results:
    return function(built.problem, built.x, built.dout, built.dlse)


def _forward_only(built: Built, return_lse: bool) -> Built:
    problem = replace(built.problem, needs_grad=False, bias_grad=False, return_lse=return_lse)
    return Built(problem, built.x, None, None)


def _compute(backend: str, built: Built) -> Results:
    """The results of a backend for a problem, written into an output full of NaN."""
    problem, x = built.problem, built.x
    shape = (*x.q.shape[:-1], problem.head_dim_v)
    dtype = getattr(torch, problem.out_dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=x.q.device)
    runner = backends.prepare(problem, x, backend)
    out, lse, probs = runner.forward(x, out)
    results = (out, lse, probs)
    if built.dout is not None:
        arguments = x, out, lse, built.dout, built.dlse
        results += tuple(runner.backward_of(*arguments)(*arguments))
    return Results(*(as_numpy(result) for result in results))


def bench_cases(device: torch.device) -> list[Case]:
    """A few shapes that show the speed: training, prefill and decoding."""
    if device.type == "cpu":
        return [Case("cpu", AttentionProblem.dense(1, 512, 512, 8, 8, 64, dtype="float32"))]
    dense = [(4, 4096, 4096, 16, 16, 128), (4, 4096, 4096, 32, 32, 64), (4, 8192, 8192, 64, 8, 128)]
    cases = [
        Case("forward", AttentionProblem.dense(*shape, causal=causal))
        for shape in dense
        for causal in (False, True)
    ]
    trained = AttentionProblem.dense(*dense[0], causal=True, needs_grad=True)
    decoded = AttentionProblem.dense(8, 1, 8192, 32, 8, 128)
    return [*cases, Case("backward", trained, "backward"), Case("decode", decoded)]


def bench(case: Case, names: list[str], device: torch.device) -> Outcome:
    """The named backends beside SDPA on one case, each figure after a reference check."""
    peers = [find("sdpa"), *(find(f"heedful:{name}") for name in names if name != "sdpa")]
    return measure(case, peers, device, rounds=5, bases=("sdpa",))


def now() -> str:
    """The time as reports give it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
