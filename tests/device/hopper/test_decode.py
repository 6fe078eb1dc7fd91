"""The Hopper decode on a GPU: its error budgets, and calls of packed queries. What both decodes
promise is in portable/test_decode.py."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful.torch as heedful
from heedful.core.registry.by_hand import forced
from heedful.core.registry.gates import PACKED_ROWS
from heedful.core.registry.tiles import DECODE_ROWS
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9
from support.problems.budget import run
from support.problems.cases import Case
from support.problems.served import replayed, served
from support.problems.variants import distinct
from support.runs.prepared import Prepared

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]

PLAIN = Case(dtype="bfloat16", backward=False, seqlen_q=3, seqlen_k=603, heads_q=6, head_dim=128)
CASES = (
    PLAIN,
    replace(PLAIN, causal=True, used="k", batch=5, dtype="float16"),
    replace(PLAIN, seqlen_q=9, heads_q=8, causal=True, sink=True),
    replace(PLAIN, seqlen_q=16, heads_q=8, causal=True),
    replace(PLAIN, seqlen_q=12, heads_q=10, causal=True, window=(90, 0)),
    replace(PLAIN, window=(300, 0), used="k"),
    replace(PLAIN, window=(90, 5, 40), used="k", seqlen_q=7),
    replace(PLAIN, window=(90, 5, 40), used="k", seqlen_q=7, page_size=16, seqlen_k=3000),
    replace(PLAIN, page_size=48, batch=3, used="k"),
    replace(PLAIN, page_size=256, batch=3, used="qk"),
    replace(PLAIN, leftpad_k=True, kv_batch_idx=True, used="k", batch=3),
    replace(PLAIN, layout="heads_first"),
    replace(PLAIN, head_dim=64, page_size=16),
    replace(PLAIN, head_dim=256, page_size=16, used="k"),
    replace(PLAIN, head_dim=192, head_dim_v=128),
    replace(PLAIN, head_dim=96, head_dim_v=40),
    replace(PLAIN, head_dim=80, used="k", page_size=32),
    # Packed queries: sequences of none among them, and tokens of no sequence.
    replace(PLAIN, varlen="q", used="k", batch=4, causal=True),
    replace(PLAIN, varlen="q", page_size=16, batch=9, causal=True, heads_q=8, seqlen_q=16),
    replace(PLAIN, varlen="q", page_size=16, batch=5, causal=True, heads_q=8, seqlen_q=64),
    replace(PLAIN, varlen="q", page_size=64, batch=3, lens_q=(1, 0, 3), lens_k=(0, 7, 603)),
    replace(PLAIN, varlen="q", page_size=16, used="q", batch=300, seqlen_k=70, sink=True),
    replace(PLAIN, varlen="qk", used="q", batch=4, sink=True, head_dim=64),
    replace(PLAIN, varlen="qk", batch=7, window=(90, 5, 40), head_dim=256),
    # Scores so far apart that references rise by more than the threshold again and again.
    replace(PLAIN, scale=3.0, seqlen_k=4096),
    replace(PLAIN, scale=3.0, seqlen_k=4000, used="k", dtype="float16"),
    # Rows that see no key at all, and padded batches.
    replace(PLAIN, seqlen_q=9, seqlen_k=5, causal=True),
    replace(PLAIN, shift=-7, causal=True, seqlen_q=2),
    replace(PLAIN, used="k", batch=9, lens_k=(0, 603, 0, 0, 7, 0, 300, 0, 0), sink=True),
    replace(PLAIN, page_size=16, batch=5, lens_k=(90, 0, 0, 603, 0), seqlen_q=16, heads_q=8),
    replace(PLAIN, page_size=16, batch=3, lens_k=(0, 0, 0), seqlen_q=1),
    replace(PLAIN, used="qk", leftpad_k=True, batch=600, seqlen_k=70, seqlen_q=1, sink=True),
)


@pytest.mark.parametrize("backend", ("hopper_decode", "hopper_decode+merge=1"))
@pytest.mark.parametrize("num_splits", (0, 1, 3))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_hopper_decode_is_within_its_error_budget(case, num_splits, backend):
    run(Prepared(backend), replace(case, num_splits=num_splits), "cuda")


def _variant(rng: random.Random) -> Case:
    """A case that differs from others in what the kernel is compiled for."""
    varlen = rng.choice(("", "", "q", "qk"))
    paged = "k" not in varlen and rng.random() < 0.5
    return replace(
        PLAIN,
        head_dim=rng.choice((64, 128, 128, 192, 256)),
        dtype=rng.choice(("bfloat16", "bfloat16", "float16")),
        causal=rng.random() < 0.5,
        window=rng.choice(((-1, -1), (-1, -1), (200, 0), (90, 4, 30))),
        sink=rng.random() < 0.3,
        varlen=varlen,
        used=rng.choice(("", "k", "k", "qk")),
        page_size=16 if paged else 0,
        kv_batch_idx=not paged and "k" not in varlen and rng.random() < 0.3,
        leftpad_k=not paged and rng.random() < 0.3,
        layout=rng.choice(("contiguous", "contiguous", "heads_first")),
    )


@st.composite
def problems(draw, variant: Case) -> Case:
    """A problem of up to 64 rows of a KV head, 256 of packed queries, lengths of 0 and 1 among
    them."""
    group = draw(st.sampled_from((1, 2, 4, 5, 8)))
    heads_k = draw(st.integers(1, 3))
    longest = draw(st.sampled_from((1, 17, 300, 2500)))
    return replace(
        variant,
        batch=draw(st.integers(1, 6)),
        heads_k=heads_k,
        heads_q=heads_k * group,
        seqlen_q=draw(st.integers(1, (PACKED_ROWS if variant.varlen else DECODE_ROWS) // group)),
        seqlen_k=draw(st.integers(1, longest)),
        page_size=draw(st.sampled_from((16, 48, 64, 256))) if variant.page_size else 0,
        num_splits=draw(st.sampled_from((0, 0, 1, 4))),
        seed=draw(st.integers(0, 2**16)),
    )


VARIANTS = distinct(60, _variant)


@pytest.mark.parametrize("variant", VARIANTS[:10], ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_a_random_problem_is_within_its_error_budget(variant, data):
    run(Prepared("hopper_decode"), data.draw(problems(variant)), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[10:], ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_two_thousand_random_problems_are_within_their_error_budgets(variant, data):
    run(Prepared("hopper_decode"), data.draw(problems(variant)), "cuda")


def test_packed_steps_over_a_cache_run_it_unasked():
    call = served([1, 4, 0, 8], [1600, 3, 0, 77], 1600, 8)
    assert "forward   decode/hopper" in heedful.explain(heedful.flash_attn_varlen_func, **call)


@pytest.mark.parametrize("num_splits", (1, 4))
def test_packed_tokens_have_the_bits_of_a_call_that_is_not_packed(num_splits):
    """Where splits are given, whatever else is in the batch."""
    call = served([1] * 9, [9000, 1, 64, 700, 8999, 0, 129, 3000, 17], 9000, 1)
    out, lse = heedful.flash_attn_varlen_func(
        **call, num_splits=num_splits, backend="hopper_decode"
    )
    want, want_lse = heedful.flash_attn_with_kvcache(
        call["q"][:, None],
        call["k"],
        call["v"],
        cache_seqlens=call["seqused_k"],
        block_table=call["block_table"],
        causal=True,
        num_splits=num_splits,
        return_softmax_lse=True,
        backend="hopper_decode",
    )
    assert torch.equal(out, want[:, 0]) and torch.equal(lse, want_lse[:, :, 0].T)


@pytest.mark.parametrize("backend", ("hopper_decode", "hopper_decode+merge=1"))
def test_a_replayed_graph_has_other_packed_sequences(backend):
    """And clears tokens that no sequence has any more."""
    mixes = (
        [8, 1, 1, 4, 0, 2],
        [1] * 6,
        [0, 8, 0, 8, 8, 8],
        [0] * 6,
        [0, 0, 0, 0, 0, 1],
        [8, 7, 6, 5, 4, 3],
    )
    call = served(mixes[0], [5000] * 6, 5000, 8, tokens=40)

    def step(backend):
        return heedful.flash_attn_varlen_func(**call, backend=backend)

    for mix, out, lse in replayed(call, mixes, partial(step, forced(backend))):
        want, want_lse = step(forced(backend))
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        _, portable_lse = step(forced("decode/portable"))
        # Of what the same rows see.
        assert torch.equal(lse.isfinite(), portable_lse.isfinite()) and not out.isnan().any()
        assert not out[sum(mix) :].any() and (lse[:, sum(mix) :] == -torch.inf).all()


def test_packed_sequences_without_keys_need_no_page():
    call = served([1, 3, 1], [0, 0, 0], 16, 3)
    call["block_table"] = call["block_table"][:, :0]
    out, lse = heedful.flash_attn_varlen_func(**call, backend="hopper_decode")
    assert not out.any() and (lse == -torch.inf).all()
