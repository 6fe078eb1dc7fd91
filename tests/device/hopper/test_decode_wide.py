"""The Hopper decode of head dims above 256 on a GPU: its error budgets over all that its row
takes."""

import random
from dataclasses import replace
from itertools import islice

import pytest

from heedful.core.registry.by_hand import forced
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9
from support.problems.budget import run
from support.problems.cases import Case
from support.problems.variants import by_new_values, distinct
from support.runs.planned import sharing
from support.runs.prepared import Prepared

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]

WAY = forced("decode/wide")
MOST_ROWS = 32
PLAIN = Case(dtype="bfloat16", backward=False, seqlen_q=3, seqlen_k=603, heads_q=6, head_dim=512)
CASES = (
    PLAIN,
    replace(PLAIN, seqlen_q=16, heads_q=4),
    replace(PLAIN, causal=True, used="k", batch=5, dtype="float16"),
    replace(PLAIN, seqlen_q=8, heads_q=8, causal=True, sink=True),
    replace(PLAIN, window=(300, 0), used="k"),
    replace(PLAIN, window=(90, 5, 40), used="k", seqlen_q=7),
    replace(PLAIN, window=(90, 5, 40), used="k", seqlen_q=7, page_size=16, seqlen_k=3000),
    replace(PLAIN, page_size=48, batch=3, used="k"),
    replace(PLAIN, page_size=256, batch=3, used="qk", seqlen_q=10),
    replace(PLAIN, leftpad_k=True, kv_batch_idx=True, used="k", batch=3),
    replace(PLAIN, layout="heads_first"),
    replace(PLAIN, head_dim=320, page_size=16),
    replace(PLAIN, head_dim=264, head_dim_v=400),
    replace(PLAIN, varlen="q", used="k", batch=4, causal=True),
    replace(PLAIN, varlen="q", page_size=16, batch=9, causal=True, heads_q=8, seqlen_q=8),
    replace(PLAIN, varlen="q", page_size=64, batch=3, lens_q=(1, 0, 3), lens_k=(0, 7, 603)),
    replace(PLAIN, varlen="qk", used="q", batch=4, sink=True),
    replace(PLAIN, scale=3.0, seqlen_k=4096),
    replace(PLAIN, seqlen_q=9, seqlen_k=5, causal=True),
    replace(PLAIN, used="k", batch=9, lens_k=(0, 603, 0, 0, 7, 0, 300, 0, 0), sink=True),
    replace(PLAIN, used="qk", leftpad_k=True, batch=600, seqlen_k=70, seqlen_q=1, sink=True),
)


@pytest.mark.parametrize("num_splits", (0, 1, 3))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_decode_of_wide_heads_is_within_its_error_budget(case, num_splits):
    prepared = Prepared(WAY)
    run(prepared, replace(case, num_splits=num_splits), "cuda")
    assert prepared.plan.variant == "wide"


def _variant(rng: random.Random) -> Case:
    """A case that differs from others in what the kernel is compiled for."""
    varlen = rng.choice(("", "", "q", "qk"))
    paged = "k" not in varlen and rng.random() < 0.5
    return replace(
        PLAIN,
        head_dim=rng.choice((320, 512, 512)),
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


def _sized(rng: random.Random, variant: Case) -> Case:
    """A problem of up to 32 rows of a KV head."""
    group, heads_k = rng.choice((1, 2, 4, 5, 8)), rng.randint(1, 3)
    return replace(
        variant,
        batch=rng.randint(1, 6),
        heads_k=heads_k,
        heads_q=heads_k * group,
        seqlen_q=rng.randint(1, MOST_ROWS // group),
        seqlen_k=rng.randint(1, rng.choice((17, 300, 2500))),
        page_size=rng.choice((16, 48, 64, 256)) if variant.page_size else 0,
        num_splits=rng.choice((0, 0, 1, 4)),
        seed=rng.randint(0, 2**16),
    )


VARIANTS = list(islice(by_new_values(distinct(40, _variant)), 8))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_thousand_random_problems_are_within_their_error_budgets(variant):
    """8 x 125, which share a variant's kernels: to compile one takes some ten seconds."""
    for case in islice(sharing(lambda rng: _sized(rng, variant), WAY, str(variant)), 125):
        run(Prepared(WAY), case, "cuda")
