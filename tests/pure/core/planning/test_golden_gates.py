"""A golden table of gates: what each problem asks for, and why each kernel does not take it. Each
fact is given on both sides of the bound at which a gate turns.

After a change that is meant:

    WRITE_GOLDEN_GATES=1 pytest tests/pure/core/planning/test_golden_gates.py
"""

import os
from pathlib import Path

import pytest

import heedful
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.capability import VARIANTS, Toolchain, Variant

GOLDEN = Path(__file__).with_name("golden_gates.txt")
DEVICES = ["H200", "A100", "RTX 3090", "RTX 4090", "B200", "MI300X", "MI355X", "CPU"]
MLA = {"heads_k": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True, "seqlen_q": 2}
MLA_FACTS: list[dict] = [
    {},
    {"v_in_k": False},
    {"heads_q": 2048},
    {"kv_dtype": "int8"},
    {"head_dim_v": 256},
    {"head_dim": 320, "head_dim_v": 320},
]
GRAD = {"needs_grad": True}
E4M3 = {"kv_dtype": "float8_e4m3fn"}
FP8 = {"dtype": "float8_e4m3fn"}

FACTS: list[dict] = [
    {},
    {"batch": 0},
    {"seqlen_q": 0},
    {"seqlen_k": 0},
    {"total_q": 0, "total_k": 0},
    {"seqlen_k": 383},
    {"seqlen_k": 384},
    {"head_dim": 1},
    {"head_dim": 8},
    {"head_dim": 12},
    {"head_dim": 16, **FP8},
    {"head_dim": 24, **FP8},
    {"head_dim": 64},
    {"head_dim": 128, "head_dim_v": 64},
    {"head_dim": 192},
    {"head_dim": 256},
    {"head_dim": 257, **GRAD},
    {"head_dim": 264},
    {"head_dim": 64, "head_dim_v": 264},
    {"head_dim": 256, "dtype": "float32", **GRAD},
    {"head_dim": 264, "dtype": "float32", **GRAD},
    {"head_dim": 64, "head_dim_v": 257, "dtype": "float32", **GRAD},
    {"dtype": "float16"},
    {"dtype": "float32"},
    FP8,
    {"dtype": "float8_e4m3fnuz"},
    {"dtype": "float8_e5m2"},
    {**FP8, "out_dtype": "float16"},
    {**FP8, "out_dtype": "float32"},
    {**FP8, "out_dtype": "float8_e4m3fn"},
    {**FP8, **GRAD},
    {"out_dtype": "float32"},
    {"kv_dtype": "int8"},
    {"kv_dtype": "int4", "kv_group": 32},
    {"kv_dtype": "int8", "kv_group": 32, "kv_shift": True},
    {"kv_dtype": "int8", "kv_shift": True},
    E4M3,
    {**E4M3, "kv_group": 64},
    {**E4M3, "head_dim": 24},
    {**E4M3, "head_dim_v": 24},
    {**E4M3, "dropout_p": 0.1},
    {**E4M3, "total_q": 900, "page_size": 16, "used_k": True},
    {**E4M3, "total_q": 900, "seqlen_q": 128, "heads_k": 4, "used_k": True},
    {**E4M3, "total_q": 900, "seqlen_q": 129, "heads_k": 4, "used_k": True},
    {"kv_dtype": "float8_e4m3fnuz"},
    {"kv_dtype": "float8_e5m2"},
    {"scale": 0.0},
    {"scale": -1.0},
    {"softcap": 5.0},
    {"dropout_p": 0.1},
    {"dropout_p": 0.1, "dropout_origin": (1, 2, 3, 4)},
    {"dropout_p": 0.1, "dropout_origin": (1, 2, 3, 5)},
    {"dropout_origin": (1, 2, 3, 5)},
    {"alibi": True},
    {"bias": True},
    {"bias": True, "bias_grad": True, **GRAD},
    {"rel_bias": True},
    {"rel_bias": True, "bias": True},
    {"rel_bias": True, **GRAD},
    {"rel_bias": True, "rel_bias_grad": True, **GRAD},
    {"sink": True},
    {"tree_mask": True},
    {"causal": True},
    {"causal": True, "seqlen_q": 511},
    {"mask": MaskSpec.of(True, shift=1)},
    {"mask": MaskSpec.of(False, shift=1)},
    {"mask": MaskSpec.of(True, bottom_right=False)},
    {"mask": MaskSpec.of(True, bottom_right=False), "seqlen_q": 511},
    {"mask": MaskSpec.of(False, (5, 3))},
    {"mask": MaskSpec.of(False, (5, 3, 1))},
    {"total_q": 900, "total_k": 900, **GRAD},
    {"total_k": 900},
    {"total_q": 900, "used_k": True},
    {"total_q": 900, "heads_q": 64, "heads_k": 1},
    {"total_q": 900, "heads_q": 65, "heads_k": 1},
    {"used_q": True},
    {"used_k": True},
    {"used_k": True, "even_rows": False},
    {"even_rows": False},
    {"near_rows": False},
    {"heads_q": 1 << 14},
    {"page_size": 16, "used_k": True},
    {"page_size": 17, "used_k": True},
    {"page_size": 16, "used_k": True, **GRAD},
    {"page_size": 16, "used_k": True, "leftpad_k": True},
    {"kv_batch_idx": True},
    {"kv_batch_idx": True, **GRAD},
    {"leftpad_k": True},
    {"q_offsets": True, "mask": MaskSpec.of(True, bottom_right=False)},
    {"q_offsets": True, "mask": MaskSpec.of(True, bottom_right=False), "rel_bias": True, **GRAD}
    | {"rel_bias_grad": True},
    {"heads_k": 2},
    {"return_lse": True},
    {"return_probs": True},
    {"return_probs": True, "num_splits": 2},
    {"return_probs": True, "num_splits": 1},
    {"num_splits": 2},
    GRAD,
    {"deterministic": True},
    {"deterministic": True, **GRAD},
    {"aligned": False},
    *({**MLA, **facts} for facts in MLA_FACTS),
]


