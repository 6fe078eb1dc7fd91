"""The Hopper forward compiled for sm_90 without a GPU: every config, and what makes a variant."""

import heapq
import struct
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from triton.experimental.gluon import language as gl

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning import plan
from heedful.core.planning.plan import Plan
from heedful.core.registry import configs
from heedful.core.registry.by_hand import forced
from heedful.core.registry.configs import ConfigRow
from heedful.core.registry.tiles import HopperForwardConfig
from heedful.inspector.nvidia import disassemble, inspect_cubin, parse_sass
from heedful.kernels.hopper.sm90 import speculative_softmax
from heedful.kernels.hopper.sm90.pipeline import full_barriers
from heedful.launch import compiler
from heedful.launch.bind import hopper
from heedful.launch.prebuild import compiling
from heedful.launch.program import buffers, programs
from heedful.launch.spec import Scalar, TensorMap
from support.hopper.loops import bare_loop, each_loop
from support.problems.grids import slow_but

DEVICE = by_name("H200")
_TILE = HopperForwardConfig(128, 128, 4, 2, consumer_regs=240, pingpong=True)
PLAIN = ConfigRow("hopper.forward", ("sm_90",), 128, _TILE, "tests", lambda problem: True)
_KINDS = [
    AttentionProblem.dense(2, rows, 2000, 8, 4, head_dim=64, bias=bias, alibi=rows < 40)
    for rows in (3000, 100, 50, 30, 10)
    for bias in (False, True)
]
ROWS = [
    row
    for row in configs.ROWS
    if row.kernel == "hopper.forward" and any(row.when(problem) for problem in _KINDS)
]


def planned(row, **facts):
    """The forward's attention kernel under a given row of the config table."""
    facts = {"head_dim": row.max_dim, "return_lse": True, **facts}
    problem = AttentionProblem.dense(2, 300, 300, 8, 4, **facts)
    config = row.config.fitted(problem, compiling().triton)
    chosen = Plan(
        problem, DEVICE, "hopper", "run", variant="forward", configs={"hopper.forward": config}
    )
    *_, call = hopper.forward(problem, chosen, buffers.forward(problem)).calls
    return call


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"d{row.max_dim}-{row.config.block_m}")
def test_the_registers_of_every_config_fit_an_sm(row):
    # One consumer alone gets what the producer leaves.
    registers = (row.config.consumer_regs or 0) * row.config.block_m // 64
    assert registers + row.config.producer_regs <= 512  # of 65536, by 128 threads


HOPPER_ROWS = [row for row in configs.ROWS if row.kernel == "hopper.forward"]


@pytest.mark.parametrize("row", HOPPER_ROWS, ids=lambda r: f"d{r.max_dim}-{r.config.block_m}")
def test_each_barrier_that_tells_of_queries_is_one_consumers(row):
    """Who does not see each phase of a barrier may take one for the next."""
    consumers = row.config.block_m // 64
    stages = row.config.query_stages
    if row.when(AttentionProblem.dense(1, 1, 1, 1, dtype="float8_e4m3fn")):
        assert stages % consumers == 0
    waits = [tile % full_barriers(stages, consumers) for tile in range(20 * consumers)]
    of_each = [set(waits[consumer::consumers]) for consumer in range(consumers)]
    assert sum(map(len, of_each)) == len(set().union(*of_each)) >= stages


