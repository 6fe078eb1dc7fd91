"""Vector compares: v_cmp and v_cmpx in every type, and the class test."""

import numpy as np

from heedful.emulator.floats import U32
from heedful.emulator.program.asm import EXEC, Instruction
from heedful.emulator.semantics.operands import source
from heedful.emulator.semantics.table import Context, Run, semantics


def _ordered(a, b):
    return ~(np.isnan(a) | np.isnan(b))


_INTEGER = {
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
}
_FLOAT = {k: v for k, v in _INTEGER.items() if k not in ("ne", "t")} | {
    "tru": _INTEGER["t"],
    "lg": lambda a, b: (a < b) | (a > b),
    "o": _ordered,
    "u": lambda a, b: ~_ordered(a, b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
}
_TYPES = {
    **{t: (bank, _FLOAT) for t, bank in (("f32", "f"), ("f16", "h"), ("f64", "F"))},
    **{t: (bank, _INTEGER) for t, bank in (("u32", "u"), ("i32", "i"), ("u16", "w"))},
    **{t: (bank, _INTEGER) for t, bank in (("i16", "x"), ("u64", "U"), ("i64", "I"))},
}


def _finish(instruction: Instruction, compute) -> Run:
    """Write the mask, and exec as well for v_cmpx."""
    slot = instruction.operands[0].slot
    if not instruction.base.startswith("v_cmpx"):
        return lambda g: g.set_lanes(slot, compute(g))

    def run(g):
        flags = compute(g)
        g.set_lanes(slot, flags)
        g.set_lanes(EXEC, flags)

    return run


def _register(name: str, bank: str, function):
    @semantics(name)
    def build(instruction: Instruction, ctx: Context) -> Run:
        a, b = (source(instruction, i, ctx, bank) for i in (1, 2))
        return _finish(instruction, lambda g: function(a(g), b(g)))


for _type, (_bank, _tests) in _TYPES.items():
    for _test, _function in _tests.items():
        for _form in ("v_cmp", "v_cmpx"):
            _register(f"{_form}_{_test}_{_type}", _bank, _function)


@semantics("v_cmp_class_f32", "v_cmpx_class_f32")
def _class(instruction: Instruction, ctx: Context) -> Run:
    """Test a float against a set of classes, bit by bit as the ISA lists them."""
    get, classes = source(instruction, 1, ctx, "f"), source(instruction, 2, ctx, "u")

    def compute(g):
        x, wanted = np.broadcast_to(get(g), g.shape), classes(g)
        bits = np.ascontiguousarray(x).view(U32)
        quiet = (bits & U32(0x400000)) != 0
        nan, negative = np.isnan(x), np.signbit(x)
        infinite = np.isinf(x)
        denormal = (x != 0) & (np.abs(x) < np.finfo(np.float32).tiny)
        normal = ~nan & ~infinite & ~denormal & (x != 0)
        tests = [nan & ~quiet, nan & quiet]
        tests += [c & negative for c in (infinite, normal, denormal, x == 0)]
        tests += [c & ~negative for c in (x == 0, denormal, normal, infinite)]
        hit = np.zeros(g.shape, bool)
        for i, test in enumerate(tests):
            hit |= test & ((wanted >> U32(i)) & U32(1)).astype(bool)
        return hit

    return _finish(instruction, compute)
