"""float32, float16 and float64 vector arithmetic, transcendentals and the division helpers."""

import numpy as np

from heedful.emulator.floats import F16, F32, F64, I32, U32, flush, fma32
from heedful.emulator.program.asm import VCC, Instruction
from heedful.emulator.semantics.operands import destination, source, vector_op
from heedful.emulator.semantics.table import Context, Run, semantics

_INF = F32(np.inf)
_NAN = F32(np.nan)
_EXPONENT = U32(0xFF)


def _accurate(function):
    """A transcendental unit: float64 result rounded once, denormals flushed on both sides.

    The hardware is allowed an error of about 1 ulp; this is the exactly rounded value.
    """
    return lambda x: flush(function(flush(np.asarray(x)).astype(F64)).astype(F32))


def _exponent(x):
    """Biased exponent field."""
    return ((x.view(U32) >> U32(23)) & _EXPONENT).astype(I32)


def _is_denormal(x):
    return (_exponent(x) == 0) & (x != 0)


def _fraction(x):
    """x - floor(x), kept below one."""
    return np.minimum(x - np.floor(x), np.nextafter(x.dtype.type(1), x.dtype.type(0)))


def _median(a, b, c):
    """Middle of three; the minimum if one is NaN."""
    smallest = np.fmin(np.fmin(a, b), c)
    middle = np.fmax(np.fmin(np.fmax(a, b), c), np.fmin(a, b))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), smallest, middle)


def _ldexp(x, n):
    return np.ldexp(x, np.clip(n, -400, 400))


