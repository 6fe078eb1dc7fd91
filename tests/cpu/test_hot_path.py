"""A call of a known kind raises nothing inside, misses no look-up, and plans nothing again."""

import contextlib
import sys

import pytest
import torch

import heedful
from heedful.torch import backends, calls


class Exceptions:
    """Counts exceptions raised while it is active, caught ones too."""

    def __init__(self):
        self.raised: list[str] = []

    def _trace(self, frame, event, argument):
        if event == "exception" and argument[0] is not StopIteration:
            self.raised.append(f"{argument[0].__name__} in {frame.f_code.co_name}")
        return self._trace

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


def refuse(*_, **__):
    raise AssertionError("looked up or planned again")


def call(causal: bool, grad: bool):
    q, k, v = (torch.randn(1, 16, 2, 8, requires_grad=grad) for _ in range(3))
    out = heedful.flash_attn_func(q, k, v, causal=causal, backend="cpu")
    if grad:
        out.sum().backward()


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "with-grad"])
def test_a_known_call_raises_nothing_and_misses_no_look_up(grad, monkeypatch):
    for causal in (False, True):
        call(causal, grad)
    monkeypatch.setattr(calls, "find", refuse)
    monkeypatch.setattr(backends, "prepare", refuse)
    with Exceptions() as seen:
        for causal in (False, True) * 5:
            call(causal, grad)
    assert seen.raised == []


def test_the_counter_of_exceptions_sees_caught_ones():
    def inner():
        with contextlib.suppress(KeyError):
            raise KeyError

    with Exceptions() as seen:
        inner()
    assert seen.raised == ["KeyError in inner"]
