"""The CDNA kernels compile to what they were written for: no spills, LDS within the target's limit,
and a hot loop of counted products, loads and vector instructions."""

from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("triton")

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.problem import ITEM_BITS, AttentionProblem
from heedful.core.planning.plan import plan
from heedful.inspector import Inspection, of_program
from heedful.inspector.mix import Mix
from heedful.launch.program import buffers
from heedful.launch.program.programs import program

DEVICES = {"gfx942": "MI300X", "gfx950": "MI355X"}
E4M3 = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}
VARIANTS = [
    (arch, dim, dtype, causal)
    for arch in DEVICES
    for dim in (64, 128)
    for dtype in ("bfloat16", "float16", E4M3[arch])
    for causal in (False, True)
]


def by_default(variants: list[tuple]) -> list:
    """Those of float16 are those of bfloat16 but for the name of an instruction: slow. Others have
    each head dim and dtype for each target, with and without the mask in turns."""
    chosen = [
        (arch, dim, dtype, (dim == 64) == (ITEM_BITS[dtype] == 8))
        for arch, dim, dtype, _ in variants
        if dtype != "float16"
    ]
    marks = {v: [] if v in chosen else [pytest.mark.slow] for v in variants}
    return [pytest.param(v, marks=marks[v]) for v in variants]


# The portable kernels take no fp8 queries.
SIXTEEN_BITS = [v for v in VARIANTS if v[0] == "gfx942" and ITEM_BITS[v[2]] == 16]
# Slots of the vector unit per 64 keys and wave. The matrix unit takes, at D = 128, 512 on gfx942
# and 256 on gfx950, half of it with fp8.
MOST_VALU_SLOTS = {"bfloat16": 220, "float16": 220} | dict.fromkeys(E4M3.values(), 224)
# Of the vector slots that the portable kernel takes.
SHARE_OF_PORTABLE = 0.8
# Products that one MFMA of 32 x 32 adds up.
PRODUCTS = {("gfx942", 16): 8, ("gfx942", 8): 16, ("gfx950", 16): 16, ("gfx950", 8): 64}


def problem_of(dim, dtype, causal) -> AttentionProblem:
    """A long sequence."""
    out = "bfloat16" if dtype.startswith("float8") else dtype
    return AttentionProblem.dense(
        1, 4096, 4096, 8, 2, dim, dtype, causal, return_lse=True, num_splits=1, out_dtype=out
    )


@cache
def inspected(arch, dim, dtype, causal) -> Inspection:
    """One kernel, as planned for a long sequence."""
    problem = problem_of(dim, dtype, causal)
    chosen = plan(problem, by_name(DEVICES[arch]), backend="cdna")
    arrays = buffers.forward(problem)
    if ITEM_BITS[dtype] == 8:
        descale = ArraySpec.contiguous((1, 2), "float32")
        arrays |= {f"{name}_descale": descale for name in "qkv"}
    block_n = chosen.configs["cdna.forward"].block_n
    made = program(chosen, "forward", arrays)
    (found,) = of_program(made, arch)
    assert isinstance(found, Inspection)
    return replace(found, tiles=block_n // 64)


def hot_loop(found) -> Mix:
    """What runs again and again for each tile of keys."""
    assert isinstance(found, Inspection) and found.loop is not None
    return found.loop


def portable(variant):
    """The hot loop of the portable kernel for the same problem, with the same tile."""
    arch, *kind = variant
    chosen = plan(problem_of(*kind), by_name(DEVICES[arch]), backend="portable")
    assert chosen.configs["portable.forward"].block_n == 64
    (found,) = of_program(program(chosen, "forward"), arch)
    return found


@pytest.mark.parametrize("variant", by_default(VARIANTS), ids=str)
def test_nothing_spills_and_lds_is_within_the_limit(variant):
    resources = inspected(*variant).resources
    assert resources.vgpr_spills == resources.sgpr_spills == resources.scratch_bytes == 0
    assert resources.fits
    # Two waves share a SIMD: one multiplies while the other does not.
    assert resources.occupancy().waves >= 2


@pytest.mark.parametrize("variant", by_default(VARIANTS), ids=str)
def test_the_hot_loop_is_within_its_bounds(variant):
    arch, dim, dtype, _ = variant
    found = inspected(*variant)
    loop, keys = hot_loop(found), 64 * found.tiles
    # 32 rows by the keys by dim, twice.
    products = PRODUCTS[arch, ITEM_BITS[dtype]]
    assert loop.mfma == 2 * (keys // 32) * (dim // products)
    assert loop.spills == loop.drains == 0
    # One barrier ends each stage.
    assert loop.barriers == 4
    assert loop.valu_slots <= MOST_VALU_SLOTS[dtype] * found.tiles


BESIDE_PORTABLE = [v for v in SIXTEEN_BITS if v[1] == 64 and not v[3]]
OTHERS = [pytest.param(v, marks=pytest.mark.slow) for v in SIXTEEN_BITS if v not in BESIDE_PORTABLE]


# By default one: the portable kernel is compiled for this alone.
@pytest.mark.parametrize("variant", [*by_default(BESIDE_PORTABLE), *OTHERS], ids=str)
def test_cdna3_takes_a_fifth_fewer_vector_slots_than_portable(variant):
    assert hot_loop(inspected(*variant)).valu_slots <= (
        SHARE_OF_PORTABLE * hot_loop(portable(variant)).valu_slots
    )


@pytest.mark.parametrize("variant", by_default([v for v in VARIANTS if v[0] == "gfx950"]), ids=str)
def test_cdna4_streams_through_lds(variant):
    _, dim, dtype, _ = variant
    found = inspected(*variant)
    loop = hot_loop(found)
    tile_bytes = 64 * found.tiles * dim * ITEM_BITS[dtype] // 8
    # K and V, shared by 8 waves, 1 KiB a load.
    assert loop.dma == loop.vmem == 2 * tile_bytes // 8 // 1024
    # All of V by transposing reads of 8 bytes a lane.
    assert loop.transposed == tile_bytes // (64 * 8)
