"""The sizes of a plan at its limits: of no tokens, of as many tiles as a device has places, of
heads that fill a cache alone. The figures are recorded, as those of test_plan_sizes.py."""

from dataclasses import replace
from typing import Any

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem, Lengths
from heedful.core.planning.plan import Plan, plan
from heedful.core.planning.sizes import Sizes
from heedful.core.registry.by_hand import forced

BASE = {"batch": 2, "seqlen_q": 1000, "seqlen_k": 1000, "heads_q": 8, "heads_k": 4, "head_dim": 128}
STEP = {**BASE, "seqlen_q": 1, "seqlen_k": 4000, "used_k": True}
LATENT = {**STEP, "seqlen_k": 9000, "heads_q": 128, "heads_k": 1, "head_dim": 576}
LATENT |= {"head_dim_v": 512, "v_in_k": True}
CAUSAL = {"mask": MaskSpec.of(True)}
NARROW = {"mask": MaskSpec.of(False, (0, 3))}
ONE_KV_HEAD = {"heads_q": 64, "heads_k": 1}
SCORES = {"bias": True, "bias_grad": True, "needs_grad": True}


def launches(sizes: Sizes) -> list[str]:
    """Each launch with its programs and numbers."""
    lines = []
    for kernel, launch in sizes.launches.items():
        programs, splits, one = launch.grid
        assert one == 1 and splits in (1, sizes.num_splits)
        numbers = "".join(f" {name}={value}" for name, value in launch.numbers.items())
        lines.append(f"{kernel} {programs}{numbers}")
    return lines


FORWARD = [
    # As many tiles times splits as units: one wave, which needs no counter.
    (
        "hopper",
        {**CAUSAL, **ONE_KV_HEAD, "batch": 33, "seqlen_q": 1, "num_splits": 4},
        ["hopper.forward 132 row_blocks=1 tiles=33 l2_heads=264 l2_groups=0"],
    ),
    (
        "hopper",
        {**NARROW, "num_splits": 3},
        ["hopper.forward 132 row_blocks=6 tiles=96 l2_heads=16 l2_groups=0"],
    ),
    # Heads of few tiles are in groups of one size, those of eight are not.
    (
        "hopper",
        {**CAUSAL, "seqlen_q": 896, "batch": 40},
        ["hopper.forward 132 row_blocks=7 tiles=2240 l2_heads=38 l2_groups=7"],
    ),
    (
        "hopper",
        {**CAUSAL, "seqlen_q": 1024, "batch": 40},
        ["hopper.forward 132 row_blocks=8 tiles=2560 l2_heads=4 l2_groups=71"],
    ),
    (
        "hopper",
        {**CAUSAL, "heads_q": 33, "heads_k": 33, "total_q": 100, "total_k": 1400},
        [
            "hopper.forward 66 row_blocks=6 tiles=66 l2_heads=4 l2_groups=8",
            "hopper.varlen_scheduler 134 capacity=2",
        ],
    ),
    # Scores for the gradient of a bias are made in the backward.
    ("portable", SCORES, ["portable.forward 128 tiles=8 l2_heads=16"]),
    # One head is more than half of L2.
    ("portable", {"seqlen_k": 200_000}, ["portable.forward 128 tiles=8 l2_heads=2"]),
    # More lines than places; lengths of one or no key have one part.
    ("mla", {"heads_q": 600, "heads_k": 3}, ["mla.forward 132 tiles=4"]),
    ("mla", {"heads_q": 600, "heads_k": 200}, ["mla.forward 200 tiles=1"]),
    ("mla", {"seqlen_q": 2, "batch": 1}, ["mla.forward 132 tiles=4"]),
    ("mla", {"seqlen_k": 1}, ["mla.forward 4 tiles=2"]),
    ("mla_swap_ab", {"heads_q": 60, "heads_k": 3}, ["mla_swap_ab.forward 132 tiles=1"]),
    ("mla_swap_ab", {"heads_q": 16, "seqlen_k": 1}, ["mla_swap_ab.forward 2 tiles=1"]),
    ("hopper_decode", {"seqlen_k": 1}, ["hopper_decode.forward 8 tiles=1"]),
    ("hopper_decode", {"heads_q": 300, "heads_k": 300}, ["hopper_decode.forward 300 tiles=1"]),
    ("decode", {"seqlen_k": 0}, ["decode.forward 8 tiles=1"]),
    ("decode", {"seqlen_k": 1}, ["decode.forward 8 tiles=1"]),
    ("decode", {"seqlen_q": 0}, ["decode.forward 0 tiles=0"]),
    ("decode", {"heads_q": 300, "heads_k": 300}, ["decode.forward 300 tiles=1"]),
    ("decode", {**ONE_KV_HEAD, "total_q": 100, "total_k": 0}, ["decode.forward 264 tiles=102"]),
]
BACKWARD = [
    # A window is no triangle.
    (
        "hopper",
        {**NARROW, "seqlen_k": 64},
        [
            "hopper.backward_prologue 256 q_blocks=16",
            "hopper.backward 48 tiles=8 key_blocks=1 l2_heads=8 l2_groups=0 splits=6",
            "hopper.backward_epilogue 264 q_blocks=16 k_blocks=1",
        ],
    ),
    (
        "hopper",
        ONE_KV_HEAD,
        [
            "hopper.backward_prologue 2048 q_blocks=16",
            "hopper.backward 128 tiles=16 key_blocks=8 l2_heads=1 l2_groups=1 splits=8",
            "hopper.backward_epilogue 2080 q_blocks=16 k_blocks=16",
        ],
    ),
    # All heads in the last group, and one more than it takes.
    (
        "hopper",
        {**CAUSAL, "head_dim": 256, "batch": 1, "heads_q": 13, "heads_k": 13},
        [
            "hopper.backward_prologue 208 q_blocks=16",
            "hopper.backward_wide 208 tiles=208 key_blocks=16 l2_heads=12 l2_groups=1 splits=1",
            "hopper.backward_epilogue 208 q_blocks=16",
        ],
    ),
    (
        "hopper",
        {**CAUSAL, "head_dim": 256, "batch": 1, "heads_q": 12, "heads_k": 12},
        [
            "hopper.backward_prologue 192 q_blocks=16",
            "hopper.backward_wide 192 tiles=192 key_blocks=16 l2_heads=12 l2_groups=0 splits=1",
            "hopper.backward_epilogue 192 q_blocks=16",
        ],
    ),
    (
        "portable",
        {"batch": 0, "seqlen_q": 33, "head_dim": 64},
        [
            "portable.backward_queries 0 tiles=1 l2_heads=1",
            "portable.backward_keys 0 tiles=16 l2_heads=1",
        ],
    ),
    (
        "portable",
        {"seqlen_k": 0, "seqlen_q": 65},
        [
            "portable.backward_queries 16 tiles=1 l2_heads=16",
            "portable.backward_keys 0 tiles=0 l2_heads=8",
        ],
    ),
    (
        "portable",
        {"seqlen_k": 200_000, "seqlen_q": 65},
        [
            "portable.backward_queries 16 tiles=1 l2_heads=2",
            "portable.backward_keys 12504 tiles=1563 l2_heads=1",
        ],
    ),
]


