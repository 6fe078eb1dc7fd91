"""A benchmark figure is honest: interleaved, behind a check that can fail, with what it was made
on written beside it."""

import json

import numpy as np
import pytest
import torch

from heedful.bench.harness import exact, report, timing
from heedful.bench.harness.cases import GROUPS, Case, cases
from heedful.bench.harness.check import Checker
from heedful.bench.harness.exact import Results
from heedful.bench.harness.peers import PEERS, Peer, draw, find
from heedful.bench.harness.run import measure, records
from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.reference import eager, oracle
from heedful.reference.convert import operands_as_numpy

CPU = torch.device("cpu")


def small(direction="forward", causal=True, dtype="float32") -> Case:
    grad = direction == "backward"
    problem = AttentionProblem.dense(
        2, 65, 97, 6, 2, 16, dtype=dtype, causal=causal, needs_grad=grad
    )
    return Case("cpu", problem, direction)


def windowed() -> Case:
    mask = MaskSpec.of(True, (20, 0))
    return Case("cpu", AttentionProblem.dense(2, 65, 97, 6, 2, 16, dtype="float32", mask=mask))


def packed() -> Case:
    lengths = (33, 1, 70)
    facts = {"total_q": sum(lengths), "total_k": sum(lengths), "head_dim_v": 8}
    problem = AttentionProblem.dense(3, 70, 70, 6, 2, 16, dtype="float32", causal=True, **facts)
    return Case("cpu", problem, lengths=lengths)


def broken(how) -> Peer:
    """SDPA's math whose output goes through `how`."""
    right = PEERS["math"]

    def make(case, inputs):
        forward = right.make(case, inputs)
        return lambda q, k, v: how(forward(q, k, v))

    return Peer("broken", "", lambda case, device: None, make)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_of_the_check_is_the_oracle(causal):
    case = small("backward", causal)
    inputs = draw(case, CPU)
    q, k, v, dout = (x.double().numpy() for x in inputs)
    want_out, _, _ = oracle.forward(case.problem, Operands(q, k, v))
    want = oracle.backward(case.problem, Operands(q, k, v), dout)
    eps = np.finfo(np.float64).eps
    checker = Checker(case, inputs)
    assert sum(len(group.batches) for group in checker.groups) == 2 * 2
    for group in checker.groups:
        assert list(group.exact) == list(Results._fields)
        for name, wanted in zip(Results._fields, (want_out, *want[:3]), strict=True):
            own = group.of(name, torch.from_numpy(wanted), case.problem.group)
            error = (group.exact[name] - own).abs().max()
            # Both sum the same products in float64, in another order.
            terms = case.problem.group * (case.problem.seqlen_q + case.problem.seqlen_k)
            assert error <= eps * terms * own.abs().max()


@pytest.mark.parametrize("case", [windowed(), packed()], ids=["window", "packed"])
def test_windows_and_packed_sequences_are_checked_against_the_oracle(case):
    inputs = draw(case, CPU)
    arrays = [x.double().numpy() for x in inputs[:3]]
    x = Operands(*arrays)
    if case.lengths:
        starts = np.array(case.starts, np.int32)
        x = Operands(*(a[0] for a in arrays), cu_seqlens_q=starts, cu_seqlens_k=starts)
    want = torch.from_numpy(oracle.forward(case.problem, x)[0])
    want = want[None] if case.lengths else want
    checker = Checker(case, inputs)
    for group in checker.groups:
        error = (group.exact["out"] - group.of("out", want, case.problem.group)).abs().max()
        # Both sum the same products in float64, in another order.
        assert error <= np.finfo(np.float64).eps * 97 * want.abs().max()
    assert checker.why_wrong(Results(want.float())) is None
    assert checker.why_wrong(Results(want.float().roll(1, dims=1))) is not None
    outcome = measure(case, [PEERS["heedful"], PEERS["cudnn"]], CPU, 5)
    assert outcome.figures[0].time_us is not None
    assert "does not take" in (outcome.figures[1].missing or "")


