"""What lengths change of a plan, whole: grids, what kernels are told of their work, and scratch.
The figures are recorded, so that a change of them is seen; a dozen were checked by hand. They
follow from tiles of rows times heads, heads whose operands fit a share of the cache, and parts
that fill the device."""

import os
from pathlib import Path

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.planning.sizes import Sizes
from heedful.core.registry.by_hand import forced

BASE = {"batch": 2, "seqlen_q": 1000, "seqlen_k": 1000, "heads_q": 8, "heads_k": 4, "head_dim": 128}
ONE_QUERY = {**BASE, "seqlen_q": 1, "seqlen_k": 4000, "used_k": True}
LATENT = {**ONE_QUERY, "seqlen_k": 9000, "heads_q": 128, "heads_k": 1, "head_dim": 576}
LATENT |= {"head_dim_v": 512, "v_in_k": True}
CAUSAL = {"mask": MaskSpec.of(True)}
MANY = {"batch": 40}
PACKED = {"total_q": 1500, "total_k": 1400}
FP8 = {"dtype": "float8_e4m3fn"}

FORWARD: dict[tuple[str, str], list[tuple[dict, str]]] = {
    ("H200", "mla"): [
        (
            {},
            """mla.forward (132, 1, 1) tiles=2
        partial_out (528, 64, 256) float32
        partial_sums (528, 64, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"heads_q": 64, "batch": 3},
            """mla.forward (108, 1, 1) tiles=1
        partial_out (432, 64, 256) float32
        partial_sums (432, 64, 2) float32
        counts (6,) int32 zeroed""",
        ),
        (
            {"heads_q": 16, "batch": 140, "seqlen_k": 100},
            """mla.forward (132, 1, 1) tiles=1
        partial_out (528, 16, 256) float32
        partial_sums (528, 16, 2) float32
        counts (280,) int32 zeroed""",
        ),
        (
            {"batch": 40},
            """mla.forward (132, 1, 1) tiles=2
        partial_out (528, 64, 256) float32
        partial_sums (528, 64, 2) float32
        counts (160,) int32 zeroed""",
        ),
        (
            {"num_splits": 3},
            """3 splits
        mla.forward (12, 1, 1) tiles=2
        partial_out (24, 64, 256) float32
        partial_sums (24, 64, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"num_splits": 1},
            """mla.forward (4, 1, 1) tiles=2""",
        ),
        (
            {"seqlen_k": 257, "heads_q": 64},
            """mla.forward (6, 1, 1) tiles=1
        partial_out (24, 64, 256) float32
        partial_sums (24, 64, 2) float32
        counts (4,) int32 zeroed""",
        ),
        (
            {"heads_q": 2048, "batch": 1},
            """mla.forward (128, 1, 1) tiles=32
        partial_out (512, 64, 256) float32
        partial_sums (512, 64, 2) float32
        counts (64,) int32 zeroed""",
        ),
    ],
    ("H200", "mla_swap_ab"): [
        (
            {"heads_q": 16, "batch": 40},
            """mla_swap_ab.forward (132, 1, 1) tiles=1
        partial_out (264, 16, 512) float32
        partial_sums (264, 16, 2) float32
        counts (40,) int32 zeroed""",
        ),
        (
            {"heads_q": 5, "batch": 140, "seqlen_k": 100},
            """mla_swap_ab.forward (132, 1, 1) tiles=1
        partial_out (264, 8, 512) float32
        partial_sums (264, 8, 2) float32
        counts (140,) int32 zeroed""",
        ),
        (
            {"heads_q": 32, "num_splits": 3},
            """3 splits
        mla_swap_ab.forward (6, 1, 1) tiles=1
        partial_out (6, 32, 512) float32
        partial_sums (6, 32, 2) float32
        counts (2,) int32 zeroed""",
        ),
        (
            {"heads_q": 32, "num_splits": 1},
            """mla_swap_ab.forward (2, 1, 1) tiles=1""",
        ),
    ],
    ("H200", "hopper_decode"): [
        (
            {},
            """hopper_decode.forward (128, 1, 1) tiles=1
        partial_out (256, 4, 128) float32
        partial_sums (256, 4, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"heads_q": 48, "batch": 64, "seqlen_k": 8192},
            """hopper_decode.forward (256, 1, 1) tiles=1
        partial_out (512, 16, 128) float32
        partial_sums (512, 16, 2) float32
        counts (256,) int32 zeroed""",
        ),
        (
            {"seqlen_q": 8, "batch": 40, "heads_k": 8, "heads_q": 32},
            """hopper_decode.forward (264, 1, 1) tiles=1
        partial_out (528, 32, 128) float32
        partial_sums (528, 32, 2) float32
        counts (320,) int32 zeroed""",
        ),
        (
            {"num_splits": 3, "head_dim": 80, "head_dim_v": 40},
            """3 splits
        hopper_decode.forward (24, 1, 1) tiles=1
        partial_out (24, 4, 64) float32
        partial_sums (24, 4, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"num_splits": 1, "head_dim": 64},
            """hopper_decode.forward (8, 1, 1) tiles=1""",
        ),
        (
            {"total_q": 5, "seqlen_q": 3},
            """hopper_decode.forward (128, 1, 1) tiles=2
        partial_out (256, 8, 128) float32
        partial_sums (256, 8, 2) float32
        counts (8,) int32 zeroed""",
        ),
    ],
    ("H200", "decode/portable"): [
        (
            {},
            """decode.forward (128, 1, 1) tiles=1
        partial_out (256, 16, 128) float32
        partial_sums (256, 16, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"kv_dtype": "int8", "kv_group": 16},
            """decode.forward (64, 1, 1) tiles=1
        partial_out (128, 16, 128) float32
        partial_sums (128, 16, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"kv_dtype": "int4", "kv_group": 32},
            """decode.forward (64, 1, 1) tiles=1
        partial_out (128, 16, 128) float32
        partial_sums (128, 16, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"head_dim": 96, "head_dim_v": 40},
            """decode.forward (128, 1, 1) tiles=1
        partial_out (256, 16, 64) float32
        partial_sums (256, 16, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"num_splits": 3},
            """3 splits
        decode.forward (24, 1, 1) tiles=1
        partial_out (24, 16, 128) float32
        partial_sums (24, 16, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"num_splits": 1},
            """decode.forward (8, 1, 1) tiles=1""",
        ),
        (
            {"total_q": 5, "seqlen_q": 3},
            """decode.forward (128, 1, 1) tiles=2
        partial_out (256, 16, 128) float32
        partial_sums (256, 16, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"seqlen_k": 0},
            """decode.forward (8, 1, 1) tiles=1
        partial_out (16, 16, 128) float32
        partial_sums (16, 16, 2) float32
        counts (8,) int32 zeroed""",
        ),
        (
            {"batch": 300, "seqlen_k": 100},
            """decode.forward (264, 1, 1) tiles=1
        partial_out (528, 16, 128) float32
        partial_sums (528, 16, 2) float32
        counts (1200,) int32 zeroed""",
        ),
        (
            {"heads_q": 20, "heads_k": 1, "seqlen_q": 2},
            """decode.forward (32, 1, 1) tiles=1
        partial_out (64, 64, 128) float32
        partial_sums (64, 64, 2) float32
        counts (2,) int32 zeroed""",
        ),
        (
            {"batch": 0},
            """decode.forward (0, 1, 1) tiles=1
        partial_out (0, 16, 128) float32
        partial_sums (0, 16, 2) float32
        counts (0,) int32 zeroed""",
        ),
    ],
    ("H200", "hopper"): [
        (
            {},
            """hopper.forward (128, 1, 1) row_blocks=8 tiles=128 l2_heads=1 l2_groups=15""",
        ),
        (
            CAUSAL,
            """hopper.forward (128, 1, 1) row_blocks=8 tiles=128 l2_heads=4 l2_groups=0""",
        ),
        (
            MANY,
            """hopper.forward (132, 1, 1) row_blocks=8 tiles=2560 l2_heads=1 l2_groups=319""",
        ),
        (
            {**MANY, **CAUSAL},
            """hopper.forward (132, 1, 1) row_blocks=8 tiles=2560 l2_heads=4 l2_groups=71
        tile_counter (1,) int32 zeroed""",
        ),
        (
            {**MANY, **CAUSAL, "seqlen_q": 300, "seqlen_k": 300},
            """hopper.forward (132, 1, 1) row_blocks=3 tiles=960 l2_heads=88 l2_groups=2
        tile_counter (1,) int32 zeroed""",
        ),
        (
            {**MANY, **CAUSAL, "seqlen_k": 100_000},
            """hopper.forward (132, 1, 1) row_blocks=8 tiles=2560 l2_heads=4 l2_groups=79
        tile_counter (1,) int32 zeroed""",
        ),
        (
            {**PACKED, **CAUSAL},
            """hopper.forward (72, 1, 1) row_blocks=6 tiles=72 l2_heads=4 l2_groups=1
        hopper.varlen_scheduler (134, 1, 1) capacity=9
        tile_counter (1,) int32
        varlen_tiles (19,) int32""",
        ),
        (
            PACKED,
            """hopper.forward (72, 1, 1) row_blocks=6 tiles=72 l2_heads=1 l2_groups=7
        hopper.varlen_scheduler (134, 1, 1) capacity=9
        tile_counter (1,) int32
        varlen_tiles (19,) int32""",
        ),
        (
            {"used_q": True},
            """hopper.forward (128, 1, 1) row_blocks=8 tiles=128 l2_heads=1 l2_groups=15""",
        ),
        (
            {**MANY, **CAUSAL, "used_k": True},
            """hopper.forward (2560, 1, 1) row_blocks=8 tiles=2560 l2_heads=4 l2_groups=71""",
        ),
        (
            {"num_splits": 3, "return_lse": True},
            """3 splits
        hopper.forward (132, 1, 1) row_blocks=8 tiles=128 l2_heads=1 l2_groups=15
        partial_out (3, 2, 1000, 8, 128) float32
        partial_lse (3, 2, 8, 1000) float32
        partial_rest (3, 2, 8, 1000) float32""",
        ),
        (
            {"seqlen_q": 20},
            """4 splits
        hopper.forward (32, 1, 1) row_blocks=1 tiles=8 l2_heads=1 l2_groups=7
        partial_out (4, 2, 20, 8, 128) float32
        partial_lse (4, 2, 8, 20) float32
        partial_rest (4, 2, 8, 20) float32""",
        ),
        (
            {**FP8, **CAUSAL, **MANY},
            """hopper.fp8_forward (132, 1, 1) row_blocks=8 tiles=2560 l2_heads=2 l2_groups=143
        tile_counter (1,) int32 zeroed
        v_t_counts (161,) int32 zeroed
        v_t (40, 4, 128, 1024) float8_e4m3fn""",
        ),
        (
            {**FP8, "seqlen_q": 100},
            """hopper.fp8_forward (16, 1, 1) row_blocks=1 tiles=16 l2_heads=1 l2_groups=15
        hopper.transpose_v (64, 1, 1) blocks=8
        v_t (2, 4, 128, 1024) float8_e4m3fn""",
        ),
        (
            {**FP8, "seqlen_q": 1030, "seqlen_k": 2100},
            """hopper.fp8_forward (132, 1, 1) row_blocks=9 tiles=144 l2_heads=1 l2_groups=15
        v_t_counts (25,) int32 zeroed
        v_t (2, 4, 128, 2176) float8_e4m3fn""",
        ),
        (
            {**FP8, **PACKED, **CAUSAL},
            """hopper.fp8_forward (104, 1, 1) row_blocks=8 tiles=104 l2_heads=2 l2_groups=3
        hopper.varlen_scheduler (134, 1, 1) capacity=13
        hopper.transpose_v (48, 1, 1) blocks=12
        tile_counter (1,) int32
        varlen_tiles (27,) int32
        v_t (1, 4, 128, 1536) float8_e4m3fn""",
        ),
    ],
    ("B200", "portable"): [
        (
            {},
            """portable.forward (256, 1, 1) tiles=16 l2_heads=16""",
        ),
        (
            {"total_q": 10, "total_k": 20, "seqlen_q": 0},
            """portable.forward (16, 1, 1) tiles=1 l2_heads=16""",
        ),
        (
            {"num_splits": 2},
            """2 splits
        portable.forward (256, 2, 1) tiles=16 l2_heads=16
        partial_out (2, 2, 1000, 8, 128) float32
        partial_lse (2, 2, 8, 1000) float32
        partial_rest (2, 2, 8, 1000) float32""",
        ),
        (
            {"return_probs": True},
            """portable.forward (256, 1, 1) tiles=16 l2_heads=16
        portable.scores (16384, 1, 1) tiles_m=32 tiles_n=32""",
        ),
        (
            {"num_splits": 5, "total_q": 99, "total_k": 1000},
            """5 splits
        portable.forward (256, 5, 1) tiles=16 l2_heads=16
        partial_out (5, 99, 8, 128) float32
        partial_lse (5, 8, 99) float32
        partial_rest (5, 8, 99) float32""",
        ),
    ],
    ("MI300X", "cdna"): [
        (
            {"seqlen_k": 3000},
            """3 splits
        cdna.forward (64, 3, 1) tiles=4
        partial_out (3, 2, 1000, 8, 128) float32
        partial_lse (3, 2, 8, 1000) float32
        partial_rest (3, 2, 8, 1000) float32""",
        ),
        (
            {"num_splits": 2},
            """2 splits
        cdna.forward (64, 2, 1) tiles=4
        partial_out (2, 2, 1000, 8, 128) float32
        partial_lse (2, 2, 8, 1000) float32
        partial_rest (2, 2, 8, 1000) float32""",
        ),
        (
            {"total_q": 300, "seqlen_k": 3000},
            """3 splits
        cdna.forward (64, 3, 1) tiles=4
        partial_out (3, 300, 8, 128) float32
        partial_lse (3, 8, 300) float32
        partial_rest (3, 8, 300) float32""",
        ),
    ],
}


