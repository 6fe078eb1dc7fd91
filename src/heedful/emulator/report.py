"""The findings of an emulation: findings, counts, and a readable summary."""

from collections import Counter
from dataclasses import dataclass, field

from heedful.emulator.program.asm import Instruction, Program

# Every kind of finding and what it means. `checks` of emulate() names these.
KINDS = {
    "waitcnt": "a register is used before the s_waitcnt that completes its load",
    "lds-race": "two waves touch the same LDS bytes, one of them writing, with no barrier between",
    "lds-uninit": "a value from LDS that nothing has written is used",
    "lds-bounds": "an LDS access lies outside the workgroup's allocation",
    "global-bounds": "a global or scratch access lies outside every buffer",
    "global-race": "two workgroups, or two waves with no barrier between, touch the same bytes in "
    "memory, one of them writing",
    "register-uninit": "a value from a register that nothing has written is used",
    "wait-states": "too few wait states between two instructions without interlock",
    "barrier": "waves of one workgroup pass different numbers of barriers",
    "order": "the result depends on the order in which the waves of a workgroup ran",
    "limit": "a wave ran longer than max_instructions",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect, at the first place where it showed.

    Attributes:
        kind: a key of KINDS.
        message: what is wrong, in words.
        instruction: text, line and source of the instruction at fault.
        pc: its number in the program.
        workgroup: its coordinates in the grid, None for what holds for any.
        wave: the wave's number in its workgroup, None as before.
        epoch: how many barriers the workgroup had passed.
        schedule: the order of the waves in which it showed.
        other: the conflicting access or the producer, as text.
        advice: no error: a rule that shipped kernels break (`strict=False`).
    """

    kind: str
    message: str
    instruction: str
    pc: int
    workgroup: tuple[int, int, int] | None = None
    wave: int | None = None
    epoch: int | None = None
    schedule: str = ""
    other: str = ""
    advice: bool = False

    def __str__(self) -> str:
        place = "" if self.wave is None else f" [workgroup {self.workgroup}, wave {self.wave}"
        place += "]" if place and self.epoch is None else ""
        place += "" if self.epoch is None else f", epoch {self.epoch}]"
        place += f" under {self.schedule}" if self.schedule else ""
        other = f"\n    against {self.other}" if self.other else ""
        kind = f"advice, {self.kind}" if self.advice else self.kind
        return f"{kind}: {self.message}{place}\n    at {self.instruction}{other}"


class Stop(Exception):
    """Ends the emulation at the first finding."""


@dataclass(slots=True)
class Report:
    """The outcome of one emulation.

    Attributes:
        findings: defects, each (kind, instruction, other instruction) once.
        repeats: how often each finding of that key came up.
        schedule: the orders of the waves that were tried.
        instructions: wave-instructions executed. seconds: wall time.
        executed: wave-instructions by pc; `count_at` sums them by source text.
        bank_conflicts: extra LDS cycles by pc under the first schedule, by a model: see
            docs/emulator.md.
        barriers: barriers passed, summed over workgroups.
    """

    program: Program
    schedule: str = ""
    findings: list[Finding] = field(default_factory=list)
    repeats: Counter = field(default_factory=Counter)
    instructions: int = 0
    seconds: float = 0.0
    executed: Counter = field(default_factory=Counter)
    bank_conflicts: Counter = field(default_factory=Counter)
    barriers: int = 0

    @property
    def clean(self) -> bool:
        """No finding but advice."""
        return all(f.advice for f in self.findings)

    def kinds(self) -> set[str]:
        """The kinds of defect found; advice is none."""
        return {f.kind for f in self.findings if not f.advice}

    def count_at(self, text: str) -> int:
        """Wave-instructions executed whose text or source position contains `text`."""
        code = self.program.code
        return sum(n for pc, n in self.executed.items() if text in code[pc].where())

    def summary(self) -> str:
        """A few lines for people."""
        rate = self.instructions / self.seconds / 1e3 if self.seconds else 0.0
        head = (
            f"{self.program.name} on {self.program.arch}, schedule {self.schedule}: "
            f"{self.instructions} wave-instructions in {self.seconds:.2f} s ({rate:.0f} k/s), "
            f"{self.barriers} barriers, {sum(self.bank_conflicts.values())} LDS conflict cycles"
        )
        advice = sum(f.advice for f in self.findings)
        verdict = "no findings" if self.clean else f"{len(self.findings) - advice} findings"
        verdict += f", {advice} of advice" if advice else ""
        return "\n".join([f"{head}: {verdict}", *map(str, self.findings)])


class Sink:
    """Collects findings for a report and stops at the first one if asked to."""

    def __init__(self, report: Report, checks: frozenset[str], stop: bool):
        self.report, self.checks, self.stop = report, checks, stop
        self._seen: set = set()

    def wants(self, kind: str) -> bool:
        """Whether this kind of finding is looked for."""
        return kind in self.checks

    def add(
        self, kind: str, message: str, at: Instruction, other: Instruction | None = None, **at_wave
    ):
        """Record a finding unless the same one is known; raises Stop if emulation should end."""
        if kind not in self.checks:
            return
        key = (kind, at.pc, other.pc if other else None)
        self.report.repeats[key] += 1
        if key not in self._seen:
            self._seen.add(key)
            against = other.where() if other else ""
            self.report.findings.append(
                Finding(kind, message, at.where(), at.pc, other=against, **at_wave)
            )
        if self.stop and not at_wave.get("advice"):
            raise Stop
