"""The decode kernel compiles for GPUs that are not here, without spills: on AMD anywhere, on NVIDIA
in the loop over keys."""

import re
from collections.abc import Container, Iterable
from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("triton")

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import LATENT_ROW_BYTES, LATENT_ROWS, AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.inspector.nvidia import disassemble
from heedful.launch.bind import decode
from heedful.launch.compiler import compile_now
from heedful.launch.prebuild import compiling
from heedful.launch.program import programs
from support.kernels import spills_over_keys
from support.problems.grids import in_turns, slow_but

TARGETS = ("sm_80", "sm_90", "gfx942", "gfx950")
FP8 = {"gfx942": "float8_e4m3fnuz"}
# Name: facts of the problem beside 4 sequences of 4096 keys, 32 heads over 8.
MLA = {"heads_k": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True, "used_k": True}
PROBLEMS = {
    "plain": {},
    "lengths": {"used_k": True, "sink": True},
    "pages": {"used_k": True, "page_size": 16},
    "odd pages": {"used_k": True, "page_size": 24, "mask": "window", "sink": True},
    "tree": {"seqlen_q": 4, "tree_mask": True},
    "narrow": {"head_dim": 64},
    "wide": {"head_dim": 256},
    "four": {"seqlen_q": 8, "causal": True},
    "sixteen": {"seqlen_q": 16, "causal": True, "softcap": 20.0},
    "fp8": {"kv_dtype": "fp8"},
    "int8": {"kv_dtype": "int8", "kv_group": 128},
    "int8 shifted": {"kv_dtype": "int8", "kv_group": 128, "kv_shift": True, "page_size": 64},
    "int4": {"kv_dtype": "int4", "kv_group": 128},
    "int4 groups": {"kv_dtype": "int4", "kv_group": 32},
    "parts": {"num_splits": 4, "used_k": True},
    "whole": {"num_splits": 1},
    "MLA, 16 heads": {**MLA, "heads_q": 16, "page_size": 64},
    "MLA, 128 heads": {**MLA, "heads_q": 128, "causal": True, "seqlen_q": 2},
    "MLA over fp8": {**MLA, "heads_q": 16, "page_size": 64, "kv_dtype": "fp8"},
    "MLA over fp8, 128 heads": {**MLA, "heads_q": 128, "kv_dtype": "fp8"},
    "MLA over fp8 rows": {**MLA, "heads_q": 16, "page_size": 64, "kv_dtype": "fp8_ds_mla"},
    "MLA over fp8 rows, 128 heads": {**MLA, "heads_q": 128, "kv_dtype": "fp8_ds_mla"},
}
CAUSAL = MaskSpec.of(True)
# Where the loop over keys reloads what it keeps: tiles of 64 rows by 512 of outputs.
RELOADS = {("MLA, 128 heads", "sm_90"): 32, ("MLA over fp8", "sm_90"): 14}
RELOADS |= {(f"MLA over fp8{of}, 128 heads", "sm_90"): n for of, n in (("", 102), (" rows", 118))}
# The same where a decode appends, too: three programs of an SM leave it 168 registers.
STEP_RELOADS = {("int4 groups", "sm_90"): 8}
if (compiling().triton or ()) < (3, 9):
    RELOADS[("int4 groups", "sm_90")] = 5
    # Counted; users of an older Triton get 3.9 by a worker.
    RELOADS |= {("MLA over fp8", "sm_90"): 489, ("MLA over fp8, 128 heads", "sm_90"): 182}
    RELOADS |= {("MLA over fp8 rows", "sm_90"): 108, ("MLA over fp8 rows, 128 heads", "sm_90"): 142}
    RELOADS |= {("MLA over fp8 rows", arch): 10 for arch in ("gfx942", "gfx950")}
    STEP_RELOADS[("int4 groups", "sm_90")] = 23
    STEP_RELOADS |= {("latent rows", "sm_90"): 105, ("latent rows", "gfx942"): 10}
    STEP_RELOADS[("latent rows", "gfx950")] = 10


def problem_of(name: str, arch: str) -> AttentionProblem:
    facts = dict(PROBLEMS[name])
    if facts.get("kv_dtype") == "fp8":
        facts["kv_dtype"] = FP8.get(arch, "float8_e4m3fn")
    if facts.get("mask") == "window":
        facts["mask"] = MaskSpec(left=1000, right=0)
    if facts.get("page_size"):
        facts["used_k"] = True
    heads = facts.pop("heads_q", 32), facts.pop("heads_k", 8)
    return AttentionProblem.dense(4, facts.pop("seqlen_q", 1), 4096, *heads, **facts)


