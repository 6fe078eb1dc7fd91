"""A call's place in a larger problem: shards draw the dropout mask that the whole call draws."""

from itertools import product
from typing import Any

import jax
import pytest
import torch
from jax import numpy as jnp

import heedful.jax as jax_heedful
import heedful.torch as typed
from heedful.core.call.operands import Operands
from support.problems.budget import check
from support.problems.cases import Case, build
from support.problems.grids import slow_but
from support.runs import jax_api, standin
from support.runs.api import compiled, dense, results

# What is passed here is more than the signatures say.
heedful: Any = typed
# Tokens and heads of q, k and v.
SIZES = ((10, 4), (24, 2), (24, 2))


def shards(tensors: Any, heads: int, group: int):
    """A call cut in two by batch, by heads and by rows, with where each part begins."""
    q, k, v = tensors
    half = heads // 2
    for b in range(2):
        yield (q[b : b + 1], k[b : b + 1], v[b : b + 1]), (b, 0, 0, 0), (slice(b, b + 1),)
    for h in (0, half):
        own = slice(h, h + half)
        kv = slice(h // group, (h + half) // group)
        yield (
            (q[:, :, own], k[:, :, kv], v[:, :, kv]),
            (0, h, 0, 0),
            (slice(None), slice(None), own),
        )
    for rows in (slice(0, 5), slice(5, None)):
        yield (q[:, rows], k, v), (0, 0, rows.start, 0), (slice(None), rows)


@pytest.mark.parametrize("way", slow_but({"eager"}, ["eager", "compiled"]))
def test_a_shard_draws_the_mask_that_the_whole_call_draws(way):
    """Output and gradient, up to the roundings of another tiling."""
    tensors = [tensor.requires_grad_() for tensor in dense()]
    keywords: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 11, "return_attn_probs": True}
    whole, _, whole_probs = heedful.flash_attn_func(*tensors, **keywords)
    (whole_dq,) = torch.autograd.grad(whole.sum(), tensors[:1])

    def attention(q, k, v, origin):
        return heedful.flash_attn_func(q, k, v, dropout_origin=origin, **keywords)

    run = compiled(attention) if way == "compiled" else attention
    # Each shape is a graph that compiles for seconds: one of each two alike is compiled.
    parts = [*shards(tensors, 4, 2)]
    for part, origin, place in parts[1::2] if way == "compiled" else parts:
        out, _, probs = run(*part, origin)
        (dq,) = torch.autograd.grad(out.sum(), tensors[:1])
        torch.testing.assert_close(out, whole[place])
        torch.testing.assert_close(dq[place], whole_dq[place])
        # The rows of probs are its third dim, its heads the second.
        b, rows, heads = (*place, slice(None), slice(None))[:3]
        assert torch.equal(probs.signbit(), whole_probs[b, heads, rows].signbit())


def test_a_shard_of_the_keys_draws_its_columns():
    q, k, v = dense()
    keywords: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 11, "return_attn_probs": True}
    *_, whole = heedful.flash_attn_func(q, k, v, **keywords)
    for begin in (0, 4, 7):
        part = k[:, begin:], v[:, begin:]
        *_, probs = heedful.flash_attn_func(q, *part, dropout_origin=(0, 0, 0, begin), **keywords)
        assert torch.equal(probs.signbit(), whole[..., begin:].signbit())


@pytest.mark.parametrize("origin", [(1, 2, 3, 4), (2**32 - 1, 2**32 - 2, 2**32 - 5, 2**32 - 7)])
@pytest.mark.parametrize("varlen", ["", "qk"])
def test_a_place_in_a_larger_problem_agrees_with_the_oracle(origin, varlen):
    case = Case(dropout_p=0.4, dropout_origin=origin, heads_q=4, causal=True, varlen=varlen)
    built = build(case)
    check(built, results(built, dropout_origin=origin))


LENGTHS = {"dense": {}, "used": {"used": "qk"}, "packed": {"varlen": "qk"}}


JAX_BY_DEFAULT = (4, "packed", "jax")


@pytest.mark.parametrize(
    "columns, lengths, way",
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row[2] == "jax" and row != JAX_BY_DEFAULT))
        for row in product((1, 4), LENGTHS, ("torch", "jax"))
    ],
)
def test_a_place_of_each_sequence_agrees_with_the_oracle(columns, lengths, way):
    facts: dict[str, Any] = {"origins": columns, "causal": True, **LENGTHS[lengths]}
    built = build(Case(dropout_p=0.4, heads_q=4, batch=3, **facts))
    check(built, (results if way == "torch" else jax_api.results)(built))


