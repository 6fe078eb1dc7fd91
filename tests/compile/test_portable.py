"""The portable kernels compile for GPUs that are not here, within each target's limits.

`make test` takes a few problems of their covering array, which have every feature value, each for
one of four targets. NVIDIA's are compiled. AMD's, which tests/emulated compiles and runs, are
lowered as far as their shared memory is known. The slow tier compiles each problem for one of four
targets and every feature value for all four, and each for them all and other NVIDIA parts.
"""

import re
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from heedful.core.base import installed
from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry import gates
from heedful.launch.bind.portable import merge_into_call
from heedful.launch.compiler import compile_now
from heedful.launch.prebuild import compiling
from heedful.launch.program.programs import program
from heedful.launch.spec import KernelCall, Pointer
from machine_code.arrays import ARRAYS, portable_problem
from machine_code.covering import deal, each_value
from support import arrays
from support.kernels import shared_bytes, spills_over_keys
from support.problems.grids import in_turns, slow_but

TARGETS = ("sm_90", "gfx942", "sm_80", "gfx950")
OTHER_TARGETS = ("sm_86", "sm_89", "sm_100", "sm_120")
# Where the tiles are meant to need no local memory, but for float32.
SPILL_FREE = ("sm_80", "sm_90")
# Bytes a thread that a kernel may keep there over its loops, where those need all registers.
MOST_KEPT = 64
MOST_VARIANTS = 120
# Test items a target, so that the workers of a test run end together.
SHARES = 2

ARRAY = ARRAYS["portable"]


def variants(arch: str, rows: list[dict]) -> list[tuple[str, KernelCall]]:
    """The distinct kernels that these problems launch on an architecture, with readable names."""
    compilable = [row for row in rows if not wants_newer_triton(arch, row)]
    return arrays.variants(ARRAY, arch, compilable)


def wants_newer_triton(arch: str, row: dict) -> bool:
    """Whether the planner says that this Triton is too old for the row's problem on this target."""
    tools, device = compiling(), by_name(arch)
    problems = [entry.problem for entry in ARRAY.launched(row, arch).entries]
    found = [least for p in problems for least in gates.least_of_biased_trees(p, device)]
    return any(least > (tools.triton or ()) for _, least in found)


@cache
def dealt_rows() -> dict[str, list[dict]]:
    return deal(ARRAY.rows, TARGETS)


