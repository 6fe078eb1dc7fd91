"""The decode kernel computes what the oracle computes where scales of groups do not fit its words,
dims are no multiples, and windows lie beside the keys. In Triton's interpreter; in a process of
their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from support.problems import budget
from support.problems.cases import Case
from support.problems.grids import in_turns
from support.runs.decode_programs import TILES, Interpreted
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

PLAIN = Case(dtype="float16", backward=False, seqlen_q=3, seqlen_k=83, heads_q=6)
CASES = (
    # Groups of parts of a word, of no power of two words, and of more than a row has beside.
    replace(PLAIN, kv_dtype="int4", head_dim=24, kv_group=2, kv_shift=True),
    replace(PLAIN, kv_dtype="int8", head_dim=20, kv_group=1, kv_shift=True),
    replace(PLAIN, kv_dtype="int8", head_dim=48, kv_group=24, page_size=6),
    replace(PLAIN, kv_dtype="int4", head_dim=96, head_dim_v=48, kv_group=48, layout="heads_first"),
    replace(PLAIN, kv_dtype="float8_e4m3fn", head_dim=72, kv_group=36, leftpad_k=True),
    # Results of several slices, of sequences without keys.
    replace(
        PLAIN, kv_dtype="int8", head_dim=64, head_dim_v=96, kv_group=32, used="k", lens_k=(0, 83)
    ),
    replace(PLAIN, kv_dtype="int4", head_dim=128, kv_group=64, used="k", lens_k=(83, 0), sink=True),
    replace(PLAIN, kv_dtype="int8", head_dim=96, kv_group=32, varlen="q", page_size=7),
    # All keys lie before the window, or behind the diagonal, of some rows or of all.
    replace(PLAIN, window=(9, 0), shift=90),
    replace(PLAIN, window=(30, 4), shift=60, sink=True, used="k"),
    replace(PLAIN, causal=True, shift=-90, sink=True),
    replace(PLAIN, causal=True, bottom_right=False, seqlen_q=40, used="k"),
    replace(PLAIN, window=(11, 2, 3), bottom_right=False, seqlen_q=21, used="qk"),
)


@interpreted
@pytest.mark.parametrize("case, num_splits, rows", in_turns(CASES, (0, 3), (16, 8)), ids=str)
def test_decode_is_within_the_budget(case, num_splits, rows):
    # What a part costs beside its keys moves the ends of shares.
    tiles = replace(TILES, block_m=rows, overhead=rows // 8)
    budget.run(Interpreted(num_splits, tiles), case)


@pytest.mark.slow
@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
