"""The portable kernels compile for GPUs that are not here, within each target's limits.

A covering array: every pair of feature values appears in some problem. `make test` compiles each
problem for one of four targets, and every feature value for all four; the slow tier compiles each
problem for them all and for the other NVIDIA parts.
"""

import itertools
import random
import re
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from heedful.core.arrays import ArraySpec  # noqa: E402
from heedful.core.device import by_name  # noqa: E402
from heedful.core.mask import MaskSpec  # noqa: E402
from heedful.core.plan import Plan, plan  # noqa: E402
from heedful.core.problem import AttentionProblem  # noqa: E402
from heedful.launch import buffers  # noqa: E402
from heedful.launch.bind import portable, portable_cache  # noqa: E402
from heedful.launch.spec import KernelCall, Pointer  # noqa: E402
from heedful.launch.triton_compat import compile_kernel  # noqa: E402

TARGETS = ("sm_90", "gfx942", "sm_80", "gfx950")
OTHER_TARGETS = ("sm_86", "sm_89", "sm_100", "sm_120")
# Where the tiles are meant to need no local memory, but for float32.
SPILL_FREE = ("sm_80", "sm_90")
MOST_VARIANTS = 120
# Test items a target, so that the workers of a test run end together.
SHARES = 2

FACTORS: dict[str, tuple] = {
    "dims": ((64, 64), (128, 128), (40, 40), (96, 64), (256, 256), (13, 29)),
    "dtype": ("bfloat16", "float16", "float32"),
    "mask": ("full", "causal", "window", "first"),
    "backward": (False, True),
    "storage": ("dense", "varlen", "used", "paged", "leftpad"),
    "group": (1, 3),
    "softcap": (0.0, 8.0),
    "alibi": (False, True),
    "bias": (False, True),
    "dropout": ("none", "quads", "singles"),
    "sink": (False, True),
    "tree_mask": (False, True),
    "aligned": (True, False),
}
MASKS = {
    "full": MaskSpec(),
    "causal": MaskSpec.of(True),
    "window": MaskSpec(9, 4),
    "first": MaskSpec(9, -1, 3),
}


def _possible(row: dict) -> bool:
    """Pages have no backward, and packed keys are never in pages."""
    return not (row.get("storage") == "paged" and row.get("backward"))


