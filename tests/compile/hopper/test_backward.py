"""The Hopper backward compiled for sm_90 without a GPU: what is in the loop that counts."""

from collections import Counter
from functools import lru_cache

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.inspector.nvidia import disassemble, opcode, parse_sass
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from heedful.launch.program.programs import program
from heedful.launch.spec import TensorMap
from support.problems.grids import slow_but

DEVICE = by_name("H200")
MAIN = ("backward", "backward_wide", "backward_pair")
# A thread may reload a few numbers of the work tile a turn; of a tensor it has 16 at least.
MOST_RELOADS = 4
LEAST_OF_A_TENSOR = 16


def main_call(backend="hopper", function="", **facts):
    problem = AttentionProblem.dense(2, 4096, 4096, 8, 4, needs_grad=True, return_lse=True, **facts)
    calls = program(plan(problem, DEVICE, compiling(), forced(backend)), "backward").calls
    return next(c for c in calls if c.kernel.function in (function or MAIN))


LONGEST_WIDE_STEP = 1000


def block_m(call) -> int:
    return call.constants["params.tile.BLOCK_M"]


def loops_of(made) -> list[Counter]:
    """What instructions are in each loop with products, the shortest first. Waits that fail go on
    behind the code and jump back: loops to the eye, and longer than those that they are of."""
    return _loops_of(made.code)


@lru_cache(maxsize=1)
def _loops_of(cubin: bytes) -> list[Counter]:
    code, labels, branches = parse_sass(disassemble(cubin).text)
    loops = {(labels[to], at) for at, to in branches if labels.get(to, at + 1) <= at}
    kinds = [opcode(i).split(".")[0] for i in code]
    counts = [Counter(kinds[a : b + 1]) for a, b in loops]
    return sorted((c for c in counts if c["HGMMA"]), key=Counter.total)


def step_loops(call, made) -> list[Counter]:
    """Those of both consumers over steps without a mask."""
    if call.kernel.function == "backward_wide":
        return [c for c in loops_of(made) if c["HGMMA"] >= 24 and c.total() < LONGEST_WIDE_STEP]
    # S and dP, dV and dK, each 16 columns or queries at a time; of 96 columns, gradients of 64 and
    # of 32.
    columns = [call.constants[f"params.tile.{name}"] for name in "DE"]
    products = sum(n + block_m(call) * (1 if n & (n - 1) == 0 else 2) for n in columns) // 16
    return [c for c in loops_of(made) if c["HGMMA"] == products and c["STSM"] and not c["STS"]]


