"""Records: what a checkout's compiler makes of the arrays, one entry a kernel."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heedful.core.call.problem import AttentionProblem
from heedful.emulator.program.asm import Operand, parse
from heedful.inspector import inspection, nvidia
from heedful.inspector.resources import resources
from heedful.launch.record import Entry
from machine_code.arrays import ARRAYS, in_words
from machine_code.covering import Row
from machine_code.table import DEVICES, Launched

FORMAT = 1
# Stands beside arrays that belong to no attention call.
_ANY = AttentionProblem.dense(1, 1, 1, 1)
WORKER = Path(__file__).with_name("worker.py")


def jobs(arrays: Iterable[str], targets: Iterable[str], sample: int = 0) -> list[dict[str, Any]]:
    """What the arrays launch, as the worker reads it. sample: at most so many problems of an array
    for a target, 0 for all."""
    return [
        {
            "key": f"{target}/{name}/{index}",
            "device": DEVICES[target],
            "row": in_words(name, row),
            **_facts(ARRAYS[name].launched(row, target)),
        }
        for target in targets
        for name in arrays
        if target in ARRAYS[name].targets
        for index, row in sampled(ARRAYS[name].rows, sample)
    ]


def sampled(rows: list[Row], sample: int) -> list[tuple[int, Row]]:
    """At most so many rows with their numbers, the same each time: the first ones, which are calls
    as they are timed where an array has such, and as many evenly from the rest."""
    numbered = list(enumerate(rows))
    if not 0 < sample < len(rows):
        return numbered
    first = sample // 2
    rest, count = numbered[first:], sample - first
    return numbered[:first] + [rest[i * len(rest) // count] for i in range(count)]


def _facts(one: Launched) -> dict[str, Any]:
    return {
        "backend": one.backend,
        "entries": [entry.to_json() for entry in one.entries],
        "last": one.last,
        "cache": one.cache,
        "arrays": Entry(_ANY, "forward", buffers=one.arrays or {}).to_json()["buffers"],
        "options": one.options,
    }


def record(
    sources: Path, wanted: list[dict[str, Any]], cache: Path, workers: int = 1, say=print
) -> dict[str, Any]:
    """Compiles the jobs with a checkout's sources, the folder that heedful/ is in. cache: a folder
    for compiled kernels, which may be shared by checkouts."""
    shares = [wanted[i::workers] for i in range(workers)]
    kernels: dict[str, dict] = {}
    toolchains: set[str] = set()

    def run(share: list[dict]) -> None:
        for facts in _compiled(sources, share, cache):
            toolchains.add(facts.get("toolchain", ""))
            kernels[facts["key"]] = found = analysed(facts)
            say(
                f"{len(kernels)} {facts['key']} {found.get('function', '')}"
                f" {found['error'].splitlines()[-1] if 'error' in found else ''}"
            )

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, shares))
    return {
        "format": FORMAT,
        "commit": _commit(sources),
        "toolchain": sorted(toolchains - {""}),
        "rows": {job["key"]: job["row"] for job in wanted},
        "kernels": dict(sorted(kernels.items())),
    }


def _compiled(sources: Path, share: list[dict], cache: Path) -> Iterator[dict]:
    told = {
        "PYTHONPATH": str(sources),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "HEEDFUL_CACHE_DIR": str(cache / "heedful"),
        # A debugger's line numbers are no part of the code.
        "TRITON_DISABLE_LINE_INFO": "1",
    }
    with tempfile.TemporaryFile("w+") as given:
        json.dump({"launches": share, "defaults": asdict(_ANY)}, given)
        given.seek(0)
        command = [sys.executable, str(WORKER)]
        env = {**os.environ, **told}
        with subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, text=True, env=env
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"the compiling process ended with {process.returncode}")


def _commit(sources: Path) -> str:
    git = ["git", "-C", str(sources)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def analysed(facts: dict) -> dict[str, Any]:
    """What is kept of a compiled kernel.

    code: a digest of all instructions, with registers and control bits. order: of the opcodes in
    order. opcodes, loop: how often each occurs in all and in the hot loop. spills: bytes on NVIDIA,
    registers on AMD.
    """
    if "error" in facts:
        return {"function": facts.get("function", ""), "error": facts["error"]}
    found = _amd(facts) if facts["arch"].startswith("gfx") else _nvidia(facts)
    kept = ("function", "shared_bytes", "parameter_bytes")
    return {**{name: facts[name] for name in kept}, **found}


def _nvidia(facts: dict) -> dict[str, Any]:
    cubin = base64.b64decode(facts["code"])
    listing = nvidia.disassemble(cubin)
    code, labels, branches = nvidia.parse_sass(listing.text)
    loop = nvidia.hot_loop(code, labels, branches) or []
    names = [nvidia.opcode(each) for each in code]
    return {
        "code": _digest("\n".join(nvidia.encodings(listing.text))),
        "order": _digest("\n".join(names)),
        "opcodes": dict(Counter(names)),
        "loop": dict(Counter(map(nvidia.opcode, loop))),
        "registers": {"registers": listing.usage["REG"]},
        "spills": {"stack bytes": listing.usage["STACK"], "local bytes": listing.usage["LOCAL"]},
    }


def _amd(facts: dict) -> dict[str, Any]:
    program = parse(facts["text"])
    loop = inspection.hot_loop(program)
    used = resources(facts["text"], program, facts["shared_bytes"])
    names = [each.mnemonic for each in program.code]
    # Labels number the functions of a file, and the symbol of shared memory has the kernel's name.
    lines = [
        " ".join([i.mnemonic, *map(_operand, i.operands), str(sorted(i.mods.items(), key=str))])
        for i in program.code
    ]
    targets = [
        program.target(i) - i.pc if i.mnemonic.startswith(("s_branch", "s_cbranch")) else 0
        for i in program.code
    ]
    return {
        "code": _digest("\n".join(lines) + str(targets)),
        "order": _digest("\n".join(names)),
        "opcodes": dict(Counter(names)),
        "loop": dict(Counter(i.mnemonic for i in loop)),
        "loop_order": _digest("\n".join(i.mnemonic for i in loop)),
        "registers": {"vgprs": used.vgprs, "agprs": used.agprs, "sgprs": used.sgprs},
        "spills": {
            "vgprs": used.vgpr_spills,
            "sgprs": used.sgpr_spills,
            "scratch bytes": used.scratch_bytes,
        },
    }


def _operand(operand: Operand) -> str:
    return operand.kind if operand.kind in ("name", "label") else operand.text
