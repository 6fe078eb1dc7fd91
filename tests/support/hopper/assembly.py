"""A thread's inline assembly, done one instruction after the other."""

import re

INSTRUCTIONS = {
    "add.s32": lambda a, b: (a + b) & 0xFFFFFFFF,
    "not.b32": lambda a: a ^ 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "setp.eq.s32": lambda a, b: a == b,
    "setp.ne.s32": lambda a, b: a != b,
    "selp.f32": lambda a, b, c: a if c else b,
}


def executed(text: str, registers: list[int]) -> list[int]:
    """The registers of a thread after this assembly, which has no loops."""
    values = {f"${i}": value for i, value in enumerate(registers)}

    def value(name: str):
        if name == "0f00000000":
            return 0
        return int(name, 0) if name[0].isdigit() else values[name]

    for line in text.removeprefix("{").removesuffix("}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        kind, target, *sources = re.split(r"[\s,]+", line.strip())
        values[target] = INSTRUCTIONS[kind](*map(value, sources))
    return [values[f"${i}"] for i in range(len(registers))]
