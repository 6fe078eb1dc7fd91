"""Which test runs which line of the sources, kept between runs.

Triton's interpreter runs kernels as Python functions that it writes anew, each statement with the
line of its source: coverage.py sees them as any other.

Of each test file one entry: the sources that it saw and, per test, its time and the lines that it
ran of each. An entry is made anew when its test file, or what tests share, has changed; where a
source has changed since, its lines are found again by their text.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

FOLDERS = ("tests/pure", "tests/cpu", "tests/compile", "tests/emulated", "tests/integrations")
# Tests that take longer say little for their time.
SLOWEST_S = 30.0
# What any test costs beside its own time.
START_S = 0.1
# A tracer makes plain Python several times slower: what takes longer is timed without one.
TRACED_S = 5.0
# What a file without an entry is taken to take.
UNMAPPED_S = 5.0
# What tells of each module what it holds once it is imported: no trace shows that.
HOLD_ALL = ("tests/pure/repository/test_constants.py", "tests/cpu/torch/api/test_public_surface.py")
# In the text of files that start processes, whose time is not that of a test, and what they take.
_STARTS = re.compile(r"\bsubprocess\b|support\.runs\.ranks")
PROCESS_S = 3.0
# Lines of one function are mostly no farther apart.
CLOSE = 12
# Other than that of an entry, where its lines were found in another way.
WAY = "4"


@dataclass(frozen=True)
class Traced:
    """A test that passes on the unchanged sources. seconds: of a processor; lines: module -> those
    that it runs."""

    mode: str
    id: str
    seconds: float
    lines: dict[str, frozenset[int]]

    @property
    def file(self) -> str:
        return self.id.split("::")[0]


class Tracer:
    """A pytest plugin: the lines that each test runs under a tree's src, its time and outcome; also
    those that processes run which it starts."""

    def __init__(self, tree: Path, path: Path):
        import coverage

        self._src, self._tree, self._path = tree / "src", tree, path
        omit = ["*/emulator/*"]
        self._cover = coverage.Coverage(data_file=None, source=[str(self._src)], omit=omit)
        self._started = Started({"source": [str(self._src)], "omit": omit})
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._skipped: set[str] = set()
        self._start = 0.0
        self._cover.start()

    def pytest_runtest_logstart(self, nodeid, location):
        self._cover.switch_context(nodeid)
        self._started.begin(nodeid)
        if jax := sys.modules.get("jax"):
            # What an earlier test compiled would not be traced again.
            jax.clear_caches()
        self._start = _processor_seconds()

    def pytest_runtest_logreport(self, report):
        if report.outcome == "skipped":
            self._skipped.add(report.nodeid)
        elif report.outcome != "passed":
            self._failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid, location):
        self._seconds[nodeid] = _processor_seconds() - self._start
        self._cover.switch_context("")
        self._started.end()

    def pytest_sessionfinish(self, session):
        self._cover.stop()
        found: dict[str, dict[str, set[int]]] = {}
        for module, line, contexts in _lines(self._cover.get_data(), self._tree):
            for context in contexts:
                found.setdefault(context, {}).setdefault(module, set()).add(line)
        self._started.add_to(found, self._tree)
        tests = {
            test: {
                "seconds": seconds,
                "lines": {module: sorted(ran) for module, ran in found.get(test, {}).items()},
            }
            for test, seconds in self._seconds.items()
            if test not in self._failed | self._skipped
        }
        self._path.write_text(json.dumps({"tests": tests, "failed": sorted(self._failed)}))


class Started:
    """What processes ran that tests started: by coverage.py's own hook for processes, which reads
    the settings that a variable names and writes a file as the process ends."""

    def __init__(self, settings: dict[str, list[str]]):
        self._folder = Path(tempfile.mkdtemp(prefix="mutation-started-"))
        lines = ["[run]", "parallel = true", "context = ${MUTATION_TEST}", "patch = _exit, fork"]
        lines += [f"data_file = {self._folder}/ran"]
        lines += [f"{name} = {', '.join(values)}" for name, values in settings.items()]
        (self._folder / "rc").write_text("\n".join(lines))
        # By test when it began.
        self._began: dict[str, float] = {}
        os.environ["COVERAGE_PROCESS_START"] = str(self._folder / "rc")
        self.end()

    def begin(self, test: str) -> None:
        self._began[test] = time.time()
        os.environ["MUTATION_TEST"] = test

    def end(self) -> None:
        os.environ["MUTATION_TEST"] = ""

    def add_to(self, found: dict[str, dict[str, set[int]]], tree: Path) -> None:
        """To the lines of the test that started a process, and of those that began while it ran:
        ranks of a group live as long as the tests of their file."""
        import coverage

        for file in self._folder.glob("ran*"):
            data = coverage.CoverageData(str(file))
            with contextlib.suppress(coverage.CoverageException):
                data.read()
            ended, (test,) = file.stat().st_mtime, data.measured_contexts() or {""}
            first = self._began.get(test, math.inf)
            tests = [name for name, began in self._began.items() if first <= began < ended]
            for module, line, _ in _lines(data, tree):
                for name in tests:
                    found.setdefault(name, {}).setdefault(module, set()).add(line)
        shutil.rmtree(self._folder, ignore_errors=True)


def _lines(data: Any, tree: Path) -> Iterator[tuple[str, int, list[str]]]:
    """(module, line, contexts) of coverage.py's data."""
    for file in data.measured_files():
        module = os.path.relpath(file, tree)
        for line, contexts in data.contexts_by_lineno(file).items():
            yield module, line, contexts


