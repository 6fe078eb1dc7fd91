"""What `heedful validate` measures on an AMD GPU, compiled for both chips and emulated: the
micro-kernels are right, settle what they are for, and stand in the report beside predictions."""

import json
import math
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from heedful.bench.harness.cases import Case
from heedful.bench.harness.run import Figure, Outcome
from heedful.bench.harness.timing import Spread
from heedful.cli.validate import validate
from heedful.core.base.arrays import ArraySpec, item_bytes
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.emulator import At, emulate
from heedful.emulator.clock.constants import CONSTANTS, SLOT, constant
from heedful.emulator.clock.work import work_of
from heedful.launch import compiler
from heedful.launch.code.artifact import Parameter
from heedful.launch.program.bound import numbers_of
from heedful.launch.program.programs import program
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Program, Scalar
from heedful.validation import micro, on_device, sensors
from heedful.validation import predicted as predicting
from heedful.validation.predicted import _values as values_of
from heedful.validation.predicted import predicted
from support.runs import standin

CHIPS = {"gfx942": "MI300X", "gfx950": "MI355X"}
PASSES = 8
EACH = [(arch, probe) for arch in micro.ARCHES for probe in micro.probes(arch)]
CPU = torch.device("cpu")
# Names and types of a kernel's parameters.
PARAMETERS = (("x", "*fp32"), ("s", "fp32"), ("n", "i32"), ("absent", "i64"))


def named(arch: str, name: str) -> micro.Probe:
    return next(p for p in micro.probes(arch) if p.name == name)


def emulated(arch: str):
    """A launcher that runs a call on the emulator."""

    def launch(call):
        artifact = compiler.artifact(call, arch)
        out = np.zeros(micro.elements(call), np.int32)
        values = {"iterations": call.arguments["iterations"].value, "out": At(out), "x": At(out)}
        args = [values.get(p.name) for p in artifact.parameters]
        report = emulate(artifact, call.grid, args)
        assert report.clean, report.summary()
        return 1e-3, out

    return launch


@pytest.mark.parametrize(("arch", "probe"), EACH, ids=lambda x: getattr(x, "name", x))
def test_the_emulator_finds_nothing_in_a_micro_kernel(arch, probe):
    seen = micro.measured(probe, 2, 3, emulated(arch))
    assert seen.seconds == 1e-3
    if probe.body:
        # The emulator counts eight clocks an instruction: three end a round, three of three rounds
        # lie beside the loop.
        assert seen.clocks == pytest.approx(8 * (len(probe.body) + 3 + 1) / probe.count)
        assert seen.clock_hz == pytest.approx(micro.TICKS_HZ, rel=0.2)


def test_what_is_measured_has_these_names_and_words():
    """Reports that come back are compared by them."""
    for arch in micro.ARCHES:
        beside = {p.name: p.words for p in micro.probes(arch) if "MFMA" in p.name}
        after = [f"{n} v_mul_f32" for n in (4, 5, 6, 7, 8)]
        after += [f"{n} v_pk_mul_f32" for n in (1, 2)]
        told = {f"MFMA + {n}": f"clocks of an MFMA with {n[0]} vector instructions" for n in after}
        assert beside == {"MFMA": "of MFMAs alone", **told}


def test_atomics_add_to_neighbours_from_places_of_their_own():
    programs, rounds = 3, 5
    call = micro.call_of(named("gfx942", "atomics"), rounds, programs)
    sums = emulated("gfx942")(call)[1].view(np.float32)
    want = np.zeros_like(sums)
    for number in range(programs):
        for i in range(rounds):
            first = (number * micro.LANES * 61 + i * micro.LANES) % len(want)
            want[first : first + micro.LANES] += 1
    assert np.array_equal(sums, want)


