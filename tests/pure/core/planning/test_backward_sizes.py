"""The same as test_plan_sizes.py of a backward."""

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from pure.core.planning.test_plan_sizes import BASE, CAUSAL, MANY, PACKED, cases, told

BACKWARD: dict[tuple[str, str], list[tuple[dict, str]]] = {
    ("H200", "hopper"): [
        (
            {},
            """hopper.backward_prologue (256, 1, 1) q_blocks=16
        hopper.backward (128, 1, 1) tiles=64 key_blocks=8 l2_heads=8 l2_groups=0 splits=2
        hopper.backward_epilogue (384, 1, 1) q_blocks=16 k_blocks=16
        delta (2, 8, 1000) float32
        dq_accum (8, 2048, 128) float32
        lse_log2 (2, 8, 1000) float32
        dout_scale (2, 8, 1000) float32
        tile_counter (1,) int32
        partials (2, 4, 2048, 256) float32""",
        ),
        (
            CAUSAL,
            """hopper.backward_prologue (256, 1, 1) q_blocks=16
        hopper.backward (132, 1, 1) tiles=64 key_blocks=8 l2_heads=8 l2_groups=0 splits=3
        hopper.backward_epilogue (384, 1, 1) q_blocks=16 k_blocks=16
        delta (2, 8, 1000) float32
        dq_accum (8, 2048, 128) float32
        lse_log2 (2, 8, 1000) float32
        dout_scale (2, 8, 1000) float32
        tile_counter (1,) int32
        partials (3, 4, 2048, 256) float32""",
        ),
        (
            {**MANY, **CAUSAL},
            """hopper.backward_prologue (5120, 1, 1) q_blocks=16
        hopper.backward (132, 1, 1) tiles=1280 key_blocks=8 l2_heads=33 l2_groups=3 splits=1
        hopper.backward_epilogue (5120, 1, 1) q_blocks=16
        delta (40, 8, 1000) float32
        dq_accum (8, 40960, 128) float32
        lse_log2 (40, 8, 1000) float32
        dout_scale (40, 8, 1000) float32
        tile_counter (1,) int32""",
        ),
        (
            MANY,
            """hopper.backward_prologue (5120, 1, 1) q_blocks=16
        hopper.backward (132, 1, 1) tiles=1280 key_blocks=8 l2_heads=12 l2_groups=13 splits=1
        hopper.backward_epilogue (5120, 1, 1) q_blocks=16
        delta (40, 8, 1000) float32
        dq_accum (8, 40960, 128) float32
        lse_log2 (40, 8, 1000) float32
        dout_scale (40, 8, 1000) float32
        tile_counter (1,) int32""",
        ),
        (
            {**PACKED, **CAUSAL},
            """hopper.backward_prologue (256, 1, 1) q_blocks=16
        hopper.backward (132, 1, 1) tiles=48 key_blocks=8 l2_heads=4 l2_groups=0 splits=4
        hopper.backward_epilogue (384, 1, 1) q_blocks=16 k_blocks=16
        hopper.varlen_scheduler (134, 1, 1) capacity=12
        delta (8, 1500) float32
        dq_accum (8, 1600, 128) float32
        lse_log2 (8, 1500) float32
        dout_scale (8, 1500) float32
        tile_counter (1,) int32
        partials (4, 4, 1536, 256) float32
        varlen_tiles (25,) int32""",
        ),
        (
            PACKED,
            """hopper.backward_prologue (256, 1, 1) q_blocks=16
        hopper.backward (132, 1, 1) tiles=48 key_blocks=8 l2_heads=4 l2_groups=0 splits=4
        hopper.backward_epilogue (384, 1, 1) q_blocks=16 k_blocks=16
        hopper.varlen_scheduler (134, 1, 1) capacity=12
        delta (8, 1500) float32
        dq_accum (8, 1600, 128) float32
        lse_log2 (8, 1500) float32
        dout_scale (8, 1500) float32
        tile_counter (1,) int32
        partials (4, 4, 1536, 256) float32
        varlen_tiles (25,) int32""",
        ),
        (
            {"deterministic": True},
            """hopper.backward_prologue (256, 1, 1) q_blocks=16
        hopper.backward (128, 1, 1) tiles=64 key_blocks=8 l2_heads=8 l2_groups=0 splits=2
        hopper.backward_epilogue (384, 1, 1) q_blocks=16 k_blocks=16
        delta (2, 8, 1000) float32
        dq_accum (8, 2048, 128) float32
        lse_log2 (2, 8, 1000) float32
        dout_scale (2, 8, 1000) float32
        tile_counter (1,) int32
        turns (256,) int32
        partials (2, 4, 2048, 256) float32""",
        ),
        (
            {"deterministic": True, "seqlen_q": 16_000},
            """hopper.backward_prologue (4000, 1, 1) q_blocks=250
        hopper.backward (128, 1, 1) tiles=64 key_blocks=8 l2_heads=4 l2_groups=1 splits=2
        hopper.backward_epilogue (4128, 1, 1) q_blocks=250 k_blocks=16
        delta (2, 8, 16000) float32
        dq_accum (8, 32000, 128) float32
        lse_log2 (2, 8, 16000) float32
        dout_scale (2, 8, 16000) float32
        tile_counter (1,) int32
        turns (4000,) int32
        partials (2, 4, 2048, 256) float32""",
        ),
        (
            {**CAUSAL, "deterministic": True, "batch": 9},
            """hopper.backward_prologue (1152, 1, 1) q_blocks=16
        hopper.backward (132, 1, 1) tiles=288 key_blocks=8 l2_heads=12 l2_groups=2 splits=1
        hopper.backward_epilogue (1152, 1, 1) q_blocks=16
        delta (9, 8, 1000) float32
        dq_accum (8, 9216, 128) float32
        lse_log2 (9, 8, 1000) float32
        dout_scale (9, 8, 1000) float32
        tile_counter (1,) int32
        turns (1152,) int32""",
        ),
        (
            {"head_dim": 256},
            """hopper.backward_prologue (256, 1, 1) q_blocks=16
        hopper.backward_wide (128, 1, 1) tiles=128 key_blocks=16 l2_heads=6 l2_groups=1 splits=1
        hopper.backward_epilogue (256, 1, 1) q_blocks=16
        delta (2, 8, 1000) float32
        dq_accum (8, 2048, 256) float32
        lse_log2 (2, 8, 1000) float32
        dout_scale (2, 8, 1000) float32""",
        ),
        (
            {"head_dim": 192, "head_dim_v": 128},
            """hopper.backward_prologue (256, 1, 1) q_blocks=16
        hopper.backward_pair (128, 1, 1) tiles=64 key_blocks=8 l2_heads=8 l2_groups=0 splits=2
        hopper.backward_epilogue (384, 1, 1) q_blocks=16 k_blocks=16
        delta (2, 8, 1000) float32
        dq_accum (8, 2048, 192) float32
        lse_log2 (2, 8, 1000) float32
        dout_scale (2, 8, 1000) float32
        partials (2, 4, 2048, 320) float32""",
        ),
        (
            {"head_dim": 64, "softcap": 3.0},
            """hopper.backward_prologue (256, 1, 1) q_blocks=16
        hopper.backward (128, 1, 1) tiles=64 key_blocks=8 l2_heads=8 l2_groups=0 splits=2
        hopper.backward_epilogue (384, 1, 1) q_blocks=16 k_blocks=16
        delta (2, 8, 1000) float32
        dq_accum (8, 2048, 64) float32
        lse_log2 (2, 8, 1000) float32
        dout_scale (2, 8, 1000) float32
        tile_counter (1,) int32
        partials (2, 4, 2048, 128) float32""",
        ),
        (
            {"mask": MaskSpec.of(True, (100, 0)), "batch": 1},
            """hopper.backward_prologue (128, 1, 1) q_blocks=16
        hopper.backward (128, 1, 1) tiles=32 key_blocks=8 l2_heads=4 l2_groups=0 splits=4
        hopper.backward_epilogue (192, 1, 1) q_blocks=16 k_blocks=16
        delta (1, 8, 1000) float32
        dq_accum (8, 1024, 128) float32
        lse_log2 (1, 8, 1000) float32
        dout_scale (1, 8, 1000) float32
        tile_counter (1,) int32
        partials (4, 4, 1024, 256) float32""",
        ),
        (
            {**CAUSAL, "heads_q": 64, "heads_k": 1, "batch": 16},
            """hopper.backward_prologue (16384, 1, 1) q_blocks=16
        hopper.backward (132, 1, 1) tiles=128 key_blocks=8 l2_heads=16 l2_groups=0 splits=2
        hopper.backward_epilogue (16640, 1, 1) q_blocks=16 k_blocks=16
        delta (16, 64, 1000) float32
        dq_accum (64, 16384, 128) float32
        lse_log2 (16, 64, 1000) float32
        dout_scale (16, 64, 1000) float32
        tile_counter (1,) int32
        partials (2, 1, 16384, 256) float32""",
        ),
    ],
    ("B200", "portable"): [
        (
            {},
            """portable.backward_queries (256, 1, 1) tiles=16 l2_heads=16
        portable.backward_keys (128, 1, 1) tiles=16 l2_heads=8
        delta (2, 8, 1000) float32
        near (2, 8, 1000) float32
        reference (2, 8, 1000) float32
        factor (2, 8, 1000) float32""",
        ),
        (
            {"seqlen_k": 40_000, "seqlen_q": 70},
            """portable.backward_queries (32, 1, 1) tiles=2 l2_heads=6
        portable.backward_keys (5000, 1, 1) tiles=625 l2_heads=3
        delta (2, 8, 70) float32
        near (2, 8, 70) float32
        reference (2, 8, 70) float32
        factor (2, 8, 70) float32""",
        ),
    ],
}


@pytest.mark.parametrize("device, backend, facts, said", cases(BACKWARD))
def test_grids_and_scratch_of_a_backward(device, backend, facts, said):
    problem = AttentionProblem.dense(**{**BASE, "needs_grad": True, **facts})
    sizes = plan(problem, by_name(device), backend=backend).sizes(direction="backward")
    assert told(sizes).splitlines() == [line.strip() for line in said.splitlines()]


def test_keys_that_are_stored_and_not_those_in_use_have_tiles_of_a_backward():
    problem = AttentionProblem.dense(**{**BASE, "needs_grad": True})
    for device, kernel, backend, name, tiles in (
        ("H200", "hopper.backward", "hopper", "key_blocks", 16),
        ("B200", "portable.backward_keys", "portable", "tiles", 32),
    ):
        sizes = plan(problem, by_name(device), backend=backend).sizes(
            direction="backward", stored_k=2000
        )
        assert sizes.launches[kernel].numbers[name] == tiles
