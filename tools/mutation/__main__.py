"""python -m mutation --sample 60 --seed 1: plants bugs, runs tests, says which nobody noticed."""

import argparse
import json
import math
import os
import queue
import random
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None

from mutation.covering import Choice, Map, Traced, test_files
from mutation.mutants import Mutant, sample
from mutation.server import MODES, NO_TESTS, PRELOADED, Hub, Server
from mutation.trees import Trees


@dataclass(frozen=True)
class Part:
    """Sources that are sampled together. places: folders, and files by how their path begins.
    modes: how tests of them run. least: the share of mutants that are to be killed."""

    places: tuple[str, ...]
    modes: tuple[str, ...]
    least: float


PARTS = {
    # What runs on the host.
    "host": Part(
        ("core/", "torch/", "launch/", "cpu/", "bench/", "jax/", "masks/", "distributed/")
        + ("bert_padding.py", "validation/"),
        MODES,
        0.95,
    ),
    # Kernels that Triton's interpreter runs. That one no longer compiles says nothing.
    "kernels": Part(("kernels/portable/", "kernels/common/"), ("interpreted",), 0.90),
    # What Hopper's kernels are given. No test on a host runs them: those of launches notice.
    "launches": Part(
        (
            "launch/bind/groups.py",
            "launch/bind/hopper",
            "launch/bind/mixed.py",
            "launch/bind/mla",
            "kernels/args/hopper",
            "kernels/args/kinds.py",
            "kernels/args/mla.py",
            "kernels/args/shared.py",
        ),
        MODES,
        0.95,
    ),
}
SOURCES = "src/heedful"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
MOST_EQUIVALENT = 0.03
STATE = ".mutation"
# A test that takes more processor time than three times its usual one and this spins.
SPINS_S = 15.0
# A test file that takes longer than this gives no lines.
MAP_SECONDS = 900


@dataclass
class Result:
    """How a mutant fared: killed, survived, or equivalent. tests: how many ran the changed lines;
    by: the run that killed it."""

    mutant: Mutant
    fate: str
    tests: int = 0
    seconds: float = 0.0
    by: str = ""


class Hubs:
    """The processes that serve tests, one of each mode, from when it is first wanted."""

    def __init__(self, cache: Path, preloaded: Sequence[str] = PRELOADED):
        self._cache, self._preloaded, self._lock = cache, preloaded, threading.Lock()
        self._made: dict[str, Hub] = {}

    def connect(self, mode: str) -> Server:
        """A connection of its own to the process of a mode."""
        with self._lock:
            if mode not in self._made:
                self._made[mode] = Hub(mode, self._cache, self._preloaded)
        return self._made[mode].connect()

    def close(self) -> None:
        for made in self._made.values():
            made.close()


class Proof:
    """Whether tests that failed with a mutant pass without it, found once of each. Where one runs
    out of time by itself, it stands on what another test of its file made: none of the file is
    run then."""

    def __init__(self):
        self._passes: dict[tuple[str, str], bool] = {}
        self._slow: set[tuple[str, str]] = set()

    def is_broken(self, test: Traced) -> bool:
        is_slow = (test.mode, test.file) in self._slow
        return is_slow or not self._passes.get((test.mode, test.id), True)

    def passes(self, worker: "Worker", test: Traced) -> bool:
        """Runs it in the worker's tree, which has no mutant now."""
        name = test.mode, test.id
        if name not in self._passes:
            code = worker.run(test.mode, [test])["code"]
            self._passes[name] = code == 0
            if code is None or code < 0:
                self._slow.add((test.mode, test.file))
            if code:
                print(f"fails by itself ({code}): {test.id} ({test.mode})", flush=True)
        return self._passes[name]