def by_hand(case: Case, inputs, most: dict | None = None) -> dict:
    """By result and band, the worst (largest, RMS) error of eager PyTorch over all (entry, KV
    head), no less than in `most`, and the same of the exact result."""
    checker = Checker(case, inputs, most_draws=1)
    found = most or {}
    (group,) = checker.groups
    for part in range(len(group.batches)):
        batch, kv_head = int(group.batches[part]), int(group.kv_heads[part])
        heads = slice(kv_head * 3, kv_head * 3 + 3)
        q, dout = (x[batch, :, heads].transpose(0, 1) for x in (inputs.q, inputs.dout))
        x = exact.Operands(q, inputs.k[batch, :, kv_head], inputs.v[batch, :, kv_head], dout)
        rows, keys = group.rows[part], group.keys[part]
        twin, truth = exact.eager(case, x, rows, keys), exact.exact(case, x, rows, keys)
        for name, want in truth._asdict().items():
            for band in group.bands[name].unique().tolist():
                inside = group.bands[name][part] == band
                if not inside.any():
                    continue
                both = []
                for what in (getattr(twin, name).double() - want, want):
                    some = what[:, inside]
                    both += [float(some.abs().max()), float(some.square().mean().sqrt())]
                before = found.get((name, band), (0,) * 4)
                found[name, band] = tuple(map(max, before, both))
    return found


def budgets(checker: Checker) -> dict:
    (group,) = checker.groups
    return {
        (name, band): (twin[band].largest, twin[band].rms, once[band].largest, once[band].rms)
        for name, (twin, once) in group.budgets.items()
        for band in twin
    }


def test_a_budget_is_that_of_the_worst_entry_and_head_of_the_worst_of_the_draws():
    """In float32 one draw's largest error is a matter of luck: a right result was called wrong."""
    case, half_eps = small("backward"), torch.finfo(torch.float32).eps / 2
    inputs = draw(case, CPU)
    checker = Checker(case, inputs)
    want = by_hand(case, inputs)
    for seed in (None, 1010, 1011, 1012):  # 4 (entry, KV head) and as many draws are 16
        if seed is not None:
            assert checker._draw_again()
            want = by_hand(case, draw(case, CPU, seed), want)
        got = budgets(checker)
        assert got.keys() == want.keys() and len(got) > 4
        for place, numbers in got.items():
            twin, once = want[place][:2], [half_eps * size for size in want[place][2:]]
            assert numbers == pytest.approx((*twin, *once), rel=1e-5), place
    assert not checker._draw_again()


def test_the_rule_is_twice_what_eager_errs_and_one_rounding():
    case = small("forward", causal=False)
    inputs = draw(case, CPU)
    checker = Checker(case, inputs, most_draws=1)
    arrays = Operands(*(x.double().numpy() for x in inputs[:3]))
    want = torch.from_numpy(oracle.forward(case.problem, arrays)[0])
    ((_, twin_rms, _, once_rms),) = budgets(checker).values()
    signs = torch.rand(want.shape).sub(0.5).sign()
    for times, passes in ((0.8, True), (1.3, False)):
        error = times * (2 * twin_rms + once_rms)
        found = checker.why_wrong(Results((want + error * signs).float()))
        assert (found is None) == passes, found
        assert passes or "rms error" in (found or "")


def test_flops_of_packed_sequences_and_windows_are_those_of_the_pairs_that_count():
    assert packed().flops() == 2 * 6 * sum(n * n / 2 for n in (33, 1, 70)) * (16 + 8)
    mask = windowed().problem.mask
    assert windowed().flops() == 2 * 2 * 6 * mask.count_visible(65, 97) * 32