def told(sizes: Sizes) -> str:
    """Splits, each launch with its grid and numbers, each scratch with its shape."""
    lines = [f"{sizes.num_splits} splits"] if sizes.num_splits != 1 else []
    for kernel, launch in sizes.launches.items():
        numbers = "".join(f" {name}={value}" for name, value in launch.numbers.items())
        lines.append(f"{kernel} {launch.grid}{numbers}")
    for w in sizes.workspaces:
        lines.append(f"{w.name} {w.buffer.shape} {w.buffer.dtype}{' zeroed' * w.zeroed}")
        assert w.buffer.aligned and w.buffer.strides[-1] == 1
        # Whoever merges the last part of a tile begins its count anew.
        assert w.left_zero == (w.name == "counts")
    return "\n".join(lines)


def cases(table) -> list[tuple[str, str, dict, str]]:
    return [(*place, *case) for place, found in table.items() for case in found]


def base(backend: str, facts: dict) -> dict:
    return {
        **(LATENT if backend.startswith("mla") else ONE_QUERY if "decode" in backend else BASE),
        **facts,
    }


@pytest.mark.parametrize("device, backend, facts, said", cases(FORWARD))
def test_grids_and_scratch_of_a_forward(device, backend, facts, said):
    problem = AttentionProblem.dense(**base(backend, facts))
    sizes = plan(problem, by_name(device), backend=forced(backend)).sizes()
    assert told(sizes).splitlines() == [line.strip() for line in said.splitlines()]