def expected(arch: str, name: str) -> float:
    """Clocks of one unit by the documents' rules, the end of a round aside."""
    if name == "clock":
        return SLOT
    if name == "exponentials":
        return SLOT * constant("trans_slots", arch)
    if name == "MFMA":
        return SLOT * PASSES
    count = int(name.split()[2])
    if "v_pk" in name:
        return SLOT * (PASSES + constant("packed_after", arch) + count)
    nbytes = {"gfx942": 16, "gfx950": 32}[arch]
    hold = constant("mfma_hold", arch) + nbytes / constant("mfma_hold_bytes", arch)
    return SLOT * max(PASSES, hold + count)


@pytest.mark.parametrize(
    ("arch", "probe"), [(a, p) for a, p in EACH if p.body], ids=lambda x: getattr(x, "name", x)
)
def test_the_clock_predicts_what_the_documents_say_and_the_end_of_a_round(arch, probe):
    told = micro.predicted(probe, arch, 1).clocks
    # A branch, and a comparison ahead of it: eleven slots at most.
    assert 0 <= told - expected(arch, probe.name) <= 11 * SLOT / probe.count


@pytest.mark.parametrize("arch", micro.ARCHES)
def test_rival_rules_predict_other_counts(arch, monkeypatch):
    """So that a measurement decides: other holds, pk beside an MFMA."""
    names = [p.name for p in micro.probes(arch) if " " in p.name]
    told = [micro.predicted(named(arch, n), arch, 1).clocks for n in names]
    rivals = {"mfma_hold": 0, "mfma_hold_bytes": 8, "packed_after": 0}
    for name, value in rivals.items():
        with monkeypatch.context() as patch:
            changed = replace(CONSTANTS[name], **{arch: value})
            patch.setitem(CONSTANTS, name, changed)
            work_of.cache_clear()
            other = [micro.predicted(named(arch, n), arch, 1).clocks for n in names]
            work_of.cache_clear()
        assert max(abs(a - b) for a, b in zip(told, other, strict=True)) >= SLOT


@pytest.mark.parametrize("arch", micro.ARCHES)
def test_atomics_are_predicted_at_their_rate(arch):
    units, rounds = int(constant("compute_units", arch)), 2000
    told = micro.predicted(named(arch, "atomics"), arch, units, rounds)
    rate = units * micro.LANES * rounds / told.seconds
    assert rate == pytest.approx(constant("atomics", arch), rel=0.02)


def test_a_chip_without_a_clock_is_refused():
    with pytest.raises(ValueError, match="arch must be among gfx942, gfx950, got 'gfx90a'"):
        micro.probes("gfx90a")


@pytest.fixture
def hwmon(tmp_path):
    folder = tmp_path / "0000:05:00.0" / "hwmon" / "hwmon3"
    folder.mkdir(parents=True)
    for name, value in {
        "freq1_input": 1_312_000_000,
        "freq2_input": 1_300_000_000,
        "power1_input": 743_000_000,
        "power1_cap": 750_000_000,
        "temp2_input": 71_000,
    }.items():
        (folder / name).write_text(f"{value}\n")
    return tmp_path


def test_sensors_are_read_while_something_runs(hwmon):
    place = sensors.folder("0000:05:00.0", hwmon)
    assert place is not None and sensors.cap_w(place) == 750
    with sensors.sampled(place) as samples:
        assert "heedful-sensors" in {thread.name for thread in threading.enumerate()}
        while len(samples) < 2:
            pass
    assert "heedful-sensors" not in {thread.name for thread in threading.enumerate()}
    told = sensors.summary(samples)
    assert told["clock_mhz"] == {"low": 1312, "median": 1312, "high": 1312}
    assert told["power_w"]["median"] == 743 and told["temperature_c"]["high"] == 71
    (place / "power1_input").unlink()
    assert "power_w" not in sensors.reading(place)
    assert sensors.folder("0000:06:00.0", hwmon) is None
    with sensors.sampled(None) as none:
        assert none == []