def test_the_reference_does_not_depend_on_its_blocks(monkeypatch):
    case = small("backward")
    inputs = draw(case, CPU)
    heads_first = [x[0, :, :3].transpose(0, 1) for x in (inputs.q, inputs.dout)]
    x = exact.Operands(heads_first[0], inputs.k[0, :, 0], inputs.v[0, :, 0], heads_first[1])
    rows, keys = torch.arange(65), torch.arange(97)
    whole = exact.exact(case, x, rows, keys)
    monkeypatch.setattr(exact, "BLOCK_BYTES", 3 * 97 * 8 * 7)  # seven rows a block
    blocks = exact.exact(case, x, rows, keys)
    some = exact.exact(case, x, rows[3::5], keys[4::7])
    eps = torch.finfo(torch.float64).eps
    for name in Results._fields:
        one, other, part = (getattr(results, name) for results in (whole, blocks, some))
        assert (one - other).abs().max() <= eps * 65 * one.abs().max(), name
        own = one[:, 4::7] if name in ("dk", "dv") else one[:, 3::5]
        assert (own - part).abs().max() <= eps * 65 * one.abs().max(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_right_peer_passes_the_check(direction, dtype):
    outcome = measure(small(direction, False, dtype), [PEERS["math"]], CPU, 5)
    assert outcome.figures[0].missing is None
    assert outcome.figures[0].time_us is not None


@pytest.mark.parametrize(
    "how",
    [
        lambda out: out * 1.02,
        lambda out: out.roll(1, dims=2),
        lambda out: torch.where(torch.arange(out.shape[1])[:, None, None] == 64, 0.0, out),
        lambda out: out / 0,
        lambda out: out.float().to(torch.bfloat16),
    ],
    ids=["scaled", "heads-rotated", "last-row-lost", "not-finite", "rounded-too-far"],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_result_gets_no_figure(how, direction):
    case = small(direction, causal=False)
    outcome = measure(case, [broken(lambda out: how(out).to(out.dtype)), PEERS["math"]], CPU, 5)
    wrong, right = outcome.figures
    assert wrong.wrong and wrong.time_us is None and wrong.missing
    assert right.time_us is not None and outcome.base == "math"
    assert any(line.startswith("[bold]broken") for line in report.absences([outcome]))


def fp8_forward(causal=True) -> Case:
    return small(causal=causal, dtype="float8_e4m3fn")


@pytest.mark.parametrize("causal", [False, True])
def test_fp8_is_timed_beside_the_same_values_in_bfloat16(causal):
    case = fp8_forward(causal)
    outcome = measure(case, [PEERS["heedful"], PEERS["bf16"], PEERS["math"]], CPU, 5)
    ours, wide, other = outcome.figures
    assert ours.time_us is not None, ours.missing
    assert wide.time_us is not None, wide.missing
    assert outcome.base == "bf16" and ours.ratio is not None
    assert other.missing == "is not timed on 8-bit inputs"
    assert "8-bit" in (PEERS["bf16"].why_not(small(), CPU) or "")


@pytest.mark.parametrize(
    "how", [lambda out: out.roll(1, dims=2), lambda out: out / 0], ids=["heads-rotated", "inf"]
)
def test_a_wrong_result_of_fp8_inputs_gets_no_figure(how):
    right = PEERS["heedful"]

    def make(case, inputs):
        forward = right.make(case, inputs)
        return lambda q, k, v: how(forward(q, k, v))

    peer = Peer("broken", "", lambda case, device: None, make, fp8=True)
    assert measure(fp8_forward(), [peer], CPU, 5).figures[0].wrong


def test_the_check_allows_fp8_what_the_error_budgets_allow():
    """Twice the error of eager attention, whose probabilities are rounded to e4m3 too, plus half an
    ulp of the bfloat16 output."""
    case = fp8_forward(causal=False)
    inputs = draw(case, CPU)
    x = Operands(*inputs[:3])
    want = torch.from_numpy(oracle.forward(case.problem, operands_as_numpy(x))[0])
    twin = eager.forward(case.problem, x)[0]
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    checker = Checker(case, inputs, most_draws=1)
    (group,) = checker.groups
    truth = group.of("out", want, 3)
    error = group.of("out", twin, 3) - truth
    # All rows see the same number of keys, so that there is one budget.
    (got,) = budgets(checker).values()
    assert got == pytest.approx(
        (
            float(error.abs().max()),
            float(error.square().mean((1, 2, 3)).max().sqrt()),
            half_ulp * float(truth.abs().max()),
            half_ulp * float(truth.square().mean((1, 2, 3)).max().sqrt()),
        )
    )


def test_a_wrong_gradient_behind_a_right_output_gets_no_figure():
    class Crooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] * 1.02

    peer = broken(Crooked.apply)
    outcome = measure(small("backward", False), [peer], CPU, 5)
    assert outcome.figures[0].wrong
    assert (outcome.figures[0].missing or "").startswith("dq")


def test_peers_take_turns_in_every_round():
    order, seen = [], []
    calls = {name: (lambda name=name: order.append(name) or len(order)) for name in "ab"}
    times = timing.interleaved(calls, CPU, 5, lambda *what: seen.append((*what, len(order))))
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    # One turn each to find how many calls a round takes, then five rounds.
    assert turns == ["a", "b"] * 6
    assert {len(rounds) for rounds in times.values()} == {5}
    # After each turn, what one of its calls returned is looked at: not always the same one.
    assert [name for name, _, _ in seen] == ["a", "b"] * 5
    assert all(order[call - 1] == name and call <= made for name, call, made in seen)
    assert len({made - call for _, call, made in seen}) > 1


def test_host_timing_uses_every_argument_set_once_a_round():
    made, seen = [], []
    sets = [lambda number=number: made.append(number) or -number for number in range(7)]
    timing.interleaved_host({"a": sets}, CPU, 5, [0, 3, 6], lambda *what: seen.append(what))
    assert made == list(range(7)) * 6
    assert len(seen) == 6 and {name for name, _, _ in seen} == {"a"}
    assert all(returned == -number for _, number, returned in seen)
    assert {number for _, number, _ in seen} <= {0, 3, 6}


def test_a_ratio_is_taken_round_by_round():
    spread = timing.ratios([2.0, 4.0, 9.0], [1.0, 4.0, 3.0])
    assert spread == (2.0, 1.0, 3.0)


def test_fewer_than_five_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds must be >= 5"):
        timing.interleaved({}, CPU, 4, lambda name, result: None)


def test_a_missing_peer_is_named_with_its_reason():
    outcome = measure(small(causal=False), [PEERS["fa4"], PEERS["math"]], CPU, 5)
    assert outcome.figures[0].missing and not outcome.figures[0].wrong
    assert any("fa4" in line and "CPU" in line for line in report.absences([outcome]))


def test_an_unknown_peer_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="flash.*got 'fash'"):
        find("fash")