def _processor_seconds() -> float:
    """Of this process and those that it has waited for: on a busy machine others do not count."""
    return sum(os.times()[:4])


class Map:
    """The entries under a folder."""

    def __init__(self, folder: Path):
        self._entries, self._sources = folder / "map", folder / "sources"
        for made in (self._entries, self._sources):
            made.mkdir(parents=True, exist_ok=True)

    def stale(self, tree: Path, wanted: Iterable[str] = ()) -> list[tuple[str, str]]:
        """(mode, test file) of the entries that are missing or of another test file."""
        found = []
        for mode, file in self.every(tree, wanted):
            path = self._path(mode, file)
            entry = json.loads(path.read_text()) if path.exists() else {"digest": ""}
            if entry["digest"] != _digest(WAY + (tree / file).read_text()) or entry["failed"]:
                found.append((mode, file))
        return found

    def every(self, tree: Path, wanted: Iterable[str] = ()) -> list[tuple[str, str]]:
        """(mode, test file) of every entry that there is to be."""
        found = []
        for file in test_files(tree):
            if wanted and not any(file.startswith(prefix) for prefix in wanted):
                continue
            found.append(("plain", file))
            if "support.runs.interpreted" in (tree / file).read_text():
                found.append(("interpreted", file))
        return found

    def _path(self, mode: str, file: str) -> Path:
        return self._entries / f"{mode}-{file.replace('/', '.')}.json"

    def seconds(self, mode: str, file: str) -> float:
        """What the tests of a file took when it was mapped last; without an entry what is usual of
        files that compile kernels, and of others."""
        path = self._path(mode, file)
        if path.exists():
            return sum(test["seconds"] for test in json.loads(path.read_text())["tests"].values())
        return 60.0 if mode == "interpreted" or file.startswith("tests/compile") else 10.0

    def make(self, server, mode: str, file: str, tree: Path, seconds: float) -> str:
        """Makes an entry; returns what there is to say about it."""
        # Of this entry alone: others are made at the same time.
        traced = self._path(mode, file).with_suffix(f".{os.getpid()}.tmp")
        start = time.monotonic()
        answer = server.run(tree, [file], seconds, traced)
        entry = {"tests": {}, "failed": []}
        if traced.exists():
            entry = json.loads(traced.read_text())
            traced.unlink()
        for name, test in entry["tests"].items():
            if test["seconds"] > TRACED_S:
                alone = server.run(tree, [name], seconds)
                if alone["code"] == 0:
                    test["seconds"] = min(test["seconds"], alone["seconds"])
        modules = {module for test in entry["tests"].values() for module in test["lines"]}
        entry["sources"] = {module: self._keep(tree / module) for module in sorted(modules)}
        entry["digest"] = _digest(WAY + (tree / file).read_text())
        self._path(mode, file).write_text(json.dumps(entry))
        said = f"{len(entry['tests'])} tests in {time.monotonic() - start:.0f} s"
        if answer["code"] is None:
            return said + f", over {seconds:.0f} s"
        return said + (f", {len(entry['failed'])} failed" if entry["failed"] else "")

    def save(self, file: Path) -> None:
        """Writes all entries to a file, which another machine may load."""
        with tarfile.open(file, "w:xz") as archive:
            for made in (self._entries, self._sources):
                archive.add(made, made.name)

    def load(self, file: Path) -> None:
        """Adds the entries of such a file. ValueError if it holds anything else."""
        with tarfile.open(file) as archive:
            members = archive.getmembers()
            for member in members:
                folder = member.name.split("/")[0]
                if folder not in (self._entries.name, self._sources.name):
                    raise ValueError(f"{file} is no map: it holds {member.name}")
            archive.extractall(self._entries.parent, members, filter="data")

    def _keep(self, path: Path) -> str:
        text = path.read_text()
        digest = _digest(text)
        (self._sources / digest).write_text(text)
        return digest

    def tests(self, tree: Path) -> list[Traced]:
        """Every test of the map, its lines as they are numbered in the tree, and every file that
        has no entry."""
        found = []
        for file in test_files(tree):
            for mode in ("plain", "interpreted"):
                path = self._path(mode, file)
                if path.exists():
                    found += self._tests(json.loads(path.read_text()), mode, tree)
                elif mode == "plain":
                    # What runs its lines is not known: it is for modules that its text names.
                    found.append(Traced(mode, file, UNMAPPED_S, {}))
        return found

    def _tests(self, entry: dict, mode: str, tree: Path) -> list[Traced]:
        places = {
            module: self._numbers(digest, tree / module)
            for module, digest in entry["sources"].items()
            if (tree / module).exists()
        }
        found = []
        for name, test in entry["tests"].items():
            if test["seconds"] > SLOWEST_S:
                continue
            lines = {
                module: frozenset(places[module].get(line, 0) for line in ran)
                for module, ran in test["lines"].items()
                if module in places
            }
            found.append(Traced(mode, name, test["seconds"], lines))
        return found

    def _numbers(self, digest: str, path: Path) -> dict[int, int]:
        return _numbers((self._sources / digest).read_text(), path.read_text())


