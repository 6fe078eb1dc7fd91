"""Lane exchange moves the values that the ISA's definitions name."""

import numpy as np
import pytest

from emulated.helpers.snippets import kernel, vector
from heedful.emulator import emulate

LANE = np.arange(64, dtype=np.uint32)


@pytest.mark.parametrize(
    ("control", "source"),
    [
        ("quad_perm:[1,0,3,2]", lambda i: i ^ 1),
        ("quad_perm:[0,0,0,0]", lambda i: i & ~3),
        ("row_ror:4", lambda i: (i & ~15) | (i - 4) % 16),
        ("row_newbcast:5", lambda i: (i & ~15) | 5),
        ("row_mirror", lambda i: i ^ 15),
        ("row_half_mirror", lambda i: i ^ 7),
        ("wave_rol:1", lambda i: (i + 1) % 64),
    ],
)
def test_dpp_reads_the_lane_that_the_control_names(control, source):
    text = f"v_mov_b32_dpp v20, v10 {control} row_mask:0xf bank_mask:0xf"
    (got,) = vector(text, [LANE + 100], ["v20"])
    assert got.tolist() == [source(i) + 100 for i in range(64)]


def test_dpp_shift_leaves_lanes_without_a_source_or_gives_zero():
    text = """
        v_mov_b32_e32 v20, v11
        v_mov_b32_e32 v21, v11
        v_mov_b32_dpp v20, v10 row_shr:1 row_mask:0xf bank_mask:0xf
        v_mov_b32_dpp v21, v10 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:0
    """
    kept, zeroed = vector(text, [LANE + 100, LANE + 500], ["v20", "v21"])
    assert kept.tolist() == [i + 99 if i % 16 else i + 500 for i in range(64)]
    assert zeroed.tolist() == [i + 99 if i % 16 else 0 for i in range(64)]