@dataclass
class Worker:
    """A copy of the repository, and servers that run its tests."""

    tree: Path
    hubs: Hubs
    proof: Proof
    servers: dict[str, Server] = field(default_factory=dict)

    def server(self, mode: str) -> Server:
        if mode not in self.servers:
            self.servers[mode] = self.hubs.connect(mode)
        return self.servers[mode]

    def judge(self, mutant: Mutant, choice: Choice, seconds: float) -> Result:
        """Plants the mutant, runs tests until one fails, and takes it out again: it is killed if
        the test passes then."""
        lines = mutant.lines((self.tree / mutant.module).read_text())
        tests, exact = choice.tests(mutant.module, lines, seconds, mutant.at_import)
        start = time.monotonic()
        while True:
            tests = [test for test in tests if not self.proof.is_broken(test)]
            with self._planted(mutant):
                killer, said = self._killer(tests)
            if killer is None or self.proof.passes(self, killer):
                break
        fate = "killed" if killer else "survived"
        return Result(mutant, fate, exact, time.monotonic() - start, said)

    @contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[None]:
        path = self.tree / mutant.module
        source, stat = path.read_text(), path.stat()
        # Compiled code is known by its size and by its time in seconds: not well enough for this.
        compiled = list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))
        for file in compiled:
            file.rename(file.with_suffix(".kept"))
        path.write_text(mutant.apply(source))
        try:
            yield
        finally:
            path.write_text(source)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            for file in compiled:
                file.with_suffix(".kept").rename(file)

    def run(self, mode: str, tests: list[Traced]) -> dict:
        """Runs tests until one fails or takes far longer than usual."""
        each = [SPINS_S + 3 * test.seconds for test in tests]
        limit = 20.0 + 3 * sum(test.seconds for test in tests)
        return self.server(mode).run(self.tree, [test.id for test in tests], limit, each=each)

    def _killer(self, tests: list[Traced]) -> tuple[Traced | None, str]:
        """The test that failed and what it said; None if nothing did."""
        # That of the test that says most first.
        for mode in dict.fromkeys(test.mode for test in tests):
            mine = {test.id: test for test in tests if test.mode == mode}
            if not mine:
                continue
            answer = self.run(mode, list(mine.values()))
            if answer["code"] in (0, NO_TESTS):
                continue
            # Where a file cannot be read, it is the first of its tests.
            name = answer["test"]
            files = {test.file: test for test in reversed(mine.values())}
            killer = mine.get(name) or files.get(name.split("::")[0]) or next(iter(mine.values()))
            if answer["code"] is None or answer["code"] < 0:
                return killer, f"{mode}: out of time, or crashed ({answer['code']}): {name}"
            return killer, f"{mode}: {_last_words(answer['output'])}"
        return None, ""

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def _last_words(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[-1][:200] if lines else output.strip()[-200:].replace("\n", " ")


def in_threads(workers: list[Worker], jobs: list, run, until: float = math.inf) -> None:
    """run(worker, job) for each job, on whichever worker is free; none is begun after `until`."""
    waiting: queue.Queue = queue.Queue()
    for job in jobs:
        waiting.put(job)
    errors: list[BaseException] = []

    def work(worker: Worker) -> None:
        while not errors and time.monotonic() < until:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                run(worker, job)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)
    if errors:
        raise errors[0]


def cover(workers: list[Worker], kept: Map, modes, given: argparse.Namespace) -> None:
    """Brings the map of tests to lines up to date, and says how far it is."""
    every = kept.every if given.rebuild else kept.stale
    jobs = [job for job in every(workers[0].tree, given.tests) if job[0] in modes]
    # The files that take longest begin first: else one worker ends long after all others.
    jobs.sort(key=lambda job: -kept.seconds(*job))
    done = Counter()

    def make(worker: Worker, job: tuple[str, str]) -> None:
        said = kept.make(worker.server(job[0]), *job, worker.tree, given.map_seconds)
        done["files"] += 1
        print(f"map {done['files']}/{len(jobs)}  {job[1]} ({job[0]}): {said}", flush=True)

    in_threads(workers, jobs, make, given.until)
    if done["files"] < len(jobs):
        print(f"map: time is over, {len(jobs) - done['files']} files are left", flush=True)


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """(module, function, lines gone, lines come) -> why nobody can notice."""
    listed = tomllib.loads(EQUIVALENT.read_text())["mutant"] if EQUIVALENT.exists() else []
    names = ("module", "function", "gone", "came")
    return {tuple(entry[name].strip() for name in names): entry["why"] for entry in listed}


