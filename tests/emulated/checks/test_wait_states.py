"""Too few wait states are found on every path; the compiler's own code has none too few."""

import inspect
import re

import pytest

from emulated.helpers.compiled import attention, names
from emulated.helpers.snippets import kernel
from heedful.emulator import decode
from heedful.emulator.checks import waitstates
from heedful.emulator.checks.waitstates import violations
from support.problems.grids import slow_but

WIDE = "v[20:35], v[10:11], v[12:13], v[20:35]"
MFMA = {
    # gfx942: 8, 4 and 16 passes; gfx950: 8 passes of the doubled shapes.
    ("gfx942", "v_mfma_f32_32x32x8_bf16"): (WIDE, 11),
    ("gfx942", "v_mfma_f32_16x16x16_bf16"): ("v[20:23], v[10:11], v[12:13], v[20:23]", 7),
    ("gfx942", "v_mfma_f32_16x16x8_xf32"): ("v[20:23], v[10:11], v[12:13], v[20:23]", 7),
    ("gfx942", "v_mfma_f32_32x32x2_f32"): ("v[20:35], v10, v12, v[20:35]", 18),
    ("gfx950", "v_mfma_f32_32x32x16_bf16"): ("v[20:35], v[10:13], v[14:17], v[20:35]", 12),
    ("gfx950", "v_mfma_f32_16x16x32_bf16"): ("v[20:23], v[10:13], v[14:17], v[20:23]", 8),
}
PAIRS = [
    # (producer, consumer, wait states needed)
    ("v_cmp_lt_u32_e32 vcc, 5, v1", "v_cndmask_b32_e32 v2, v3, v4, vcc", 2),
    ("v_cmp_lt_u32_e64 s[8:9], 5, v1", "v_cndmask_b32_e64 v2, v3, v4, s[8:9]", 2),
    ("v_readfirstlane_b32 s8, v1", "v_mov_b32_e32 v2, s8", 2),
    ("v_readfirstlane_b32 s8, v1", "global_load_dword v2, v1, s[8:9]", 5),
    ("v_readfirstlane_b32 s8, v1", "s_mov_b32 s9, s8", 0),
    ("v_cmp_lt_u32_e32 vcc, 5, v1", "v_div_fmas_f32 v2, v3, v4, v5", 4),
    ("v_readfirstlane_b32 s8, v1", "v_readlane_b32 s9, v2, s8", 4),
    ("v_cmpx_lt_u32_e32 vcc, 5, v1", "v_mov_b32_dpp v2, v3 row_shr:1 row_mask:0xf", 5),
    ("v_cmpx_lt_u32_e32 vcc, 5, v1", "v_readlane_b32 s9, v2, 3", 4),
    ("v_mov_b32_e32 v3, 0", "v_mov_b32_dpp v2, v3 row_shr:1 row_mask:0xf", 2),
    ("v_mov_b32_e32 v3, 0", "v_readlane_b32 s9, v3, 3", 1),
    ("v_mov_b32_e32 v10, 0", f"v_mfma_f32_32x32x8_bf16 {WIDE}", 2),
    ("v_exp_f32_e32 v3, v1", "v_add_f32_e32 v2, v3, v1", 1),
    ("v_exp_f32_e32 v3, v1", "v_log_f32_e32 v2, v3", 0),
    ("v_lshrrev_b32_sdwa v3, v1, v1 dst_sel:BYTE_1", "v_add_u32_e32 v2, v3, v1", 1),
    ("s_mov_b32 m0, s8", "global_load_lds_dword v1, s[4:5]", 1),
    ("global_store_dwordx4 v1, v[4:7], s[4:5]", "v_mov_b32_e32 v5, 0", 2),
    ("global_store_dwordx2 v1, v[4:5], s[4:5]", "v_mov_b32_e32 v5, 0", 0),
    ("buffer_store_dwordx4 v[4:7], v1, s[8:11], s3 offen", "v_mov_b32_e32 v5, 0", 1),
    ("v_add_u32_e32 v3, v1, v1", "v_add_u32_e32 v2, v3, v1", 0),
    ("v_dot2_f32_f16 v3, v4, v5, v6", "v_add_f32_e32 v2, v3, v1", 3),
    ("v_dot2_f32_f16 v3, v4, v5, v6", "v_mov_b32_e32 v3, 0", 3),
    ("v_dot2_f32_f16 v3, v4, v5, v6", "v_dot2_f32_f16 v7, v4, v5, v3", 0),
    ("v_dot2_f32_f16 v10, v4, v5, v6", f"v_mfma_f32_32x32x8_bf16 {WIDE}", 3),
    ("v_mov_b32_e32 v3, 0", "v_readfirstlane_b32 s9, v3", 1),
    ("v_mov_b32_e32 v3, 0", "v_writelane_b32 v3, s9, 3", 0),
    ("v_lshrrev_b32_sdwa v3, v1, v1 dst_sel:BYTE_1", "v_mov_b32_e32 v3, 0", 1),
    ("v_readfirstlane_b32 s8, v1", "v_writelane_b32 v2, s9, s8", 4),
    ("v_readfirstlane_b32 s8, v1", "buffer_load_dword v2, v1, s[8:11], 0 offen", 5),
    ("v_cmpx_lt_u32_e32 vcc, 5, v1", f"v_mfma_f32_32x32x8_bf16 {WIDE}", 4),
    ("v_cmpx_lt_u32_e32 vcc, 5, v1", "v_readfirstlane_b32 s9, v2", 4),
    ("v_cmpx_lt_u32_e32 vcc, 5, v1", "v_add_u32_e32 v2, v3, v1", 0),
    ("global_store_dwordx3 v1, v[4:6], s[4:5]", "v_mov_b32_e32 v6, 0", 2),
    ("buffer_store_dwordx4 v[4:7], v1, s[8:11], 0 offen", "v_mov_b32_e32 v5, 0", 2),
    ("s_mov_b32 m0, s8", "global_load_dword v2, v1, s[4:5]", 0),
    ("s_mov_b32 s7, s8", "global_load_lds_dword v1, s[4:5]", 0),
]