@pytest.fixture(params=micro.ARCHES)
def stand_in(request, monkeypatch, hwmon, tmp_path):
    """The emulator under the name of a GPU."""
    spec = by_name(CHIPS[request.param])
    few = [named(spec.arch, n) for n in ("clock", "MFMA + 5 v_mul_f32", "atomics")]
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    (tmp_path / "rocm" / ".info").mkdir(parents=True)
    (tmp_path / "rocm" / ".info" / "version").write_text("7.2.1-43\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(on_device, "device_spec", lambda _: spec)
    monkeypatch.setattr(on_device, "has_clock", lambda _: True)
    monkeypatch.setattr(on_device, "launcher", lambda device, arch: emulated(arch))
    monkeypatch.setattr(micro, "probes", lambda arch: few)
    monkeypatch.setattr(micro, "rounds", lambda *_: 2)
    at = sensors.folder("0000:05:00.0", hwmon)
    monkeypatch.setattr(on_device, "sensor_folder", lambda _: at)
    return spec


def test_the_report_has_micro_kernels_versions_and_sources(stand_in, monkeypatch):
    from heedful.validation import grid, run

    monkeypatch.setattr(grid, "grid", lambda small: grid._small()[:1])
    monkeypatch.setattr(run, "bench_cases", lambda _: [])
    app = typer.Typer()
    app.command()(validate)
    done = CliRunner().invoke(app, ["--device", "cpu", "--report", "r.json"])
    assert done.exit_code == 0, done.output
    amd = json.loads(Path("r.json").read_text())["amd"]
    assert amd["rocm"] == "7.2.1-43" and amd["power_cap_w"] == 750
    assert [m["name"] for m in amd["micro_kernels"]] == ["clock", "MFMA + 5 v_mul_f32", "atomics"]
    for record in amd["micro_kernels"]:
        probe = named(stand_in.arch, record["name"])
        assert (record["words"], record["unit"]) == (probe.words, probe.unit)
        assert "failed" not in record and record["predicted"]["clocks"] > 0
        assert record["measured"]["seconds"] == 1e-3
    assert amd["clock"]["packed_after"]["source"].startswith("LLVM pull request")
    assert "Micro-kernels" in done.output


def test_a_bench_has_its_prediction_beside_it(stand_in):
    problem = AttentionProblem.dense(1, 256, 256, 2, 1, 64, causal=True)
    time = Spread(10.0, 9.0, 11.0)
    figures = [Figure("sdpa", time), Figure("heedful:portable", time), Figure("heedful:cdna")]
    (record,) = on_device.predictions(
        Outcome(Case("forward", problem), None, figures), torch.device("cpu")
    )
    assert record["peer"] == "heedful:portable" and record["measured_us"] == 10
    low, told, high = (record[f"predicted_{n}us"] for n in ("low_", "", "high_"))
    assert 0 < low <= told <= high
    assert [x["kernel"] for x in record["launches"]] == ["attention_forward"]


def test_a_backend_that_cannot_be_predicted_says_why(stand_in):
    problem = AttentionProblem.dense(1, 256, 256, 2, 1, 64)
    outcome = Outcome(Case("forward", problem), None, [Figure("heedful:hopper", Spread(1, 1, 1))])
    (record,) = on_device.predictions(outcome, torch.device("cpu"))
    assert record["failed"].startswith("ValueError: ")


def test_other_devices_have_no_clock():
    assert not on_device.has_clock(CPU)


def test_a_launcher_times_launches_of_one_buffer_and_returns_it(monkeypatch):
    """Down to the driver, a stub: as many launches between two events as their time is shared by,
    after one that nobody times."""
    probe, happened = named("gfx942", EACH[0][1].name), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            happened.append(len(gpu.launches))

        def synchronize(self):
            happened.append("waited")

        def elapsed_time(self, end):
            assert end is not self
            return 80.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with standin.gpu("MI300X") as gpu:
        seen = micro.measured(probe, 3, 5, on_device.launcher(CPU, "gfx942"))
    assert happened == [1, 41, "waited"] and len(gpu.launches) == 41
    assert seen.seconds == pytest.approx(80e-3 / 40)
    (address,) = {launch.arguments["out"] for launch in gpu.launches}
    assert address and {launch.arguments["iterations"] for launch in gpu.launches} == {5}
    assert {launch.stream for launch in gpu.launches} == {77}
    assert {launch.grid for launch in gpu.launches} == {(3, 1, 1)}


def test_a_launch_is_timed_over_many_after_one_that_loads_it(monkeypatch):
    seen: list[Any] = []

    class Kind:
        def __init__(self, program, arch, index, names, numbers):
            seen.append((program.calls, arch, index, names, numbers))

        def bind(self, numbers):
            return lambda addresses, stream: seen.append((len(addresses), stream, numbers))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            seen.append("event")

        synchronize = record

        def elapsed_time(self, end):
            return 80.0 if end is not self else 0.0

    monkeypatch.setattr(on_device, "ProgramKind", Kind)
    cuda = on_device.torch.cuda
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=77))
    call = micro.call_of(named("gfx942", "clock"), 5, 3)
    with torch.device("meta"):  # where what is not put on the device that is named is
        seconds, out = on_device.launcher(CPU, "gfx942")(call)
    numbers = numbers_of(call)
    assert seen[0] == ((call,), "gfx942", 0, ["out"], [numbers])
    launch = 1, 77, numbers
    assert seen[1:] == [launch, "event", *[launch] * 40, "event", "event"]
    assert seconds == 0.002 and out.dtype == np.int32
    assert not out.any() and out.shape == (micro.elements(call),)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_prediction_has_an_array_of_every_buffer_that_its_launches_know(direction, monkeypatch):
    """What values matter for is given, scratch is 0, and other floats are normal."""
    seen: list[Any] = []
    monkeypatch.setattr(predicting, "of_program", lambda *given: seen.append(given) or "told")
    problem = AttentionProblem.dense(2, 256, 256, 4, 2, 64, causal=True, needs_grad=True)
    chosen = plan(problem, by_name("MI300X"))
    drawn = np.arange(2 * 256 * 2 * 64, dtype=np.uint16)
    told = predicting.predicted(chosen, direction, {"k": drawn}, 3, 2.5)
    ((program, arch, arrays, *others),) = seen
    assert (told, arch, others) == ("told", "gfx942", [3, 2.5])
    assert set(arrays) >= {name for call in program.calls for name in call.reads | call.writes}
    assert np.array_equal(arrays["k"].view(np.uint16), drawn)
    assert {arrays[name].dtype for name in arrays} == {np.dtype(np.uint8)}
    for scratch in program.workspaces:
        array = arrays[scratch.name]
        assert not array.any() and array.nbytes == math.prod(scratch.buffer.shape) * item_bytes(
            scratch.buffer.dtype
        )
    assert bool(program.workspaces) == (direction == "backward")
    values = torch.from_numpy(arrays["q"]).view(torch.bfloat16).float()
    assert values.numel() == 2 * 256 * 4 * 64 and 0.9 < values.std() < 1.1


