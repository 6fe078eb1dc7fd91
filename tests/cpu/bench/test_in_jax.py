"""The bench of JAX's calls: what it times is checked, and what is wrong gets no figure."""

import importlib
import os
import time
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import heedful.jax  # noqa: E402
from heedful.bench import in_jax  # noqa: E402
from heedful.bench.harness.cases import Case, cases  # noqa: E402
from heedful.bench.harness.exact import Results  # noqa: E402
from heedful.bench.harness.peers import Inputs  # noqa: E402

CPU = torch.device("cpu")
SMALL = [
    replace(case, problem=replace(case.problem, batch=2, seqlen_q=40, seqlen_k=40))
    for case in cases("cpu")[:1]
]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_way_is_checked_and_timed(direction):
    case = replace(SMALL[0], direction=direction)
    found = in_jax.measure(case, CPU, "xla", rounds=2)
    assert not found.missing
    assert list(found.times) == ["PyTorch", "JAX", "xla"]
    for times in found.times.values():
        assert len(times) == 2 and all(time > 0 for time in times)
    assert "xla / JAX" in in_jax._line(case, found, "xla")


def test_a_way_that_computes_wrong_gets_no_figure(monkeypatch):
    right = in_jax.attention

    def wrong(name, causal):
        attend = right(name, causal)
        return (lambda q, k, v: attend(q, k, v) * 1.1) if name == "xla" else attend

    monkeypatch.setattr(in_jax, "attention", wrong)
    found = in_jax.measure(SMALL[0], CPU, "xla", rounds=2)
    assert list(found.missing) == ["xla"] and "out of" in found.missing["xla"]
    assert "JAX" in found.times and "xla" not in found.times
    assert "xla / JAX" not in in_jax._line(SMALL[0], found, "xla")


GPU = torch.device("cuda", 3)


def test_jax_leaves_memory_to_torch_unless_it_is_told_otherwise(monkeypatch):
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    for given, want in ((None, "false"), ("true", "true")):
        if given is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, given)
        importlib.reload(in_jax)
        assert os.environ[name] == want
    assert (in_jax.MOST_CALLS, in_jax.ROUNDS, in_jax.HOST_SETS) == (6, 12, 256)


@pytest.mark.parametrize("us, calls", [(30_000.0, 1), (15_000.0, 1), (4_500.0, 4), (10.0, 6)])
def test_a_turn_of_long_calls_has_few(us, calls, monkeypatch):
    slower = iter((3 * us, us, 2 * us))
    monkeypatch.setattr(in_jax, "microseconds", lambda run, count: next(slower))
    assert in_jax.calls_a_turn(SMALL[0], CPU) == calls


@pytest.mark.parametrize("causal", [False, True])
def test_attention_under_jax_is_asked_for_by_each_ones_own_words(causal, monkeypatch):
    def noted(*given, **options):
        return given, options

    monkeypatch.setattr(heedful.jax, "flash_attn_func", noted)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *given, **more: (given, more))
    ours, theirs = (in_jax.attention(name, causal)(1, 2, 3) for name in ("heedful", "cudnn"))
    assert ours == ((1, 2, 3), {"causal": causal})
    assert theirs == ((1, 2, 3), {"is_causal": causal, "implementation": "cudnn"})


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_torch_is_ours_with_the_cases_mask(causal, monkeypatch):
    """The sum of q, k and v, doubled where it is causal."""

    def summed(q, k, v, causal):
        return (q + 10 * k + 100 * v) * (2 if causal else 1)

    monkeypatch.setattr(heedful, "flash_attn_func", summed)
    sets = [Inputs(*(torch.full((2,), 1.0 + n + 10 * own) for n in range(4))) for own in range(2)]
    times = 2 if causal else 1
    plain = cases("cpu")[causal]
    assert plain.problem.mask.causal == causal
    way = in_jax.in_torch(plain, sets)
    assert [x.tolist() for (x,) in way.run()] == [[321.0 * times] * 2, [1431.0 * times] * 2]
    first = way.first()
    assert first.out is not None and first.out.tolist() == [321.0 * times] * 2
    assert first[1:] == (None, None, None)
    backward = in_jax.in_torch(replace(plain, direction="backward"), sets)
    got: Any = backward.run()[1]
    # dout is 14.
    want = [1431.0, 14.0, 140.0, 1400.0]
    assert [x.tolist() for x in got] == [[value * times] * 2 for value in want]
    assert not any(x.requires_grad for x in got)
    want = [321.0, 4.0, 40.0, 400.0]
    named: Any = backward.first()
    assert [x.tolist() for x in named] == [[value * times] * 2 for value in want]


