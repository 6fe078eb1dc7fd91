"""The clock counts small kernels as documents count them: see the sources in constants.py."""

import pytest

from emulated.helpers.clocked import LANES, clocks, more, timing, trace
from heedful.emulator.clock.constants import constant
from heedful.emulator.clock.grid import replay

ADD = "v_add_f32_e32 v9, v9, v9\n"
# 8 passes; 8 bytes of A and 8 of B a lane.
LONG = "v_mfma_f32_32x32x8_bf16 v[16:31], v[2:3], v[4:5], v[16:31]\n"
# 8 passes, gfx950 alone; 16 bytes of A and 16 of B a lane.
WIDE = "v_mfma_f32_32x32x16_bf16 v[16:31], v[4:7], v[8:11], v[16:31]\n"
READ = "ds_read_b128 v[4:7], v1\n"
WRITE = "ds_write_b128 v1, v[4:7]\n"
DRAIN = "s_waitcnt lgkmcnt(0)\n"
# An address in the buffer, and four dwords a lane from it.
POINTER = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 4, v0\ns_waitcnt lgkmcnt(0)\n"
LOAD = "global_load_dwordx4 v[4:7], v1, s[4:5]\n"
ATOMIC = "global_atomic_add_f32 v1, v9, s[4:5]\n"
BOTH = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])


@BOTH
@pytest.mark.parametrize(
    ("body", "slots"),
    [
        (ADD, 1),
        ("s_add_u32 s8, s8, s8\n", 1),
        ("v_fma_f32 v9, v9, v9, v9\n", 1),
        ("v_pk_fma_f32 v[8:9], v[8:9], v[8:9], v[8:9]\n", 1),
        ("v_mul_lo_u32 v9, v9, v9\n", 4),
        ("v_mad_u64_u32 v[8:9], s[8:9], v8, v9, v[8:9]\n", 4),
        ("s_nop 5\n", 6),
        ("s_setprio 1\n", 1),
        ("s_sleep 2\n", 33),
        ("v_mfma_f32_16x16x16_bf16 v[16:19], v[2:3], v[4:5], v[16:19]\n", 4),
        (LONG, 8),
        ("v_mfma_f32_16x16x4_f32 v[16:19], v2, v4, v[16:19]\n", 8),
    ],
)
def test_an_instruction_takes_its_slots(body, slots, arch):
    """Four clocks a slot; MFMAs that feed each other take their passes."""
    assert more(8 * body, arch) == 8 * 4 * slots


def test_a_transcendental_takes_four_slots_and_half_of_that_on_gfx950():
    body = "v_exp_f32_e32 v9, v9\n"
    assert more(8 * body, "gfx942") == 8 * 16 and more(8 * body, "gfx950") == 8 * 8


def test_wide_mfmas_of_gfx950_take_eight_and_four_passes():
    narrow = "v_mfma_f32_16x16x32_bf16 v[16:19], v[4:7], v[8:11], v[16:19]\n"
    assert more(8 * WIDE, "gfx950") == 8 * 8 * 4
    assert more(8 * narrow, "gfx950") == 8 * 4 * 4


@pytest.mark.parametrize(
    ("body", "arch", "hold"),
    [
        (LONG, "gfx942", 2),
        (LONG.replace("32x32x8_bf16", "32x32x16_fp8_fp8"), "gfx950", 2),
        (WIDE, "gfx950", 3),
        (
            LONG.replace(
                "32x32x8_bf16 v[16:31], v[2:3], v[4:5]", "32x32x4_xf32 v[16:31], v[2:3], v[4:5]"
            ),
            "gfx942",
            2,
        ),
        ("v_mfma_f32_32x32x2_f32 v[16:31], v2, v4, v[16:31]\n", "gfx942", 2),
    ],
)
def test_valu_runs_beside_an_mfma_from_slot_1_and_one_more_for_16_bytes_of_source(body, arch, hold):
    """LLVM pull request 233721."""
    fits = (16 if "x2_f32" in body else 8) - hold
    alone = more(8 * body, arch)
    assert more(8 * (body + fits * ADD), arch) == alone
    assert more(8 * (body + (fits + 1) * ADD), arch) == alone + 8 * 4


@pytest.mark.parametrize(("body", "arch", "rest"), [(LONG, "gfx942", 2), (WIDE, "gfx950", 3)])
@pytest.mark.parametrize(
    "packed", ["v_pk_mul_f32 v[12:13], v[12:13], v[12:13]\n", "v_dot2_f32_f16 v12, v13, v13, v12\n"]
)
def test_packed_float32_and_dot_products_run_beside_no_mfma(body, arch, rest, packed):
    assert clocks(body + packed, arch) == 4 * (8 + rest + 1)