def planned(backend: str, facts: dict) -> Plan:
    base = {"mla": LATENT, "mla_swap_ab": LATENT, "decode": STEP, "hopper_decode": STEP}.get(
        backend, BASE
    )
    problem = AttentionProblem.dense(**{**base, **facts})
    chosen = forced("decode/portable") if backend == "decode" else backend
    return plan(problem, by_name("H200"), backend=chosen)


@pytest.mark.parametrize("backend, facts, said", FORWARD)
def test_launches_of_a_forward(backend, facts, said):
    assert launches(planned(backend, facts).sizes()) == said


@pytest.mark.parametrize("backend, facts, said", BACKWARD)
def test_launches_of_a_backward(backend, facts, said):
    sizes = planned(backend, {**facts, "needs_grad": True}).sizes(direction="backward")
    assert launches(sizes) == said and sizes.num_splits == 1


def test_a_wave_of_tiles_is_dealt_out_beforehand():
    one = {**CAUSAL, **ONE_KV_HEAD, "batch": 33, "seqlen_q": 1}
    assert planned("hopper", one).scheduler == "static"
    for more in ({**one, "batch": 133}, {**NARROW, "num_splits": 3}):
        assert planned("hopper", more).scheduler == "dynamic"


def test_a_plan_has_sizes_of_no_tokens_too():
    """Which have a plan of their own, but one is right for any lengths."""
    chosen = planned("mla", {})
    found = {Lengths(0, 1, 9000): 0, Lengths(3, 0, 9000): 0, Lengths(3, 1, 0): 6}
    for lengths, programs in found.items():
        (launch,) = chosen.sizes(lengths).launches.values()
        assert launch.grid == (programs, 1, 1)


@pytest.mark.parametrize("dim_v, columns", [(32, 64), (64, 64), (96, 128)])
def test_partial_results_have_columns_of_a_power_of_two(dim_v, columns):
    (scratch, *_) = planned("decode", {"head_dim_v": dim_v}).sizes().workspaces
    assert scratch.name == "partial_out" and scratch.buffer.shape[-1] == columns


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("dim", [40, 64, 96, 128, 192, 256])
def test_a_hopper_decode_has_64_kb_of_keys_and_values_on_their_way(dim, page_size):
    """Of an SM; but for head dims above 128, whose output leaves room for one program, and of 128
    in pages of fewer keys than a tile: twice as many."""
    chosen = planned("hopper_decode", {"head_dim": dim, "page_size": page_size})
    tile: Any = chosen.configs["hopper_decode.forward"]
    columns = max(64, 1 << (dim - 1).bit_length())
    on_their_way = tile.programs * tile.num_stages * tile.block_n * 2 * columns * 2
    is_double = columns > 128 or columns == 128 and page_size == 16
    assert on_their_way == (128 << 10 if is_double else 64 << 10)
    assert tile.programs == (2 if dim <= 128 else 1)


@pytest.mark.parametrize("batch, programs", [(1, 256), (8, 256), (34, 264), (64, 256), (66, 264)])
def test_a_hopper_decode_cuts_equal_lengths_in_equal_parts_where_that_fills_the_device(
    batch, programs
):
    facts = {"batch": batch, "heads_q": 32, "heads_k": 8, "seqlen_k": 8192}
    (launch,) = planned("hopper_decode", facts).sizes().launches.values()
    assert launch.grid == (programs, 1, 1)


@pytest.mark.parametrize("rows, kept", [(1, 4), (4, 4), (5, 8), (9, 16), (17, 32), (33, 64)])
def test_a_part_of_a_hopper_decode_keeps_as_many_rows_as_the_call_has(rows, kept):
    facts = {"seqlen_q": rows, "heads_q": 2, "heads_k": 2}
    (scratch, *_) = planned("hopper_decode", facts).sizes().workspaces
    assert scratch.name == "partial_out" and scratch.buffer.shape[1] == kept


def test_as_many_programs_of_mla_as_its_tile_has_for_a_unit():
    chosen = planned("mla", {"batch": 1, "seqlen_k": 10**6})
    tile: Any = chosen.configs["mla.forward"]
    for programs in (1, 2):
        own = replace(chosen, configs={"mla.forward": replace(tile, programs=programs)})
        assert own.sizes().launches["mla.forward"].grid == (132 * programs, 1, 1)
