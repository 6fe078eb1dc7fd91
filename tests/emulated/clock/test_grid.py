"""Occupancy, dies, tails and ranges of a launch."""

from dataclasses import replace

import numpy as np
import pytest

from emulated.clock.test_micro_kernels import ATOMIC, LOAD, POINTER
from emulated.helpers.clocked import clocks, trace
from emulated.helpers.snippets import kernel
from heedful.emulator import predict_time
from heedful.emulator.clock.constants import CONSTANTS, FITTED, constant
from heedful.emulator.clock.grid import activity, clock_of, makespan, occupancy, predict
from heedful.emulator.clock.replay import Timing
from heedful.emulator.clock.trace import Recorder
from heedful.emulator.program.asm import Program

ADD = "v_add_f32_e32 v9, v9, v9\n"


@pytest.mark.parametrize(
    ("arch", "registers", "waves", "lds_bytes", "expected"),
    [
        ("gfx942", 256, 8, 65536, 1),
        ("gfx942", 256, 4, 0, 2),
        ("gfx942", 260, 4, 0, 1),  # 264 of 512
        ("gfx942", 64, 4, 0, 8),
        ("gfx942", 16, 4, 0, 8),  # eight waves a SIMD
        ("gfx942", 64, 1, 0, 32),
        ("gfx942", 64, 4, 20000, 3),
        ("gfx942", 172, 4, 0, 2),  # 176
        ("gfx950", 172, 4, 0, 2),
        ("gfx942", 85, 4, 0, 5),  # 88
        ("gfx950", 85, 4, 0, 5),
        ("gfx942", 82, 4, 0, 5),
        ("gfx942", 100, 4, 0, 4),  # 104; 100 would be 5
        ("gfx950", 100, 4, 0, 4),
        ("gfx942", 168, 4, 0, 3),  # 176 in steps of 16
        ("gfx950", 168, 4, 0, 3),
        ("gfx942", 64, 4, 9300, 6),  # 9728; 9472 in steps of 256
        ("gfx942", 64, 4, 13107, 4),  # 13312 a workgroup; 5 in steps of 1
        ("gfx942", 64, 4, 10900, 5),  # 11264; 6 in steps of 1
        ("gfx942", 64, 4, 10752, 6),  # 11264 in steps of 1024 would be 5
        ("gfx942", 64, 4, 13000, 4),  # 13056 in steps of 256 would be 5
        ("gfx942", 16, 1, 2000, 32),
        ("gfx950", 16, 1, 0, 32),
        ("gfx950", 64, 4, 20000, 8),
        ("gfx950", 64, 4, 22000, 7),  # 23040; 23040 in steps of 2560 too
        ("gfx950", 64, 4, 32000, 5),  # 33280 in steps of 2560 are 4
        ("gfx950", 64, 4, 53760, 3),
        ("gfx950", 64, 4, 54000, 2),  # in steps of 1280
    ],
)
def test_workgroups_of_a_compute_unit(arch, registers, waves, lds_bytes, expected):
    program = Program("k", arch, vector_registers=registers)
    assert occupancy(program, waves, lds_bytes) == expected


def test_workgroups_go_to_the_dies_in_turn():
    """304 compute units on 8 dies: a 305th workgroup is a second round, on one die."""
    assert makespan([10.0] * 304, "gfx942", 1) == 10
    assert makespan([10.0] * 305, "gfx942", 1) == 20
    assert makespan([10.0] * 608, "gfx942", 2) == 10
    assert makespan([10.0] * 256, "gfx950", 1) == 10
    assert makespan([10.0] * 257, "gfx950", 1) == 20
    # A die has 38 (32) places: 39 workgroups of one die are two rounds.
    for arch, places in (("gfx942", 38), ("gfx950", 32)):
        one = [1.0 if i % 8 == 0 else 0.0 for i in range(8 * places)]
        assert makespan(one, arch, 1) == 1 and makespan([*one, 1.0], arch, 1) == 2
        half = [1.0 if i % 16 == 0 else 0.0 for i in range(16 * places)]
        assert makespan(half, arch, 1) == 1
    # Every eighth is long, and all of these are on one die.
    long = [100.0 if i % 8 == 0 else 1.0 for i in range(512)]
    assert makespan(long, "gfx950", 1) == 200