def buffers_of(problem: AttentionProblem) -> dict[str, ArraySpec]:
    """What a call of the problem has, dense."""
    p, dense = problem, ArraySpec.contiguous
    stored, divisor = ("uint8", 2) if p.kv_dtype == "int4" else (p.kv_dtype, 1)
    is_rows = p.kv_dtype == LATENT_ROWS
    lead = (512, p.page_size) if p.page_size else (p.batch, p.seqlen_k)
    made = {
        "q": dense((p.batch, p.seqlen_q, p.heads_q, p.head_dim), p.dtype),
        "k": dense((*lead, p.heads_k, p.head_dim // divisor), stored),
        "v": dense((*lead, p.heads_k, p.head_dim_v // divisor), stored),
        "out": dense(p.out_shape, p.out_dtype),
    }
    if p.page_size:
        made["block_table"] = dense((p.batch, p.seqlen_k // p.page_size), "int32")
    if p.used_k:
        made["seqused_k"] = dense((p.batch,), "int32")
    if p.sink:
        made["sink"] = dense((p.heads_q,), "float32")
    if p.tree_mask:
        made["tree_mask"] = dense((p.batch, p.seqlen_q, p.seqlen_q), "bool")
    if is_rows:
        made |= dict.fromkeys("kv", dense((*lead, p.heads_k, LATENT_ROW_BYTES), "uint8"))
    elif p.quantized_kv:
        for name, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
            shape = (*lead, p.heads_k, dim // p.kv_group) if p.kv_group else (p.batch, p.heads_k)
            made[f"{name}_descale"] = dense(shape, "float32")
            if p.kv_shift:
                made[f"{name}_shift"] = dense(shape, "float32")
    return made


def compiled(name: str, arch: str):
    problem = problem_of(name, arch)
    chosen = plan(problem, by_name(arch), backend=forced("decode/portable"))
    (call,) = decode.forward(problem, chosen, buffers_of(problem)).calls
    return compile_now(call, arch)


# Steps that append to the cache themselves: a problem, new tokens, whether keys and queries are
# rotated, and whether the new tokens are to be quantised.
STEPS = {
    "plain": ("plain", 1, False, False),
    "plain, rotated": ("plain", 1, True, False),
    "pages, rotated": ("pages", 1, True, False),
    "four, rotated": ("four", 4, True, False),
    "fp8": ("fp8", 1, True, True),
    "int8": ("int8", 1, True, True),
    "int4": ("int4", 1, True, True),
    "int4 groups": ("int4 groups", 5, True, True),
    "quantised before": ("int8", 1, False, False),
    "latent rows": ("MLA over fp8 rows", 1, False, True),
}


def compiled_step(name: str, arch: str):
    """One of the STEPS."""
    of, new, is_rotated, quantises = STEPS[name]
    problem = replace(problem_of(of, arch), used_k=True)
    chosen = plan(problem, by_name(arch), backend=forced("decode/portable"))
    buffers = buffers_of_step(problem, new, is_rotated, quantises)
    (call,) = programs.step(chosen, buffers, interleaved=True, position0=0).calls
    return compile_now(call, arch)


def buffers_of_step(
    problem: AttentionProblem, new: int, is_rotated: bool, quantises: bool = False
) -> dict[str, ArraySpec]:
    """The same, and so many new tokens. Lengths are those before these."""
    buffers = buffers_of(problem)
    buffers["cache_seqlens"] = buffers.pop("seqused_k")
    for name in "kv":
        stored = buffers[name]
        whole = problem.head_dim if name == "k" else problem.head_dim_v
        dim = whole if quantises else stored.shape[-1]
        dtype = problem.dtype if quantises else stored.dtype
        buffers[f"{name}_new"] = ArraySpec.contiguous((4, new, problem.heads_k, dim), dtype)
    if is_rotated:
        buffers["q_new"] = buffers.pop("q")
        for name in ("rotary_cos", "rotary_sin"):
            buffers[name] = ArraySpec.contiguous((8192, problem.head_dim // 2), problem.dtype)
    return buffers


def count(text: str, word: str) -> int:
    """A number of an AMD kernel's metadata."""
    found = re.search(rf"\.{word}:\s+(\d+)", text)
    assert found, word
    return int(found[1])


# sm_90 has tiles of its own. Of the others each eighth problem runs by default.
OTHERS = [arch for arch in TARGETS if arch != "sm_90"]
NAMES = list(PROBLEMS)
# Slow, since another problem has most of what they have.
HAD = {"plain": "odd pages", "pages": "odd pages", "narrow": "wide", "four": "sixteen"}
HAD |= {"lengths": "odd pages"}
HAD |= {"int8": "int8 shifted", "int4": "int4 groups", "MLA over fp8": "MLA over fp8 rows"}
HAD |= {"MLA over fp8, 128 heads": "MLA over fp8 rows, 128 heads"}
HAD |= {"MLA, 128 heads": "MLA over fp8 rows, 128 heads"}
# Steps have them, and append: "latent rows" and "int4 groups". Mixed batches have 256 columns. Of
# 128 heads Hopper has a kernel of its own.
HAD |= {"MLA over fp8 rows": "latent rows", "int4 groups": "int4 groups", "whole": "odd pages"}
HAD |= {"MLA over fp8 rows, 128 heads": "latent rows", "fp8": "latent rows", "wide": "mixed"}
HAD |= {"MLA, 16 heads": "MLA over fp8 rows", "parts": "odd pages"}
STEPS_HAD = {"plain": "pages, rotated", "plain, rotated": "pages, rotated", "int4": "int4 groups"}
STEPS_HAD |= {"pages, rotated": "four, rotated", "int8": "int4 groups", "fp8": "latent rows"}
STEPS_HAD |= {"quantised before": "int4 groups"}


# What the oldest Triton compiles by default: plain keys, stored ones, and a step for AMD.
BY_OLDEST = {(name, "sm_90") for name in ("odd pages", "int4 groups")}
BY_OLDEST.add(("four, rotated", "gfx942"))


def by_tritons(grid: list) -> list:
    """The same parameters, marked by the Tritons that are to compile them, too."""
    which = ["oldest" if one.values in BY_OLDEST else "every" for one in grid]
    return [
        pytest.param(*one.values, marks=[*one.marks, getattr(pytest.mark, f"{name}_triton")])
        for one, name in zip(grid, which, strict=True)
    ]


def grid(names: Iterable[str], archs: Iterable[str], had: Container[str]) -> list:
    """Problems for each of the architectures, those of had slow."""
    return [
        pytest.param(name, arch, marks=pytest.mark.slow if name in had else ())
        for name in names
        for arch in archs
    ]


@pytest.mark.parametrize(
    "name, arch",
    by_tritons([*grid(NAMES, ["sm_90"], HAD), *in_turns(NAMES, OTHERS, each=8)]),
    ids=str,
)
def test_decode_compiles_without_spills(name, arch):
    if arch == "sm_80" and "fp8" in name:
        pytest.skip("sm_80 converts no fp8")
    check_resources(compiled(name, arch), arch, RELOADS.get((name, arch), 0))


@pytest.mark.parametrize(
    "name, arch",
    by_tritons(
        [
            *grid(STEPS, ["sm_90"], STEPS_HAD),
            *in_turns([n for n in STEPS if n not in STEPS_HAD], ("gfx942", "gfx950"), each=4),
            *grid(STEPS_HAD, ("gfx942", "gfx950"), STEPS_HAD),
        ]
    ),
    ids=str,
)
def test_a_decode_that_appends_compiles_without_spills(name, arch):
    check_resources(compiled_step(name, arch), arch, STEP_RELOADS.get((name, arch), 0))


def check_resources(found, arch: str, reloads: int = 0) -> None:
    """reloads: spills that the loop over keys may have, on AMD's chips the whole kernel."""
    assert found.shared_bytes <= by_name(arch).shared_bytes
    if arch.startswith("sm_"):
        assert spills_over_keys(found.code) <= reloads
    else:
        text = found.text
        assert count(text, "vgpr_spill_count") <= reloads
        assert reloads or count(text, "private_segment_fixed_size") == 0


@pytest.mark.parametrize("arch", slow_but({"gfx942"}, ("gfx942", "gfx950")))
def test_an_fp8_cache_leaves_room_for_four_waves_of_a_simd(arch):
    """xFormers' split-K kernel has 108 registers, and was faster than its bfloat16 twin once it
    spilled none: two waves and more hide each other's loads."""
    assert count(compiled("fp8", arch).text, "vgpr_count") <= 128


@pytest.mark.parametrize(
    "arch, wait, barrier",
    [
        ("gfx90a", "s_waitcnt vmcnt(0)", "s_barrier"),
        # The emulator finds those that do not, of these two.
        *(
            pytest.param(arch, "s_waitcnt vmcnt(0)", "s_barrier", marks=pytest.mark.slow)
            for arch in ("gfx942", "gfx950")
        ),
        # The compiler's own.
        ("gfx1100", "s_waitcnt_vscnt null, 0x0", "s_barrier"),
        ("gfx1201", "s_wait_storecnt 0x0", "s_barrier_signal -1"),
    ],
)
def test_amds_waves_wait_for_their_parts_ahead_of_the_barrier_of_their_count(arch, wait, barrier):
    device = replace(by_name("MI300X"), arch=arch, name=arch)
    problem = problem_of("narrow", arch)
    buffers = buffers_of(problem)
    (call,) = decode.forward(
        problem, plan(problem, device, backend=forced("decode/portable")), buffers
    ).calls
    lines = [line.strip() for line in compile_now(call, arch).text.splitlines()]
    code = [line for line in lines if re.match(r"[a-z]\w+(\s|$)", line)]
    (count,) = (i for i, line in enumerate(code) if line.startswith("global_atomic_add"))
    stores = [i for i in range(count) if code[i].startswith("global_store")]
    between = code[stores[-1] : count]
    assert barrier in between[between.index(wait) :]


@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_stored_integers_leave_room_for_three_programs_of_an_sm(name):
    """65,536 registers are 170 of each of 3 * 128 threads."""
    problem = problem_of(name, "sm_90")
    chosen = plan(
        problem, by_name("sm_90"), backend=forced("decode/portable+programs=3+registers=168")
    )
    (call,) = decode.forward(problem, chosen, buffers_of(problem)).calls
    found = compile_now(call, "sm_90")
    assert disassemble(found.code).usage["REG"] <= 168
    assert spills_over_keys(found.code) == 0
    # 1 KiB of each program is the system's.
    assert 3 * (found.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    "name",
    slow_but({"plain"}, ("plain", "fp8 rows", "int4 pages", "int4", "int8")),
)
def test_keys_as_rows_of_products_halve_the_products_and_spill_nothing(name):
    facts = {
        "fp8 rows": {"kv_dtype": "float8_e4m3fn", "kv_group": 128},
        "int4 pages": {**PROBLEMS["int4"], "page_size": 16},
    }
    with mock.patch.dict(PROBLEMS, facts):
        problem = problem_of(name, "sm_90")
    keys = 32 if name == "plain" else 64
    both = []
    for rows in (8, 16):
        tile = f"block_m={rows}+block_n={keys}+num_warps=2+programs=4+registers=0"
        chosen = plan(problem, by_name("sm_90"), backend=forced(f"decode/portable+{tile}"))
        (call,) = decode.forward(problem, chosen, buffers_of(problem)).calls
        cubin = compile_now(call, "sm_90").code
        assert spills_over_keys(cubin) == 0
        both.append(len(re.findall(r"HMMA", disassemble(cubin).text)))
    assert 2 * both[0] == both[1]


@pytest.mark.parametrize("tiles, fetches", slow_but({(3, 2)}, [(0, 0), (3, 2)]))
def test_a_tile_of_keys_and_of_values_is_fetched_ahead(tiles, fetches):
    problem = problem_of("int4", "sm_90")
    chosen = plan(problem, by_name("sm_90"), backend=forced(f"decode/portable+fetch_ahead={tiles}"))
    (call,) = decode.forward(problem, chosen, buffers_of(problem)).calls
    cubin = compile_now(call, "sm_90").code
    assert len(re.findall(r"CCTL\S*\.PF2", disassemble(cubin).text)) == fetches
    assert spills_over_keys(cubin) == 0


MIXED = [
    {"page_size": 16},
    {"num_splits": 1},
    {"heads_q": 64, "page_size": 64, "sink": True, "softcap": 20.0},
    {"heads_q": 256, "mask": MaskSpec(1000, 0), "page_size": 16},
]


@pytest.mark.parametrize(
    "facts",
    [
        {"head_dim": 256, "page_size": 16},
        *slow_but((), MIXED),
    ],
    ids=str,
)
def test_the_decode_of_a_mixed_batch_spills_nothing(facts):
    sizes = {"heads_q": 32, "heads_k": 8, "total_q": 4 * 2048 + 124, "used_k": True}
    problem = AttentionProblem.dense(128, 2048, 8192, **{"mask": CAUSAL, **sizes, **facts})
    _, call, _ = programs.program(
        plan(problem, by_name("H200"), backend=forced("mixed/portable")), "forward"
    ).calls
    assert call.kernel.function == "decode"
    found = compile_now(call, "sm_90")
    assert spills_over_keys(found.code) == 0
    assert 2 * (found.shared_bytes + 1024) <= 228 * 1024 or problem.head_dim > 128
