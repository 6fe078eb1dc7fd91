"""MFMA: layouts by probing single elements, values against exact integer products."""

import numpy as np
import pytest

from emulated.helpers.snippets import vector
from heedful.emulator.floats import FP4, FP8, bf16_bits

FORMS = {
    # name: (arch, M, K, registers per input, format)
    "v_mfma_f32_32x32x8_bf16": ("gfx942", 32, 8, 2, "bf16"),
    "v_mfma_f32_16x16x16_bf16": ("gfx942", 16, 16, 2, "bf16"),
    "v_mfma_f32_32x32x8_f16": ("gfx942", 32, 8, 2, "f16"),
    "v_mfma_f32_16x16x16_f16": ("gfx942", 16, 16, 2, "f16"),
    "v_mfma_f32_32x32x16_bf16": ("gfx950", 32, 16, 4, "bf16"),
    "v_mfma_f32_16x16x32_bf16": ("gfx950", 16, 32, 4, "bf16"),
    "v_mfma_f32_32x32x16_f16": ("gfx950", 32, 16, 4, "f16"),
    "v_mfma_f32_16x16x32_f16": ("gfx950", 16, 32, 4, "f16"),
    "v_mfma_f32_32x32x2_f32": ("gfx942", 32, 2, 1, "f32"),
    "v_mfma_f32_16x16x4_f32": ("gfx942", 16, 4, 1, "f32"),
    "v_mfma_f32_32x32x16_fp8_fp8": ("gfx942", 32, 16, 2, "fp8"),
    "v_mfma_f32_16x16x32_fp8_fp8": ("gfx950", 16, 32, 2, "fp8"),
    "v_mfma_f32_32x32x64_f8f6f4": ("gfx950", 32, 64, 8, "fp8"),
    "v_mfma_f32_16x16x128_f8f6f4": ("gfx950", 16, 128, 8, "fp8"),
    "v_mfma_i32_32x32x16_i8": ("gfx942", 32, 16, 2, "i8"),
    "v_mfma_i32_16x16x64_i8": ("gfx950", 16, 64, 4, "i8"),
}


def encode(matrix: np.ndarray, form: str, arch: str) -> np.ndarray:
    """Small integers in an input format, as bytes along the last axis."""
    if form == "bf16":
        return bf16_bits(matrix.astype(np.float32)).astype(np.uint16).view(np.uint8)
    if form == "f16":
        return matrix.astype(np.float16).view(np.uint8)
    if form == "f32":
        return matrix.astype(np.float32).view(np.uint8)
    if form == "i8":
        return matrix.astype(np.int8).view(np.uint8)
    table = FP8[arch][form]
    codes = {float(v): i for i, v in reversed(list(enumerate(table)))}
    return np.vectorize(lambda v: codes[float(v)])(matrix).astype(np.uint8)


def to_lanes(matrix: np.ndarray, registers: int, form: str, arch: str) -> list[np.ndarray]:
    """Registers of an input (M, K): lane l has row l % M and the l // M-th block of K."""
    m, k = matrix.shape
    octets = encode(np.ascontiguousarray(matrix), form, arch).reshape(m, -1)
    per_lane = octets.reshape(m, 64 // m, 4 * registers).swapaxes(0, 1).reshape(64, 4 * registers)
    words = np.ascontiguousarray(per_lane).view(np.uint32)
    return [np.ascontiguousarray(words[:, i]) for i in range(registers)]


def from_lanes(registers: np.ndarray, m: int) -> np.ndarray:
    """The M x M result from its registers, element by element as the ISA's layout tables say."""
    result = np.zeros((m, m), registers.dtype)
    for i in range(registers.shape[0]):
        for lane in range(64):
            row = 8 * (i // 4) + 4 * (lane // 32) + i % 4 if m == 32 else 4 * (lane // 16) + i
            result[row, lane % m] = registers[i, lane]
    return result


def run(name: str, a, b, c) -> np.ndarray:
    arch, m, _, n, form = FORMS[name]
    inputs = to_lanes(a, n, form, arch) + to_lanes(b, n, form, arch)
    count = m * m // 64
    kind = np.int32 if "_i32_" in name else np.float32
    constant = f"v[{40}:{40 + count - 1}]"
    setup = [f"v_mov_b32_e32 v{40 + i}, {c}" for i in range(count)]
    first, last = f"v[10:{9 + n}]", f"v[{10 + n}:{9 + 2 * n}]"
    if n == 1:
        first, last = "v10", "v11"
    text = "\n".join([*setup, f"{name} {constant}, {first}, {last}, {constant}", "s_nop 15"])
    out = vector(text, inputs, [f"v{40 + i}" for i in range(count)], arch=arch)
    return from_lanes(out.view(kind), m)


@pytest.mark.parametrize("name", FORMS)
def test_integer_products_are_exact(name):
    _, m, k, _, form = FORMS[name]
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-7, 8, (m, k)) for _ in range(2))
    assert (run(name, a, b, 0) == a @ b.T).all()


