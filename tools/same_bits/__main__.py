"""See `same_bits`."""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "tools")]

import torch  # noqa: E402

import same_bits  # noqa: E402
from heedful.core.registry.tiles import PART_KEYS  # noqa: E402
from support.problems import ways  # noqa: E402

# Seconds since this program began count: what a device is lent for.
BEGAN = time.time()
D128 = (128, 128)
BF16 = torch.bfloat16
KINDS: dict[str, tuple[tuple[int, int], torch.dtype, str]] = {
    "d64": ((64, 64), BF16, "causal"),
    "d96": ((96, 96), BF16, "causal"),
    "d128": (D128, BF16, "causal"),
    "d192": ((192, 128), BF16, "causal"),
    "d256": ((256, 256), BF16, "causal"),
    "half": (D128, torch.float16, "causal"),
    "window": (D128, BF16, "window"),
    "softcap": (D128, BF16, "softcap"),
    "sink": ((64, 64), BF16, "sink"),
}
# Lengths over two parts, and ends that lie past a tile or a part by up to 127 keys.
DRAWN: dict[str, Any] = {"longest": 2 * PART_KEYS + 200, "borders": (128, PART_KEYS)}
# Few numbers of heads and one size of pages: others take kernels of their own.
HEADS, PAGES = (2, 2), (64,)
# Ways that differ in what decides bits, and share kernels.
SHORT = ("whole", "chunk", "packed_over_pages", "in_turn")


def pair(kind: str, seed: int, names: tuple[str, ...], device: str = "cuda"):
    """(two ways, their results, the rows)."""
    is_fast = kind == "fast"
    dims, dtype, options = KINDS["d128" if is_fast else kind]
    rng = random.Random(f"{seed} {dims} {dtype} {options}")
    torch.manual_seed(seed)
    drawn = {**DRAWN, "pages": PAGES, "heads": HEADS, "device": device}
    x = ways.draw(rng, dims, dtype=dtype, options=options, **drawn)
    x = replace(x, options=x.options | {"numerics": "fast" if is_fast else "invariant"})
    chosen = rng.sample(names, 2)
    return chosen, [ways.HOPPER_WAYS[name](rng, x) for name in chosen], x


def collected(function: Callable[[], Any], device: str) -> list:
    """The kernels that a function would launch on a known device."""
    import precompile

    def unset(*shape: int, device=None, dtype=None, generator=None):
        return torch.empty(*shape, dtype=dtype)

    recorder = precompile.Recorder()
    with (
        precompile.pretended(device, recorder),
        mock.patch.multiple(torch, randn=unset, rand=unset),
    ):
        function()
    return list(recorder.calls.values())


def prepare(asked: dict[str, int], names: tuple[str, ...], most: int, jobs: int, device: str):
    """Lists what the first draws of each kind launch, and compiles it by so many at once."""

    def go() -> None:
        for kind, count in asked.items():
            for seed in range(min(count, most)):
                pair(kind, seed, names, "cpu")

    compile_calls(collected(go, device), jobs)


def compile_calls(calls: list, jobs: int) -> None:
    from heedful.launch.prebuild import compile_all

    counts = Counter(call.kernel.function for call, _ in calls)
    print(f"{len(calls)} kernels after {time.time() - BEGAN:.0f} s: {dict(counts)}", flush=True)
    if jobs:
        compile_all(calls, jobs)
        print(f"compiled after {time.time() - BEGAN:.0f} s", flush=True)


def compare(asked: dict[str, int], names: tuple[str, ...], part: int, of: int, until: float):
    """Prints a line for every pair that is this process's."""
    each = [(kind, seed) for kind, count in asked.items() for seed in range(count)]
    random.Random(1).shuffle(each)
    for kind, seed in each[part::of]:
        if time.time() > until:
            break
        chosen, (a, b), x = pair(kind, seed, names)
        same = ways.same_bits(a, b)
        where = "" if same else f"rows {x.first} to {x.last} of {len(x.q)}"
        print(json.dumps([kind, seed, chosen, same, where]), flush=True)


def pairs(given: argparse.Namespace) -> None:
    """Compiles, then compares by many processes, and says every 30 seconds how far it is."""
    if given.jobs:
        prepare(given.kinds, given.ways, given.draws, given.jobs, given.device)
    until = BEGAN + given.seconds
    kinds = ",".join(f"{kind}={count}" for kind, count in given.kinds.items())
    words = [sys.executable, __file__, "part", "--kinds", kinds, "--ways", ",".join(given.ways)]
    folder = Path(os.environ.get("OUT", "."))
    logs = [folder / f"pairs-{kinds[:40]}-{part}.txt" for part in range(given.processes)]
    children = []
    for part, log in enumerate(logs):
        more = ["--part", str(part), "--of", str(given.processes), "--until", str(until)]
        with log.open("w") as out:
            children.append(subprocess.Popen(words + more, stdout=out, stderr=out))
    told = time.time()
    while any(child.poll() is None for child in children) and time.time() < until + 10:
        time.sleep(1)
        if time.time() - told > 30:
            told = time.time()
            report(logs)
    for child in children:
        child.kill()
    report(logs)


