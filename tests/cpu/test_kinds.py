"""Cases of a kind: found by what was asked of them, and forgotten where there are too many."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from heedful.torch import kinds
from heedful.torch.kinds import Cases, Kinds, of_tensor


def test_heads_and_their_dims_tell_kinds_apart_and_lengths_do_not():
    def kind(name: str, *shape: int):
        return of_tensor(name, torch.empty(shape))[0]

    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        assert kind(name, 2, 9, 4, 16) == kind(name, 3, 8, 4, 16)
        assert len({kind(name, 2, 9, *rest) for rest in ((4, 16), (5, 16), (4, 8))}) == 3
        assert kind(name, 9, 4, 16) == kind(name, 8, 4, 16) != kind(name, 9, 5, 16)
    assert kind("seqused_k", 2) == kind("seqused_k", 3)


def test_a_kind_keeps_so_many_cases_and_forgets_the_oldest():
    cases, made = Cases(), []

    def make(numbers) -> SimpleNamespace:
        (length,) = numbers
        # Asked for: a case of this value alone.
        assert length == len(made)
        made.append(length)
        return SimpleNamespace(outputs=[length + 1])

    for length in range(kinds._MOST_CASES + 3):
        assert cases.find([length], make)[1] == (length + 1,)
    kept = [length for length in range(len(made)) if cases.known([length]) is not None]
    assert kept == list(range(3, kinds._MOST_CASES + 3))
    case, numbers = cases.find([kept[0]], make)
    assert numbers == (kept[0] + 1,) and len(made) == kinds._MOST_CASES + 3


def test_kinds_are_forgotten_where_there_are_too_many():
    found: Kinds = Kinds()
    for key in range(kinds._MOST_KINDS):
        found.of((key,), object)
    first = found.of((0,), object)
    assert len(found) == kinds._MOST_KINDS and found.of((0,), object) is first
    found.of(("one more",), object)
    assert list(found) == [("one more",)]