def _fma16(a, b, c):
    """float16 fused multiply-add; exact in float64 for products, one rounding visible."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F16)


def _frexp_exponent(x):
    mantissa, exponent = np.frexp(x)
    return np.where(np.isfinite(x), exponent, 0).astype(I32)


def _frexp_mantissa(x):
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


# mnemonic: (function, source banks, result bank)
_OPS = {
    "v_add_f32": (np.add, "ff", "f"),
    "v_sub_f32": (np.subtract, "ff", "f"),
    "v_subrev_f32": (lambda a, b: b - a, "ff", "f"),
    "v_mul_f32": (np.multiply, "ff", "f"),
    "v_mul_legacy_f32": (
        lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b),
        "ff",
        "f",
    ),
    "v_max_f32": (np.fmax, "ff", "f"),
    "v_min_f32": (np.fmin, "ff", "f"),
    "v_fma_f32": (fma32, "fff", "f"),
    "v_max3_f32": (lambda a, b, c: np.fmax(np.fmax(a, b), c), "fff", "f"),
    "v_min3_f32": (lambda a, b, c: np.fmin(np.fmin(a, b), c), "fff", "f"),
    "v_med3_f32": (_median, "fff", "f"),
    "v_maximum3_f32": (lambda a, b, c: np.maximum(np.maximum(a, b), c), "fff", "f"),
    "v_minimum3_f32": (lambda a, b, c: np.minimum(np.minimum(a, b), c), "fff", "f"),
    "v_exp_f32": (_accurate(np.exp2), "f", "f"),
    "v_log_f32": (_accurate(np.log2), "f", "f"),
    "v_rcp_f32": (_accurate(np.reciprocal), "f", "f"),
    "v_rcp_iflag_f32": (_accurate(np.reciprocal), "f", "f"),
    "v_rsq_f32": (_accurate(lambda x: 1 / np.sqrt(x)), "f", "f"),
    "v_sqrt_f32": (_accurate(np.sqrt), "f", "f"),
    "v_sin_f32": (lambda x: np.sin(x.astype(F64) * 2 * np.pi).astype(F32), "f", "f"),
    "v_cos_f32": (lambda x: np.cos(x.astype(F64) * 2 * np.pi).astype(F32), "f", "f"),
    "v_floor_f32": (np.floor, "f", "f"),
    "v_ceil_f32": (np.ceil, "f", "f"),
    "v_trunc_f32": (np.trunc, "f", "f"),
    "v_rndne_f32": (np.rint, "f", "f"),
    "v_fract_f32": (_fraction, "f", "f"),
    "v_frexp_exp_i32_f32": (_frexp_exponent, "f", "i"),
    "v_frexp_mant_f32": (_frexp_mantissa, "f", "f"),
    "v_ldexp_f32": (_ldexp, "fi", "f"),
    "v_add_f16": (np.add, "hh", "h"),
    "v_sub_f16": (np.subtract, "hh", "h"),
    "v_subrev_f16": (lambda a, b: b - a, "hh", "h"),
    "v_mul_f16": (np.multiply, "hh", "h"),
    "v_max_f16": (np.fmax, "hh", "h"),
    "v_min_f16": (np.fmin, "hh", "h"),
    "v_fma_f16": (_fma16, "hhh", "h"),
    "v_max3_f16": (lambda a, b, c: np.fmax(np.fmax(a, b), c), "hhh", "h"),
    "v_min3_f16": (lambda a, b, c: np.fmin(np.fmin(a, b), c), "hhh", "h"),
    "v_exp_f16": (lambda x: np.exp2(x.astype(F64)).astype(F16), "h", "h"),
    "v_log_f16": (lambda x: np.log2(x.astype(F64)).astype(F16), "h", "h"),
    "v_rcp_f16": (lambda x: np.reciprocal(x.astype(F64)).astype(F16), "h", "h"),
    "v_sqrt_f16": (lambda x: np.sqrt(x.astype(F64)).astype(F16), "h", "h"),
    "v_rsq_f16": (lambda x: (1 / np.sqrt(x.astype(F64))).astype(F16), "h", "h"),
    "v_floor_f16": (np.floor, "h", "h"),
    "v_ceil_f16": (np.ceil, "h", "h"),
    "v_trunc_f16": (np.trunc, "h", "h"),
    "v_rndne_f16": (np.rint, "h", "h"),
    "v_ldexp_f16": (lambda x, n: np.ldexp(x, n.astype(I32)), "hx", "h"),
    "v_add_f64": (np.add, "FF", "F"),
    "v_mul_f64": (np.multiply, "FF", "F"),
    "v_max_f64": (np.fmax, "FF", "F"),
    "v_min_f64": (np.fmin, "FF", "F"),
    "v_rcp_f64": (np.reciprocal, "F", "F"),
    "v_rsq_f64": (lambda x: 1 / np.sqrt(x), "F", "F"),
    "v_sqrt_f64": (np.sqrt, "F", "F"),
    "v_floor_f64": (np.floor, "F", "F"),
    "v_ceil_f64": (np.ceil, "F", "F"),
    "v_trunc_f64": (np.trunc, "F", "F"),
    "v_rndne_f64": (np.rint, "F", "F"),
    "v_ldexp_f64": (lambda x, n: np.ldexp(x, np.clip(n, -3000, 3000)), "Fi", "F"),
}


def _register(name: str, function, banks: str, out: str):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        return vector_op(instruction, ctx, function, banks, out)


for _name, (_function, _banks, _out) in _OPS.items():
    _register(_name, _function, _banks, _out)


@semantics("v_fmac_f32", "v_mac_f32")
def _fmac(instruction: Instruction, ctx: Context) -> Run:
    """d = a * b + d."""
    a, b = (source(instruction, i, ctx, "f") for i in (1, 2))
    slot = instruction.operands[0].slot
    put = destination(instruction, ctx, "f")
    return lambda g: put(g, fma32(a(g), b(g), g.f[slot]))


@semantics("v_fmac_f16")
def _fmac16(instruction: Instruction, ctx: Context) -> Run:
    """d = a * b + d in float16."""
    a, b = (source(instruction, i, ctx, "h") for i in (1, 2))
    c = source(instruction, 0, ctx, "h")
    put = destination(instruction, ctx, "h")
    return lambda g: put(g, _fma16(a(g), b(g), c(g)))


@semantics("v_fmamk_f32", "v_fmaak_f32")
def _fma_constant(instruction: Instruction, ctx: Context) -> Run:
    """a * b + c; the text has the operands in that order, the literal wherever it belongs."""
    return vector_op(instruction, ctx, fma32, "fff", "f")


@semantics("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def _fma_mix(instruction: Instruction, ctx: Context) -> Run:
    """a * b + c, each source float32 or (op_sel_hi) one float16 half (op_sel)."""
    half = instruction.mods.get("op_sel_hi", [0, 0, 0])
    which = instruction.mods.get("op_sel", [0, 0, 0])
    slots = [ctx.slot(op) for op in instruction.operands[1:4]]
    signs = [(op.neg, op.abs) for op in instruction.operands[1:4]]
    target = instruction.operands[0].slot
    form = instruction.base

    def fetch(g, i: int):
        value = g.f[slots[i]]
        if half[i]:
            bits = g.u[slots[i]] >> U32(16 * which[i])
            value = bits.astype(np.uint16).view(F16).astype(F32)
        value = np.abs(value) if signs[i][1] else value
        return np.negative(value) if signs[i][0] else value

    def run(g):
        result = fma32(fetch(g, 0), fetch(g, 1), fetch(g, 2))
        if form == "v_fma_mix_f32":
            np.copyto(g.f[target], result, where=g.where)
            return
        bits = np.broadcast_to(result, g.shape).astype(F16).view(np.uint16).astype(U32)
        shift = 16 if form.endswith("hi_f16") else 0
        kept = g.u[target] & U32(0xFFFF0000 >> shift)
        np.copyto(g.u[target], kept | (bits << U32(shift)), where=g.where)

    return run


def _div_scale(value, denominator, quotient_of):
    """The scaled operand and the flag of v_div_scale_f32, cases in the ISA's order."""
    d, n = denominator, quotient_of
    is_d = value.view(U32) == d.view(U32)
    is_n = value.view(U32) == n.view(U32)
    inverse, ratio = F32(1) / d, n / d
    up, down = np.ldexp(value, 64), np.ldexp(value, -64)
    cases = [
        ((d == 0) | (n == 0), np.full_like(value, np.nan), False),
        (_exponent(n) - _exponent(d) >= 96, np.where(is_d, up, value), True),
        (_is_denormal(d), up, False),
        # The ISA text scales up here too, which would overflow; down gives the IEEE quotient.
        (_is_denormal(inverse) & _is_denormal(ratio), np.where(is_d, down, value), True),
        (_is_denormal(inverse), down, False),
        (_is_denormal(ratio), np.where(is_n, up, value), True),
        (_exponent(n) <= 23, up, False),
    ]
    conditions = [c for c, _, _ in cases]
    result = np.select(conditions, [r for _, r, _ in cases], value)
    flag = np.select(conditions, [np.full(value.shape, f) for _, _, f in cases], False)
    return result.astype(F32), flag


