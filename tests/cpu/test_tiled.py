"""The CPU backend is attention, feature by feature and in random combinations."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from heedful import cpu
from support.budget import run
from support.cases import LAYOUTS, Case, variants
from support.strategies import cases

# Longer than one tile of queries and of keys, and a multiple of nothing.
LONG = Case(batch=1, seqlen_q=301, seqlen_k=611, heads_q=2, heads_k=1, head_dim=16)
SHORT = Case(heads_q=6, heads_k=2, head_dim=24, head_dim_v=8)
CHOICES: dict[str, Any] = dict(
    causal=[True],
    window=[(40, 0), (9, 17, 3), (-1, 30), (0, 0)],
    bottom_right=[False],
    shift=[-25, 31],
    scale=[-0.4],
    softcap=[3.0],
    dropout_p=[0.2, 1.0],
    alibi=["h", "bh"],
    bias=["bhqk", "hqk", "bk", "q"],
    sink=[True],
    tree_mask=[True],
    varlen=["q", "k", "qk"],
    used=["q", "k", "qk"],
    page_size=[1, 16],
    kv_batch_idx=[True],
    leftpad_k=[True],
    layout=LAYOUTS[1:],
    return_probs=[True],
    seqlen_q=[0, 1, 90],
    seqlen_k=[0, 1],
    batch=[0, 5],
    head_dim=[1, 128],
)
ALL: dict[str, Any] = dict(
    softcap=4.0, alibi="bh", bias="hqk", sink=True, dropout_p=0.15, window=(60, 3, 2)
)
COMBINED = [
    Case(**ALL, varlen="qk", used="qk", heads_q=4),
    Case(**ALL, page_size=8, leftpad_k=True, heads_q=4, tree_mask=True),
    Case(**ALL, kv_batch_idx=True, used="k", layout="offset", return_probs=True),
]
QUANTISED = [
    Case(kv_dtype="int8", kv_group=8, kv_shift=True, backward=False, heads_q=4),
    Case(kv_dtype="int8", backward=False, kv_batch_idx=True, used="k"),
    Case(kv_dtype="int4", kv_group=16, kv_shift=True, backward=False, page_size=7),
    Case(kv_dtype="float8_e4m3fn", backward=False, dtype="bfloat16", varlen="qk"),
    *variants(
        Case(backward=False, heads_q=4, head_dim=64, layout="offset", causal=True, varlen="q"),
        dtype=["float8_e4m3fn", "float8_e4m3fnuz"],
    ),
]


@pytest.mark.parametrize("case", [SHORT, *variants(SHORT, **CHOICES), *COMBINED], ids=str)
def test_every_feature_is_within_budget(case):
    run(cpu, case)


@pytest.mark.parametrize(
    "case",
    variants(LONG, causal=[False, True], window=[(99, 20, 5)], bias=["k"], sink=[True]),
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_several_tiles_are_within_budget(case, dtype):
    run(cpu, variants(case, dtype=[dtype])[0])


@pytest.mark.parametrize("case", QUANTISED, ids=str)
def test_quantised_keys_and_values_are_within_budget(case):
    run(cpu, case)


RANDOM: dict[str, Any] = dict(
    deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@settings(max_examples=60, derandomize=True, **RANDOM)
@given(case=cases())
def test_random_features_are_within_budget(case):
    run(cpu, case)


@pytest.mark.slow
@settings(max_examples=500, **RANDOM)
@given(case=cases(longest=300))
def test_many_random_features_are_within_budget(case):
    run(cpu, case)
