"""Which tensors and calls torch's dispatcher has to see, and which tensors are like others."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.torch.base import dispatch
from heedful.torch.base.dispatch import Likeness, needs_dispatcher, same_metadata


class Wrapped(Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def plain(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape or (2, 3), dtype=dtype)


# Tensors whose memory does not hold their values.
ODD = {
    "conjugate": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor(3),  # pyright: ignore
    "a wrapper": lambda: plain().as_subclass(Wrapped),
    "meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.zeros(2).to_sparse(),
}
BARE = {
    "plain": plain,
    "a parameter": lambda: Parameter(plain()),
    "a view": lambda: plain(4, 4)[1:, ::2],
    "a leaf": lambda: plain().requires_grad_(),
    "of a graph": lambda: plain().requires_grad_() * 2,
    "of nothing": lambda: plain(0, 3),
    "integers": lambda: plain(dtype=torch.int64),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", BARE)
def test_memory_that_holds_values_is_bare(name, inference):
    with torch.inference_mode(inference):
        made: Any = BARE[name]()
        assert dispatch.is_bare(made)
        assert dispatch.are_bare([("q", made), ("more", None), ("scale", 2.0)])
        dispatch.check_bare("q", made)
        dispatch.check_all_bare([("q", made), ("more", None), ("scale", 2.0)])


@pytest.mark.parametrize("name", ODD)
def test_other_tensors_are_not_bare_and_are_named(name):
    made: Any = ODD[name]()
    assert not dispatch.is_bare(made)
    assert not dispatch.are_bare([("q", plain()), ("bias", made)])
    words = rf"^bias must be a plain tensor .* a {type(made).__name__} of shape"
    for check in (
        lambda: dispatch.check_bare("bias", made),
        lambda: dispatch.check_all_bare([("q", plain()), ("bias", made)]),
    ):
        with pytest.raises(ValueError, match=words):
            check()


def test_memory_that_was_freed_is_named_at_once():
    freed = plain()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="^k must be a plain tensor"):
        dispatch.are_bare([("q", plain()), ("k", freed)])


def test_calls_that_are_recorded_by_jit_are_traced():
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(dispatch.are_bare([]))
        return x

    function(plain())
    with warnings.catch_warnings(action="ignore"):
        torch.jit.trace(function, (plain(),), check_trace=False)
    assert found == [True, False]


@pytest.mark.parametrize("place", range(3))
def test_each_of_q_k_and_v_may_need_the_dispatcher(place):
    def needs(odd: Any) -> bool:
        given = [plain() for _ in range(3)]
        given[place] = odd
        return needs_dispatcher(*given)

    assert not needs(plain()) and not needs(Parameter(plain()))
    assert needs(plain().as_subclass(Wrapped)) and needs([1.0])
    assert not needs_dispatcher(*(Parameter(plain()) for _ in range(3)))
    # And all but one of them, or all.
    wrapped: list[Any] = [plain().as_subclass(Wrapped) for _ in range(3)]
    assert needs_dispatcher(*wrapped)
    wrapped[place] = plain()
    assert needs_dispatcher(*wrapped)


def test_tensors_of_no_device_need_the_dispatcher():
    meta = torch.zeros(2, device="meta")
    assert needs_dispatcher(meta, meta, meta)


def test_modes_transforms_tangents_and_compilers_need_the_dispatcher(monkeypatch):
    x = plain()
    assert not needs_dispatcher(x, x, x)
    found = []

    def look(y: Tensor) -> Tensor:
        found.append(needs_dispatcher(x, x, x))
        return y.sum()

    with Mode():
        look(x)
    torch.func.grad(look)(x)
    with forward_ad.dual_level():
        look(x)
    monkeypatch.setattr(dispatch, "is_compiling", lambda: True)
    look(x)
    assert found == [True] * 4


def test_shards_are_recognised_without_loading_their_module(monkeypatch):
    class Shard(Tensor):
        pass

    shard = plain().as_subclass(Shard)
    other = plain().as_subclass(Wrapped)
    module = SimpleNamespace(DTensor=Shard)
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", module)
    assert dispatch.has_shards([None, other, shard]) and dispatch.has_shards((shard,))
    assert not dispatch.has_shards([None, plain(), other, 3])
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    assert not dispatch.has_shards([shard])
    assert str(dispatch.no_shards("f")).startswith("f takes no DTensors: give it")


# Tensors alike.


def strided(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with gaps."""
    return torch.zeros(*shape[:-1], shape[-1] + 4, dtype=dtype)[..., : shape[-1]]