def test_contents_of_another_size_are_refused():
    chosen = plan(AttentionProblem.dense(1, 256, 256, 2, 1, 64), by_name("MI300X"))
    with pytest.raises(ValueError, match=r"^contents\['q'\] must have 65536 bytes, got 65535$"):
        predicting.predicted(chosen, "forward", {"q": np.zeros(65535, np.uint8)})


def test_launches_take_their_times_one_after_the_other(monkeypatch):
    """Each of as many workgroups as are asked for, and as there are, with what its own operands
    move."""
    asked: list[Any] = []

    def time(artifact, grid, args, **options):
        asked.append((artifact, grid, args, options))
        n = float(len(asked))
        return SimpleNamespace(seconds=n, range=(n / 2, 3 * n)), "others"

    parameters = [SimpleNamespace(name=name, type=kind) for name, kind in PARAMETERS]
    compiled = SimpleNamespace(parameters=parameters)
    monkeypatch.setattr(predicting, "predict_time", time)
    monkeypatch.setattr(compiler, "artifact", lambda call, arch: compiled)
    arrays = {name: np.zeros(size, np.uint8) for name, size in (("a", 50), ("b", 7), ("c", 20))}
    given = {"x": Pointer("b", "float32"), "s": Scalar(3), "n": Scalar(4)}
    facts = {"kernel": SimpleNamespace(function="f"), "arguments": given, "reads": {"b"}}
    first = SimpleNamespace(**facts, writes={"b", "c"}, grid=(2, 3, 1))
    second = SimpleNamespace(**{**facts, "arguments": {}}, writes=set(), grid=(1, 1, 2))
    calls: Any = SimpleNamespace(calls=(first, second))
    told = predicting.of_program(calls, "gfx942", arrays, 5, 1.5)
    assert (told.seconds, told.low, told.high) == (3.0, 1.5, 9.0)
    assert [name for name, _ in told.launches] == ["f", "f"]
    (_, grid, args, options), (_, _, none, least) = asked
    assert grid == (2, 3, 1) and none == [None] * 4
    assert args[0].array is arrays["b"] and [*map(repr, args[1:])] == ["3.0", "4", "None"]
    others = {"checks": (), "window": 1.5}
    assert options == {**others, "memory_bytes": 27, "workgroups": 5}
    assert least == {**others, "memory_bytes": 7, "workgroups": 2}