def dq_loop(made) -> Counter:
    """That of the warpgroup that makes dQ of two consumers' 64 keys, in two shares."""
    return next(c for c in loops_of(made) if c["HGMMA"] == 2 * 2 * 64 // 16 and c["STS"])


FULL_AND_CAUSAL = ((64, "drawn"), (128, "drawn"), (256, "own"))
CAUSAL = (
    *((dim, tiles) for dim in (64, 128) for tiles in ("own", "in turns", "split")),
    (128, "split in turns"),
)


VARIANTS = [
    *((*which, causal) for which in FULL_AND_CAUSAL for causal in (False, True)),
    *((*which, True) for which in CAUSAL),
]
# Each kernel: they have other tests below. So have calls with a mask, and those in turns.
DEFAULT = {
    (128, "drawn", False),
    (256, "own", False),
}


@pytest.mark.parametrize(
    "head_dim, tiles, causal",
    slow_but(DEFAULT, VARIANTS),
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


@pytest.mark.slow
def test_no_products_are_made_of_the_quarter_of_zeros_of_96_columns():
    call = main_call(head_dim=96)
    q = call.arguments["io.q"]
    assert isinstance(q, TensorMap)
    assert q.block[-1] == 128
    made = compiler.artifact(call, DEVICE.arch)
    loops = step_loops(call, made)
    assert len(loops) == 2
    for loop in loops:
        assert_products_are_under_way_together(loop)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", (64, 128))
def test_visits_of_all_heads_of_a_query_tile_take_no_registers(head_dim):
    assert_step_is_sound(main_call("hopper+heads_innermost=1", head_dim=head_dim, causal=True))


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_pair_of_consumers_has_registers_for_both_gradients_and_dq(causal, packed):
    tokens = 8192 if packed else None
    facts = {"causal": causal, "total_q": tokens, "total_k": tokens}
    call = main_call(head_dim=192, head_dim_v=128, **facts)
    assert call.kernel.function == "backward_pair"
    made = compiler.artifact(call, DEVICE.arch)
    assert made.shared_bytes <= DEVICE.shared_bytes
    # S of 192 columns and dP of 128; dV, and dK in two parts; two blocks of dQ of both's keys.
    products = (192 + 128) // 16 + (1 + 2) * 64 // 16 + 2 * 2 * 64 // 16
    loops = [c for c in loops_of(made) if c["HGMMA"] == products and c["RED"] + c["REDG"]]
    assert len(loops) >= 2
    for loop in loops[:2]:
        assert_products_are_under_way_together(loop, LEAST_OF_A_TENSOR - 1)


CAPPED = {"head_dim": 64, "used_k": True, "causal": True, "softcap": 30.0}


# By default with lengths in use, which have a test below.
@pytest.mark.parametrize(
    "facts",
    slow_but(
        [CAPPED], [CAPPED, *({"head_dim": d, "causal": True, "softcap": 30.0} for d in (64, 128))]
    ),
    ids=str,
)
def test_the_slope_of_a_cap_of_scores_has_its_registers(facts):
    assert_step_is_sound(main_call(**facts))


RANGED = [(128, 1, False), (64, 1, True), (128, 2, True), (96, 2, False), (256, 2, False)]
RANGED.append((64, 1, False))


@pytest.mark.parametrize(
    "head_dim, ranges, in_turns",
    slow_but(RANGED[1:2], RANGED),
)
def test_words_of_rows_with_key_ranges_take_no_registers_in_the_loop(head_dim, ranges, in_turns):
    """A thread reloads a few numbers more, no tensor. Bounds of each query in the consumers took 52
    reloads in a turn of the masked loop."""
    call = main_call(head_dim=head_dim, key_ranges=ranges, causal=True, deterministic=in_turns)
    assert_step_is_sound(call, LEAST_OF_A_TENSOR - 1)


LISTED = [
    (128, 128, False),
    (128, 64, True),
    (64, 128, True),
    (64, 64, False),
    (96, 128, True),
    (256, 128, False),
    (256, 64, True),
]


@pytest.mark.parametrize(
    "head_dim, side, causal",
    slow_but(LISTED[2:3], LISTED),
)
def test_words_of_rows_with_a_block_mask_take_no_registers_in_the_loop(head_dim, side, causal):
    call = main_call(head_dim=head_dim, block_mask=side, causal=causal)
    assert_step_is_sound(call, LEAST_OF_A_TENSOR - 1)


def assert_step_is_sound(call, reloads: int = MOST_RELOADS) -> None:
    made = compiler.artifact(call, DEVICE.arch)
    assert made.shared_bytes <= DEVICE.shared_bytes
    loops = step_loops(call, made)
    is_wide = call.kernel.function == "backward_wide"
    # One each of two consumers, or one of both if they are one role of eight warps.
    roles = 1 if call.options["num_warps"] == 8 else 2
    assert len(loops) >= 2 if is_wide else len(loops) == roles
    for loop in loops:
        assert_products_are_under_way_together(loop, reloads)
        # dS of 64 queries leaves without waiting for the warpgroup's other warps.
        assert is_wide or block_m(call) > 64 or not loop["BAR"]
    if not is_wide:
        loop = dq_loop(made)
        assert_products_are_under_way_together(loop)
        assert not loop["BAR"]


def assert_products_are_under_way_together(loop: Counter, reloads: int = MOST_RELOADS) -> None:
    assert loop["WARPGROUP"] < loop["HGMMA"]
    assert loop["STL"] + loop["LDL"] <= reloads


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_a_step_with_dropout_passes_no_bits_through_shared_memory(head_dim):
    """Lanes pass on which probabilities are dropped by two shuffles. Through shared memory they
    took a barrier of the warpgroup, and one role of both consumers wrote to the same place. A
    thread stores and reloads more numbers, no tensor."""
    call = main_call(head_dim=head_dim, dropout_p=0.1)
    assert call.options["num_warps"] == 8 and call.constants["params.tile.K_STAGES"] == 2
    assert_step_is_sound(call, 2 * (LEAST_OF_A_TENSOR - 1))
    (loop,) = step_loops(call, compiler.artifact(call, DEVICE.arch))
    # dS leaves by four stores, and the numbers of rows are read by sixteen loads.
    assert (loop["SHFL"], loop["STSM"], loop["LDS"]) == (2, 4, 16)


@pytest.mark.slow
def test_wide_heads_with_dropout_fit():
    call = main_call(head_dim=256, dropout_p=0.1)
    assert call.kernel.function == "backward_wide"
    assert_step_is_sound(call, LEAST_OF_A_TENSOR - 1)


@pytest.mark.parametrize(
    "head_dim", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (128, 256))]
)
def test_the_prologue_spills_nothing(head_dim):
    """Whoever spills lse waits for it before it asks for out and dout."""
    made = compiler.artifact(main_call(head_dim=head_dim, function="backward_prologue"), "sm_90")
    code, _, _ = parse_sass(disassemble(made.code).text)
    kinds = Counter(opcode(i).split(".")[0] for i in code)
    assert kinds["LDG"] and not kinds["STL"] + kinds["LDL"]