@pytest.mark.parametrize(("body", "arch", "wait"), [(LONG, "gfx942", 12), (WIDE, "gfx950", 13)])
def test_an_mfmas_result_is_there_after_its_wait_states(body, arch, wait):
    """8 passes and 3 (gfx942) or 4 (gfx950) wait states between the two."""
    assert clocks(body + "v_add_f32_e32 v16, v16, v16\n", arch) == 4 * (wait + 1)
    assert clocks(body + ADD, arch) < clocks(body + "v_add_f32_e32 v16, v16, v16\n", arch)


def test_two_waves_of_a_simd_share_it():
    """Waves 0 and 4; each of the other SIMDs has one."""
    assert clocks(8 * ADD, waves=4) == 8 * 4
    assert clocks(8 * ADD, waves=5) == clocks(8 * ADD, resident=5) == 16 * 4


def test_one_waves_vector_work_runs_beside_anothers_mfma():
    """Four waves run MFMAs, four VALU; 6 slots beside each of them are free."""
    fork = "v_readfirstlane_b32 s8, v0\ns_cmp_lt_u32 s8, 0x100\ns_cbranch_scc0 1f\n"
    body = fork + 8 * LONG + "s_endpgm\n1:\n" + 40 * ADD
    alone = clocks(fork + 8 * LONG + "s_endpgm\n1:\n", waves=8)
    assert alone <= clocks(body, waves=8) <= alone + 8
    assert clocks(body.replace(40 * ADD, 60 * ADD), waves=8) > alone + 8


@BOTH
def test_a_wave_reads_through_one_port_and_four_waves_share_two(arch):
    """64 lanes of 16 bytes: 64 bytes a clock for a wave, 128 for all; twice that on gfx950."""
    rate = 2 if arch == "gfx950" else 1

    def each(waves: int) -> float:
        times = [clocks(LANES + n * READ + DRAIN, arch, waves) for n in (30, 60)]
        return (times[1] - times[0]) / 30

    assert each(1) == 16 / rate
    assert each(4) == 32 / rate


@BOTH
@pytest.mark.parametrize(
    ("body", "cycles"), [("ds_write_b32 v1, v4\n", 8), ("ds_write_b128 v1, v[4:7]\n", 20)]
)
def test_a_store_takes_8_and_20_clocks_of_a_port(body, cycles, arch):
    """ROCm Compute Profiler's pages: addresses and data share the port. Waves 0, 1 and 4 share
    one."""
    times = [clocks(LANES + n * body + DRAIN, arch, waves=5) for n in (24, 48)]
    assert (times[1] - times[0]) / 24 == pytest.approx(3 * cycles, rel=0.01)


