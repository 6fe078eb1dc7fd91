"""A diagonal of each sequence on a GPU, against the float64 oracle: the Hopper kernels and the
portable ones, decodes, and in a captured graph whose offsets change."""

from dataclasses import replace

import pytest
import torch

import heedful.torch as heedful
from support.captures import graph_capture
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9
from support.problems.budget import run
from support.problems.cases import MIXED, Case
from support.runs.prepared import Prepared

pytestmark = ON_HOPPER

BASE = Case(dtype="bfloat16", heads_q=4, heads_k=2, backward=False, q_offsets=True, batch=3)
LONG = replace(BASE, head_dim=128, seqlen_q=700, seqlen_k=900, causal=True)
FORWARD = [
    LONG,
    replace(LONG, head_dim=64, varlen="qk", used="k", seqlen_k=700),
    replace(LONG, window=(100, 30, 20), sink=True, head_dim=64),
    replace(LONG, varlen="q", page_size=64, alibi="h"),
    replace(LONG, head_dim=256, varlen="qk", num_splits=1),
    replace(LONG, seqlen_q=130, num_splits=3, head_dim=64),
    replace(LONG, block_mask=128),
]
GRADIENTS = [
    replace(LONG, backward=True),
    replace(LONG, backward=True, varlen="qk", seqlen_k=700),
    replace(LONG, backward=True, head_dim=64, window=(90, 30), causal=False),
    replace(LONG, backward=True, deterministic=True, head_dim=64),
    replace(LONG, backward=True, head_dim=192, head_dim_v=128, varlen="qk"),
    replace(LONG, backward=True, head_dim=256),
    replace(LONG, backward=True, block_mask=128),
]
PORTABLE = [
    replace(LONG, backward=True, head_dim=64, alibi="h", varlen="qk"),
    replace(LONG, backward=True, head_dim=64, window=(90, 3, 9), used="qk"),
]
FEW = replace(LONG, seqlen_q=3, heads_q=8, batch=6, used="k", lens_k=(900, 0, 3, 77, 512, 40))
DECODES = [
    ("hopper_decode", FEW),
    ("hopper_decode", replace(FEW, window=(60, 0, 5), varlen="q", page_size=16, causal=False)),
    ("decode", replace(FEW, softcap=3.0, alibi="h")),
    ("mla", replace(FEW, head_dim=576, head_dim_v=512, heads_q=16, heads_k=1, v_in_k=True)),
]
LATENT = DECODES[-1][1]
STORED = replace(LATENT, kv_dtype="float8_e4m3fn", dtype="bfloat16")
PACKED = replace(MIXED, q_offsets=True, causal=True)
# Kernels that few calls reach, by name.
NAMED = [
    ("decode/mla_swap_ab", replace(LATENT, seqlen_q=1)),
    ("decode/mla_converting", STORED),
    ("decode/mla_converting_pair", replace(STORED, heads_q=64, page_size=64)),
    ("decode/wide", replace(FEW, head_dim=512)),
    ("mixed/hopper", PACKED),
    ("mixed/portable", replace(PACKED, softcap=3.0)),
    ("mixed/converting", replace(PACKED, kv_dtype="float8_e4m3fn")),
    ("hopper/converting", replace(PACKED, kv_dtype="float8_e4m3fn")),
    ("hopper/fp8", replace(LONG, dtype="float8_e4m3fn")),
    ("hopper/forward_wide", replace(LONG, head_dim=512)),
    ("hopper/halves", replace(LONG, head_dim=512, backward=True)),
]
# Runs of few and of many keys, by the same kernels.
SIZES = [{}, {"seqlen_k": 129, "batch": 5}]


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_the_hopper_forward_is_within_its_budget(case):
    for seed, sizes in enumerate(SIZES):
        run(Prepared("hopper"), replace(case, **sizes, seed=case.seed + seed), "cuda")


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_of_the_hopper_kernels_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES):
        runner = Prepared("hopper")
        run(runner, replace(case, **sizes, seed=case.seed + seed), "cuda")
        assert runner.plan.backward == "hopper"


@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_portable_kernels_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES):
        run(Prepared("portable"), replace(case, **sizes, seed=case.seed + seed), "cuda")


@pytest.mark.parametrize("backend, case", DECODES, ids=str)
def test_decodes_are_within_their_budget(backend, case):
    for seed in range(2):
        run(Prepared(backend), replace(case, seed=case.seed + seed), "cuda")


@WITH_TRITON_3_9
@pytest.mark.parametrize("name, case", NAMED)
def test_a_kernel_by_name_is_within_its_budget(name, case):
    for seed in range(2):
        prepared = Prepared(name)
        run(prepared, replace(case, seed=case.seed + seed), "cuda")
        chosen = prepared.plan.variant_of("backward" if case.backward else "forward")
        assert chosen.label == name


def test_a_captured_call_reads_the_offsets_of_its_replay():
    q, k, v = torch.randn(3, 2, 600, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    offsets = torch.zeros(2, dtype=torch.int32, device="cuda")

    def called():
        return heedful.flash_attn_func(q, k, v, causal=True, q_offset=offsets)

    called()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = called()
    for pair in ((0, -300), (200, 7), (-599, 599)):
        offsets.copy_(torch.tensor(pair))
        graph.replay()
        for b, offset in enumerate(pair):
            one = q[b : b + 1], k[b : b + 1], v[b : b + 1]
            want = heedful.flash_attn_func(*one, causal=True, q_offset=offset)
            assert torch.equal(out[b : b + 1], want)