def test_near_and_far_tiles_share_one_load_of_cotangents():
    """With a load for each, those of the next rows' numbers come after it: 1 to 2 % of a call."""
    made = compiler.artifact(main_call(head_dim=128), DEVICE.arch)
    code, _, _ = parse_sass(disassemble(made.code).text)
    loads = [opcode(i).split(".")[0] for i in code].count("UTMALDG")
    # Boxes of 64 columns: two each of keys and values of both consumers, of queries and of dout.
    assert loads == 2 * (2 + 2 + 1 + 1)


def test_options_that_a_call_cannot_have_are_refused():
    with pytest.raises(ValueError, match="draws"):
        main_call("hopper+draws=0", head_dim=128, deterministic=True)


def test_sums_of_dq_leave_as_blocks_of_memory_or_four_numbers_at_a_time():
    narrow = disassemble(compiler.artifact(main_call(head_dim=128), DEVICE.arch).code).text
    assert "UBLKRED" in narrow and "REDG" not in narrow
    wide = disassemble(compiler.artifact(main_call(head_dim=256), DEVICE.arch).code).text
    assert "F32x4" in wide and "UBLKRED" not in wide


USED = [
    CAPPED,
    {"head_dim": 128, "used_k": True, "causal": True},
    {"head_dim": 64, "leftpad_k": True, "used_k": True},
    {"head_dim": 256, "used_k": True},
    {"head_dim": 128, "total_q": 8192, "total_k": 8192, "used_q": True, "used_k": True},
]


@pytest.mark.parametrize("facts", slow_but(USED[:1], USED), ids=str)
def test_lengths_in_use_cost_nothing_in_the_loop_that_counts(facts):
    """They are the producer's, who loads no key and no query that is not in use, and what gradients
    of other keys are stored as."""
    call = main_call(**facts)
    for name, rank in (("k", 5), ("dk", 5 if "total_k" in facts else 4)):
        found = call.arguments[f"io.{name}"]
        assert isinstance(found, TensorMap) and len(found.shape) == rank
    assert_step_is_sound(call)
