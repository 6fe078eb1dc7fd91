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


INTO = [replace(case, deterministic=True) for case in CASES if not case.page_size]


@pytest.mark.parametrize("case", INTO, ids=str)
def test_gradients_written_into_rows_with_gaps_have_the_bits_of_others(case):
    built = build(case, "cuda")
    keywords: dict[str, Any] = keywords_of(built) | {"dlse": built.dlse}
    out, lse, *_ = api.call(built, api._leaves(replace(built, dout=None)))
    given: Any = (built.dout, *built.x[:3], out, lse)
    want: Any = heedful.attention_backward(*given, **keywords)
    wider = ((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 8) for x in built.x[:3])
    for shapes in [tuple(wider)] * 2:
        made = [x.new_full(s, torch.nan) for s, x in zip(shapes, built.x, strict=False)]
        into = [x[..., :-1, :-8] for x in made]
        got: Any = heedful.attention_backward(*given, **keywords, into=into)
        for place, grad, true in zip(into, got, want, strict=False):
            assert grad is place and torch.equal(place, true)
        # Nothing beside them is written.
        assert all(x[..., -1, :].isnan().all() and x[..., -8:].isnan().all() for x in made)
