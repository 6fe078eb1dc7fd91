"""key_ranges on a GPU against the float64 oracle: the Hopper forward and the portable kernels, in
every storage, and in a captured graph whose masks change."""

from dataclasses import replace

import pytest
import torch

import heedful.torch as heedful
from support.hopper.device import ON_HOPPER
from support.problems.budget import check, run
from support.problems.cases import Case, build, variants
from support.runs import api
from support.runs.prepared import Prepared

pytestmark = ON_HOPPER

BASE = Case(dtype="bfloat16", head_dim=128, heads_q=4, heads_k=2, backward=False, key_ranges=1)
LONG = replace(BASE, seqlen_q=700, seqlen_k=900)
KINDS = [
    LONG,
    *variants(LONG, causal=[True], key_ranges=[2], head_dim=[64, 256], window=[(100, 60)]),
    replace(LONG, causal=True, varlen="qk", used="qk", seqlen_k=700, dtype="float16"),
    replace(LONG, causal=True, varlen="q", page_size=64, batch=3),
    replace(LONG, page_size=16, used="k", key_ranges=2, head_dim=64),
    replace(LONG, leftpad_k=True, ranges_of="bh", sink=True, softcap=3.0),
    replace(LONG, key_ranges=2, causal=True, ranges_of="h", bias="hqk"),
    replace(LONG, dropout_p=0.3, ranges_of="", alibi="h"),
    replace(LONG, num_splits=3, head_dim=64, seqlen_q=130),
    replace(LONG, key_ranges=2, window=(200, -1), varlen="qk", head_dim=64, heads_q=2),
]
SIZES = [{}, {"seqlen_q": 300, "seqlen_k": 129}, {"seqlen_q": 64, "seqlen_k": 1030}, {"batch": 5}]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_hopper_forward_is_within_its_budget(case):
    for seed, sizes in enumerate(SIZES):
        run(Prepared("hopper"), replace(case, **sizes, seed=case.seed + seed), "cuda")


GRADIENTS = [
    replace(LONG, backward=True, causal=True),
    replace(LONG, backward=True, key_ranges=2, ranges_of="bh", head_dim=64),
    replace(LONG, backward=True, causal=True, varlen="qk", used="q", seqlen_k=700),
    replace(LONG, backward=True, key_ranges=2, window=(90, 30), dtype="float16", batch=1),
    replace(LONG, backward=True, varlen="q", page_size=16, lse_grad=False),
]


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_portable_gradients_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES[:3]):
        run(Prepared("portable"), replace(case, **sizes, seed=case.seed + seed), "cuda")


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_of_public_calls_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES[:3]):
        built = build(replace(case, **sizes, seed=case.seed + seed), "cuda")
        check(built, api.results(built), "cuda")


def test_a_captured_call_reads_the_masks_of_its_replay():
    q, k, v = torch.randn(3, 1, 1000, 4, 128, device="cuda", dtype=torch.bfloat16).unbind(0)
    ranges = torch.zeros(1, 1, 1000, 2, dtype=torch.int32, device="cuda")

    def called():
        return heedful.flash_attn_func(q, k, v, causal=True, key_ranges=ranges)

    called()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = called()
    begin = torch.arange(1000, device="cuda", dtype=torch.int32) // 300 * 300
    for first in (begin, begin // 2, begin * 0):
        ranges[0, 0, :, 0], ranges[0, 0, :, 1] = first, 1000
        graph.replay()
        assert torch.equal(out, called())
        seen = torch.arange(1000, device="cuda") >= first[:, None]
        want = heedful.flash_attn_func(q, k, v, causal=True, bias=seen)
        torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)