def whole(problem):
    """The forward's calls and scratch under the planner's choice."""
    chosen = plan.plan(problem, DEVICE, compiling(), "hopper")
    return hopper.forward(problem, chosen, buffers.forward(problem))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_packed_queries_take_a_program_an_sm_however_long_the_longest_is(dim, causal):
    """And not one for every tile of the longest sequence times their number, mostly empty."""
    for longest in (100, 100_000):
        problem = AttentionProblem.dense(
            50, longest, longest, 8, head_dim=dim, causal=causal, total_q=101_000, total_k=101_000
        )
        schedule, attention = whole(problem).calls
        # A program a sequence, and one an SM for tokens of no sequence.
        assert schedule.grid == (50 + DEVICE.units, 1, 1) and attention.grid == (DEVICE.units, 1, 1)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_many_tiles_of_unlike_length_take_the_dynamic_scheduler_and_others_do_not(dim):
    def is_dynamic(seqlen_q, seqlen_k, **facts):
        program = whole(
            AttentionProblem.dense(2, seqlen_q, seqlen_k, heads_q=16, head_dim=dim, **facts)
        )
        assert program.calls[0].grid == (DEVICE.units, 1, 1)
        return [(w.name, w.zeroed) for w in program.workspaces] == [("tile_counter", True)]

    long = (4096, 4096)
    assert is_dynamic(*long, causal=True) and is_dynamic(*long, mask=MaskSpec.of(True, (1000, 0)))
    assert is_dynamic(1100, 1100, causal=True) and not is_dynamic(*long)
    few = whole(AttentionProblem.dense(1, 1000, 1000, heads_q=16, head_dim=dim, causal=True))
    assert few.calls[0].grid[0] <= DEVICE.units and not few.workspaces


MIXES: list[dict] = [
    {"page_size": 16},
    {"page_size": 16, "num_splits": 1, "return_lse": True, "sink": True},
    {"head_dim": 64, "mask": MaskSpec.of(True, (500, 0))},
    {"head_dim": 256, "alibi": True, "softcap": 20.0},
]


@pytest.mark.parametrize("mixed", ("mixed/portable", "hopper_mixed"))
@pytest.mark.parametrize("facts", MIXES, ids=str)
def test_the_long_sequences_of_a_mixed_batch_run_the_code_of_a_batch_of_their_own(facts, mixed):
    if mixed == "hopper_mixed":
        facts = {name: fact for name, fact in facts.items() if name not in ("alibi", "softcap")}
    sizes = {"total_q": 4 * 2048 + 124, "used_k": True, "causal": "mask" not in facts}
    problem = AttentionProblem.dense(128, 2048, 8192, 32, 8, **sizes, **facts)
    pair, alone = (
        programs.program(plan.plan(problem, DEVICE, compiling(), backend), "forward").calls
        for backend in (forced(mixed), "hopper")
    )
    assert [call.kernel.function for call in pair] == ["schedule_varlen_tiles", "decode", "forward"]
    _, short, long = pair
    # But for a wait at the end.
    waits = replace(alone[1], parameters={**alone[1].parameters, "BEGINS_EARLY": True})
    assert long.specialization == waits.specialization and long.grid == waits.grid
    assert short.writes & long.writes == {"out", "lse"} & long.writes
    # What begins at zero is read by one of them.
    assert "counts" not in long.writes and "tile_counter" not in short.writes


@pytest.mark.slow
def test_the_wait_at_the_end_of_a_mixed_batch_is_all_that_differs():
    sizes = {"total_q": 4 * 2048 + 124, "used_k": True, "page_size": 16, "causal": True}
    problem = AttentionProblem.dense(128, 2048, 8192, 32, 8, **sizes)
    counts = []
    for backend in ("hopper_mixed", "hopper"):
        chosen = plan.plan(problem, DEVICE, compiling(), backend)
        *_, call = programs.program(chosen, "forward").calls
        text = disassemble(compiler.artifact(call, DEVICE.arch).code).text
        code, _, _ = parse_sass(text)
        names = (instruction.text.split()[0] for instruction in code)
        counts.append(Counter(name for name in names if name != "NOP"))
    assert counts[0] == counts[1] + Counter(["ACQBULK"])


def values(call, *names):
    return tuple(call.arguments[name].value for name in names)


