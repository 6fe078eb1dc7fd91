"""Zeroed scratch: every byte is given out once."""

import ctypes
import threading

import torch

from heedful.torch import zeros

CALLS, NBYTES, ALIGN = 3000, 300, 256


def test_what_is_taken_is_zero_aligned_and_taken_once():
    """Whoever takes some writes to it, so that bytes given out twice would not be zero."""
    source = zeros.Zeros(torch.device("cpu"), ALIGN)
    regions = []
    for _ in range(CALLS):
        address = source.take(NBYTES)
        regions.append(source._region)  # as kernels that are still to run keep it
        assert address % 64 == 0 and not any(ctypes.string_at(address, NBYTES))
        ctypes.memset(address, 0xFF, NBYTES)
    made = len({id(region) for region in regions})
    assert made == -(-CALLS // (zeros.REGION_BYTES // 512))


def test_threads_on_one_stream_share_nothing():
    source = zeros.Zeros(torch.device("cpu"), ALIGN)
    taken: list[int] = []
    kept = []

    def work():
        for _ in range(CALLS):
            taken.append(source.take(NBYTES))
            kept.append(source._region)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 8 * CALLS
