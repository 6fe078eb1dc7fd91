"""q_offset places the diagonal of masks and ALiBi, whatever the lengths are."""

from itertools import product
from typing import Any

import jax
import pytest
import torch
from jax import numpy as jnp

import heedful.jax as jax_heedful
import heedful.torch as typed
from heedful.torch import attention_backward, explain
from support.problems.budget import check
from support.problems.cases import Case, build
from support.problems.grids import in_turns, slow_but
from support.runs import jax_api, standin
from support.runs.api import compiled, dense, results

# What is passed here is more than the signatures say.
heedful: Any = typed

MASKS = {
    "causal": {"causal": True},
    "window": {"window": (9, 4), "sink": True},
    "first keys": {"window": (6, 0, 5)},
    "ALiBi": {"alibi": "h", "causal": True},
    "ALiBi of all keys": {"alibi": "h"},
}
LENGTHS = {"dense": {}, "used": {"used": "qk"}, "packed": {"varlen": "qk"}}


@pytest.mark.parametrize(
    "kind, offset", in_turns(product(LENGTHS, MASKS), (-5, 0, 30), each=4), ids=str
)
def test_it_places_the_diagonal(kind, offset):
    lengths, name = kind
    facts = {"bottom_right": False, "shift": offset, **MASKS[name], **LENGTHS[lengths]}
    built = build(Case(seqlen_q=21, seqlen_k=30, heads_q=4, head_dim=16, **facts))
    check(built, results(built))
    check(built, jax_api.results(built))


@pytest.mark.parametrize("name, lengths", in_turns(MASKS, LENGTHS, each=2))
def test_each_sequence_has_its_own(name, lengths):
    facts = {"q_offsets": True, **MASKS[name], **LENGTHS[lengths]}
    built = build(Case(batch=3, seqlen_q=21, seqlen_k=30, heads_q=4, head_dim=16, **facts))
    check(built, results(built))
    check(built, jax_api.results(built))


def test_one_of_each_sequence_is_that_of_calls_apart():
    """Packed and dense, eager and compiled."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(3, n, heads, 16) for n, heads in ((10, 4), (24, 2), (24, 2)))
    offsets, more = torch.tensor([2, 14, -3]), {"causal": True, "window_size": (9, 0)}
    apart = [
        heedful.flash_attn_func(q[b : b + 1], k[b : b + 1], v[b : b + 1], q_offset=o, **more)
        for b, o in enumerate(offsets.tolist())
    ]

    def dense_call(q, k, v, offsets):
        return heedful.flash_attn_func(q, k, v, q_offset=offsets, **more)

    for call in (dense_call, compiled(dense_call)):
        torch.testing.assert_close(call(q, k, v, offsets), torch.cat(apart))
    bounds = [torch.arange(4, dtype=torch.int32) * n for n in (10, 24)]
    packed = heedful.flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in (q, k, v)), *bounds, 10, 24, q_offset=offsets, **more
    )
    torch.testing.assert_close(packed, torch.cat(apart).flatten(0, 1))


def test_jax_traces_it():
    q, k, v = (jnp.asarray(t.numpy()) for t in dense())

    def call(offset):
        return jax_heedful.flash_attn_func(q, k, v, causal=True, q_offset=offset)

    wanted = call(2)
    assert (jax.jit(call)(jnp.int32(2)) == wanted).all()
    assert (jax.jit(call)(jnp.array([2, 2])) == wanted).all()
    many = jax.vmap(call)(jnp.array([[2, 2], [0, 5]]))
    assert (many[0] == wanted).all() and (many[1] == call(jnp.array([0, 5]))).all()


@pytest.mark.parametrize("way", slow_but({"eager"}, ["eager", "compiled"]))
def test_chunks_of_a_prompt_give_the_whole(way):
    """Each chunk has its keys, and keys after it that it does not see."""
    q, k, v = (torch.randn(1, 24, heads, 16, dtype=torch.float64).float() for heads in (4, 2, 2))
    window: dict[str, Any] = {"causal": True, "window_size": (11, 0)}

    def chunk(q, k, v, begin):
        return heedful.flash_attn_func(q, k, v, q_offset=begin, **window)

    run = compiled(chunk) if way == "compiled" else chunk
    whole = heedful.flash_attn_func(q, k, v, **window)
    for begin in (0, 7, 16):
        part = slice(begin, begin + 8)
        torch.testing.assert_close(run(q[:, part], k, v, begin), whole[:, part])


def test_gradients_without_autograd_have_it():
    q, k, v = (tensor.requires_grad_() for tensor in dense())
    more: dict[str, Any] = {"causal": True, "q_offset": 1}
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True, **more)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), dout)
    found = attention_backward(dout, q.detach(), k.detach(), v.detach(), out, lse, **more)
    for got, wanted in zip(found, want, strict=False):
        assert torch.equal(got, wanted)


def test_what_it_may_be():
    tensors = dense()
    two = (heedful.flash_attn_func(*tensors, causal=True, q_offset=o) for o in (2, torch.tensor(2)))
    assert torch.equal(*two)
    # Nine queries, twelve keys.
    assert torch.equal(
        heedful.flash_attn_func(*tensors, causal=True),
        heedful.flash_attn_func(*tensors, causal=True, q_offset=3),
    )
    for wrong in (1.0, True, (1,)):
        with pytest.raises(TypeError, match="q_offset must be an int, None or an int32 array"):
            heedful.flash_attn_func(*tensors, causal=True, q_offset=wrong)
    for wrong, error in ((torch.tensor([1, 2, 3]), ValueError), (torch.ones(2), TypeError)):
        with pytest.raises(error, match="q_offset must"):
            heedful.flash_attn_func(*tensors, causal=True, q_offset=wrong)
    with pytest.raises(ValueError, match="q_offset must hold values from"):
        heedful.flash_attn_func(*tensors, causal=True, q_offset=torch.tensor([0, 2**29]))
    for far in (-(2**29), 2**29):
        with pytest.raises(ValueError, match="q_offset must be between"):
            heedful.flash_attn_func(*tensors, causal=True, q_offset=far)


def test_without_a_diagonal_it_asks_nothing_of_kernels():
    q, k, v = dense()
    assert "shift" not in explain(heedful.flash_attn_func, q, k, v, q_offset=4)
    assert "shift=4" in explain(heedful.flash_attn_func, q, k, v, q_offset=4, causal=True)
    offsets = torch.tensor([4, 5])
    assert "q_offsets" in explain(heedful.flash_attn_func, q, k, v, q_offset=offsets, causal=True)
    slopes = torch.ones(4)
    assert "shift=4" in explain(heedful.flash_attn_func, q, k, v, q_offset=4, alibi_slopes=slopes)


def test_kernels_get_each_calls_offset():
    """Also those of known calls."""
    with standin.gpu("H200") as gpu:
        q, k, v = (torch.randn(1, 300, 2, 64, dtype=torch.bfloat16) for _ in range(3))
        given = [5, -7, 5, 0, -7]
        for offset in given:
            heedful.flash_attn_func(q, k, v, causal=True, q_offset=offset)
        found = [launch.arguments["params.mask.shift"] for launch in gpu.launches]
        first = gpu.launches[-1]
        of_each = torch.tensor([3, 1], dtype=torch.int32)
        q, k, v = (t.expand(2, -1, -1, -1).contiguous() for t in (q, k, v))
        for kept in (of_each, of_each.clone()):
            heedful.flash_attn_func(q, k, v, causal=True, q_offset=kept)
            assert gpu.launches[-1].arguments["params.mask.offsets"] == kept.data_ptr()
    assert "params.mask.offsets" not in first.arguments
    assert found == given