def test_what_has_no_kernels_has_no_sizes():
    problem = AttentionProblem.dense(**{**BASE, "needs_grad": True})
    chosen = plan(problem, by_name("CPU"), backend="cpu")
    assert chosen.sizes() == chosen.sizes(direction="backward") == Sizes(1, {})


# A golden table of sizes of every kind of call. Programs lie along one dim, and along a second
# where parts of a kernel are programs. After a change that is meant:
#     WRITE_GOLDEN_PLANS=1 pytest tests/pure/core/planning/test_plan_sizes.py
GOLDEN = Path(__file__).with_name("golden_sizes.txt")
OF_ALL: dict = {"batch": 3, "seqlen_q": 500, "seqlen_k": 700, "heads_q": 6, "heads_k": 2}
OF_TOKENS = {"total_q": 1000, "total_k": 1200}
OF_LATENTS = {"seqlen_q": 1, "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True}
ALONE = {"needs_grad": False}
MANY_ROWS = {"batch": 1, "seqlen_q": 50_000, "seqlen_k": 50_000}
GIVEN: dict[str, dict] = {
    "plain": {},
    "packed": {**OF_TOKENS, "causal": True},
    "lengths in use": {"used_q": True, "used_k": True},
    "ranges": {"key_ranges": 2},
    "ranges, packed": {**OF_TOKENS, "key_ranges": 1},
    "block mask": {"block_mask": 128},
    "splits": {"num_splits": 3, "needs_grad": False},
    "same bits": {"invariant": True},
    "same gradients": {"deterministic": True, "seqlen_q": 5000, "seqlen_k": 5000},
    "bias": {"bias": True, "bias_grad": True},
    "window": {"seqlen_k": 1100, "mask": MaskSpec.of(True, (64, 0))},
    "fp8": {"dtype": "float8_e4m3fn", "needs_grad": False},
    "values of 128": {"head_dim": 192, "head_dim_v": 128},
    "pages": {"seqlen_q": 1, "page_size": 16, "used_k": True, "needs_grad": False},
    "latent": {**OF_LATENTS, "needs_grad": False},
    "latent, in rows of bytes": {**OF_LATENTS, **ALONE, "kv_dtype": "fp8_ds_mla", "v_in_k": False},
    "ranges of heads": {"key_ranges": 1, "own_ranges": True},
    "documents": {"key_ranges": 1, "documents": True, **MANY_ROWS, "causal": True},
    "lists of 64": {"block_mask": 64, "scattered": True, "head_dim": 128},
    "relative bias": {"rel_bias": True, "rel_bias_grad": True},
    "relative bias, packed": {**OF_TOKENS, "rel_bias": True, "rel_bias_grad": True},
    "probabilities": {"return_probs": True, **ALONE},
    "same bits of parts": {"invariant": True, "seqlen_k": 20_000, **ALONE},
    "same bits of parts, packed": {**OF_TOKENS, "invariant": True, "seqlen_k": 20_000, **ALONE},
    "same bits of parts in turn": {"invariant": True, **MANY_ROWS, **ALONE},
    "same bits, causal": {"invariant": True, **MANY_ROWS, "causal": True, "seqlen_q": 999, **ALONE},
    "sink": {"sink": True},
    "4 bits": {"seqlen_q": 1, "kv_dtype": "int4", "kv_group": 64, "used_k": True, **ALONE},
    "packed queries": {"total_q": 1000, "causal": True},
    "packed keys": {"total_k": 1200, "causal": True},
    "a chunk's queries": {"seqlen_q": 100, "seqlen_k": 5000, "causal": True},
    "window to the left": {"seqlen_q": 3000, "mask": MaskSpec.of(False, (64, 900))},
    "packed decode": {"total_q": 900, "seqlen_q": 4, "seqlen_k": 9000, "used_k": True, **ALONE},
    "mixed": {"total_q": 990, "used_k": True, "page_size": 16, **ALONE},
    "no keys": {"seqlen_k": 0},
    "no queries": {"seqlen_q": 0},
    "nothing": {"batch": 0},
    "one head": {"batch": 1, "heads_q": 1, "heads_k": 1},
}
DEVICES = (("H200", None), ("H200", "portable"), ("MI300X", "cdna"))


def table() -> str:
    lines = []
    for name, given in GIVEN.items():
        problem = AttentionProblem.dense(**{**OF_ALL, "needs_grad": True, **given})
        for device, backend in DEVICES:
            try:
                chosen = plan(problem, by_name(device), backend=backend and forced(backend))
            except ValueError:
                continue
            for direction in ("forward", "backward")[: 1 + problem.needs_grad]:
                said = told(chosen.sizes(direction=direction)).splitlines()
                lines += [f"{name}, {device}, {backend or 'default'}, {direction}"]
                lines += ["  " + line for line in said]
    return "\n".join(lines) + "\n"


def test_sizes_are_those_of_the_golden_table():
    if os.environ.get("WRITE_GOLDEN_PLANS"):
        GOLDEN.write_text(table())
    assert table() == GOLDEN.read_text()
