"""Code objects: what the reader finds in them, how arguments go in, and what they compute."""

import struct

import numpy as np
import pytest

from emulated.helpers.assembled import stand_in, write_object
from heedful.emulator import AsmError, At, emulate, load_object
from heedful.emulator.objects import disassembly
from heedful.emulator.objects.elf import CodeObject
from heedful.emulator.objects.msgpack import unpack

POINTER, VALUE = "global_buffer", "by_value"
# out[i] = scale * x[i] over n, in a loop over waves of 64: a branch back and one ahead.
SCALE = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[0:1], 0x10
    v_lshlrev_b32_e32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
again:
    s_cmp_lt_i32 s9, 1
    s_cbranch_scc1 done
    global_load_dword v2, v1, s[4:5]
    s_waitcnt vmcnt(0)
    v_mul_f32_e32 v2, s8, v2
    global_store_dword v1, v2, s[6:7]
    v_add_u32_e32 v1, 0x100, v1
    s_sub_i32 s9, s9, 64
    s_branch again
done:
"""
SCALE_ARGUMENTS = [("X", 8, POINTER), ("OUT", 8, POINTER), ("scale", 4, VALUE), ("n", 4, VALUE)]
# Stores the argument segment's first 16 dwords.
ECHO = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[0:1]
    s_waitcnt vmcnt(0)
    global_store_dword v1, v2, s[4:5]
"""
SLOTS = [("OUT", 8, POINTER), ("pad", 8, VALUE)]
SLOTS += [("scalar", 4, VALUE), ("pad", 4, VALUE), ("pad", 8, VALUE)]
SLOTS += [("TABLE", 4, VALUE), ("pad", 4, VALUE), ("twice", 4, VALUE), ("twice", 4, VALUE)]
SLOTS += [("last", 4, VALUE), ("pad", 4, VALUE), ("pad", 8, VALUE)]


@pytest.fixture
def folder(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    return tools


@pytest.fixture
def objdump(folder):
    return stand_in(folder)


@pytest.fixture
def scale(tmp_path, objdump):
    def load(arch="gfx950", **facts):
        kernels = {"other": (ECHO, SLOTS, 64), "scale": (SCALE, SCALE_ARGUMENTS, 64)}
        path = write_object(tmp_path, kernels, arch, **facts)
        return load_object(path, "scale", objdump=objdump)

    return load


@pytest.fixture
def echo(tmp_path, objdump):
    path = write_object(tmp_path, {"echo": (ECHO, SLOTS, 64)})
    code = load_object(path, objdump=objdump)

    def run(**given):
        out = np.zeros(64, np.uint32)
        names = {"scalar": 0, "TABLE": None, "@40": 1, "@44": 2, "last": 3} | {
            name.replace("at", "@"): value for name, value in given.items()
        }
        emulate(code, (1,), {"OUT": out, **names}, checks=())
        return out

    return run


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_kernel_of_an_object_gives_what_its_instructions_say(scale, arch):
    code = scale(arch)
    x, out = np.arange(192, dtype=np.float32), np.zeros(192, np.float32)
    arguments = {"OUT": out, "scale": 0.5, "n": 130, "X": x}
    report = emulate(code, (1,), arguments)
    assert report.clean, report.summary()
    assert code.program.arch == arch and code.program.name == "scale"
    np.testing.assert_array_equal(out, 0.5 * x)
    assert report.count_at("s_branch") == 3


def test_findings_name_the_distance_from_the_kernels_entry(scale):
    x = np.zeros(64, np.float32)
    report = emulate(scale(), (1,), [x, x, 1.0, 128])
    assert {f.kind for f in report.findings} == {"global-bounds"}
    assert "(+0x" in report.findings[0].instruction


def test_the_descriptor_gives_what_the_assembler_was_told(scale):
    facts = scale(lds=4096, scratch=64, denormals=0).program
    told = {
        "user_sgpr_count": 2,
        "user_sgpr_kernarg_segment_ptr": 1,
        "user_sgpr_dispatch_ptr": 0,
        "system_sgpr_workgroup_id_x": 1,
        "system_sgpr_workgroup_id_y": 1,
        "system_sgpr_workgroup_id_z": 0,
        "private_segment_fixed_size": 64,
        "float_denorm_mode_32": 0,
        "float_denorm_mode_16_64": 3,
        "next_free_vgpr": 64,
        "accum_offset": 32,
    }
    assert told.items() <= facts.directives.items()
    assert facts.lds_bytes == 4096 and facts.max_workgroup == 64 and facts.kernarg_bytes == 24


def test_lds_behind_what_the_object_asks_for_is_out_of_bounds(tmp_path, objdump):
    body = "v_mov_b32_e32 v1, 0x200\nds_write_b32 v1, v1\ns_waitcnt lgkmcnt(0)"
    kernels = {"k": (body, [("pad", 8, VALUE)], 64)}
    code = load_object(write_object(tmp_path, kernels, lds=512), objdump=objdump)
    assert emulate(code, (1,), {}).kinds() == {"lds-bounds"}
    assert emulate(code, (1,), {}, lds_bytes=1024).clean


def test_values_of_any_type_go_into_the_slots_that_metadata_calls_integers(echo):
    table = np.zeros(4, np.uint32)
    got = echo(scalar=0.125, TABLE=At(table, 8), last=np.uint16(7))
    assert got[4] == struct.unpack("<I", struct.pack("<f", 0.125))[0]
    address = int(got[8]) | int(got[9]) << 32
    assert address % 256 == 8 and address >> 40
    assert list(got[10:13]) == [1, 2, 7] and not got[2:4].any() and not got[5:8].any()


def test_a_wide_value_may_run_over_the_fill_behind_its_slot(echo):
    assert list(echo(last=np.uint64(5 << 32 | 6))[12:14]) == [6, 5]
    with pytest.raises(ValueError, match="room for 4 bytes"):
        echo(at40=np.uint64(1))


def test_fill_can_be_set_by_its_offset(echo):
    assert echo(at8=9)[2] == 9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"missing": 1}, "0 arguments called 'missing'"),
        ({"twice": 1}, r"at bytes \[40, 44\]"),
        ({"at16": 1}, "byte 16 twice"),
        ({"at4096": 1}, "lies behind"),
    ],
)
def test_names_that_do_not_fit_are_refused(echo, given, message):
    with pytest.raises(ValueError, match=message):
        echo(**given)


