"""The emulator does no more than a launch asks for: long blocks, room for what runs."""

import numpy as np

from emulated.helpers.snippets import kernel
from heedful.emulator import emulate
from heedful.emulator.clock.trace import Recorder
from heedful.emulator.launch import decode
from heedful.emulator.machine import workgroups

LOOP = """
    s_mov_b32 s8, 2
again:
    v_mov_b32_e32 v1, 1
.Ltmp1:
    v_mov_b32_e32 v2, 2
    s_sub_i32 s8, s8, 1
    s_cmp_lg_u32 s8, 0
    s_cbranch_scc1 again
.Ltmp2:
    v_mov_b32_e32 v3, 3
"""


def test_labels_that_no_branch_names_cut_no_block():
    """A compiler marks lines for debuggers by labels, every few instructions."""
    code = decode(kernel(LOOP))
    assert code.leaders == [0, 1, 6]
    report = emulate(kernel(LOOP), (1,), [np.zeros(64, np.uint32)])
    assert report.clean and report.instructions == 1 + 2 * 5 + 2


def test_a_launch_of_which_one_workgroup_runs_has_registers_for_one(monkeypatch):
    made = []
    monkeypatch.setattr(workgroups, "Registers", lambda groups, *rest: made.append(groups) or 1 / 0)
    for recorder, room in ((Recorder([(3, 0, 0)]), 1), (None, 20)):
        try:
            emulate(kernel(LOOP), (20,), [np.zeros(64, np.uint32)], recorder=recorder)
        except ZeroDivisionError:
            assert made.pop() == room
    assert not made
