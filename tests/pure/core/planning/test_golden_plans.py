"""A golden table of plans: a change of the planner, a gate or a tile shows here, to be looked at.

After a change that is meant:

    WRITE_GOLDEN_PLANS=1 pytest tests/pure/core/planning/test_golden_plans.py
"""

import os
from functools import cache
from pathlib import Path

from heedful.core.base.device import KNOWN
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry import configs

DEVICES = ["H200", "A100", "RTX 4090", "B200", "MI300X", "MI355X", "CPU"]
GOLDEN = Path(__file__).with_name("golden_plans.txt")
dense = AttentionProblem.dense

PROBLEMS = [
    dense(4, 4096, 4096, 16, needs_grad=True),
    dense(4, 4096, 4096, 16, causal=True, needs_grad=True),
    dense(16, 1024, 1024, 32, head_dim=64, causal=True, needs_grad=True),
    dense(4, 4096, 4096, 8, head_dim=256, causal=True, needs_grad=True),
    dense(4, 8192, 8192, 64, 8, causal=True, needs_grad=True),
    dense(1, 4096, 4096, 16, head_dim=192, head_dim_v=128, causal=True),
    dense(2, 1000, 1000, 12, head_dim=96, dtype="float16", needs_grad=True),
    dense(2, 512, 512, 8, head_dim=512, dtype="float32", needs_grad=True),
    dense(1, 40000, 40000, 2, head_dim=64),
    dense(1, 128, 65535, 16, head_dim=64),
    dense(1, 1, 131072, 32, 8),
    dense(64, 1, 8192, 32, 8, used_k=True, page_size=16),
    *(
        dense(
            128, 2048, 8192, 32, 8, causal=True, total_q=n, page_size=16, used_k=True, kv_dtype=kv
        )
        for kv in ("bfloat16", "float8_e4m3fn", "int8")
        for n in (4 * 2048 + 124, 128 * 2048)
    ),
    *(
        dense(64, 1, 8192, heads, 1, 576, head_dim_v=512, v_in_k=True, used_k=True, page_size=64)
        for heads in (16, 128)
    ),
    dense(8, 512, 512, 16, total_q=3000, total_k=3000, causal=True, needs_grad=True),
    dense(1, 16384, 16384, 16, mask=MaskSpec.of(True, (1024, 0)), needs_grad=True),
    dense(2, 512, 512, 16, softcap=30.0, alibi=True, bias=True, sink=True, dropout_p=0.1),
    dense(2, 512, 512, 16, bias=True, bias_grad=True, needs_grad=True, deterministic=True),
    dense(1, 64, 64, 8, num_splits=4),
    dense(1, 512, 512, 8, aligned=False),
    dense(1, 512, 512, 8, invariant=True, needs_grad=True),
    dense(2, 1, 40000, 8, invariant=True, used_k=True),
]


