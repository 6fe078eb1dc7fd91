"""Races in LDS and in global memory, and results that depend on an order, are found; code that
orders its accesses is let be."""

import numpy as np
import pytest

from emulated.helpers.snippets import LAST, SETUP, kernel, only, run
from heedful.emulator import emulate

RACE = """
    ds_write_b32 v1, v0
    s_waitcnt lgkmcnt(0)
    {barrier}
    v_xor_b32_e32 v2, 0x100, v1
    ds_read_b32 v3, v2
    s_waitcnt lgkmcnt(0)
"""


SCHEDULES = ["lockstep", "round-robin", "random:3", "random:0-9", "delay:0", "delay:2,3"]
SCHEDULES += ["delay:each", "delay:halves"]


@pytest.mark.parametrize("schedule", [*SCHEDULES, SCHEDULES], ids=str)
def test_a_missing_barrier_is_a_race_under_every_schedule(schedule):
    good = run(RACE.format(barrier="s_barrier"), schedule=schedule)
    assert good.clean, good.summary()
    report = run(RACE.format(barrier="s_nop 0"), schedule=schedule)
    race = next(f for f in report.findings if f.kind == "lds-race")
    assert "ds_write" in race.instruction + race.other


def test_write_after_read_without_a_barrier_is_found():
    body = """
        ds_write_b32 v1, v0
        s_waitcnt lgkmcnt(0)
        s_barrier
        v_xor_b32_e32 v2, 0x100, v1
        ds_read_b32 v3, v2
        s_waitcnt lgkmcnt(0)
        {barrier}
        ds_write_b32 v1, v3
    """
    assert run(body.format(barrier="s_barrier")).clean
    finding = only(run(body.format(barrier="s_nop 0")), "lds-race")
    assert "ds_write" in finding.instruction and "ds_read" in finding.other


def test_two_waves_writing_different_values_to_one_place_are_found():
    body = "v_and_b32_e32 v2, 0xff, v1\nds_write_{width} v2, {value}\ns_waitcnt lgkmcnt(0)"
    for width in ("b32", "b16"):
        only(run(body.format(width=width, value="v0")), "lds-race")
        assert run(body.format(width=width, value="v2")).clean


def test_only_the_bits_that_reach_memory_tell_values_apart():
    body = """
        v_and_b32_e32 v2, 0xff, v1
        v_lshl_or_b32 v3, v0, 16, v2
        ds_write_b16 v2, v3
        s_waitcnt lgkmcnt(0)
    """
    assert run(body).clean


def test_neighbouring_halves_of_a_word_do_not_conflict():
    body = """
        v_and_b32_e32 v2, 0xff, v1
        v_lshrrev_b32_e32 v3, 6, v0
        v_lshl_add_u32 v2, v3, 1, v2
        v_cmp_gt_u32_e32 vcc, 0x80, v0
        s_and_saveexec_b64 s[8:9], vcc
        ds_write_b16 v2, v0
        s_waitcnt lgkmcnt(0)
    """
    assert run(body).clean


def test_an_access_outstanding_across_a_barrier_is_not_ordered_by_it():
    body = """
        ds_write_b32 v1, v0
        {wait}
        s_barrier
        v_xor_b32_e32 v2, 0x100, v1
        ds_read_b32 v3, v2
        s_waitcnt lgkmcnt(0)
    """
    assert run(body.format(wait="s_waitcnt lgkmcnt(0)")).clean
    only(run(body.format(wait="s_nop 0")), "lds-race")


DMA = """
    s_mov_b32 m0, 0
    v_readfirstlane_b32 s8, v0
    s_lshl_b32 s8, s8, 2
    s_mov_b32 m0, s8
    s_nop 0
    global_load_lds_dword v1, s[4:5]
    {wait}
    {barrier}
    {second}
    v_xor_b32_e32 v2, {distance}, v1
    ds_read_b32 v3, v2
    s_waitcnt lgkmcnt(0)
    s_waitcnt vmcnt(0)
    global_store_dword v1, v3, s[6:7]
"""


def dma(wait="s_waitcnt vmcnt(0)", barrier="s_barrier", second="s_nop 0", distance="0x100"):
    return DMA.format(wait=wait, barrier=barrier, second=second, distance=distance)


def test_dma_is_visible_after_wait_and_barrier():
    assert run(dma()).clean


