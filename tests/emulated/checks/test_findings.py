"""Each check finds the defect it is for, names both sides, and is silent on the right code. Races:
test_races."""

import numpy as np
import pytest

from emulated.helpers.snippets import LAST, SETUP, WAVES, kernel, only, run
from heedful.emulator import KINDS, Unsupported, emulate
from heedful.emulator.machine.schedule import parse_schedule


@pytest.mark.parametrize(
    ("load", "counter", "use"),
    [
        ("global_load_dword v2, v1, s[4:5]", "vmcnt(0)", "v_add_u32_e32 v3, v2, v2"),
        ("ds_read_b32 v2, v1", "lgkmcnt(0)", "v_add_u32_e32 v3, v2, v2"),
        ("s_load_dword s8, s[4:5], 0x0", "lgkmcnt(0)", "s_add_i32 s9, s8, s8"),
        ("global_load_dword v2, v1, s[4:5]", "vmcnt(0)", "v_mov_b32_e32 v2, 0"),
        ("global_load_dword v2, v1, s[4:5]", "vmcnt(0)", "global_store_dword v1, v2, s[6:7]"),
        ("s_load_dwordx2 s[8:9], s[4:5], 0x0", "lgkmcnt(0)", "v_mov_b32_e32 v3, s9"),
    ],
)
def test_using_a_register_before_its_wait_is_found(load, counter, use):
    store = "ds_write_b32 v1, v1\ns_waitcnt lgkmcnt(0)\ns_barrier\n"
    good = run(f"{store}{load}\ns_waitcnt {counter}\n{use}")
    assert good.clean, good.summary()
    finding = only(run(f"{store}{load}\n{use}"), "waitcnt")
    assert use in finding.instruction and load in finding.other


@pytest.mark.parametrize(("allowed", "clean"), [(0, True), (1, True), (2, False), (3, False)])
def test_counters_complete_the_oldest_first(allowed, clean):
    report = run(
        f"""
        global_load_dword v2, v1, s[4:5]
        global_load_dword v3, v1, s[4:5]
        s_waitcnt vmcnt({allowed})
        v_mov_b32_e32 v4, v2
        """
    )
    assert report.clean == clean
    assert report.kinds() <= {"waitcnt"}


def test_scalar_loads_are_complete_only_at_zero():
    body = """
        s_load_dword s8, s[4:5], 0x0
        s_load_dword s9, s[4:5], 0x4
        s_waitcnt lgkmcnt(1)
        s_mov_b32 s10, s8
    """
    only(run(body), "waitcnt")


@pytest.mark.parametrize(
    ("wait", "clean"),
    [("vmcnt(0) lgkmcnt(0)", True), ("vmcnt(0)", False), ("lgkmcnt(0)", False)],
)
def test_flat_loads_are_complete_when_both_counters_say_so(wait, clean):
    body = f"""
        v_mov_b32_e32 v3, s5
        v_add_co_u32_e32 v2, vcc, s4, v1
        s_nop 1
        v_addc_co_u32_e32 v3, vcc, 0, v3, vcc
        flat_load_dword v4, v[2:3]
        s_waitcnt {wait}
        global_store_dword v1, v4, s[6:7]
    """
    report = run(body)
    assert report.kinds() == (set() if clean else {"waitcnt"}), report.summary()


def test_two_kinds_of_load_into_one_register_are_found():
    body = """
        ds_write_b32 v1, v1
        s_waitcnt lgkmcnt(0)
        global_load_dword v2, v1, s[4:5]
        ds_read_b32 v2, v1
        s_waitcnt vmcnt(0) lgkmcnt(0)
    """
    only(run(body), "waitcnt")


STALE = "ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\n"


@pytest.mark.parametrize(
    "use",
    [
        "global_store_dword v1, v2, s[6:7]",
        "v_add_f32_e32 v3, v2, v2\nglobal_store_dword v1, v3, s[6:7]",
        "v_and_b32_e32 v2, 0xfc, v2\nglobal_load_dword v3, v2, s[4:5]",
        "v_readfirstlane_b32 s8, v2\ns_nop 1\ns_cmp_eq_u32 s8, 0\ns_cbranch_scc1 1f\n1:",
        "v_cmp_lt_u32_e32 vcc, 5, v2\ns_and_saveexec_b64 s[8:9], vcc",
        "ds_write_b32 v1, v2",
    ],
    ids=["stored", "computed-with", "address", "branch", "exec", "written-back"],
)
def test_lds_that_nothing_has_written_is_found_where_it_matters(use):
    finding = only(run(STALE + use), "lds-uninit")
    assert "ds_read_b32" in finding.other


