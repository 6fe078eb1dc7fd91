"""Assembly text to a Program: instructions with typed operands, labels, kernel descriptor,
arguments, source lines.

One numbering, the *slot*, names every 32-bit register: VGPR n is slot n, AGPR n is 256 + n, SGPR n
(with vcc, m0 and exec at their hardware numbers) is 512 + n. Constants follow from FIRST_CONSTANT
in the order in which they are met.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

AGPR = 256
SGPR = 512
VCC, M0, EXEC = SGPR + 106, SGPR + 124, SGPR + 126
FIRST_CONSTANT = 640
# How many lines of assembly each cache of what follows from a line's text keeps.
KEPT_LINES = 20_000
# Not slots: state that instructions read and write without naming a register.
SCC, MODE = 1000, 1001

# The upper halves of generic addresses of LDS and scratch. Compilers make a pointer to LDS generic
# and take its lower half again; an access through the whole of it is out of all buffers.
_APERTURES = {"src_shared_base": 0x10000, "src_private_base": 0x20000}
_SPECIAL = {
    "flat_scratch": (SGPR + 102, 2),
    "flat_scratch_lo": (SGPR + 102, 1),
    "flat_scratch_hi": (SGPR + 103, 1),
    "xnack_mask": (SGPR + 104, 2),
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "m0": (M0, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
}
_ENCODING = re.compile(r"_(e32|e64|sdwa|dpp|e64_dpp)$")
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)")
_FLOAT = re.compile(r"-?\d*\.\d+(?:e[-+]?\d+)?")
_BASE = {"v": 0, "a": AGPR, "s": SGPR}


class AsmError(ValueError):
    """The text is not assembly that this package understands; the message names the line."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand: `kind` is "reg", "const", "off", "label" or "name"; `signed` extends the sign of
    the part that SDWA selects."""

    kind: str
    slot: int = 0
    count: int = 1
    neg: bool = False
    abs: bool = False
    signed: bool = False
    value: int | float = 0
    text: str = ""

    @property
    def is_vector(self) -> bool:
        """A VGPR or AGPR."""
        return self.kind == "reg" and self.slot < SGPR

    @property
    def is_scalar(self) -> bool:
        """An SGPR, vcc, m0 or exec."""
        return self.kind == "reg" and self.slot >= SGPR

    @property
    def slots(self) -> range:
        """The register slots that this operand covers."""
        return range(self.slot, self.slot + self.count) if self.kind == "reg" else range(0)

    def bits(self, width: int = 32) -> int:
        """The constant as the `width`-bit pattern that an operand of that width receives."""
        if isinstance(self.value, float):
            code = {16: "<e", 32: "<f", 64: "<d"}[width]
            return int.from_bytes(struct.pack(code, self.value), "little")
        return self.value & ((1 << width) - 1)


@dataclass(slots=True)
class Instruction:
    """One decoded instruction; `pc` counts instructions, `line` lines of the assembly text, and
    `base` is the mnemonic without the suffix that names its encoding."""

    pc: int
    mnemonic: str
    operands: Sequence[Operand]
    mods: dict
    text: str
    line: int
    source: str
    base: str

    def where(self) -> str:
        """The instruction and its position, for reports."""
        source = f" ({self.source})" if self.source else ""
        return f"line {self.line}: {self.text}{source}"


@dataclass(frozen=True, slots=True)
class Argument:
    """One entry of the kernel argument segment, as the code object's metadata lists it."""

    offset: int
    size: int
    kind: str
    name: str = ""


@dataclass(slots=True)
class Program:
    """One kernel: code, labels (name to pc), descriptor directives and argument layout.

    `lds_bytes` is the LDS that the kernel itself asks for, where that is known. `vector_registers`
    are those of a lane, accumulation registers included, where metadata says.
    """

    name: str
    arch: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    directives: dict[str, int] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    kernarg_bytes: int = 0
    max_workgroup: int = 0
    lds_bytes: int | None = None
    vector_registers: int = 0

    def target(self, instruction: Instruction) -> int:
        """The pc that a branch jumps to."""
        label = instruction.operands[-1].text
        if label not in self.labels:
            raise AsmError(f"{instruction.where()}: unknown label {label!r}")
        return self.labels[label]


