"""Every table of the bench goes one way from a case to its figures, and no wrong result arrives."""

import importlib
import pkgutil

import pytest

torch = pytest.importorskip("torch")

from heedful import bench  # noqa: E402
from heedful.bench.harness import protocol, timing  # noqa: E402
from heedful.bench.harness.protocol import HostTimed, Row, Trial, ready  # noqa: E402
from heedful.bench.harness.timing import Spread  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)
HOOKS = ("draw", "refer", "peers", "check", "probe", "turns", "enter_all")


class Case(Trial):
    """The case's name is drawn; a result is right as long as it is that."""

    makers: dict = {}

    def draw(self):
        return f"{self.case} on {self.device.type}"

    def refer(self):
        case = self.tensors

        class Reference:
            def why_wrong(self, out):
                return None if out == case else f"{out} is not {case}"

        return Reference()

    def peers(self):
        return self.makers


@pytest.fixture
def tried(monkeypatch):
    """A trial of makers, with rounds of one call each."""
    monkeypatch.setattr(
        timing, "_cpu_clock", lambda call, count, keep: ([2 / 2**20] * count, call())
    )

    def trial(device=CPU, **makers):
        monkeypatch.setattr(Case, "makers", makers)
        return Case("a", device)

    return trial


def returning(*results):
    """A maker of a call that returns one after the other, and then the last again and again."""
    left = list(results)
    return lambda: lambda: left.pop(0) if len(left) > 1 else left[0]


RIGHT = "a on cpu"


def test_a_case_is_drawn_checked_and_timed_and_each_peer_has_a_figure_or_a_reason(tried):
    def fails():
        raise ValueError("first\nsecond")

    trial = tried(
        right=returning(RIGHT),
        absent=lambda: "is not here",
        unmade=fails,
        raises=lambda: fails,
        wrong=returning("b"),
        later=returning(RIGHT, RIGHT, "c"),
    )
    row = trial.measure(5)
    assert row == Row("a", {"right": Spread(*[2e6 / 2**20] * 3)}, row.missing)
    assert row.missing == {
        "absent": "is not here",
        "unmade": "ValueError: first",
        "raises": "ValueError: first",
        "wrong": f"b is not {RIGHT}",
        "later": f"c is not {RIGHT}",
    }
    assert trial.wrong == {"wrong", "later"} and trial.raised == {"unmade", "raises"}
    assert list(trial.calls) == ["right", "later"]


@pytest.mark.parametrize("call", range(2, 8))
def test_a_result_that_turns_wrong_in_any_turn_costs_the_figure(call, tried):
    """The clock calls once to count, and once in each of five rounds."""
    trial = tried(late=returning(*[RIGHT] * call, "b"), right=returning(RIGHT))
    row = trial.measure(5)
    assert row.missing == ({"late": f"b is not {RIGHT}"} if call < 7 else {})
    assert list(row.times) == (["right"] if call < 7 else ["late", "right"])


def test_the_first_fault_is_the_reason(tried):
    trial = tried()
    trial.inspect("one", "b")
    trial.inspect("one", "c")
    assert trial.missing == {"one": f"b is not {RIGHT}"}


def test_a_fault_before_an_error_is_the_reason(tried):
    trial = tried()

    def probe(name, call):
        trial.inspect(name, call())
        raise RuntimeError("afterwards")

    trial.probe = probe
    trial.enter("one", returning("b"))
    assert trial.missing == {"one": f"b is not {RIGHT}"} and not trial.calls
    assert trial.wrong == trial.raised == {"one"}


def test_a_gpus_memory_is_given_back_after_each_peer(tried, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    tried(CUDA, one=returning("a on cuda"), two=lambda: "is not here").enter_all()
    tried(CPU, one=returning(RIGHT)).enter_all()
    assert emptied == [1, 1]


def test_makers_of_calls_that_are_there_are_not_one_maker():
    assert {name: make() for name, make in ready({"a": 1, "b": 2}).items()} == {"a": 1, "b": 2}


def test_times_of_the_host_are_taken_in_turns_after_a_warm_up_without_a_check():
    log = []

    class Host(HostTimed):
        def draw(self):
            return ("a", "b")

        def peers(self):
            return ready({name: [name] for name in self.tensors})

        def microseconds(self, name, call):
            assert call == [name]
            log.extend(call)
            return float(len(log))

    row = Host("case", CPU).measure(2)
    assert log == ["a", "b", *"abab"]
    assert row.times == {"a": Spread(4.0, 3.0, 5.0), "b": Spread(5.0, 4.0, 6.0)}
    assert not row.missing


def test_a_table_may_order_each_round_anew():
    class Reversed(HostTimed):
        log: list = []

        def draw(self):
            return "ab"

        def peers(self):
            return ready({name: [name] for name in self.tensors})

        def order(self, number):
            return [*self.calls][:: -1 if number % 2 else 1]

        def microseconds(self, name, call):
            self.log.append(name)
            return 1.0

    assert Reversed("case", CPU).measure(3).times == dict.fromkeys("ab", Spread(1.0, 1.0, 1.0))
    assert Reversed.log == ["a", "b", *"ab", *"ba", *"ab"]


def modules() -> list:
    """All modules of the bench whose requirements are there."""
    found = []
    for info in pkgutil.walk_packages(bench.__path__, "heedful.bench."):
        try:
            found.append(importlib.import_module(info.name))
        except ImportError:
            continue
    return found


def tables(kind: type) -> set[type]:
    """Subclasses in the bench, of subclasses too."""
    own = {one for one in kind.__subclasses__() if one.__module__.startswith("heedful.bench")}
    return own | {one for each in own for one in tables(each)}


def test_every_table_that_times_is_a_trial_and_nobody_goes_around_the_check():
    """Modules that keep a clock of their own name what they are: a trial, or training."""
    names = {module.__name__.rpartition(".")[2] for module in modules()}
    assert {"run", "steps", "mixed", "splits", "host", "lengths", "small_calls"} <= names
    found = {f"{one.__module__.rpartition('.')[2]}.{one.__name__}" for one in tables(Trial)}
    want = {"run.Trial", "steps.Trial", "mixed.Trial", "splits.Trial", "protocol.HostTimed"}
    want |= {"protocol.Timed", "torchs.Device", "torchs.Host"}
    want |= {"host.Trial", "lengths.Trial", "small_calls.Trial"}
    if "in_jax" in names:
        want |= {"in_jax.Trial", "in_jax.Dispatch"}
    if "layers" in names:
        want |= {"layers.Host"}
    assert found == want
    for table in tables(Trial):
        # Taking in, refusing and choosing figures is the protocol's alone.
        own = {name for name in vars(table) if name in ("enter", "inspect", "times", "measure")}
        assert not own, f"{table.__module__} has {own} of its own"
    for hook in HOOKS:
        assert callable(getattr(protocol.Trial, hook))
