"""A wrong result gets no figure, wherever it is wrong and whenever: planted bugs of peers, each of
which a bench that looks at a corner, once, or at other calls than it times would not see."""

import dataclasses
from typing import Any

import pytest
import torch

from heedful.bench.harness import run, timing
from heedful.bench.harness.cases import Case
from heedful.bench.harness.peers import PEERS, Forward, Inputs, Peer
from heedful.bench.harness.run import Figure, measure
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from support.problems.grids import slow_but

CPU = torch.device("cpu")
DIRECTIONS = ["forward", "backward"]


def dense(direction: str = "forward", **facts) -> Case:
    grad = direction == "backward"
    facts = {"dtype": "float32", "causal": True, "needs_grad": grad} | facts
    return Case("cpu", AttentionProblem.dense(4, 150, 170, 6, 3, 16, **facts), direction)


def packed() -> Case:
    lengths = (33, 90, 1, 70)
    facts = {"total_q": sum(lengths), "total_k": sum(lengths), "dtype": "float32", "causal": True}
    return Case("cpu", AttentionProblem.dense(4, 90, 90, 6, 3, 16, **facts), lengths=lengths)


def peer(change, name: str = "broken", right: str = "heedful") -> Peer:
    """Another peer whose forward's result goes through `change`."""
    original = PEERS[right]

    def make(case: Case, inputs: Inputs) -> Forward:
        forward = original.make(case, inputs)
        return lambda q, k, v: change(forward(q, k, v))

    return dataclasses.replace(original, name=name, unfit=lambda case, device: None, make=make)


def figure(case: Case, *peers: Peer) -> Figure:
    return measure(case, list(peers), CPU, 5).figures[0]


def assert_refused(found: Figure, words: str = "") -> None:
    assert found.wrong and found.time_us is None and found.ratio is None, found
    assert words in (found.missing or "")


