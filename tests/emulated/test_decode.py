"""The decode kernel, as compiled for CDNA3 and CDNA4, computes attention within the error budget
and without a finding; who finishes the last part of a unit merges them."""

from dataclasses import replace

import pytest

from emulated.backend import TARGETS, Emulated
from support.budget import run
from support.cases import Case
from support.grids import in_turns

BASE = Case(
    batch=2,
    seqlen_q=3,
    seqlen_k=331,
    heads_q=4,
    heads_k=1,
    head_dim=64,
    dtype="bfloat16",
    backward=False,
)
MLA = replace(BASE, batch=1, seqlen_k=75, head_dim=576, head_dim_v=512, v_in_k=True)
CASES = [
    BASE,
    replace(BASE, causal=True, dtype="float16", used="k", sink=True),
    replace(BASE, page_size=16, tree_mask=True),
    replace(BASE, varlen="qk", used="qk", batch=3, window=(90, 0)),
    replace(BASE, kv_batch_idx=True, leftpad_k=True, head_dim=128, seqlen_q=1),
    replace(BASE, kv_dtype="int8", kv_group=64, kv_shift=True),
    replace(BASE, kv_dtype="int4", kv_group=32, page_size=5),
    # Values that lie in keys: 80 rows are two tiles.
    replace(MLA, heads_q=40, seqlen_q=2, causal=True, page_size=16),
    replace(MLA, heads_q=8, seqlen_q=1, used="k", dtype="float16"),
]


@pytest.mark.parametrize("case, arch, num_splits", in_turns(CASES, TARGETS, (0, 2)), ids=str)
def test_decode_is_within_budget(case, arch, num_splits):
    run(Emulated(arch, "decode"), replace(case, num_splits=num_splits))


@pytest.mark.parametrize("arch, kind", (("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")))
def test_an_fp8_cache_is_within_budget(arch, kind):
    run(Emulated(arch, "decode"), replace(BASE, kv_dtype=kind))
