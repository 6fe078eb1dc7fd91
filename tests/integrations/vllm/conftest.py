"""A package `vllm` of the recorded names, for every test here."""

import pytest
import torch

from support.integrations import vllm_stub


@pytest.fixture(autouse=True)
def vllm():
    """The package's modules by their names."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with vllm_stub.installed() as made:
        yield made
    torch.set_num_threads(threads)
