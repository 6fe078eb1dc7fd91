"""The Hopper forward over caches of e4m3, whose tiles it converts, within the error budget; and the
mixed batches whose long sequences it handles."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful.torch as heedful
from heedful.core.registry.by_hand import forced
from heedful.torch.base.device import toolchain
from support.hopper.device import ON_HOPPER
from support.problems.budget import run
from support.problems.cases import FRESH, MIXED, Case
from support.problems.served import replayed, served
from support.runs.prepared import Prepared

pytestmark = [
    *ON_HOPPER,
    pytest.mark.skipif((toolchain().triton or ()) < (3, 9), reason="needs Triton 3.9"),
]
CONVERTING, PAIR = forced("hopper/converting"), forced("mixed/converting")
E4M3 = replace(MIXED, kv_dtype="float8_e4m3fn")
DENSE = replace(E4M3, batch=3, varlen="", page_size=0, lens_q=(), lens_k=(), seqlen_q=300)
CASES = (
    E4M3,
    replace(E4M3, dtype="float16", num_splits=1),
    replace(E4M3, page_size=64, sink=True, softcap=3.0),
    replace(E4M3, page_size=48, window=(300, 0), alibi="bh"),
    replace(E4M3, window=(90, 4, 30), causal=False, used="q"),
    replace(E4M3, head_dim=64, heads_q=4, heads_k=4),
    replace(E4M3, head_dim=256, heads_q=16),
    replace(E4M3, head_dim=192, head_dim_v=128, layout="heads_first"),
    replace(E4M3, head_dim=16, head_dim_v=96, causal=False),
    replace(E4M3, page_size=0, varlen="qk", used="qk", leftpad_k=True),
    replace(E4M3, page_size=0, used="k", kv_batch_idx=True),
    replace(E4M3, batch=3, lens_q=(1, 16, 4), lens_k=(2500, 3, 600), seqlen_q=16),
    replace(E4M3, batch=2, lens_q=(700, 17), lens_k=(700, 2500)),
)
ALONE = (
    DENSE,
    replace(DENSE, causal=False, dtype="float16"),
    replace(DENSE, used="k", seqlen_q=37, num_splits=3),
    replace(DENSE, used="qk", seqlen_q=20, heads_q=16, head_dim=64),
    replace(DENSE, seqlen_q=9, head_dim=256, kv_batch_idx=True),
    replace(DENSE, page_size=32, seqlen_q=64, heads_q=2),
    replace(DENSE, seqlen_q=2500, window=(500, 0), sink=True),
)


@pytest.mark.parametrize("case", (*CASES, *ALONE), ids=str)
def test_queries_of_16_bits_over_e4m3_are_within_the_error_budget(case):
    run(Prepared(CONVERTING), case, "cuda")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mixed_batch_over_e4m3_is_within_the_error_budget(case):
    run(Prepared(PAIR), case, "cuda")


def variants(count: int) -> list[Case]:
    """Cases that differ in what the kernels are compiled for."""
    rng, found = random.Random(FRESH + 1), {}
    while len(found) < count:
        paged = rng.random() < 0.7
        case = replace(
            E4M3,
            lens_q=(),
            lens_k=(),
            head_dim=rng.choice((64, 128, 128, 256)),
            dtype=rng.choice(("bfloat16", "float16")),
            causal=rng.random() < 0.7,
            window=rng.choice(((-1, -1), (-1, -1), (200, 0), (90, 4, 30))),
            softcap=rng.choice((0.0, 0.0, 8.0)),
            alibi=rng.choice(("", "", "bh")),
            sink=rng.random() < 0.3,
            varlen=rng.choice(("q", "q", "qk", "")) if not paged else rng.choice(("q", "q", "")),
            used=rng.choice(("", "q")) if paged else rng.choice(("", "k", "qk")),
            page_size=rng.choice((16, 64)) if paged else 0,
        )
        found.setdefault(str(case), case)
    return list(found.values())


@st.composite
def problems(draw, variant: Case) -> Case:
    batch = draw(st.integers(1, 9))
    some = st.sampled_from((0, 1, 1, 2, 15, 16, 17, 33, 130, 400))
    lens_q = [draw(some) for _ in range(batch)]
    lens_q[draw(st.integers(0, batch - 1))] = longest = max(*lens_q, 1)
    heads_k = draw(st.integers(1, 3))
    return replace(
        variant,
        batch=batch,
        heads_k=heads_k,
        heads_q=heads_k * draw(st.sampled_from((1, 3, 4, 8, 40))),
        lens_q=tuple(lens_q),
        seqlen_q=longest,
        seqlen_k=draw(st.integers(1, draw(st.sampled_from((17, 300, 2500))))),
        num_splits=draw(st.sampled_from((0, 0, 1))),
        seed=draw(st.integers(0, 2**16)),
    )


VARIANTS = variants(40)


@pytest.mark.parametrize("variant", VARIANTS[:12], ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_a_random_problem_over_e4m3_is_within_its_error_budget(variant, data):
    run(Prepared(CONVERTING), data.draw(problems(variant)), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[12:], ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_many_random_problems_over_e4m3_are_within_their_error_budgets(variant, data):
    run(Prepared(CONVERTING), data.draw(problems(variant)), "cuda")


def stored(call: dict) -> dict:
    """The call over a cache of e4m3, with a scale for each head of each sequence."""
    scales = {
        f"{name}_descale": torch.rand(call["block_table"].shape[0], 2, device="cuda") + 0.5
        for name in "kv"
    }
    return {**call, **{name: call[name].to(torch.float8_e4m3fn) for name in "kv"}, **scales}


def test_a_served_batch_over_e4m3_is_shared_by_the_decode_and_the_forward():
    call = stored(served([1] * 20 + [500, 300], [1600] * 20 + [500, 1600], 1600, 512))
    words = heedful.explain(heedful.flash_attn_varlen_func, **call)
    assert "forward   mixed/converting " in words
    assert "up to 4 queries: decode.forward; longer ones: hopper.forward" in words
    out, lse = heedful.flash_attn_varlen_func(**call)
    named = heedful.flash_attn_varlen_func(**call, backend=PAIR)
    assert torch.equal(out, named[0]) and torch.equal(lse, named[1])


def test_the_sign_of_a_descale_is_that_of_what_it_scales():
    """Keys are negated as they are converted, and outputs as they are stored."""
    call = stored(served([300, 40], [1600, 900], 1600, 300))
    flipped = {**call, "k_descale": -call["k_descale"], "v_descale": -call["v_descale"]}
    for name in "kv":
        flipped[name] = (-call[name].float()).to(torch.float8_e4m3fn)
    results = (heedful.flash_attn_varlen_func(**own, backend=CONVERTING) for own in (call, flipped))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_keys_of_a_descale_of_zero_are_all_alike():
    call = stored(served([300], [1600], 1600, 300))
    call["k_descale"] = torch.zeros_like(call["k_descale"])
    out, lse = heedful.flash_attn_varlen_func(**call, backend=CONVERTING)
    seen = torch.arange(1301, 1601, device="cuda").float()
    assert torch.allclose(lse, seen.log().expand_as(lse)) and out.isfinite().all()


def test_a_replayed_graph_over_e4m3_converts_other_lengths():
    mixes = ([400, 1, 1, 100], [1, 1, 300, 200], [0] * 4, [16, 17, 1, 468])
    call = stored(served(mixes[0], [1600] * 4, 1600, 512, tokens=506))

    def step():
        return heedful.flash_attn_varlen_func(**call, backend=CONVERTING)

    for mix, out, lse in replayed(call, mixes, step):
        want, want_lse = step()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert not out.isnan().any() and not out[sum(mix) :].any()
