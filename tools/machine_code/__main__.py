"""python -m machine_code record OUT.json, or compare BEFORE.json AFTER.json."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from machine_code import compare
from machine_code.arrays import ARRAYS
from machine_code.record import jobs, record

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "heedful-machine-code"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="machine_code", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    add = commands.add_parser("record", help="compile arrays and keep what came out").add_argument
    add("out", type=Path, help="JSON to write")
    add("--checkout", type=Path, default=Path(), help="whose sources to compile (default: here)")
    add("--array", action="append", choices=list(ARRAYS), help="one or more (default: all)")
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
        arrays = options.array or list(ARRAYS)
        targets = options.target or list(
            dict.fromkeys(t for a in arrays for t in ARRAYS[a].targets)
        )
        wanted = [job for job in jobs(arrays, targets) if options.only in job["key"]]
        options.cache.mkdir(parents=True, exist_ok=True)
        checkout = options.checkout.resolve()
        found = record(checkout, wanted, options.cache.resolve(), options.workers, _say)
        options.out.write_text(json.dumps(found, indent=1))
        return 0
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    found = [d for d in compare.differences(before, after) if options.only in d.key]
    sys.stdout.write(f"{before['commit']} -> {after['commit']}\n\n{compare.table(found)}\n")
    lines = compare.details(found, options.every)
    sys.stdout.write(f"\n{lines}\n" if lines else "")
    return int(any(each.is_worse for each in found))


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