def test_long_workgroups_last_leave_a_tail():
    ascending = [float(i) for i in range(64)]
    first = makespan([x for x in ascending for _ in range(40)], "gfx950", 1)
    last = makespan([x for x in reversed(ascending) for _ in range(40)], "gfx950", 1)
    assert last < first


def test_each_workgroup_takes_the_time_of_the_nearest_recorded_one():
    """Workgroup n runs n turns of a loop."""
    body = "s_add_u32 s8, s2, 1\n1:\n" + 50 * ADD + "s_sub_u32 s8, s8, 1\ns_cmp_lg_u32 s8, 0\n"
    body += "s_cbranch_scc1 1b\n"
    text, data = kernel(body, arch="gfx950"), np.zeros(64, np.uint32)
    few, report = predict_time(text, (4,), [data], workgroups=4, checks=())
    assert report.instructions and few.clocks == few.timing.clocks
    one, _ = predict_time(text, (4,), [data], workgroups=1, checks=())
    assert one.clocks < few.clocks


def test_unrecorded_workgroups_are_divided_at_the_middle():
    """Half take the short time of the first, half the long one of the last: two rounds each."""
    long = trace(1000 * ADD, "gfx950", lds_bytes=40960)
    (stream,) = long.streams[0, 0, 0]
    last = (256 * 16 - 1, 0, 0)
    streams = {(0, 0, 0): [np.append(stream[:10], stream[-1:])], last: [stream]}
    launch = predict(replace(long, streams=streams), (256 * 16,))
    assert launch.resident == 4
    assert launch.clocks == 2 * (4 * 10 + 4 * 1000)


def test_the_range_is_that_of_the_clock_and_memory_bounds_it():
    launch = predict(trace(1000 * ADD), (304,))
    fastest, slowest = launch.range
    assert fastest == pytest.approx(4000 / 2.1e9) == launch.seconds
    assert slowest == pytest.approx(4000 / 1.2e9)
    other = predict(trace(1000 * ADD, "gfx950"), (256,))
    assert other.range == (pytest.approx(4000 / 2.4e9), pytest.approx(4000 / 1.6e9))
    assert "valu 25 %" in launch.summary()
    for arch, rate in (("gfx942", 5.3e12), ("gfx950", 8e12)):
        moved = predict(trace(1000 * ADD, arch), (256,), memory_bytes=rate / 1000)
        assert moved.range == (pytest.approx(1e-3), pytest.approx(1e-3))


MFMA = "v_mfma_f32_32x32x8_f16 v[16:31], v[32:33], v[34:35], v[16:31]\n"
READ = "ds_read_b128 v[36:39], v1\n"


