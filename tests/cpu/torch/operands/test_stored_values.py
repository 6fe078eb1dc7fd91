"""A kernel reads an operand's memory. Tensors whose memory does not hold their values (views with a
sign bit, zeros without memory, wrappers of other tensors) are resolved, dispatched or refused, by a
call of a known kind too."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor
from torch.utils import _pytree

import heedful.torch as typed
from heedful.torch.base import dispatch
from heedful.torch.base.dispatch import Likeness, is_bare
from support.problems.grids import in_turns
from support.runs import standin
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

heedful: Any = typed
INT = torch.int32


def negated(tensor: Tensor) -> Tensor:
    """The same values as a view of their negatives, as `x.conj().imag` is."""
    return torch._neg_view(-tensor)  # pyright: ignore[reportPrivateImportUsage]


class Wrapped(Tensor):
    """A tensor whose values another holds: none of its own memory. Calls see those."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor):
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def own(x):
            return x.inner if isinstance(x, Wrapped) else x

        return function(*_pytree.tree_map(own, args), **_pytree.tree_map(own, kwargs or {}))


def zeros(tensor: Tensor) -> Tensor:
    made: Any = torch
    return made._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


ODD = {"negated": negated, "wrapped": Wrapped}


def dense() -> dict[str, Any]:
    # Small integers over 4: all that comes of them in a row of one key is exact.
    q, k, v = (torch.randint(-4, 5, (1, 3, 2, 16)) / 4 for _ in range(3))
    given = {"q": q, "k": k, "v": v, "bias": torch.randn(1, 2, 3, 3), "sink": torch.randn(2)}
    return given | {"alibi_slopes": torch.rand(2), "dropout_p": 0.25, "dropout_seed": some_seed()}


def some_seed() -> Tensor:
    return torch.tensor([77])


def packed() -> dict[str, Any]:
    bounds = torch.tensor([0, 2, 5], dtype=INT)
    q, k, v = (torch.randn(5, 2, 16) for _ in range(3))
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds.clone()}
    given |= {"max_seqlen_q": 3, "max_seqlen_k": 3}
    return given | {"seqused_q": torch.tensor([1, 3], dtype=INT), "out": torch.zeros(5, 2, 16)}


def paged() -> dict[str, Any]:
    given = {"q": torch.randn(2, 1, 2, 16)}
    given |= {name: torch.randn(4, 4, 2, 16) for name in ("k_cache", "v_cache")}
    given |= {name: torch.randn(2, 1, 2, 16) for name in ("k", "v")}
    given["cache_seqlens"] = torch.tensor([2, 5], dtype=INT)
    given["block_table"] = torch.arange(4, dtype=INT).view(2, 2)
    given |= {name: torch.randn(8, 8) for name in ("rotary_cos", "rotary_sin")}
    return given | {"out": torch.zeros(2, 1, 2, 16)}


def prefixed() -> dict[str, Any]:
    given = {"q": torch.randn(2, 1, 2, 16)}
    given |= {name: torch.randn(3, 4, 2, 16) for name in ("k_cache", "v_cache")}
    given["cache_batch_idx"] = torch.tensor([2, 0], dtype=INT)
    given["cache_leftpad"] = torch.tensor([1, 0], dtype=INT)
    given["cache_seqlens"] = torch.tensor([3, 2], dtype=INT)
    return given | {"shared_prefix": (torch.randn(3, 2, 16), torch.randn(3, 2, 16))}


def quantised() -> dict[str, Any]:
    given: dict[str, Any] = {"q": torch.randn(1, 2, 2, 16)}
    for name in ("k", "v"):
        whole = heedful.quantize_kv(torch.randn(1, 4, 2, 16), "int8", 8, asymmetric=True)
        given |= dict(
            zip((f"{name}_cache", f"{name}_descale", f"{name}_shift"), whole, strict=True)
        )
    return given | {"tree_mask": torch.ones(1, 2, 2, dtype=torch.bool).tril()}


def merge() -> dict[str, Any]:
    given = {"outs": torch.randn(2, 1, 3, 2, 16), "lses": torch.randn(2, 1, 2, 3)}
    return given | {"sink": torch.randn(2)}


CALLS: dict[Any, Any] = {
    dense: heedful.flash_attn_func,
    packed: heedful.flash_attn_varlen_func,
    paged: heedful.flash_attn_with_kvcache,
    prefixed: heedful.flash_attn_with_kvcache,
    quantised: heedful.flash_attn_with_kvcache,
    merge: heedful.merge_attn_states,
}


def tensors_of(given: dict[str, Any]) -> list[str]:
    return [n for n, t in given.items() if isinstance(t, Tensor) or n == "shared_prefix"]


def made_odd(change, value):
    return tuple(map(change, value)) if isinstance(value, tuple) else change(value)


