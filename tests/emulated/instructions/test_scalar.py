"""Scalar instructions and their condition code against Python's unbounded integers."""

import numpy as np
import pytest

from emulated.helpers.snippets import scalar

M32, M64 = 2**32 - 1, 2**64 - 1
EDGES = [0, 1, 2, 31, 32, 63, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, M32]


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def overflow(x: int) -> bool:
    return not -(2**31) <= x < 2**31


def bfe(a: int, b: int, sign: bool) -> tuple[int, bool]:
    width = min(b >> 16 & 127, 32)
    field = (a >> (b & 31)) & ((1 << width) - 1)
    value = signed(field, width) if sign and width else field
    return value, value != 0


def logic(function):
    return lambda a, b: (function(a, b) & M32, function(a, b) & M32 != 0)


BINARY = {
    "s_add_u32": lambda a, b: (a + b, a + b > M32),
    "s_sub_u32": lambda a, b: (a - b, a < b),
    "s_add_i32": lambda a, b: (a + b, overflow(signed(a) + signed(b))),
    "s_sub_i32": lambda a, b: (a - b, overflow(signed(a) - signed(b))),
    "s_mul_i32": lambda a, b: (a * b, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32, None),
    "s_lshl_b32": logic(lambda a, b: a << (b & 31)),
    "s_lshr_b32": logic(lambda a, b: a >> (b & 31)),
    "s_ashr_i32": logic(lambda a, b: signed(a) >> (b & 31)),
    "s_and_b32": logic(lambda a, b: a & b),
    "s_or_b32": logic(lambda a, b: a | b),
    "s_xor_b32": logic(lambda a, b: a ^ b),
    "s_andn2_b32": logic(lambda a, b: a & ~b),
    "s_orn2_b32": logic(lambda a, b: a | ~b),
    "s_nand_b32": logic(lambda a, b: ~(a & b)),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)), signed(a) < signed(b)),
    "s_max_i32": lambda a, b: (max(signed(a), signed(b)), signed(a) > signed(b)),
    "s_min_u32": lambda a, b: (min(a, b), a < b),
    "s_max_u32": lambda a, b: (max(a, b), a > b),
    "s_bfe_u32": lambda a, b: bfe(a, b, False),
    "s_bfe_i32": lambda a, b: bfe(a, b, True),
    "s_bfm_b32": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), None),
    "s_absdiff_i32": lambda a, b: (
        abs(signed(a) - signed(b)),
        (abs(signed(a) - signed(b)) & M32) > 0,
    ),
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b: (a & 0xFFFF | b >> 16 << 16, None),
    "s_lshl1_add_u32": lambda a, b: ((a << 1) + b, (a << 1) + b > M32),
    "s_lshl4_add_u32": lambda a, b: ((a << 4) + b, (a << 4) + b > M32),
}
UNARY = {
    "s_abs_i32": lambda a: (abs(signed(a)), a != 0),
    "s_not_b32": lambda a: (~a, ~a & M32 != 0),
    "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "s_sext_i32_i8": lambda a: (signed(a, 8), None),
    "s_sext_i32_i16": lambda a: (signed(a, 16), None),
    "s_bcnt1_i32_b32": lambda a: (a.bit_count(), a.bit_count() != 0),
    "s_ff1_i32_b32": lambda a: ((a & -a).bit_length() - 1 if a else M32, None),
    "s_flbit_i32_b32": lambda a: (32 - a.bit_length() if a else M32, None),
}
COMPARES = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
WIDE = {
    "s_and_b64": lambda a, b: a & b,
    "s_or_b64": lambda a, b: a | b,
    "s_xor_b64": lambda a, b: a ^ b,
    "s_andn2_b64": lambda a, b: a & ~b,
    "s_orn2_b64": lambda a, b: a | ~b,
    "s_nor_b64": lambda a, b: ~(a | b),
    "s_lshl_b64": lambda a, b: a << (b & 63),
    "s_lshr_b64": lambda a, b: a >> (b & 63),
    "s_ashr_i64": lambda a, b: signed(a, 64) >> (b & 63),
}


