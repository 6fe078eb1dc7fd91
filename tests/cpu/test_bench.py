"""A benchmark figure is honest: interleaved, behind a check that can fail, with what it was made
on written beside it."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from heedful.bench import check, report, timing
from heedful.bench.cases import GROUPS, Case, cases
from heedful.bench.check import Checker, Results, attend
from heedful.bench.peers import PEERS, Peer, draw, find
from heedful.bench.run import measure, records
from heedful.core.mask import MaskSpec
from heedful.core.operands import Operands
from heedful.core.problem import AttentionProblem
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
    for part in Checker(case, inputs).slices:
        for name, wanted in zip(Results._fields, (want_out, *want[:3]), strict=True):
            own = part.of(name, torch.from_numpy(wanted))
            error = (getattr(part.exact, name) - own).abs().max()
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
    for part in checker.slices:
        error = (part.exact.out - part.of("out", want)).abs().max()
        # Both sum the same products in float64, in another order.
        assert error <= np.finfo(np.float64).eps * 97 * want.abs().max()
    assert checker.why_wrong(Results(want)) is None
    assert checker.why_wrong(Results(want.roll(1, dims=1))) is not None
    outcome = measure(case, [PEERS["heedful"], PEERS["cudnn"]], CPU, 5)
    assert outcome.figures[0].time_us is not None
    assert "does not take" in (outcome.figures[1].missing or "")


def test_the_largest_error_of_one_slice_is_allowed_in_the_other():
    """In float32 one draw's largest error is a matter of luck: a right result was called wrong."""
    case = small("backward")
    checker = Checker(case, draw(case, CPU))
    first, last = checker.slices
    alone = [check._slice(case, draw(case, CPU), *where).largest for where in ((0, 0), (1, 1))]
    assert first.largest == last.largest != alone[0]
    assert first.largest == {name: max(one[name] for one in alone) for name in alone[0]}


def test_flops_of_packed_sequences_and_windows_are_those_of_the_pairs_that_count():
    assert packed().flops() == 2 * 6 * sum(n * n / 2 for n in (33, 1, 70)) * (16 + 8)
    mask = windowed().problem.mask
    assert windowed().flops() == 2 * 2 * 6 * mask.count_visible(65, 97) * 32


def test_the_reference_does_not_depend_on_its_blocks(monkeypatch):
    case = small("backward")
    inputs = draw(case, CPU)
    heads_first = [x[0, :, :3].transpose(0, 1) for x in (inputs.q, inputs.dout)]
    operands = (heads_first[0], inputs.k[0, :, 0], inputs.v[0, :, 0], heads_first[1])
    whole = attend(case, torch.float64, torch.float64, *operands)
    monkeypatch.setattr(check, "_BLOCK_BYTES", 3 * 97 * 8 * 7)  # seven rows a block
    blocks = attend(case, torch.float64, torch.float64, *operands)
    eps = torch.finfo(torch.float64).eps
    for name in Results._fields:
        one, other = getattr(whole, name), getattr(blocks, name)
        assert (one - other).abs().max() <= eps * 65 * one.abs().max(), name


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
    ulp of the bfloat16 output: of the larger of two slices as maximum, as RMS of each."""
    case = fp8_forward()
    inputs = draw(case, CPU)
    x = Operands(*inputs[:3])
    want = torch.from_numpy(oracle.forward(case.problem, operands_as_numpy(x))[0])
    twin = eager.forward(case.problem, x)[0]
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    largest = []
    for part in Checker(case, inputs).slices:
        exact = part.of("out", want)
        error = part.of("out", twin) - exact
        assert part.rms["out"] == pytest.approx(
            2 * float(error.square().mean().sqrt()) + half_ulp * float(exact.square().mean().sqrt())
        )
        largest.append(2 * float(error.abs().max()) + half_ulp * float(exact.abs().max()))
    assert part.largest["out"] == pytest.approx(max(largest))


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
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = timing.interleaved(calls, CPU, 5)
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    # One turn each to find how many calls a round takes, then five rounds.
    assert turns == ["a", "b"] * 6
    assert {len(rounds) for rounds in times.values()} == {5}


def test_host_timing_uses_every_argument_set_once_a_round():
    seen = []
    timing.interleaved_host({"a": seen.append}, 7, CPU, 5)
    assert seen == list(range(7)) * 6


def test_a_ratio_is_taken_round_by_round():
    spread = timing.ratios([2.0, 4.0, 9.0], [1.0, 4.0, 3.0])
    assert dataclasses.astuple(spread) == (2.0, 1.0, 3.0)


def test_fewer_than_five_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds must be >= 5"):
        timing.interleaved({}, CPU, 4)


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
