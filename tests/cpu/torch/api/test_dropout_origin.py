"""A call's place in a larger problem: shards draw the dropout mask that the whole call draws."""

from typing import Any

import pytest
import torch

import heedful.torch as typed
from heedful.core.call.operands import Operands
from support.problems.budget import check
from support.problems.cases import Case, build
from support.runs.api import compiled, dense, results

# What is passed here is more than the signatures say.
heedful: Any = typed


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


@pytest.mark.parametrize("way", ["eager", "compiled"])
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