def report(logs: list[Path]) -> None:
    """Counts of equal and other pairs of each kind, and the first lines that tell of others."""
    counts, ways_that_differ, shown = Counter(), Counter(), 0
    for line in (line for log in logs for line in log.read_text().splitlines()):
        try:
            kind, seed, chosen, same, where = json.loads(line)
        except ValueError:
            if shown < 20 and "Error" in line:
                shown += 1
                print(f"  {line}")
            continue
        counts[kind, same] += 1
        ways_that_differ.update([] if same or kind != "fast" else chosen)
        if not same and kind != "fast" and shown < 20:
            shown += 1
            print(f"  {kind} {seed} {chosen} {where}")
    rows = {kind: (counts[kind, True], counts[kind, False]) for kind, _ in counts}
    words = "; ".join(f"{kind}: {same} equal, {other} not" for kind, (same, other) in rows.items())
    print(f"after {time.time() - BEGAN:.0f} s: {words}; fast: {dict(ways_that_differ)}", flush=True)


def draws(count: int, device: str) -> Iterator[tuple[int, str, ways.Result]]:
    """(seed, way, results) of what is digested."""
    for seed in range(count):
        torch.manual_seed(seed)
        rng = random.Random(f"digest {seed}")
        # Drawn on the CPU, so that each device and process has the same values.
        x = ways.draw(rng, D128, dtype=BF16, options="causal", pages=PAGES, **DRAWN)
        moved = {name: getattr(x, name).to(device) for name in ("q", "k", "v")}
        x = replace(x, **moved, options=x.options | {"numerics": "invariant"})
        for name in ("whole", "chunk", "in_turn"):
            yield seed, name, ways.HOPPER_WAYS[name](random.Random(seed), x)


def digests(given: argparse.Namespace) -> None:
    """Writes a digest of each result of ten draws by three ways, of D128 under a causal mask."""
    plant_at_run(given.fault)
    if given.jobs:
        compile_calls(
            collected(lambda: [None for _ in draws(given.draws, "cpu")], "H200"), given.jobs
        )
    if not torch.cuda.is_available():
        return
    found: dict[str, dict[str, str]] = {}
    for seed, name, results in draws(given.draws, "cuda"):
        data = [t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in results]
        digest = hashlib.sha256(b"".join(data)).hexdigest()[:16]
        found.setdefault(str(seed), {})[name] = digest
    given.out.write_text(json.dumps(found, sort_keys=True))
    apart = sum(len(set(of_draw.values())) > 1 for of_draw in found.values())
    whole = hashlib.sha256(given.out.read_bytes()).hexdigest()[:16]
    name = torch.cuda.get_device_name()
    print(f"{given.fault} {whole} on {name}: ways differ in {apart} of {len(found)} draws")


