"""`attention_backward` on a GPU: every backend's gradients, known calls and captured ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import heedful.torch as heedful
from support.captures import graph_capture
from support.problems.budget import check
from support.problems.cases import Case, build, variants
from support.runs import api
from support.runs.gradients import keywords_of, results

pytestmark = pytest.mark.gpu

CASES = [
    *variants(
        Case(dtype="bfloat16", head_dim=64, heads_q=4, causal=True),
        lse_grad=[True, False],
        sink=[True],
        bias=["k"],
        dropout_p=[0.3],
        deterministic=[True],
        varlen=["qk"],
        layout=["heads_first"],
        dtype=["float16", "float32"],
        head_dim=[128, 256],
    ),
    Case(dtype="float16", head_dim=64, bias="bqk", bias_dtype="bool", causal=True),
    Case(dtype="float16", head_dim=64, varlen="qk", index_dtype="int64", batch=3, causal=True),
    *variants(
        Case(dtype="bfloat16", head_dim=64, used="qk", leftpad_k=True, causal=True, heads_q=4),
        used=["q", "k", ""],
        leftpad_k=[False],
        dtype=["float16"],
        head_dim=[128],
    ),
    Case(dtype="bfloat16", head_dim=64, sink=True, sink_dtype="bfloat16", causal=True),
    Case(dtype="float16", head_dim=64, varlen="qk", used="qk", batch=3, causal=True),
    Case(dtype="float16", head_dim=64, varlen="q", page_size=16, used="k", batch=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradients_are_the_oracles_the_first_time_and_the_second(case):
    built = build(case, "cuda")
    for _ in range(2):
        check(built, results(built), "cuda")


def test_a_captured_backward_computes_what_the_call_computes():
    built = build(Case(dtype="bfloat16", head_dim=64, causal=True, deterministic=True), "cuda")
    keywords: dict[str, Any] = keywords_of(built)
    out, lse, *_ = api.call(built, api._leaves(replace(built, dout=None)))
    assert built.dout is not None
    dout = built.dout

    def backward() -> Any:
        return heedful.attention_backward(dout, *built.x[:3], out, lse, **keywords)[:3]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backward()
        backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        got = backward()
    dout.copy_(torch.randn_like(dout))
    graph.replay()
    for one, other in zip(got, backward(), strict=True):
        assert torch.equal(one, other)
