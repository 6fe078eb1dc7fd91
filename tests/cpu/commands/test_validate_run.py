"""How `heedful validate` runs its grid: what is asked of a backend, what is drawn again, and what
a verdict says."""

import datetime
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from heedful.core.registry import capability
from heedful.reference.budget import DRAWS, Error, Judgement, Results
from heedful.validation import grid, run
from heedful.validation.run import Verdict

CPU = torch.device("cpu")
SMALL = grid.Entry("small", (2, 12, 20, 4, 2, 16), "float32", bias=True)
GOOD = Judgement(Error(1.0, 0.5), Error(2.0, 1.0), "")
BAD = Judgement(Error(3.0, 0.5), Error(2.0, 1.0), "out: off by 3")


def test_a_verdict_says_all_that_is_wrong_and_what_was_judged_beside_its_budget():
    facts = {"backend": "portable", "problem": "dense", "backward": True}
    right = Verdict(**facts, judged={"out": GOOD})
    assert right.wrong == []
    numbers = {"error": {"largest": 1.0, "rms": 0.5}, "budget": {"largest": 2.0, "rms": 1.0}}
    results = {"out": numbers | {"wrong": ""}}
    assert right.record() == {**facts, "passed": True, "wrong": [], "results": results}
    off = Verdict(**facts, judged={"out": BAD, "lse": GOOD, "dq": replace(BAD, wrong="dq: off")})
    assert off.wrong == ["out: off by 3", "dq: off"] == off.record()["wrong"]
    assert off.record()["passed"] is False and [*off.record()["results"]] == ["out", "lse", "dq"]
    failed = Verdict("portable", "dense", failed="RuntimeError: no")
    assert failed.wrong == ["RuntimeError: no"] and not failed.record()["passed"]
    assert failed.record()["results"] == {} and failed.record()["backward"] is False
    skipped = Verdict("portable", "dense", skipped="has no bias")
    told = {"backend": "portable", "problem": "dense", "backward": False, "skipped": "has no bias"}
    assert skipped.record() == told and skipped.wrong == []


@pytest.fixture
def asked(monkeypatch):
    """What plans refuse by the words beside it, and what was planned and computed."""
    refused: dict[str, bool] = {}
    planned, computed = [], []

    def plan(problem, spec, tools, backend):
        planned.append((problem, backend))
        if problem.needs_grad and refused.get("backward"):
            raise ValueError("has no backward")
        if problem.return_lse and refused.get("lse"):
            raise ValueError("has no lse")
        if refused.get("all"):
            raise ValueError("has no kernel")

    def compute(backend, built):
        computed.append((backend, built))
        return run._results(run.oracle_results, built)

    monkeypatch.setattr(run, "plan", plan)
    monkeypatch.setattr(run, "_compute", compute)
    return refused, planned, computed


@pytest.mark.parametrize(
    ("refuses", "names"),
    [
        ([], {"out", "lse", "dq", "dk", "dv", "dbias"}),
        (["backward"], {"out", "lse"}),
        (["backward", "lse"], {"out"}),
    ],
)
def test_a_backend_is_asked_for_as_much_as_it_takes(refuses, names, asked):
    refused, planned, computed = asked
    refused |= dict.fromkeys(refuses, True)
    (verdict,) = run.verdicts([SMALL], ["portable"], CPU)
    assert {*(verdict.judged or {})} == names and not verdict.wrong and not verdict.skipped
    assert verdict.backward is ("dq" in names)
    tried = [(p.needs_grad, p.bias_grad, p.return_lse) for p, _ in planned]
    every = [(True, True, True), (False, False, True), (False, False, False)]
    assert tried == every[: len(refuses) + 1]
    ((backend, built),) = computed
    assert backend == "portable" and {name for _, name in planned} == {"portable"}
    assert (built.dout is None) == (built.dlse is None) == (not verdict.backward)


def test_a_backend_that_takes_nothing_is_skipped_with_its_last_reason(asked):
    asked[0]["all"] = True
    (verdict,) = run.verdicts([SMALL], ["portable"], CPU)
    assert verdict == Verdict("portable", "small", skipped="has no kernel")
    assert len(asked[1]) == 3 and not asked[2]


def test_what_a_backend_raises_is_its_verdict_and_the_next_runs(asked, monkeypatch):
    compute = run._compute

    def broken(backend, built):
        if backend == "wide":
            raise RuntimeError("no such instruction\nat all")
        return compute(backend, built)

    monkeypatch.setattr(run, "_compute", broken)
    wide, portable = run.verdicts([SMALL], ["wide", "portable"], CPU)
    assert wide == Verdict("wide", "small", True, failed="RuntimeError: no such instruction")
    assert not portable.wrong and portable.judged


