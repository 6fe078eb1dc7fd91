"""SDPA is used only where it is the same attention."""

from dataclasses import replace

import pytest
import torch

from heedful import cpu
from heedful.core.base.device import by_name
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.cpu import sdpa
from heedful.reference.convert import as_numpy
from support.problems.budget import Results, check, oracle_results, run
from support.problems.cases import Case, build, variants

PLAIN = Case(backward=False, heads_q=4)
SAME = [
    PLAIN,
    *variants(
        PLAIN,
        dtype=["float16", "bfloat16"],
        heads_k=[1, 4],
        scale=[-0.3],
        layout=["heads_first", "offset"],
        seqlen_q=[0, 300],
        seqlen_k=[0, 1],
        batch=[0],
    ),
    Case(backward=False, causal=True, seqlen_q=53),
    Case(backward=False, causal=True, bottom_right=False),
    Case(backward=False, causal=True, bottom_right=False, seqlen_q=80),
]
LEARNT = Case(heads_q=4, heads_k=4, lse_grad=False)
WITH_GRADIENTS = [
    LEARNT,
    *variants(
        LEARNT,
        dtype=["float16", "bfloat16"],
        scale=[-0.3],
        layout=["heads_first", "packed", "offset"],
        seqlen_q=[1, 300],
        seqlen_k=[1, 700],
        head_dim=[1, 128],
        lse_grad=[True],
        deterministic=[True],
    ),
    *variants(
        replace(LEARNT, causal=True, seqlen_q=53), dtype=["float16", "bfloat16"], lse_grad=[True]
    ),
    Case(causal=True, bottom_right=False, seqlen_q=80, lse_grad=False),
    Case(causal=True, seqlen_q=520, seqlen_k=520, head_dim=64, lse_grad=False),
]
SINGLE = Case(backward=False, seqlen_q=1, used="k", batch=5, heads_q=4, seqlen_k=300)
SINGLE_QUERIES = [
    SINGLE,
    *variants(
        SINGLE,
        dtype=["float16", "bfloat16"],
        heads_k=[1, 4],
        causal=[True],
        layout=["heads_first", "offset"],
        scale=[-0.3],
        seqlen_k=[1, 50],
        batch=[1],
        lens_k=[(0, 300, 1, 63, 64)],
    ),
]
OTHER = [
    Case(backward=False, causal=True),
    Case(backward=False, causal=True, seqlen_q=53, shift=1),
    Case(heads_q=4),
    Case(batch=0),
    Case(backward=False, used="k"),
    Case(used="k", seqlen_q=1),
    Case(backward=False, used="qk", seqlen_q=1),
    Case(backward=False, used="k", seqlen_q=1, causal=True, bottom_right=False),
    Case(backward=False, used="k", seqlen_q=1, page_size=4),
    *variants(
        PLAIN,
        return_probs=[True],
        window=[(3, 0)],
        softcap=[1.0],
        dropout_p=[0.1],
        alibi=["h"],
        bias=["k"],
        sink=[True],
        tree_mask=[True],
        varlen=["q", "k"],
        page_size=[4],
        leftpad_k=[True],
        kv_batch_idx=[True],
        head_dim_v=[8],
        dtype=["float8_e4m3fn"],
        kv_dtype=["int8"],
    ),
]


class WithTiledLse:
    """SDPA's output beside the tiled backend's log-sum-exp, where it returns none itself."""

    @staticmethod
    def forward(problem, x, out):
        made, lse, probs = sdpa.forward(problem, x, out)
        assert probs is None and (lse is not None) == (problem.needs_grad or problem.return_lse)
        return made, cpu.forward(problem, x)[1] if lse is None else lse, None

    backward = staticmethod(sdpa.backward)


SAME += WITH_GRADIENTS + SINGLE_QUERIES


@pytest.mark.parametrize("case", SAME, ids=str)
def test_what_it_takes_is_within_budget(case):
    run(WithTiledLse(), case)


@pytest.mark.parametrize("case", SAME, ids=str)
def test_the_planner_may_choose_it_where_it_is_the_same(case):
    made = plan(build(case).problem, by_name("CPU"))
    assert made.backend == "sdpa"
    assert not case.backward or made.backward == "sdpa"


@pytest.mark.parametrize("case", SINGLE_QUERIES, ids=str)
def test_the_log_sum_exp_of_single_queries_is_within_budget(case):
    built = build(case)
    problem = replace(built.problem, return_lse=True)
    want = oracle_results(built)
    got = sdpa.forward(problem, built.x)
    check(built, Results(*map(as_numpy, got)))
    assert got[1] is not None and want.lse.shape == got[1].shape


def test_single_queries_read_no_key_past_their_length_and_depend_on_no_neighbour():
    built = build(replace(SINGLE, lens_k=(7, 300, 0, 64, 130)))
    x, problem = built.x, built.problem
    want = sdpa.forward(problem, x)[0].clone()
    for b, length in enumerate((7, 300, 0, 64, 130)):
        x.k[b, length:] = torch.nan
        x.v[b, length:] = torch.nan
    assert torch.equal(sdpa.forward(problem, x)[0], want)
    one = x._replace(q=x.q[3:4], k=x.k[3:4], v=x.v[3:4], seqused_k=x.seqused_k[3:4])
    assert torch.equal(sdpa.forward(replace(problem, batch=1), one)[0], want[3:4])


@pytest.mark.parametrize("more", [0, 1])
def test_single_queries_are_for_threads_where_more_values_are_read_than_is_worth(more, monkeypatch):
    built, calls = build(replace(SINGLE, lens_k=(7, 300, 0, 64, 130))), []
    for_each = sdpa.for_each
    monkeypatch.setattr(sdpa, "for_each", lambda *given: calls.append(1) or for_each(*given))
    values = sum((7, 300, 0, 64, 130)) * built.problem.heads_q * built.problem.head_dim
    monkeypatch.setattr(sdpa, "WORTH_THREADS", values - more)
    sdpa.forward(built.problem, built.x)
    assert len(calls) == more


def test_gradients_of_scores_far_from_0_are_those_of_the_tiled_backend():
    """A float32 log-sum-exp of 1e6 has no room for the logarithm of three equal scores' sum."""
    q = torch.full((1, 1, 1, 8), 1000.0, requires_grad=True)
    k = torch.full((1, 3, 1, 8), 1000.0, requires_grad=True)
    v = torch.randn(1, 3, 1, 8, requires_grad=True)
    problem = AttentionProblem.dense(1, 1, 3, 1, 1, 8, dtype="float32", needs_grad=True)
    x = Operands(q.detach(), k.detach(), v.detach())
    out, lse, _ = sdpa.forward(problem, x)
    assert lse is not None
    dout = torch.randn_like(out)
    tiled = cpu.backward(problem, x, out, lse, dout)
    for mine, theirs in zip(sdpa.backward(problem, x, out, lse, dout)[:3], tiled[:3], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", OTHER, ids=str)
def test_the_planner_refuses_it_where_it_would_compute_something_else(case):
    with pytest.raises(ValueError, match="backend='sdpa' cannot run"):
        plan(build(case).problem, by_name("CPU"), backend="sdpa")
