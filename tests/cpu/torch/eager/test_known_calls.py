"""A call that follows another is launched as it would be in a fresh process: whatever a kernel is
compiled for or bound to is in the key by which a known call is found again."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import heedful
from heedful.torch.eager import backends, execute
from heedful.torch.eager.calls import CALLS
from support import launches
from support.runs import standin

B, M, N, H, G, D = 2, 40, 48, 4, 2, 64
DTYPE = torch.float16


def some(*shape, dtype=DTYPE) -> Tensor:
    return torch.randn(shape).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values with other strides, the last and 16-byte steps kept."""
    wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 16))
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def unaligned(tensor: Tensor) -> Tensor:
    """The same values, strides and dtype from an address that is no multiple of 16."""
    flat = tensor.new_zeros(tensor.numel() + 16)
    moved = flat[1 : 1 + tensor.numel()].view(tensor.shape)
    assert moved.data_ptr() % 16
    return moved.copy_(tensor)


def with_grad(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": strided,
    "address": unaligned,
    "grad": with_grad,
}


def dense() -> dict[str, Any]:
    given = {"q": some(B, M, H, D), "k": some(B, N, G, D), "v": some(B, N, G, D)}
    return given | {"bias": some(B, H, M, N), "sink": torch.randn(H)}


def plain() -> dict[str, Any]:
    return {"q": some(B, M, H, D), "k": some(B, N, G, D), "v": some(B, N, G, D)}


def masked() -> dict[str, Any]:
    return plain() | {"causal": True, "alibi_slopes": torch.rand(B, H)}


def packed() -> dict[str, Any]:
    bounds = torch.tensor([0, 15, M], dtype=torch.int32)
    used = torch.tensor([9, 20], dtype=torch.int32)
    given = {"q": some(M, H, D), "k": some(M, G, D), "v": some(M, G, D)}
    given |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds.clone()}
    return given | {"max_seqlen_q": 25, "max_seqlen_k": 25, "seqused_k": used}


def paged() -> dict[str, Any]:
    given = {"q": some(B, 1, H, D), "k_cache": some(8, 16, G, D), "v_cache": some(8, 16, G, D)}
    given |= {"cache_seqlens": torch.tensor([20, 9], dtype=torch.int32)}
    return given | {"block_table": torch.randperm(8).view(B, 4).int()}


