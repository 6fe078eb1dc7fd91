"""A code object's instructions as text, by llvm-objdump, and from that text a Program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from heedful.emulator.objects.elf import CodeObject, Kernel
from heedful.emulator.program.asm import AsmError, Operand, Program, parse_instruction
from heedful.emulator.program.decoder import Code

# The oldest LLVM whose text was checked, for each target.
_LLVM = {"gfx942": 19, "gfx950": 20}
# Text, address, encoding; behind a branch to a symbol, as compilers leave them, its name.
_LINE = re.compile(r"\s+(\S.*?)\s*//\s*([0-9A-Fa-f]+):((?:\s+[0-9A-Fa-f]{8})+)(?:\s+<.*>)?")
_BRANCH = re.compile(r"s_(branch|cbranch_\w+)\b")
_ENDS = ("s_endpgm", "s_branch", "s_setpc_b64")


def find_objdump(arch: str, named: str | None = None) -> str:
    """The llvm-objdump that disassembles for `arch`.

    Args:
        named: its path; by default $LLVM_OBJDUMP, then the newest on PATH under the names
            llvm-objdump and llvm-objdump-NN.

    Raises:
        AsmError: there is none, or it is too old; the message says which are looked for.
    """
    named = named or os.environ.get("LLVM_OBJDUMP")
    if named:
        candidates = [named]
    else:
        names = ["llvm-objdump", *(f"llvm-objdump-{n}" for n in range(40, 13, -1))]
        candidates = [path for name in names if (path := shutil.which(name))]
    found = {path: _version(path) for path in candidates}
    best = max(found, key=found.__getitem__, default=None)
    if best is None or found[best] < _LLVM[arch]:
        have = ", ".join(f"{path} (LLVM {n})" for path, n in found.items()) or "none"
        raise AsmError(
            f"{arch} needs an llvm-objdump of LLVM {_LLVM[arch]} or newer; found {have}. "
            "Install one, or name it (objdump=, --objdump, $LLVM_OBJDUMP)"
        )
    return best


@lru_cache(maxsize=64)
def _version(path: str) -> int:
    """The LLVM version of an llvm-objdump; 0 if it does not say."""
    match = re.search(r"LLVM version (\d+)", _output([path, "--version"]))
    return int(match[1]) if match else 0


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise AsmError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        raise AsmError(f"{command[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def load_object(path: str | Path, kernel: str | None = None, *, objdump: str | None = None) -> Code:
    """One kernel of a code object, decoded for `emulate`.

    Args:
        path: a `.co` or `.hsaco` file for gfx942 or gfx950, whoever compiled it.
        kernel: its name; needed where the file has several.
        objdump: the llvm-objdump to take; see `find_objdump`.

    Raises:
        AsmError: not such a file, no such kernel, or no llvm-objdump that knows the target.
    """
    source = CodeObject(Path(path).read_bytes(), str(path))
    wanted = source.kernel(kernel)
    tool = find_objdump(source.arch, objdump)
    addresses = f"--start-address={wanted.entry:#x}", f"--stop-address={source.end_of(wanted):#x}"
    flags = ("-d", f"--mcpu={source.arch}", "--no-leading-addr", *addresses)
    return Code(program_of(source.arch, wanted, _output([tool, *flags, str(path)])))


def program_of(arch: str, kernel: Kernel, text: str) -> Program:
    """The program of a kernel from llvm-objdump's text, in which each line ends with its address
    and encoding.

    Branches are resolved by their encodings, so that symbols do not matter.
    """
    program = Program(
        kernel.name,
        arch,
        directives=dict(kernel.directives),
        arguments=list(kernel.arguments),
        kernarg_bytes=kernel.kernarg_bytes,
        max_workgroup=kernel.max_workgroup,
        lds_bytes=kernel.lds_bytes,
    )
    places: dict[int, int] = {}
    targets: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line.rstrip())
        if not match:
            if "//" in line:
                raise AsmError(f"cannot read this line of llvm-objdump: {line.strip()}")
            continue
        address, words = int(match[2], 16), match[3].split()
        pc = places[address] = len(program.code)
        source = f"+{address - kernel.entry:#x}"
        program.code.append(parse_instruction(" ".join(match[1].split()), pc, number, source))
        if _BRANCH.match(match[1]):
            distance = int(words[0], 16) & 0xFFFF
            targets[pc] = address + 4 + 4 * (distance - (distance >> 15 << 16))
    _cut_padding(program.code)
    _link(program, places, targets, kernel.entry)
    return program


def _cut_padding(code: list):
    """Drop what follows the last instruction that ends a path: fill between kernels."""
    while code and not code[-1].mnemonic.startswith(_ENDS):
        code.pop()


def _link(program: Program, places: dict[int, int], targets: dict[int, int], entry: int):
    """Name the places that branches jump to."""
    if not program.code or places.get(entry) != 0:
        raise AsmError(f"kernel {program.name} has no instruction at its entry {entry:#x}")
    for pc, target in targets.items():
        if pc >= len(program.code):
            continue
        instruction = program.code[pc]
        if places.get(target, len(program.code)) >= len(program.code):
            raise AsmError(f"{instruction.where()}: jumps to {target:#x}, outside of the kernel")
        label = f"at_{target - entry:#x}"
        program.labels[label] = places[target]
        instruction.operands = (Operand("name", text=label),)