def slot_name(slot: int) -> str:
    """The register's name in assembly."""
    if slot < AGPR:
        return f"v{slot}"
    if slot < SGPR:
        return f"a{slot - AGPR}"
    named = {106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi"}
    named |= {SCC - SGPR: "scc", MODE - SGPR: "mode"}
    return named.get(slot - SGPR, f"s{slot - SGPR}")


@lru_cache(maxsize=KEPT_LINES)
def parse_operand(text: str) -> Operand:
    """Parse one operand with its source modifiers, as `-|v3|`, `s[0:1]`, `0x10`, `vcc` or `off`."""
    body, neg, absolute, signed = text.strip(), False, False, False
    if body.startswith("sext(") and body.endswith(")"):
        body, signed = body[5:-1], True
    if body.startswith("neg(") and body.endswith(")"):
        body, neg = body[4:-1], True
    elif body.startswith("-") and body[1:2] in ("v", "s", "a", "|", "m", "e"):
        body, neg = body[1:], True
    if body.startswith("abs(") and body.endswith(")"):
        body, absolute = body[4:-1], True
    elif body.startswith("|") and body.endswith("|"):
        body, absolute = body[1:-1], True
    if match := _REGISTER.fullmatch(body):
        first = int(match[2] or match[3])
        last = int(match[4]) if match[4] else first
        slot = _BASE[match[1]] + first
        return Operand("reg", slot, last - first + 1, neg, absolute, signed=signed, text=text)
    if body in _SPECIAL:
        slot, count = _SPECIAL[body]
        return Operand("reg", slot, count, neg, absolute, text=text)
    if _INTEGER.fullmatch(body):
        return Operand("const", value=int(body, 0), neg=neg, abs=absolute, text=text)
    if _FLOAT.fullmatch(body):
        return Operand("const", value=float(body), neg=neg, abs=absolute, text=text)
    if body in _APERTURES:
        return Operand("const", value=_APERTURES[body] << 32, text=text)
    if body in ("off", "null"):
        return Operand("off", text=text)
    if "@abs32" in body:  # the base of the one LDS allocation that a Triton kernel has
        return Operand("const", value=0, text=text)
    return Operand("name", text=body)


def _split(text: str) -> list[str]:
    """Split operands at top-level commas."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        parts.append(current.strip())
    return parts


def _modifier(text: str):
    """Parse one `name:value` or bare modifier to a (name, value) pair."""
    name, _, value = text.partition(":")
    if not value:
        return name, True
    if value.startswith("["):
        return name, [int(v, 0) for v in value.strip("[]").split(",")]
    return name, int(value, 0) if _INTEGER.fullmatch(value) else value


def _waitcnt(text: str) -> dict:
    """Counters of an s_waitcnt; the bare form `s_waitcnt 0` waits for everything."""
    counters = {name: int(value, 0) for name, value in re.findall(r"(\w+)\((\w+)\)", text)}
    if not counters and _INTEGER.fullmatch(text.strip()):
        code = int(text, 0)
        vm = (code & 0xF) | (code >> 10 & 0x30)
        counters = {"vmcnt": vm, "expcnt": code >> 4 & 7, "lgkmcnt": code >> 8 & 15}
    return counters


def parse_instruction(text: str, pc: int = 0, line: int = 0, source: str = "") -> Instruction:
    """Decode one instruction; `text` holds no comment."""
    mnemonic, operands, mods, base = _parts(text)
    return Instruction(pc, mnemonic, operands, mods, text, line, source, base)


# Kernels of one family share many lines, and each is decoded several times over (tests, mutants).
@lru_cache(maxsize=KEPT_LINES)
def _parts(text: str) -> tuple[str, tuple[Operand, ...], dict, str]:
    """Mnemonic, operands, modifiers and mnemonic without encoding."""
    mnemonic, _, rest = text.partition(" ")
    base = _ENCODING.sub("", mnemonic)
    if mnemonic == "s_waitcnt":
        return mnemonic, (), _waitcnt(rest), base
    parts, mods = _split(rest.replace("quad_perm: ", "quad_perm:")), {}
    if parts and not parts[-1].startswith("hwreg"):
        last, *trailing = parts[-1].split()
        if ":" in last and not _REGISTER.match(last):
            trailing.insert(0, last)
            parts.pop()
        else:
            parts[-1] = last
        mods = dict(_modifier(m) for m in trailing)
    return mnemonic, tuple(map(parse_operand, parts)), mods, base


class _Sources:
    """Follows `.file` and `.loc`, so that each instruction knows its source line."""

    def __init__(self):
        self.files: dict[str, str] = {}
        self.current = ""

    def directive(self, text: str):
        if match := re.match(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', text):
            self.files[match[1]] = match[3] or match[2]
        elif match := re.match(r"\.loc\s+(\d+)\s+([1-9]\d*)", text):  # line 0 is no place
            self.current = f"{self.files.get(match[1], '?')}:{match[2]}"


def parse(asm: str, kernel: str | None = None) -> Program:
    """Parse the text of one code object and return the kernel of that name (default: the first).

    Raises:
        AsmError: no kernel descriptor, or a target other than gfx942 and gfx950.
    """
    arch = re.search(r"gfx(942|950)", asm)
    if not arch:
        raise AsmError("no gfx942 or gfx950 target in the text (expected `.amdgcn_target`)")
    names = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", asm, re.M)
    name = kernel or (names[0] if names else None)
    if name is None or name not in names:
        raise AsmError(f"kernel {name!r} has no .amdhsa_kernel descriptor; the text has {names}")
    program = Program(name, arch[0])
    _parse_lines(asm, program)
    _parse_metadata(asm, program)
    return program


def _parse_lines(asm: str, program: Program):
    sources, in_code, descriptor = _Sources(), False, None
    forward: dict[str, list[int]] = {}
    for number, raw in enumerate(asm.splitlines(), 1):
        text = raw.split(";")[0].split("//")[0].strip()
        if not text:
            continue
        if match := re.match(r"\.amdhsa_(\w+)\s+(\S+)", text):
            descriptor = match[2] if match[1] == "kernel" else descriptor
            if descriptor == program.name and _INTEGER.fullmatch(match[2]):
                program.directives[match[1]] = int(match[2], 0)
        elif match := re.match(r"([\w.$]+):(.*)", text):
            in_code = in_code or match[1] == program.name
            if in_code:
                _label(program, match[1], forward)
        elif text.startswith((".section", ".amdgpu_metadata", ".Lfunc_end", ".end_amdhsa")):
            in_code = in_code and not text.startswith((".section", ".amdgpu"))
        elif text.startswith("."):
            sources.directive(text)
        elif in_code:
            _append(program, " ".join(text.split()), number, sources.current, forward)


def _label(program: Program, name: str, forward: dict[str, list[int]]):
    here = len(program.code)
    program.labels[name] = here
    if name.isdigit():  # a local label: `1f` before it and `1b` after it mean this place
        program.labels[f"{name}b"] = here
        for pc in forward.pop(name, []):
            program.labels[f"{name}f@{pc}"] = here


def _append(program: Program, text: str, line: int, source: str, forward: dict[str, list[int]]):
    pc = len(program.code)
    instruction = parse_instruction(text, pc, line, source)
    operands = instruction.operands
    if operands and re.fullmatch(r"\d+[fb]", operands[-1].text):
        local = operands[-1].text
        name = f"{local}@{pc}"
        if local.endswith("f"):
            forward.setdefault(local[:-1], []).append(pc)
        else:
            program.labels[name] = program.labels[local]
        instruction.operands = (*operands[:-1], Operand("name", text=name))
    program.code.append(instruction)


def _parse_metadata(asm: str, program: Program):
    """Read the argument list and sizes of this kernel from the YAML that the compiler prints."""
    block = re.search(r"\.amdgpu_metadata(.*?)\.end_amdgpu_metadata", asm, re.S)
    entries = re.split(r"^  - ", block[1], flags=re.M)[1:] if block else []
    for entry in entries:
        if not re.search(rf"^\s*\.name:\s+['\"]?{re.escape(program.name)}['\"]?\s*$", entry, re.M):
            continue
        args = re.search(r"\.args:\s*\n(.*?)(?=^    \.\w)", entry, re.S | re.M)
        for item in re.split(r"^      - ", args[1], flags=re.M)[1:] if args else []:
            facts = dict(re.findall(r"\.(\w+):\s+(\S+)", item))
            size = int(facts["size"])
            offset = int(facts["offset"])
            name = facts.get("name", "")
            program.arguments.append(Argument(offset, size, facts["value_kind"], name))
        if match := re.search(r"\.kernarg_segment_size:\s*(\d+)", entry):
            program.kernarg_bytes = int(match[1])
        if match := re.search(r"\.vgpr_count:\s*(\d+)", entry):
            program.vector_registers = int(match[1])
        if match := re.search(r"\.max_flat_workgroup_size:\s*(\d+)", entry):
            program.max_workgroup = int(match[1])
