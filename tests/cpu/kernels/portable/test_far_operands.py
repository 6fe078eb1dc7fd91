"""Every operand may reach past 2^31 elements, along each of its dims: the portable kernels find it
there, interpreted. The memory is reserved and hardly touched."""

import mmap
import sys
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

import heedful
from support.runs import standin
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

B, M, N, H, G, D = 2, 20, 24, 2, 2, 16
FAR = 2**31
attend: Any = heedful.flash_attn_func
attend_cache: Any = heedful.flash_attn_with_kvcache


def far(tensor: Tensor, dim: int) -> Tensor:
    """The same values, whose last index along a dim is more than 2^31 elements from the first."""
    step = -(-(FAR + 64) // (tensor.shape[dim] - 1) // 16) * 16
    dense = tensor.contiguous()
    # The other dims lie within a step.
    strides = [0] * tensor.dim()
    strides[dim], below = step, 1
    for axis in reversed(range(tensor.dim())):
        if axis != dim:
            strides[axis] = below
            below *= tensor.shape[axis]
    assert below <= step
    count = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, count * tensor.element_size(), flags=flags)
    moved = torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides)
    return moved.copy_(dense)


def given() -> dict[str, Tensor]:
    values = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(shape, generator=values).half()

    made = {"q": some(B, M, H, D), "k": some(B, N, G, D), "v": some(B, N, G, D)}
    made |= {"bias": some(B, H, M, N), "alibi_slopes": torch.rand(B, H, generator=values)}
    return made | {"dout": some(B, M, H, D)}


def results(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output and the gradients of a call on these."""
    call = {name: t for name, t in tensors.items() if name != "dout"}
    leaves = {n: t.requires_grad_() for n, t in call.items() if n in ("q", "k", "v", "bias")}
    with standin.gpu(interprets=True, tiles=(16, 16)):
        out = attend(**call, causal=True)
        grads = torch.autograd.grad(out, list(leaves.values()), tensors["dout"])
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@cache
def near_results() -> dict[str, Tensor]:
    return results(given())


# The dim along which each is far: once together along each that it has but the last of dense rows.
TOGETHER = [
    {"q": 0, "k": 1, "v": 2, "bias": 3, "dout": 0, "alibi_slopes": 0},
    {"q": 1, "k": 2, "v": 0, "bias": 0, "dout": 1},
    {"q": 2, "k": 0, "v": 1, "bias": 1, "dout": 2},
    {"bias": 2},
]


@interpreted
@pytest.mark.skipif(sys.platform != "linux", reason="memory that is reserved and not there")
@pytest.mark.parametrize("dims", TOGETHER, ids=str)
def test_a_call_and_its_gradients_are_those_of_operands_nearby(dims):
    tensors = given()
    for name, dim in dims.items():
        tensors[name] = far(tensors[name], dim)
    for result, got in results(tensors).items():
        assert torch.equal(got, near_results()[result]), result


def decode(backend: str, **changed: int) -> tuple[Tensor, ...]:
    """A token appended to paged caches and attended over: out, and what was appended."""
    values = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(shape, generator=values).half()

    made = {"q": some(B, 1, H, D), "k_cache": some(9, 4, G, D), "v_cache": some(9, 4, G, D)}
    made |= {"k": some(B, 1, G, D), "v": some(B, 1, G, D)}
    made |= {"block_table": torch.tensor([[8, 1, 3], [0, 7, 2]], dtype=torch.int32)}
    made |= {"cache_seqlens": torch.tensor([5, 9], dtype=torch.int32)}
    for name, dim in changed.items():
        made[name] = far(made[name], dim)
    with standin.gpu(interprets=True, tiles=(16, 16)):
        out = attend_cache(**made, causal=True, backend=backend)
    pages = [made[name][[1, 2], [1, 1]] for name in ("k_cache", "v_cache")]
    return out, *pages


@interpreted
@pytest.mark.skipif(sys.platform != "linux", reason="memory that is reserved and not there")
@pytest.mark.parametrize(
    "dims",
    [
        {"k_cache": 0, "v_cache": 1, "k": 0, "v": 2, "q": 0, "block_table": 0},
        {"k_cache": 2, "v_cache": 0, "k": 2, "v": 0, "q": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["decode", "portable"])
def test_pages_and_new_keys_are_found_and_written_far_away(backend, dims):
    for got, want in zip(decode(backend, **dims), decode(backend), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
