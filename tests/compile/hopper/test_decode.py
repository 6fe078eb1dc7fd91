"""The Hopper decode compiles without spills, its products and loads those that it is made for, and
two programs fit an SM."""

import pytest

pytest.importorskip("triton")

from compile.test_decode import buffers_of, buffers_of_step
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.core.registry.tiles import HopperDecodeConfig
from heedful.inspector.nvidia import disassemble, measure, parse_sass
from heedful.launch.bind import hopper_decode
from heedful.launch.compiler import compile_now
from heedful.launch.prebuild import compiling
from heedful.launch.program import programs
from support.problems.grids import slow_but

pytestmark = pytest.mark.skipif(
    (compiling().triton or ()) < (3, 9), reason="gl.inline_asm came with Triton 3.9"
)

MIXED = "hopper_mixed"
# Name: facts of the problem beside 4 sequences of 4096 keys, 32 heads over 8, and new tokens.
PROBLEMS = {
    "plain": {},
    "lengths": {"used_k": True, "sink": True, "dtype": "float16"},
    "pages": {"used_k": True, "page_size": 16},
    "window": {"used_k": True, "page_size": 48, "mask": MaskSpec(left=1000, right=0)},
    "sixteen tokens": {"seqlen_q": 16, "mask": MaskSpec.of(True), "head_dim": 64},
    "wide": {"head_dim": 256, "page_size": 16, "used_k": True, "sink": True},
    "whole": {"num_splits": 1, "head_dim": 192},
    "packed": {"total_q": 9, "used_k": True, "page_size": 64, "return_lse": True},
    "packed, sixteen tokens": {"total_q": 50, "seqlen_q": 16, "used_k": True, "page_size": 16},
    "packed keys": {"total_q": 9, "total_k": 9000, "head_dim": 64},
    "packed, wide": {"total_q": 9, "used_k": True, "page_size": 16, "head_dim": 256},
    "mixed": {"total_q": 600, "seqlen_q": 512, "used_k": True, "page_size": 16, "backend": MIXED},
    "merged by all": {"used_k": True, "backend": "hopper_decode+merge=1"},
    "new": {"used_k": True, "page_size": 16, "new": 1},
    "new, rotated": {"used_k": True, "new": 1, "is_rotated": True},
    "four new, rotated": {"used_k": True, "page_size": 16, "new": 4, "is_rotated": True},
    "wide new": {"used_k": True, "head_dim": 256, "new": 4, "is_rotated": True},
}
DEFAULT = ("pages", "mixed", "four new, rotated")


def compiled(name: str):
    facts = dict(PROBLEMS[name])
    backend, new = facts.pop("backend", "hopper_decode"), facts.pop("new", 0)
    is_rotated = facts.pop("is_rotated", False)
    problem = AttentionProblem.dense(4, facts.pop("seqlen_q", 1), 4096, 32, 8, **facts)
    chosen = plan(problem, by_name("H200"), backend=forced(backend))
    if problem.varlen_q:
        calls = programs.program(chosen, "forward").calls
        (call,) = (call for call in calls if call.kernel.function == "decode")
    elif new:
        buffers = buffers_of_step(problem, new, is_rotated)
        (call,) = programs.step(chosen, buffers, interleaved=True, position0=0).calls
    else:
        (call,) = hopper_decode.forward(problem, chosen, buffers_of(problem)).calls
    config = chosen.configs["hopper_decode.forward"]
    assert isinstance(config, HopperDecodeConfig)
    return config, compile_now(call, "sm_90")


@pytest.mark.parametrize("name", slow_but(DEFAULT, PROBLEMS))
def test_nothing_is_spilled_and_programs_fit(name):
    config, found = compiled(name)
    code, _, _ = parse_sass(disassemble(found.code).text)
    assert measure(code).spills == 0
    # 1 KiB of each program is the system's.
    assert config.programs * (found.shared_bytes + 1024) <= 228 * 1024


def test_keys_come_by_tensor_maps_and_products_are_a_warpgroups():
    _, found = compiled("pages")
    text = disassemble(found.code).text
    # Four boxes of 16 rows, of 64 columns each, of keys and of values.
    assert text.count("UTMALDG") == 16
    # 64 keys by 128 columns: eight products for the scores, four for the output.
    assert text.count("HGMMA") == 12
    assert "LDGSTS" not in text
