"""The Hopper backward compiled for sm_90 without a GPU: what is in the loop that counts."""

from collections import Counter

import pytest

from heedful.core.device import by_name
from heedful.core.plan import explain, plan
from heedful.core.problem import AttentionProblem
from heedful.inspector.nvidia import disassemble, opcode, parse_sass
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from heedful.launch.programs import program

DEVICE = by_name("H200")
# A thread may reload a few numbers of the work tile a turn; of a tensor it has 16 at least.
MOST_RELOADS = 4


def main_call(backend="hopper", **facts):
    problem = AttentionProblem.dense(2, 4096, 4096, 8, 4, needs_grad=True, return_lse=True, **facts)
    calls = program(plan(problem, DEVICE, compiling(), backend), "backward").calls
    return next(c for c in calls if c.kernel.function in ("backward", "backward_wide"))


# Waits that fail go on behind the code and jump back: loops to the eye, and longer than any.
LONGEST_STEP = 1000


def step_loops(code, labels, branches) -> list[Counter]:
    """What instructions are in each consumer's loop over steps without a mask."""
    loops = {(labels[to], at) for at, to in branches if labels.get(to, at + 1) <= at}
    counts = [Counter(opcode(i).split(".")[0] for i in code[a : b + 1]) for a, b in loops]
    return [c for c in counts if c["HGMMA"] >= 24 and c.total() < LONGEST_STEP]


FULL_AND_CAUSAL = ((64, "drawn"), (128, "drawn"), (256, "own"))
CAUSAL = (
    *((dim, tiles) for dim in (64, 128) for tiles in ("own", "in turns", "split")),
    (128, "split in turns"),
)


VARIANTS = [
    *((*which, causal) for which in FULL_AND_CAUSAL for causal in (False, True)),
    *((*which, True) for which in CAUSAL),
]
# Each mask and way of dealing tiles, which take seven seconds to compile. 64 columns have their
# test below, of a step that needs more registers.
DEFAULT = {
    (128, "drawn", False),
    (128, "split in turns", True),
    (256, "own", False),
}


@pytest.mark.parametrize(
    "head_dim, tiles, causal",
    [pytest.param(*v, marks=[] if v in DEFAULT else [pytest.mark.slow]) for v in VARIANTS],
)
def test_products_are_under_way_together_and_tensors_are_not_spilled(head_dim, tiles, causal):
    """An assembler that runs out of registers waits for every product by itself. tiles: they have
    programs of their own or are drawn; in turns, drawn tiles are added to dQ in order; split, each
    consumer hands its gradients on."""
    backend = "hopper+draws=0" if tiles == "own" else "hopper"
    backend += "+splits=2" if "split" in tiles else ""
    in_turns = "in turns" in tiles
    call = main_call(backend, head_dim=head_dim, causal=causal, deterministic=in_turns)
    assert (call.grid[0] == DEVICE.units) == (tiles != "own")
    assert_step_is_sound(call)


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_slope_of_a_cap_of_scores_has_its_registers(head_dim):
    assert_step_is_sound(main_call(head_dim=head_dim, causal=True, softcap=30.0))


def assert_step_is_sound(call) -> None:
    made = compiler.artifact(call, DEVICE.arch)
    assert made.shared_bytes <= DEVICE.shared_bytes
    listing = disassemble(made.code)
    loops = step_loops(*parse_sass(listing.text))
    assert len(loops) >= 2
    for loop in loops:
        assert loop["WARPGROUP"] < loop["HGMMA"]
        assert loop["STL"] + loop["LDL"] <= MOST_RELOADS


def test_options_that_a_call_cannot_have_are_refused():
    with pytest.raises(ValueError, match="draws"):
        main_call("hopper+draws=0", head_dim=128, deterministic=True)


def test_wide_heads_have_no_room_for_the_mask_of_dropout():
    problem = AttentionProblem.dense(2, 512, 512, 8, 4, 256, needs_grad=True, dropout_p=0.1)
    chosen = plan(problem, DEVICE, compiling(), "hopper")
    assert chosen.backward == "portable"
    assert "the backward of dropout with Q, K and V above 128" in explain(chosen)
    artifact = compiler.artifact(main_call(head_dim=256, head_dim_v=128, dropout_p=0.1), "sm_90")
    assert artifact.shared_bytes <= DEVICE.shared_bytes


def test_sums_of_dq_leave_as_blocks_of_memory_or_four_numbers_at_a_time():
    narrow = disassemble(compiler.artifact(main_call(head_dim=128), DEVICE.arch).code).text
    assert "UBLKRED" in narrow and "REDG" not in narrow
    wide = disassemble(compiler.artifact(main_call(head_dim=256), DEVICE.arch).code).text
    assert "F32x4" in wide and "UBLKRED" not in wide
