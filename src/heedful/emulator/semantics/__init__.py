"""Instruction semantics by family. Importing this package fills the table; `build` looks an
instruction up. May import all of `emulator`.
"""

from heedful.emulator.program.asm import Instruction
from heedful.emulator.semantics import (  # noqa: F401 - each import registers a family
    control,
    lanes,
    lds_ops,
    scalar,
    vector_compare,
    vector_convert,
    vector_float,
    vector_int,
    vector_memory,
    vector_packed,
    vector_wide,
)
from heedful.emulator.semantics.matrix import find
from heedful.emulator.semantics.table import TABLE, Context, Run, Unsupported

__all__ = ["TABLE", "Context", "Run", "Unsupported", "build"]


def build(instruction: Instruction, ctx: Context) -> Run:
    """The closure that executes one instruction.

    Raises:
        Unsupported: the mnemonic, or this form of it, is not in the table.
    """
    builder = find(instruction.base)
    if builder is None:
        raise Unsupported(instruction)
    return builder(instruction, ctx)
