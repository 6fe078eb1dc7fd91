"""A GPT over two ranks learns what it learns on one: losses differ as those of other packing
orders do, and two planted faults are seen."""

from heedful.demo.model import ModelSize
from support.distributed.training import Run, check
from support.runs.ranks import Ranks


def test_losses_over_ranks_are_those_of_one_and_faults_are_not(tmp_path):
    ranks = Ranks(2, tmp_path)
    try:
        check(ranks, Run(ModelSize(3, 4, 8, 0, 2), documents=4, longest=64, steps=8, every=2))
    finally:
        ranks.close()