@cache
def _numbers(old: str, new: str) -> dict[int, int]:
    """Old line numbers -> new ones; a line that is gone has none."""
    before, after = old.splitlines(), new.splitlines()
    if before == after:
        return {n: n for n in range(1, len(before) + 1)}
    found = {}
    for a, b, size in SequenceMatcher(None, before, after, False).get_matching_blocks():
        found |= {a + i + 1: b + i + 1 for i in range(size)}
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def test_files(tree: Path) -> list[str]:
    """The test files that take part."""
    return [
        str(path.relative_to(tree))
        for folder in FOLDERS
        for path in sorted((tree / folder).rglob("test_*.py"))
    ]


class Choice:
    """Tests for a place in the sources. texts: of test files, by path."""

    def __init__(self, tests: list[Traced], texts: Mapping[str, str] | None = None):
        self._by_module: dict[str, list[Traced]] = {}
        for test in tests:
            for module in test.lines:
                self._by_module.setdefault(module, []).append(test)
        self._all, self._texts = tests, texts or {}
        self._starts = {file for file, text in self._texts.items() if _STARTS.search(text)}

    def tests(
        self, module: str, lines: set[int], seconds: float, wide=False
    ) -> tuple[list[Traced], int]:
        """What to run, in order, within so many seconds of their usual time; and how many of them
        run the lines themselves. Then follow tests that run lines close by, which may have changed
        since they were traced, and those that run anything of the module: a cached function, and
        what is at module level, runs for a test that did not first call it. Then those of files
        that name the module: they may start processes, which are not traced. Of a module that no
        test runs anything of, all that runs as it is imported, its folder's are run.
        wide: four times as long for these, for what runs when the module is imported, which no
        trace tells from each other; first those of little but this module, and those of files that
        import it."""
        near = self._by_module.get(module, [])
        if not near:
            folder = str(Path(module).parent)
            found = (tests for m, tests in self._by_module.items() if m.startswith(f"{folder}/"))
            near = list({(t.mode, t.id): t for tests in found for t in tests}.values())
        exact = [t for t in near if not t.lines.get(module, frozenset()).isdisjoint(lines)]
        first = _in_turn(exact, module, self._starts)
        names = {(t.mode, t.id) for t in exact}
        rest = [t for t in near if (t.mode, t.id) not in names]
        around = {line + step for line in lines for step in range(-CLOSE, CLOSE + 1)}
        close = [t for t in rest if not t.lines.get(module, frozenset()).isdisjoint(around)]
        far = [t for t in rest if t.lines.get(module, frozenset()).isdisjoint(around)]
        rest = _in_turn(close, module, self._starts) + _in_turn(far, module, self._starts)
        names |= {(t.mode, t.id) for t in rest}
        others = [t for t in self._all if (t.mode, t.id) not in names]
        imports = _imports(module)
        importing = {file for file, text in self._texts.items() if imports.search(text)}
        named = _in_turn([t for t in others if t.file in importing])
        if wide:
            about = sorted(rest, key=lambda t: (-_focus(t, module), t.seconds))
            about = _within(named, seconds / 4) + _within(about, seconds / 2)
            about += _within(named, seconds)
            about = list({(t.mode, t.id): t for t in about}.values())
            mine = {(t.mode, t.id) for t in about}
            rest = about + [t for t in (*rest, *named) if (t.mode, t.id) not in mine]
        else:
            rest += named
        stem = Path(module).stem
        naming = {file for file, text in self._texts.items() if stem in text} - importing
        rest += _in_turn([t for t in others if t.file in naming])
        # Unlike tests early; then as many as there is time for, which are the fastest.
        chosen = _within(first, seconds / 2) or first[:1]
        early = {(t.mode, t.id) for t in chosen}
        left = [t for t in exact if (t.mode, t.id) not in early]
        chosen += _within(sorted(left, key=lambda t: t.seconds), seconds / 2)
        share = seconds if not chosen else seconds / 3
        if wide:
            share = 4 * seconds
            rest = [t for t in self._all if t.file in HOLD_ALL] + rest
        return chosen + _within(rest, share), len(chosen)