def test_the_truth_is_computed_once_and_budgets_are_the_worst_of_draws_so_far(asked, monkeypatch):
    """As many draws as a backend needs to pass, at most as many as the budget has."""
    drawn, oracles, scale = [], [], {0: 1.0, 1: 3.0, 2: 2.0}
    build, oracle = run.build, run.oracle_results

    def built(entry, device, draw=0):
        drawn.append(draw)
        return build(entry, device, draw)

    def truth(*given):
        oracles.append(given)
        return oracle(*given)

    def twin(*given):
        exact, shift = oracle(*given), scale.get(len(drawn) - 1, 0.0)
        return Results(**{name: x + shift for name, x in exact.present().items()})

    monkeypatch.setattr(run, "build", built)
    monkeypatch.setattr(run, "oracle_results", truth)
    monkeypatch.setattr(run, "twin_results", twin)
    reference = run._Reference(SMALL, CPU)
    draws = reference._draws()
    largest = [next(draws)["out"].largest for _ in range(4)]
    assert largest == pytest.approx([1.0, 3.0, 3.0, 3.0]) and drawn == [0, 1, 2, 3]
    # They are kept; each has its own truth.
    assert [e["out"].largest for e in reference._draws()][:4] == largest
    assert drawn == list(range(DRAWS)) and len(oracles) == DRAWS
    assert reference._wanted() is reference._wanted() and len(oracles) == DRAWS
    assert np.isfinite(reference._wanted().out).all()


def test_results_are_read_from_an_output_that_held_nan(monkeypatch):
    built = grid.build(replace(SMALL, head_dim_v=8, bias=False), CPU)
    seen = []

    class Runner:
        def forward(self, x, out):
            seen.append(out.clone())
            assert x is built.x
            return out.fill_(2.0), torch.ones(2, 4, 12), None

        def backward_of(self, *given):
            def backward(*again):
                assert all(x is y for x, y in zip(given, again, strict=True))
                x, out, lse, dout, dlse = again
                assert x is built.x and dout is built.dout and dlse is built.dlse
                assert (out == 2).all() and (lse == 1).all()
                return [x.q * 3, x.k * 4, x.v * 5]

            return backward

    def prepare(problem, x, backend):
        assert (problem, x, backend) == (built.problem, built.x, "wide")
        return Runner()

    monkeypatch.setattr(run.backends, "prepare", prepare)
    found = run._compute("wide", built)
    (out,) = seen
    assert out.shape == (2, 12, 4, 8) and out.dtype == torch.float32 and out.isnan().all()
    assert {*found.present()} == {"out", "lse", "dq", "dk", "dv"}
    assert (found.out == 2).all() and np.array_equal(found.dk, built.x.k.double().numpy() * 4)
    # Without a backward there are no gradients.
    built = replace(built, dout=None)
    assert {*run._compute("wide", built).present()} == {"out", "lse"}


def test_a_device_has_its_backends_once_with_variants_for_what_has_aliases():
    names = run.backends_of(CPU)
    assert {"cpu", "sdpa"} <= set(names) and len(set(names)) == len(names)
    for variant in capability.VARIANTS:
        if variant.serves("torch") and variant.level(run.device_spec(CPU)) is not None:
            assert any(str(name).partition("/")[0] == variant.backend for name in names)


@pytest.mark.parametrize(
    ("level", "by_default", "is_gated"),
    [("emulated", False, 1), ("run", False, 0), ("emulated", True, 0), (None, False, 0)],
)
def test_a_record_speaks_for_kernels_that_wait_for_one(level, by_default, is_gated, monkeypatch):
    """Not for those that somebody ran there, nor for what is chosen anyway."""
    levels = {} if level is None else {"cpu": level}
    row = next(row for row in capability.VARIANTS if row.backend == "cpu")
    row = replace(row, levels=levels, by_default=by_default)
    monkeypatch.setattr(capability, "VARIANTS", (row,))
    assert run.gated(CPU) == ({"cpu"} if is_gated else frozenset())


def test_backends_are_timed_beside_sdpa_in_five_rounds(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "measure", lambda *what, **how: asked.append((what, how)))
    (case,) = run.bench_cases(CPU)
    run.bench(case, ["portable", "sdpa", "cpu"], CPU)
    (((given, peers, device), how),) = asked
    assert (given, device, how) == (case, CPU, {"rounds": 5, "bases": ("sdpa",)})
    assert [peer.name for peer in peers] == ["sdpa", "heedful:portable", "heedful:cpu"]


def test_a_report_has_the_time_in_utc_to_the_second():
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    told = datetime.datetime.fromisoformat(run.now())
    assert told.utcoffset() == datetime.timedelta(0) and told.microsecond == 0
    assert before <= told <= datetime.datetime.now(datetime.UTC)