@pytest.mark.parametrize("name", FORMS)
def test_single_elements_meet_in_their_row_and_column(name):
    _, m, k, _, _ = FORMS[name]
    for row, column, at in ((0, 0, 0), (m - 1, 1, k - 1), (5, m - 2, k // 2)):
        a, b = np.zeros((m, k), int), np.zeros((m, k), int)
        a[row, at], b[column, at] = 2, 3
        product = run(name, a, b, 0)
        assert product[row, column] == 6 and np.count_nonzero(product) == 1


def test_the_accumulator_is_added():
    a = np.ones((32, 8), int)
    assert (run("v_mfma_f32_32x32x8_bf16", a, a, 1.0) == 9).all()


def test_block_scales_multiply_each_lane_block():
    """v_mfma_scale: a byte per lane, an E8M0 power of two for that lane's 32 products."""
    a = np.ones((32, 64), int)
    lanes = to_lanes(a, 8, "fp8", "gfx950")
    exponents = np.arange(64, dtype=np.uint32) % 5 + 125
    scale_a, scale_b = exponents << 8, np.full(64, 127, np.uint32)
    text = [f"v_mov_b32_e32 v{40 + i}, 0" for i in range(16)]
    text += [
        "v_mfma_scale_f32_32x32x64_f8f6f4 v[40:55], v[10:17], v[18:25], v[40:55], v26, v27 "
        "op_sel:[1,0] op_sel_hi:[0,0]"
    ]
    out = vector(
        "\n".join([*text, "s_nop 15"]),
        [*lanes, *lanes, scale_a, scale_b],
        [f"v{40 + i}" for i in range(16)],
        arch="gfx950",
    )
    factor = 2.0 ** (exponents.astype(int) - 127)
    wanted = 32 * (factor[:32] + factor[32:])
    assert (from_lanes(out.view(np.float32), 32) == wanted[:, None]).all()


def test_fp4_inputs_hold_two_values_per_byte():
    rng = np.random.default_rng(2)
    codes_a, codes_b = (rng.integers(0, 16, (32, 64)) for _ in range(2))

    def lanes(codes):
        octets = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
        words = octets.reshape(32, 2, 16).swapaxes(0, 1).reshape(64, 16).copy().view(np.uint32)
        return [np.ascontiguousarray(words[:, i]) for i in range(4)]

    text = [f"v_mov_b32_e32 v{40 + i}, 0" for i in range(16)]
    text.append("v_mfma_f32_32x32x64_f8f6f4 v[40:55], v[10:13], v[14:17], v[40:55] cbsz:4 blgp:4")
    names = [f"v{40 + i}" for i in range(16)]
    inputs = [*lanes(codes_a), *lanes(codes_b)]
    out = vector("\n".join([*text, "s_nop 15"]), inputs, names, arch="gfx950")
    wanted = FP4[codes_a].astype(float) @ FP4[codes_b].astype(float).T
    assert (from_lanes(out.view(np.float32), 32) == wanted).all()


def test_disabled_lanes_take_part():
    a = np.ones((32, 8), int)
    inputs = to_lanes(a, 2, "bf16", "gfx942") * 2
    text = [f"v_mov_b32_e32 v{40 + i}, 0" for i in range(16)]
    text += ["s_mov_b64 s[10:11], exec", "s_mov_b64 exec, 1"]
    text += ["v_mfma_f32_32x32x8_bf16 v[40:55], v[10:11], v[12:13], v[40:55]", "s_nop 15"]
    text += ["s_mov_b64 exec, s[10:11]"]
    out = vector("\n".join(text), inputs, [f"v{40 + i}" for i in range(16)])
    assert (out.view(np.float32) == 8).all()


def test_float64_products_land_in_register_pairs():
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((16, 4)) for _ in range(2))
    halves = []
    for matrix in (a, b):
        words = np.ascontiguousarray(matrix.T).reshape(64).view(np.uint32).reshape(64, 2)
        halves += [words[:, 0].copy(), words[:, 1].copy()]
    text = "v_mfma_f64_16x16x4_f64 v[40:47], v[10:11], v[12:13], 0\ns_nop 15"
    out = vector(text, halves, [f"v{40 + i}" for i in range(8)])
    pairs = out.reshape(4, 2, 64).transpose(0, 2, 1).copy().view(np.float64)[..., 0]
    result = np.zeros((16, 16))
    for i in range(4):
        for lane in range(64):
            result[4 * i + lane // 16, lane % 16] = pairs[i, lane]
    assert np.allclose(result, a @ b.T, rtol=4 * np.finfo(float).eps, atol=0)
