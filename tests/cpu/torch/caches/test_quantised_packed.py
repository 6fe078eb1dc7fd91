"""Packed queries over keys of few bits, packed or in pages: the public call agrees with the oracle,
and what it cannot have is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import explain, plan
from heedful.core.registry.by_hand import forced
from support.problems.budget import check
from support.problems.cases import Case, build
from support.problems.grids import in_turns
from support.runs import api

PACKED = Case(
    backward=False, dtype="bfloat16", batch=3, heads_q=6, head_dim=32, varlen="q", page_size=16
)
CASES = [
    replace(PACKED, kv_dtype=stored, **facts)
    for stored in ("float8_e4m3fn", "float8_e5m2", "int8", "int4")
    for facts in (
        {"causal": True},
        {"dtype": "float16", "kv_group": 16, "window": (20, 0)},
        {"varlen": "qk", "page_size": 0, "used": "qk", "sink": True},
        {"dtype": "float32", "varlen": "qk", "page_size": 0, "kv_group": 8},
    )
]
H200 = by_name("H200")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_queries_over_stored_keys_agree_with_the_oracle(case):
    built = build(case)
    check(built, api.results(built))


@pytest.mark.parametrize("case", in_turns(CASES[:3], each=3), ids=str)
def test_a_compiled_call_has_the_bits_of_an_eager_one(case):
    built = build(case)
    eager = api.call(built, {name: getattr(built.x, name) for name in "qkv"})
    leaves = {name: getattr(built.x, name) for name in "qkv"}
    traced = api.compiled(lambda: api.call(built, leaves))()
    assert all(torch.equal(*pair) for pair in zip(eager, traced, strict=True))


def call(**changes: Any) -> dict[str, Any]:
    """A packed call over pages of e4m3."""
    pages = torch.randn(4, 16, 2, 32).to(torch.float8_e4m3fn)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {
        "q": torch.randn(8, 4, 32, dtype=torch.bfloat16),
        **{"k": pages, "v": pages, "cu_seqlens_q": bounds, "cu_seqlens_k": None},
        **{"max_seqlen_q": 5, "max_seqlen_k": 32},
        "block_table": torch.arange(4, dtype=torch.int32).view(2, 2),
        "seqused_k": torch.tensor([20, 32], dtype=torch.int32),
    }
    return {**given, **changes}


def test_a_sign_in_a_descale_is_the_values():
    descale = torch.tensor([[-0.5, 2.0], [1.0, -3.0]])
    given = call(k_descale=descale, v_descale=-descale)
    out = heedful.flash_attn_varlen_func(**given)
    ones = torch.ones(2, 2)
    signed = call(q=given["q"] * 0, k=given["k"], v=given["v"], k_descale=ones, v_descale=-descale)
    uniform = heedful.flash_attn_varlen_func(**signed)
    assert not torch.equal(out, uniform) and out.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.randn(8, 4, 32, requires_grad=True)}, "k of float8_e4m3fn must have a q with"),
        ({"v": torch.randn(4, 16, 2, 32)}, "v must be float8_e4m3fn like k"),
        ({"q_descale": torch.ones(2, 2)}, "q_descale must be None without fp8 q, k and v"),
        ({"k_descale": torch.ones(2, 4)}, "k_descale must have shape"),
        ({"k_descale": torch.ones(4, 16, 2, 5)}, "k_descale must have groups that divide 32"),
    ],
    ids=lambda given: "" if isinstance(given, dict) else given,
)
def test_what_packed_calls_over_stored_keys_refuse(changes, words):
    with pytest.raises((TypeError, ValueError), match=words):
        heedful.flash_attn_varlen_func(**call(**changes))


def test_dense_calls_take_no_stored_keys():
    k = torch.randn(1, 9, 2, 32).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="k must be float32 like q, got float8_e4m3fn"):
        heedful.flash_attn_func(torch.randn(1, 9, 2, 32), k, k)


def served(**facts: Any) -> AttentionProblem:
    """Four prefills among 124 decodes over pages of e4m3."""
    asked = {"seqlen_q": 2048, "total_q": 4 * 2048 + 124, "page_size": 16, "used_k": True}
    asked |= {"causal": True, "kv_dtype": "float8_e4m3fn"} | facts
    return AttentionProblem.dense(128, asked.pop("seqlen_q"), 8192, 32, 8, **asked)


@pytest.mark.parametrize(
    ("facts", "label"),
    [
        ({}, "mixed/converting"),
        ({"total_q": 128 * 2048}, "hopper/converting"),
        ({"total_q": None}, "hopper/converting"),
        ({"seqlen_q": 1, "total_q": 128}, "decode/portable"),
        ({"seqlen_q": 32, "total_q": 128 * 32}, "decode/portable"),
        ({"seqlen_q": 33, "total_q": 128 * 33}, "hopper/converting"),
        ({"kv_dtype": "int8"}, "portable"),
        ({"kv_group": 64}, "portable"),
        ({"kv_dtype": "float8_e5m2"}, "portable"),
        ({"head_dim": 24}, "portable"),
        ({"page_size": 12}, "portable"),
    ],
    ids=str,
)
def test_rows_decide_which_kernel_has_stored_keys(facts, label):
    found = plan(served(**facts), H200)
    assert found.variant_of("forward").label == label
    assert f"forward   {label} [run]" in explain(found)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"kv_dtype": "int8"}, "KV of int8 beside bfloat16"),
        ({"kv_dtype": "bfloat16"}, "KV of bfloat16 beside bfloat16"),
        ({"kv_group": 64}, "a quantised cache with scales of groups: takes those of heads"),
        ({"head_dim": 24}, "head_dim 24: takes multiples of 16"),
        ({"dropout_p": 0.1}, "does not take dropout"),
        ({"bias": True}, "does not take additive bias"),
    ],
    ids=str,
)
def test_what_the_converting_forward_cannot_take_has_a_reason(facts, reason):
    with pytest.raises(ValueError, match=reason):
        plan(served(**facts), H200, backend=forced("hopper/converting"))
