"""The two processes, and who of them has a turn."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[1]


class SideError(Exception):
    """What a side says that it cannot do."""


class Side:
    """A process with one checkout's sources first on its path.

    command: what to run in place of the worker, for tests. settings: variables of its environment
    that differ from the caller's.
    """

    def __init__(
        self,
        name: str,
        sources: Path,
        device: str,
        command: list[str] | None = None,
        settings: Mapping[str, str] | None = None,
    ):
        self.name, self.sources = name, sources
        environment = os.environ | dict(settings or {})
        environment |= {
            # The caller's own path stays: another Triton may be on it.
            "PYTHONPATH": os.pathsep.join(
                (str(sources), str(TOOLS), *filter(None, [environment.get("PYTHONPATH")]))
            ),
            # A second process on the device wants memory, too.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "ab.worker", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, do: str, **facts: Any) -> dict[str, Any]:
        """A request's answer. Raises SideError for an error of the side's, or if it has ended."""
        told, said = self._process.stdin, self._process.stdout
        assert told is not None
        assert said is not None
        try:
            told.write(json.dumps({"do": do, **facts}) + "\n")
            told.flush()
            line = said.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the {self.name} side ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer

    def check(self) -> dict[str, Any]:
        """What it is. Raises RuntimeError if it has imported other sources than its own."""
        found = self.ask("hello")
        if Path(found["heedful"]).resolve().parents[1] != self.sources.resolve():
            raise RuntimeError(
                f"the {self.name} side must import {self.sources}, got {found['heedful']}"
            )
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin(sides: tuple[Side, Side], cell: dict[str, Any]) -> tuple[int, bool | None]:
    """Has both make a cell's calls, at once: nothing is timed. How many calls make a burst, and
    whether results are equal bit for bit, None if that is not known."""
    with ThreadPoolExecutor(2) as pool:
        base, new = pool.map(lambda side: side.ask("begin", cell=cell), sides)
    known = bool(base["equal"] and new["equal"])
    count = int(sides[0].ask("count")["count"])
    return count, base["equal"] == new["equal"] if known else None


def turns(sides: tuple[Side, Side], count: int, rounds: int) -> list[tuple[float, float]]:
    """Microseconds of a call of (base, new), round by round: the geometric mean of two turns each,
    base, new, new, base. Only one of them is ever at work."""

    def turn(place: int) -> float:
        return float(sides[place].ask("time", count=count)["us"])

    found = []
    for _ in range(rounds):
        first, second, third, fourth = (turn(place) for place in (0, 1, 1, 0))
        found.append(((first * fourth) ** 0.5, (second * third) ** 0.5))
    return found
