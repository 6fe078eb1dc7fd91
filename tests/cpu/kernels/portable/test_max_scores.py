"""The portable forward stores the largest score of each row, run by Triton's interpreter in a
process of its own."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.registry.tiles import TileConfig
from support.problems.cases import Case, build
from support.problems.largest import check_largest
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.portable_programs import Interpreted

SMALL = Case(batch=1, dtype="float16", seqlen_q=40, seqlen_k=50, heads_q=2, heads_k=1, head_dim=16)
CASES = [
    SMALL,
    replace(SMALL, causal=True, sink=True, dtype="float32"),
    replace(SMALL, softcap=3.0, window=(9, 3)),
    replace(SMALL, bias="hqk", alibi="h"),
    replace(SMALL, varlen="qk", used="qk", batch=3, dropout_p=0.3),
    replace(SMALL, block_mask=32, ranges_of="h"),
    replace(SMALL, key_ranges=2, seqlen_k=70),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_scores_are_within_their_budget(case):
    built = build(replace(case, backward=False))
    problem = replace(built.problem, max_scores=True)
    out = torch.empty(problem.out_shape, dtype=getattr(torch, problem.out_dtype))
    check_largest(built, Interpreted(TileConfig(16, 16)).forward(problem, built.x, out)[2])


@starts_interpreter
def test_they_are_stored():
    pass_in_the_interpreter(__file__)
