"""SDPA is used only where it is the same attention."""

import pytest

from heedful import cpu
from heedful.core.device import by_name
from heedful.core.plan import plan
from heedful.cpu import sdpa
from support.budget import run
from support.cases import Case, build, variants

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
OTHER = [
    Case(backward=False, causal=True),
    Case(backward=False, causal=True, seqlen_q=53, shift=1),
    *variants(
        PLAIN,
        backward=[True],
        return_probs=[True],
        window=[(3, 0)],
        softcap=[1.0],
        dropout_p=[0.1],
        alibi=["h"],
        bias=["k"],
        sink=[True],
        tree_mask=[True],
        varlen=["q", "k"],
        used=["k"],
        page_size=[4],
        leftpad_k=[True],
        kv_batch_idx=[True],
        head_dim_v=[8],
        dtype=["float8_e4m3fn"],
        kv_dtype=["int8"],
    ),
]


class WithTiledLse:
    """SDPA's output beside the tiled backend's log-sum-exp."""

    @staticmethod
    def forward(problem, x, out):
        made, lse, probs = sdpa.forward(problem, x, out)
        assert lse is None and probs is None
        return made, cpu.forward(problem, x)[1], None

    backward = staticmethod(cpu.backward)


@pytest.mark.parametrize("case", SAME, ids=str)
def test_what_it_takes_is_within_budget(case):
    run(WithTiledLse(), case)


@pytest.mark.parametrize("case", SAME, ids=str)
def test_the_planner_may_choose_it_where_it_is_the_same(case):
    assert plan(build(case).problem, by_name("CPU")).backend == "sdpa"


@pytest.mark.parametrize("case", OTHER, ids=str)
def test_the_planner_refuses_it_where_it_would_compute_something_else(case):
    with pytest.raises(ValueError, match="backend='sdpa' cannot run"):
        plan(build(case).problem, by_name("CPU"), backend="sdpa")