def found(producer, gap, consumer, arch="gfx942"):
    nop = [f"s_nop {gap - 1}"] if gap else []
    return decode(kernel([producer, *nop, consumer], arch=arch)).violations


@pytest.mark.parametrize(("producer", "consumer", "needed"), PAIRS)
def test_each_pair_needs_exactly_its_wait_states(producer, consumer, needed):
    assert not found(producer, needed, consumer)
    if needed:
        (violation,) = found(producer, needed - 1, consumer)
        assert (violation.needed, violation.found) == (needed, needed - 1)
        assert violation.producer.text == producer and violation.consumer.text == consumer


@pytest.mark.parametrize(("arch", "name"), MFMA)
@pytest.mark.parametrize(
    "use",
    [
        "v_add_f32_e32 v60, v21, v1",
        "v_mov_b32_e32 v21, 0",
        "global_store_dword v1, v21, s[4:5]",
        "ds_write_b32 v1, v21",
    ],
)
def test_mfma_results_need_as_long_as_their_passes(arch, name, use):
    operands, needed = MFMA[arch, name]
    assert not found(f"{name} {operands}", needed, use, arch)
    (violation,) = found(f"{name} {operands}", needed - 1, use, arch)
    assert violation.needed == needed


# Passes, by shape and format: (instruction, passes, kind). Of narrow formats ("xdl") a result is
# there after its passes and 3 more, 4 on gfx950 but for two passes; of float32 after 2 more.
PRODUCTS = [
    ("v_mfma_f32_4x4x1_16b_f32 v[20:23], v10, v12, v[20:23]", 2, "float32"),
    ("v_mfma_f32_16x16x4_f32 v[20:23], v10, v12, v[20:23]", 8, "float32"),
    ("v_mfma_f32_32x32x2_f32 v[20:35], v10, v12, v[20:35]", 16, "float32"),
    ("v_mfma_f32_4x4x4_16b_bf16 v[20:23], v[10:11], v[12:13], v[20:23]", 2, "xdl"),
    ("v_mfma_f32_16x16x16_bf16 v[20:23], v[10:11], v[12:13], v[20:23]", 4, "xdl"),
    (f"v_mfma_f32_32x32x8_bf16 {WIDE}", 8, "xdl"),
    (f"v_mfma_i32_32x32x16_i8 {WIDE}", 8, "xdl"),
    ("v_mfma_f32_16x16x128_f8f6f4 v[20:23], v[0:7], v[8:15], v[20:23]", 8, "xdl"),
    ("v_mfma_f32_16x16x128_f8f6f4 v[20:23], v[0:3], v[8:11], v[20:23] cbsz:4 blgp:4", 4, "xdl"),
]
XDL_INPUT = "v_mfma_f32_16x16x16_bf16 v[60:63], v[20:21], v[70:71], v[60:63]"
XDL_ADDEND = "v_mfma_f32_16x16x16_bf16 v[22:25], v[64:65], v[70:71], v[22:25]"
FLOAT_INPUT = "v_mfma_f32_16x16x4_f32 v[60:63], v20, v70, v[60:63]"
FLOAT_ADDEND = "v_mfma_f32_16x16x4_f32 v[22:25], v64, v70, v[22:25]"


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("product", "passes", "kind"), PRODUCTS)
def test_products_of_every_length_need_their_passes_and_what_their_unit_adds(
    product, passes, kind, arch
):
    newer = arch == "gfx950" and passes != 2
    ready = passes + (3 + newer if kind == "xdl" else 2)
    needed = {"v_add_f32_e32 v60, v21, v1": ready, "v_mov_b32_e32 v21, 0": ready}
    needed |= {"global_store_dword v1, v21, s[4:5]": ready, XDL_INPUT: ready, FLOAT_INPUT: ready}
    if kind == "xdl":
        needed |= {XDL_ADDEND: passes + 1 + (arch == "gfx950"), FLOAT_ADDEND: passes + 1 + newer}
    else:
        needed |= {XDL_ADDEND: 0, FLOAT_ADDEND: passes}
    for consumer, states in needed.items():
        assert not violations_after(product, states, consumer, arch)
        if states:
            (violation,) = violations_after(product, states - 1, consumer, arch)
            assert (violation.needed, violation.found) == (states, states - 1)


