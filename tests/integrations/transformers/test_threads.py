"""Models in several threads: what one call found of its positions is no other's."""

import sys
from threading import Thread

import torch

from heedful.integrations.transformers.attention import _by_positions

HOW = {"causal": True, "window_size": (-1, -1)}
CALLS = 4000


def test_threads_with_other_positions_have_the_lengths_of_their_own():
    """Each thread's positions are known from its call before, or are looked at again."""
    wrong = []

    def run(lengths: tuple[int, ...]) -> None:
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        for _ in range(CALLS):
            found = _by_positions(None, positions, HOW)
            if found is None or tuple(found.used_q.tolist()) != lengths:
                wrong.append((lengths, found))

    threads = [Thread(target=run, args=(lengths,)) for lengths in ((3, 5), (2, 2, 4))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