def test_sensors_are_those_of_the_devices_place_on_its_bus(monkeypatch):
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC3, pci_device_id=2)
    monkeypatch.setattr(on_device.torch.cuda, "get_device_properties", lambda _: place)
    monkeypatch.setattr(sensors, "folder", lambda address: address)
    assert on_device.sensor_folder(CPU) == "0001:c3:02.0"


def test_a_launch_on_hardware_has_rounds_for_four_million_clocks(monkeypatch):
    for clocks, rounds in ((8.0, 4_000_000 / 8 / 64), (1e9, micro._MORE)):
        told = micro.Predicted(1.0, clocks, 1.0)
        monkeypatch.setattr(micro, "predicted", lambda *_, told=told: told)
        assert micro.rounds(named("gfx942", "clock"), "gfx942") == int(rounds)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_arrays_of_a_prediction_hold_normal_values_to_their_end(dtype):
    """The same again and again, of any length."""
    made = values_of(ArraySpec.contiguous((3, 50_000), dtype))
    again = values_of(ArraySpec.contiguous((70,), dtype))
    item = {"float32": 4, "float8_e4m3fn": 1}.get(dtype, 2)
    period = 65_536 * item
    assert made.nbytes == 150_000 * item and np.array_equal(again, made[: 70 * item])
    assert np.array_equal(made[period:], made[: made.nbytes - period])
    found = torch.from_numpy(made).view(getattr(torch, dtype)).float()
    assert found.isfinite().all() and 0.2 < found.std() < 8 and abs(found.mean()) < 0.1


def test_other_arrays_of_a_prediction_are_0_and_never_empty():
    assert not values_of(ArraySpec.contiguous((5,), "int32")).any()
    assert values_of(ArraySpec.contiguous((5,), "int32")).nbytes == 20
    assert values_of(ArraySpec.contiguous((0,), "int32")).nbytes == 1


def test_a_prediction_is_of_what_arrays_hold_and_of_workspaces():
    problem = AttentionProblem.dense(2, 1, 256, 2, 1, 64, used_k=True, num_splits=2)
    chosen = plan(problem, by_name("MI300X"))
    assert program(chosen, "forward").workspaces
    few, most = (
        predicted(chosen, "forward", {"seqused_k": np.full(2, used, np.int32)}).seconds
        for used in (16, 256)
    )
    assert 0 < 2 * few < most
    with pytest.raises(ValueError, match=r"contents\['seqused_k'\] must have 8 bytes, got 16"):
        predicted(chosen, "forward", {"seqused_k": np.full(2, 16, np.int64)})