@pytest.mark.parametrize(
    "use",
    [
        "v_mov_b32_e32 v2, 0\nglobal_store_dword v1, v2, s[6:7]",
        "v_add_f32_e32 v3, v2, v2",
        "s_mov_b64 vcc, 0\ns_nop 4\nv_cndmask_b32_e32 v2, v0, v2, vcc\n"
        "global_store_dword v1, v2, s[6:7]",
        "v_cmp_gt_u32_e32 vcc, 0, v0\ns_and_saveexec_b64 s[8:9], vcc\n"
        "global_store_dword v1, v2, s[6:7]",
    ],
    ids=["overwritten", "unused", "not-selected", "lanes-off"],
)
def test_reading_ahead_is_fine_while_the_value_is_not_used(use):
    assert run(STALE + use).clean


def test_lds_accesses_past_the_allocation_are_found():
    body = "ds_write_b32 v1, v0 offset:{offset}\ns_waitcnt lgkmcnt(0)"
    assert run(body.format(offset=0), lds_bytes=1024).clean
    finding = only(run(body.format(offset=4), lds_bytes=1024), "lds-bounds")
    assert finding.wave == 3 and "1024" in finding.message


@pytest.mark.parametrize(
    "access", ["global_load_dword v2, v3, s[4:5]", "global_store_dword v3, v0, s[6:7]"]
)
def test_global_accesses_outside_every_buffer_name_the_nearest(access):
    body = "v_add_u32_e32 v3, {offset}, v1\n" + access
    assert run(body.format(offset=3072)).clean
    finding = only(run(body.format(offset=3076)), "global-bounds")
    assert f"argument {'0' if 'load' in access else '1'}" in finding.message
    assert "byte 4096" in finding.message and finding.wave == 3


def test_scratch_accesses_past_the_lane_s_share_are_found():
    assert run("scratch_store_dword off, v0, off offset:12").clean
    only(run("scratch_store_dword off, v0, off offset:16"), "global-bounds")


@pytest.mark.parametrize(
    ("use", "name"),
    [
        ("v_add_u32_e32 v2, v9, v0\nglobal_store_dword v1, v2, s[6:7]", "v9"),
        ("v_mov_b32_e32 v2, s30\nglobal_store_dword v1, v2, s[6:7]", "s30"),
        ("s_cmp_eq_u32 s30, 0\ns_cbranch_scc1 1f\n1:", "s30"),
        ("ds_read_b32 v2, v9\ns_waitcnt lgkmcnt(0)", "v9"),
        (
            "s_mov_b32 s31, 0\ns_and_b64 s[20:21], s[30:31], s[30:31]\n"
            "v_cndmask_b32_e64 v2, v0, v1, s[20:21]\nglobal_store_dword v1, v2, s[6:7]",
            "s30",
        ),
        (
            "s_mov_b32 s28, 0\ns_and_b64 s[20:21], s[28:29], s[28:29]\n"
            "v_cndmask_b32_e64 v2, v0, v1, s[20:21]\nglobal_store_dword v1, v2, s[6:7]",
            "s29",
        ),
    ],
)
def test_registers_that_nothing_has_written_are_found_where_they_matter(use, name):
    report = run(use)
    assert "register-uninit" in report.kinds() and name in report.summary()
    assert run(
        f"v_mov_b32_e32 v9, 0\ns_mov_b32 s29, 0\ns_mov_b32 s30, 0\nds_write_b32 v9, v9\n{use}"
    ).kinds() <= {"lds-race"}


def test_copying_and_spilling_half_defined_pairs_is_fine():
    body = """
        v_mov_b32_e32 v8, 7
        v_mov_b64_e32 v[2:3], v[8:9]
        scratch_store_dwordx2 off, v[8:9], off
        s_mov_b64 s[20:21], s[30:31]
        v_writelane_b32 v5, s30, 3
        global_store_dword v1, v2, s[6:7]
    """
    assert run(body).clean