DOUBLE = "v_mfma_f64_16x16x4_f64 v[20:27], v[10:11], v[12:13], v[20:27]"
DOUBLES = [
    # (consumer, on gfx942, on gfx950)
    ("v_add_f32_e32 v60, v21, v1", 11, 19),
    ("v_mov_b32_e32 v21, 0", 11, 11),
    ("global_store_dword v1, v21, s[4:5]", 18, 18),
    (XDL_INPUT, 11, 19),
    (XDL_ADDEND, 0, 0),
    ("v_mfma_f64_16x16x4_f64 v[22:29], v[64:65], v[70:71], v[22:29]", 9, 17),
    ("v_mfma_f64_16x16x4_f64 v[60:67], v[20:21], v[70:71], v[60:67]", 11, 19),
    (DOUBLE, 0, 0),
]


@pytest.mark.parametrize(("consumer", "older", "newer"), DOUBLES)
def test_float64_products_need_their_own_distances(consumer, older, newer):
    for arch, states in (("gfx942", older), ("gfx950", newer)):
        assert not violations_after(DOUBLE, states, consumer, arch)
        if states:
            assert violations_after(DOUBLE, states - 1, consumer, arch)


def violations_after(producer: str, gap: int, consumer: str, arch: str):
    """What is found with so many wait states between the two."""
    nops = [f"s_nop {min(8, gap - done) - 1}" for done in range(0, gap, 8)]
    return decode(kernel([producer, *nops, consumer], arch=arch)).violations


def test_accumulating_onto_the_same_block_needs_nothing_and_onto_a_shifted_one_does():
    first = f"v_mfma_f32_32x32x8_bf16 {WIDE}"
    shifted = "v_mfma_f32_32x32x8_bf16 v[24:39], v[10:11], v[12:13], v[24:39]"
    as_input = "v_mfma_f32_32x32x8_bf16 v[40:55], v[20:21], v[12:13], v[40:55]"
    assert not found(first, 0, first)
    assert [v.needed for v in found(first, 0, shifted)] == [9]
    assert [v.needed for v in found(first, 0, as_input)] == [11]
    assert not found(first, 11, as_input)


