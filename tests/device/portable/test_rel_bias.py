"""Biases by relative position on a GPU: the portable kernels against the float64 oracle, and the
gradient bit for bit."""

from dataclasses import replace

import pytest
import torch

import heedful.torch as heedful
from support.problems.budget import check, run
from support.problems.cases import Case, build, variants
from support.runs import api
from support.runs.prepared import Prepared

pytestmark = pytest.mark.gpu

LONG = Case(dtype="bfloat16", head_dim=128, heads_q=4, heads_k=2, rel_bias=257)
LONG = replace(LONG, seqlen_q=640, seqlen_k=768)
KINDS = [
    LONG,
    *variants(LONG, causal=[True], rel_bias=[1, 2, 1000, 4000], head_dim=[64, 256]),
    *variants(LONG, dtype=["float32", "float16"], batch=[5], bottom_right=[False], shift=[-300]),
    replace(LONG, window=(100, 60), sink=True, softcap=3.0, dtype="float16"),
    replace(LONG, key_ranges=2, dropout_p=0.3, alibi="h", bias="k", seqlen_k=700),
    replace(LONG, layout="offset", head_dim=40, head_dim_v=72, used="qk", leftpad_k=True),
    replace(LONG, varlen="qk", used="q", batch=7, causal=True),
    replace(LONG, block_mask=128, num_splits=3, backward=False),
    replace(LONG, varlen="q", page_size=16, used="k", sink=True),
]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_portable_kernels_are_within_their_budget(case):
    run(Prepared("portable"), case, "cuda")
    run(Prepared("portable"), replace(case, seqlen_q=129, seqlen_k=31, seed=1), "cuda")


@pytest.mark.parametrize("case", [KINDS[1], KINDS[-3], KINDS[-1]], ids=str)
def test_public_calls_are_within_their_budget(case):
    built = build(case, "cuda")
    check(built, api.results(built), "cuda")


def test_the_gradient_is_equal_bit_for_bit_from_run_to_run():
    q, k, v = torch.randn(3, 9, 700, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    rel_bias = torch.randn(4, 257, device="cuda", requires_grad=True)
    runs = []
    for _ in range(5):
        out = heedful.flash_attn_func(q, k, v, rel_bias=rel_bias)
        runs.append(torch.autograd.grad(out, rel_bias, torch.ones_like(out))[0])
    assert all(torch.equal(run, runs[0]) for run in runs[1:])
