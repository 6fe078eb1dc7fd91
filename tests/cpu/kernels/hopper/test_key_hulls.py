"""The keys that 64 rows see by their key_ranges, as the kernel before a Hopper forward stores them,
run by Triton's interpreter.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.launch.program import programs
from heedful.launch.spec import Program
from heedful.reference import oracle
from heedful.reference.convert import operands_as_numpy
from heedful.reference.sequences import sequences
from heedful.torch.base.arrays import array_spec
from support.problems.cases import Case, build
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

BASE = Case(
    dtype="float16",
    seqlen_q=200,
    seqlen_k=300,
    heads_q=2,
    head_dim=64,
    key_ranges=1,
    backward=False,
)
CASES = [
    BASE,
    replace(BASE, key_ranges=2, ranges_of="bh", causal=True),
    replace(BASE, ranges_of="h", window=(50, 20), used="qk"),
    replace(BASE, varlen="qk", batch=3, causal=True, key_ranges=2),
]


def visible_runs(case: Case, built, seq, h: int, row: int):
    """(first, past the last) key that 64 rows see, and the keys that all of them see."""
    x = operands_as_numpy(built.x)
    seen = oracle.visible(built.problem, x, seq)
    ranges = oracle.in_ranges(x, seq)
    seen = (seen & ranges[h if len(ranges) > 1 else 0])[row : row + 64]
    keys = seen.any(0).nonzero()[0]
    return (keys[0], keys[-1] + 1) if len(keys) else (None, 0), seen.all(0)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hulls_hold_what_rows_see_and_whole_keys_are_seen_by_all(case):
    built = build(case)
    x = {name: t for name, t in built.x._asdict().items() if t is not None}
    chosen = plan(built.problem, by_name("H200"), backend="hopper")
    specs = {name: array_spec(t) for name, t in x.items()}
    out = torch.empty(built.problem.out_shape, dtype=torch.float16)
    lse = torch.empty(built.problem.lse_shape)
    whole = programs.program(
        chosen, "forward", specs | {"out": array_spec(out), "lse": array_spec(lse)}
    )
    (call,) = [c for c in whole.calls if c.kernel.function == "key_hulls"]
    shape = next(w.buffer.shape for w in whole.workspaces if w.name == "key_hulls")
    hulls = torch.full(shape, -7, dtype=torch.int32)
    interpret(Program((call,), ()), x | {"key_hulls": hulls})
    packed, own_heads = "q" in case.varlen, not case.varlen and "h" in case.ranges_of
    blocks = -(-case.seqlen_q // 64)
    total = built.problem.total_q or 0
    entries = total // 64 + case.batch if packed else case.batch * blocks
    for seq in sequences(built.problem, built.x):
        first = seq.q_token // 64 + seq.batch if packed else seq.batch * blocks
        for h in range(case.heads_q):
            for row in range(0, seq.len_q, 64):
                begin, full_begin, full_end, end = hulls[
                    first + row // 64 + h * entries * own_heads
                ].tolist()
                (seen_begin, seen_end), all_see = visible_runs(case, built, seq, h, row)
                assert end == seen_end if case.window == (-1, -1) else end >= seen_end
                if seen_begin is not None:
                    assert begin == seen_begin
                assert all_see[full_begin:full_end].all()


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
