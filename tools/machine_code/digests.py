"""Records as text, one line a kernel: what a later checkout is compared with."""

import hashlib
import re
from pathlib import Path
from typing import Any

HEAD = "# machine code of heedful; commit {commit}; {toolchain}; {count} kernels"
ABOUT = """\
# array place function: code, order and counts of its instructions, as digests without symbols and
# line numbers; how many there are, also in the hot loop; registers; spills; bytes [problem]"""
# By name of a record's entry, what a line says before its numbers.
_NUMBERS = ("registers", "spills")
_LINE = re.compile(r"(\S+) (\d+|-) (\S*): (.*?) \[(.*)\]")


def lines(found: dict[str, Any]) -> str:
    """A record's kernels, sorted by array, problem and place."""
    head = HEAD.format(
        commit=found["commit"] or "unknown",
        toolchain=", ".join(found["toolchain"]),
        count=len(found["kernels"]),
    )
    made = []
    for key, kernel in found["kernels"].items():
        row, place = problem_of(key, found["rows"])
        array, words = row.rpartition("/")[0], found["rows"][row]
        made.append((array, words, place, kernel))
    made.sort(key=lambda each: each[:3])
    return "\n".join([head, ABOUT, *(_line(*each) for each in made)]) + "\n"


def problem_of(key: str, rows: dict[str, str]) -> tuple[str, str]:
    """Of a kernel's key, that of its problem, and its place among the launches, "-" for a problem
    that has none."""
    if key in rows:
        return key, "-"
    row, _, place = key.rpartition(".")
    return row, place


def _line(array: str, words: str, place: str, kernel: dict[str, Any]) -> str:
    head = f"{array} {place} {kernel['function']}:"
    if "error" in kernel:
        return f"{head} error {kernel['error'].strip().splitlines()[-1]} [{words}]"
    facts = [
        f"code={kernel['code']}",
        f"order={kernel['order']}",
        f"counts={counts_digest(kernel)}",
        f"instructions={sum(kernel['opcodes'].values())}",
        f"loop={sum(kernel['loop'].values())}",
    ]
    for what in _NUMBERS:
        facts += [f"{what}.{_spelled(n)}={count}" for n, count in kernel[what].items()]
    facts += [f"{what}={kernel[what]}" for what in ("shared_bytes", "parameter_bytes")]
    return f"{head} {' '.join(facts)} [{words}]"


def counts_digest(kernel: dict[str, Any]) -> str:
    """Of how often each opcode occurs; "" stands for one that is not known by name."""
    if "counts" in kernel:
        return kernel["counts"]
    text = " ".join(f"{name}={count}" for name, count in sorted(kernel["opcodes"].items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _spelled(name: str) -> str:
    return name.replace(" ", "_")


def read(path: Path) -> dict[str, Any]:
    """A record with what lines keep: counts of all instructions, not of each opcode.

    Raises ValueError for a line that is none.
    """
    head, *rest = path.read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = {"commit": head.partition("commit ")[2].partition(";")[0]}
    found |= {"toolchain": [], "rows": {}, "kernels": {}}
    numbers: dict[tuple[str, str], int] = {}
    for line in rest:
        if line.startswith("#"):
            continue
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise ValueError(f"{path} must have lines of kernels, got {line!r}")
        array, place, function, facts, words = parts.groups()
        row = f"{array}/{numbers.setdefault((array, words), len(numbers))}"
        found["rows"][row] = words
        key = row if place == "-" else f"{row}.{place}"
        found["kernels"][key] = {"function": function, **_facts(facts)}
    return found


def _facts(text: str) -> dict[str, Any]:
    if text.startswith("error "):
        return {"error": text.removeprefix("error ")}
    told = dict(each.split("=") for each in text.split())
    kernel: dict[str, Any] = {name: told[name] for name in ("code", "order", "counts")}
    kernel["opcodes"] = {"": int(told["instructions"])}
    kernel["loop"] = {"": int(told["loop"])}
    for what in _NUMBERS:
        own = [name for name in told if name.startswith(f"{what}.")]
        names = {name.partition(".")[2].replace("_", " "): name for name in own}
        kernel[what] = {spelled: int(told[name]) for spelled, name in names.items()}
    for what in ("shared_bytes", "parameter_bytes"):
        kernel[what] = int(told[what])
    return kernel