@semantics("v_div_scale_f32")
def _build_div_scale(instruction: Instruction, ctx: Context) -> Run:
    """Scale numerator or denominator, so that refining neither over- nor underflows."""
    value, denominator, numerator = (source(instruction, i, ctx, "f") for i in (2, 3, 4))
    put = destination(instruction, ctx, "f")
    flag_slot = instruction.operands[1].slot

    def run(g):
        args = (np.broadcast_to(s(g), g.shape) for s in (value, denominator, numerator))
        result, flag = _div_scale(*(np.ascontiguousarray(a) for a in args))
        put(g, result)
        g.set_lanes(flag_slot, flag)

    return run


@semantics("v_div_fmas_f32")
def _div_fmas(instruction: Instruction, ctx: Context) -> Run:
    """a * b + c, scaled back by 2^64 (c large) or 2^-64 in the lanes that vcc names."""
    get = [source(instruction, i, ctx, "f") for i in (1, 2, 3)]
    put = destination(instruction, ctx, "f")

    def run(g):
        a, b, c = (np.broadcast_to(fetch(g), g.shape) for fetch in get)
        result = fma32(a, b, c)
        flag = g.lanes(VCC)
        if flag.any():
            power = np.where(_exponent(np.ascontiguousarray(c)) > 127, 64, -64)
            wide = a.astype(F64) * b.astype(F64) + c.astype(F64)
            result = np.where(flag, np.ldexp(wide, power).astype(F32), result)
        put(g, result)

    return run


