"""The table of semantics: from a mnemonic to a builder of the closure that executes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heedful.emulator.machine.state import Constants
from heedful.emulator.program.asm import Instruction, Operand, Program

if TYPE_CHECKING:
    from heedful.emulator.machine.state import Batch

# Executes one instruction for a batch. The result of a control instruction is for the scheduler.
Run = Callable[["Batch"], object]


class Unsupported(NotImplementedError):
    """An instruction, or a form of one, that has no semantics here."""

    def __init__(self, instruction: Instruction, why: str = ""):
        reason = f" ({why})" if why else ""
        super().__init__(f"not supported by the emulator{reason}: {instruction.where()}")


@dataclass(slots=True)
class Context:
    """The facts about the program that builders need."""

    program: Program
    constants: Constants = field(default_factory=Constants)

    @property
    def arch(self) -> str:
        """gfx942 or gfx950."""
        return self.program.arch

    @property
    def flushes(self) -> bool:
        """Whether the kernel runs with float32 denormals flushed (both inputs and results)."""
        return self.program.directives.get("float_denorm_mode_32", 3) != 3

    def slot(self, operand: Operand) -> int:
        """The slot of a register or constant operand."""
        if operand.kind == "reg":
            return operand.slot
        if operand.kind == "const":
            return self.constants.slot(operand)
        raise AssertionError(f"operand {operand.text!r} holds no value")


Builder = Callable[[Instruction, Context], Run]
TABLE: dict[str, Builder] = {}


def semantics(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder under these mnemonics (without encoding suffix)."""

    def register(builder: Builder) -> Builder:
        for name in names:
            if name in TABLE:
                raise AssertionError(f"two semantics for {name}")
            TABLE[name] = builder
        return builder

    return register