def kinds():
    """Each tensor of each call in each odd way; by default in one of them, which take turns."""
    for make in CALLS:
        for number, name in enumerate(tensors_of(make())):
            ways = [odd for odd in ODD if odd == "wrapped" or name != "tree_mask"]
            for turn, odd in enumerate(ways):
                marks = [] if turn == number % len(ways) else [pytest.mark.slow]
                test = f"{make.__name__}-{name}-{odd}"
                yield pytest.param(make, name, odd, id=test, marks=marks)


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return _pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)


def plain(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Wrapped) else tensor.resolve_neg()


def results(made) -> list[Tensor]:
    return [plain(t) for t in (made if isinstance(made, tuple) else (made,))]


@interpreted
@pytest.mark.parametrize("make, name, odd", [*kinds()])
def test_an_operand_whose_memory_does_not_hold_its_values_is_read_by_its_values(make, name, odd):
    """Also where a call of the very kind is known, but for that."""
    torch.manual_seed(3)
    given, run = make(), CALLS[make]
    with standin.gpu(interprets=True):
        mine = copied(given)
        wanted = results(run(**mine))
        run(**copied(given))
        theirs = copied(given)
        theirs[name] = made_odd(ODD[odd], theirs[name])
        found = results(run(**theirs))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    for cache in ("k_cache", "v_cache", "out"):
        if cache in mine:
            torch.testing.assert_close(plain(theirs[cache]), mine[cache])


def gradients(change=None, slot: int = 0, varlen: bool = False) -> list[Tensor]:
    """Of q, k, v, bias and sink, each cotangent plain but for the one in this slot."""
    torch.manual_seed(5)
    given = packed() if varlen else dense()
    given.pop("out", None)
    leaves = [given[n].requires_grad_() for n in ("q", "k", "v", "bias", "sink") if n in given]
    run = heedful.flash_attn_varlen_func if varlen else heedful.flash_attn_func
    out, lse = run(**given, return_lse=True)
    cotangents = [torch.randn(out.shape), torch.randn(lse.shape)]
    if change is not None:
        cotangents[slot] = change(cotangents[slot])
    return [plain(g) for g in torch.autograd.grad([out, lse], leaves, cotangents)]


@interpreted
@pytest.mark.parametrize(
    "odd, slot, varlen", in_turns([*ODD, "zeros"], [0, 1], [False, True]), ids=str
)
def test_a_cotangent_whose_memory_does_not_hold_its_values_is_read_by_its_values(odd, slot, varlen):
    with standin.gpu(interprets=True):
        change = ODD.get(odd, zeros)
        wanted = gradients(torch.zeros_like if change is zeros else None, slot, varlen)
        gradients(None, slot, varlen)
        for one, other in zip(gradients(change, slot, varlen), wanted, strict=True):
            torch.testing.assert_close(one, other)


@interpreted
def test_a_batch_of_cotangents_gives_a_batch_of_gradients():
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them."""
    torch.manual_seed(6)
    for sink in (None, torch.randn(2, requires_grad=True)):
        q, k, v = (torch.randn(1, 3, 2, 16, requires_grad=True) for _ in range(3))
        leaves = [q, k, v] if sink is None else [q, k, v, sink]
        with standin.gpu(interprets=True):
            out, lse = heedful.flash_attn_func(q, k, v, sink=sink, return_lse=True)
            batch = [torch.randn(2, *t.shape) for t in (out, lse)]
            found = torch.autograd.grad(
                [out, lse], leaves, batch, is_grads_batched=True, retain_graph=True
            )
            each = [
                torch.autograd.grad([out, lse], leaves, [b[i] for b in batch], retain_graph=True)
                for i in range(2)
            ]
        for one, *others in zip(found, *each, strict=True):
            torch.testing.assert_close(one, torch.stack(others))


def test_operands_without_memory_are_refused_by_name():
    """Zeros that torch only knows of have their values; freed storage has none."""

    def freed(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(0)
        return tensor

    for make, run in CALLS.items():
        for name in tensors_of(make()):
            given = make()
            with standin.gpu() as gpu:
                run(**copied(given))
                run(**copied(given))
                count = len(gpu.launches)
                given[name] = made_odd(freed, given[name])
                words = "dropout_seed" if name == "dropout_seed" else name
                with pytest.raises(ValueError, match=f"^{words}.* must be a plain tensor with mem"):
                    run(**given)
                assert len(gpu.launches) == count


def test_guards_of_known_calls_tell_bare_tensors_from_others():
    whole = torch.randn(2, 16)
    for change in (negated, Wrapped, zeros):
        odd = change(whole)
        assert not is_bare(odd) and is_bare(whole)
        assert not dispatch.same_metadata((whole,))(odd)
        like = Likeness((whole, whole.clone()))
        assert like.addresses((whole, whole.clone())) is not None
        assert like.addresses((whole, odd)) is None


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