@pytest.mark.parametrize(
    "body",
    [
        dma(wait="s_nop 0"),
        dma(barrier="s_nop 0"),
        dma(wait="s_nop 0", second="s_waitcnt vmcnt(0)"),
        dma(wait="s_nop 0", barrier="s_nop 0", distance="0"),
    ],
    ids=["no-wait", "no-barrier", "wait-after-barrier", "own-data-without-wait"],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dma_races_are_found_while_in_flight_and_after(body, schedule):
    assert "lds-race" in run(body, schedule=schedule).kinds()


def test_dma_in_flight_when_its_wave_ends_is_found():
    body = DMA[: DMA.index("{wait}")]
    finding = only(run(body), "lds-race")
    assert "in flight when its wave ends" in finding.message
    assert run(body + "s_waitcnt vmcnt(0)").clean


def test_dma_over_data_still_being_read_is_found():
    body = """
        ds_write_b32 v1, v0
        s_waitcnt lgkmcnt(0)
        s_barrier
        v_xor_b32_e32 v2, 0x100, v1
        ds_read_b32 v3, v2
        s_waitcnt lgkmcnt(0)
        {barrier}
        v_readfirstlane_b32 s8, v1
        s_mov_b32 m0, s8
        s_nop 0
        global_load_lds_dword v1, s[4:5]
        s_waitcnt vmcnt(0)
    """
    assert run(body.format(barrier="s_barrier")).clean
    finding = only(run(body.format(barrier="s_nop 0")), "lds-race")
    assert "lds" in finding.instruction and "ds_read" in finding.other


@pytest.mark.parametrize("schedules", [["lockstep", "random:0-3"], ["delay:each"]])
def test_a_result_that_depends_on_the_order_of_the_waves_is_found(schedules):
    finding = only(run(LAST, schedule=schedules, checks=["order"]), "order")
    assert run(LAST, schedule=schedules).kinds() == {"order", "global-race"}
    assert "byte 0 of argument 1" in finding.message
    assert run(LAST.replace("v3, v2", "v1, v2"), schedule=schedules).clean


# Each wave writes a word, and after `between` the word of its neighbour is read.
NEIGHBOUR = """
    global_store_dword v1, v0, s[6:7]
    {between}
    v_xor_b32_e32 v2, 0x100, v1
    global_load_dword v3, v2, s[6:7]
    s_waitcnt vmcnt(0)
"""


@pytest.mark.parametrize("schedule", ["lockstep", "round-robin", "random:2", "random:0-3"])
@pytest.mark.parametrize(
    ("between", "clean"),
    [
        ("s_waitcnt vmcnt(0)\ns_barrier", True),
        ("s_nop 0", False),
        ("s_waitcnt vmcnt(0)", False),
        ("s_barrier", False),  # the store may still be on its way
        ("s_barrier\ns_waitcnt vmcnt(0)\ns_barrier", True),
    ],
)
def test_waves_that_share_global_memory_need_wait_and_barrier(between, clean, schedule):
    report = run(NEIGHBOUR.format(between=between), schedule=schedule)
    assert report.kinds() == (set() if clean else {"global-race"}), report.summary()


@pytest.mark.parametrize(
    ("between", "clean"), [("s_waitcnt vmcnt(0)\ns_barrier", True), ("", False)]
)
def test_overwriting_what_another_wave_reads_is_found(between, clean):
    body = f"""
        v_xor_b32_e32 v2, 0x100, v1
        global_load_dword v3, v2, s[6:7]
        {between}
        global_store_dword v1, v0, s[6:7]
        s_waitcnt vmcnt(0)
    """
    kinds = run(body).kinds()
    assert kinds == (set() if clean else {"global-race"})


def grid(body, groups=3, schedule="lockstep", threads=64):
    """Several workgroups; s2 is the workgroup."""
    text = kernel(SETUP + body, buffers=2, threads=threads)
    return emulate(text, (groups,), [np.zeros(512), np.zeros(512)], schedule=schedule)


@pytest.mark.parametrize("schedule", ["lockstep", "random:1", "delay:each"])
@pytest.mark.parametrize("groups", [3, 200])  # in one chunk, and in several
@pytest.mark.parametrize(
    ("body", "clean"),
    [
        # All write to the same words: each its own number, or all the same one.
        ("v_mov_b32_e32 v2, s2\nglobal_store_dword v1, v2, s[6:7]", False),
        ("v_mov_b32_e32 v2, 5\nglobal_store_dword v1, v2, s[6:7]", True),
        # Each to its own bytes of words that they share.
        ("v_mov_b32_e32 v2, s2\nglobal_store_byte v2, v2, s[6:7]", True),
        # All read what workgroup 0 writes; all read, nobody writes; all add.
        (
            "global_load_dword v3, v1, s[6:7]\ns_cmp_lg_u32 s2, 0\ns_cbranch_scc1 1f\n"
            "v_mov_b32_e32 v2, 1\nglobal_store_dword v1, v2, s[6:7]\n1:\ns_waitcnt vmcnt(0)",
            False,
        ),
        ("global_load_dword v3, v1, s[6:7]\ns_waitcnt vmcnt(0)", True),
        ("v_mov_b32_e32 v2, 1\nglobal_atomic_add v1, v2, s[6:7]", True),
        (
            "v_mov_b32_e32 v2, 1\nglobal_atomic_add v1, v2, s[6:7]\ns_waitcnt vmcnt(0)\n"
            "global_load_dword v3, v1, s[6:7]\ns_waitcnt vmcnt(0)\nv_mov_b32_e32 v2, s2\n"
            "global_store_dword v1, v2, s[6:7]",
            False,
        ),
    ],
)
def test_workgroups_may_not_touch_the_same_bytes(body, clean, groups, schedule):
    report = grid(body, groups, schedule)
    assert report.kinds() == (set() if clean else {"global-race"}), report.summary()
    if not clean:
        finding = report.findings[0]
        assert "argument 1" in finding.message and "workgroup (" in finding.message


RELEASE = "buffer_wbl2 sc1\ns_waitcnt vmcnt(0)"
ACQUIRE = "buffer_inv sc1"


@pytest.mark.parametrize(
    ("between", "clean"),
    [
        (f"{RELEASE}\n{ACQUIRE}", True),
        ("s_nop 0", False),
        (ACQUIRE, False),  # of what nobody has released
        (RELEASE, False),
        (f"{RELEASE}\n{ACQUIRE}".replace("sc1", ""), False),  # among its own waves
    ],
)
@pytest.mark.parametrize("schedule", ["lockstep", "random:0-3"])
def test_a_release_and_an_acquire_order_two_workgroups(between, clean, schedule):
    body = f"""
        s_lshl_b32 s8, s2, 8
        v_add_u32_e32 v5, s8, v1
        v_mov_b32_e32 v2, s2
        global_store_dword v5, v2, s[6:7]
        {between}
        global_load_dword v3, v1, s[6:7] offset:256
        s_waitcnt vmcnt(0)
        global_store_dword v5, v3, s[4:5]
    """
    kinds = grid(body, schedule=schedule).kinds() - {"order"}
    assert kinds == (set() if clean else {"global-race"})


@pytest.mark.parametrize(
    ("wait", "clean"),
    [("s_waitcnt vmcnt(0)", True), ("s_nop 0", False), ("s_waitcnt vmcnt(1)", False)],
)
def test_a_wave_releases_what_other_waves_have_waited_for(wait, clean):
    """The first wave of each workgroup releases and acquires for both. A barrier alone does not
    have the other's store reach the cache."""
    body = f"""
        s_lshl_b32 s8, s2, 9
        v_add_u32_e32 v5, s8, v1
        v_xor_b32_e32 v6, 0x200, v5
        v_mov_b32_e32 v2, s2
        global_store_dword v5, v2, s[6:7]
        {wait}
        s_barrier
        v_readfirstlane_b32 s9, v0
        s_cmp_lg_u32 s9, 0
        s_cbranch_scc1 1f
        {RELEASE}
        {ACQUIRE}
        1:
        s_barrier
        global_load_dword v3, v6, s[6:7]
        s_waitcnt vmcnt(0)
        global_store_dword v5, v3, s[4:5]
    """
    report = grid(body, 2, threads=128)
    assert report.kinds() == (set() if clean else {"global-race"}), report.summary()
    if not clean:
        assert all("wave 1" in finding.message for finding in report.findings)


# Wave 0 loads over what wave 1 reads; both meet a barrier only after it.
OVER = """
    v_mov_b32_e32 v2, 0
    v_lshrrev_b32_e32 v4, 6, v0
    v_readfirstlane_b32 s8, v4
    ds_write_b32 v1, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc0 others
    s_mov_b32 m0, 0x100
    s_nop 0
    global_load_lds_dword v1, s[4:5]
    s_branch done
others:
    ds_read_b32 v5, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v5, s[6:7]
done:
    s_barrier
    s_waitcnt vmcnt(0)
"""


def test_early_loads_show_a_load_over_what_is_yet_to_be_read():
    """Under an order in which the loading wave comes first, only an early load leaves other data;
    the race is found either way."""
    outputs = {}
    for early in (False, True):
        out = np.zeros(1024, np.uint32)
        text = kernel(SETUP + OVER, arch="gfx950", buffers=2, threads=256)
        data = np.arange(5000, 6024, dtype=np.uint32)
        report = emulate(text, (1,), [data, out], schedule="delay:1-3", early_loads=early)
        assert "lds-race" in report.kinds(), report.summary()
        outputs[early] = out[64:128]
    np.testing.assert_array_equal(outputs[False], np.arange(64, 128))
    np.testing.assert_array_equal(outputs[True], np.arange(5000, 5064))