# v8 and s30 are defined, v9 and s31 are not: the low half of each result is, the high half is not.
HALVES = {
    "v_mad_u64_u32 v[2:3], s[20:21], v0, 48, v[8:9]": "v2",
    "v_mad_i64_i32 v[2:3], s[20:21], v0, 48, v[8:9]": "v2",
    "v_lshl_add_u64 v[2:3], v[8:9], 1, v[0:1]": "v2",
    "v_lshl_add_u64 v[2:3], v[0:1], 1, v[8:9]": "v2",
    "v_lshlrev_b64 v[2:3], 3, v[8:9]": "v2",
    "v_lshlrev_b64 v[2:3], 32, v[8:9]": "v2 v3",
    "v_lshrrev_b64 v[2:3], 3, v[8:9]": "",
    "v_pk_fma_f32 v[2:3], v[0:1], v[8:9], v[0:1]": "v2",
    "v_pk_add_f32 v[2:3], v[8:9], v[0:1] op_sel_hi:[0,1]": "v2 v3",
    "v_pk_mov_b32 v[2:3], v[8:9], v[8:9] op_sel:[0,1]": "v2",
    "s_lshl_b64 s[22:23], s[30:31], 2\nv_mov_b64_e32 v[2:3], s[22:23]": "v2",
    "s_and_b64 s[22:23], s[30:31], vcc\nv_mov_b64_e32 v[2:3], s[22:23]": "v2",
}


@pytest.mark.parametrize("half", ["v2", "v3"])
@pytest.mark.parametrize("instruction", HALVES)
def test_an_undefined_half_of_a_pair_reaches_only_what_depends_on_it(instruction, half):
    body = f"""
        v_mov_b32_e32 v8, 7
        s_mov_b32 s30, 7
        s_mov_b64 vcc, exec
        {instruction.replace(chr(10), chr(10) + "        ")}
        global_store_dword v1, {half}, s[6:7]
    """
    expected = set() if half in HALVES[instruction].split() else {"register-uninit"}
    assert run(body).kinds() == expected


def test_registers_defined_on_one_path_only_are_found():
    body = """
        v_cmp_gt_u32_e32 vcc, 64, v0
        s_and_saveexec_b64 s[8:9], vcc
        s_cbranch_execz 1f
        v_mov_b32_e32 v5, 1
    1:
        s_mov_b64 exec, s[8:9]
        global_store_dword v1, v5, s[6:7]
    """
    finding = only(run(body), "register-uninit")
    assert "v5" in finding.message and finding.wave == 1


def test_a_wave_that_ends_before_a_barrier_is_found():
    body = """
        v_readfirstlane_b32 s8, v0
        s_cmp_lt_u32 s8, 64
        s_cbranch_scc1 1f
        s_barrier
    1:
        s_nop 0
    """
    finding = only(run(body), "barrier")
    assert "1 of 4 waves" in finding.message


def test_waves_may_meet_at_different_barriers():
    body = """
        v_readfirstlane_b32 s8, v0
        s_cmp_lt_u32 s8, 128
        s_cbranch_scc1 1f
        s_barrier
        s_branch 2f
    1:
        s_barrier
    2:
        s_nop 0
    """
    assert run(body).clean


def test_an_endless_loop_ends_with_a_finding():
    only(run("1:\ns_branch 1b", max_instructions=1000), "limit")


def test_findings_name_wave_epoch_workgroup_and_source_line():
    body = """
        .file 1 "/somewhere" "kernel.py"
        s_barrier
        .loc 1 42 7
        ds_read_b32 v2, v1
        v_mov_b32_e32 v3, v2
    """
    finding = only(run(body), "waitcnt")
    assert "kernel.py:42" in finding.instruction and finding.epoch == 1
    assert finding.workgroup == (0, 0, 0) and finding.wave == 0
    assert finding.schedule == "lockstep"
    assert "kernel.py:42" in str(finding) and "epoch 1" in str(finding)


