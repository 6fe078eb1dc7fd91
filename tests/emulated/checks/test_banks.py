"""Bank conflicts are counted as the model says."""

import numpy as np
import pytest

from emulated.helpers.snippets import kernel
from heedful.emulator import emulate


@pytest.mark.parametrize(
    ("arch", "instruction", "shift", "extra"),
    [
        # One word per lane: consecutive words never conflict.
        ("gfx942", "ds_write_b32 v1, v0", 2, 0),
        # Every second word: on 32 banks two of 32 lanes meet, in each of two groups.
        ("gfx942", "ds_write_b32 v1, v0", 3, 2),
        ("gfx950", "ds_write_b32 v1, v0", 3, 1),
        # All lanes in one bank: 31 extra cycles in each of two groups, 63 in one.
        ("gfx942", "ds_write_b32 v1, v0", 7, 62),
        ("gfx950", "ds_write_b32 v1, v0", 8, 63),
        # Wide and dense: each group fills every bank once.
        ("gfx942", "ds_write_b128 v1, v[4:7]", 4, 0),
        # Wide, 128 bytes apart: eight lanes meet in the same four banks, in each of eight groups.
        ("gfx942", "ds_write_b128 v1, v[4:7]", 7, 56),
    ],
)
def test_extra_cycles(arch, instruction, shift, extra):
    body = f"v_lshlrev_b32_e32 v1, {shift}, v0\n" + "".join(
        f"v_mov_b32_e32 v{i}, 0\n" for i in range(4, 8)
    )
    report = emulate(kernel(body + instruction, arch=arch), (1,), [np.zeros(1)])
    assert report.clean, report.summary()
    assert sum(report.bank_conflicts.values()) == extra


def test_lanes_that_read_one_word_do_not_conflict():
    body = """
        v_mov_b32_e32 v1, 0
        ds_write_b32 v1, v1
        s_waitcnt lgkmcnt(0)
        ds_read_b32 v2, v1
        s_waitcnt lgkmcnt(0)
    """
    report = emulate(kernel(body), (1,), [np.zeros(1)])
    assert report.clean and not report.bank_conflicts
