"""Mixed batches on a GPU: each kernel's sequences within the error budget, and no row of both."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful.torch as heedful
from heedful.core.registry.by_hand import forced
from heedful.torch.base.device import toolchain
from support.captures import graph_capture
from support.hopper.device import ON_HOPPER
from support.problems.budget import run
from support.problems.cases import FRESH, MIXED, Case
from support.problems.served import replayed, served
from support.runs.prepared import Prepared

pytestmark = ON_HOPPER
# The Hopper decode wants Triton 3.9.
PORTABLE = forced("mixed/portable")
BACKENDS = (PORTABLE, "hopper_mixed") if (toolchain().triton or ()) >= (3, 9) else (PORTABLE,)

CASES = (
    MIXED,
    replace(MIXED, dtype="float16", num_splits=1),
    replace(MIXED, page_size=64, sink=True, softcap=3.0),
    replace(MIXED, page_size=48, window=(300, 0), alibi="bh"),
    replace(MIXED, window=(90, 4, 30), causal=False, used="q"),
    replace(MIXED, head_dim=64, heads_q=4, heads_k=4),
    replace(MIXED, head_dim=256, heads_q=16),
    replace(MIXED, head_dim=192, head_dim_v=128, layout="heads_first"),
    replace(MIXED, heads_q=34, heads_k=2),
    replace(MIXED, heads_q=64, heads_k=1, num_splits=1),
    replace(MIXED, page_size=0, varlen="qk", used="qk", leftpad_k=True),
    replace(MIXED, page_size=0, used="k", kv_batch_idx=True),
    # One kernel has all. Storage behind what is used may be longer than the longest sequence.
    replace(MIXED, batch=1, heads_q=3, heads_k=1, lens_q=(1,), lens_k=(193,), seqlen_q=1, used="q"),
    replace(MIXED, batch=3, lens_q=(1, 16, 4), lens_k=(2500, 3, 600), seqlen_q=16),
    replace(MIXED, batch=2, lens_q=(700, 17), lens_k=(700, 2500)),
)
# More than there are SMs, and than a program looks at at once.
MANY = replace(
    MIXED,
    batch=600,
    lens_q=(1,) * 299 + (200,) + (1,) * 299 + (90,),
    lens_k=(),
    seqlen_q=200,
    seqlen_k=250,
)


def takes(backend: str, case: Case) -> bool:
    """The Hopper decode knows of scores no more than the mask and a scale."""
    return backend == PORTABLE or not (case.softcap or case.alibi)


def kernels(some: Sequence[Case]) -> list[tuple[str, Case]]:
    return [(backend, case) for backend in BACKENDS for case in some if takes(backend, case)]


@pytest.mark.parametrize(("backend", "case"), kernels(CASES), ids=str)
def test_a_mixed_batch_is_within_its_error_budget(backend, case):
    run(Prepared(backend), case, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_six_hundred_sequences_are_within_the_error_budget(backend):
    run(Prepared(backend), MANY, "cuda")


def variants(count: int) -> list[Case]:
    """Cases that differ in what the kernels are compiled for."""
    rng, found = random.Random(FRESH), {}
    while len(found) < count:
        dim = rng.choice((64, 128, 128, 256))
        case = replace(
            MIXED,
            lens_q=(),
            lens_k=(),
            head_dim=dim,
            dtype=rng.choice(("bfloat16", "float16")),
            causal=rng.random() < 0.7,
            window=rng.choice(((-1, -1), (-1, -1), (200, 0), (90, 4, 30))),
            softcap=rng.choice((0.0, 0.0, 8.0)),
            alibi=rng.choice(("", "", "bh")),
            sink=rng.random() < 0.3,
            used=rng.choice(("", "q")),
            page_size=rng.choice((16, 64)),
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


@pytest.mark.parametrize(("backend", "variant"), kernels(VARIANTS[:8]), ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_a_random_batch_is_within_its_error_budget(backend, variant, data):
    run(Prepared(backend), data.draw(problems(variant)), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "variant"), kernels(VARIANTS[8:]), ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_a_thousand_random_batches_are_within_their_error_budgets(backend, variant, data):
    run(Prepared(backend), data.draw(problems(variant)), "cuda")


def alone(call: dict[str, Any], first: int, last: int, backend: str):
    """The rows of sequences [first, last) in a call, and what a call of their own makes of them."""
    bounds = call["cu_seqlens_q"][first : last + 1]
    rows = slice(int(bounds[0]), int(bounds[-1]))
    part = {
        "q": call["q"][rows],
        "cu_seqlens_q": bounds - bounds[0],
        "max_seqlen_q": int(bounds.diff().max()),
        "block_table": call["block_table"][first:last],
        "seqused_k": call["seqused_k"][first:last],
        "backend": backend,
    }
    return rows, *heedful.flash_attn_varlen_func(**{**call, **part})


def test_a_served_batch_is_shared_unasked():
    call = served([1] * 20 + [500, 300], [1600] * 20 + [500, 1600], 1600, 512)
    words = heedful.explain(heedful.flash_attn_varlen_func, **call)
    assert f"forward   mixed/{'hopper' if len(BACKENDS) == 2 else 'portable'} " in words
    out, lse = heedful.flash_attn_varlen_func(**call)
    named = heedful.flash_attn_varlen_func(**call, backend=BACKENDS[-1])
    assert torch.equal(out, named[0]) and torch.equal(lse, named[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_one_split_each_half_has_the_bits_of_a_call_of_its_own(backend):
    """Whatever the other half is."""
    lens_q, lens_k = [1, 300, 1, 4, 1, 512], [1600, 300, 7, 900, 0, 1600]
    call = {**served(lens_q, lens_k, 1600, 512), "num_splits": 1}
    out, lse = heedful.flash_attn_varlen_func(**call, backend=backend)
    short = forced("decode/portable") if backend == PORTABLE else "hopper_decode"
    for first, kernel in enumerate((short, "hopper", *[short] * 3, "hopper")):
        rows, own, own_lse = alone(call, first, first + 1, kernel)
        assert torch.equal(out[rows], own) and torch.equal(lse[:, rows], own_lse), first


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replayed_graph_shares_another_mix(backend):
    """And clears tokens that no sequence has any more."""
    mixes = (
        [1] * 6 + [400, 100],
        [400, 1, 1, 1, 1, 1, 1, 100],
        [16, 17, 1, 0, 0, 3, 2, 5],
        [1] * 8,
        [0] * 8,
        [500, 6, 0, 0, 0, 0, 0, 0],
    )
    call = served(mixes[0], [1600] * 8, 1600, 512, tokens=506)

    def step():
        return heedful.flash_attn_varlen_func(**call, backend=backend)

    for mix, out, lse in replayed(call, mixes, step):
        want, want_lse = step()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        whole, whole_lse = heedful.flash_attn_varlen_func(**call, backend="hopper")
        # Both are of what the same rows see, and nothing else is anywhere.
        assert torch.equal(lse.isfinite(), whole_lse.isfinite()) and not out.isnan().any()
        assert not out[sum(mix) :].any() and (lse[:, sum(mix) :] == -torch.inf).all()
        assert not whole[sum(mix) :].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_follows_a_mixed_batch_waits_for_both_kernels(backend):
    """One program has a long sequence when the few tiles of the other kernel are done. Driver
    580.159 waits by itself; of the kernel's own wait tests/compile/hopper/test_forward.py is."""
    call = {**served([1, 200], [60_000, 200], 60_000, 200), "num_splits": 1}
    want, _ = heedful.flash_attn_varlen_func(**call, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out, _ = heedful.flash_attn_varlen_func(**call, backend=backend)
        seen = out.clone()
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(seen, want)
