"""The Hopper backward and decode of head dims above 256 compiled for sm_90 without a GPU."""

from collections import Counter

import pytest

pytest.importorskip("triton")

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.inspector.nvidia import disassemble, opcode, parse_sass
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from heedful.launch.program import programs

from .test_backward import loops_of

pytestmark = pytest.mark.skipif(
    (compiling().triton or ()) < (3, 9), reason="gl.inline_asm came with Triton 3.9"
)
DEVICE = by_name("H200")
# Numbers of a tensor of 64 x 64 that a thread has.
OF_A_TENSOR = 32
BACKWARDS = {
    "plain": {},
    "causal": {"causal": True},
    "all": {"causal": True, "softcap": 20.0, "sink": True, "dtype": "float16"},
    "packed": {"causal": True, "total_q": 1500, "total_k": 1700},
}
STEPS = {
    "plain": {"causal": True},
    "used, in pages, a window": {
        "used_k": True,
        "page_size": 64,
        "mask": MaskSpec.of(True, (100, 0, 9)),
        "sink": True,
    },
    "packed": {"total_q": 20, "used_k": True, "dtype": "float16", "causal": True},
}


def call_of(function: str, problem: AttentionProblem, direction: str, way: str):
    chosen = plan(problem, DEVICE, compiling(), forced(way))
    calls = programs.program(chosen, direction).calls
    return next(call for call in calls if call.kernel.function == function)


def backward(way: str = "", function: str = "backward_halves", **facts):
    problem = AttentionProblem.dense(
        2, 1000, 1100, 8, 4, head_dim=512, needs_grad=True, return_lse=True, **facts
    )
    return call_of(function, problem, "backward", f"hopper/halves{way}")


@pytest.mark.parametrize(
    "name", [n if n == "plain" else pytest.param(n, marks=pytest.mark.slow) for n in BACKWARDS]
)
def test_both_consumers_of_halves_have_registers_for_a_gradient_and_scores(name):
    call = backward(**BACKWARDS[name])
    # Each program has half of the columns: S or dP, a gradient, and two parts of dQ.
    products = 256 // 16 + 64 // 16 + 2 * 64 // 16
    assert call.cluster == 2
    made = compiler.artifact(call, DEVICE.arch)
    assert made.cluster == 2 and made.shared_bytes <= DEVICE.shared_bytes
    steps = [loop for loop in loops_of(made) if loop["HGMMA"] == products and loop["STAS"]]
    assert len(steps) >= 2
    for loop in steps[:2]:
        assert loop["WARPGROUP"] < loop["HGMMA"]
        assert loop["STL"] + loop["LDL"] < OF_A_TENSOR // 2
        # What goes to the other program: four numbers at a time.
        assert loop["STAS"] == OF_A_TENSOR // 4


def test_a_cluster_has_the_key_tile_of_a_program():
    # 18 key tiles of 64 of 8 KV heads.
    assert backward().grid == (18 * 8, 1, 1)


@pytest.mark.parametrize("function", ("backward_prologue", "backward_epilogue"))
def test_rows_of_512_columns_and_sums_of_splits_do_not_spill(function):
    made = compiler.artifact(backward("+splits=2", function), DEVICE.arch)
    code, _, _ = parse_sass(disassemble(made.code).text)
    kinds = Counter(opcode(i).split(".")[0] for i in code)
    assert kinds["LDG"] and not kinds["STL"] + kinds["LDL"]


@pytest.mark.parametrize("rows", (pytest.param(16, marks=pytest.mark.slow), 32))
@pytest.mark.parametrize(
    "name", [n if n == "plain" else pytest.param(n, marks=pytest.mark.slow) for n in STEPS]
)
def test_a_decode_holds_the_whole_output_of_its_rows(name, rows):
    problem = AttentionProblem.dense(4, rows // 8, 4096, 16, 2, head_dim=512, **STEPS[name])
    call = call_of("decode_wide", problem, "forward", "decode/wide")
    made = compiler.artifact(call, DEVICE.arch)
    assert made.shared_bytes <= DEVICE.shared_bytes
    # S of 512 columns; eight boxes of the output.
    products = 512 // 16 + 8 * 64 // 16
    (step,) = (loop for loop in loops_of(made)[:1] if loop["HGMMA"] == products)
    assert step["WARPGROUP"] < step["HGMMA"]
    # With 32 rows, whose output takes 128 registers, a thread reloads what it knows of these rows.
    assert not step["STL"] and step["LDL"] <= (rows == 32) * 2 * OF_A_TENSOR
