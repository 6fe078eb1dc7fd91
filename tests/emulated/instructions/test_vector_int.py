"""Integer, bit-field, compare and select instructions against Python's unbounded integers."""

import numpy as np
import pytest

from emulated.helpers.snippets import vector

M32, M64 = 2**32 - 1, 2**64 - 1
EDGES = [0, 1, 2, 31, 32, 33, 63, 64, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, M32, M32 - 1]


def samples(columns: int, count: int = 512) -> list[np.ndarray]:
    rng = np.random.default_rng(columns)
    table = rng.integers(0, 2**32, (count, columns), dtype=np.uint64)
    table[: count // 2] = rng.choice(np.array(EDGES, np.uint64), (count // 2, columns))
    return [table[:, i].astype(np.uint32) for i in range(columns)]


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def bfe_i(a, offset, width):
    field, width = a >> (offset & 31), width & 31
    return signed(field, width) if width else 0


def perm(a, b, select):
    data, result = (a << 32) | b, 0
    for i in range(4):
        code = select >> 8 * i & 255
        if code <= 7:
            byte = data >> 8 * code & 255
        elif code <= 11:
            byte = 255 * (data >> 16 * (code - 8) + 15 & 1)
        else:
            byte = 0 if code == 12 else 255
        result |= byte << 8 * i
    return result


BINARY = {
    "v_add_u32_e32": lambda a, b: a + b,
    "v_sub_u32_e32": lambda a, b: a - b,
    "v_subrev_u32_e32": lambda a, b: b - a,
    "v_and_b32_e32": lambda a, b: a & b,
    "v_or_b32_e32": lambda a, b: a | b,
    "v_xor_b32_e32": lambda a, b: a ^ b,
    "v_xnor_b32_e32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32_e32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32_e32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32_e32": lambda a, b: signed(b) >> (a & 31),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24_e32": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24_e32": lambda a, b: signed(a, 24) * signed(b, 24),
    "v_max_u32_e32": max,
    "v_min_u32_e32": min,
    "v_max_i32_e32": lambda a, b: max(signed(a), signed(b)),
    "v_min_i32_e32": lambda a, b: min(signed(a), signed(b)),
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_lshlrev_b16_e32": lambda a, b: (b << (a & 15)) & 0xFFFF,
    "v_lshrrev_b16_e32": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "v_ashrrev_i16_e32": lambda a, b: (signed(b, 16) >> (a & 15)) & 0xFFFF,
    "v_add_u16_e32": lambda a, b: (a + b) & 0xFFFF,
    "v_mul_lo_u16_e32": lambda a, b: (a * b) & 0xFFFF,
    "v_max_i16_e32": lambda a, b: max(signed(a, 16), signed(b, 16)) & 0xFFFF,
}
TERNARY = {
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) % 2**32 << (c & 31),
    "v_bfe_u32": lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1,
    "v_bfe_i32": bfe_i,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_perm_b32": perm,
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_max3_i32": lambda a, b, c: max(map(signed, (a, b, c))),
    "v_min3_u32": min,
    "v_med3_i32": lambda a, b, c: sorted(map(signed, (a, b, c)))[1],
    "v_med3_u32": lambda a, b, c: sorted((a, b, c))[1],
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
}
UNARY = {
    "v_not_b32_e32": lambda a: ~a,
    "v_bfrev_b32_e32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32_e32": lambda a: 32 - a.bit_length() if a else M32,
    "v_ffbl_b32_e32": lambda a: (a & -a).bit_length() - 1 if a else M32,
    "v_mov_b32_e32": lambda a: a,
}


def check(text, function, inputs, got):
    for result, *row in zip(got, *inputs, strict=True):
        row = [int(x) for x in row]
        assert int(result) == function(*row) & M32, (text, [hex(x) for x in row])


@pytest.mark.parametrize("name", BINARY)
def test_two_operand_integers(name):
    inputs = samples(2)
    check(name, BINARY[name], inputs, vector(f"{name} v20, v10, v11", inputs, ["v20"])[0])


@pytest.mark.parametrize("name", TERNARY)
def test_three_operand_integers(name):
    inputs = samples(3)
    if name == "v_perm_b32":
        inputs[2] = inputs[2] % 16 + (inputs[2] >> 4) % 14 * 256 + 0x0C030000
    check(name, TERNARY[name], inputs, vector(f"{name} v20, v10, v11, v12", inputs, ["v20"])[0])


@pytest.mark.parametrize("select", [0x07060302, 0x05040100, 0x00070203, 0x01010101, 0x0C0C0501])
def test_perm_with_one_selector_for_all_lanes(select):
    inputs = samples(2)
    body = f"s_mov_b32 s20, {select:#x}\nv_perm_b32 v20, v10, v11, s20"
    check(body, lambda a, b: perm(a, b, select), inputs, vector(body, inputs, ["v20"])[0])


