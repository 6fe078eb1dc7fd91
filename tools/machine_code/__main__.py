"""python -m machine_code record OUT.json, or compare BEFORE.json AFTER.json."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ab.sources import sources
from machine_code import compare, digests
from machine_code.arrays import ARRAYS, FAMILIES
from machine_code.record import jobs, record

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "heedful-machine-code"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="machine_code", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    add = commands.add_parser("record", help="compile arrays and keep what came out").add_argument
    add("out", type=Path, help="what to write: OUT.json, or OUT.txt of a line a kernel")
    add("--checkout", default=".", help="whose sources to compile: a folder, archive or commit")
    add("--commit", help="what to call it, where git does not know")
    add("--array", action="append", choices=list(ARRAYS), help="one or more (default: all)")
    add("--families", help=f"several arrays, by comma: {', '.join(FAMILIES)}")
    add("--sample", type=int, default=0, help="problems of an array and target (default: all)")
    add("--target", action="append", help="sm_90, gfx942, gfx950 (default: all of the array)")
    add("--only", default="", help="keys that contain this, such as hopper/17")
    add("--cache", type=Path, default=CACHE, help="folder of compiled kernels")
    add("--workers", type=int, default=1)
    add = commands.add_parser(
        "compare", help="what differs; 1 if any kernel has more spills, is missing or fails"
    ).add_argument
    add("before", type=Path)
    add("after", type=Path)
    add("--only", default="", help="keys that contain this")
    add("--every", action="store_true", help="a line also for code that only its order changed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.command == "record":
        _record(options)
        return 0
    before, after = (_read(path) for path in (options.before, options.after))
    found = [d for d in compare.differences(before, after) if options.only in d.key]
    sys.stdout.write(f"{before['commit']} -> {after['commit']}\n\n{compare.table(found)}\n")
    lines = compare.details(found, options.every)
    sys.stdout.write(f"\n{lines}\n" if lines else "")
    return int(any(each.is_worse for each in found))


def _record(options: argparse.Namespace) -> None:
    arrays = _arrays(options)
    targets = options.target or list(dict.fromkeys(t for a in arrays for t in ARRAYS[a].targets))
    found = jobs(arrays, targets, options.sample)
    wanted = [job for job in found if options.only in job["key"]]
    options.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="machine-code-") as folder:
        place = sources(options.checkout, Path(folder) / "checkout")
        made = record(place, wanted, options.cache.resolve(), options.workers, _say)
    if options.commit:
        made["commit"] = options.commit
    is_json = options.out.suffix == ".json"
    options.out.write_text(json.dumps(made, indent=1) if is_json else digests.lines(made))


def _arrays(options: argparse.Namespace) -> list[str]:
    """Raises SystemExit for an unknown family."""
    named: list[str] = list(options.array or ())
    for family in options.families.split(",") if options.families else ():
        if family not in FAMILIES:
            raise SystemExit(f"families must be among {', '.join(FAMILIES)}, got {family!r}")
        named += FAMILIES[family]
    return list(dict.fromkeys(named)) or list(ARRAYS)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.suffix == ".json" else digests.read(path)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