@pytest.mark.parametrize(("arch", "units"), [("gfx942", 304), ("gfx950", 256)])
def test_the_clock_is_that_at_which_a_launch_takes_all_power(arch, units):
    """Busy matrix units take all of it, data that move their part, vector instructions none; idle
    compute units leave the others a clock that is higher by the cube root."""
    full, data = constant("clock_full", arch), constant("data_power", arch)
    busy = trace(1000 * MFMA, arch, 4)
    assert predict(busy, (units,)).clock_hz == pytest.approx(full, rel=1e-3)
    assert predict(busy, (units // 2,)).clock_hz == pytest.approx(full * 2 ** (1 / 3), rel=1e-3)
    late = predict(busy, (units + 8,))  # a second round for 8, so that half of the time is idle
    used = (units + 8) / (2 * units)
    assert late.clock_hz == pytest.approx(full / used ** (1 / 3), rel=1e-3)
    moving = predict(trace("v_mov_b32_e32 v1, 0\n" + 500 * (MFMA + READ), arch, 4), (units,))
    mfma, lds = (moving.timing.busy[u] / moving.timing.clocks for u in ("mfma", "lds"))
    assert lds > 0.2 and mfma > 0.8
    assert moving.clock_hz == pytest.approx(full / (mfma + data * lds))
    highest = constant("clock_high", arch)
    assert predict(trace(1000 * ADD, arch), (units,)).clock_hz == highest
    assert predict(busy, (1,)).clock_hz == highest


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_power_is_of_matrix_units_and_data_and_light_loads_follow_the_cube_root(arch):
    busy = {"mfma": 500.0, "valu": 900.0, "lds": 200.0, "memory": 100.0, "atomic": 50.0}
    data = constant("data_power", arch)
    assert activity(Timing(1000.0, busy=busy), arch) == pytest.approx(0.5 + data * 0.35)
    assert activity(Timing(busy=busy), arch) == 0
    full, highest = constant("clock_full", arch), constant("clock_high", arch)
    for active, used, wanted in (
        (1.0, 1.0, full),
        (1.25, 1.0, full / 1.25),
        (1.0, 0.5, full * 2 ** (1 / 3)),
        (0.8, 1.0, full / 0.8),
        (0.72, 1.0, full / 0.8 * (10 / 9) ** (1 / 3)),
        (0.01, 1.0, highest),
        (1.0, 0.01, highest),
        (0.0, 1.0, highest),
        (1.0, 0.0, highest),
    ):
        assert clock_of(arch, active, used) == pytest.approx(wanted), (active, used)


@pytest.mark.parametrize(("arch", "units"), [("gfx942", 304), ("gfx950", 256)])
def test_a_launch_whose_workgroups_differ_takes_the_power_of_its_mean(arch, units):
    busy = trace(1000 * MFMA, arch, 4)
    whole = busy.streams[0, 0, 0]
    half = [np.append(stream[:500], stream[-1:]) for stream in whole]
    streams = {(0, 0, 0): whole, (units - 1, 0, 0): half}
    mixed = predict(replace(busy, streams=streams), (units,))
    used = 0.75  # half of them end after half of the time
    wanted = constant("clock_full", arch) / used ** (1 / 3)
    assert mixed.clock_hz == pytest.approx(wanted, rel=2e-3)


def test_atomics_are_counted_at_the_clock_that_the_launch_has():
    """Their rate is one of seconds; memory and atomics are data that move."""
    for arch, units in (("gfx942", 304), ("gfx950", 256)):
        recorded = trace(POINTER + 200 * ATOMIC + "s_waitcnt vmcnt(0)\n", arch)
        launch = predict(recorded, (units,))
        dwords = 200 * 64 * units
        assert launch.seconds == pytest.approx(dwords / constant("atomics", arch), rel=0.05)
        assert launch.clock_hz == constant("clock_high", arch)
        loads = predict(trace(POINTER + 400 * (LOAD + 5 * MFMA), arch, 4), (units,))
        share = [loads.timing.busy[u] / loads.timing.clocks for u in ("mfma", "memory")]
        wanted = constant("clock_full", arch) / (share[0] + constant("data_power", arch) * share[1])
        assert share[1] > 0.1 and loads.clock_hz == pytest.approx(wanted)


def test_resident_workgroups_share_a_compute_unit():
    recorded = trace(100 * ADD, lds_bytes=0)
    recorded.program = replace(recorded.program, vector_registers=128)
    assert clocks(100 * ADD, resident=5) == 2 * clocks(100 * ADD)
    assert predict(recorded, (304 * 16,)).resident == 16
    assert predict(recorded, (304 * 2,)).resident == 2


@pytest.mark.parametrize("workgroups", [0, 5])
def test_the_number_of_workgroups_is_checked(workgroups):
    with pytest.raises(ValueError, match="workgroups must be from 1 to 4"):
        predict_time(kernel(ADD), (4,), [np.zeros(4)], workgroups=workgroups)


def test_only_lockstep_is_timed():
    with pytest.raises(ValueError, match="lockstep"):
        predict_time(kernel(ADD), (4,), [np.zeros(4)], schedule="random:0")


def test_a_workgroup_outside_of_the_grid_is_refused():
    with pytest.raises(ValueError, match="not in the grid"):
        Recorder([(4, 0, 0)]).wanted([(0, 0, 0)])


def test_every_number_names_its_source_and_three_are_fitted():
    for name, entry in CONSTANTS.items():
        for arch in ("gfx942", "gfx950"):
            assert entry.source_of(arch) and entry.of(arch) > 0, name
    fitted = {n for n, c in CONSTANTS.items() if FITTED in (c.source, c.source_gfx950)}
    assert fitted == {"clock_full", "data_power", "atomics"}
    for arch in ("gfx942", "gfx950"):
        assert constant("clock_low", arch) <= constant("clock_high", arch)
