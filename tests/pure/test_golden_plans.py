"""A golden table of plans: a change of the planner, a gate or a tile shows here, to be looked at.

After a change that is meant: WRITE_GOLDEN_PLANS=1 pytest tests/pure/test_golden_plans.py
"""

import os
from pathlib import Path

from heedful.core.device import KNOWN
from heedful.core.mask import MaskSpec
from heedful.core.plan import plan
from heedful.core.problem import AttentionProblem

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
    dense(8, 512, 512, 16, total_q=3000, total_k=3000, causal=True, needs_grad=True),
    dense(1, 16384, 16384, 16, mask=MaskSpec.of(True, (1024, 0)), needs_grad=True),
    dense(2, 512, 512, 16, softcap=30.0, alibi=True, bias=True, sink=True, dropout_p=0.1),
    dense(2, 512, 512, 16, bias=True, bias_grad=True, needs_grad=True, deterministic=True),
    dense(1, 64, 64, 8, num_splits=4),
    dense(1, 512, 512, 8, aligned=False),
]


# Every tile: of each head dim at which one ends, of each condition that picks one.
DIMS = (16, 64, 65, 128, 129, 192, 193, 256, 257, 512)
CONDITIONS: dict[str, dict] = {
    "plain": {},
    "float32": {"dtype": "float32"},
    "causal": {"causal": True},
    "window": {"mask": MaskSpec.of(True, (100, 0))},
    "left window": {"mask": MaskSpec.of(False, (100, -1))},
    "one burden": {"dropout_p": 0.1},
    "burdened": {"dropout_p": 0.1, "bias": True, "bias_grad": True},
    "unaligned": {"aligned": False},
    "tree": {"tree_mask": True, "needs_grad": False},
    "slopes": {"alibi": True},
    "packed": {"total_q": 9000, "total_k": 9000, "causal": True},
    "grouped decode": {"seqlen_q": 1, "heads_k": 4, "needs_grad": False},
    "grouped few": {"seqlen_q": 9, "heads_k": 4, "needs_grad": False},
    "grouped more": {"seqlen_q": 64, "heads_k": 4, "needs_grad": False},
    "65 rows": {"seqlen_q": 65},
    "128 rows": {"seqlen_q": 128},
    "129 rows": {"seqlen_q": 129},
    "pages": {"page_size": 16, "used_k": True, "needs_grad": False},
    "small grid": {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "heads_q": 8},
    "small grid, given splits": {
        **{"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "heads_q": 8},
        **{"num_splits": 2, "needs_grad": False},
    },
    "probabilities": {"return_probs": True, "needs_grad": False},
    "fp8": {"dtype": "float8_e4m3fn", "needs_grad": False},
    "fp8 causal": {"dtype": "float8_e4m3fn", "causal": True, "needs_grad": False},
    "fp8 fnuz": {"dtype": "float8_e4m3fnuz", "needs_grad": False},
}


def tiles(device) -> list[str]:
    """By kernel and tile, the conditions and head dims that it is for."""
    users: dict[str, dict[str, list[str]]] = {}
    for name, facts in CONDITIONS.items():
        for dim in DIMS:
            base = {"batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 16}
            problem = dense(**{**base, "head_dim": dim, "needs_grad": True, **facts})
            for backend in (None, "cdna", "portable"):
                for said in kernels(problem, device, backend):
                    dims = users.setdefault(said, {}).setdefault(name, [])
                    dims += [str(dim)] * (str(dim) not in dims)
    return [
        f"  {said}: " + "; ".join(f"{name} {' '.join(dims)}" for name, dims in uses.items())
        for said, uses in users.items()
    ]


def kernels(problem: AttentionProblem, device, backend: str | None) -> list[str]:
    try:
        chosen = plan(problem, device, backend=backend)
    except ValueError:
        return []
    found = [f"{chosen.num_splits} splits"] if chosen.num_splits > 1 else []
    for kernel, c in chosen.configs.items():
        extra = "".join(f" {key}={value}" for key, value in c.extra)
        tile = f"{c.block_m}x{c.block_n}x{c.num_warps}x{c.num_stages}"
        found.append(f"{kernel} {tile}{extra} ({chosen.measured[kernel]})")
    return found


def line(problem: AttentionProblem, device) -> str:
    """One plan, or why there is none."""
    try:
        chosen = plan(problem, device)
    except ValueError:
        return "none"
    words = [f"{chosen.backend} [{chosen.level}]"]
    if chosen.backward:
        words.append(f"backward {chosen.backward} [{chosen.backward_level}]")
    if chosen.num_splits > 1:
        words.append(f"{chosen.num_splits} splits")
    for kernel, c in chosen.configs.items():
        words.append(f"{kernel} {c.block_m}x{c.block_n}x{c.num_warps}x{c.num_stages}")
    return ", ".join(words)


def table() -> str:
    lines, devices = [], [(name, KNOWN[name]) for name in DEVICES]
    for problem in PROBLEMS:
        lines.append(problem.key())
        lines += [f"  {name}: {line(problem, device)}" for name, device in devices]
    for device in KNOWN.values():
        lines.append(str(device))
        lines += tiles(device) if device.name in DEVICES else []
    return "\n".join(lines) + "\n"


def test_plans_are_those_of_the_golden_table():
    if os.environ.get("WRITE_GOLDEN_PLANS"):
        GOLDEN.write_text(table())
    assert table() == GOLDEN.read_text()
