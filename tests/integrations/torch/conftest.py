"""Nothing that a test replaced in torch outlives it."""

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(autouse=True)
def torchs_attention_is_back():
    """`F.scaled_dot_product_attention` after each test is what it was before."""
    before, threads = F.scaled_dot_product_attention, torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    assert F.scaled_dot_product_attention is before
