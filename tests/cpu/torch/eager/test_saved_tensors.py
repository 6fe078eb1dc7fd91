"""Gradients do not depend on how a saved-tensor hook lays out what it restores: on the CPU, and
through the runner that serves GPUs.
"""

from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import heedful
from heedful.torch.eager import saved
from support.problems.grids import slow_but
from support.runs import standin
from support.runs.interpreted import INTERPRETING, pass_in_the_interpreter, starts_interpreter


def dense(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def same_strides(t: torch.Tensor) -> torch.Tensor:
    return t.clone()


def off_by_one(t: torch.Tensor) -> torch.Tensor:
    """At an address that is no multiple of 16 bytes."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def columns_apart(t: torch.Tensor) -> torch.Tensor:
    """Every other element of a larger one: the last dim has stride 2."""
    return torch.stack([t, t], -1)[..., 0]


def reversed_dims(t: torch.Tensor) -> torch.Tensor:
    dims = tuple(reversed(range(t.dim())))
    return t.permute(dims).contiguous().permute(dims)


def expanded(t: torch.Tensor) -> torch.Tensor:
    """All dims along which the tensor repeats itself get stride 0."""
    for dim, size in enumerate(t.shape):
        first = t.narrow(dim, 0, min(size, 1))
        if size and torch.equal(first.expand_as(t), t):
            t = first.expand_as(t)
    return t


def every_other(restore):
    """The hook of some of the saved tensors only."""
    count = iter(range(1000))

    def unpack(t):
        return restore(t) if next(count) % 2 else t

    return unpack


LAYOUTS = [dense, same_strides, off_by_one, columns_apart, reversed_dims, expanded]


def chunks() -> list[torch.Tensor]:
    """q, k, v of one projection; batch entries repeat, so that they may be expanded."""
    x = torch.randn(1, 11, 2, 48).repeat(2, 1, 1, 1).requires_grad_()
    return list(x.chunk(3, -1))


def plain():
    return heedful.flash_attn_func, chunks(), {"causal": True}


def grouped():
    q, k, v = chunks()
    return heedful.flash_attn_func, [q, k[:, :, ::2], v[:, :, ::2]], {"window_size": (7, 2)}


def with_everything():
    q, k, v = chunks()
    bias = torch.randn(2, 11, 1, requires_grad=True)
    sink = torch.randn(2, requires_grad=True)

    def function(q, k, v, bias, sink, **keywords):
        return heedful.flash_attn_func(q, k, v, bias=bias, sink=sink, **keywords)

    keywords: dict[str, Any] = {"alibi_slopes": torch.rand(2), "dropout_p": 0.3, "dropout_seed": 5}
    return function, [q, k, v, bias, sink], keywords | {"return_lse": True}


def with_a_whole_bias():
    bias = torch.randn(1, 1, 11, 11, requires_grad=True)

    def function(q, k, v, bias, **keywords):
        return heedful.flash_attn_func(q, k, v, bias=bias.expand(2, 2, 11, 11), **keywords)

    return function, [*chunks(), bias], {"softcap": 3.0}


def packed():
    bounds = torch.tensor([0, 5, 22], dtype=torch.int32)
    q, k, v = (t.flatten(0, 1) for t in chunks())
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    keywords: dict[str, Any] = dict(zip(names, (bounds, bounds, 17, 17), strict=True))
    return heedful.flash_attn_varlen_func, [q, k, v], keywords | {"causal": True}


CALLS = [plain, grouped, with_everything, with_a_whole_bias, packed]
# The interpreter is slow: there one call meets each layout, the others what torch's own hooks do.
PAIRS = [
    (call, restore)
    for call in CALLS
    for restore in LAYOUTS
    if not INTERPRETING
    or call is plain
    or restore is dense
    or (call, restore) == (with_everything, expanded)
]
OFFLOADED = [with_everything] if INTERPRETING else CALLS


def gradients(function, leaves, keywords, context=None) -> list[torch.Tensor]:
    with context or nullcontext():
        results = function(*leaves, **keywords)
    results = [results] if isinstance(results, torch.Tensor) else results
    losses = [(part * torch.arange(part.numel()).view(part.shape).sin()).sum() for part in results]
    # The chunks themselves, so that what is compared is what attention gave.
    return list(torch.autograd.grad(losses, leaves))


@pytest.fixture
def machine():
    """In the interpreting process the stand-in for a GPU, else the CPU."""
    with standin.gpu(interprets=True, tiles=(16, 16)) if INTERPRETING else nullcontext():
        yield


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], exactly: bool = True):
    """exactly: else but for the order of float32 sums of at most 128 terms."""
    for a, b in zip(got, want, strict=True):
        slack = 0.0 if exactly else 128 * torch.finfo(a.dtype).eps * b.abs().max()
        assert ((a - b).abs() <= slack).all()


@pytest.mark.parametrize(("call", "restore"), slow_but(PAIRS[::2], PAIRS))
def test_gradients_do_not_depend_on_the_layout_that_a_hook_restores(call, restore, machine):
    given = call()
    want = gradients(*given)
    for unpack in (restore, every_other(restore)):
        hooks = saved_tensors_hooks(lambda t: t, unpack)
        # Kernels load what is not aligned in wider tiles, whose padding the interpreter adds in.
        assert_same(gradients(*given, context=hooks), want, exactly=restore is not off_by_one)
    # Nor does a later call depend on what a hook restored in an earlier one.
    assert_same(gradients(*given), want)


@pytest.mark.parametrize("call", OFFLOADED)
def test_gradients_are_the_same_with_activations_offloaded(call, machine):
    given = call()
    want = gradients(*given)
    assert_same(gradients(*given, context=save_on_cpu()), want)


def test_gradients_are_the_same_where_the_call_is_computed_again(machine):
    function, leaves, keywords = with_everything()

    def again(*given):
        def run(*tensors):
            return function(*tensors, **keywords)

        return checkpoint(run, *given, use_reentrant=False)

    want = gradients(function, leaves, keywords)
    assert_same(gradients(again, leaves, {}, context=save_on_cpu()), want)


WRONG = {
    "dtype": lambda t: t.to(torch.float64) if t.is_floating_point() else t,
    "shape": lambda t: t[..., :-1],
    "device": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_hook_that_restores_another_tensor_is_told_so(wrong, machine):
    """Kernels would read past its end, or other numbers."""
    given = plain()
    with pytest.raises(ValueError, match="saved-tensor hook"):
        gradients(*given, context=saved_tensors_hooks(lambda t: t, WRONG[wrong]))
    want = gradients(*given)
    with pytest.raises(ValueError, match="saved-tensor hook"):
        gradients(*given, context=saved_tensors_hooks(lambda t: t, WRONG[wrong]))
    assert_same(gradients(*given), want)


@pytest.mark.parametrize("wanted", ["out", "lse", "both"])
def test_a_known_backward_is_taken_with_the_gradient_of_the_lse_where_there_is_one(
    wanted, monkeypatch
):
    asked = []

    def latest(self, tensors, dlse=None, slot=0):
        asked.append((tensors[-1] is not None, dlse is not None, slot))

    monkeypatch.setattr(saved.Backwards, "like_latest", latest)
    q, k, v = (torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3))
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    {"out": out, "lse": lse}.get(wanted, out.sum() + lse.sum()).sum().backward()
    has_dlse = wanted != "out"
    assert asked and set(asked) == {(True, has_dlse, int(has_dlse))}


@starts_interpreter
def test_every_check_passes_on_the_stand_in_for_a_gpu():
    pass_in_the_interpreter(__file__)