class Changed(torch.autograd.Function):
    """The gradients of q, k and v through a function of the four."""

    @staticmethod
    def forward(ctx, change, *tensors):
        ctx.change = change
        return tuple(t.clone() for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        return (None, *ctx.change(*grads))


def gradient_peer(change) -> Peer:
    """Heedful, whose gradients (dq, dk, dv) go through `change`."""
    original = PEERS["heedful"]

    def make(case: Case, inputs: Inputs) -> Forward:
        forward = original.make(case, inputs)
        return lambda q, k, v: forward(*Changed.apply(change, q, k, v))

    return dataclasses.replace(original, name="broken", make=make)


def put(where: tuple, what: Any):
    """A change that puts a value, or a function of what is there, at a place."""

    def change(out: torch.Tensor) -> torch.Tensor:
        made = out.clone()
        value: Any = what(made[where]) if callable(what) else what
        made[where] = value
        return made

    return change


PLACES = {
    "a middle batch entry": (slice(1, 3),),
    "one head of one entry": (2, slice(None), 3),
    "the last rows of a middle head": (1, slice(140, None), 2),
    "the first row": (slice(None), 0),
    "a tile of rows": (2, slice(64, 128), 4),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", [torch.nan, lambda part: part * 1.02], ids=["nan", "scaled"])
def test_a_result_that_is_wrong_in_one_place_gets_no_figure(place, what, direction):
    assert_refused(figure(dense(direction), peer(put(PLACES[place], what))), "out")


@pytest.mark.parametrize("place", [(1, 77, 4, 5), (2, 3, 1, 0)])
def test_one_element_that_is_not_finite_is_found(place):
    assert_refused(figure(dense(), peer(put(place, torch.inf))), "not finite")
    assert_refused(figure(dense(), peer(put(place, torch.nan))), "not finite")


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_is_wrong_in_one_place_gets_no_figure(name, place):
    index = ["dq", "dk", "dv"].index(name)
    where = PLACES[place]
    if index and len(where) == 3:
        where = (*where[:2], where[2] // 2)

    def change(*grads):
        made = list(grads)
        made[index] = put(where, lambda part: part * 1.02)(made[index])
        return made

    assert_refused(figure(dense("backward"), gradient_peer(change)), name)


@pytest.mark.parametrize("sequence", range(4))
def test_every_packed_sequence_is_checked(sequence):
    starts = packed().starts
    place = (0, slice(starts[sequence], starts[sequence + 1]), 2)
    assert_refused(figure(packed(), peer(put(place, lambda part: part * 1.02))), "out")
    assert figure(packed(), peer(lambda out: out)).time_us is not None


@pytest.mark.parametrize("left", [3, 40])
def test_a_window_too_wide_by_one_key_gets_no_figure(left):
    def window(size: int) -> Case:
        mask = MaskSpec.of(True, (size, 0))
        problem = AttentionProblem.dense(2, 150, 150, 4, 2, 16, dtype="float32", mask=mask)
        return Case("cpu", problem)

    original = PEERS["heedful"]
    other = dataclasses.replace(original, make=lambda _, x: original.make(window(left + 1), x))
    assert_refused(figure(window(left), other))
    assert figure(window(left), original).time_us is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_keys_lost_by_late_rows_alone_are_found(dtype):
    """Their share of the error over all rows, most of which see few keys, is small."""
    problem = AttentionProblem.dense(1, 600, 600, 2, 2, 16, dtype=dtype, causal=True)
    case = Case("cpu", problem)
    original = PEERS["heedful"]

    def make(case: Case, inputs: Inputs) -> Forward:
        forward = original.make(case, inputs)

        def without_keys(q, k, v):
            out = forward(q, k, v).clone()
            short = k[:, :-8], v[:, :-8]
            out[:, -1:] = forward(q[:, -1:], *short)
            return out

        return without_keys

    assert_refused(figure(case, dataclasses.replace(original, make=make)), "out")


class Counted:
    """A change from one of its calls on, or in that call alone."""

    def __init__(self, change, first: int, last: int = 10**9):
        self.change, self.first, self.last, self.calls = change, first, last, 0

    def __call__(self, *results):
        self.calls += 1
        if self.first <= self.calls <= self.last:
            return self.change(*results)
        return results[0] if len(results) == 1 else results


# The check before the timing makes a few calls; the timing loop makes dozens.
@pytest.mark.parametrize("first", slow_but({2, 30}, [2, 3, 5, 10, 30]))
def test_a_result_that_is_wrong_from_some_call_on_gets_no_figure(first, monkeypatch):
    # However slow the machine, as many calls as this takes.
    monkeypatch.setattr(timing, "LEAST_CALLS", first)
    scaled = Counted(lambda out: out * 1.02, first)
    assert_refused(figure(dense(), peer(scaled)))
    assert scaled.calls >= first


@pytest.mark.parametrize("first", [2, 3, 5, 10])
def test_gradients_that_are_wrong_from_some_call_on_get_no_figure(first):
    lost = Counted(lambda dq, dk, dv: (dq, dk * 1.02, dv), first)
    assert_refused(figure(dense("backward"), gradient_peer(lost)), "dk")


def test_a_wrong_peer_leaves_the_figures_of_the_others():
    bases = [PEERS["math"], peer(Counted(lambda out: out * 2, 10), "sdpa", "math")]
    outcome = measure(dense(causal=False), [*bases, PEERS["heedful"]], CPU, 5, ("sdpa", "math"))
    math, wrong, ours = outcome.figures
    assert_refused(wrong)
    assert math.time_us is not None and ours.ratio is not None and outcome.base == "math"


def test_a_call_that_writes_nothing_is_found():
    """It returns what an earlier one made: that was spoiled once it had been checked."""
    kept = []

    def once(out: torch.Tensor) -> torch.Tensor:
        kept.append(out)
        return kept[0]

    assert_refused(figure(dense(), peer(once)), "not finite")


def test_gradients_that_are_kept_are_found():
    kept = []

    def once(*grads):
        kept.append([g.clone() for g in grads])
        return kept[0]

    assert_refused(figure(dense("backward"), gradient_peer(once)), "not finite")


def test_a_call_that_returns_its_input_is_found_and_spoils_it_for_nobody():
    def make(case: Case, inputs: Inputs) -> Forward:
        return lambda q, k, v: q

    problem = AttentionProblem.dense(2, 30, 30, 2, 2, 16, dtype="float32")
    lazy = dataclasses.replace(PEERS["heedful"], name="lazy", make=make)
    outcome = measure(Case("cpu", problem), [lazy, PEERS["heedful"]], CPU, 5)
    assert_refused(outcome.figures[0], "memory of an input")
    assert outcome.figures[1].time_us is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_result_of_another_dtype_gets_no_figure(dtype):
    assert_refused(figure(dense(), peer(lambda out: out.to(dtype))), "dtype")


def test_a_result_of_another_shape_gets_no_figure():
    assert_refused(figure(dense(), peer(lambda out: out[:, :-1])), "shape")
    assert_refused(figure(dense(), peer(lambda out: out.transpose(1, 2))), "shape")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_heedful_itself_is_checked(direction, monkeypatch):
    import heedful

    right = heedful.flash_attn_func
    wrong = Counted(lambda out: put((1,), torch.nan)(out), 1)
    monkeypatch.setattr(heedful, "flash_attn_func", lambda *a, **more: wrong(right(*a, **more)))
    assert_refused(figure(dense(direction), PEERS["heedful"]))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 2048, 16, 4, 128), (3, 1, 700, 4, 4, 64), (2, 4, 900, 8, 2, 64)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_decode_step_gets_its_figure(sizes, dtype):
    """Its query heads are multiplied one by one, by eager PyTorch too."""
    problem = AttentionProblem.dense(*sizes, dtype=dtype, causal=sizes[1] > 1)
    for found in measure(
        Case("decode", problem), [PEERS["heedful"], PEERS["math"]], CPU, 5
    ).figures:
        assert found.time_us is not None, found


def host(direction: str = "forward", grad: bool = False) -> Case:
    problem = AttentionProblem.dense(1, 20, 20, 2, 2, 16, dtype="float32", needs_grad=grad)
    return Case("overhead", problem, direction, host=True, grad=grad)


def tried(case: Case, one: Peer) -> run.Trial:
    trial = run.Trial(case, CPU, entrants=[one])
    trial.enter_all()
    return trial


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_on_other_tensors_that_answers_for_the_first_gets_no_figure(
    direction, grad, monkeypatch
):
    """So is a launch that keeps the addresses of its first call."""
    monkeypatch.setattr(run, "HOST_SETS", 12)
    case = host(direction, grad or direction == "backward")
    original = PEERS["heedful"]

    def make(case: Case, inputs: Inputs) -> Forward:
        forward, first = original.make(case, inputs), inputs[:3]
        return lambda q, k, v: forward(
            *(a + (b - b.detach()) for a, b in zip(first, (q, k, v), strict=True))
        )

    stale = tried(case, dataclasses.replace(original, name="stale", make=make))
    assert_refused(stale.refused["stale"], "error")
    right = tried(case, original)
    assert not right.refused and len(right.times(5)["heedful"]) == 5
    assert not right.refused


def test_host_calls_that_go_wrong_while_they_are_timed_get_no_figure(monkeypatch):
    monkeypatch.setattr(run, "HOST_SETS", 12)
    trial = tried(host(), peer(Counted(lambda out: out * 1.02, 40)))
    assert not trial.refused
    assert trial.times(5) == {}
    assert_refused(trial.refused["broken"], "out")


class Watched(torch.autograd.Function):
    """Notes forwards and backwards in the order in which they run."""

    @staticmethod
    def forward(ctx, log, out):
        ctx.log = log
        log.append("forward")
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("backward")
        return None, grad


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_timed_is_the_direction_of_the_case(direction, monkeypatch):
    log, timed = [], []
    watched = peer(lambda out: Watched.apply(log, out))
    clock = timing._cpu_clock

    def listening(*args):
        del log[:]
        made = clock(*args)
        timed.append(list(log))
        return made

    monkeypatch.setattr(timing, "_cpu_clock", listening)
    assert figure(dense(direction), watched).time_us is not None
    # Five rounds, and what finds out how many calls a round takes.
    assert len(timed) == 6 and all(len(calls) >= 3 for calls in timed)
    assert {name for calls in timed for name in calls} == {direction}


def test_a_backward_timed_as_a_forward_gets_no_figure(monkeypatch):
    """Whatever is timed must return what is checked."""

    def forward_alone(case, forward, inputs):
        return case_call(dataclasses.replace(case, direction="forward"), forward, inputs)

    case_call = run.call_of
    monkeypatch.setattr(run, "call_of", forward_alone)
    assert_refused(figure(dense("backward"), PEERS["heedful"]), "dq is missing")


def test_a_forward_timed_as_a_backward_gets_no_figure(monkeypatch):
    def backward_too(case, forward, inputs):
        return case_call(dataclasses.replace(case, direction="backward"), forward, inputs)

    case_call = run.call_of
    monkeypatch.setattr(run, "call_of", backward_too)
    assert_refused(figure(dense(), PEERS["heedful"]), "dq was not asked for")
