"""SDPA is used only where it is the same attention."""

from dataclasses import replace

import pytest
import torch

from heedful import cpu, explain, flash_attn_with_kvcache
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


@pytest.mark.parametrize("name", ["q", "k", "v", ""])
def test_calls_are_recorded_by_torch_where_all_rows_are_contiguous(name):
    built = build(LEARNT)
    x = built.x
    if name:
        turned = getattr(x, name).transpose(1, 3).contiguous().transpose(1, 3)
        x = x._replace(**{name: turned})
    assert sdpa.records(built.problem, x) == (not name)


def leaves(built) -> Operands:
    x = built.x
    return x._replace(**{name: getattr(x, name).clone().requires_grad_() for name in "qkv"})


@pytest.mark.parametrize("case", WITH_GRADIENTS[:4], ids=str)
def test_what_torch_records_has_the_bits_and_gradients_of_the_backend(case):
    built = build(case)
    x = leaves(built)
    out = sdpa.recorded(built.problem, x)
    want, lse, _ = sdpa.forward(built.problem, built.x)
    assert out is not None and lse is not None and torch.equal(out, want)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, x[:3], dout)
    wanted = sdpa.backward(built.problem, built.x, want, lse, dout)[:3]
    for mine, theirs in zip(grads, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("spoilt", ["far", "hidden NaN", "seen NaN", "zeros", ""])
def test_rows_that_torchs_gradients_are_not_exact_for_are_not_recorded(spoilt):
    """With fewer keys than a vector a row of zeros may be one of NaN; with more it is none."""
    built = build(replace(LEARNT, seqlen_k=3))
    x = leaves(built)
    with torch.no_grad():
        if spoilt == "far":
            x.q.fill_(3000.0)
            x.k.fill_(3000.0)
        if spoilt.endswith("NaN"):
            x.q[0, 0, 0] = torch.nan
        if spoilt == "seen NaN":
            x.k[:, 1:] = torch.nan
        if spoilt == "zeros":
            x.v.zero_()
    out = sdpa.recorded(built.problem, x)
    assert (out is None) == (spoilt not in ("zeros", ""))


def singles(**more) -> tuple[AttentionProblem, Operands]:
    built = build(replace(SINGLE, **more))
    return built.problem, built.x


@pytest.mark.parametrize("rows", [20, 40])
def test_a_step_of_no_sequence_has_results_of_none(rows):
    q, cache = torch.zeros(0, 1, 4, 16), torch.zeros(0, rows, 2, 16)[:, :20]
    lengths = torch.zeros(0, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, return_softmax_lse=True
    )
    assert out.shape == q.shape and lse.shape == (0, 4, 1)
    assert "forward   sdpa" in explain(
        flash_attn_with_kvcache, q, cache, cache, cache_seqlens=lengths
    )


@pytest.mark.parametrize("short", [1, sdpa.VECTORS - 1, sdpa.VECTORS])
@pytest.mark.parametrize("name", ["q", "k"])
def test_a_single_query_of_nan_is_nan_however_few_keys_it_has(name, short):
    problem, x = singles(batch=3, lens_k=(short, 300, 0))
    getattr(x, name)[0] = torch.nan
    given = torch.zeros_like(x.q)
    for out in (None, given):
        found, _, _ = sdpa.forward(problem, x, out)
        assert found[0].isnan().all() and not found[1:].isnan().any()
        assert not found[2].any() and (out is None or found is out)


def test_single_queries_ask_for_another_opinion_only_of_short_sequences(monkeypatch):
    """Rows of zeros may be rows of NaN, if they have fewer keys than a vector."""
    asked = []
    monkeypatch.setattr(sdpa, "_has_nan", lambda q, k: asked.append(k.shape[2]))
    problem, x = singles(batch=4, lens_k=(5, 300, 0, sdpa.VECTORS))
    sdpa.forward(problem, x)
    assert not asked
    sdpa.forward(problem, x._replace(v=torch.zeros_like(x.v)))
    assert asked == [5]


@pytest.mark.parametrize("layout", ["one piece", "gaps", "one sequence"])
def test_used_rows_are_views_of_the_first_of_each_sequence(layout):
    batch = 1 if layout == "one sequence" else 3
    memory = torch.randn(batch, 20, 2, 4)
    cache = memory[:, :16] if layout == "gaps" else memory
    lengths = [5, 0, 16][:batch]
    found = sdpa._used_rows(cache, lengths)
    assert len(found) == batch
    for b, (rows, length) in enumerate(zip(found, lengths, strict=True)):
        assert torch.equal(rows, cache[b : b + 1, :length].transpose(1, 2))
        assert rows.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


@pytest.mark.parametrize("keys", [1, 3, sdpa.VECTORS - 1])
def test_only_the_row_of_nan_among_few_keys_is_not_torchs_own(keys):
    built = build(replace(PLAIN, seqlen_k=keys))
    x = built.x._replace(q=built.x.q.clone())
    want = sdpa.forward(built.problem, x)[0]
    x.q[0, 3, 1] = torch.nan
    found = sdpa.forward(built.problem, x)[0]
    spoilt = torch.zeros(found.shape[:3], dtype=torch.bool)
    spoilt[0, 3, 1] = True
    assert found[spoilt].isnan().all() and torch.equal(found[~spoilt], want[~spoilt])