def test_a_prediction_of_several_launches_is_their_sum_each_with_its_own_arguments(monkeypatch):
    """Of a stand-in for the clock: what it is told."""
    given, seconds = [], iter([3.0, 4.0])

    def predict_time(artifact, grid, args, **options):
        given.append((artifact, grid, args, options))
        time = next(seconds)
        return (SimpleNamespace(seconds=time, range=(time - 1, time + 2)), "more")

    names = ("x", "n", "scale", "whole", "constant")
    types = ("*fp32", "i32", "fp32", "fp32", "i32")
    parameters = tuple(Parameter(*pair, 0) for pair in zip(names, types, strict=True))
    made = SimpleNamespace(parameters=parameters)
    monkeypatch.setattr(compiler, "artifact", lambda call, arch: made)
    monkeypatch.setattr(predicting, "predict_time", predict_time)
    arguments = {
        "x": Pointer("out", "float32"),
        "n": Scalar(7),
        "scale": Scalar(0.5, "fp32"),
        "whole": Scalar(3, "fp32"),
        "constant": 5,
    }
    monkeypatch.setattr(KernelCall, "reads", frozenset({"q", "out"}))
    monkeypatch.setattr(KernelCall, "writes", frozenset({"out"}))
    calls = tuple(
        KernelCall(KernelRef("m", name), grid, arguments)
        for name, grid in (("one", (2, 3, 1)), ("two", (1, 2, 5)))
    )
    arrays = {name: np.zeros(n, np.uint8) for name, n in (("q", 8), ("out", 16), ("k", 99))}
    told = predicting.of_program(Program(calls), "gfx942", arrays, 8, 2.5)
    assert [name for name, _ in told.launches] == ["one", "two"]
    assert (told.low, told.seconds, told.high) == (5, 7, 11)
    assert [p.seconds for _, p in told.launches] == [3, 4]
    for (artifact, grid, args, options), call, count in zip(given, calls, (6, 8), strict=True):
        assert artifact is made and grid == call.grid
        assert args[0].array is arrays["out"] and args[1:] == [7, 0.5, 3.0, None]
        assert [type(x) for x in args[1:4]] == [int, float, float]
        # Once each: what is read and written, too.
        assert options == {"workgroups": count, "memory_bytes": 24, "checks": (), "window": 2.5}
    seconds = iter([3.0, 4.0])
    predicting.of_program(Program(calls), "gfx942", arrays)
    assert [(more["workgroups"], more["window"]) for *_, more in given[2:]] == [(1, 0.0)] * 2


def test_a_plans_program_is_predicted_with_as_many_workgroups_and_events_as_are_asked_for(
    monkeypatch,
):
    asked = []
    monkeypatch.setattr(predicting, "of_program", lambda *given: asked.append(given))
    chosen = plan(AttentionProblem.dense(1, 64, 64, 1, 1, 64, needs_grad=True), by_name("MI300X"))
    predicted(chosen, "backward")
    predicted(chosen, "backward", workgroups=3, window=2.0)
    assert [given[3:] for given in asked] == [(1, 0.0), (3, 2.0)]
    made, arch, arrays, *_ = asked[0]
    assert (arch, [c.kernel.function for c in made.calls]) == (
        "gfx942",
        ["query_gradients", "key_gradients"],
    )
    names = {"q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"}
    assert {*arrays} == names | {w.name for w in made.workspaces}
    assert not any(arrays[w.name].any() for w in made.workspaces)
    assert arrays["lse"].nbytes == 64 * 4 and arrays["dq"].nbytes == 64 * 64 * 2


def test_a_launch_is_predicted_with_the_rounds_that_it_has_on_hardware():
    probe = named("gfx942", "clock")
    told = micro.predicted(probe, "gfx942", 1)
    rounds = micro.rounds(probe, "gfx942")
    assert told.seconds == micro.predicted(probe, "gfx942", 1, rounds).seconds
    assert told.seconds * told.clock_hz == pytest.approx(4e6, rel=0.02)
    # Twice as many take as much longer as the loop.
    more = micro.predicted(probe, "gfx942", 1, 2 * rounds).seconds - told.seconds
    assert more == pytest.approx(rounds * told.clocks * probe.count / told.clock_hz)