def test_several_schedules_leave_what_the_first_gave():
    text = kernel(SETUP + LAST, buffers=2, threads=64 * WAVES)
    for first, last in (("delay:0", 0), ("delay:2", 2)):
        out = np.zeros(16, np.uint32)
        emulate(text, (1,), [np.zeros(16), out], schedule=[first, "delay:3", "random:0-4"])
        assert out[0] == last


def test_every_copy_of_a_launch_begins_with_the_arguments_as_they_were():
    body = """
        global_load_dword v2, v1, s[6:7]
        s_waitcnt vmcnt(0)
        v_add_u32_e32 v2, 1, v2
        global_store_dword v1, v2, s[6:7]
    """
    out = np.arange(512, dtype=np.uint32)
    text = kernel(SETUP + body, buffers=2, threads=64 * WAVES)
    report = emulate(text, (1,), [np.zeros(16), out], schedule=["lockstep", "random:0-4"])
    assert report.clean and (out == np.arange(512) + (np.arange(512) < 256)).all()
    assert report.executed[0] == WAVES * 6


def test_findings_under_dealt_schedules_name_the_wave_and_the_schedule():
    body = "v_cmp_lt_u32_e32 vcc, 127, v0\ns_and_b64 exec, exec, vcc\nds_write_b32 v1, v0 offset:{}"
    report = run(body.format(256), lds_bytes=1024, schedule="random:0-9")
    finding = only(report, "lds-bounds")
    assert finding.wave == 3 and finding.schedule.endswith("of random:0-9")


@pytest.mark.parametrize("waves", [1, 2, 3, 4, 8])
def test_dealt_schedules_of_a_workgroup_are_all_different(waves):
    for workgroup in ((0, 0, 0), (5, 1, 0)):
        seen = set()
        for number, part in enumerate(parse_schedule("random:0-9").rounds(waves)):
            orders = [tuple(part.deal(c, workgroup, waves)) for c in range(part.copies(waves))]
            assert all(sorted(order) == list(range(waves)) for order in orders)
            seen |= {(number, order) for order in orders}
        assert len(seen) == 10


def test_checks_can_be_chosen_and_unknown_ones_are_refused():
    body = "ds_read_b32 v2, v1\nglobal_store_dword v1, v2, s[6:7]"
    assert run(body).kinds() == {"lds-uninit", "waitcnt"}
    assert run(body, checks=["waitcnt"]).kinds() == {"waitcnt"}
    assert run(body, checks=[]).clean
    with pytest.raises(ValueError, match="lds-bounds"):
        run(body, checks=["nonsense"])


def test_stopping_at_the_first_finding_reports_one():
    body = "ds_read_b32 v2, v1\nglobal_store_dword v1, v2, s[6:7]"
    assert len(run(body, stop_at_first=True).findings) == 1


def test_stopping_at_a_static_finding_leaves_the_arguments_as_they_are():
    body = "v_mov_b32_e32 v2, 7\nv_readlane_b32 s8, v2, 0\nglobal_store_dword v1, v2, s[6:7]"
    out = np.arange(1024, dtype=np.uint32)
    text = kernel(SETUP + body, buffers=2)
    report = emulate(text, (1,), [np.zeros(4), out], stop_at_first=True)
    assert report.kinds() == {"wait-states"} and (out == np.arange(1024)).all()


def test_no_schedule_at_all_is_refused():
    with pytest.raises(ValueError, match="empty"):
        run("s_nop 0", schedule=[])


def test_a_grid_without_workgroups_does_nothing():
    report = emulate(kernel("s_nop 0"), (0, 3), [np.zeros(4)])
    assert report.clean and not report.instructions


def test_unknown_instructions_are_refused_by_name():
    with pytest.raises(Unsupported, match="v_frobnicate_b32"):
        run("v_frobnicate_b32 v1, v2")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([np.zeros(4), np.zeros(4), 1], "takes 2"),
        ([np.zeros((4, 4))[:, ::2], np.zeros(4)], "argument 0"),
        ([3.5, np.zeros(4)], "argument 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        emulate(kernel("s_nop 0", buffers=2), (1,), args)


def test_every_kind_of_finding_has_a_meaning():
    assert all(len(text) > 20 for text in KINDS.values())