def main() -> int:
    given = _arguments()
    given.until = time.monotonic() + given.limit
    root = Path.cwd()
    state = root / STATE
    os.nice(given.nice)
    state.mkdir(exist_ok=True)
    with (state / "lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        return run(given, root, state)


def run(given: argparse.Namespace, root: Path, state: Path) -> int:
    """Everything, where nobody else works in this folder."""
    hubs = Hubs(state / "cache")
    proof = Proof()
    workers = [Worker(state / "trees" / str(i), hubs, proof) for i in range(given.workers)]
    Trees([worker.tree for worker in workers]).copy(root)
    kept, tree, part = Map(state), workers[0].tree, PARTS[given.part]
    try:
        if given.map is not None and given.map.exists():
            kept.load(given.map)
        if not given.no_map:
            cover(workers, kept, part.modes, given)
        if given.map is not None and not given.no_map:
            kept.save(given.map)
        if given.map_only:
            return 0
        sources = sources_of(part, tree, given.modules)
        seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
        drawn = sample(sources, given.sample, seed)[given.skip :]
        record = state / f"survivors-{given.part}-{seed}-{given.sample}.json"
        if given.survivors:
            names = {tuple(name) for name in json.loads(record.read_text())}
            drawn = [m for m in drawn if _name(m, sources) in names]
        print(f"seed {seed}: {len(drawn)} mutants of {len(sources)} modules", flush=True)
        texts = {file: (tree / file).read_text() for file in test_files(tree)}
        tests = [test for test in kept.tests(tree) if test.mode in part.modes]
        choice = Choice(tests, texts)
        with (state / "results.jsonl").open("a") as log:

            def judged(result: Result) -> None:
                log.write(json.dumps({"seed": seed, **asdict(result)}) + "\n")
                log.flush()

            results = judge_all(workers, drawn, sources, choice, given, judged)
        left = [r for r in results if r.fate == "survived"]
        record.write_text(json.dumps([_name(r.mutant, sources) for r in left]))
        return report(results, sources, seed, part.least if given.least is None else given.least)
    finally:
        for worker in workers:
            worker.close()
        hubs.close()


def sources_of(part: Part, tree: Path, modules: list[str]) -> dict[str, str]:
    """Its modules and their text; of these, where `modules` names some, those."""
    found = {}
    for path in sorted((tree / SOURCES).rglob("*.py")):
        is_asked = not modules or any(name in str(path) for name in modules)
        if is_asked and str(path.relative_to(tree / SOURCES)).startswith(part.places):
            found[str(path.relative_to(tree))] = path.read_text()
    return found


def _name(mutant: Mutant, sources: dict[str, str]) -> tuple[str, str, str, str]:
    return mutant.module, mutant.function, *mutant.change(sources[mutant.module])


def judge_all(workers, drawn, sources, choice: Choice, given, judged) -> list[Result]:
    """Every mutant's result, which `judged` gets at once; prints one line each."""
    known = equivalents()
    results: list[Result] = []
    start = time.monotonic()

    def judge(worker: Worker, mutant: Mutant) -> None:
        if _name(mutant, sources) in known:
            result = Result(mutant, "equivalent")
        else:
            result = worker.judge(mutant, choice, given.seconds)
        results.append(result)
        judged(result)
        fates = Counter(r.fate for r in results)
        took = time.monotonic() - start
        left = took / len(results) * (len(drawn) - len(results))
        print(
            f"{len(results)}/{len(drawn)}  {fates['killed']} killed, {fates['survived']} survived,"
            f" {took:.0f} s, about {left:.0f} s left  {result.fate:8} {mutant.module}:{mutant.line}"
            f" {mutant.operator} ({result.tests} tests, {result.seconds:.0f} s)",
            flush=True,
        )

    in_threads(workers, drawn, judge, given.until)
    if len(results) < len(drawn):
        print(f"time is over, {len(drawn) - len(results)} mutants are left", flush=True)
    return results


def table(results: list[Result]) -> str:
    """How many mutants of each module were drawn, noticed, missed, and are equivalent."""
    short = {r.mutant.module: r.mutant.module.removeprefix(SOURCES + "/") for r in results}
    rows = [["module", "drawn", "noticed", "missed", "equivalent"]]
    for module in (*sorted(short), ""):
        mine = Counter(r.fate for r in results if module in ("", r.mutant.module))
        counts = (mine.total(), mine["killed"], mine["survived"], mine["equivalent"])
        rows.append([short.get(module, "all"), *map(str, counts)])
    width = max(len(name) for name, *_ in rows)
    return "\n".join(f"{name:{width}}" + "".join(f"{n:>12}" for n in more) for name, *more in rows)


def report(results: list[Result], sources: dict[str, str], seed: int, least: float) -> int:
    """Prints survivors as diffs and the score; returns the exit code."""
    for result in sorted(results, key=lambda r: (r.mutant.module, r.mutant.line)):
        if result.fate == "survived":
            mutant = result.mutant
            where = mutant.function or "module level"
            print(f"\nsurvived: {where}, {mutant.operator}; {result.tests} tests run these lines")
            print(mutant.diff(sources[mutant.module]), end="")
    print("\n" + table(results))
    fates = Counter(result.fate for result in results)
    judged = fates["killed"] + fates["survived"]
    score = fates["killed"] / judged if judged else 1.0
    share = fates["equivalent"] / max(1, len(results))
    print(
        f"\nseed {seed}: {fates['killed']} of {judged} killed, {score:.1%};"
        f" {fates['survived']} survived; {fates['equivalent']} listed as equivalent ({share:.1%},"
        f" at most {MOST_EQUIVALENT:.0%})"
    )
    return int(score < least or share > MOST_EQUIVALENT)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    add = parser.add_argument
    add("--sample", type=int, default=60, help="how many mutants")
    add("--skip", type=int, default=0, help="leave out the first so many of the sample")
    add("--part", choices=PARTS, default="host", help="which sources")
    add("--seed", type=int, help="of the sample; drawn and printed by default")
    add("--modules", nargs="*", default=[], help="only modules whose path holds one of these")
    add("--workers", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    add("--nice", type=int, default=5, help="how far behind other processes")
    add("--seconds", type=float, default=60.0, help="of usual test time, for each mutant")
    add("--limit", type=float, default=math.inf, help="seconds after which nothing more is begun")
    add("--least", type=float, help="exit with 1 below this score; the part's by default")
    add("--survivors", action="store_true", help="only what survived this seed and size last")
    add("--map-only", action="store_true", help="only bring the map of tests to lines up to date")
    add("--no-map", action="store_true", help="use the map as it is")
    add("--map", type=Path, help="a file that the map is loaded from, and saved to unless --no-map")
    add("--map-seconds", type=float, default=MAP_SECONDS, help="of a test file that is mapped")
    add("--rebuild", action="store_true", help="make the whole map anew")
    add("--tests", nargs="*", default=[], help="map only test files that begin with one of these")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
