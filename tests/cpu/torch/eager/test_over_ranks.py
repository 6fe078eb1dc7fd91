"""Bound calls and copies of steps over ranks, as functions of addresses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heedful.torch.eager import over_ranks

Q, OUT = torch.zeros(2, 3, 4, 8), torch.ones(2, 3, 4, 8)
OPTIONS: Any = object()


@pytest.mark.parametrize("call", [None, SimpleNamespace(run_on=None)])
def test_what_is_no_program_on_a_gpu_is_not_bound(call, monkeypatch):
    monkeypatch.setattr(over_ranks, "find", lambda *_: ((call, 5), 6))
    assert over_ranks.bound(Q, Q, Q, None, OPTIONS, OUT) is None


def test_a_bound_call_is_the_one_that_was_made_with_these_operands(monkeypatch):
    asked: list[Any] = []
    runner = SimpleNamespace(turned=lambda out: ("runs", out), pick="picks")
    call = SimpleNamespace(run_on=1, runner=runner)

    def find(*given):
        asked.append(given)
        return (call, 5), 6

    monkeypatch.setattr(over_ranks, "find", find)
    k, v = Q + 1, Q + 2
    assert over_ranks.bound(Q, k, v, None, OPTIONS, OUT) == (("runs", OUT), "picks")
    (given,) = asked
    wanted = Q, k, v, None, OPTIONS, OUT, None
    assert len(given) == 7 and all(a is b for a, b in zip(given, wanted, strict=True))


def test_rows_are_copied_by_the_driver_on_the_given_stream(monkeypatch):
    asked: list[Any] = []
    drivers = {"nvidia": SimpleNamespace(copy=lambda *given: asked.append(given))}
    monkeypatch.setattr(over_ranks, "driver", drivers.__getitem__)
    stream: Any = SimpleNamespace(cuda_stream=9, device_index=3)
    over_ranks.copy_on(stream, OUT, Q)
    assert asked == [(OUT.data_ptr(), Q.data_ptr(), 4 * 192, 9, 3)]
