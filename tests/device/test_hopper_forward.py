"""The Hopper forward against the float64 oracle: lengths around tile edges, masks, layouts."""

import pytest
import torch

from support.budget import run
from support.cases import Case, variants
from support.prepared import Prepared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the Hopper kernels run on sm_90 alone",
    ),
]

BASE = Case(dtype="bfloat16", head_dim=64, heads_q=4, heads_k=2, backward=False)

LENGTHS = [(1, 1), (64, 128), (193, 127), (257, 129), (300, 1), (37, 700), (511, 513)]
# From 2048 keys on, head dim 64 takes another config.
LENGTHS_OF_MANY = [(130, 2100), (1, 2048)]
DIMS = [(64, 64), (128, 128), (256, 256), (72, 72), (96, 96), (8, 248), (192, 128), (128, 64)]

CASES = [
    *(
        Case(**{**vars(BASE), "seqlen_q": sq, "seqlen_k": sk, "causal": causal, "head_dim": dim})
        for sq, sk in LENGTHS
        for causal in (False, True)
        for dim in (64, 128, 256)
    ),
    *(Case(**{**vars(BASE), "seqlen_q": sq, "seqlen_k": sk}) for sq, sk in LENGTHS_OF_MANY),
    *(
        Case(**{**vars(BASE), "seqlen_q": 200, "seqlen_k": 333, "head_dim": d, "head_dim_v": e})
        for d, e in DIMS
    ),
    *variants(
        Case(**{**vars(BASE), "seqlen_q": 200, "seqlen_k": 333}),
        layout=("contiguous", "heads_first", "packed"),
        dtype=("bfloat16", "float16"),
        varlen=("", "qk", "q", "k"),
        window=((-1, -1), (-1, 0), (0, 0), (40, 0), (64, 128), (300, -1)),
        bottom_right=(True, False),
        shift=(0, 250, -250),
        softcap=(0.0, 3.0),
        sink=(False, True),
        scale=(0.0, 8.0),
    ),
    # Whole tiles of keys, so that the left bound alone masks the first tile visited.
    *variants(
        Case(**{**vars(BASE), "seqlen_q": 256, "seqlen_k": 256}),
        window=((40, -1), (64, 128), (0, -1), (100, 300)),
        head_dim=(64, 128),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_within_its_error_budget(case):
    run(Prepared("hopper"), case, "cuda")


def test_twenty_runs_are_bit_equal():
    import heedful

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1000, 8, 128, device="cuda").bfloat16() for _ in range(3))
    outs = [heedful.flash_attn_func(q, k, v, causal=True, backend="hopper") for _ in range(20)]
    assert all(torch.equal(out, outs[0]) for out in outs)
