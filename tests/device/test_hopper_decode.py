"""The Hopper decode on a GPU: its error budgets. What both decodes promise is in test_decode.py."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.budget import run
from support.cases import Case
from support.hopper import ON_HOPPER, WITH_TRITON_3_9
from support.prepared import Prepared
from support.variants import distinct

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
    paged = rng.random() < 0.5
    return replace(
        PLAIN,
        head_dim=rng.choice((64, 128, 128, 192, 256)),
        dtype=rng.choice(("bfloat16", "bfloat16", "float16")),
        causal=rng.random() < 0.5,
        window=rng.choice(((-1, -1), (-1, -1), (200, 0), (90, 4, 30))),
        sink=rng.random() < 0.3,
        used=rng.choice(("", "k", "k", "qk")),
        page_size=16 if paged else 0,
        kv_batch_idx=not paged and rng.random() < 0.3,
        leftpad_k=not paged and rng.random() < 0.3,
        layout=rng.choice(("contiguous", "contiguous", "heads_first")),
    )


@st.composite
def problems(draw, variant: Case) -> Case:
    """A problem of up to 64 rows of a KV head, lengths of 0 and 1 among them."""
    group = draw(st.sampled_from((1, 2, 4, 5, 8)))
    heads_k = draw(st.integers(1, 3))
    longest = draw(st.sampled_from((1, 17, 300, 2500)))
    return replace(
        variant,
        batch=draw(st.integers(1, 6)),
        heads_k=heads_k,
        heads_q=heads_k * group,
        seqlen_q=draw(st.integers(1, 64 // group)),
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
