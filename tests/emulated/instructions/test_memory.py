"""Memory instructions: widths, signs, halves, offsets, descriptors, atomics, DMA and scratch."""

import numpy as np
import pytest

from emulated.helpers.snippets import kernel
from heedful.emulator import Unsupported, emulate

LANE = np.arange(64, dtype=np.uint32)
LOAD_ARGS = (
    "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\n"
)


def run(body, data, out, arch="gfx942", scratch=0, **options):
    text = kernel(LOAD_ARGS + body, arch=arch, buffers=2, scratch=scratch)
    report = emulate(text, (1,), [data, out], **options)
    assert report.clean, report.summary()
    return out


@pytest.mark.parametrize(
    ("kind", "source", "wanted"),
    [
        ("ubyte", np.uint8, lambda x: x.astype(np.uint32)),
        ("sbyte", np.int8, lambda x: x.astype(np.int32).view(np.uint32)),
        ("ushort", np.uint16, lambda x: x.astype(np.uint32)),
        ("sshort", np.int16, lambda x: x.astype(np.int32).view(np.uint32)),
        ("short_d16", np.uint16, lambda x: x.astype(np.uint32) | 0xABCD0000),
        ("short_d16_hi", np.uint16, lambda x: (x.astype(np.uint32) << 16) | 0x1234),
    ],
)
def test_narrow_loads_extend_or_keep_the_other_half(kind, source, wanted):
    data = (
        np.random.default_rng(0).integers(0, 256, 64 * np.dtype(source).itemsize).astype(np.uint8)
    )
    shift = {1: 0, 2: 1}[np.dtype(source).itemsize]
    body = f"""
        v_mov_b32_e32 v3, 0xabcd1234
        v_lshlrev_b32_e32 v2, {shift}, v0
        global_load_{kind} v3, v2, s[4:5]
        s_waitcnt vmcnt(0)
        global_store_dword v1, v3, s[6:7]
    """
    out = run(body, data, np.zeros(64, np.uint32))
    assert (out == wanted(data.view(source))).all()


@pytest.mark.parametrize(("kind", "count"), [("dwordx2", 2), ("dwordx3", 3), ("dwordx4", 4)])
def test_wide_accesses_move_consecutive_registers(kind, count):
    data = np.arange(64 * count, dtype=np.uint32)
    registers = f"v[4:{3 + count}]"
    body = f"""
        v_mul_u32_u24_e32 v2, {4 * count}, v0
        global_load_{kind} {registers}, v2, s[4:5]
        s_waitcnt vmcnt(0)
        ds_write_b{32 * count} v2, {registers}
        s_waitcnt lgkmcnt(0)
        ds_read_b{32 * count} v[8:{7 + count}], v2
        s_waitcnt lgkmcnt(0)
        global_store_{kind} v2, v[8:{7 + count}], s[6:7]
    """
    assert (run(body, data, np.zeros_like(data)) == data).all()


def test_narrow_stores_leave_their_neighbours_alone():
    data, out = LANE * 0x01010101, np.full(64, 0xEEEEEEEE, np.uint32)
    body = """
        global_load_dword v3, v1, s[4:5]
        s_waitcnt vmcnt(0)
        global_store_byte v1, v3, s[6:7] offset:1
        global_store_short_d16_hi v1, v3, s[6:7] offset:2
    """
    run(body, data, out)
    assert (out & 0xFF == 0xEE).all() and (out >> 16 == data >> 16).all()
    assert ((out >> 8) & 0xFF == data & 0xFF).all()


def test_negative_offsets_and_64_bit_addresses():
    data = LANE.copy()
    body = """
        v_mov_b32_e32 v3, s5
        v_add_co_u32_e32 v2, vcc, s4, v1
        s_nop 1
        v_addc_co_u32_e32 v3, vcc, 0, v3, vcc
        v_cmp_lt_u32_e32 vcc, 0, v0
        s_and_saveexec_b64 s[8:9], vcc
        global_load_dword v4, v[2:3], off offset:-4
        s_waitcnt vmcnt(0)
        global_store_dword v1, v4, s[6:7]
    """
    out = run(body, data, np.zeros(64, np.uint32))
    assert out.tolist() == [0, *range(63)]