CLAMPED = {
    "v_add_u32_e64": lambda a, b: min(a + b, M32),
    "v_sub_u32_e64": lambda a, b: max(a - b, 0),
    "v_subrev_u32_e64": lambda a, b: max(b - a, 0),
    "v_add_i32": lambda a, b: min(max(signed(a) + signed(b), -(2**31)), 2**31 - 1),
    "v_sub_i32": lambda a, b: min(max(signed(a) - signed(b), -(2**31)), 2**31 - 1),
}


@pytest.mark.parametrize("name", CLAMPED)
def test_clamped_additions_saturate(name):
    inputs = samples(2)
    (got,) = vector(f"{name} v20, v10, v11 clamp", inputs, ["v20"])
    check(name, CLAMPED[name], inputs, got)


@pytest.mark.parametrize("name", UNARY)
def test_one_operand_integers(name):
    inputs = samples(1)
    check(name, UNARY[name], inputs, vector(f"{name} v20, v10", inputs, ["v20"])[0])


@pytest.mark.parametrize("table", [0x36, 0x6C, 0xE8, 0x00, 0xFF])
def test_bitop3_evaluates_its_truth_table(table):
    inputs = samples(3)
    text = f"v_bitop3_b32 v20, v10, v11, v12 bitop3:{table:#x}"
    (got,) = vector(text, inputs, ["v20"], arch="gfx950")

    def function(a, b, c):
        return sum(
            (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i
            for i in range(32)
        )

    check(text, function, inputs, got)


WIDE = {
    "v_lshlrev_b64 v[20:21], v14, v[10:11]": lambda a, b, n: a << (n & 63),
    "v_lshrrev_b64 v[20:21], v14, v[10:11]": lambda a, b, n: a >> (n & 63),
    "v_ashrrev_i64 v[20:21], v14, v[10:11]": lambda a, b, n: signed(a, 64) >> (n & 63),
    "v_lshl_add_u64 v[20:21], v[10:11], 3, v[12:13]": lambda a, b, n: (a << 3) + b,
    "v_mad_u64_u32 v[20:21], s[10:11], v14, v10, v[12:13]": lambda a, b, n: n * (a & M32) + b,
    "v_mad_i64_i32 v[20:21], s[10:11], v14, v10, v[12:13]": (
        lambda a, b, n: signed(n) * signed(a & M32) + b
    ),
    "v_mov_b64_e32 v[20:21], v[12:13]": lambda a, b, n: b,
}


@pytest.mark.parametrize("text", WIDE)
def test_64_bit_integers(text):
    columns = samples(5)
    low, high = vector(text, columns, ["v20", "v21"])
    for i in range(len(low)):
        a_low, a_high, b_low, b_high, n = (int(c[i]) for c in columns)
        wanted = WIDE[text](a_low | a_high << 32, b_low | b_high << 32, n) & M64
        assert int(low[i]) | int(high[i]) << 32 == wanted


def test_carry_chain_adds_and_subtracts_64_bits():
    columns = samples(4)
    text = """
        v_add_co_u32_e32 v20, vcc, v10, v12
        v_addc_co_u32_e32 v21, vcc, v11, v13, vcc
        v_sub_co_u32_e64 v22, s[10:11], v10, v12
        v_subb_co_u32_e64 v23, s[10:11], v11, v13, s[10:11]
    """
    out = vector(text, columns, ["v20", "v21", "v22", "v23"])
    for i in range(out.shape[1]):
        a = int(columns[0][i]) | int(columns[1][i]) << 32
        b = int(columns[2][i]) | int(columns[3][i]) << 32
        assert int(out[0][i]) | int(out[1][i]) << 32 == (a + b) & M64
        assert int(out[2][i]) | int(out[3][i]) << 32 == (a - b) & M64


COMPARES = {"lt": "<", "eq": "==", "le": "<=", "gt": ">", "ne": "!=", "ge": ">="}


@pytest.mark.parametrize("kind", ["i32", "u32", "i16", "u16", "i64", "u64"])
@pytest.mark.parametrize("test", COMPARES)
def test_integer_compares_choose_through_a_mask(test, kind):
    columns = samples(4)
    columns[2][::3], columns[3][::3] = columns[0][::3], columns[1][::3]
    width = int(kind[1:])
    pairs = ("v[10:11]", "v[12:13]") if width == 64 else ("v10", "v12")
    text = f"v_cmp_{test}_{kind}_e64 s[10:11], {pairs[0]}, {pairs[1]}\n"
    text += "v_cndmask_b32_e64 v20, 5, 7, s[10:11]"
    (got,) = vector(text, columns, ["v20"])
    for i, result in enumerate(got):
        a = int(columns[0][i]) | int(columns[1][i]) << 32
        b = int(columns[2][i]) | int(columns[3][i]) << 32
        cast = signed if kind[0] == "i" else (lambda x, w: x & ((1 << w) - 1))
        wanted = {
            "lt": cast(a, width) < cast(b, width),
            "eq": cast(a, width) == cast(b, width),
            "le": cast(a, width) <= cast(b, width),
        }
        wanted |= {"gt": not wanted["le"], "ne": not wanted["eq"], "ge": not wanted["lt"]}
        assert result == (7 if wanted[test] else 5)


FLOAT_COMPARES = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: a == a and b == b,
    "u": lambda a, b: a != a or b != b,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
}


