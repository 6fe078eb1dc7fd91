"""No axis of the portable kernels is taken for another: tiles, dims of keys and of values, heads,
sequences and strides all differ in size, and each is more than one. In Triton's interpreter; in a
process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from heedful.core.registry.tiles import TileConfig
from support.problems import budget
from support.problems.cases import Case
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.portable_programs import Interpreted

WIDE, HIGH = TileConfig(16, 32), TileConfig(32, 16)
# Seeds of dropout have 64 bits: that of seed=0 is 0.
# Two KV heads of two query heads each; of the longer side two tiles.
UNEQUAL = Case(heads_q=4, seqlen_q=35, seqlen_k=47, head_dim=40, head_dim_v=20, layout="offset")
ALONE = replace(UNEQUAL, batch=1)
BOTH_WAYS = [
    (WIDE, replace(UNEQUAL, dtype="float16", causal=True, sink=True)),
    (HIGH, replace(UNEQUAL, seqlen_q=18, head_dim=20, head_dim_v=40, scale=-0.2)),
    (WIDE, replace(ALONE, window=(20, 4, 3), softcap=3.0, alibi="bh", bias="bhqk")),
    (HIGH, replace(UNEQUAL, heads_q=2, heads_k=1, alibi="bh", bias="bk", window=(9, 0))),
    (WIDE, replace(UNEQUAL, heads_q=2, varlen="qk", used="qk", dropout_p=0.3, bias="hq", seed=3)),
    # Each of its elements is a sum over tiles of both sides. Over keys such a sum is 0 but for what
    # a sink takes.
    (HIGH, replace(UNEQUAL, heads_q=2, seqlen_k=30, bias="h", window=(-1, 20), sink=True)),
    (WIDE, replace(ALONE, heads_q=2, heads_k=1, bias="q", softcap=4.0, sink=True)),
    (HIGH, replace(ALONE, heads_q=2, seqlen_k=25, bias="qk")),
    # Rows that are aligned, so that blocks of q and k are not as wide as those of v.
    (WIDE, replace(ALONE, heads_q=2, layout="contiguous", head_dim=16, head_dim_v=48)),
    (HIGH, replace(ALONE, heads_q=2, layout="contiguous", head_dim=40, head_dim_v=8, causal=True)),
    (HIGH, replace(ALONE, dropout_p=0.3, dropout_origin=(3, 2, 9, 6), seed=4)),
    # Steps of a listed tile are as many as each side has of its own.
    (WIDE, replace(UNEQUAL, heads_q=2, heads_k=1, block_mask=32, ranges_of="bh", causal=True)),
    (HIGH, replace(ALONE, heads_q=2, heads_k=2, block_mask=32, window=(20, 5), sink=True)),
    (HIGH, replace(UNEQUAL, heads_q=2, heads_k=1, key_ranges=2, ranges_of="bh", used="q")),
    (WIDE, replace(ALONE, heads_q=2, key_ranges=1, varlen="qk", batch=2, window=(-1, 9))),
]
PROBS = replace(UNEQUAL, batch=3, heads_q=2, heads_k=1, return_probs=True)
FORWARD = [
    (HIGH, 1, replace(UNEQUAL, heads_q=2, return_probs=True, dropout_p=0.4, softcap=2.0, seed=5)),
    (WIDE, 3, replace(UNEQUAL, heads_q=4, page_size=6, tree_mask=True, sink=True)),
    (HIGH, 2, replace(UNEQUAL, kv_dtype="int8", kv_group=10, kv_shift=True, leftpad_k=True)),
    (WIDE, 1, replace(UNEQUAL, kv_dtype="int4", kv_group=20, kv_batch_idx=True, causal=True)),
    (HIGH, 1, replace(UNEQUAL, kv_dtype="int8", varlen="q", used="k", page_size=9)),
    # A scale of each value, of rows without pages.
    (WIDE, 1, replace(UNEQUAL, heads_q=2, kv_dtype="int8", kv_group=1, kv_shift=True)),
    # Probabilities of sequences that begin anywhere.
    (WIDE, 1, replace(PROBS, varlen="qk", used="qk", dropout_p=0.3, bias="hq", alibi="bh")),
    (HIGH, 1, replace(PROBS, varlen="q", kv_dtype="int8", kv_group=10, page_size=7, causal=True)),
    (WIDE, 1, replace(PROBS, kv_batch_idx=True, leftpad_k=True, tree_mask=True, window=(9, 3, 2))),
    (HIGH, 1, replace(PROBS, varlen="qk", key_ranges=2, rel_bias=9, q_offsets=True)),
]


@interpreted
@pytest.mark.parametrize("tiles, case", BOTH_WAYS, ids=str)
def test_forward_and_gradients_are_within_the_budget(tiles, case):
    budget.run(Interpreted(tiles), case)


@interpreted
@pytest.mark.parametrize("tiles, splits, case", FORWARD, ids=str)
def test_forward_is_within_the_budget(tiles, splits, case):
    budget.run(Interpreted(tiles, splits), replace(case, backward=False))


@pytest.mark.slow
@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
