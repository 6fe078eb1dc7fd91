"""The largest scores: of rows and heads, beside other results, in eager and traced calls."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import heedful.torch as heedful
from support.problems.cases import Case, build
from support.problems.largest import check_largest
from support.runs import api
from support.runs.api import compiled

BASE = Case(dtype="float32", seqlen_q=150, seqlen_k=170, heads_q=4, heads_k=2, head_dim=16)
CASES = [
    BASE,
    replace(BASE, causal=True, sink=True, dtype="bfloat16"),
    replace(BASE, window=(30, 5), softcap=3.0, seqlen_k=100),
    replace(BASE, alibi="bh", causal=True),
    replace(BASE, bias="hqk", dropout_p=0.3),
    replace(BASE, seqlen_q=700, seqlen_k=600, varlen="qk", used="qk"),
    replace(BASE, key_ranges=2, ranges_of="bh"),
    replace(BASE, block_mask=32, ranges_of="h", causal=True),
    replace(BASE, seqlen_q=5, seqlen_k=9, num_splits=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_scores_of_rows_and_heads_are_those_of_the_oracle(case):
    built = build(replace(case, backward=False))
    leaves = api._leaves(built)
    out, lse, rows = api.call(built, leaves, return_max_logits="rows")
    check_largest(built, rows)
    same, same_lse, of_heads = api.call(built, leaves, return_max_logits=True)
    assert torch.equal(of_heads, rows.amax([d for d in range(rows.dim()) if d != rows.dim() - 2]))
    want, want_lse = api.call(built, leaves)
    assert all(torch.equal(want, x) for x in (out, same))
    assert all(torch.equal(want_lse, x) for x in (lse, same_lse))


def qkv(batch=2, rows=40, keys=50) -> Any:
    return torch.randn(batch, rows, 3, 8), *torch.randn(2, batch, keys, 3, 8).unbind(0)


@pytest.mark.parametrize("asked", [True, "rows"])
def test_compiled_and_mapped_calls_return_them_too(asked):
    q, k, v = qkv()

    def attend(q, k, v):
        return heedful.flash_attn_func(q, k, v, causal=True, return_max_logits=asked)

    want = attend(q, k, v)
    for x, y in zip(compiled(attend)(q, k, v), want, strict=True):
        assert torch.equal(x, y)
    out, largest = torch.func.vmap(attend)(*(x[:, None] for x in (q, k, v)))
    assert torch.equal(out[:, 0], want[0])
    whole = largest.amax(0) if asked is True else largest[:, 0]
    assert torch.equal(whole, want[1])


def test_they_have_no_gradient_and_the_output_keeps_its_own():
    q, k, v = (x.requires_grad_() for x in qkv())
    out, lse, largest = heedful.flash_attn_func(q, k, v, return_lse=True, return_max_logits=True)
    assert out.requires_grad and lse.requires_grad and not largest.requires_grad
    got = torch.autograd.grad(out.sum(), (q, k, v))
    want = torch.autograd.grad(heedful.flash_attn_func(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("batch, rows, keys", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_where_no_key_is_seen_they_are_minus_infinity(batch, rows, keys):
    _, of_heads = heedful.flash_attn_func(*qkv(batch, rows, keys), return_max_logits=True)
    assert of_heads.tolist() == [-math.inf] * 3
    _, of_rows = heedful.flash_attn_func(*qkv(batch, rows, keys), return_max_logits="rows")
    assert of_rows.shape == (batch, 3, rows) and bool((of_rows == -math.inf).all())


@pytest.mark.parametrize("asked, error", [(3, TypeError), ("heads", ValueError)])
def test_other_words_are_refused_by_name(asked: Any, error):
    with pytest.raises(error, match="return_max_logits must be a bool"):
        heedful.flash_attn_func(*qkv(), return_max_logits=asked)
    with pytest.raises(ValueError, match="return_attn_probs must be False with return_max_logits"):
        heedful.flash_attn_func(*qkv(), return_attn_probs=True, return_max_logits=True)


class Asked:
    """What torch's AuxRequest asks for."""

    def __init__(self, lse: bool, max_scores: bool):
        self.lse, self.max_scores = lse, max_scores


def test_flex_attention_returns_what_is_asked_for():
    q, k, v = (x.transpose(1, 2) for x in qkv())
    scores = q @ k.mT * 8**-0.5
    for lse in (False, True):
        for largest in (False, True):
            out, aux = heedful.flex_attention(q, k, v, return_aux=Asked(lse, largest))
            assert (aux.lse is not None, aux.max_scores is not None) == (lse, largest)
            torch.testing.assert_close(out, torch.softmax(scores, -1) @ v)
            if largest:
                torch.testing.assert_close(aux.max_scores, scores.amax(-1))