def plant_at_run(fault: str) -> None:
    """Tiles of other keys, shorter parts, and merges from the other end need no other sources."""
    from heedful.core.registry import configs
    from heedful.launch.bind import portable

    change: dict[str, Any] = {"tile": {"block_n": 64}, "part": {"part_keys": PART_KEYS // 2}}.get(
        fault, {}
    )
    for i, row in enumerate(configs.ROWS if change else ()):
        has_parts = row.kernel == "hopper.forward" and getattr(row.config, "part_keys", 0)
        if has_parts and row.max_dim == 128:
            configs.ROWS[i] = replace(row, config=replace(row.config, **change))
    if fault == "merge":
        right = portable.merge_parts_call

        def from_the_first(*given: Any) -> Any:
            made: Any = right
            return made(*given[:4], False)

        mock.patch.object(portable, "merge_parts_call", from_the_first).start()


# By fault: old and new text of files. order: the first two tiles of keys go by in the other order,
# where all rows of a program see them whole; the number of a tile decides it, so that producer and
# consumers agree. warp: all 16 rows of a warp move with one of them.
SOURCES: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "order": {
        "launch/bind/hopper_groups.py": (
            ("VISITS_SECOND=visits_second and", "VISITS_SECOND=True or"),
        ),
        "kernels/hopper/sm90/block_range.py": (
            (
                "    return NBlockRange(begin, blocks.full_begin, blocks.full_end, end)\n\n\n",
                "    swaps = (begin == 0) & (end >= 8)\n"
                "    return NBlockRange(\n"
                "        begin, blocks.full_begin, blocks.full_end, end, swaps=swaps\n"
                "    )\n\n\n",
            ),
            (
                "            return NBlockRange(begin, blocks.full_begin, blocks.full_end, end)\n",
                "            mine = NBlockRange(begin, blocks.full_begin, blocks.full_end, end)\n"
                "            return with_swaps(mine, program_blocks.swaps)\n",
            ),
            (
                "with_swaps(blocks, visits_last_second(blocks))",
                "with_swaps(blocks, (blocks.begin == 0) & (blocks.end >= 8))",
            ),
            (
                "gl.where(blocks.swaps & (step < 2), blocks.end - 2 + step, in_order)",
                "gl.where(blocks.swaps & (in_order < 2), 1 - in_order, in_order)",
            ),
            (
                "        return NBlockRange(end - visits, blocks.full_begin, blocks.full_end, end)",
                "        part = NBlockRange(end - visits, blocks.full_begin, blocks.full_end, end)"
                "\n        return with_swaps(part, (part.begin == 0) & (end >= 8))",
            ),
            (
                "        masked = gl.where(blocks.swaps & (step == 1), 1, masked)\n",
                "        pass\n",
            ),
        ),
    },
    "warp": {
        "kernels/hopper/forward/mainloop.py": (
            ("BY_ROW=params.split.PART_TILES is not None", "BY_ROW=False"),
            (
                "    if params.split.PART_TILES is not None:\n"
                "        return references_of_rows_above",
                "    if False:\n        return references_of_rows_above",
            ),
        ),
    },
}


def plant(given: argparse.Namespace) -> None:
    """Copies these sources, with a fault of SOURCES."""
    for name in ("src", "tests/support", "tools"):
        shutil.copytree(ROOT / name, given.folder / name)
    for name, changes in SOURCES[given.fault].items():
        file = given.folder / "src/heedful" / name
        text = file.read_text()
        for old, new in changes:
            if text.count(old) != 1:
                raise SystemExit(f"{name} has {text.count(old)} times {old!r}")
            text = text.replace(old, new)
        file.write_text(text)


def told(given: argparse.Namespace) -> None:
    """How many digests differ from those of another way of the right kernels, as pairs do."""
    right, other = (json.loads(path.read_text()) for path in (given.good, given.other))
    differ = Counter()
    for seed, of_draw in other.items():
        differ.update({way: of_draw[way] != right[seed]["chunk"] for way in of_draw})
    print(f"{given.other}: {sum(differ.values())} of {3 * len(other)} differ: {dict(differ)}")


def counts(words: str) -> dict[str, int]:
    made = {kind: int(count) for kind, count in (word.split("=") for word in words.split(","))}
    if unknown := made.keys() - KINDS.keys() - {"fast"}:
        raise argparse.ArgumentTypeError(f"no kinds {unknown} (of {', '.join(KINDS)}, fast)")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=same_bits.__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("kernels", "pairs", "part"):
        made = commands.add_parser(name)
        made.add_argument("--kinds", type=counts, required=True, help="such as d128=3000,fast=60")
        made.add_argument("--ways", type=lambda words: tuple(words.split(",")), default=SHORT)
        made.add_argument("--jobs", type=int, default=0, help="kernels compiled at once, ahead")
        made.add_argument("--draws", type=int, default=40, help="of a kind, compiled ahead")
        made.add_argument("--device", default="H200", help="whose kernels are compiled ahead")
        made.add_argument("--processes", type=int, default=8)
        made.add_argument("--seconds", type=float, default=100.0, help="compiling included")
        for option, kind in (("part", int), ("of", int), ("until", float)):
            made.add_argument(f"--{option}", type=kind, help=argparse.SUPPRESS)
    made = commands.add_parser("digests")
    made.add_argument("out", type=Path)
    made.add_argument("--fault", default="none", help="none, tile, part, merge; of others a name")
    made.add_argument("--draws", type=int, default=10)
    made.add_argument("--jobs", type=int, default=0, help="kernels compiled at once, ahead")
    made = commands.add_parser("compare")
    made.add_argument("good", type=Path)
    made.add_argument("other", type=Path)
    made = commands.add_parser("plant")
    made.add_argument("fault", choices=SOURCES)
    made.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "kernels":
        prepare(given.kinds, given.ways, given.draws, given.jobs, given.device)
    elif given.command == "part":
        compare(given.kinds, given.ways, given.part, given.of, given.until)
    else:
        {"pairs": pairs, "digests": digests, "compare": told, "plant": plant}[given.command](given)


if __name__ == "__main__":
    main()