def test_an_argument_without_a_value_is_refused(scale):
    with pytest.raises(ValueError, match=r"lacks a value for \['OUT', 'n'\]"):
        emulate(scale(), (1,), {"X": None, "scale": 1.0})


def test_a_line_of_the_disassembler_that_cannot_be_read_is_no_instruction_less(scale, objdump):
    with open(objdump) as file:
        tool = file.read()
    with open(objdump, "w") as file:
        file.write(tool.replace("{words}{symbol}", "{words} ?"))
    with pytest.raises(AsmError, match="cannot read this line"):
        scale()


def test_an_object_with_several_kernels_wants_a_name(tmp_path, objdump):
    kernels = {name: (ECHO, SLOTS, 64) for name in ("one", "two")}
    path = write_object(tmp_path, kernels)
    for name in (None, "three"):
        with pytest.raises(AsmError, match=r"none of \['one', 'two'\]"):
            load_object(path, name, objdump=objdump)
    assert load_object(path, "two", objdump=objdump).program.name == "two"


def test_a_damaged_object_is_refused_wherever_it_ends(tmp_path):
    data = write_object(tmp_path, {"k": (ECHO, SLOTS, 64)}).read_bytes()
    for end in (0, 5, 40, 63, 200, 700, len(data) // 2, len(data) - 1):
        with pytest.raises(AsmError):
            CodeObject(data[:end])
    other = bytearray(data)
    other[48] = 0x3F  # the flags of gfx90a
    with pytest.raises(AsmError, match="expected one of gfx942, gfx950"):
        CodeObject(bytes(other))


def test_a_kernel_that_rounds_another_way_is_refused(tmp_path):
    path = write_object(tmp_path, {"k": (ECHO, SLOTS, 64)})
    data = bytearray(path.read_bytes())
    made = CodeObject(bytes(data))
    at = data.index(made.bytes_at(made.symbols["k.kd"], 64))
    data[at + 49] |= 0x30  # compute_pgm_rsrc1, bits 12 and 13
    with pytest.raises(AsmError, match="float_round_mode_32 is 3"):
        CodeObject(bytes(data))


@pytest.mark.parametrize(("arch", "version", "fits"), [("gfx942", 19, 1), ("gfx950", 19, 0)])
def test_a_tool_that_is_too_old_is_refused(folder, arch, version, fits):
    tool = stand_in(folder, version)
    if fits:
        assert disassembly.find_objdump(arch, tool) == tool
        return
    with pytest.raises(AsmError, match=r"LLVM 20 or newer; found .*\(LLVM 19\)"):
        disassembly.find_objdump(arch, tool)


def test_the_newest_tool_on_path_is_taken_and_its_absence_explained(folder, monkeypatch):
    monkeypatch.delenv("LLVM_OBJDUMP", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    for version in (19, 20):
        stand_in(folder, version)
    newest = stand_in(folder, 21)
    assert disassembly.find_objdump("gfx950") == newest
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AsmError, match=r"found none\. Install one"):
        disassembly.find_objdump("gfx950")
    monkeypatch.setenv("LLVM_OBJDUMP", str(folder / "nowhere"))
    with pytest.raises(AsmError, match="cannot run"):
        disassembly.find_objdump("gfx950")


def _packed(value) -> bytes:
    """MessagePack by its definition, in the longest form of each type and the shortest."""
    if isinstance(value, str):
        return bytes([0xDB]) + struct.pack(">I", len(value)) + value.encode()
    if isinstance(value, list):
        return bytes([0xDC]) + struct.pack(">H", len(value)) + b"".join(map(_packed, value))
    if isinstance(value, dict):
        items = b"".join(_packed(k) + _packed(v) for k, v in value.items())
        return bytes([0x80 | len(value)]) + items
    if isinstance(value, float):
        return bytes([0xCB]) + struct.pack(">d", value)
    if value is None or isinstance(value, bool):
        return bytes([{None: 0xC0, False: 0xC2, True: 0xC3}[value]])
    return bytes([0xD3]) + struct.pack(">q", value)


def test_metadata_of_every_type_is_read():
    value = {"a": [1, -5, 1 << 40, 2.5, None, True, False], "b": {"c": "x" * 40}, "d": []}
    assert unpack(_packed(value)) == value
    short = bytes([0x93, 0x7F, 0xE0, 0xA2]) + b"hi"
    assert unpack(short) == [127, -32, "hi"]
    with pytest.raises(AsmError, match="early"):
        unpack(_packed(value)[:-1])
    with pytest.raises(AsmError, match="behind"):
        unpack(short + b"\0")
    with pytest.raises(AsmError, match="0xc1"):
        unpack(b"\xc1")


# m0, then a load to LDS; and an SGPR from a compare, then a vector instruction that reads it.
SHIPPED = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    s_mov_b32 m0, 0
    global_load_lds_dword v1, s[4:5]
    v_cmp_lt_u32_e64 s[8:9], 5, v0
    v_cndmask_b32_e64 v2, v0, v1, s[8:9]
    s_waitcnt vmcnt(0)
"""
# A scalar from a vector instruction as an address, which no shipped kernel reads so early.
BROKEN = "v_readfirstlane_b32 s4, v0\nglobal_load_dword v3, v1, s[4:5]\ns_waitcnt vmcnt(0)\n"


@pytest.fixture
def shipped(tmp_path, objdump):
    def run(body, **options):
        kernels = {"k": (body, [("X", 8, POINTER)], 64)}
        code = load_object(write_object(tmp_path, kernels, lds=512), objdump=objdump)
        checks = {"wait-states", "waitcnt", "lds-race"}
        return emulate(code, (1,), [np.zeros(64, np.uint32)], checks=checks, **options)

    return run


def test_a_rule_that_shipped_kernels_break_is_advice_for_theirs_and_an_error_for_ours(shipped):
    ours, theirs = shipped(SHIPPED), shipped(SHIPPED, strict=False, stop_at_first=True)
    assert not ours.clean and len(ours.findings) == len(theirs.findings) == 2
    assert theirs.clean and not theirs.kinds() and all(f.advice for f in theirs.findings)
    assert "no findings, 2 of advice" in theirs.summary()
    assert "advice, wait-states: m0 read by a load to LDS" in theirs.summary()


def test_advice_hides_no_other_finding(shipped):
    report = shipped(SHIPPED + BROKEN, strict=False)
    assert not report.clean and report.kinds() == {"wait-states"}
    assert [f.advice for f in report.findings].count(False) == 1
    assert "1 findings, 2 of advice" in report.summary()
