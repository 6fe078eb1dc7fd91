"""CPU tests use small tensors, which more threads only slow down: on a machine that other
processes keep busy, a parallel loop waits whole time slices for its last thread."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """One intra-operation thread for the test, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