def test_overwriting_the_addend_waits_until_it_has_been_read():
    mfma = "v_mfma_f32_32x32x8_bf16 v[40:55], v[10:11], v[12:13], v[20:35]"
    assert [v.needed for v in found(mfma, 6, "v_mov_b32_e32 v25, 0")] == [7]
    assert not found(mfma, 7, "v_mov_b32_e32 v25, 0")


def test_the_addend_of_a_float32_product_may_be_overwritten_at_once():
    mfma = "v_mfma_f32_16x16x4_f32 v[40:43], v10, v12, v[38:41]"
    assert not found(mfma, 0, "v_mov_b32_e32 v38, 0")


def test_the_shortest_path_counts_loops_included():
    body = """
    1:
        v_mov_b32_e32 v2, s8
        s_cmp_eq_u32 s9, 0
        v_readfirstlane_b32 s8, v1
        s_cbranch_scc1 1b
    """
    (violation,) = decode(kernel(body)).violations
    assert (violation.needed, violation.found) == (2, 1)


@pytest.mark.parametrize(("behind", "distance"), [("s_branch 2f", 2), ("s_nop 0", 1)])
def test_a_taken_branch_counts_with_the_jump_behind_it_as_in_the_compiler(behind, distance):
    body = f"""
    1:
        s_cmp_eq_u32 s9, 0
        v_mfma_f32_32x32x8_bf16 {WIDE}
        s_cbranch_scc1 3f
        {behind}
    2:
        s_endpgm
    3:
        v_mov_b32_e32 v1, v20
    """
    (violation,) = [v for v in decode(kernel(body)).violations if "v_mov" in v.consumer.text]
    assert (violation.needed, violation.found) == (11, distance)


@pytest.mark.parametrize("name", slow_but(names()[:1], names()))
def test_compiled_kernels_have_no_violation(name):
    assert not decode(attention(name).text).violations


# Nops that LLVM places for reasons of its own: it takes a source modifier bit of packed float32
# instructions for op_sel, keeps restartable clauses of loads apart, and separates spill writes.
_EXCUSED = re.compile(r"v_pk_|buffer_load|v_writelane")


@pytest.mark.parametrize("name", slow_but(names()[1:2], names()))
def test_every_nop_of_the_compiler_is_needed(name):
    """One wait state less anywhere is found: the rules are as strict as the compiler's."""
    lines = attention(name).text.splitlines()
    nops = [i for i, line in enumerate(lines) if re.match(r"\ts_nop \d+", line)]
    for i in nops[:: max(1, len(nops) // 4)]:
        count = int(lines[i].split()[1])
        mutant = [*lines]
        mutant[i] = f"\ts_nop {count - 1}" if count else ""
        near = [x for x in lines[max(0, i - 12) : i + 8] if re.match(r"\t[a-z]", x)]
        if any(_EXCUSED.search(x) for x in near):
            continue
        assert decode("\n".join(mutant)).violations, (i + 1, near)


def test_a_changed_instruction_is_checked_as_the_whole_program_is():
    code = decode(attention(names()[0]).text)
    mutants = [(i.pc, "s_nop 0") for i in code.program.code if i.mnemonic == "s_nop"]
    mutants += [(i.pc, "v_mov_b32_e32 v1, v2") for i in code.program.code[::97] if i.operands]
    found = 0
    for pc, text in mutants:
        if code.program.code[pc].mnemonic.startswith(("s_branch", "s_cbranch")):
            continue
        mutant = code.replaced(pc, text)
        assert {str(v) for v in mutant.violations} == {str(v) for v in violations(mutant.program)}
        found += bool(mutant.violations)
    assert found


def test_advice_names_rules_that_exist():
    """A reason in ADVICE that no rule gives would be a rule that was renamed."""
    source = inspect.getsource(waitstates)
    for reason in waitstates.ADVICE:
        assert source.count(f'"{reason}"') >= 2, reason