def appended() -> dict[str, Any]:
    given = paged() | {"k": some(B, 1, G, D), "v": some(B, 1, G, D), "causal": True}
    return given | {"rotary_cos": some(64, D // 2), "rotary_sin": some(64, D // 2)}


FUNCTIONS = {
    dense: heedful.flash_attn_func,
    plain: heedful.flash_attn_func,
    masked: heedful.flash_attn_func,
    packed: heedful.flash_attn_varlen_func,
    paged: heedful.flash_attn_with_kvcache,
    appended: heedful.flash_attn_with_kvcache,
}


def can_change(make, name: str, value, change: str) -> bool:
    if not isinstance(value, Tensor):
        return False
    if change == "grad":
        cache = FUNCTIONS[make] is heedful.flash_attn_with_kvcache
        return value.is_floating_point() and name != "alibi_slopes" and not cache
    if change == "address":
        return value.numel() > 1
    return value.dim() > 1 and name not in ("block_table", "rotary_cos", "rotary_sin")


PAIRS = [
    pytest.param(make, name, change, id=f"{make.__name__}-{name}-{change}")
    for make in FUNCTIONS
    for name, value in make().items()
    for change in CHANGES
    if can_change(make, name, value, change)
]


def told(make, given: dict[str, Any], gpu: standin.Gpu) -> list:
    """What the driver is told of a call and of its backward, addresses by tensor; and what comes
    back."""
    first = len(gpu.launches)
    results = FUNCTIONS[make](**given, backend="portable")
    results = results if isinstance(results, tuple) else (results,)
    if results[0].requires_grad:
        results[0].sum().backward()
    known = {t.data_ptr(): name for name, t in given.items() if isinstance(t, Tensor)}
    seen: list = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in results]
    for launch in gpu.launches[first:]:
        numbers = {n: v for n, v in launch.arguments.items() if n not in launch.memory}
        places = {n: known.get(p.address, "new") for n, p in launches.places(launch).items()}
        seen.append((launch.kernel, launch.grid, numbers, places, launch.constants, launch.options))
    return seen


@pytest.mark.parametrize("make, name, change", PAIRS)
def test_a_call_with_one_tensor_changed_is_launched_as_if_it_were_the_first(make, name, change):
    before = make()
    assert_independent(make, before, before | {name: CHANGES[change](before[name])})


class Onlooker(TorchDispatchMode):
    """Sees every operator, and changes nothing: calls go through torch's dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


THROUGH_DISPATCHER = [p for p in PAIRS if p.values[0] in (dense, packed)]


@pytest.mark.parametrize("make, name, change", THROUGH_DISPATCHER)
def test_so_it_is_of_operators(make, name, change):
    before = make()
    with Onlooker():
        assert_independent(make, before, before | {name: CHANGES[change](before[name])})


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (7, 5)},
    "scale": {"softmax_scale": 0.25},
    "softcap": {"softcap": 2.0},
    "softcap of an int": {"softcap": 2},
    "dropout": {"dropout_p": 0.25},
    "seed": {"dropout_p": 0.25, "dropout_seed": 5},
    "seed in a tensor": {"dropout_p": 0.25, "dropout_seed": torch.tensor([5])},
    "origin": {"dropout_p": 0.25, "dropout_seed": 5, "dropout_origin": (1, 2, 3, 4)},
    "lse": {"return_lse": True},
    "probabilities": {"return_attn_probs": True},
    "splits": {"num_splits": 3},
    "out": {"out": torch.empty(B, M, H, D, dtype=DTYPE)},
    "strided out": {"out": strided(torch.empty(B, M, H, D, dtype=DTYPE))},
    "unaligned out": {"out": unaligned(torch.empty(B, M, H, D, dtype=DTYPE))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_with_one_option_changed_is_launched_as_if_it_were_the_first(name):
    before = plain()
    assert_independent(plain, before, before | OPTIONS[name])


def assert_independent(make, before: dict, after: dict) -> None:
    """AssertionError unless each call is launched alike, whichever of them came before it."""
    with standin.gpu() as gpu:
        alone = []
        for given in (before, after):
            CALLS.clear()
            alone.append(told(make, given, gpu))
        for order in ((0, 1, 0, 1), (1, 0, 1)):
            CALLS.clear()
            for index in order:
                again = told(make, (before, after)[index], gpu)
                assert again == alone[index]


@pytest.mark.parametrize("change", [None, strided, unaligned])
def test_outputs_of_one_layout_are_bound_once(change, monkeypatch):
    """Wherever they lie."""
    given: dict[str, Any] = plain() | {"backend": "portable"}

    def out():
        made = torch.empty(B, M, H, D, dtype=DTYPE)
        return change(made) if change else made

    outs = [out() for _ in range(4)]
    with standin.gpu():
        # The first call keeps nothing.
        for first in outs[:2]:
            heedful.flash_attn_func(**given, out=first)

        def refuse(*_, **__):
            raise AssertionError("bound again")

        monkeypatch.setattr(backends.Case, "bind", refuse)
        for again in outs[2:]:
            assert heedful.flash_attn_func(**given, out=again) is again
        for _ in range(2):
            heedful.flash_attn_func(**given)
        with pytest.raises(AssertionError, match="bound again"):
            heedful.flash_attn_func(**given)


@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_tensors_as_far_from_a_multiple_of_16_are_one_call_wherever_they_lie(names):
    given = plain()
    made: list[dict[str, Any]] = [
        given | {name: unaligned(given[name]) for name in names} for _ in range(5)
    ]
    with standin.gpu():
        CALLS.clear()
        for again in made:
            heedful.flash_attn_func(**again)
        assert len(CALLS) == 1


@pytest.mark.parametrize("change", [None, strided, unaligned])
def test_a_step_that_writes_binds_its_attention_once(change, monkeypatch):
    """Before it writes, for the very output that it is given."""
    bound = []
    bind = execute.Case.bind

    def noted(*given):
        bound.append(given)
        return bind(*given)

    monkeypatch.setattr(execute.Case, "bind", noted)
    out = torch.empty(B, 1, H, D, dtype=DTYPE)
    with standin.gpu() as gpu:
        given: dict[str, Any] = appended() | {"out": change(out) if change else out}
        for _ in range(3):
            heedful.flash_attn_with_kvcache(**given, backend="portable")
    assert len(bound) == 1
    wrote = launches.the(gpu.launches[-2:], "forward")
    assert launches.places(wrote)["out"].address == given["out"].data_ptr()


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_the_backward_of_a_compiled_call_draws_with_the_seed_of_its_forward(as_tensor):
    """One graph, and one known call, for all seeds."""
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))

    def call(seed):
        return heedful.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=seed)

    compiled = torch.compile(call, backend="aot_eager")
    for number in (3, 4, 3, 2**40 + 3):
        seed = torch.tensor([number]) if as_tensor else number
        results = []
        for function in (call, compiled):
            out = function(seed)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph)
