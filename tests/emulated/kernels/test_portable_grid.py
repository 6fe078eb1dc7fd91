"""Every feature of the portable kernels on both AMD targets: forward, backward, and decoding from
quantised and paged caches. Each case stays inside the error budget with no finding, and gives the
same bits under lockstep, round-robin and ten random interleavings of its waves."""

from dataclasses import replace
from itertools import product

import pytest

from emulated.helpers.backend import TARGETS, Emulated
from support.problems.budget import run
from support.problems.cases import Case
from support.problems.grids import slow_but

# Two tiles of keys or more, multiples of nothing.
FORWARD = Case(
    batch=1,
    seqlen_q=37,
    seqlen_k=139,
    heads_q=2,
    heads_k=1,
    head_dim=64,
    dtype="bfloat16",
    backward=False,
)
BACKWARD = replace(FORWARD, backward=True, head_dim=32, seqlen_k=75)
DECODE = replace(FORWARD, seqlen_q=1, heads_q=4, seqlen_k=90, batch=2, used="k")
SCHEDULES = ("lockstep", "round-robin", "random:0-9")

FORWARDS = {
    "dense": FORWARD,
    "float16": replace(FORWARD, dtype="float16"),
    "float32": replace(FORWARD, dtype="float32", head_dim=32),
    "causal": replace(FORWARD, causal=True),
    "causal-top-left": replace(FORWARD, causal=True, bottom_right=False),
    "causal-more-queries": replace(FORWARD, causal=True, seqlen_q=90, seqlen_k=40),
    "causal-shifted-left": replace(FORWARD, causal=True, shift=-60),
    "causal-shifted-right": replace(FORWARD, causal=True, shift=20),
    "window-left": replace(FORWARD, window=(20, -1)),
    "window-both": replace(FORWARD, window=(20, 5)),
    "window-first": replace(FORWARD, window=(9, 4, 3)),
    "window-causal-float16": replace(FORWARD, window=(30, 0), causal=True, dtype="float16"),
    "softcap": replace(FORWARD, softcap=4.0),
    "softcap-causal": replace(FORWARD, softcap=9.0, causal=True),
    "dropout": replace(FORWARD, dropout_p=0.3),
    "dropout-origin": replace(FORWARD, dropout_p=0.1, dropout_origin=(2, 4, 8, 16)),
    "alibi-heads": replace(FORWARD, alibi="h"),
    "alibi-batch-causal": replace(FORWARD, alibi="bh", causal=True, batch=2),
    "bias-full": replace(FORWARD, bias="bhqk"),
    "bias-keys": replace(FORWARD, bias="k"),
    "bias-queries-float16": replace(FORWARD, bias="hq", dtype="float16"),
    "sink": replace(FORWARD, sink=True),
    "sink-causal-window": replace(FORWARD, sink=True, causal=True, window=(25, 0)),
    "scale": replace(FORWARD, scale=0.9),
    "mqa-odd-group": replace(FORWARD, heads_q=3, heads_k=1),
    "dim-16": replace(FORWARD, head_dim=16),
    "dim-40": replace(FORWARD, head_dim=40),
    "dim-96": replace(FORWARD, head_dim=96),
    "dim-128": replace(FORWARD, head_dim=128),
    "dim-64-value-24": replace(FORWARD, head_dim=64, head_dim_v=24),
    "dim-32-value-96": replace(FORWARD, head_dim=32, head_dim_v=96),
    "heads-first": replace(FORWARD, layout="heads_first"),
    "offset": replace(FORWARD, layout="offset"),
    "packed": replace(FORWARD, layout="packed"),
    "many-tiles-causal": replace(FORWARD, seqlen_q=300, seqlen_k=200, causal=True),
    "one-key": replace(FORWARD, seqlen_k=1),
    "one-query": replace(FORWARD, seqlen_q=1),
    "no-keys": replace(FORWARD, seqlen_k=0),
    "varlen": replace(FORWARD, varlen="qk", batch=3),
    "varlen-queries": replace(FORWARD, varlen="q", batch=2),
    "varlen-keys-causal": replace(FORWARD, varlen="k", batch=2, causal=True),
    "varlen-used-causal": replace(FORWARD, varlen="qk", used="qk", batch=3, causal=True),
    "used": replace(FORWARD, used="qk", batch=2),
    "probabilities": replace(FORWARD, seqlen_k=75, return_probs=True, dropout_p=0.2),
    "splits": replace(FORWARD, num_splits=3),
    "splits-causal-sink": replace(FORWARD, num_splits=2, causal=True, sink=True),
    "ranges-causal": replace(FORWARD, key_ranges=1, causal=True, seqlen_q=139),
    "ranges-two-of-heads": replace(FORWARD, key_ranges=2, ranges_of="bh", batch=2),
    "ranges-varlen": replace(FORWARD, key_ranges=2, varlen="qk", ranges_of="", batch=2),
    "block-mask": replace(FORWARD, block_mask=64, ranges_of="h"),
    "block-mask-32-causal": replace(FORWARD, block_mask=32, causal=True, seqlen_q=139),
}
BACKWARDS = {
    "dense": BACKWARD,
    "float16": replace(BACKWARD, dtype="float16"),
    "float32": replace(BACKWARD, dtype="float32", head_dim=16),
    "causal": replace(BACKWARD, causal=True),
    "causal-top-left": replace(BACKWARD, causal=True, bottom_right=False),
    "causal-more-queries": replace(BACKWARD, causal=True, seqlen_q=90, seqlen_k=40),
    "window": replace(BACKWARD, window=(20, 5)),
    "window-first": replace(BACKWARD, window=(9, 4, 3)),
    "softcap": replace(BACKWARD, softcap=4.0),
    "dropout": replace(BACKWARD, dropout_p=0.3),
    "alibi": replace(BACKWARD, alibi="bh"),
    "bias-full": replace(BACKWARD, bias="bhqk"),
    "bias-keys": replace(BACKWARD, bias="k"),
    "sink": replace(BACKWARD, sink=True),
    "sink-softcap-causal": replace(BACKWARD, sink=True, softcap=4.0, causal=True),
    "mqa-odd-group": replace(BACKWARD, heads_q=3, heads_k=1),
    "dim-40": replace(BACKWARD, head_dim=40),
    "dim-64": replace(BACKWARD, head_dim=64),
    "dim-128": replace(BACKWARD, head_dim=128),
    "dim-32-value-16": replace(BACKWARD, head_dim_v=16),
    "offset": replace(BACKWARD, layout="offset"),
    "varlen-causal": replace(BACKWARD, varlen="qk", batch=2, causal=True),
    "varlen-used": replace(BACKWARD, varlen="qk", used="k", batch=2),
    "deterministic": replace(BACKWARD, deterministic=True),
    "ranges-causal": replace(BACKWARD, key_ranges=1, causal=True, seqlen_q=75),
    "ranges-two-of-heads": replace(BACKWARD, key_ranges=2, ranges_of="h"),
    "block-mask": replace(BACKWARD, block_mask=32, ranges_of="h"),
    "no-keys": replace(BACKWARD, seqlen_k=0),
}
DECODES = {
    "dense": DECODE,
    "tokens-4-causal": replace(DECODE, seqlen_q=4, causal=True),
    "splits": replace(DECODE, num_splits=3, seqlen_k=150),
    "paged-16": replace(DECODE, page_size=16),
    "paged-29-splits": replace(DECODE, page_size=29, num_splits=2, seqlen_k=150),
    "paged-64-window": replace(DECODE, page_size=64, window=(40, 0), seqlen_k=150),
    "batch-index-left-pad": replace(DECODE, kv_batch_idx=True, leftpad_k=True),
    "tree-mask-paged": replace(DECODE, seqlen_q=9, tree_mask=True, page_size=16),
    "int8": replace(DECODE, kv_dtype="int8"),
    "int8-groups-shift": replace(DECODE, kv_dtype="int8", kv_group=32, kv_shift=True),
    "int8-paged-splits": replace(DECODE, kv_dtype="int8", page_size=16, num_splits=2),
    "int4": replace(DECODE, kv_dtype="int4", kv_group=16),
    "int4-shift-paged": replace(DECODE, kv_dtype="int4", kv_group=32, kv_shift=True, page_size=16),
    "e4m3": replace(DECODE, kv_dtype="float8_e4m3fn"),
    "e4m3-groups-paged": replace(DECODE, kv_dtype="float8_e4m3fn", kv_group=32, page_size=16),
    "e5m2": replace(DECODE, kv_dtype="float8_e5m2"),
    "e4m3fnuz": replace(DECODE, kv_dtype="float8_e4m3fnuz"),
    "int8-float16-softcap": replace(DECODE, kv_dtype="int8", dtype="float16", softcap=5.0),
}
GRID = {
    f"{direction}-{name}": case
    for direction, cases in (("forward", FORWARDS), ("backward", BACKWARDS), ("decode", DECODES))
    for name, case in cases.items()
}
# In float16 the budget is narrower (`support.problems.cases.twins`).
GRID |= {
    f"{name}-float16": replace(case, dtype="float16")
    for name, case in GRID.items()
    if case.dtype == "bfloat16" and replace(case, dtype="float16") not in GRID.values()
}
# What no other default test of the emulated tier compiles.
CHEAP = (
    "forward-window-first-float16",
    "forward-dim-64-value-24-float16",
    "forward-splits",
    "backward-sink-float16",
    "decode-e4m3",
)


LONG = [name for name in GRID if name not in CHEAP]


def test_the_grid_has_150_cases_over_both_targets():
    distinct = {str(case) for case in GRID.values()}
    assert len(distinct) == len(GRID)
    assert len(distinct) * len(TARGETS) >= 150


# By default the one whose kernels no other compiles for its target.
@pytest.mark.parametrize(
    "name, arch",
    slow_but({("backward-sink-float16", "gfx950")}, product(CHEAP, TARGETS)),
    ids=str,
)
def test_a_case_is_within_budget_and_the_same_under_every_schedule(arch, name):
    run(Emulated(arch, schedules=SCHEDULES), GRID[name])


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", LONG)
def test_every_case_is_within_budget_and_the_same_under_every_schedule(arch, name):
    run(Emulated(arch, schedules=SCHEDULES), GRID[name])