def test_buffer_loads_beyond_the_descriptor_give_zero():
    data = LANE + 1
    body = """
        s_mov_b32 s8, s4
        s_and_b32 s9, s5, 0xffff
        s_mov_b32 s10, 0x80
        s_mov_b32 s11, 0x27000
        v_lshlrev_b32_e32 v2, 3, v0
        buffer_load_dword v3, v2, s[8:11], 0 offen offset:4
        s_waitcnt vmcnt(0)
        global_store_dword v1, v3, s[6:7]
    """
    out = run(body, data, np.zeros(64, np.uint32))
    assert out.tolist() == [data[2 * i + 1] if 8 * i + 8 <= 0x80 else 0 for i in range(64)]


@pytest.mark.parametrize("strided", [False, True])
def test_lds_pairs_use_scaled_offsets(strided):
    data = LANE + 7
    st, step = ("st64", 64) if strided else ("", 1)
    body = f"""
        global_load_dword v3, v1, s[4:5]
        v_mul_u32_u24_e32 v4, {4 if strided else 8}, v0
        s_waitcnt vmcnt(0)
        v_add_u32_e32 v5, 1000, v3
        ds_write2{st}_b32 v4, v3, v5 offset1:1
        s_waitcnt lgkmcnt(0)
        v_add_u32_e32 v6, {4 * step}, v4
        ds_read_b32 v7, v6
        s_waitcnt lgkmcnt(0)
        ds_read2{st}_b32 v[8:9], v4 offset1:1
        s_waitcnt lgkmcnt(0)
        v_sub_u32_e32 v7, v7, v8
        global_store_dword v1, v7, s[6:7]
    """
    assert (run(body, data, np.zeros(64, np.uint32)) == 1000).all()


def test_narrow_lds_accesses():
    data = LANE * 0x01030507 + 0x80
    body = """
        global_load_dword v3, v1, s[4:5]
        s_waitcnt vmcnt(0)
        ds_write_b32 v1, v3
        s_waitcnt lgkmcnt(0)
        v_lshrrev_b32_e32 v4, 8, v3
        ds_write_b8 v1, v4
        ds_write_b16_d16_hi v1, v3 offset:2
        s_waitcnt lgkmcnt(0)
        ds_read_i8 v5, v1
        ds_read_u16 v6, v1 offset:2
        s_waitcnt lgkmcnt(0)
        v_lshl_or_b32 v6, v6, 16, 0
        v_and_b32_e32 v5, 0xffff, v5
        v_or_b32_e32 v6, v6, v5
        global_store_dword v1, v6, s[6:7]
    """
    out = run(body, data, np.zeros(64, np.uint32))
    signed = ((data >> 8) & 0xFF).astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
    assert (out == ((data & 0xFFFF0000) | (signed & 0xFFFF))).all()