def test_dpp_row_mask_limits_the_rows_written():
    text = (
        "v_mov_b32_e32 v20, v11\nv_add_u32_dpp v20, v10, v11 row_mirror row_mask:0xa bank_mask:0xf"
    )
    (got,) = vector(text, [LANE, LANE * 0 + 7], ["v20"])
    assert got.tolist() == [(i ^ 15) + 7 if i // 16 in (1, 3) else 7 for i in range(64)]


def test_dpp_broadcast_carries_the_last_lane_of_a_row_to_the_next():
    text = "v_mov_b32_e32 v20, v11\nv_mov_b32_dpp v20, v10 row_bcast:15 row_mask:0xa bank_mask:0xf"
    (got,) = vector(text, [LANE, LANE * 0 + 7], ["v20"])
    assert got.tolist() == [i // 16 * 16 - 1 if i // 16 in (1, 3) else 7 for i in range(64)]


@pytest.mark.parametrize("width", [16, 32])
def test_permlane_swap_exchanges_odd_rows_with_even_rows(width):
    text = f"v_permlane{width}_swap_b32_e32 v10, v11"
    a, b = vector(text, [LANE, LANE + 100], ["v10", "v11"], arch="gfx950")
    odd = (LANE // width) % 2 == 1
    assert (a[~odd] == LANE[~odd]).all() and (b[odd] == LANE[odd] + 100).all()
    assert (a[odd] == LANE[~odd] + 100).all() and (b[~odd] == LANE[odd]).all()


def test_bpermute_pulls_and_permute_pushes():
    shuffle = np.random.default_rng(0).permutation(64).astype(np.uint32)
    text = "ds_bpermute_b32 v20, v10, v11\nds_permute_b32 v21, v10, v11\ns_waitcnt lgkmcnt(0)"
    pulled, pushed = vector(text, [shuffle * 4, LANE + 100], ["v20", "v21"])
    assert (pulled == shuffle + 100).all()
    assert (pushed[shuffle] == LANE + 100).all()


def test_bpermute_of_a_disabled_lane_gives_zero():
    text = """
        v_mov_b32_e32 v20, 9
        v_cmp_gt_u32_e32 vcc, 32, v11
        s_and_saveexec_b64 s[10:11], vcc
        ds_bpermute_b32 v20, v10, v11
        s_waitcnt lgkmcnt(0)
        s_mov_b64 exec, s[10:11]
    """
    (got,) = vector(text, [(LANE * 2 % 64) * 4, LANE], ["v20"])
    wanted = [2 * i if 2 * i < 32 else 0 for i in range(32)] + [9] * 32
    assert got.tolist() == wanted


@pytest.mark.parametrize(
    ("offset", "source"),
    [
        ("0x041f", lambda i: i ^ 1),
        ("0x401f", lambda i: i ^ 16),
        ("swizzle(SWAP,16)", lambda i: i ^ 16),
        ("swizzle(QUAD_PERM,3,2,1,0)", lambda i: i ^ 3),
        ("swizzle(BROADCAST,8,3)", lambda i: (i & ~7) | 3),
        ("swizzle(REVERSE,8)", lambda i: i ^ 7),
        ('swizzle(BITMASK_PERM,"00p1i")', lambda i: (i & ~31) | (i & 4) | 2 | (i & 1 ^ 1)),
    ],
)
def test_swizzle_follows_its_pattern(offset, source):
    text = f"ds_swizzle_b32 v20, v10 offset:{offset}\ns_waitcnt lgkmcnt(0)"
    (got,) = vector(text, [LANE + 100], ["v20"])
    assert got.tolist() == [source(i) + 100 for i in range(64)]


def test_readlane_writelane_and_readfirstlane_address_single_lanes():
    text = """
        v_readlane_b32 s10, v10, 37
        v_mov_b32_e32 v20, s10
        v_mov_b32_e32 v21, v10
        s_mov_b32 s11, 777
        v_writelane_b32 v21, s11, 5
        v_cmp_lt_u32_e32 vcc, 40, v10
        s_and_saveexec_b64 s[12:13], vcc
        v_readfirstlane_b32 s14, v10
        s_mov_b64 exec, s[12:13]
        v_mov_b32_e32 v22, s14
    """
    read, written, first = vector(text, [LANE], ["v20", "v21", "v22"])
    assert set(read.tolist()) == {37}
    assert written.tolist() == [777 if i == 5 else i for i in range(64)]
    assert set(first.tolist()) == {41}


def test_mbcnt_counts_the_set_bits_below_the_lane():
    text = """
        v_mov_b32_e32 v20, 0xdeadbeef
        v_mbcnt_lo_u32_b32 v21, v20, 0
        v_mbcnt_hi_u32_b32 v21, v20, v21
    """
    (got,) = vector(text, [LANE], ["v21"])
    mask = 0xDEADBEEF | 0xDEADBEEF << 32
    assert got.tolist() == [(mask & ((1 << i) - 1)).bit_count() for i in range(64)]


@pytest.mark.parametrize("bits", [16, 8])
def test_transposing_read_turns_rows_into_columns(bits):
    """Sixteen lanes read a 16 x n block by rows; lane c then holds column c of it."""
    count = 64 // bits
    kind = {16: np.uint16, 8: np.uint8}[bits]
    # Row r of each group's block has n elements; consecutive lanes of a row of 16 elements.
    block = np.arange(4 * 16 * count, dtype=np.uint32).astype(kind)
    out = np.zeros(128, np.uint32)
    text = kernel(
        f"""
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 3, v0
        s_waitcnt lgkmcnt(0)
        global_load_dwordx2 v[2:3], v1, s[4:5]
        s_waitcnt vmcnt(0)
        ds_write_b64 v1, v[2:3]
        s_waitcnt lgkmcnt(0)
        ds_read_b64_tr_b{bits} v[4:5], v1
        s_waitcnt lgkmcnt(0)
        global_store_dwordx2 v1, v[4:5], s[6:7]
        """,
        arch="gfx950",
        buffers=2,
    )
    report = emulate(text, (1,), [block, out])
    assert report.clean, report.summary()
    got = out.view(kind).reshape(4, 16, count)
    # The block of a group, seen as (count rows) x (16 columns): lane c receives column c.
    matrix = block.reshape(4, count, 16)
    assert (got == matrix.swapaxes(1, 2)).all()
