"""The gradient of the log-sum-exp may lie in memory in any way: kernels take its strides.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.registry.tiles import TileConfig
from support.problems.budget import backend_results, check
from support.problems.cases import Case, build
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.portable_programs import Interpreted

TILES = TileConfig(16, 16)


@starts_interpreter
def test_checks_pass_in_the_interpreter():
    pass_in_the_interpreter(__file__)


@interpreted
@pytest.mark.parametrize("varlen", ["", "qk"])
def test_every_second_number_of_a_row_is_its_gradient(varlen):
    built = build(Case(seqlen_q=37, seqlen_k=29, causal=True, varlen=varlen))
    assert built.dlse is not None
    wide = torch.full((*built.dlse.shape, 2), torch.nan)
    spread = wide[..., 0].copy_(built.dlse)
    assert spread.stride(-1) == 2
    built = replace(built, dlse=spread)
    check(built, backend_results(Interpreted(TILES), built))