def problem(facts: dict) -> AttentionProblem:
    base = {"batch": 2, "seqlen_q": 512, "seqlen_k": 512, "heads_q": 4}
    return AttentionProblem.dense(**{**base, **facts})


def reasons(facts: dict) -> list[str]:
    """What is said of a problem, by kernel and device; devices that say the same together."""
    asked = problem(facts)
    lines = [f"{facts}: {asked.key()}", f"  asks for {' '.join(sorted(asked.features())) or '-'}"]
    flops, moved = (
        f"{f()} forward, {f(backward=True)} backward" for f in (asked.flops, asked.bytes)
    )
    lines.append(f"  flops: {flops}; bytes: {moved}")
    for row in VARIANTS:
        said: dict[str, list[str]] = {}
        for name in DEVICES:
            device = by_name(name)
            if row.level(device) is not None:
                why = "; ".join(row.why_not(asked, device)) or "takes it"
                said.setdefault(why, []).append(name)
        lines += [
            f"  {row.label} {row.direction} {row.dtypes[0]}, {', '.join(names)}: {why}"
            for why, names in said.items()
        ]
    return lines


def kernel(row: Variant) -> str:
    """What a kernel is beside its gates: where it is, what it needs, and by which name it is asked
    for."""
    needs = [f"{tool} {'.'.join(map(str, version))}" for tool, version in row.least]
    facts = {
        "levels": ", ".join(f"{arch} {level}" for arch, level in row.levels.items()),
        "dtypes": ", ".join(row.dtypes),
        "caches": ", ".join(row.kv_dtypes),
        "needs": ", ".join(needs),
        "tiles": ", ".join(row.configs),
        "module": row.program or row.module,
        "calls of": row.framework,
        "alias": row.alias,
        "unasked": "" if row.by_default else "never",
        "pages": "as copies" if row.gathers_pages else "",
    }
    words = "; ".join(f"{name} {fact}" for name, fact in facts.items() if fact)
    return f"{row.label} {row.direction}: {words}"


def table() -> str:
    lines = [line for facts in FACTS for line in reasons(facts)]
    return "\n".join([*map(kernel, VARIANTS), *lines]) + "\n"


def test_gates_are_those_of_the_golden_table():
    if os.environ.get("WRITE_GOLDEN_GATES"):
        GOLDEN.write_text(table())
    assert table() == GOLDEN.read_text()


def test_every_kernel_is_where_the_table_says():
    package = Path(heedful.__file__).parents[1]
    for row in VARIANTS:
        path = package.joinpath(*(row.program or row.module).split("."))
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), row.module


@pytest.mark.parametrize(
    "triton, torch, takes",
    [
        ((3, 5), (2, 11), {"cpu", "sdpa"}),
        ((3, 6), (2, 11), {"cpu", "sdpa", "portable", "hopper"}),
        ((3, 8), (2, 11), {"cpu", "sdpa", "portable", "hopper"}),
        ((3, 9), (2, 10), {"portable", "hopper", "hopper fp8", "cdna"}),
        ((3, 9), (2, 11), {"cpu", "sdpa", "portable", "hopper", "hopper fp8", "cdna"}),
        (None, (2, 11), {"cpu", "sdpa"}),
    ],
)
def test_kernels_want_their_tools(triton, torch, takes):
    tools = Toolchain(triton, torch)
    found = set()
    for row in VARIANTS:
        name = {"hopper": "H200", "portable": "H200", "cdna": "MI355X"}.get(row.backend, "CPU")
        asked = problem(FP8 if row.dtypes[0] == "float8_e4m3fn" else {})
        if row.direction == "forward" and not row.why_not(asked, by_name(name), tools):
            found.add(row.backend + " fp8" * (asked.dtype == FP8["dtype"]))
    assert found == takes


def test_a_pack_stands_for_triton_and_for_nothing_else():
    asked, device = problem({}), by_name("H200")
    packed = Toolchain(None, (2, 11), packs=frozenset({("portable", (3, 9))}))
    assert plan(asked, device, packed).backend == "portable"
    others = frozenset({("cpu", (3, 9)), ("sdpa", (3, 9))})
    with pytest.raises(ValueError, match="needs torch >= 2.11"):
        plan(asked, by_name("CPU"), Toolchain(None, (2, 10), packs=others))


@pytest.mark.parametrize("validated, backend", [((), "portable"), (("cdna",), "cdna")])
def test_a_kernel_that_nobody_ran_is_chosen_where_it_was_validated(validated, backend):
    tools = Toolchain(validated=frozenset(validated))
    chosen = plan(problem({}), by_name("MI300X"), tools)
    assert (chosen.backend, chosen.level) == (backend, "emulated")
    assert plan(problem({}), by_name("MI300X"), tools, "cdna").backend == "cdna"