@pytest.mark.parametrize(
    ("kind", "arch", "has"),
    [("cuda", "gfx942", 1), ("cuda", "gfx950", 1), ("cuda", "sm_90", 0), ("cpu", "gfx942", 0)],
)
def test_a_clock_is_there_for_chips_that_have_micro_kernels(kind, arch, has, monkeypatch):
    monkeypatch.setattr(on_device, "device_spec", lambda device: SimpleNamespace(arch=arch))
    assert on_device.has_clock(torch.device(kind)) is bool(has)
    if has:
        assert on_device.count(torch.device(kind)) == len(micro.probes(arch))


def test_a_micro_kernel_that_fails_says_why_and_the_others_are_measured(stand_in, monkeypatch):
    """On all compute units, with as many rounds as are predicted."""
    asked: list[Any] = []
    predicted, probes = micro.predicted, micro.probes(stand_in.arch)

    def measured(probe, programs, iterations, launch):
        asked.append((probe, programs, iterations, launch))
        if probe is probes[1]:
            raise RuntimeError("no such instruction\nat all")
        return micro.Measured(2.0, 3.0, 4.0)

    def noted(probe, arch, units, iterations):
        assert (arch, units, iterations) == (stand_in.arch, stand_in.units, 2)
        return predicted(probe, arch, 2, iterations)

    summary = {"power_w": {"low": 1.0}}
    monkeypatch.setattr(micro, "measured", measured)
    monkeypatch.setattr(micro, "predicted", noted)
    monkeypatch.setattr(on_device, "launcher", lambda device, arch: (device, arch))
    monkeypatch.setattr(sensors, "summary", lambda samples: summary)
    found = list(on_device.micro_kernels(CPU))
    launch = CPU, stand_in.arch
    assert asked == [(probe, stand_in.units, 2, launch) for probe in probes]
    for record, probe in zip(found, probes, strict=True):
        facts = {"name": probe.name, "words": probe.words, "unit": probe.unit, "rounds": 2}
        assert {key: record.pop(key) for key in facts} == facts
        assert {*record.pop("predicted")} == {"seconds", "clocks", "clock_hz"}
    seen = {"measured": {"seconds": 2.0, "clocks": 3.0, "clock_hz": 4.0}, "samples": summary}
    assert found == [seen, {"failed": "RuntimeError: no such instruction"}, seen]


@pytest.mark.parametrize(("causal", "workgroups"), [(False, 1), (True, 6)])
def test_unequal_workgroups_are_predicted_from_several(causal, workgroups, stand_in, monkeypatch):
    asked: list[Any] = []

    def told(chosen, direction, workgroups):
        asked.append((chosen.backend, direction, workgroups))
        launch = SimpleNamespace(facts=lambda: {"seconds": 5.0})
        return SimpleNamespace(seconds=2.0, low=1.0, high=3.0, launches=[("one", launch)])

    monkeypatch.setattr(on_device, "predicted", told)
    problem = AttentionProblem.dense(1, 64, 64, 1, 1, 64, causal=causal, needs_grad=True)
    figures = [Figure(peer, Spread(8.0, 7.0, 9.0)) for peer in ("heedful", "heedful:portable")]
    outcome = Outcome(Case("backward", problem, "backward"), None, figures)
    found = list(on_device.predictions(outcome, CPU))
    assert [told[1:] for told in asked] == [("backward", workgroups)] * 2
    assert asked[1][0] == "portable"
    for record, peer in zip(found, ("heedful", "heedful:portable"), strict=True):
        assert record == {
            "case": outcome.case.name,
            "peer": peer,
            "measured_us": 8.0,
            "predicted_us": 2e6,
            "predicted_low_us": 1e6,
            "predicted_high_us": 3e6,
            "launches": [{"kernel": "one", "seconds": 5.0}],
        }
