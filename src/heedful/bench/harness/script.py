"""Programs of measurements, `python -m heedful.bench.X`: a mistake in a call of one ends it with
one line."""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch


class Refused(Exception):
    """A program cannot run as it was asked to, or not here; the message says why."""


def current_gpu() -> torch.device:
    """The GPU that is current. Raises Refused where torch sees none."""
    try:
        return torch.device("cuda", torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise Refused(f"this program times a GPU, and torch sees none: {why}") from None


def numbers(words: Sequence[str], what: str, least: int = 1) -> list[int]:
    """Words as whole numbers. what: their name in the program's help. Raises Refused."""
    for word in words:
        if not word.isdecimal() or int(word) < least:
            raise Refused(f"{what} must be a whole number from {least}, got {word!r}")
    return [int(word) for word in words]


def say(*lines: str) -> None:
    """Writes lines to standard output at once, since programs take long."""
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(main: Callable[[], int | None], usage: str | None) -> NoReturn:
    """Runs a program and ends the process: with the usage where that is asked for, with one line
    and 2 where it is refused."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(usage or "")
        sys.exit()
    try:
        sys.exit(main())
    except Refused as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