def in_order(call):
    """The row blocks of a call's tiles as `tile_scheduler.l2_swizzle` numbers them."""
    l2_heads, l2_groups, blocks, tiles = values(
        call, *(f"params.order.{name}" for name in ("l2_heads", "l2_groups", "row_blocks", "tiles"))
    )
    for first in [l2_heads * i for i in range(l2_groups + 1)]:
        width = l2_heads if first < l2_heads * l2_groups else tiles // blocks - first
        yield from (block for block in reversed(range(blocks)) for _ in range(width))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "sizes",
    [(1, 16384, 16), (2, 8192, 16), (4, 4096, 16), (16, 1024, 32), (7, 1300, 24), (3, 5000, 13)],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_programs_of_the_dynamic_scheduler_end_at_about_the_same_time(sizes, dim, dtype):
    """Within a tenth of the mean, above which groups of a few heads alone are by up to 15 %."""
    batch, length, heads = sizes
    problem = AttentionProblem.dense(
        batch, length, length, heads, head_dim=dim, dtype=dtype, out_dtype="bfloat16", causal=True
    )
    chosen = plan.plan(problem, DEVICE, compiling(), "hopper")
    *_, call = programs.program(chosen, "forward").calls
    config = next(iter(chosen.configs.values()))
    ends = [0.0] * DEVICE.units
    blocks = list(in_order(call))
    assert sorted(blocks) == sorted(list(range(-(-length // config.block_m))) * batch * heads)
    for block in blocks:
        steps = -(-min(length, (block + 1) * config.block_m) // config.block_n)
        # What begins and ends a tile takes as long as some three of its steps.
        heapq.heapreplace(ends, ends[0] + steps + 3)
    assert max(ends) < 1.1 * sum(ends) / len(ends)


def test_no_more_heads_are_worked_on_side_by_side_than_l2_has_room_for():
    """A part of a long prompt: 512 queries on 65536 keys, 32 MiB of K and V for each head."""
    problem = AttentionProblem.dense(4, 512, 65536, heads_q=16, head_dim=128, causal=True)
    assert values(whole(problem).calls[-1], "params.order.l2_heads", "params.order.l2_groups") == (
        4,
        15,
    )


@each_loop
def test_what_few_steps_need_is_outside_of_the_loop_that_counts(head_dim, mask, lse):
    """Masks, and what an overflow takes: jumped over they would cost every step. What
    remains is an FFMA, an exponential and an addition for each of a thread's scores, and four
    branches: the waits for values and keys, of which the last may be none, and the loop's own."""
    facts = {"head_dim": head_dim, "mask": mask, "return_lse": lse}
    *_, call = whole(AttentionProblem.dense(4, 4096, 4096, 16, **facts)).calls
    loop, keys = bare_loop(call, DEVICE), call.constants["params.tile.BLOCK_N"]
    assert isinstance(keys, int)
    assert (loop.mufu, loop.floats) == (keys // 2, keys)
    assert loop.counts["BRA"] <= 4


@pytest.mark.parametrize("facts", [{}, {"num_splits": 3}, {"page_size": 32, "used_k": True}])
@pytest.mark.parametrize("dims", [(192, 128), (192, 192), (136, 256), (64, 192)])
def test_up_to_192_columns_are_loaded_as_boxes_of_64(dims, facts):
    problem = AttentionProblem.dense(
        2, 300, 3000, 8, 4, head_dim=dims[0], head_dim_v=dims[1], **{"num_splits": 1, **facts}
    )
    chosen = plan.plan(problem, DEVICE, compiling(), "hopper")
    call = hopper.forward(problem, chosen, buffers.forward(problem)).calls[0]
    thirds = [128 < dim <= 192 and not problem.page_size for dim in dims]
    assert [call.constants[f"params.tile.{name}"] for name in ("TAIL_D", "TAIL_E")] == thirds
    for name, is_thirds in zip(("io.k", "io.v"), thirds, strict=True):
        descriptor = call.arguments[name]
        assert isinstance(descriptor, TensorMap)
        assert not is_thirds or descriptor.block[-1] == 64


def test_sums_may_grow_as_far_as_their_type_allows_before_a_warp_rescales():
    """A limit that is too low is not wrong, only slow: the scores are then computed twice."""
    limits = {
        str(dtype): speculative_softmax.sum_limit(dtype) for dtype in (gl.bfloat16, gl.float16)
    }
    floats = {name: struct.unpack("f", struct.pack("I", bits))[0] for name, bits in limits.items()}
    assert floats == {"bf16": 2.0**32, "fp16": 2.0**12}


def test_the_plain_variant_has_no_argument_of_a_feature_that_it_lacks():
    plain = {
        "io": "q k v out lse",
        "params.seqs": "seqlen_q seqlen_k",
        "params.gqa": "heads group",
        "params.mask": "left right bottom_right shift",
        "params.mods": "scale_log2 softcap_scale",
        "params.order": "tiles row_blocks l2_heads l2_groups",
    }
    names = {f"{group}.{name}" for group, names in plain.items() for name in names.split()}
    assert set(planned(PLAIN).arguments) == names


def test_maps_of_rows_reach_every_batch_entry():
    """Row r of a sequence of n in batch entry b is address b stride_b + r stride_row, modulo 2^64
    bytes, however the batch lies; rows past n are past the map."""
    dense = ArraySpec.contiguous((3, 700, 4, 128), "bfloat16")
    heads_first = ArraySpec((3, 700, 4, 128), (700 * 512, 128, 700 * 128, 1), "bfloat16")
    padded = ArraySpec((3, 700, 4, 128), (900 * 640, 640, 160, 1), "bfloat16")
    for spec in (dense, heads_first, padded):
        problem = AttentionProblem.dense(3, 9, 700, 4, head_dim=128, used_k=True)
        chosen = Plan(
            problem,
            DEVICE,
            "hopper",
            "run",
            variant="forward",
            configs={"hopper.forward": PLAIN.config},
        )
        given = {**buffers.forward(problem), "k": spec, "v": spec}
        (call,) = hopper.forward(problem, chosen, given).calls
        descriptor = call.arguments["io.k"]
        assert isinstance(descriptor, TensorMap)
        batch, head, at, length = 2, 3, 123, 300
        rows = call.arguments["params.kv_rows.k_rows"]
        assert isinstance(rows, Scalar)
        start = batch * int(rows.value)
        coordinates = (1 << 30, start + length, head, (1 << 30) - length + at, 0)
        address = sum(c * s for c, s in zip(coordinates, descriptor.strides, strict=True))
        strides = spec.strides
        assert address % (1 << 63) == batch * strides[0] + at * strides[1] + head * strides[2]
        assert descriptor.shape[3] == 1 << 30


def test_packed_heads_are_neighbours_of_one_tile():
    """Row r of a tile is position r // 4 of query head r % 4 of its KV head: 3 of them, so that
    every fourth row is past the map."""
    problem = AttentionProblem.dense(2, 10, 700, 6, 2, head_dim=128, num_splits=1)
    chosen = plan.plan(problem, DEVICE, compiling(), "hopper")
    (call,) = hopper.forward(problem, chosen, buffers.forward(problem)).calls
    descriptor = call.arguments["io.q"]
    assert isinstance(descriptor, TensorMap)
    assert call.constants["params.gqa.PACK_GQA"] == 4 and descriptor.block == (1, 1, 16, 4, 128)
    assert descriptor.shape == (2, 2, 10, 3, 128)
    assert descriptor.strides == (10 * 6 * 128, 3 * 128, 6 * 128, 128, 1)


def test_a_new_length_batch_or_head_count_is_the_same_variant():
    first = planned(PLAIN)
    problem = AttentionProblem.dense(3, 77, 1001, 16, 2, head_dim=128, return_lse=True)
    chosen = Plan(
        problem,
        DEVICE,
        "hopper",
        "run",
        variant="forward",
        configs={"hopper.forward": PLAIN.config},
    )
    (call,) = hopper.forward(problem, chosen, buffers.forward(problem)).calls
    assert call.specialization == first.specialization


def test_packed_maps_end_with_each_sequence():
    """Row r of a sequence of n tokens that ends at token e is address (e - n + r) tokens, modulo
    2^64 bytes, and rows past the sequence are past the map."""
    call = planned(PLAIN, total_q=1000, total_k=1000)
    descriptor = call.arguments["io.k"]
    assert isinstance(descriptor, TensorMap)
    tokens = descriptor.strides[3]
    end, length, at = 700, 300, 123
    coordinates = (1 << 30, end, 0, (1 << 30) - length + at, 0)
    address = 2 * sum(c * s for c, s in zip(coordinates, descriptor.strides, strict=True))
    assert address % (1 << 64) == (end - length + at) * tokens * 2
    assert (1 << 30) - length + length == descriptor.shape[3]


TERMS = [{"alibi": True}, {"bias": True}, {"rel_bias": True}]


@pytest.mark.parametrize("dim", [64, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("terms", slow_but(TERMS[:1], TERMS), ids=str)
def test_scores_with_a_bias_are_subtracted_from_before_they_are_scaled(terms, dim):
    """A product of the exponent alone, for each of a thread's scores, in place of one in the
    subtraction; ALiBi alone is taken off raw scores. No bias makes the loop spill."""
    *_, call = whole(AttentionProblem.dense(4, 4096, 4096, 16, head_dim=dim, **terms)).calls
    assert call.constants["params.tile.RESCALE"] == "threshold"
    assert ("params.mods.unit" in call.arguments) == ("alibi" not in terms)
    assert ("params.mods.per_unit" in call.arguments) == ("alibi" in terms)
    found = inspect_cubin(compiler.artifact(call, DEVICE.arch).code).loop
    assert found is not None
    keys = call.constants["params.tile.BLOCK_N"]
    assert isinstance(keys, int)
    scores = keys // 2
    # Scores with their bias or ALiBi, and those less their reference.
    fused = scores if "alibi" not in terms else 2 * scores
    assert fused <= found.counts["FFMA"] < fused + scores
    assert not ("alibi" not in terms and found.spills)


EXACT = [
    {"head_dim": 128, "causal": True},
    {"head_dim": 64, "causal": True, "total_q": 3000, "total_k": 3000, "used_q": True},
    {"head_dim": 192, "head_dim_v": 128},
    {"head_dim": 256, "num_splits": 1, "seqlen_q": 30},
]


@pytest.mark.slow
@pytest.mark.parametrize("facts", EXACT, ids=str)
def test_results_in_float32_are_stored_from_registers_and_take_none_of_the_loop(facts):
    """They pass through no shared memory, of which they would take twice as much."""
    sizes: dict[str, Any] = {
        "batch": 2,
        "seqlen_q": 2000,
        "seqlen_k": 3000,
        "heads_q": 8,
        "heads_k": 2,
    }
    sizes |= {"return_lse": True, **facts}
    codes = []
    for dtype in ("float32", "bfloat16"):
        *_, call = whole(AttentionProblem.dense(**sizes, out_dtype=dtype)).calls
        assert ("io.out" in call.arguments) == (dtype == "bfloat16")
        codes.append(compiler.artifact(call, DEVICE.arch))
    exact, rounded = codes
    text = disassemble(exact.code).text
    assert text.count("UTMASTG") == 0 and "STG.E" in text
    # But for some numbers that roles are told.
    assert exact.shared_bytes <= rounded.shared_bytes + 64
    loops = [found for code in codes if (found := inspect_cubin(code.code).loop) is not None]
    assert [loop.spills for loop in loops] == [0, 0]
    names = "HGMMA", "MUFU", "FFMA", "FADD"
    counts = [[loop.counts[name] for name in names] for loop in loops]
    assert counts[0] == counts[1]