ATOMICS = {
    "add": (np.uint32, lambda old, x: old + x),
    "umax": (np.uint32, np.maximum),
    "smin": (np.int32, np.minimum),
    "xor": (np.uint32, np.bitwise_xor),
    "add_f32": (np.float32, np.add),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_on_one_place_fold_every_lane_in_order(name):
    kind, fold = ATOMICS[name]
    rng = np.random.default_rng(0)
    values = rng.standard_normal(64).astype(np.float32)
    data = (
        values.view(np.uint32)
        if kind is np.float32
        else rng.integers(0, 2**32, 64).astype(np.uint32)
    )
    out = np.zeros(64, np.uint32)
    body = f"""
        global_load_dword v3, v1, s[4:5]
        v_and_b32_e32 v2, 4, v1
        s_waitcnt vmcnt(0)
        global_atomic_{name} v2, v3, s[6:7]
    """
    run(body, data, out)
    for slot in (0, 1):
        total = kind(0)
        for value in data.view(kind)[slot::2]:
            total = fold(total, value)
        assert out[slot] == np.asarray(total).view(np.uint32)


def test_atomics_return_the_value_before():
    body = """
        v_mov_b32_e32 v2, 0
        v_mov_b32_e32 v3, 2
        global_atomic_add v4, v2, v3, s[4:5] sc0
        s_waitcnt vmcnt(0)
        global_store_dword v1, v4, s[6:7]
    """
    data = np.array([5], np.uint32)
    out = run(body, data, np.zeros(64, np.uint32))
    assert out.tolist() == [5 + 2 * i for i in range(64)] and data[0] == 5 + 128


def test_packed_bf16_atomics_round_each_half():
    data = np.array([0x3F804000], np.uint32)  # (1.0, 2.0) high, low
    body = """
        v_mov_b32_e32 v2, 0
        v_mov_b32_e32 v3, 0x3f803f80
        v_cmp_gt_u32_e32 vcc, 3, v0
        s_and_saveexec_b64 s[8:9], vcc
        global_atomic_pk_add_bf16 v2, v3, s[4:5]
    """
    run(body, data, np.zeros(64, np.uint32))
    assert data[0] == 0x408040A0  # (4.0, 5.0)


@pytest.mark.parametrize(("form", "arch"), [("dword", "gfx942"), ("dwordx4", "gfx950")])
def test_dma_lands_at_m0_plus_lane_times_width(form, arch):
    words = 4 if form.endswith("x4") else 1
    data = np.arange(64 * words, dtype=np.uint32) + 9
    out = np.zeros_like(data)
    body = f"""
        v_mul_u32_u24_e32 v2, {4 * words}, v0
        s_mov_b32 m0, 0x100
        s_nop 0
        global_load_lds_{form} v2, s[4:5]
        s_waitcnt vmcnt(0)
        ds_read_b{32 * words} v[4:{3 + words}], v2 offset:256
        s_waitcnt lgkmcnt(0)
        global_store_{form} v2, v[4:{3 + words}], s[6:7]
    """
    if words == 1:
        body = body.replace("v[4:4]", "v4")
    assert (run(body, data, out, arch=arch) == data).all()


def test_scratch_is_private_to_each_lane():
    body = """
        scratch_store_dword off, v0, off offset:8
        v_add_u32_e32 v2, 1, v0
        scratch_store_dwordx2 off, v[2:3], off offset:16
        s_waitcnt vmcnt(0)
        scratch_load_dword v4, off, off offset:8
        scratch_load_dword v5, off, off offset:16
        s_waitcnt vmcnt(0)
        v_add_u32_e32 v4, v4, v5
        global_store_dword v1, v4, s[6:7]
    """
    body = body.replace("v_add_u32_e32 v2, 1, v0", "v_mov_b32_e32 v3, 0\nv_add_u32_e32 v2, 1, v0")
    out = run(body, LANE, np.zeros(64, np.uint32), scratch=32)
    assert (out == 2 * LANE + 1).all()


def test_every_workgroup_of_a_grid_runs_once_with_its_coordinates():
    out = np.zeros(5 * 64, np.uint32)
    body = """
        v_lshl_add_u32 v1, s2, 8, v1
        v_mov_b32_e32 v2, s2
        v_mov_b32_e32 v3, 1
        global_atomic_add v1, v3, s[6:7]
        s_waitcnt vmcnt(0)
        global_atomic_add v1, v2, s[6:7]
    """
    text = kernel(LOAD_ARGS + body, buffers=2)
    report = emulate(text, (5,), [LANE, out])
    assert report.clean and (out.reshape(5, 64) == np.arange(5)[:, None] + 1).all()


def test_partial_workgroups_run_only_the_lanes_that_exist():
    out = np.zeros(128, np.uint32)
    text = kernel(LOAD_ARGS + "v_mov_b32_e32 v2, 1\nglobal_store_dword v1, v2, s[6:7]", buffers=2)
    assert emulate(text, (1,), [LANE, out], threads=100).clean
    assert out.tolist() == [1] * 100 + [0] * 28


RECORDS = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_and_b32_e32 v1, 63, v0
    v_lshlrev_b32_e32 v3, 2, v0
    s_mov_b32 s10, 40
    s_mov_b32 s11, 0x20000
    s_mov_b32 s12, 4
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s8, s4
    s_or_b32 s9, s5, 0x80000
    v_mov_b32_e32 v2, 4
    {load}
    s_waitcnt vmcnt(0)
    global_store_dword v3, v4, s[6:7]
"""


def _records(load, count=512):
    """Lane l reads from records of 8 bytes, of which 40 exist; word w holds 1000 + w."""
    data, out = 1000 + np.arange(count, dtype=np.uint32), np.zeros(64, np.uint32)
    text = kernel(RECORDS.format(load=load), buffers=2)
    report = emulate(text, (1,), [data, out])
    return report, out


@pytest.mark.parametrize(
    ("load", "word"),
    [
        ("buffer_load_dword v4, v1, s[8:11], 0 idxen", 0),
        ("buffer_load_dword v4, v1, s[8:11], 0 idxen offset:4", 1),
        ("buffer_load_dword v4, v1, s[8:11], s12 idxen", 1),
        ("buffer_load_dword v4, v[1:2], s[8:11], s12 idxen offen offset:8", 4),
    ],
)
def test_indexed_buffers_are_addressed_and_bounded_by_records(load, word):
    report, out = _records(load)
    lanes = np.arange(64)
    assert report.clean, report.summary()
    np.testing.assert_array_equal(out, np.where(lanes < 40, 1000 + 2 * lanes + word, 0))


def test_a_record_that_lies_behind_the_array_is_out_of_bounds():
    report, _ = _records("buffer_load_dword v4, v1, s[8:11], 0 idxen", count=60)
    assert report.kinds() == {"global-bounds"}


def test_swizzled_records_are_not_supported():
    body = RECORDS.replace("0x80000", "0x80080000")
    text = kernel(body.format(load="buffer_load_dword v4, v1, s[8:11], 0 idxen"), buffers=2)
    with pytest.raises(Unsupported, match="swizzled"):
        emulate(text, (1,), [np.zeros(512, np.uint32), np.zeros(64, np.uint32)])


SCALAR = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_mov_b32 s12, 16
    s_mov_b32 s8, {value}
    s_mov_b32 s9, 0x77
    s_waitcnt lgkmcnt(0)
    {body}
    s_waitcnt lgkmcnt(0)
    s_store_dword s8, s[6:7], 0x0
    s_waitcnt lgkmcnt(0)
"""


def _scalar(body, value, data, threads=64):
    text = kernel(SCALAR.format(body=body, value=value), buffers=2, threads=threads)
    out = np.zeros(4, np.uint32)
    report = emulate(text, (1,), [data, out], checks={"waitcnt", "global-bounds"})
    assert report.clean, report.summary()
    return int(out[0])


@pytest.mark.parametrize(
    ("body", "at", "wanted"),
    [
        ("s_store_dword s8, s[4:5], 0x8", 2, [5]),
        ("s_store_dwordx2 s[8:9], s[4:5], s12 glc", 4, [5, 0x77]),
        ("s_store_dwordx4 s[8:11], s[4:5], 0x0", 0, [5, 0x77]),
    ],
)
def test_scalar_stores_write_their_words(body, at, wanted):
    data = np.full(16, 9, np.uint32)
    _scalar(body, 5, data)
    assert list(data[at : at + len(wanted)]) == wanted
    count = 4 if "x4" in body else len(wanted)
    assert (np.delete(data, range(at, at + count)) == 9).all()


@pytest.mark.parametrize(
    ("name", "old", "value", "wanted"),
    [
        ("add", 7, 5, 12),
        ("sub", 7, 5, 2),
        ("inc", 5, 5, 0),
        ("dec", 5, 9, 4),
        ("dec", 0, 9, 9),
        ("dec", 12, 9, 9),
        ("umax", 7, 5, 7),
        ("swap", 7, 5, 5),
        ("smin", 0xFFFFFFFF, 5, 0xFFFFFFFF),
    ],
)
def test_scalar_atomics_update_memory_and_return_the_old_value_with_glc(name, old, value, wanted):
    data = np.array([0, 0, old, 0], np.uint32)
    assert _scalar(f"s_atomic_{name} s8, s[4:5], 0x8", value, data) == value
    assert list(data) == [0, 0, wanted, 0]
    data[2] = old
    assert _scalar(f"s_atomic_{name} s8, s[4:5], 0x8 glc", value, data) == old
    assert data[2] == wanted


def test_a_scalar_atomic_counts_once_a_wave():
    data = np.zeros(4, np.uint32)
    _scalar("s_atomic_add s8, s[4:5], 0x0", 3, data, threads=256)
    assert data[0] == 12


def test_a_vector_decrement_wraps_as_the_isa_says():
    body = "v_mov_b32_e32 v2, 3\nglobal_atomic_dec v3, v1, v2, s[4:5] sc0\n"
    body += "s_waitcnt vmcnt(0)\nglobal_store_dword v1, v3, s[6:7]\n"
    data = np.arange(64, dtype=np.uint32)
    old = run(body, data, np.zeros(64, np.uint32))
    np.testing.assert_array_equal(old, LANE)
    np.testing.assert_array_equal(data, np.where((LANE == 0) | (LANE > 3), 3, LANE - 1))
