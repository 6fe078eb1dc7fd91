"""Partial results of the MLA decodes in the order of threads: the kernel's own functions on NumPy
arrays. A turn of a merge finds its rows, with all columns in order."""

import numpy as np
import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.mla import thread_order
from heedful.kernels.hopper.sm90.mma import ROWS
from support.hopper.hosted import Host
from support.hopper.hosted_arrays import Arrays, Tensor

COLUMNS = thread_order.COLUMNS.value
PLACES = thread_order.PLACES.value


class Joining(Arrays):
    def join(self, a, b):
        return np.stack((a, b), axis=-1).view(Tensor)


def outputs(swapped: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An output (64 rows, 256 columns), and the same as products leave it: columns may be rows of
    four products, of even and odd columns of each half."""
    whole = np.arange(ROWS.value * COLUMNS, dtype=np.float32).reshape(-1, COLUMNS).view(Tensor)
    if not swapped:
        return whole, (whole,)
    halves = np.split(whole.T, 2)
    return whole, tuple(np.asarray(half[odd::2]).view(Tensor) for half in halves for odd in (0, 1))


@pytest.mark.parametrize("at_once", (1, 2, 4))
@pytest.mark.parametrize("swapped", (False, True))
def test_turns_have_all_rows_once_and_columns_in_order(swapped, at_once):
    host = Host({"gl": Joining()})
    order, in_rows, rows_of_turn = (
        host.turned(getattr(thread_order, name))
        for name in ("in_thread_order", "in_rows", "rows_of_turn")
    )
    whole, acc = outputs(swapped)
    # As `store_segment` puts them into scratch.
    parts = [part.reshape(len(part), -1, 32, part.shape[-1]) for part in order(acc, swapped)]
    memory = np.stack(parts, axis=2).reshape(len(parts[0]), PLACES, -1)
    found = []
    for turn in range(0, len(memory), at_once):
        (x,) = in_rows(memory[None, turn : turn + at_once].view(Tensor), swapped)
        rows = rows_of_turn(turn, np.arange(len(x)), at_once, swapped)
        assert np.array_equal(x, whole[rows])
        found += rows.tolist()
    assert sorted(found) == list(range(ROWS.value))


@pytest.mark.parametrize(("swapped", "nbytes"), ((False, 4), (True, 2)))
def test_a_place_is_sixteen_bytes_of_one_thread(swapped, nbytes):
    """Its numbers lie beside each other in the registers of a thread: rows, or columns, that are
    neighbours or eight apart."""
    host = Host({"gl": Joining()})
    _, acc = outputs(swapped)
    for part in host.turned(thread_order.in_thread_order)(acc, swapped):
        assert part.shape[-1] * nbytes == 16
        rows, columns = (part.astype(int) // COLUMNS), (part.astype(int) % COLUMNS)
        assert set(np.ptp(rows, axis=-1).flat) == {1 if swapped else 8}
        assert set(np.ptp(columns, axis=-1).flat) == {17 if swapped else 1}