def spilled_bytes(compiled) -> int:
    """Local memory of a cubin, which nothing but spills uses here."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.code)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    assert found, text
    return int(found[1])


def needs_local_memory(call: KernelCall) -> bool:
    """Whether its products are of float32, whose operands lie in registers whole: those spill at
    wide heads whatever the tile (measurements/portable.md). The gradient of queries of 256 columns
    with a tree mask reloads 2 to 5 values a step (Triton 3.9, 2026-11-27)."""
    arrays_read = [a for a in call.arguments.values() if isinstance(a, Pointer)]
    is_wide = call.constants.get("params.tile.HEAD_DIM") == 256
    is_tree = any(a.buffer == "tree_mask" for a in arrays_read)
    if is_wide and is_tree and call.kernel.function == "query_gradients":
        return True
    return any((a.buffer, a.dtype) == ("q", "float32") for a in arrays_read)


def compile_within_limits(arch: str, named: list[tuple[str, KernelCall]]) -> None:
    """Compiles all; reports every kernel over the limits of its target, not just the first."""
    limit, wrong = by_name(arch).shared_bytes, []
    for name, call in named:
        compiled = compile_now(call, arch)
        if compiled.shared_bytes > limit:
            wrong.append(f"{name}: {compiled.shared_bytes} bytes of shared memory, {limit} fit")
        if arch not in SPILL_FREE or needs_local_memory(call):
            continue
        spilled = spilled_bytes(compiled)
        # What a program stores before its loops and loads after them, once, takes no time.
        if spilled and (spilled > MOST_KEPT or spills_over_keys(compiled.code)):
            wrong.append(f"{name}: {spilled} bytes spilled, {call.constants}")
    assert not wrong, "\n".join(wrong)


def test_every_problem_has_a_target_and_every_feature_value_has_all():
    dealt = dealt_rows()
    assert sum(map(len, dealt.values())) == len(ARRAY.rows)
    values = set().union(*(row.items() for row in ARRAY.rows))
    for target, rows in dealt.items():
        assert set().union(*(row.items() for row in rows)) == values, target
    kernels = sum(len(variants(target, rows)) for target, rows in dealt.items())
    assert MOST_VARIANTS // 2 < kernels <= MOST_VARIANTS


# Of another Triton the whole compiler is to be seen.
COMPILER = installed.compiler()
LOWERS = COMPILER is not None and not COMPILER.apart and (compiling().triton or ()) >= (3, 9)
# The oldest Triton compiles by default for one NVIDIA and one AMD target.
BY_OLDEST = ("sm_90", "gfx950")


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=getattr(pytest.mark, f"{which}_triton"))
        for arch in TARGETS
        for which in ["oldest" if arch in BY_OLDEST else "every"]
    ],
)
def test_each_feature_value_compiles_within_the_limits_of(arch):
    named = variants(arch, deal(each_value(ARRAY.rows), TARGETS)[arch])
    if arch in SPILL_FREE or not LOWERS:
        return compile_within_limits(arch, named)
    limit = by_name(arch).shared_bytes
    taken = {name: shared_bytes(call, arch) for name, call in named}
    assert taken and not {name: n for name, n in taken.items() if n > limit}


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("arch", TARGETS)
def test_covering_array_compiles_within_the_limits_of(arch, share):
    named = variants(arch, dealt_rows()[arch])
    compile_within_limits(arch, named[share::SHARES])


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS + OTHER_TARGETS)
def test_every_variant_compiles_within_the_limits_of(arch):
    compile_within_limits(arch, variants(arch, ARRAY.rows))


DIRECTIONS, MASKS = ("forward", "backward"), ("full", "causal")


# Gradients of 128 columns are compiled with block masks, and more of the covering array.
PLAIN = {(64, "forward", "full")}


@pytest.mark.parametrize(
    "dim, direction, mask",
    slow_but(PLAIN, product((64, 128, 256, 512), DIRECTIONS, MASKS)),
    ids=str,
)
def test_plain_tiles_of_sm_90_do_not_spill(dim, mask, direction):
    row = {name: values[0] for name, values in ARRAY.factors.items()}
    row |= {"dims": (dim, dim), "mask": mask, "backward": direction == "backward"}
    compile_within_limits("sm_90", variants("sm_90", [row]))


@pytest.mark.parametrize(
    "ranges, direction", slow_but({(2, "forward")}, product((1, 2), DIRECTIONS)), ids=str
)
def test_key_ranges_of_sm_90_do_not_spill(ranges, direction):
    row = {name: values[0] for name, values in ARRAY.factors.items()}
    row |= {"dims": (128, 128), "mask": "causal", "backward": direction == "backward"}
    chosen = plan(
        replace(portable_problem(row), key_ranges=ranges), by_name("sm_90"), backend="portable"
    )
    calls = program(chosen, direction).calls
    compile_within_limits("sm_90", [(call.kernel.function, call) for call in calls])


@pytest.mark.parametrize(
    "mask, direction", slow_but({("causal", "backward")}, product(MASKS, DIRECTIONS)), ids=str
)
def test_block_masks_of_sm_90_do_not_spill(mask, direction):
    row = {name: values[0] for name, values in ARRAY.factors.items()}
    row |= {"dims": (128, 128), "mask": mask, "backward": direction == "backward"}
    problem = replace(portable_problem(row), block_mask=128)
    calls = program(plan(problem, by_name("sm_90"), backend="portable"), direction).calls
    compile_within_limits("sm_90", [(call.kernel.function, call) for call in calls])


WIDER_KEYS: list[dict] = [
    {},
    {"mask": "causal", "storage": "paged", "group": 3},
    {"mask": "window", "bias": True},
    {"mask": "causal", "aligned": False, "dtype": "float16"},
]


def words(value: dict | str) -> str:
    return "-".join(value) or "plain" if isinstance(value, dict) else value


@pytest.mark.parametrize(
    "features, arch",
    in_turns(WIDER_KEYS, ("sm_90", "gfx942", "gfx950"), each=2),
    ids=words,
)
def test_keys_of_576_beside_values_of_512_compile_within_the_limits_of(arch, features):
    row = {name: values[0] for name, values in ARRAY.factors.items()}
    row |= {"dims": (576, 512), **features}
    compile_within_limits(arch, variants(arch, [row]))


def test_a_new_length_compiles_nothing():
    row = {name: values[-1] for name, values in ARRAY.factors.items()}
    row |= {"storage": "dense", "aligned": True, "backward": True}
    seen = set()
    for seqlen_q, seqlen_k, batch in ((1, 1, 1), (37, 53, 2), (512, 4096, 3), (100_000, 65_536, 1)):
        problem = portable_problem(row)
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": batch}
        problem = replace(problem, **sizes)
        chosen = plan(problem, by_name("sm_90"), backend="portable")
        chosen = replace(chosen, is_split=False)
        programs = (program(chosen, direction) for direction in ("forward", "backward"))
        seen.add(tuple(call.specialization for made in programs for call in made.calls))
    assert len(seen) == 1


@pytest.mark.parametrize("direction", slow_but({"backward"}, DIRECTIONS))
def test_a_relative_bias_compiles_for_sm_90_without_spills(direction):
    row = {name: values[0] for name, values in ARRAY.factors.items()}
    row |= {"dims": (128, 128), "mask": "causal", "backward": direction == "backward"}
    problem = replace(portable_problem(row), rel_bias=True, rel_bias_grad=row["backward"])
    chosen = plan(problem, by_name("sm_90"), backend="portable")
    calls = program(chosen, direction).calls
    names = [call.kernel.function for call in calls]
    assert ("relative_gradients" in names) == (direction == "backward")
    compile_within_limits("sm_90", list(zip(names, calls, strict=True)))


# Queries, and facts of the problem.
INVARIANT: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (4096, {"causal": True}),
    "pages": (1, {"used_k": True, "page_size": 16}),
}


@pytest.mark.every_triton
@pytest.mark.parametrize(
    "kernel, way",
    in_turns(
        [("hopper", "sm_90"), ("portable", "gfx942"), ("portable", "sm_90")], INVARIANT, each=2
    ),
    ids=str,
)
def test_kernels_of_invariant_numerics_fit(kernel, way):
    """Tiles are one for all options: some need local memory, between parts."""
    backend, arch = kernel
    device = by_name(arch)
    seqlen_q, facts = INVARIANT[way]
    problem = AttentionProblem.dense(8, seqlen_q, 20000, 32, invariant=True, **facts)
    for call in program(plan(problem, device, compiling(), backend), "forward").calls:
        taken = shared_bytes(call, arch) if LOWERS else compile_now(call, arch).shared_bytes
        assert taken <= device.shared_bytes


def test_a_merge_in_place_of_16_bit_parts_keeps_nothing_in_local_memory():
    shapes = {"out": (4096, 32, 128), "part": (4096, 32, 128)}
    shapes |= {"lse": (32, 4096), "part_lse": (32, 4096)}
    for dtype in ("bfloat16", "float32"):
        dtypes = {name: dtype if name == "part" else "float32" for name in shapes}
        specs = {n: ArraySpec.contiguous(shape, dtypes[n]) for n, shape in shapes.items()}
        call = merge_into_call(specs)
        assert call.writes == {"out", "lse"}
        assert not spilled_bytes(compile_now(call, "sm_90"))
