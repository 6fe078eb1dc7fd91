"""key_ranges: the same rows by other means, whatever the entry, and through torch's transforms."""

import pytest
import torch
from torch.func import grad, vmap

import heedful.torch as heedful
from heedful.core.call.operands import Operands
from heedful.masks import Documents
from support.problems.budget import check
from support.problems.cases import Case, build
from support.runs import api

INT = torch.int32
FAR = 2**31 - 1


def shown(ranges: torch.Tensor, keys: int) -> torch.Tensor:
    """The mask (.., M, N) of key_ranges."""
    begin, end = ranges.unflatten(-1, (-1, 2))[..., None].unbind(-2)
    j = torch.arange(keys)
    return ((begin <= j) & (j < end)).any(-2)


def drawn(*shape: int, keys: int = 12) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(-2, keys + 3, shape, dtype=INT)


@pytest.mark.parametrize("shape", [(2, 1, 9, 2), (1, 4, 9, 4), (2, 4, 9, 2), (1, 1, 9, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_ranges_are_the_mask_that_they_say(shape, causal):
    q, k, v = api.dense()
    ranges = drawn(*shape)
    seen = shown(ranges, 12)
    got = heedful.flash_attn_func(q, k, v, causal=causal, key_ranges=ranges, return_lse=True)
    want = heedful.flash_attn_func(q, k, v, causal=causal, bias=seen, return_lse=True)
    torch.testing.assert_close(got, want)


def test_bad_ranges_show_what_is_left_of_them_and_rows_without_keys_are_empty():
    q, k, v = api.dense()
    pairs = [(-FAR - 1, 5), (3, FAR), (7, 2), (FAR, -FAR), (-9, -1), (40, 50), (0, 0), (11, 12)]
    ranges = torch.tensor([*pairs, (FAR, FAR)], dtype=INT).expand(1, 1, 9, 2)
    q.requires_grad_()
    out, lse = heedful.flash_attn_func(q, k, v, key_ranges=ranges, return_lse=True)
    empty = [2, 3, 4, 5, 6, 8]
    assert (out[:, empty] == 0).all() and (lse[:, :, empty] == -torch.inf).all()
    want = heedful.flash_attn_func(q[:, :1], k[:, :5], v[:, :5])
    torch.testing.assert_close(out[:, :1], want)
    out.sum().backward()
    assert (q.grad[:, empty] == 0).all() and q.grad.isfinite().all()


CASES = [
    Case(heads_q=4, key_ranges=2, ranges_of="bh"),
    Case(heads_q=4, key_ranges=1, varlen="qk", used="qk", causal=True),
    Case(heads_q=4, key_ranges=1, varlen="q", page_size=4, window=(20, 3)),
    Case(heads_q=4, key_ranges=2, leftpad_k=True, ranges_of="h"),
    Case(key_ranges=1, page_size=16, backward=False, used="k"),
    Case(key_ranges=2, kv_dtype="int8", kv_group=8, backward=False, causal=True),
    Case(key_ranges=1, kv_batch_idx=True, used="k", backward=False, sink=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_entry_is_within_its_budget(case):
    built = build(case)
    check(built, api.results(built))


def test_a_call_of_other_ranges_is_not_the_last_one():
    q, k, v = api.dense()
    first, second = drawn(2, 1, 9, 2), drawn(2, 1, 9, 2).flip(2).contiguous()
    for ranges in (first, second, first):
        got = heedful.flash_attn_func(q, k, v, key_ranges=ranges)
        torch.testing.assert_close(got, heedful.flash_attn_func(q, k, v, bias=shown(ranges, 12)))


def loss(q, k, v, ranges):
    return heedful.flash_attn_func(q, k, v, key_ranges=ranges).square().sum()


def test_compiled_code_takes_ranges_and_their_gradients():
    q, k, v = api.dense()
    ranges = drawn(2, 1, 9, 2)
    want = grad(loss, (0, 1, 2))(q, k, v, ranges)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    api.compiled(loss)(*leaves, Documents(ranges)).backward()
    torch.testing.assert_close(tuple(t.grad for t in leaves), want)


@pytest.mark.parametrize("dims", [(None, None, None, 0), (0, None, 0, 0), (0, 0, 0, None)])
def test_vmap_maps_the_mask_alone_or_with_others(dims):
    q, k, v = api.dense()
    ranges = drawn(2, 1, 9, 2)
    given = [
        torch.stack([t, t.flip(1), t]) if dim == 0 else t
        for t, dim in zip((q, k, v, ranges), dims, strict=True)
    ]
    got = vmap(grad(loss), dims)(*given)
    one = [[t[i] if d == 0 else t for t, d in zip(given, dims, strict=True)] for i in range(3)]
    torch.testing.assert_close(got, torch.stack([grad(loss)(*parts) for parts in one]))


def test_the_backward_by_hand_takes_ranges():
    q, k, v = api.dense()
    ranges = drawn(1, 4, 9, 4)
    out, lse = heedful.flash_attn_func(q, k, v, key_ranges=ranges, return_lse=True)
    got = heedful.attention_backward(out * 2, q, k, v, out, lse, key_ranges=ranges)
    want = grad(loss, (0, 1, 2))(q, k, v, ranges)
    torch.testing.assert_close(got[:3], want)


def test_ranges_whose_last_dim_is_not_contiguous_are_copied():
    q, k, v = api.dense()
    ranges = drawn(2, 1, 2, 9).transpose(2, 3)
    got = heedful.flash_attn_func(q, k, v, key_ranges=ranges)
    want = heedful.flash_attn_func(q, k, v, key_ranges=ranges.contiguous())
    assert torch.equal(got, want)


def test_every_operand_has_a_field_of_the_operator():
    schema = torch.ops.heedful.attention_v10.default._schema
    assert "key_ranges" in [a.name for a in schema.arguments] and "key_ranges" in Operands._fields
