"""Positions that start at 0 again are documents, in every mode of autograd; what one call found of
its positions is no other thread's."""

import sys
from contextlib import AbstractContextManager
from threading import Thread

import pytest
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


def lengths_of(positions: torch.Tensor) -> list[int] | None:
    found = _by_positions(None, positions, HOW)
    return None if found is None else found.used_q.tolist()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_positions_that_change_in_place_are_read_again(mode: type[AbstractContextManager]):
    with mode():
        positions = torch.tensor([[0, 1, 2, 0, 1]])
        assert lengths_of(positions) == [3, 2]
        positions.copy_(torch.tensor([[0, 0, 1, 2, 3]]))
        assert lengths_of(positions) == [1, 4]
        positions.copy_(torch.arange(5)[None])
        assert lengths_of(positions) is None
