"""The Hopper backward of head dims above 256 against the float64 oracle: lengths around tile edges,
masks, storage, terms, splits, rows far from 0, and random problems over all that its row takes."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from heedful.core.registry.by_hand import forced
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9
from support.problems.budget import run
from support.problems.cases import Case, twins, variants
from support.problems.variants import by_new_values, sample, sized, wide
from support.runs.planned import sharing
from support.runs.prepared import Prepared

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]

WAY = "hopper/halves"
BASE = Case(dtype="bfloat16", head_dim=512, heads_q=4, heads_k=2, num_splits=1)
LENGTHS = [(1, 1), (64, 128), (193, 127), (257, 129), (300, 1), (37, 700), (511, 513)]
CASES = [
    replace(BASE, seqlen_q=sq, seqlen_k=sk, causal=causal)
    for sq, sk in LENGTHS
    for causal in (False, True)
] + variants(
    replace(BASE, seqlen_q=200, seqlen_k=333),
    head_dim=(264, 384),
    head_dim_v=(264, 320, 504),
    layout=("contiguous", "heads_first", "packed"),
    window=((-1, 0), (0, 0), (40, 0), (64, 128), (300, -1)),
    bottom_right=(False,),
    shift=(250, -250),
    softcap=(3.0,),
    sink=(True,),
    lse_grad=(False,),
    scale=(8.0,),
    heads_k=(1, 4),
    varlen=("q", "k", "qk"),
)
CASES += [
    replace(BASE, seqlen_q=150, seqlen_k=333, batch=4, causal=True, varlen="qk"),
    replace(BASE, batch=40, heads_q=8, seqlen_q=400, seqlen_k=400, varlen="qk", causal=True),
    replace(BASE, batch=3, heads_q=8, heads_k=4, seqlen_q=300, seqlen_k=2100, causal=True),
    replace(BASE, seqlen_q=200, seqlen_k=333, scale=1000.0, causal=True),
]


def check(case: Case, way: str = WAY) -> None:
    prepared = Prepared(way)
    run(prepared, case, "cuda")
    assert prepared.plan.variant_of("backward").name == "halves"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_within_their_error_budget(case):
    check(case)


@pytest.mark.parametrize("case", CASES[::6], ids=str)
def test_gradients_of_visits_in_splits_are_within_their_error_budget(case):
    check(case, WAY + "+splits=3")


@pytest.mark.slow
@pytest.mark.parametrize("case", set(twins(CASES, "float16")) - set(CASES), ids=str)
def test_gradients_in_float16_are_within_their_error_budget(case):
    check(case)


def _taken(variant: Case) -> Case:
    """The variant without what the row leaves to others."""
    return wide(
        variant,
        backward=True,
        used="",
        page_size=0,
        num_splits=1,
        kv_batch_idx=False,
        leftpad_k=False,
    )


OFFERED = (
    each
    for each in map(_taken, sample(60, seed=9, dtypes=("float16", "bfloat16")))
    if each.layout != "offset" and len(each.window) < 3 and not each.q_offsets
)
VARIANTS = [
    replace(each, head_dim=320 if place % 2 else 512)
    for place, each in enumerate(islice(by_new_values(OFFERED), 8))
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_thousand_random_problems_are_within_their_error_budgets(variant):
    """8 x 125, which share a variant's kernels: to compile one takes some ten seconds."""
    for case in islice(sharing(lambda rng: sized(rng, variant), forced(WAY), str(variant)), 125):
        check(case)


def test_gradients_of_keys_are_the_same_bits_in_twenty_runs():
    """Only the order in which key tiles are added to dQ differs."""
    from heedful import flash_attn_func

    torch.manual_seed(0)
    made = []
    tensors = [torch.randn(2, 1000, 8, 512, device="cuda").bfloat16() for _ in range(4)]
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    for _ in range(20):
        out = flash_attn_func(q, k, v, causal=True, backend=forced(WAY))
        made.append(torch.autograd.grad(out, (k, v), tensors[3]))
    for dk, dv in made:
        assert torch.equal(dk, made[0][0]) and torch.equal(dv, made[0][1])