def test_on_a_gpu_all_sets_are_one_graph_that_is_waited_for(monkeypatch):
    log: list = []

    class OnGpu(torch.Tensor):
        device: Any = GPU

    class Graph:
        def replay(self):
            log.append("replay")

    class Capture:
        def __init__(self, graph):
            assert isinstance(graph, Graph)

        def __enter__(self):
            log.append("capture")

        def __exit__(self, *_):
            log.append("captured")

    def called(q, k, v, causal):
        log.append(float(q[0]))
        return q * 3

    monkeypatch.setattr(heedful, "flash_attn_func", called)
    for name, stand_in in {
        "synchronize": lambda: log.append("wait"),
        "CUDAGraph": Graph,
        "graph": Capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    sets = [Inputs(*(torch.full((1,), own).as_subclass(OnGpu),) * 4) for own in (1.0, 2.0)]
    way = in_jax.in_torch(SMALL[0], sets)
    # Once to make what a graph may not, then under capture.
    assert log == [1.0, 2.0, "wait", "capture", 1.0, 2.0, "captured"]
    log.clear()
    assert [float(x) for (x,) in way.run()] == [3.0, 6.0] and log == ["replay", "wait"]
    log.clear()
    (out, *_) = way.first()
    assert out is not None and float(out) == 3.0 and log == [1.0]


def event(name: str, us: float, kind: str = "CUDA") -> SimpleNamespace:
    ran = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind), time_range=ran)


@pytest.mark.parametrize("empty", [False, True])
def test_what_a_call_spends_is_what_the_device_has_recorded(empty, monkeypatch):
    log = []
    names = ["forward", "Memset (Device)", "Memcpy DtoD", "forward", "Memcpy HtoD", "backward"]
    events = [event(name, 2.0**place) for place, name in enumerate(names)]
    events.insert(2, event("cudaLaunchKernel", 1000.0, "CPU"))

    class Profile:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            log.append("begin")
            return self

        def __exit__(self, *_):
            log.append("end")

        def events(self):
            return None if empty else events

    monkeypatch.setattr(in_jax, "profile", Profile)
    got = in_jax.spent(lambda: log.append("run"), 4, GPU)
    assert got == ((0, 0, 0, 0) if empty else (63 / 4, 3 / 4, 1 / 4, 2 / 4))
    assert got._fields == ("us", "kernels", "memsets", "copies")
    assert log == ["begin", "run", "end"]