@pytest.mark.parametrize("group", GROUPS)
def test_every_case_has_a_name_of_its_own(group):
    names = [case.name for case in cases(group)]
    assert names and len(set(names)) == len(names)


def test_flops_are_counted_as_in_the_tables():
    by_name = {case.name: case for group in ("forward", "backward") for case in cases(group)}
    full = by_name["forward 4x4096x4096 h16/16 d128 bfloat16"]
    assert full.flops() == 4 * 4 * 16 * 4096 * 4096 * 128
    assert by_name["forward 4x4096x4096 h16/16 d128 bfloat16 causal"].flops() == full.flops() / 2
    assert by_name["backward 4x4096x4096 h16/16 d128 bfloat16"].flops() == full.flops() * 2.5


def test_a_record_carries_what_the_figure_was_made_on(tmp_path):
    outcome = measure(small(causal=False), [PEERS["math"], PEERS["fa4"]], CPU, 5)
    path = tmp_path / "deep" / "lines.jsonl"
    report.append_json_lines(path, records(outcome, CPU))
    report.append_json_lines(path, records(outcome, CPU))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["peer"] for line in lines] == ["math", "fa4"] * 2
    wanted = {"commit", "device", "driver", "versions", "clocks_before", "clocks_after", "date"}
    wanted |= {"direction", "dtype", "heads_q", "seqlen_k"}
    assert all(wanted <= line.keys() for line in lines)
    assert {"time_us", "tflops", "ratio"} <= lines[0].keys() and "missing" in lines[1]


def test_the_picture_is_drawn(tmp_path):
    outcomes = [measure(small(d, False), [PEERS["math"]], CPU, 5) for d in ("forward", "backward")]
    path = tmp_path / "deep" / "figures.png"
    report.picture(path, outcomes, "where and when")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_paged_case_is_timed_for_those_who_take_pages_and_right():
    problem = AttentionProblem.dense(2, 1, 64, 4, 2, head_dim=16, dtype="float32")
    case = Case("overhead", problem, paged=True)
    outcome = measure(case, [PEERS["heedful"], PEERS["math"]], CPU, 5)
    ours, other = outcome.figures
    assert ours.time_us is not None, ours.missing
    assert other.missing == "is not timed on paged caches"


def test_the_overhead_group_has_a_case_for_each_row_of_the_table():
    names = [case.name.removesuffix(f" {case.shape}") for case in cases("overhead")]
    assert names == [
        "host forward",
        "host forward with grad",
        "host backward",
        "host forward over pages",
        "host forward compiled",
    ]
