"""What context parallelism asks of calls, on a GPU: float32 results of 16-bit inputs, gradients of
keys that end before their storage does, merges in place, and places in a mask of dropout."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import heedful.torch as typed
from heedful.torch.api import merge
from support.captures import graph_capture
from support.hopper.device import ON_HOPPER
from support.problems.budget import run
from support.problems.cases import Case
from support.problems.merges import InPlace, assert_in_place
from support.runs.prepared import Prepared

heedful: Any = typed
pytestmark = ON_HOPPER

# Causal with a sink, packed with lengths in use, a window of a wide head, few rows of many heads.
CALLS = [
    (128, {"causal": True}, False),
    (64, {"causal": True}, True),
    (192, {"window_size": (300, 40)}, False),
    (256, {"num_splits": 1}, False),
]


@pytest.mark.parametrize("dim, options, packed", CALLS, ids=str)
def test_float32_results_are_those_of_16_bits_before_they_are_rounded(dim, options, packed):
    """Bit for bit, into rows of a larger tensor whose other columns stay."""
    torch.manual_seed(dim)
    rows = 40 if "num_splits" in options else 700
    tokens = (2 * rows,) if packed else (2, rows)
    q = torch.randn(*tokens, 8, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(*tokens, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    options = {**options, "return_lse": True, "sink": torch.randn(8, device="cuda")}

    def called(backend, out=None):
        more = {**options, "backend": backend, "out": out}
        if not packed:
            return heedful.flash_attn_func(q, k, v, **more)
        bounds = torch.tensor([0, 300, 2 * rows], dtype=torch.int32, device="cuda")
        used = torch.tensor([170, 1001], dtype=torch.int32, device="cuda")
        both = (bounds, bounds, 2 * rows - 300, 2 * rows - 300)
        return heedful.flash_attn_varlen_func(q, k, v, *both, seqused_q=used, **more)

    rounded, lse = called("hopper")
    room = torch.full((*tokens, 9, dim + 8), torch.nan, device="cuda")
    exact, exact_lse = called("hopper", room[..., :8, :dim])
    assert exact.dtype == torch.float32 and torch.equal(exact.bfloat16(), rounded)
    assert torch.equal(exact_lse, lse) and not torch.equal(exact, rounded.float())
    assert room[..., 8, :].isnan().all() and room[..., dim:].isnan().all()


BASE = Case(dtype="bfloat16", heads_q=4, heads_k=2, batch=3, seqlen_q=700, seqlen_k=900)
GRADIENTS = [
    replace(BASE, head_dim=128, used="k", causal=True),
    replace(BASE, head_dim=128, used="k", leftpad_k=True, deterministic=True),
    replace(BASE, head_dim=64, used="k", leftpad_k=True, window=(90, 30)),
    replace(BASE, head_dim=64, varlen="qk", used="qk", causal=True, sink=True),
    replace(BASE, head_dim=192, head_dim_v=128, used="k", causal=True),
    replace(BASE, head_dim=256, used="k", leftpad_k=True),
    replace(BASE, head_dim=128, used="k", key_ranges=2),
    replace(BASE, head_dim=128, used="k", block_mask=128, causal=True),
]
# Runs of few and of many keys, by the same kernels.
SIZES = [{}, {"seqlen_k": 129, "batch": 5}]


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_of_lengths_in_use_are_within_their_budget(case):
    """What is not in use holds NaN, and gets zeros."""
    for seed, sizes in enumerate(SIZES):
        runner = Prepared("hopper")
        run(runner, replace(case, **sizes, seed=case.seed + seed), "cuda")
        assert runner.plan.backward == "hopper"


def test_visits_of_keys_in_use_are_split_and_added():
    case = replace(BASE, head_dim=128, used="k", leftpad_k=True, batch=1, seqlen_k=200)
    run(Prepared("hopper+splits=3"), case, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["kernel", "torch"])
def test_sixteen_merges_in_place_are_within_the_budget(traced, dtype, monkeypatch):
    """By the kernel, and by torch's operations, which a traced call takes. Rows without keys hold
    NaN, and rows before those of the parts stay as they are."""

    def draw(seed: int) -> InPlace:
        values = torch.Generator("cuda").manual_seed(seed)
        outs = torch.randn(16, 900, 8, 128, device="cuda", generator=values).to(dtype)
        lses = 5 * torch.randn(16, 8, 900, device="cuda", generator=values)
        lses[1, :, ::3] = -torch.inf
        outs[1, ::3] = torch.nan
        empty = torch.zeros(905, 8, 128, device="cuda")
        parts = [(5, out, lse) for out, lse in zip(outs, lses, strict=True)]
        return InPlace(empty, torch.full((8, 905), -torch.inf, device="cuda"), parts)

    if traced:
        monkeypatch.setattr(merge, "needs_dispatcher", lambda *_: True)
    merges = draw(0)
    for begin, part, part_lse in merges.parts:
        heedful.merge_into(merges.out, merges.lse, part, part_lse, begin=begin)
    assert_in_place(draw, merges.out, merges.lse)
    assert not merges.out[:5].any() and (merges.lse[:, :5] == -torch.inf).all()


DRAWN = replace(BASE, origins=4, dropout_p=0.3, head_dim=128)
PLACES = [
    ("hopper", replace(DRAWN, causal=True)),
    ("hopper", replace(DRAWN, varlen="qk", head_dim=64)),
    ("hopper", replace(DRAWN, varlen="qk", causal=True, sink=True, used="k")),
    ("hopper", replace(DRAWN, head_dim=256, causal=True)),
    ("hopper", replace(DRAWN, head_dim=256, varlen="qk")),
    ("portable", replace(DRAWN, varlen="qk", head_dim=64)),
    ("portable", replace(DRAWN, origins=1, causal=True, head_dim=64)),
]


@pytest.mark.parametrize("backend, case", PLACES, ids=str)
def test_a_place_in_the_mask_of_each_sequence_agrees_with_the_oracle(backend, case):
    for seed, sizes in enumerate(SIZES):
        runner = Prepared(backend)
        run(runner, replace(case, **sizes, seed=case.seed + seed), "cuda")
        assert runner.plan.backward == backend


def test_a_captured_call_reads_the_places_of_its_replay():
    q, k, v = torch.randn(3, 2, 600, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    places = torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    more: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": 7, "backend": "hopper"}

    def called():
        return heedful.flash_attn_func(q, k, v, dropout_origin=heedful.Quads(places), **more)

    called()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = called()
    for rows in ([(3, 0, 128, 5), (0, 2, 0, 0)], [(1, 1, 7, 32), (9, 0, 0, 3)]):
        places.copy_(torch.tensor(rows))
        graph.replay()
        for b, (*place, column) in enumerate(rows):
            one = q[b : b + 1], k[b : b + 1], v[b : b + 1]
            want = heedful.flash_attn_func(*one, dropout_origin=(*place, 4 * column), **more)
            assert torch.equal(out[b : b + 1], want)
