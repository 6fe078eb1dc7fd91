"""Where tests of the decode kernel try what no GPU has run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from heedful.core import capability
from heedful.torch import backends


@contextmanager
def wide_decode() -> Iterator[None]:
    """While it is open, the planner takes the decode kernel for MLA's head dims on sm_90 too, so
    that it can be compiled and tried on a GPU before anybody gets it unasked."""
    rows = tuple(
        replace(row, gates=tuple(g for g in row.gates if g is not capability.untried_wide_heads))
        for row in capability.ROWS
    )
    backends.FAMILIES.clear()
    with mock.patch.object(capability, "ROWS", rows):
        yield
    backends.FAMILIES.clear()


if __name__ == "__main__":
    from heedful.bench import steps

    # PYTHONPATH=src:tests python -m support.decode MLA
    with wide_decode():
        steps.main()