OTHERS = {
    "another size": lambda: plain(2, 4),
    "another dtype": lambda: plain(dtype=torch.float16),
    "other strides": lambda: strided(2, 3),
    "a gradient": lambda: plain().requires_grad_(),
    "a wrapper": lambda: plain().as_subclass(Wrapped),
    "more dims": lambda: plain(1, 2, 3),
    "another device": lambda: torch.zeros(2, 3, device="meta"),
}


@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize("name", OTHERS)
def test_tensors_that_lie_otherwise_are_told_apart(name, place):
    alike = same_metadata([plain(), plain()])
    assert alike(plain(), plain() + 1)
    given = [plain(), plain()]
    given[place] = OTHERS[name]()
    assert not alike(*given)


def test_what_was_one_tensor_is_one_again_and_others_are_none():
    x, y, z = plain(), plain(), plain(4)
    alike = same_metadata([x, z, x, y, x])
    a, b, c = plain(), plain(), plain(4)
    assert alike(a, c, a, b, a)
    assert alike(a, c, b, b, a) is False and alike(a, c, a, b, b) is False
    assert not alike(a, plain(5), a, b, a) and not alike(a, c, a, plain(3, 3), a)
    every = same_metadata([x, x])
    assert every(a, a) and not every(a, b) and not every(c, c)


def test_sizes_that_lengths_may_change_are_free_and_others_are_not():
    alike = same_metadata([plain(2, 3, 4), plain(5)], [2, 0])
    assert alike(plain(7, 8, 4), plain(5)) and not alike(plain(2, 3, 5), plain(5))
    assert not alike(plain(2, 3, 4), plain(6))
    # Strides follow sizes, but the last.
    assert alike(strided(7, 8, 4), plain(5))
    assert not alike(plain(2, 4, 3).transpose(1, 2), plain(5))


def test_addresses_are_those_of_tensors_alike_that_begin_at_16_bytes():
    memory = torch.zeros(64)
    values = [memory[:8], None, 3, memory[8:16]]
    likeness = Likeness(values)
    base = memory.data_ptr()
    assert base % 16 == 0
    assert likeness.addresses(values) == [base, base + 32]
    assert likeness.addresses([memory[16:24], None, 3, memory[4:12]]) == [base + 64, base + 16]
    assert likeness.addresses([memory[16:24], None, 3, memory[5:13]]) is None
    assert likeness.addresses([memory[2:10], None, 3, memory[8:16]]) is None
    assert likeness.addresses([memory[:9], None, 3, memory[8:16]]) is None
    # Tensors of nothing have no address.
    none = Likeness([plain(0, 3), plain()])
    assert none.addresses([plain(0, 3), plain()]) is None
    turned = Likeness(values, places=[3, 0])
    assert turned.addresses(values) == [base + 32, base]


def test_tensors_that_were_dense_are_dense_where_their_sizes_are_free():
    kinds = [SimpleNamespace(moving=1, dense=dense) for dense in (True, False)]
    x, gaps = plain(2, 4), strided(2, 4)
    likeness = Likeness([None, x, gaps], kinds, [1, 2])
    assert likeness.addresses([None, plain(4, 4), strided(4, 4)])
    assert likeness.addresses([None, plain(4, 4), plain(4, 4)])
    assert likeness.addresses([None, strided(4, 4), gaps]) is None
    kinds = [SimpleNamespace(moving=1, dense=True)] * 2
    likeness = Likeness([x, x + 1], kinds)
    assert likeness.addresses([plain(4, 4), plain(4, 4)])
    assert likeness.addresses([plain(4, 4), strided(4, 4)]) is None


# Functions of autograd.


class Double(Function):
    called: list[str] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2


def test_a_function_that_is_applied_as_it_is_is_differentiated():
    dispatch.bare_backward(Double)
    x = plain().requires_grad_()
    out = dispatch.bare_apply(Double)(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full_like(x, 2.0))
    assert Double._backward_cls.apply is Double.backward  # pyright: ignore
    dispatch.bare_backward(SimpleNamespace())  # pyright: ignore[reportArgumentType]