# Every tile: of each head dim at which one ends, on both sides, of each condition that picks one.
DIMS = (1, 64, 65, 128, 129, 192, 193, 256, 257, 512, 513, 576)
GRID: dict = {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "heads_q": 8}
CONDITIONS: dict[str, dict] = {
    "plain": {},
    "invariant": {"invariant": True},
    "invariant float32": {"invariant": True, "dtype": "float32"},
    "invariant, in order": {"invariant": True, "deterministic": True},
    "invariant of 64 rows": {"invariant": True, "seqlen_q": 64},
    "invariant, grouped by two": {"invariant": True, "seqlen_q": 64, "heads_k": 8},
    "invariant, grouped, all of one tile": {"invariant": True, "seqlen_q": 16, "heads_k": 4},
    "narrow values": {"head_dim_v": 64},
    "values of 128": {"head_dim_v": 128},
    "values of 129": {"head_dim_v": 129},
    "float32": {"dtype": "float32"},
    "causal": {"causal": True},
    "window": {"mask": MaskSpec.of(True, (100, 0))},
    "left window": {"mask": MaskSpec.of(False, (100, -1))},
    "diagonal": {"mask": MaskSpec.of(False, (0, -1))},
    "window in pages": {"mask": MaskSpec.of(True, (100, 0)), "page_size": 16, "used_k": True},
    "some pressure": {"dropout_p": 0.1},
    "bias": {"bias": True},
    "high pressure": {"dropout_p": 0.1, "tree_mask": True},
    "higher pressure": {"dropout_p": 0.1, "bias": True, "tree_mask": True},
    "high pressure float32": {"dropout_p": 0.1, "bias": True, "dtype": "float32"},
    "unaligned": {"aligned": False},
    "tree": {"tree_mask": True},
    "slopes": {"alibi": True},
    "packed": {"total_q": 9000, "total_k": 9000, "causal": True},
    "packed, no mask": {"total_q": 9000, "total_k": 9000},
    "grouped decode": {"seqlen_q": 1, "heads_k": 4},
    "grouped, all of one tile": {"seqlen_q": 16, "heads_k": 4},
    "grouped, a row more": {"seqlen_q": 17, "heads_k": 4},
    "grouped by three, all of one tile": {"seqlen_q": 16, "heads_q": 12, "heads_k": 4},
    "grouped by three, a row more": {"seqlen_q": 17, "heads_q": 12, "heads_k": 4},
    "grouped by two": {"seqlen_q": 64, "heads_k": 8},
    "grouped by 64": {"seqlen_q": 2, "heads_q": 64, "heads_k": 1},
    "grouped by 65": {"seqlen_q": 2, "heads_q": 65, "heads_k": 1},
    "grouped slopes": {"seqlen_q": 1, "heads_k": 4, "alibi": True},
    "grouped and dropped": {"seqlen_q": 1, "heads_k": 4, "dropout_p": 0.1},
    "grouped and packed": {"seqlen_q": 1, "heads_k": 4, "total_q": 4, "total_k": 9000},
    "64 rows": {"seqlen_q": 64},
    "grouped, 64 rows": {"seqlen_q": 64, "heads_k": 4},
    "65 rows": {"seqlen_q": 65},
    "grouped, 65 rows": {"seqlen_q": 65, "heads_k": 4},
    "128 rows": {"seqlen_q": 128},
    "129 rows": {"seqlen_q": 129},
    "pages": {"page_size": 16, "used_k": True},
    "grouped decode in pages": {"seqlen_q": 1, "heads_k": 4, "page_size": 16, "used_k": True},
    "64 rows in pages": {"seqlen_q": 16, "heads_k": 4, "page_size": 16, "used_k": True},
    "small grid": GRID,
    "small grid, given splits": {**GRID, "num_splits": 2},
    "small grid, one split": {**GRID, "num_splits": 1},
    "small grid, most keys": {**GRID, "seqlen_k": 2048},
    "a key more": {**GRID, "seqlen_k": 2049},
    "small grid, most tiles": {**GRID, "batch": 3, "heads_q": 11, "seqlen_q": 256},
    "a head more": {**GRID, "batch": 1, "heads_q": 67, "seqlen_q": 129, "seqlen_k": 1024},
    "a row more": {**GRID, "batch": 3, "heads_q": 11, "seqlen_q": 257},
    "fp8": {"dtype": "float8_e4m3fn"},
    "fp8 causal": {"dtype": "float8_e4m3fn", "causal": True},
    "fp8 fnuz": {"dtype": "float8_e4m3fnuz"},
    "fp8 of few rows": {"dtype": "float8_e4m3fn", "seqlen_q": 1},
    "softcap": {"softcap": 30.0},
    "in order": {"deterministic": True},
    "packed, in order": {"total_q": 9000, "total_k": 9000, "deterministic": True},
    "dropped, in order": {"dropout_p": 0.1, "deterministic": True},
    "softcap, in order": {"softcap": 30.0, "deterministic": True},
    "lists of 128": {"block_mask": 128},
    "lists of 64": {"block_mask": 64, "seqlen_q": 1},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "fp8_ds_mla of 32 rows": {
        **{"kv_dtype": "fp8_ds_mla", "seqlen_q": 1, "heads_q": 32, "heads_k": 1, "used_k": True}
    },
    "fp8_ds_mla of 32 rows in one split": {
        **{"kv_dtype": "fp8_ds_mla", "seqlen_q": 1, "heads_q": 32, "heads_k": 1, "num_splits": 1}
    },
    "e4m3 of 64 rows": {"kv_dtype": "float8_e4m3fn", "seqlen_q": 64},
    "e4m3, grouped": {"kv_dtype": "float8_e4m3fn", "seqlen_q": 40, "heads_k": 4},
}
# Decode's tiles go by the query rows of a KV head, by the bits of what is stored and by pages.
STORED = ("bfloat16", "float8_e4m3fn", "int8", "int4")
DECODES: dict[str, dict] = {
    f"{queries * group} rows of {stored}{' in pages' * paged}": {
        "seqlen_q": queries,
        "heads_q": group,
        "heads_k": 1,
        "page_size": 16 * paged,
        "used_k": True,
        "kv_dtype": stored,
    }
    for queries, group in ((1, 8), (1, 16), (1, 17), (2, 16), (3, 11), (1, 64), (5, 13))
    for stored in STORED
    for paged in (False, True)
}
# Of two KV heads, rows that are half a line of memory.
DECODES["4 rows of int4 of two heads"] = {
    **{"seqlen_q": 1, "heads_q": 8, "heads_k": 2},
    **{"used_k": True, "kv_dtype": "int4"},
}
# Latent vectors in rows of bytes.
DECODES |= {
    f"{group} rows of fp8_ds_mla": {
        **{"seqlen_q": 1, "heads_q": group, "heads_k": 1, "used_k": True},
        **{"kv_dtype": "fp8_ds_mla"},
    }
    for group in (16, 17)
}
# MLA's tiles also go by the room that caches have.
LATENTS: dict[str, dict] = {
    f"{128 * queries} rows over 8192{f' in pages of {page}' * bool(page)}": {
        **{"seqlen_q": queries, "heads_q": 128, "heads_k": 1, "seqlen_k": 8192},
        **{"used_k": True, "page_size": page},
    }
    for queries in (1, 16)
    for page in (0, 16)
}
# Beside the known devices: an architecture of AMD's that has tiles, and one that nobody has heard
# of.
ARCHS = ("gfx90a", "sm_75")
SHOWN: set[int] = set()  # rows of tiles, by id