def _imports(module: str) -> re.Pattern[str]:
    """What the text of a file has that imports this module."""
    name = module.removeprefix("src/").removesuffix(".py").replace("/", ".")
    package, _, stem = name.rpartition(".")
    return re.compile(rf"\b{re.escape(name)}\b|from {re.escape(package)} import .*\b{stem}\b")


def _within(tests: Iterable[Traced], seconds: float) -> list[Traced]:
    """Those of them, in order, that their usual time leaves room for."""
    chosen, spent = [], 0.0
    for test in tests:
        if spent + test.seconds <= seconds:
            chosen.append(test)
            spent += test.seconds
    return chosen


def _focus(test: Traced, module: str) -> float:
    """How much of what a test runs is of this module."""
    ran = sum(len(lines) for lines in test.lines.values())
    return len(test.lines.get(module, ())) / ran if ran else 0.0


def _in_turn(tests: list[Traced], module: str = "", starts: Iterable[str] = ()) -> list[Traced]:
    """The first of each file, then the second of each, and so on: unlike tests come early. First is
    what is fastest and runs little but the module."""
    price = {}
    for t in tests:
        seconds = t.seconds + (PROCESS_S if t.file in starts else START_S)
        price[t.mode, t.id] = seconds / max(0.01, _focus(t, module))
    by_file: dict[tuple[str, str], list[Traced]] = {}
    for test in tests:
        by_file.setdefault((test.mode, test.file), []).append(test)
    ranked = []
    for found in by_file.values():
        found.sort(key=lambda t: price[t.mode, t.id])
        ranked += [(rank, price[test.mode, test.id], test) for rank, test in enumerate(found)]
    return [test for *_, test in sorted(ranked, key=lambda r: r[:2])]
