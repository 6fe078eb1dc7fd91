"""The CDNA kernels compile to what they were written for: no spills, LDS within the target's limit,
and a hot loop of counted products, loads and vector instructions."""

from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("triton")

from heedful.core.device import by_name
from heedful.core.plan import plan
from heedful.core.problem import AttentionProblem
from heedful.inspector import Inspection, of_program
from heedful.inspector.mix import Mix
from heedful.launch import buffers
from heedful.launch.args import cdna
from heedful.launch.programs import program

DEVICES = {"gfx942": "MI300X", "gfx950": "MI355X"}
VARIANTS = [
    (arch, dim, dtype, causal)
    for arch in DEVICES
    for dim in (64, 128)
    for dtype in ("bfloat16", "float16")
    for causal in (False, True)
]
# Slots of the vector unit per 64 keys and wave; at D = 128 the matrix unit takes 256.
MOST_VALU_SLOTS = {128: 220, 64: 210}
# Of the vector slots that the portable kernel takes.
SHARE_OF_PORTABLE = 0.8


@cache
def inspected(arch, dim, dtype, causal) -> Inspection:
    """One kernel, as planned for a long sequence."""
    problem = AttentionProblem.dense(
        1, 4096, 4096, 8, 2, dim, dtype, causal, return_lse=True, num_splits=1
    )
    chosen = plan(problem, by_name(DEVICES[arch]), backend="cdna")
    (found,) = of_program(program(chosen, "forward"), arch)
    assert isinstance(found, Inspection)
    return found


def hot_loop(found) -> Mix:
    """What runs again and again for each tile of keys."""
    assert isinstance(found, Inspection) and found.loop is not None
    return found.loop


def test_a_row_stride_past_32_bit_offsets_raises():
    problem = AttentionProblem.dense(1, 512, 512, 1)
    chosen = plan(problem, by_name("MI355X"), backend="cdna")
    arrays = buffers.forward(problem)
    arrays["k"] = replace(arrays["k"], strides=(0, 1 << 22, 128, 1))
    with pytest.raises(ValueError, match="k must have a row stride below"):
        cdna.forward(problem, chosen, arrays)


def portable(variant):
    """The hot loop of the portable kernel for the same problem, with the same tile."""
    arch, dim, dtype, causal = variant
    problem = AttentionProblem.dense(
        1, 4096, 4096, 8, 2, dim, dtype, causal, return_lse=True, num_splits=1
    )
    chosen = plan(problem, by_name(DEVICES[arch]), backend="portable")
    assert chosen.configs["portable.forward"].block_n == 64
    (found,) = of_program(program(chosen, "forward"), arch)
    return hot_loop(found)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_spills_and_lds_is_within_the_limit(variant):
    resources = inspected(*variant).resources
    assert resources.vgpr_spills == resources.sgpr_spills == resources.scratch_bytes == 0
    assert resources.fits
    # Two waves share a SIMD: one multiplies while the other does not.
    assert resources.occupancy().waves >= 2


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_hot_loop_is_within_its_bounds(variant):
    arch, dim, *_ = variant
    loop = hot_loop(inspected(*variant))
    # Rows 32 by keys 64, twice over dim, in products of 32 x 32 x 16 (gfx950) or x 8 (gfx942).
    assert loop.mfma == 2 * 2 * dim // (16 if arch == "gfx950" else 8)
    assert loop.spills == loop.drains == 0
    # One barrier ends each stage.
    assert loop.barriers == 4
    if arch == "gfx950":
        assert loop.valu_slots <= MOST_VALU_SLOTS[dim]
    else:
        assert loop.valu_slots <= SHARE_OF_PORTABLE * portable(variant).valu_slots


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[0] == "gfx950"], ids=str)
def test_cdna4_streams_through_lds(variant):
    _, dim, *_ = variant
    loop = hot_loop(inspected(*variant))
    # A wave's share of K and V is 64 x dim x 2 bytes / 8 waves each, 1 KiB a load.
    assert loop.dma == 2 * dim // 64
    assert loop.vmem == loop.dma
    # V as transposed operands, 4 keys a read: 64 x dim elements over 64 lanes.
    assert loop.transposed == dim // 4
