"""Memory that a step over ranks takes beside q, k, v and dout."""

from typing import Any

import pytest
import torch

from heedful.bench.parallel import HEADS, HEADS_K, Case, more_memory, spread
from heedful.distributed import plan
from support.runs.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TOKENS, DIM = 4096, 128  # of a rank
# Bytes of k and v of a rank, of out in float32, of out and of dq as they are.
SHARD = TOKENS * HEADS_K * 2 * DIM * 2
SUMS, OUT = TOKENS * HEADS * DIM * 4, TOKENS * HEADS * DIM * 2
# The log-sum-exp, and what kernels keep by row: a few float32 of each row and head.
ROWS = 4 * TOKENS * HEADS * 4


def measured(rank: int, count: int, more: dict[str, Any]) -> tuple[float, float]:
    """MiB of a forward, and with its backward."""
    case = Case("", (TOKENS * count,))
    made = plan(lengths=case.lengths, heads_q=HEADS, heads_k=HEADS_K, head_dim=DIM, **more)
    shapes = [(TOKENS * count, heads, DIM) for heads in (HEADS, HEADS_K, HEADS_K, HEADS)]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    work = spread(case, made, [q, k, v], dout)
    del q, k, v, dout
    # Once before, as kernels and what they keep for all calls are no part of a step.
    work.both()
    return more_memory(work.forward, made), more_memory(work.both, made)


# What a step with its backward takes: out, gradients, sums of dQ, and six shards of keys.
LEAN = OUT + (OUT + SHARD) + SUMS + 6 * SHARD + ROWS
# Where q, out, its log-sum-exp and dout travel, they are there once more, for all rows of a rank's
# heads, and so is a shard of keys. Beside its out a row of 16 heads has 64 bytes of log-sum-exps.
TRAVELS = 3 * OUT + SHARD + 3 * TOKENS * HEADS * 4
HEADS_TOO = OUT + TRAVELS + (OUT + SHARD) + SUMS + ROWS


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({"strategy": "gather", "transport": "send"}, LEAN),
        ({"strategy": "gather", "transport": "copy"}, LEAN),
        ({"strategy": "heads"}, HEADS_TOO),
        ({"strategy": "ring"}, LEAN),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_step_of_two_gpus_takes_few_shards_of_keys(tmp_path, more, most):
    ranks = Ranks(2, tmp_path, 120.0, "nccl")
    try:
        for forward, both in ranks.run(measured, more):
            assert forward * 2**20 <= OUT + SUMS + 3 * SHARD + ROWS
            assert both * 2**20 <= most
    finally:
        ranks.close()