@cache
def covering_rows() -> list[dict]:
    """Greedy pairwise cover of FACTORS, the same in every run."""
    rng = random.Random(0)
    names = list(FACTORS)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if _possible({a: x, b: y})
    }
    rows = []
    while missing:
        draws = [_grow(rng, dict(min(missing, key=str)), missing) for _ in range(20)]
        best = max(draws, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append(best)
    return rows


def _grow(rng: random.Random, row: dict, missing: set) -> dict:
    for name in rng.sample(list(FACTORS), len(FACTORS)):
        if name not in row:
            choices = [c for c in FACTORS[name] if _possible({**row, name: c})]
            rng.shuffle(choices)
            row[name] = max(choices, key=lambda c: len(_pairs({**row, name: c}) & missing))
    return row


def _pairs(row: dict) -> set:
    chosen = [(name, row[name]) for name in FACTORS if name in row]
    return set(itertools.combinations(chosen, 2))


def problem_of(row: dict) -> AttentionProblem:
    """Sizes are run-time values: any will do."""
    storage, dropout = row["storage"], row["dropout"]
    heads_k, (dim, dim_v) = 4, row["dims"]
    packed = 3000 if storage == "varlen" else None
    return AttentionProblem.dense(
        2,
        1024,
        2048,
        heads_k * row["group"],
        heads_k,
        dim,
        row["dtype"],
        head_dim_v=dim_v,
        mask=MASKS[row["mask"]],
        softcap=row["softcap"],
        dropout_p=0.0 if dropout == "none" else 0.1,
        dropout_origin=(0, 0, 0, int(dropout == "singles")),
        total_q=packed,
        total_k=packed,
        used_q=storage == "used",
        used_k=storage in ("used", "paged"),
        page_size=16 if storage == "paged" else 0,
        leftpad_k=storage == "leftpad",
        alibi=row["alibi"],
        bias=row["bias"],
        sink=row["sink"],
        tree_mask=row["tree_mask"],
        needs_grad=row["backward"],
        bias_grad=row["bias"] and row["backward"],
        return_lse=True,
        aligned=row["aligned"],
    )


def buffers_of(problem: AttentionProblem, direction: str) -> dict[str, ArraySpec]:
    """Dense arrays of the problem's shapes, with a cotangent of the log-sum-exp."""
    made = getattr(buffers, direction)(problem)
    if direction == "backward":
        made["dlse"] = made["lse"]
    return {name: replace(spec, aligned=problem.aligned) for name, spec in made.items()}


def calls_of(problem: AttentionProblem, chosen: Plan) -> list[KernelCall]:
    """Every launch of the forward and, with gradients, of the backward."""
    directions = ("forward", "backward")[: 1 + problem.needs_grad]
    programs = [
        getattr(portable, direction)(problem, chosen, buffers_of(problem, direction))
        for direction in directions
    ]
    return [call for program in programs for call in program.calls]


def variants(arch: str, rows: list[dict]) -> list[tuple[str, KernelCall]]:
    """The distinct kernels that these problems launch on an architecture, with readable names."""
    found: dict[tuple, tuple[str, KernelCall]] = {}
    for index, row in enumerate(rows):
        problem = problem_of(row)
        chosen = plan(problem, by_name(arch), backend="portable")
        for call in calls_of(problem, chosen):
            found.setdefault(call.variant, (f"{index}-{call.kernel.function}", call))
    return list(found.values())


@cache
def dealt_rows() -> dict[str, list[dict]]:
    """The covering rows by target: each goes to the one that has met fewest of its feature values,
    of these to the one with fewest rows."""
    dealt: dict[str, list[dict]] = {target: [] for target in TARGETS}
    met: dict[str, set] = {target: set() for target in TARGETS}
    for row in covering_rows():
        target = min(TARGETS, key=lambda t: (len(met[t] & row.items()), len(dealt[t])))
        dealt[target].append(row)
        met[target] |= row.items()
    return dealt


def spilled_bytes(compiled) -> int:
    """Local memory of a cubin, which nothing but spills uses here."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    assert found, text
    return int(found[1])


def takes_float32(call: KernelCall) -> bool:
    """Whether its products are of float32, whose operands lie in registers whole: those spill at
    wide heads whatever the tile (docs/measured-facts.md)."""
    q = call.arguments.get("q")
    return isinstance(q, Pointer) and q.dtype == "float32"


def compile_within_limits(arch: str, named: list[tuple[str, KernelCall]]) -> None:
    """Compiles all; reports every kernel over the limits of its target, not just the first."""
    limit, wrong = by_name(arch).shared_bytes, []
    for name, call in named:
        compiled = compile_kernel(call, arch)
        if compiled.metadata.shared > limit:
            wrong.append(f"{name}: {compiled.metadata.shared} bytes of shared memory, {limit} fit")
        if arch not in SPILL_FREE or takes_float32(call):
            continue
        if spilled := spilled_bytes(compiled):
            wrong.append(f"{name}: {spilled} bytes spilled, {call.constants}")
    assert not wrong, "\n".join(wrong)


def test_every_pair_of_feature_values_is_covered():
    covered = set().union(*map(_pairs, covering_rows()))
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            assert ((a, x), (b, y)) in covered or not _possible({a: x, b: y}), (a, x, b, y)


def test_every_problem_has_a_target_and_every_feature_value_has_all():
    dealt = dealt_rows()
    assert sum(map(len, dealt.values())) == len(covering_rows())
    values = set().union(*(row.items() for row in covering_rows()))
    for target, rows in dealt.items():
        assert set().union(*(row.items() for row in rows)) == values, target
    kernels = sum(len(variants(target, rows)) for target, rows in dealt.items())
    assert MOST_VARIANTS // 2 < kernels <= MOST_VARIANTS


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("arch", TARGETS)
def test_covering_array_compiles_within_the_limits_of(arch, share):
    named = variants(arch, dealt_rows()[arch])
    compile_within_limits(arch, named[share::SHARES])


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS + OTHER_TARGETS)
def test_every_variant_compiles_within_the_limits_of(arch):
    compile_within_limits(arch, variants(arch, covering_rows()))


@pytest.mark.parametrize("direction", ("forward", "backward"))
@pytest.mark.parametrize("mask", ("full", "causal"))
@pytest.mark.parametrize("dim", (64, 128, 256, 512))
def test_plain_tiles_of_sm_90_do_not_spill(dim, mask, direction):
    row = {name: values[0] for name, values in FACTORS.items()}
    row |= {"dims": (dim, dim), "mask": mask, "backward": direction == "backward"}
    compile_within_limits("sm_90", variants("sm_90", [row]))


WIDER_KEYS: list[dict] = [
    {},
    {"mask": "causal", "storage": "paged", "group": 3},
    {"mask": "window", "bias": True},
    {"mask": "causal", "aligned": False, "dtype": "float16"},
]


@pytest.mark.parametrize("features", WIDER_KEYS, ids=lambda row: "-".join(row) or "plain")
@pytest.mark.parametrize("arch", ("sm_90", "gfx942", "gfx950"))
def test_keys_of_576_beside_values_of_512_compile_within_the_limits_of(arch, features):
    row = {name: values[0] for name, values in FACTORS.items()}
    row |= {"dims": (576, 512), **features}
    compile_within_limits(arch, variants(arch, [row]))


def test_a_new_length_compiles_nothing():
    row = {name: values[-1] for name, values in FACTORS.items()}
    row |= {"storage": "dense", "aligned": True, "backward": True}
    seen = set()
    for seqlen_q, seqlen_k, batch in ((1, 1, 1), (37, 53, 2), (512, 4096, 3), (100_000, 65_536, 1)):
        problem = problem_of(row)
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": batch}
        problem = replace(problem, **sizes)
        chosen = plan(problem, by_name("sm_90"), backend="portable")
        chosen = replace(chosen, num_splits=1)
        seen.add(tuple(call.variant for call in calls_of(problem, chosen)))
    assert len(seen) == 1


@pytest.mark.parametrize("arch", ("sm_90", "gfx942"))
def test_cache_kernels_compile_for(arch):
    tables = ArraySpec.contiguous((4096, 32), "float32")
    new = ArraySpec.contiguous((2, 5, 4, 128), "bfloat16")
    pages = ArraySpec.contiguous((64, 16, 4, 128), "bfloat16")
    lengths = ArraySpec.contiguous((2,), "int32")
    shared = {"rotary_cos": tables, "rotary_sin": tables, "cache_seqlens": lengths}
    append = {"k_new": new, "v_new": new, "k": pages, "v": pages, "seqused": lengths, **shared}
    append["block_table"] = ArraySpec.contiguous((2, 32), "int32")
    calls = portable_cache.append_kv(append, page_size=16).calls
    calls += portable_cache.rotary({"q": new, "rotated": new, **shared}).calls
    compile_within_limits(arch, [(call.kernel.function, call) for call in calls])