@BOTH
def test_the_latency_of_lds_is_51_clocks(arch):
    """4 for the address, 16 (8) through the port, 51; then to the end of the wait's slot."""
    through = 16 if arch == "gfx942" else 8
    end = 4 + through + 51
    assert clocks(LANES + READ + DRAIN + ADD, arch) == -(-(end + 4) // 4) * 4 + 4


@BOTH
def test_no_more_than_15_lds_operations_are_outstanding(arch):
    waits = [timing(LANES + n * WRITE + DRAIN, arch).stalls["queue full"] for n in (15, 16)]
    assert not waits[0] and waits[1]


@BOTH
def test_lanes_that_meet_in_a_bank_wait_for_each_other(arch):
    """One word a lane, all in one bank: 31 clocks more for each of two groups, 63 of one."""
    row, extra = "v_lshlrev_b32_e32 v1, {}, v0\n", 62 if arch == "gfx942" else 63
    dense, apart = (
        timing(row.format(shift) + 2 * ("ds_write_b32 v1, v4\n" + DRAIN) + ADD, arch)
        for shift in (2, 7 if arch == "gfx942" else 8)
    )
    assert apart.busy["lds"] - dense.busy["lds"] == 2 * extra
    assert apart.clocks - dense.clocks == pytest.approx(2 * extra, abs=4)


@BOTH
def test_the_array_serves_all_ports(arch):
    """Waves 0 and 2 are on two ports; conflicts of one keep the other from its data."""
    row = "v_lshlrev_b32_e32 v1, {}, v0\nv_mov_b32_e32 v2, 0\n"
    fork = "v_readfirstlane_b32 s8, v0\ns_cmp_eq_u32 s8, 0\ns_cbranch_scc0 1f\n"
    write = 4 * "ds_write_b32 v1, v4\n"
    body = row + fork + write + "s_endpgm\n1:\n" + "s_nop 15\n" + READ.replace("v1", "v2") + DRAIN
    ends = []
    for shift in (2, 7):
        events = replay(trace(body.format(shift) + ADD, arch, 3), window=1e6)[0, 0, 0].events
        ends.append(max(end for wave, _, _, end in events if wave == 2))
    assert ends[1] - ends[0] > 60


@BOTH
@pytest.mark.parametrize("outstanding", [0, 1])
def test_a_wait_ends_when_so_many_are_left(outstanding, arch):
    each = 16 if arch == "gfx942" else 8
    first = clocks(LANES + READ + DRAIN, arch)
    second = clocks(LANES + READ + READ + f"s_waitcnt lgkmcnt({outstanding})\n", arch)
    assert second - first == (each if outstanding == 0 else 0)


@BOTH
def test_a_load_takes_the_latency_of_l2_and_its_bytes(arch):
    """1024 bytes at 54 or 64 a clock (2 KB a die, of 38 or 32 compute units), then 288 clocks."""
    wait, each = "s_waitcnt vmcnt(0)\n", 1024 * (38 if arch == "gfx942" else 32) / 2048
    base = clocks(POINTER, arch)
    assert clocks(POINTER + LOAD + wait + ADD, arch) - base == pytest.approx(each + 296, abs=4)
    times = [clocks(POINTER + n * LOAD + wait, arch) for n in (20, 40)]
    assert times[1] - times[0] == pytest.approx(20 * each, abs=4)


@BOTH
def test_narrow_loads_move_a_dword_a_lane(arch):
    load, wait = "global_load_ubyte v4, v1, s[4:5]\n", "s_waitcnt vmcnt(0)\n"
    times = [clocks(POINTER + n * load + wait, arch, waves=4) for n in (10, 20)]
    each = 256 * (38 if arch == "gfx942" else 32) / 2048
    assert (times[1] - times[0]) / 40 == pytest.approx(each, abs=0.2)


@BOTH
def test_no_more_than_63_memory_operations_are_outstanding(arch):
    waits = [timing(POINTER + n * LOAD, arch).stalls["queue full"] for n in (63, 64)]
    assert not waits[0] and waits[1]


@BOTH
def test_atomics_go_at_their_rate(arch):
    rate = constant("atomics", arch) / constant("compute_units", arch)
    each = 64 / (rate / constant("clock_full", arch))
    wait = "s_waitcnt vmcnt(0)\n"
    times = [clocks(POINTER + n * ATOMIC + wait, arch) for n in (20, 40)]
    assert (times[1] - times[0]) / 20 == pytest.approx(each, rel=0.02)


@BOTH
def test_a_scalar_load_takes_172_clocks(arch):
    body = "s_load_dword s8, s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n"
    assert more(body, arch, before="") == 172 + 4


@BOTH
def test_loads_to_lds_take_its_array(arch):
    body = POINTER + "s_mov_b32 m0, 0\n" + 8 * "global_load_lds_dword v1, s[4:5]\n"
    assert timing(body, arch).busy["lds"] == 8 * 256 / 128


@BOTH
def test_a_branch_takes_eight_slots(arch):
    assert more("s_branch 1f\n1:\n", arch) == 8 * 4


FORK = "v_readfirstlane_b32 s8, v0\ns_cmp_lg_u32 s8, 0\n"


def test_a_barrier_waits_for_the_last_wave():
    """Waves 1 to 3 skip the work of wave 0 before it and do more after it."""
    body = FORK + "s_cbranch_scc1 1f\n{}1:\ns_barrier\n" + FORK
    body += "s_cbranch_scc0 2f\n" + 100 * ADD + "2:\n"
    slow, fast = (timing(body.format(n * ADD), waves=4) for n in (100, 0))
    assert slow.clocks - fast.clocks == 400
    assert slow.stalls["barrier"] - fast.stalls["barrier"] == pytest.approx(3 * 400, abs=3 * 32)


def test_a_wave_of_higher_priority_goes_first():
    """Wave 4 shares the SIMD of wave 0 and ends before it."""
    fork = (
        "v_readfirstlane_b32 s8, v0\ns_cmp_lt_u32 s8, 0x100\ns_cbranch_scc1 1f\ns_setprio 3\n1:\n"
    )
    events = replay(trace(fork + 40 * ADD, waves=5), window=1e6)[0, 0, 0].events
    last = {wave: max(end for w, _, _, end in events if w == wave) for wave in (0, 4)}
    assert last[4] < last[0]


def test_a_simd_issues_one_scalar_instruction_a_slot():
    """Waves 0 and 4 share a SIMD."""
    body = 40 * "s_add_u32 s8, s8, s8\n"
    assert clocks(body, waves=5) == 2 * clocks(body, waves=4)
