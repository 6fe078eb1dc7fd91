"""Biases by relative position on a GPU: the Hopper forward against the float64 oracle."""

from dataclasses import replace

import pytest

from support.hopper.device import ON_HOPPER
from support.problems.budget import run
from support.problems.cases import Case, variants
from support.runs.prepared import Prepared

pytestmark = ON_HOPPER

BASE = Case(dtype="bfloat16", head_dim=128, heads_q=4, heads_k=2, backward=False, rel_bias=257)
LONG = replace(BASE, seqlen_q=700, seqlen_k=900)
KINDS = [
    LONG,
    *variants(LONG, causal=[True], rel_bias=[1, 2, 1000, 4000], head_dim=[64, 96, 192, 256]),
    *variants(LONG, window=[(100, 60), (100, -1, 30)], bottom_right=[False], shift=[-300]),
    replace(LONG, causal=True, varlen="qk", used="qk", seqlen_k=700, dtype="float16"),
    replace(LONG, causal=True, varlen="q", page_size=64, batch=3),
    replace(LONG, page_size=16, used="k", head_dim=64),
    replace(LONG, leftpad_k=True, sink=True, softcap=3.0),
    replace(LONG, key_ranges=2, causal=True, alibi="h"),
    replace(LONG, dropout_p=0.3, alibi="h", dtype="float16"),
    replace(LONG, num_splits=3, head_dim=64, seqlen_q=130),
    replace(LONG, heads_q=8, heads_k=1, seqlen_q=9),
]
SIZES = [{}, {"seqlen_q": 300, "seqlen_k": 129}, {"seqlen_q": 64, "seqlen_k": 1030}, {"batch": 5}]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_hopper_forward_is_within_its_budget(case):
    for seed, sizes in enumerate(SIZES):
        run(Prepared("hopper"), replace(case, **sizes, seed=case.seed + seed), "cuda")