@pytest.mark.parametrize("test", FLOAT_COMPARES)
def test_float_compares_treat_nan_as_the_name_says(test):
    special = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45]
    a, b = (x.ravel().astype(np.float32) for x in np.meshgrid(special, special))
    text = f"v_cmp_{test}_f32_e32 vcc, v10, v11\nv_cndmask_b32_e32 v20, v10, v11, vcc"
    (got,) = vector(text, [a, b], ["v20"])
    for result, x, y in zip(got, a, b, strict=True):
        chosen = y if FLOAT_COMPARES[test](float(x), float(y)) else x
        assert result == np.float32(chosen).view(np.uint32)


def test_compare_into_exec_masks_what_follows():
    values = np.arange(64, dtype=np.uint32)
    text = """
        v_mov_b32_e32 v20, 0
        v_cmpx_gt_u32_e32 vcc, 20, v10
        v_mov_b32_e32 v20, 1
        s_mov_b64 exec, -1
    """
    (got,) = vector(text, [values], ["v20"])
    assert got.tolist() == [1] * 20 + [0] * 44


def test_masked_out_lanes_keep_their_value_in_every_family():
    values = np.arange(64, dtype=np.uint32)
    text = """
        v_mov_b32_e32 v20, v10
        v_mov_b32_e32 v21, v10
        v_mov_b32_e32 v22, v10
        v_mov_b32_e32 v24, v10
        v_mov_b32_e32 v25, v10
        s_mov_b64 s[12:13], exec
        v_cmp_gt_u32_e32 vcc, 8, v10
        s_and_saveexec_b64 s[10:11], vcc
        v_add_u32_e32 v20, 100, v10
        v_add3_u32 v21, v10, v10, 1
        v_cvt_f32_u32_e32 v22, v10
        v_lshlrev_b64 v[24:25], 1, v[24:25]
        s_mov_b64 exec, s[10:11]
    """
    out = vector(text, [values], ["v20", "v21", "v22", "v24"])
    active = values < 8
    for register, wanted in zip(
        out,
        (values + 100, 2 * values + 1, values.astype(np.float32).view(np.uint32), 2 * values),
        strict=True,
    ):
        assert (register == np.where(active, wanted, values)).all()


def test_sdwa_selects_source_parts_and_places_the_result():
    (a,) = samples(1)
    pad = "dst_unused:UNUSED_PAD"
    text = f"""
        v_mov_b32_e32 v20, -1
        v_mov_b32_e32 v22, -1
        v_mov_b32_e32 v11, 0xff
        v_and_b32_sdwa v20, v10, v11 dst_sel:DWORD {pad} src0_sel:WORD_1 src1_sel:DWORD
        v_or_b32_sdwa v21, v10, v11 dst_sel:BYTE_1 {pad} src0_sel:BYTE_2 src1_sel:BYTE_3
        v_mov_b32_sdwa v22, v10 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0
    """
    one, two, three = vector(text, [a], ["v20", "v21", "v22"])
    assert (one == ((a >> 16) & 0xFF)).all()
    assert (two == (((a >> 16) & 0xFF) << 8)).all()
    assert (three == ((a << 16) | 0xFFFF)).all()


@pytest.mark.parametrize(("part", "shift", "width"), [("BYTE_1", 8, 8), ("WORD_1", 16, 16)])
def test_sdwa_extends_the_sign_of_the_selected_part(part, shift, width):
    (a,) = samples(1)
    text = f"v_mov_b32_sdwa v20, sext(v10) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{part}"
    (got,) = vector(text, [a], ["v20"])
    kind = {8: np.int8, 16: np.int16}[width]
    wanted = (a >> np.uint32(shift)).astype(kind).astype(np.int32)
    assert (got.view(np.int32) == wanted).all()
