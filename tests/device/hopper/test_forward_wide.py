"""The Hopper forward of head dims above 256 against the float64 oracle: lengths around tile edges,
masks, storage, terms, splits, and random problems over all that its row takes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.core.registry.by_hand import forced
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9
from support.problems.budget import run
from support.problems.cases import Case, twins, variants
from support.problems.variants import problems, sample, wide
from support.runs.prepared import Prepared

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]

# A cluster of two programs, and programs by themselves.
WAYS = [forced("hopper/forward_wide"), forced("hopper/forward_wide+block_m=64")]
BASE = Case(dtype="bfloat16", head_dim=512, heads_q=4, heads_k=2, backward=False, num_splits=1)
LENGTHS = [(1, 1), (64, 128), (193, 127), (257, 129), (300, 1), (37, 700), (511, 513), (130, 2100)]
CASES = [
    replace(BASE, seqlen_q=sq, seqlen_k=sk, causal=causal)
    for sq, sk in LENGTHS
    for causal in (False, True)
] + variants(
    replace(BASE, seqlen_q=200, seqlen_k=333),
    head_dim=(264, 384),
    head_dim_v=(264, 320, 504),
    layout=("contiguous", "heads_first", "packed"),
    dtype=("float16",),
    window=((-1, 0), (0, 0), (40, 0), (64, 128), (300, -1), (40, -1, 4), (3, 60, 200)),
    bottom_right=(False,),
    shift=(250, -250),
    softcap=(3.0,),
    sink=(True,),
    scale=(8.0,),
    used=("q", "k", "qk"),
    leftpad_k=(True,),
    kv_batch_idx=(True,),
    num_splits=(0, 2, 7),
    heads_k=(1, 4),
    varlen=("q", "k", "qk"),
    page_size=(16, 48, 64, 256),
)
CASES += [
    *variants(
        replace(BASE, seqlen_q=150, seqlen_k=333, batch=3, causal=True, used="qk"),
        varlen=("q", "k", "qk"),
        page_size=(32,),
    ),
    replace(BASE, seqlen_q=150, seqlen_k=333, varlen="q", page_size=16, used="k", num_splits=3),
    replace(BASE, batch=40, heads_q=8, seqlen_q=400, seqlen_k=400, varlen="qk", causal=True),
    replace(BASE, seqlen_q=150, seqlen_k=1000, num_splits=3, used="q", sink=True, window=(60, 0)),
    replace(BASE, batch=4, heads_q=16, seqlen_q=700, seqlen_k=900, causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_within_its_error_budget(case):
    run(Prepared(WAYS[0]), case, "cuda")


@pytest.mark.parametrize("case", CASES[::6], ids=str)
def test_a_program_by_itself_is_within_its_error_budget(case):
    run(Prepared(WAYS[1]), case, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("case", set(twins(CASES, "float16")) - set(CASES), ids=str)
def test_a_case_in_float16_is_within_its_error_budget(case):
    run(Prepared(WAYS[0]), case, "cuda")


def _taken(variant: Case) -> Case:
    """The variant without what the row leaves to others."""
    return wide(variant, backward=False, lse_grad=False)


VARIANTS = list(
    {
        str(each): each
        for each in map(_taken, sample(60, seed=9, dtypes=("float16", "bfloat16")))
        if each.layout != "offset" and not (each.leftpad_k and each.page_size)
    }.values()
)[:25]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_a_thousand_random_problems_are_within_their_error_budgets(variant, data):
    def may_run(case: Case) -> bool:
        whole = case.page_size % 16 == 0 and not (case.page_size and case.leftpad_k)
        return bool(case.batch and case.seqlen_q and case.seqlen_k and whole)

    case = data.draw(problems(variant).filter(may_run))
    run(Prepared(WAYS[0]), replace(case, num_splits=case.num_splits or case.seed % 2), "cuda")


def test_twenty_runs_are_bit_equal():
    import heedful

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1000, 8, 512, device="cuda").bfloat16() for _ in range(3))
    outs = [heedful.flash_attn_func(q, k, v, causal=True, backend=WAYS[0]) for _ in range(20)]
    assert all(torch.equal(out, outs[0]) for out in outs)