def samples(columns: int, count: int = 96) -> list[np.ndarray]:
    rng = np.random.default_rng(columns)
    table = rng.integers(0, 2**32, (count, columns), dtype=np.uint64)
    table[: count // 2] = rng.choice(np.array(EDGES, np.uint64), (count // 2, columns))
    table[::7, 1:] = table[::7, :1]
    return [table[:, i].astype(np.uint32) for i in range(columns)]


@pytest.mark.parametrize("name", BINARY)
def test_two_operand_results_and_condition_codes(name):
    a, b = samples(2)
    # The condition code is set beforehand, so that an instruction that keeps it is seen.
    text = f"s_cmp_eq_u32 s60, s60\n{name} s20, s10, s11"
    got, codes = scalar("s_mov_b32 s60, 0\n" + text, [a, b], ["s20", "scc"])
    for result, code, x, y in zip(got, codes, a, b, strict=True):
        value, flag = BINARY[name](int(x), int(y))
        assert int(result) == value & M32, (hex(x), hex(y))
        assert bool(code) == (True if flag is None else flag), (hex(x), hex(y))


@pytest.mark.parametrize("name", UNARY)
def test_one_operand_results_and_condition_codes(name):
    (a,) = samples(1)
    text = f"s_mov_b32 s60, 0\ns_cmp_eq_u32 s60, s60\n{name} s20, s10"
    got, codes = scalar(text, [a], ["s20", "scc"])
    for result, code, x in zip(got, codes, a, strict=True):
        value, flag = UNARY[name](int(x))
        assert int(result) == value & M32
        assert bool(code) == (True if flag is None else flag)


@pytest.mark.parametrize("kind", ["i32", "u32"])
@pytest.mark.parametrize("test", COMPARES)
def test_compares_set_the_condition_code(test, kind):
    a, b = samples(2)
    cast = signed if kind == "i32" else int
    (codes,) = scalar(f"s_cmp_{test}_{kind} s10, s11", [a, b], ["scc"])
    for code, x, y in zip(codes, a, b, strict=True):
        assert bool(code) == COMPARES[test](cast(int(x)), cast(int(y)))
    (codes,) = scalar(f"s_cmpk_{test}_{kind} s10, 0x7fff", [a], ["scc"])
    for code, x in zip(codes, a, strict=True):
        assert bool(code) == COMPARES[test](cast(int(x)), 0x7FFF)


@pytest.mark.parametrize("name", WIDE)
def test_64_bit_logic_and_shifts(name):
    columns = samples(4)
    right = "s12" if "sh" in name else "s[12:13]"
    low, high, codes = scalar(f"{name} s[20:21], s[10:11], {right}", columns, ["s20", "s21", "scc"])
    for i in range(len(low)):
        a = int(columns[0][i]) | int(columns[1][i]) << 32
        b = int(columns[2][i]) | int(columns[3][i]) << 32
        value = WIDE[name](a, b) & M64
        assert int(low[i]) | int(high[i]) << 32 == value
        assert bool(codes[i]) == (value != 0)


def test_carry_select_and_immediates():
    a, b = samples(2)
    text = """
        s_add_u32 s20, s10, s11
        s_addc_u32 s21, s11, s10
        s_sub_u32 s22, s10, s11
        s_subb_u32 s23, 0, 0
        s_cmp_gt_u32 s10, s11
        s_cselect_b32 s24, s10, s11
        s_movk_i32 s25, 0x8001
        s_mov_b32 s26, s10
        s_addk_i32 s26, 0xfffe
        s_mov_b32 s27, s10
        s_mulk_i32 s27, 0xffff
        s_mov_b32 s28, s10
        s_cmp_lt_u32 s10, s11
        s_cmov_b32 s28, s11
        s_bitcmp1_b32 s10, s11
    """
    names = ["s20", "s21", "s22", "s23", "s24", "s25", "s26", "s27", "s28", "scc"]
    out = scalar(text, [a, b], names)
    for i, (x, y) in enumerate(zip(map(int, a), map(int, b), strict=True)):
        wide = [x + y, y + x + (x + y > M32), x - y, -(x < y), max(x, y), -32767, x - 2, -x]
        wide += [max(x, y), x >> (y & 31) & 1]
        assert [int(v) for v in out[:, i]] == [v & M32 for v in wide]


def test_saveexec_keeps_the_old_mask_and_narrows_the_new_one():
    (a,) = samples(1)
    text = """
        s_mov_b32 s12, s10
        s_mov_b32 s13, 0
        s_and_saveexec_b64 s[20:21], s[12:13]
        s_mov_b64 s[22:23], exec
        s_or_saveexec_b64 s[24:25], s[20:21]
        s_mov_b64 s[26:27], exec
    """
    names = ["s20", "s21", "s22", "s23", "s24", "s26", "s27"]
    for row, x in zip(scalar(text, [a], names).T, a, strict=True):
        assert [int(v) for v in row] == [M32, M32, int(x), 0, int(x), M32, M32]


def test_loops_run_as_often_as_their_counter_says():
    (a,) = samples(1)
    a = a % 50 + 1
    text = """
        s_mov_b32 s20, 0
    1:
        s_add_i32 s20, s20, 3
        s_sub_i32 s10, s10, 1
        s_cmp_lg_u32 s10, 0
        s_cbranch_scc1 1b
        s_branch 2f
        s_mov_b32 s20, 0
    2:
    """
    (got,) = scalar(text, [a], ["s20"])
    assert (got == 3 * a).all()


@pytest.mark.parametrize("aperture", ["shared", "private"])
def test_apertures_are_the_upper_halves_of_generic_addresses(aperture):
    text = f"s_mov_b64 s[20:21], src_{aperture}_base"
    low, high = scalar(text, [np.zeros(1, np.uint32)], ["s20", "s21"])
    assert low[0] == 0 and high[0] == {"shared": 0x10000, "private": 0x20000}[aperture]
