"""The batches that context parallelism is timed on."""

import pytest

pytest.importorskip("torch")

from heedful.bench.parallel import cases, log_normal
from heedful.distributed.layouts import LAYOUTS


@pytest.mark.parametrize("ranks", [2, 4])
def test_batches_grow_with_the_ranks_and_their_names_say_how_much(ranks):
    found = {case.name: sum(case.lengths) for case in cases(ranks)}
    assert found["causal, 8192 a GPU"] == 8192 * ranks
    assert found[f"64 documents of {32 * ranks}k, seed 4"] == 32768 * ranks
    assert all(case.layout in LAYOUTS for case in cases(ranks))


def test_log_normal_lengths_fill_the_batch_and_are_the_same_again():
    found = log_normal(64, 65536, 1)
    assert sum(found) == 65536 and min(found) >= 1
    assert found == log_normal(64, 65536, 1) != log_normal(64, 65536, 2)
