"""A call of a known kind raises nothing inside, misses no look-up, and plans nothing again."""

import contextlib
import sys
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from heedful.torch.api import attention as api
from heedful.torch.api import kvcache
from heedful.torch.eager import backends, calls


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
    monkeypatch.setattr(calls, "make", refuse)
    monkeypatch.setattr(backends, "prepare", refuse)
    with Exceptions() as seen:
        for causal in (False, True) * 5:
            call(causal, grad)
    assert seen.raised == []


def decode(batch: int = 2, share: bool = False, **facts: Any):
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


RARE = ("cache_batch_idx", "cache_leftpad", "alibi_slopes", "k_descale", "v_descale", "k_shift")
RARE += ("v_shift", "sink", "tree_mask", "key_ranges", "rel_bias", "shared_prefix", "out")


@pytest.mark.parametrize("name", RARE)
def test_an_argument_that_known_steps_did_not_have_is_looked_at(name):
    for _ in range(2):
        decode()
    more: dict[str, Any] = {name: "no tensor"}
    with pytest.raises((TypeError, ValueError), match=name):
        decode(**more)


Q = torch.randn(1, 16, 2, 8)
BOUNDS = torch.tensor([0, 16], dtype=torch.int32)
FUNCTIONS = {
    "dense": lambda **more: heedful.flash_attn_func(Q, Q, Q, **more),
    "packed": lambda **more: heedful.flash_attn_varlen_func(
        Q[0], Q[0], Q[0], BOUNDS, BOUNDS, 16, 16, **more
    ),
    "cache": lambda **more: heedful.flash_attn_with_kvcache(Q, Q, Q, **more),
}
SEQUENCES = [
    ("window_size", [3, 1]),
    ("window_size", np.array([3, 1])),
    ("window_size", torch.tensor([3, 1])),
    ("dropout_origin", [1, 2, 3, 8]),
    ("dropout_origin", np.array([1, 2, 3, 8])),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("name", "value"), SEQUENCES)
def test_sequences_of_any_kind_raise_nothing_inside(function, name, value):
    """They are made plain before they are part of a key, where none of them can be."""
    if function == "cache" and name == "dropout_origin":
        pytest.skip("a cache call drops nothing")
    call = FUNCTIONS[function]
    call(**{name: value})
    with Exceptions() as seen:
        call(**{name: value})
    # Nobody raises what ends a generator that `any` has seen enough of.
    assert not [error for error in seen.raised if not error.startswith("GeneratorExit")]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_defaults_are_known_without_a_look_at_what_they_hold(function, monkeypatch):
    for module in (api, kvcache):
        for name in ("plain_window", "plain_origin", "plain_length"):
            monkeypatch.setattr(module, name, refuse, raising=False)
    FUNCTIONS[function]()
    with pytest.raises(AssertionError, match="looked up"):
        FUNCTIONS[function](window_size=[3, 1])


def test_the_counter_of_exceptions_sees_caught_ones():
    def inner():
        with contextlib.suppress(KeyError):
            raise KeyError

    with Exceptions() as seen:
        inner()
    assert seen.raised == ["KeyError in inner"]
