"""python -m ab BASE NEW --tables forward,backward --rounds 20."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ab import figures
from ab.sides import Side, SideError, begin, turns
from ab.sources import sources

LEAST_ROUNDS = 5
SIDES = ("base", "new")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ab",
        description="Two checkouts timed in turns on one device. 1 if the new one is slower.",
    )
    add = parser.add_argument
    add("base", help="a folder of sources, an archive, a bundle or a commit")
    add("new", help="the same")
    add("--tables", default="forward,backward,decode", help="forward,backward,host,jax,... or list")
    add("--match", default="", help="cases whose names have this")
    add("--rounds", type=int, default=20, help="of four turns, for each case")
    add("--processes", type=int, default=1, help="pairs of processes that share the rounds")
    add("--jobs", type=int, default=0, help="processes a side that compile beforehand")
    add("--device", default="", help="cuda or cpu (default: cuda where there is one)")
    add("--within", type=float, default=0.5, help="percent that a table's mean may be slower")
    add("--each", type=float, help="percent that a case may be slower (default: as --within)")
    for side in SIDES:
        text = "NAME=VALUE of this side's environment; may be given several times"
        add(f"--{side}-env", action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--json-lines", type=Path, help="a record a case")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if not options.rounds // max(1, options.processes) >= LEAST_ROUNDS:
        raise SystemExit(f"a pair of processes needs --rounds >= {LEAST_ROUNDS}")
    with tempfile.TemporaryDirectory(prefix="ab-") as folder:
        try:
            both = tuple(
                sources(told, Path(folder) / name)
                for name, told in zip(SIDES, (options.base, options.new), strict=True)
            )
            settings = (_settings(options.base_env), _settings(options.new_env))
            wanted = _cells(both[1], options)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        if options.tables == "list":
            return 0
        starts = [Start(*side) for side in zip(SIDES, both, settings, strict=True)]
        return _compare((starts[0], starts[1]), wanted, options)


@dataclass(frozen=True)
class Start:
    """What a side's processes are started with."""

    name: str
    sources: Path
    settings: dict[str, str]

    def side(self, device: str) -> Side:
        return Side(self.name, self.sources, device, settings=self.settings)


def _settings(told: list[str]) -> dict[str, str]:
    """Raises ValueError for what is no NAME=VALUE."""
    for text in told:
        if not text.partition("=")[0] or "=" not in text:
            raise ValueError(f"a side's environment takes NAME=VALUE, got {text!r}")
    return {name: value for name, _, value in (text.partition("=") for text in told)}


def _cells(new: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the new side's bench."""
    sys.path.insert(0, str(new))
    from ab.cases import TABLES, cells

    if options.tables == "list":
        for table in TABLES:
            for cell in cells([table], ""):
                print(f"{table:10s} {cell.name}")
        return []
    return [cell.spec() for cell in cells(options.tables.split(","), options.match)]


def _compare(
    both: tuple[Start, Start], wanted: list[dict[str, Any]], options: argparse.Namespace
) -> int:
    device = options.device or _device()
    _compile(both, wanted, device, options.jobs)
    report = Report(wanted, options)
    for process in range(1, options.processes + 1):
        with _sides(both, device) as sides:
            for side in sides:
                found = side.check()
                versions = f"torch {found['torch']}, triton {found['triton']}"
                _say(f"{side.name}: {found['heedful']} ({found['device']}, {versions})")
            for number, cell in enumerate(wanted):
                if number not in report.missing:
                    _time(sides, cell, number, report, options.rounds // options.processes)
                if process == options.processes:
                    report.tell(number)
    return report.end()


def _time(
    sides: tuple[Side, Side], cell: dict[str, Any], number: int, report: "Report", rounds: int
) -> None:
    try:
        count, report.equal[number] = begin(sides, cell)
        report.times.setdefault(number, []).extend(turns(sides, count, rounds))
        for side in sides:
            side.ask("end")
    except SideError as error:
        report.missing[number] = str(error)


class Report:
    """What was timed of the cases, by their number, and what is told of it as soon as it is known:
    a command may be stopped."""

    def __init__(self, wanted: list[dict[str, Any]], options: argparse.Namespace):
        self._wanted, self._options = wanted, options
        self._figures: list[figures.Figure] = []
        self._table = ""
        self.times: dict[int, list[tuple[float, float]]] = {}
        self.equal: dict[int, bool | None] = {}
        self.missing: dict[int, str] = {}

    def tell(self, number: int) -> None:
        """A case, at the end of its rounds."""
        cell = self._wanted[number]
        if cell["table"] != self._table:
            self._table = cell["table"]
            _say(f"\n{self._table}\n{figures.HEAD}")
        if number in self.missing:
            _say(f"{'':24s}{cell['name']}: {self.missing[number]}")
            return
        made = figures.figure(self._table, cell["name"], self.times[number], self.equal[number])
        self._figures.append(made)
        _say(figures.line(made))
        if self._options.json_lines:
            sides = {"base": self._options.base, "new": self._options.new}
            with self._options.json_lines.open("a") as file:
                file.write(json.dumps({**sides, **made.to_json()}) + "\n")

    def end(self) -> int:
        """Tables, and what is slower than asked or missing: 1 if anything is."""
        _say("")
        for line in figures.summary(self._figures):
            _say(line)
        within, each = self._options.within, self._options.each
        wrong = figures.verdict(self._figures, within, within if each is None else each)
        wrong += [f"{self._wanted[n]['name']}: {why}" for n, why in self.missing.items()]
        for line in wrong:
            _say(f"! {line}")
        return int(bool(wrong))


def _say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _sides(both: tuple[Start, Start], device: str) -> Iterator[tuple[Side, Side]]:
    with ExitStack() as stack:
        base, new = (stack.enter_context(start.side(device)) for start in both)
        yield base, new


def _compile(
    both: tuple[Start, Start], wanted: list[dict[str, Any]], device: str, jobs: int
) -> None:
    """Has every case begun by processes that then end: kernels are in the disk cache."""

    def run(share: tuple[Start, int]) -> None:
        start, first = share
        with start.side(device) as process:
            for cell in wanted[first::jobs]:
                try:
                    process.ask("begin", cell=cell)
                    process.ask("end")
                except SideError:
                    pass  # is met again, and told, where it is timed

    shares = [(start, first) for first in range(jobs) for start in both]
    if shares:
        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(run, shares))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
