"""How rows travel between ranks."""

import pytest
import torch
from torch import Tensor

from heedful.distributed import exchange
from heedful.distributed.exchange import Exchange, Transfer


def copied_on_a_gpu(into: list[Tensor], rows: list[Tensor]) -> None:
    """`torch._foreach_copy_` as of CUDA: 16-bit floats go through float32, so that all NaNs become
    one."""
    for place, given in zip(into, rows, strict=True):
        if given.dtype in (torch.bfloat16, torch.float16):
            given = given.where(~given.isnan(), torch.nan)
        place.copy_(given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_of_nans_arrive_as_they_were_sent(monkeypatch, dtype):
    """Log-sum-exps of float32 travel in rows of 16-bit floats: some of their halves are NaNs."""
    monkeypatch.setattr(torch, "_foreach_copy_", copied_on_a_gpu)
    monkeypatch.setattr(exchange, "swap", lambda _, rows, *counts: Transfer(rows, None, rows))
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    rows = every.view(dtype)
    into = torch.zeros_like(rows)
    sent, places = ([list(x.split(1 << 14))] for x in (rows, into))
    Exchange(None, sent, places, exchange.ROUNDS + 1, rows).wait()
    assert torch.equal(into.view(torch.int16), every)


def test_a_transfer_has_a_head_start_on_gpus_alone(monkeypatch):
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    exchange.head_start(torch.device("cpu"))
    assert not slept
    exchange.head_start(torch.device("cuda:0"))
    assert slept == [exchange.HEAD_START]
