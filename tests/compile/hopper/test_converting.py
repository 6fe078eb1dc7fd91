"""The Hopper forward over caches of e4m3, compiled for sm_90 without a GPU: what its tiles fit in,
and the instructions of the warps that convert."""

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning import plan
from heedful.core.registry import configs
from heedful.core.registry.by_hand import forced
from heedful.inspector.nvidia import inspect_cubin
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from heedful.launch.program import programs
from support.problems.grids import slow_but

DEVICE = by_name("H200")
PAGES = {"total_q": 4 * 2048, "page_size": 16}
DEFAULT = [{"head_dim": 64, **PAGES}, {**PAGES}]
MORE = [
    {"head_dim": 256, **PAGES},
    {"seqlen_q": 64, "total_q": 4 * 64, "page_size": 16},
    {"seqlen_q": 40},
    {"seqlen_q": 40, "head_dim": 256},
    {"dtype": "float16"},
    {"softcap": 20.0, "alibi": True},
]


def planned(facts: dict) -> plan.Plan:
    given = {"seqlen_q": 2048, "causal": True, "used_k": True, "kv_dtype": "float8_e4m3fn"} | facts
    queries = given.pop("seqlen_q")
    problem = AttentionProblem.dense(4, queries, 8192, 32, 8, **given)
    return plan.plan(problem, DEVICE, compiling(), forced("hopper/converting"))


def compiled(facts: dict):
    """The attention kernel's machine code, and its artifact."""
    *_, call = programs.program(planned(facts), "forward").calls
    found = compiler.artifact(call, DEVICE.arch)
    return inspect_cubin(found.code), found


def test_every_row_of_the_config_table_that_converts_is_met():
    chosen = [planned(facts) for facts in (*DEFAULT, *MORE)]
    met = {id(configs.choose("hopper.forward", p.problem, p.device)) for p in chosen}
    rows = [row for row in configs.ROWS if getattr(row.config, "stored_stages", 0)]
    assert rows and {id(row) for row in rows} == met


@pytest.mark.parametrize("facts", slow_but(DEFAULT[1:], [*DEFAULT, *MORE]), ids=str)
def test_tiles_that_are_converted_fit_and_no_loop_of_a_consumer_spills(facts):
    kernel, found = compiled(facts)
    assert found.shared_bytes <= DEVICE.shared_bytes
    assert kernel.loop is not None and kernel.loop.spills == 0 and kernel.whole.wgmma > 0


def test_values_are_converted_by_one_instruction_for_two():
    """And keys of bfloat16 by four: a conversion, two to float32, and one back."""
    kernel, _ = compiled(DEFAULT[1])
    unpacks = kernel.whole.counts["F2FP"]
    # 64 keys of 128 columns: 64 pairs a thread of keys, of either sign, and 128 of values.
    assert unpacks >= 2 * 2 * 64 + 128
    assert kernel.whole.counts["HADD2"] >= 2 * 2 * 64
