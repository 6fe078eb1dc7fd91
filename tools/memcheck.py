"""A sample of the GPU tests under compute-sanitizer's memcheck, processes side by side on all GPUs:

    python tools/memcheck.py [--processes 48] [--seconds 150] [--shard 1/1] [--list] [FILE ...]
    python tools/memcheck.py --compile 16 [--shard 1/1] [FILE ...]    # first: kernels for the cache

Of each test it takes few cases in which every value of every parameter occurs, and every value of
every field of a problem. Each tensor gets an allocation of its own, since PyTorch's pools hide what
is read beyond one. Captured graphs need the pools: their tests are left out, and so are long grids
and random problems. PyTorch's own kernels are not checked. It returns 1 if there is an error, a
test that fails, or one that time did not suffice for. Shards 1/4 to 4/4 are the whole sample, each
its quarter: they may run side by side, each with GPUs of its own (CUDA_VISIBLE_DEVICES).
"""

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

FILES = (
    "tests/device/hopper/test_far_scores.py",
    "tests/device/hopper/test_key_ranges.py",
    "tests/device/hopper/test_block_masks.py",
    "tests/device/hopper/test_converting.py",
    "tests/device/hopper/test_decode.py",
    "tests/device/hopper/test_mla.py",
    "tests/device/portable/test_decode.py",
)
# Words of the names of tests that capture graphs.
_CAPTURES = re.compile("captured|replay|graph")
# What a process is told: its number, how many there are, when it starts no test more, its file.
_TOLD = "HEEDFUL_TESTS_MEMCHECK"
_CHECKED = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
_CHECKED += ("--kernel-name-exclude", "kns=at::")
# Versions that know it else find no port for more than ten processes.
_CONNECTIONS = "--max-connections"
# How long a test may go on when time is over.
_GRACE_S = 30.0


def values(parameters: dict) -> set[tuple[str, str]]:
    """Every parameter, and every field of one that has fields, with its value."""
    found = set()
    for name, value in parameters.items():
        if dataclasses.is_dataclass(value):
            fields = (field.name for field in dataclasses.fields(value))
            found |= {(f"{name}.{field}", repr(getattr(value, field))) for field in fields}
        else:
            found.add((name, repr(value)))
    return found


def covering(cases: Sequence[dict]) -> list[int]:
    """Which of the cases of a test to take: one after the other that has most values that none of
    those before has, until all are there."""
    has = [values(case) for case in cases]
    missing, chosen = set().union(*has), [] if any(has) else [0]
    while missing:
        best = max(range(len(has)), key=lambda i: (len(has[i] & missing), -i))
        chosen.append(best)
        missing -= has[best]
    return chosen


def sampled(items: Iterable) -> list:
    """Of pytest's items those to run, those of all tests in turns."""
    by_test: dict[str, list] = {}
    for item in items:
        is_slow, is_random = item.get_closest_marker("slow"), hasattr(item.obj, "hypothesis")
        if not (is_slow or is_random or _CAPTURES.search(item.originalname)):
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    ranked = []
    for test in by_test.values():
        cases = [item.callspec.params if hasattr(item, "callspec") else {} for item in test]
        ranked += [(rank, test[index]) for rank, index in enumerate(covering(cases))]
    return [item for _, item in sorted(ranked, key=lambda entry: entry[0])]


class Sample:
    """A pytest plugin: the share of the sample that a process has."""

    def __init__(self, part: int, parts: int, until: float, file: str):
        self.part, self.parts, self.until, self.file = part, parts, until, Path(file)
        self.told: dict[str, list[str]] = {"chosen": [], "passed": [], "failed": [], "skipped": []}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = sampled(items)[self.part :: self.parts]
        self.told["chosen"] = [item.nodeid for item in items]
        self._tell()

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.told[report.outcome].append(report.nodeid)
            self._tell()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if time.time() > self.until:
            pytest.exit("time is over")

    def _tell(self) -> None:
        self.file.write_text(json.dumps(self.told))


def pytest_configure(config: pytest.Config) -> None:
    if told := os.environ.get(_TOLD):
        config.pluginmanager.register(Sample(**json.loads(told)))


