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
    return "\n".join(lines) + "\n"


def test_plans_are_those_of_the_golden_table():
    if os.environ.get("WRITE_GOLDEN_PLANS"):
        GOLDEN.write_text(table())
    assert table() == GOLDEN.read_text()