@pytest.mark.parametrize("way", slow_but({"eager"}, ("eager", "compiled")))
def test_a_place_of_each_sequence_is_that_of_calls_apart(way):
    """Packed and dense, with gradients; as a count of fours, and int64."""
    torch.manual_seed(1)
    tensors = [torch.randn(3, n, heads, 16, requires_grad=True) for n, heads in SIZES]
    rows, more = [(5, 0, 12, 8), (5, 2, 0, 4), (2**20, 1, 7, 0)], {"dropout_p": 0.4}
    more |= {"causal": True, "dropout_seed": 5}
    places, dout = torch.tensor(rows), torch.randn(3, 10, 4, 16)

    def found(call, *given):
        out = call(*tensors, *given).view(3, 10, 4, 16)
        return out, *torch.autograd.grad(out, tensors, dout)

    def apart(*qkv):
        parts = zip(*(t.split(1) for t in qkv), rows, strict=True)
        called = (heedful.flash_attn_func(*x, dropout_origin=o, **more) for *x, o in parts)
        return torch.cat([*called])

    def dense_call(q, k, v, places):
        return heedful.flash_attn_func(q, k, v, dropout_origin=places, **more)

    def packed_call(q, k, v, places):
        bounds = [torch.arange(4, dtype=torch.int32) * n for n in (10, 24)]
        flat = (t.flatten(0, 1) for t in (q, k, v))
        return heedful.flash_attn_varlen_func(*flat, *bounds, 10, 24, dropout_origin=places, **more)

    fours = heedful.Quads(places // torch.tensor([1, 1, 1, 4]))
    calls = (dense_call, packed_call) if way == "eager" else (compiled(dense_call),)
    for call in calls:
        for given in (places, places.int(), fours):
            for got, want in zip(found(call, given), found(apart), strict=True):
                torch.testing.assert_close(got, want)
    out, lse = heedful.flash_attn_func(*tensors, dropout_origin=fours, return_lse=True, **more)
    grads = heedful.attention_backward(
        dout,
        *(t.detach() for t in tensors),
        out.detach(),
        lse.detach(),
        dropout_origin=fours,
        **more,
    )
    for got, want in zip(grads, torch.autograd.grad(out, tensors, dout), strict=False):
        assert torch.equal(got, want)


def test_jax_traces_a_place_of_each_sequence():
    q, k, v = (jnp.asarray(t.detach().numpy()) for t in dense())
    places = jnp.array([(5, 0, 12, 8), (7, 1, 0, 4)])

    def call(places):
        more = {"dropout_p": 0.4, "dropout_seed": 5, "causal": True}
        return jax_heedful.flash_attn_func(q, k, v, dropout_origin=places, **more)

    want = call(places)
    fours = places // jnp.array([1, 1, 1, 4])
    assert (jax.jit(call)(places) == want).all()
    assert (jax.jit(lambda p: call(jax_heedful.Quads(p)))(fours) == want).all()


@pytest.mark.slow
def test_jax_maps_a_place_of_each_sequence():
    q, k, v = (jnp.asarray(t.detach().numpy()) for t in dense())
    places = jnp.array([[(5, 0, 12, 8), (7, 1, 0, 4)], [(2, 0, 1, 3), (7, 1, 0, 4)]])

    def call(places):
        more = {"dropout_p": 0.4, "dropout_seed": 5}
        return jax_heedful.flash_attn_func(q, k, v, dropout_origin=places, **more)

    many = jax.vmap(call)(places)
    assert (many[0] == call(places[0])).all() and (many[1] == call(places[1])).all()


@pytest.mark.parametrize(
    "wrong, kind, words",
    [
        (torch.zeros(3, 4, dtype=torch.int32), ValueError, r"must have shape \(batch, 4\)"),
        (torch.zeros(2, 3, dtype=torch.int32), ValueError, r"must have shape \(batch, 4\)"),
        (torch.zeros(2, 4), TypeError, "must be int32 or int64"),
        (torch.full((2, 4), -1), ValueError, "must hold values from 0"),
        (heedful.Quads(torch.zeros(4, dtype=torch.int32)), TypeError, "must be Quads of an array"),
        (heedful.Quads(3), TypeError, "must be Quads of an array"),
    ],
)
def test_a_wrong_place_of_each_sequence_is_named(wrong, kind, words):
    q, k, v = dense()
    with pytest.raises(kind, match=f"^dropout_origin {words}"):
        heedful.flash_attn_func(q, k, v, dropout_p=0.5, dropout_origin=wrong)


def test_places_of_sequences_run_on_hopper_if_their_columns_count_in_fours():
    pytest.importorskip("triton")
    q = torch.randn(2, 128, 4, 64).bfloat16()
    places, more = torch.zeros(2, 4, dtype=torch.int32), {"dropout_p": 0.5, "backend": "hopper"}
    with standin.gpu("H200"):
        call = heedful.flash_attn_func
        said = heedful.explain(call, q, q, q, dropout_origin=heedful.Quads(places), **more)
        assert "forward   hopper" in said
        with pytest.raises(ValueError, match="from a column that is no multiple of 4"):
            heedful.explain(call, q, q, q, dropout_origin=places, **more)


def test_a_place_without_dropout_is_no_other_problem():
    q, k, v = dense()
    texts = [
        heedful.explain(heedful.flash_attn_func, q, k, v, dropout_origin=origin, return_lse=True)
        for origin in ((0, 0, 0, 0), (1, 2, 3, 5))
    ]
    assert texts[0] == texts[1]
    x = Operands(q, k, v)
    assert torch.equal(
        heedful.flash_attn_func(*x[:3], dropout_origin=(1, 2, 3, 5)),
        heedful.flash_attn_func(q, k, v),
    )
    assert torch.equal(
        heedful.flash_attn_func(q, k, v, dropout_origin=torch.ones(2, 4, dtype=torch.int64)),
        heedful.flash_attn_func(q, k, v),
    )


def test_packed_forms_draw_from_their_place():
    q, *_ = dense()
    qkv = torch.stack([q, q, q], 2)
    keywords: dict[str, Any] = {
        "dropout_p": 0.5,
        "dropout_seed": 11,
        "dropout_origin": (0, 2, 0, 0),
    }
    want = heedful.flash_attn_func(q, q, q, **keywords)
    assert torch.equal(heedful.flash_attn_qkvpacked_func(qkv, **keywords), want)
    assert torch.equal(
        heedful.flash_attn_kvpacked_func(q, torch.stack([q, q], 2), **keywords), want
    )