def gpus() -> list[str]:
    """Those to run on; ask nvidia-smi, since torch's answer would make a context."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return given.split(",")
    asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(n) for n in range(asked.stdout.count("GPU "))]


def shard(text: str) -> tuple[int, int]:
    """ "2/4" -> (1, 4): which, counted from 0, and how many there are."""
    which, _, of = text.partition("/")
    if not (which.isdecimal() and of.isdecimal() and 1 <= int(which) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard: 1/4 to 4/4 are")
    return int(which) - 1, int(of)


def compile_sample(told: dict, files: Sequence[str], jobs: int) -> int:
    """Compiles what a sample launches into this user's cache, so that none of its processes, which
    the sanitizer slows down, waits for a compiler, and each kernel is compiled once."""
    import precompile
    from heedful.launch.prebuild import compile_all

    os.environ[_TOLD] = json.dumps(told)
    found = precompile.collect(["-p", "memcheck", *files], "H200")
    count = compile_all(list(found.calls.values()), jobs)
    print(f"memcheck: {count} kernels in the cache; {len(found.ended)} tests could not be foreseen")
    return 0


def checked(processes: int) -> list[str]:
    """compute-sanitizer's command, as this version takes it."""
    asked = subprocess.run([_CHECKED[0], "--help"], capture_output=True, text=True)
    more = [_CONNECTIONS, str(max(10, processes))] if _CONNECTIONS in asked.stdout else []
    return [*_CHECKED, *more]


def start(part: int, given: argparse.Namespace, folder: Path, until: float, on: str):
    """A process that runs its share; what it prints goes to a file of its number."""
    which, shards = given.shard
    told = {"part": part * shards + which, "parts": given.processes * shards, "until": until}
    environment = os.environ | {
        _TOLD: json.dumps(told | {"file": str(folder / f"{part}.json")}),
        "CUDA_VISIBLE_DEVICES": on,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [*checked(given.processes), sys.executable, "-m", "pytest", "-q", "-p", "memcheck"]
    command += ["-p", "no:cacheprovider", "--tb=short", *given.files]
    with (folder / f"{part}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def report(processes: int, folder: Path) -> int:
    """Prints what the processes told; the exit code."""
    total = {"chosen": 0, "passed": 0, "failed": 0, "skipped": 0}
    wrong: list[str] = []
    for part in range(processes):
        log, told = (folder / f"{part}.log").read_text(errors="replace"), folder / f"{part}.json"
        told = json.loads(told.read_text()) if told.exists() else {}
        for outcome, tests in told.items():
            total[outcome] += len(tests)
        wrong += told.get("failed", [])
        summary = re.findall(r"ERROR SUMMARY: (\d+) error", log)
        if summary != ["0"] or not told:
            wrong.append(f"process {part}: {summary or 'no summary'}\n{_first_error(log)}")
    print("\n".join(wrong))
    left = total["chosen"] - total["passed"] - total["failed"] - total["skipped"]
    print(f"memcheck: {total}, {left} not run")
    return int(bool(wrong or left))


def _first_error(log: str) -> str:
    lines = log.splitlines()
    at = next((i for i, line in enumerate(lines) if "Invalid" in line or "Error" in line), None)
    return "\n".join(lines[-12:] if at is None else lines[at : at + 12])


def main() -> int:
    given = _arguments()
    which, shards = given.shard
    told = {"part": which, "parts": shards, "until": 0.0, "file": os.devnull}
    if given.compile:
        return compile_sample(told | {"until": math.inf}, given.files, given.compile)
    if given.list:
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "memcheck"]
        environment = os.environ | {_TOLD: json.dumps(told), "PYTHONPATH": path}
        return subprocess.run([*command, *given.files], env=environment).returncode
    until, on = time.time() + given.seconds, gpus()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        running = [start(i, given, folder, until, on[i % len(on)]) for i in range(given.processes)]
        for process in running:
            try:
                process.wait(max(0.0, until + _GRACE_S - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return report(given.processes, folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add(
        "--processes", type=int, default=min(48, os.cpu_count() or 1), help="shared out to the GPUs"
    )
    add("--seconds", type=float, default=150.0, help="after which no test more is begun")
    add("--shard", type=shard, default="1/1", help="which part of the sample, of how many")
    add("--list", action="store_true", help="only say which tests they are")
    add("--compile", type=int, metavar="JOBS", help="only compile what they launch, ahead")
    add("files", nargs="*", default=FILES, help="the files whose tests are sampled")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
