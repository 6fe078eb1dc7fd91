"""The largest scores of rows and heads on a GPU: of the Hopper and the portable forward against the
float64 oracle. Other results have the bits of a call without them."""

from dataclasses import replace

import pytest
import torch

from heedful.core.registry.by_hand import forced
from support.hopper.device import ON_HOPPER
from support.problems.cases import Case, build
from support.problems.largest import check_largest
from support.runs import api

pytestmark = ON_HOPPER

BASE = Case(dtype="bfloat16", head_dim=128, heads_q=4, heads_k=2, backward=False)
LONG = replace(BASE, seqlen_q=500, seqlen_k=700)
KINDS = [
    LONG,
    replace(LONG, causal=True, sink=True),
    replace(LONG, causal=True, head_dim=64, dtype="float16"),
    replace(LONG, head_dim=256, window=(100, 60), softcap=3.0),
    replace(LONG, causal=True, varlen="qk", used="qk"),
    replace(LONG, varlen="q", page_size=64, batch=3),
    replace(LONG, causal=True, key_ranges=2, ranges_of="bh"),
    replace(LONG, head_dim=64, block_mask=128, ranges_of="h"),
    replace(LONG, bias="hqk"),
    replace(LONG, alibi="h", dropout_p=0.3, causal=True),
    replace(LONG, heads_q=8, heads_k=1, seqlen_q=9),
]


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_largest_scores_are_within_their_budget(case, backend):
    for seed, sizes in enumerate([{}, {"seqlen_k": 129}, {"batch": 5}]):
        built = build(replace(case, **sizes, seed=seed), "cuda")
        leaves, named = api._leaves(built), forced(backend)
        out, lse, rows = api.call(built, leaves, return_max_logits="rows", backend=named)
        check_largest(built, rows, "cuda")
        same, same_lse, of_heads = api.call(built, leaves, return_max_logits=True, backend=named)
        heads = [d for d in range(rows.dim()) if d != rows.dim() - 2]
        assert torch.equal(of_heads, rows.amax(heads))
        assert torch.equal(same, out) and torch.equal(same_lse, lse)