def tiles(device) -> list[str]:
    """By kernel and tile, the conditions and head dims that it is for."""
    users: dict[str, dict[str, list[str]]] = {}
    kernels = list(dict.fromkeys(row.kernel for row in configs.ROWS))
    cases = [(name, facts, kernels) for name, facts in CONDITIONS.items()]
    cases += [(name, facts, ["decode.forward"]) for name, facts in DECODES.items()]
    cases += [(name, facts, ["mla.forward"]) for name, facts in LATENTS.items()]
    for name, facts, asked in cases:
        for dim in DIMS:
            base = {"batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 16}
            base |= {"head_dim": dim, "head_dim_v": min(dim, 512)}
            problem = dense(**{**base, **facts})
            for kernel in asked:
                is_fp8 = problem.dtype.startswith("float8")
                if kernel.startswith("hopper.") and ("fp8" in kernel) != is_fp8:
                    continue
                said = f"{kernel} {tile(kernel, problem, device)}"
                users.setdefault(said, {}).setdefault(name, []).append(str(dim))
    return [
        f"  {said}: " + "; ".join(f"{name} {' '.join(dims)}" for name, dims in uses.items())
        for said, uses in sorted(users.items())
        if not said.endswith("none")
    ]


def tile(kernel: str, problem: AttentionProblem, device) -> str:
    try:
        row = configs.choose(kernel, problem, device)
    except LookupError:
        return "none"
    SHOWN.add(id(row))
    c = row.config
    rows = c.group_rows(problem)
    words = f" {c.words()}".rstrip() + (f" by {rows}" if rows != 1 else "")
    return f"{c.block_m}x{c.block_n}x{c.num_warps}x{c.num_stages}{words} ({row.measured})"


def line(problem: AttentionProblem, device) -> str:
    """One plan, or why there is none."""
    try:
        chosen = plan(problem, device)
    except ValueError:
        return "none"
    words = [f"{chosen.variant_of('forward').label} [{chosen.level}]"]
    if chosen.backward:
        label = chosen.variant_of("backward").label
        words.append(f"backward {label} [{chosen.backward_level}]")
    if chosen.num_splits > 1:
        words.append(f"{chosen.num_splits} splits")
    for kernel, c in chosen.configs.items():
        words.append(f"{kernel} {c.block_m}x{c.block_n}x{c.num_warps}x{c.num_stages}")
    return ", ".join(words)


@cache
def table() -> str:
    lines, devices = [], [(name, KNOWN[name]) for name in DEVICES]
    for problem in PROBLEMS:
        lines.append(problem.key())
        lines += [f"  {name}: {line(problem, device)}" for name, device in devices]
    lines += map(str, KNOWN.values())
    strange = [KNOWN["A100"].live(name=arch, arch=arch) for arch in ARCHS]
    by_tiles: dict[tuple[str, ...], list[str]] = {}
    for device in (*KNOWN.values(), *strange):
        by_tiles.setdefault(tuple(tiles(device)), []).append(device.name)
    for found, names in by_tiles.items():
        lines += [f"tiles of {', '.join(names)}", *found]
    return "\n".join(lines) + "\n"


def test_plans_are_those_of_the_golden_table():
    if os.environ.get("WRITE_GOLDEN_PLANS"):
        GOLDEN.write_text(table())
    assert table() == GOLDEN.read_text()


def test_every_row_of_tiles_is_one_that_the_table_shows():
    """So that none may change unseen, and none is left that another hides."""
    table()
    assert len(SHOWN) > 150
    hidden = [row for row in configs.ROWS if id(row) not in SHOWN]
    assert not [(row.kernel, row.archs, row.max_dim) for row in hidden]