def test_on_a_cpu_the_time_of_the_host_is_that_of_one_of_the_calls(monkeypatch):
    now = iter([7.0, 7.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    ran = []
    assert in_jax.spent(lambda: ran.append(1), 4, CPU) == (125000.0, 0, 0, 0)
    assert ran == [1]


def test_each_way_is_behind_each_other_and_those_that_fail_say_why(monkeypatch):
    """Of four ways one computes wrong and one raises where its calls are all made."""
    log: list = []
    case = SMALL[0]

    class Looked:
        def __init__(self, *given):
            assert given[0] is case and float(given[1]) == 0.0

        def why_wrong(self, got):
            return got.out if got.out == "is wrong" else None

    def way(name: str, sets) -> in_jax.Way:
        assert [float(one) for one in sets] == [0, 1, 2, 3, 4, 5]

        def run():
            log.append(name)
            if name == "silent":
                raise AssertionError
            if name == "raises":
                raise ValueError("first\nsecond")

        out: Any = "is wrong" if name == "wrong" else name
        return in_jax.Way(run, lambda: Results(out))

    def spent(run, calls, device):
        assert (calls, device) == (6, GPU)
        run()
        return in_jax.Spent(float(len(log)), 1, 2, 3)

    def drawn(which, device, seed):
        assert which is case and device == GPU
        return torch.tensor(float(seed))

    monkeypatch.setattr(in_jax, "draw", drawn)
    monkeypatch.setattr(in_jax, "calls_a_turn", lambda which, device: 6)
    monkeypatch.setattr(in_jax, "Checker", Looked)
    monkeypatch.setattr(in_jax, "in_torch", lambda _, sets: way("PyTorch", sets))
    ours = {"name": "JAX"}
    monkeypatch.setattr(
        in_jax, "in_jax", lambda own, _, sets: way(ours["name"] if own == "heedful" else own, sets)
    )
    monkeypatch.setattr(in_jax, "spent", spent)
    found = in_jax.measure(case, GPU, "cudnn", 7)
    names = ["PyTorch", "JAX", "cudnn"]
    rounds = [tuple(log[at : at + 3]) for at in range(3, len(log), 3)]
    assert log[:3] == names and set(rounds[:6]) == {*permutations(names)}
    assert len(rounds) == 7 and rounds[6] == rounds[0]
    assert found.times == {
        name: [4.0 + 3 * number + one.index(name) for number, one in enumerate(rounds)]
        for name in names
    }
    assert (
        found.launches == {name: (times[-1], 1, 2, 3) for name, times in found.times.items()}
        and not found.missing
    )
    for name, reason in (
        ("wrong", "is wrong"),
        ("raises", "ValueError: first"),
        ("silent", "AssertionError: "),
    ):
        log.clear()
        found = in_jax.measure(case, GPU, name)
        assert found.missing == {name: reason}
        assert {own: len(times) for own, times in found.times.items()} == {"PyTorch": 12, "JAX": 12}
    ours["name"] = "wrong"
    monkeypatch.setattr(in_jax, "in_torch", lambda _, sets: way("silent", sets))
    found = in_jax.measure(case, GPU, "raises")
    assert list(found.missing) == ["PyTorch", "JAX", "raises"]
    assert not found.times and not found.launches


def test_dispatch_is_timed_with_and_without_gradients_behind_a_warm_up(monkeypatch):
    made, ways = [], iter(range(100))
    first = next(case for case in cases("overhead") if case.name.startswith("host forward"))

    def microseconds(run, calls):
        run()
        made.append(calls)
        return float(next(ways))

    def drawn(case: Case, device, seed: int) -> Inputs:
        assert case == first and device == CPU
        return Inputs(*(torch.full((1, 2, 1, 16), 1.0 + seed + n) for n in range(4)))

    returned: list = []

    def jitted(function):
        def call(*given):
            returned.append(function(*given))
            return returned[-1]

        return call

    def attention(name, causal):
        assert not causal
        return lambda q, k, v: (q + 2 * k + 3 * v) * (1 if name == "heedful" else 7)

    for name, stand_in in {
        "microseconds": microseconds,
        "draw": drawn,
        "attention": attention,
    }.items():
        monkeypatch.setattr(in_jax, name, stand_in)
    monkeypatch.setattr(jax, "jit", jitted)
    found = in_jax.dispatch(CPU, "xla", 2, 3)
    # The first four are a warm-up.
    assert found == {
        "heedful": [4.0, 8.0],
        "heedful with gradients": [5.0, 9.0],
        "xla": [6.0, 10.0],
        "xla with gradients": [7.0, 11.0],
    }
    assert list(found)[1] == "heedful with gradients" and made == [3] * 12
    assert len(returned) == 36
    # 1 + 2 * 2 + 3 * 3, of the next set 6 more.
    assert [float(out[0, 0, 0, 0]) for out in returned[:3]] == [14.0, 20.0, 26.0]
    assert [[float(x[0, 0, 0, 0]) for x in grads] for grads in returned[9:11]] == [[7, 14, 21]] * 2
    assert in_jax.dispatch.__defaults__ == (6, 256)


def test_dispatch_is_of_calls_that_jit_has_compiled():
    found = in_jax.dispatch(CPU, "xla", rounds=1, sets=1)
    assert list(found) == [a + b for a in ("heedful", "xla") for b in ("", " with gradients")]
    assert all(time > 0 for (time,) in found.values())


def test_every_training_shape_is_beside_cudnn_and_so_is_the_host(monkeypatch, capsys):
    gpu = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"device {device.index}")
    asked = []

    def measure(case, device, own):
        asked.append((case.name, device, own))
        alike = in_jax.Spent(0, 2, 1, 0)
        if case.problem.mask.causal:
            times = {"PyTorch": [1.0, 3.0, 2.0], "JAX": [4.0, 4.0, 4.0]}
            launches = {"PyTorch": alike, "JAX": in_jax.Spent(0, 3, 0, 0)}
            return in_jax.Measured(times, launches, {own: "is not for this"})
        times = {"PyTorch": [2.0], "JAX": [4.0 if case.problem.head_dim == 64 else 1.0]}
        # Of backwards no mean is taken.
        times[own] = [2.0 if case.direction == "forward" else 16.0]
        return in_jax.Measured(times, dict.fromkeys(times, alike), {})

    def dispatch(device, own):
        assert (device, own) == (gpu, "cudnn")
        return {"heedful": [5.0, 7.0, 6.0], "cudnn with gradients": [9.0]}

    monkeypatch.setattr(in_jax, "measure", measure)
    monkeypatch.setattr(in_jax, "dispatch", dispatch)
    in_jax.main("1x16384")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("device 3, torch ")
    assert {(device, own) for _, device, own in asked} == {(gpu, "cudnn")}
    names = [name for name, *_ in asked]
    assert [name.split()[0] for name in names] == ["forward"] * 6 + ["backward"] * 6
    assert all("1x16384" in name for name in names)
    assert lines[6].endswith(
        "PyTorch 2.0 us; JAX 4.0 us; cudnn 16.0 us; PyTorch / JAX 0.500 cudnn / JAX 4.000"
    )
    plain, causal = (lines[at].removeprefix(f"{names[at]:52s} ") for at in (0, 1))
    assert plain == (
        "PyTorch 2.0 us; JAX 4.0 us; cudnn 2.0 us; PyTorch / JAX 0.500 cudnn / JAX 0.500"
    )
    assert causal == (
        "PyTorch 2.0 us; JAX 4.0 us (+1 kernels, -1 memsets); cudnn: is not for this;"
        " PyTorch / JAX 0.500"
    )
    # Of 0.5, 2 and 2.
    assert lines[12:] == [
        "forward: 1.260 of cuDNN's speed, least 0.500",
        "dispatch heedful: 6.0 us",
        "dispatch cudnn with gradients: 9.0 us",
    ]


def test_a_line_has_every_way_its_launches_and_ratios():
    spent = in_jax.Spent
    launches = {
        name: spent(**{f: 0 for f in spent._fields} | {"kernels": n, "copies": 4})
        for name, n in (("PyTorch", 2), ("JAX", 3.5))
    }
    times = {"PyTorch": [2.0, 6.0, 4.0], "JAX": [2.0, 2.0, 2.0]}
    row = in_jax.Measured(times, launches, {"xla": "no room"})
    assert in_jax._line(SMALL[0], row, "xla") == (
        f"{SMALL[0].name:52s} PyTorch 4.0 us; JAX 2.0 us (+1.5 kernels); xla: no room;"
        " PyTorch / JAX 2.000"
    )
