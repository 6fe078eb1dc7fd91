"""A GPT of 12 layers over two GPUs learns what it learns on one: losses differ as those of other
packing orders do, and two planted faults are seen."""

import pytest
import torch

from heedful.demo.model import ModelSize
from support.distributed.training import Run, check
from support.runs.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_losses_over_gpus_are_those_of_one_and_faults_are_not(tmp_path):
    ranks = Ranks(2, tmp_path, 120.0, "nccl")
    size = ModelSize(12, 4, 64, 0, 2)
    try:
        losses = check(ranks, Run(size, 12, 512, steps=200, every=20, device="cuda"))
        assert losses[-1] < losses[0] - 0.5
    finally:
        ranks.close()
