"""What GPUs compute of their part of a batch is what the oracle computes of the whole."""

from dataclasses import replace

import pytest
import torch

from support.problems import budget
from support.problems.cases import build
from support.runs.context import CASES, computed
from support.runs.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WAYS = [("gather", "zigzag"), ("gather", "documents"), ("heads", "documents")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(torch.cuda.device_count(), tmp_path_factory.mktemp("ranks"), 120.0, "nccl")
    yield made
    made.close()


@pytest.mark.parametrize(("strategy", "layout"), WAYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dim", [64, 128])
def test_gpus_compute_what_the_oracle_does(ranks, name, dim, strategy, layout):
    case = replace(CASES[name], head_dim=dim, head_dim_v=dim, dtype="bfloat16")
    found, *_ = ranks.run(computed, case, strategy, layout, "cuda")
    budget.check(build(case), found)
