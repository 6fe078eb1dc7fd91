"""A phase-shifted pipeline: its safe form is right under every schedule, the unsafe is found."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from triton.experimental.gluon.language import amd

from heedful.emulator import emulate
from heedful.emulator.command import compile_kernel
from heedful.emulator.floats import bf16_bits, bf16_values

ROWS, COLS, TILES = 64, 128, 5
PATH = str(Path(__file__).with_name("gluon_kernels.py"))
SCHEDULES = ["lockstep", "round-robin", "delay:0-3", "delay:4-7", "delay:0", "delay:7"]
SCHEDULES += ["delay:halves", "delay:each", "random:0", "random:0-9"]

pytestmark = pytest.mark.skipif(
    not hasattr(amd, "warp_pipeline_stage"), reason="this Triton has no warp_pipeline_stage"
)


@cache
def compiled(safe: bool):
    constants = {"ROWS": ROWS, "COLS": COLS, "IS_SAFE": safe, "num_warps": 8}
    types = ["*bf16", "*fp32", "i32"]
    return compile_kernel(PATH, "sum_tiles", "gfx950", types, constants)


def run(safe: bool, schedule: str | list[str]):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((TILES, ROWS, COLS)).astype(np.float32)
    x = bf16_bits(values).astype(np.uint16)
    out = np.full((ROWS, COLS), np.nan, np.float32)
    report = emulate(compiled(safe), (1,), [x, out, TILES], schedule=schedule)
    total = np.zeros((ROWS, COLS), np.float32)
    for tile in bf16_values(x.astype(np.uint32)):
        total = total + tile
    return report, np.array_equal(out, total)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_retiring_two_barriers_early_is_right_under_every_schedule(schedule):
    report, right = run(True, schedule)
    assert report.clean and right, report.summary()
    assert report.count_at("s_setprio") and report.count_at(" lds")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_retiring_just_before_the_own_read_is_found_under_every_schedule(schedule):
    report, _ = run(False, schedule)
    assert "lds-race" in report.kinds()
    races = [f for f in report.findings if f.kind == "lds-race"]
    assert any("lds" in f.other + f.instruction and "ds_read" in f.instruction for f in races)


def test_the_safe_form_gives_the_same_bits_under_all_schedules_in_one_call():
    report, right = run(True, SCHEDULES)
    assert report.clean and right, report.summary()


def test_the_unsafe_form_gives_other_bits_under_some_schedule():
    """What silicon would show now and then: the stale tile itself, not only the race."""
    report, _ = run(False, ["lockstep", "delay:halves", "random:0-9"])
    assert "order" in report.kinds(), report.summary()


def test_delaying_one_group_shows_the_stale_data_itself():
    assert not all(run(False, schedule)[1] for schedule in ("delay:0-3", "delay:4-7"))
