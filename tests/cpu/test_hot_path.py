"""A call of a known kind raises nothing inside, misses no look-up, and plans nothing again."""

import contextlib
import sys

import pytest
import torch

import heedful
from heedful.torch import backends, calls, kvcache


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


def decode(batch: int = 2, share: bool = False, **facts):
    """One step over a cache of pages of 4 keys."""
    torch.manual_seed(batch)
    table = torch.arange(batch * 4, dtype=torch.int32).view(batch, -1)
    q, k, v = torch.randn(batch, 1, 2, 8), *(torch.randn(batch * 4, 4, 2, 8) for _ in range(2))
    lengths = torch.full((batch,), 13, dtype=torch.int32)
    return heedful.flash_attn_with_kvcache(
        q,
        k,
        k if share else v,
        cache_seqlens=lengths,
        block_table=table,
        backend="cpu",
        **facts,
    )


def test_a_known_decode_step_makes_no_key(monkeypatch):
    for _ in range(2):
        decode()
    monkeypatch.setattr(kvcache, "tensor_keys", refuse)
    for _ in range(5):
        decode()


def test_decode_steps_of_other_kinds_are_not_taken_for_the_last():
    one, two = torch.rand(2), torch.rand(2)
    kinds = [{}, {"batch": 3}, {"share": True}, {"alibi_slopes": one}, {"sink": two}]
    kinds += [{"softcap": 1}, {"softcap": 1.0}, {"causal": True}, {"num_splits": 1}]
    wanted = []
    for kind in kinds:
        calls.CALLS.clear()
        wanted.append(decode(**kind))
    for _ in range(3):
        for kind, want in zip(kinds, wanted, strict=True):
            assert torch.equal(decode(**kind), want), kind


def test_the_counter_of_exceptions_sees_caught_ones():
    def inner():
        with contextlib.suppress(KeyError):
            raise KeyError

    with Exceptions() as seen:
        inner()
    assert seen.raised == ["KeyError in inner"]
