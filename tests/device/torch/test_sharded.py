"""DTensors on a GPU: each rank's part by the GPU's kernels."""

import pytest
from torch.distributed.tensor import Shard

from support.problems.budget import check
from support.problems.cases import Case, build
from support.runs.sharded_calls import BATCH, HEADS, results

pytestmark = pytest.mark.gpu
CASE = Case(
    batch=2,
    seqlen_q=130,
    seqlen_k=200,
    heads_q=8,
    heads_k=4,
    head_dim=64,
    dtype="bfloat16",
    causal=True,
    alibi="h",
    sink=True,
    dropout_p=0.25,
)


@pytest.mark.parametrize("place", [BATCH, HEADS], ids=str)
def test_what_ranks_compute_is_the_whole(place):
    built = build(CASE, "cuda")
    check(built, results(built, (2,), [place]), "cuda")


def test_heads_of_packed_sequences():
    built = build(Case(**{**vars(CASE), "varlen": "qk"}), "cuda")
    check(built, results(built, (2,), [Shard(1)]), "cuda")
