"""Micro-kernels as code objects: Triton's assembler and linker make them, as for its own kernels.

LLVM's disassembler is on few machines. So a stand-in for llvm-objdump prints the text from which
an object was assembled, each instruction with its address and encoding as they lie in the object,
and behind a branch the symbol that it jumps to.
"""

import json
import re
import sys
from pathlib import Path

from triton._C.libtriton import amd
from triton.backends.amd import compiler

from heedful.emulator.objects.elf import CodeObject

_DESCRIPTOR = """
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count {user}
  .amdhsa_system_sgpr_workgroup_id_y 1
  .amdhsa_next_free_vgpr 64
  .amdhsa_accum_offset 32
  .amdhsa_next_free_sgpr 32
  .amdhsa_float_denorm_mode_32 {denormals}
.end_amdhsa_kernel
.text
"""
_TOOL = """#!{python}
import json, sys
from pathlib import Path
if "--version" in sys.argv:
    print("LLVM version {version}.1.0")
    sys.exit()
low, high = (int(next(a for a in sys.argv if a.startswith(n)).split("=")[1], 16)
             for n in ("--start-address", "--stop-address"))
for address, text, words in json.loads(Path(sys.argv[-1] + ".json").read_text()):
    if low <= address < high:
        symbol = " <kernel+0x10>" if text.startswith(("s_branch", "s_cbranch")) else ""
        print(f"\\t{{text}}  // {{address:012X}}: {{words}}{{symbol}}")
"""


def metadata(name: str, arguments, threads: int, size: int | None = None) -> str:
    """One kernel's entry; arguments are (name, bytes, kind), each on a multiple of its size."""
    lines, at = [], 0
    for label, nbytes, kind in arguments:
        at = -(-at // nbytes) * nbytes
        lines += [f"      - .name: {label}", f"        .offset: {at}"]
        lines += [f"        .size: {nbytes}", f"        .value_kind: {kind}"]
        at += nbytes
    return "\n".join(
        [
            f"  - .name: {name}",
            f"    .symbol: {name}.kd",
            "    .args:",
            *lines,
            f"    .kernarg_segment_size: {at if size is None else size}",
            "    .kernarg_segment_align: 8",
            "    .group_segment_fixed_size: 0",
            "    .private_segment_fixed_size: 0",
            "    .wavefront_size: 64",
            "    .sgpr_count: 32",
            "    .vgpr_count: 64",
            f"    .max_flat_workgroup_size: {threads}",
        ]
    )


def write_object(folder: Path, kernels: dict, arch="gfx950", **facts) -> Path:
    """Assemble kernels, name to (body, arguments, threads), into folder/k.co with its listing."""
    facts = {"lds": 0, "scratch": 0, "denormals": 3, "user": 2} | facts
    source = [f'.amdgcn_target "amdgcn-amd-amdhsa--{arch}"', ".text"]
    instructions, entries = [], []
    for name, (body, arguments, threads) in kernels.items():
        source += [f".globl {name}", ".p2align 8", f".type {name},@function", f"{name}:"]
        for line in (x.strip() for x in [*body.strip().splitlines(), "s_endpgm"]):
            if line.endswith(":"):
                source.append(line)
                continue
            source += [f"i{len(instructions)}:", line]
            instructions.append(line)
        source.append(f"i{len(instructions)}:")
        instructions.append("")  # the end of a kernel
        source.append(_DESCRIPTOR.format(name=name, **facts))
        entries.append(metadata(name, arguments, threads))
    source += [".amdgpu_metadata", "---", "amdhsa.version:", "  - 1", "  - 2", "amdhsa.kernels:"]
    source += [*entries, "...", ".end_amdgpu_metadata", ""]
    raw, path = folder / "k.o", folder / "k.co"
    raw.write_bytes(compiler.assemble_amdgcn("\n".join(source), arch, ""))
    amd.link_hsaco(str(raw), str(path))
    Path(f"{path}.json").write_text(json.dumps(_listing(path, instructions)))
    return path


def _listing(path: Path, instructions: list[str]) -> list:
    """(address, text, encoding) of each instruction, from the object's own symbols and bytes."""
    made = CodeObject(path.read_bytes())
    at = {int(n[1:]): a for n, a in made.symbols.items() if re.fullmatch(r"i\d+", n)}
    rows = []
    for i, text in enumerate(instructions):
        if text:
            raw = made.bytes_at(at[i], at[i + 1] - at[i])
            words = [raw[k : k + 4][::-1].hex().upper() for k in range(0, len(raw), 4)]
            rows.append((at[i], text, " ".join(words)))
    return rows


def stand_in(folder: Path, version: int = 20) -> str:
    """The path of a program that answers as llvm-objdump of that LLVM would."""
    path = folder / f"llvm-objdump-{version}"
    path.write_text(_TOOL.format(python=sys.executable, version=version))
    path.chmod(0o755)
    return str(path)