def _div_fixup(quotient, denominator, numerator):
    """The special cases of a division, by IEEE 754."""
    q, d, n = quotient, denominator, numerator
    sign = np.where(np.signbit(d) ^ np.signbit(n), F32(-1), F32(1))
    d_inf, n_inf = np.isinf(d), np.isinf(n)
    gap = _exponent(n) - _exponent(d)
    conditions = [
        np.isnan(n),
        np.isnan(d),
        (d == 0) & (n == 0) | d_inf & n_inf,
        (d == 0) | n_inf,
        d_inf | (n == 0),
        gap < -150,
        np.isnan(q),  # refining an estimate beyond the range: the ISA text leaves it open
    ]
    values = [n, d, _NAN, sign * _INF, sign * F32(0), sign * F32(0), sign * _INF]
    return np.select(conditions, values, sign * np.abs(q)).astype(F32)


@semantics("v_div_fixup_f32")
def _build_div_fixup(instruction: Instruction, ctx: Context) -> Run:
    """Replace the refined quotient by the exact answer in the special cases."""
    get = [source(instruction, i, ctx, "f") for i in (1, 2, 3)]
    put = destination(instruction, ctx, "f")

    def run(g):
        args = (np.ascontiguousarray(np.broadcast_to(s(g), g.shape)) for s in get)
        put(g, _div_fixup(*args))

    return run


@semantics("v_fma_f64")
def _fma64(instruction: Instruction, ctx: Context) -> Run:
    """float64 a * b + c with one rounding, by extended precision where the platform has it."""
    wide = np.longdouble
    fma = lambda a, b, c: (a.astype(wide) * b + c).astype(F64)  # noqa: E731 - table entry
    return vector_op(instruction, ctx, fma, "FFF", "F")


@semantics("v_fmac_f64")
def _fmac64(instruction: Instruction, ctx: Context) -> Run:
    """d = a * b + d in float64."""
    a, b, c = (source(instruction, i, ctx, "F") for i in (1, 2, 0))
    put = destination(instruction, ctx, "F")
    return lambda g: put(g, (a(g).astype(np.longdouble) * b(g) + c(g)).astype(F64))


def _dot2(convert):
    """c + a.lo * b.lo + a.hi * b.hi with float32 accumulation."""

    def run(a, b, c):
        lo = convert(a).astype(F64) * convert(b) + convert(a >> U32(16)).astype(F64) * convert(
            b >> U32(16)
        )
        return (lo + c).astype(F32)

    return run


def _half_value(bits):
    return (bits & U32(0xFFFF)).astype(np.uint16).view(F16).astype(F32)


def _bfloat_value(bits):
    return (bits << U32(16)).view(F32)


for _mnemonic, _convert in {
    "v_dot2_f32_f16": _half_value,
    "v_dot2_f32_bf16": _bfloat_value,
}.items():
    _register(_mnemonic, _dot2(_convert), "uuf", "f")


@semantics("v_dot2c_f32_f16", "v_dot2c_f32_bf16")
def _dot2c(instruction: Instruction, ctx: Context) -> Run:
    """d += a.lo * b.lo + a.hi * b.hi."""
    a, b = (source(instruction, i, ctx, "u") for i in (1, 2))
    slot = instruction.operands[0].slot
    put = destination(instruction, ctx, "f")
    dot = _dot2(_bfloat_value if "bf16" in instruction.base else _half_value)
    return lambda g: put(g, dot(a(g), b(g), g.f[slot]))
