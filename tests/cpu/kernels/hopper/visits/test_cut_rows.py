"""Where rows with key_ranges are cut into packed sequences, and what the kernels before a Hopper
forward store of these: run by Triton's interpreter.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful import masks
from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.core.registry.tiles import CUT_ROWS
from heedful.launch.program import programs
from heedful.launch.spec import Program
from heedful.torch.base.arrays import array_spec
from support.problems.cases import Case, build
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

BASE = Case(
    dtype="float16",
    batch=2,
    seqlen_q=900,
    seqlen_k=900,
    heads_q=2,
    head_dim=64,
    causal=True,
    key_ranges=1,
    backward=False,
)


def documents(*lengths: int) -> torch.Tensor:
    """(2, 1, rows, 2): documents in one row, a single one in the other."""
    rows = sum(lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return masks.documents(torch.stack([ids, torch.zeros(rows, dtype=ids.dtype)])).ranges


def padded(rows: int, *pads: int) -> torch.Tensor:
    return masks.padding(torch.arange(rows) >= torch.tensor(pads)[:, None])


def cut_short(rows: int) -> torch.Tensor:
    """Documents of which one row of the last sees the first key of all."""
    made = documents(300, rows - 300).clone()
    made[0, 0, rows - 1, 0] = 0
    return made


KINDS = {
    "documents": (documents(100, 300, 57, 443), [0, 400, 900]),
    "padding": (padded(900, 130, 0), [0, 130, 900]),
    "one row sees all": (cut_short(900), [0, 900]),
    "one document": (masks.documents(torch.zeros(2, 900, dtype=torch.int32)).ranges, [0, 900]),
}


def stored(case: Case, ranges: torch.Tensor) -> tuple:
    """(what case was built, the arrays that the kernels before the forward store)."""
    built = build(case)
    built.x.key_ranges[:, :1].copy_(ranges)
    x = {name: t for name, t in built.x._asdict().items() if t is not None}
    chosen = plan(built.problem, by_name("H200"), backend=forced("hopper+cuts_rows=1"))
    results = {
        "out": torch.empty(built.problem.out_shape, dtype=torch.float16),
        "lse": torch.empty(built.problem.lse_shape),
    }
    whole = programs.program(
        chosen, "forward", {name: array_spec(t) for name, t in (x | results).items()}
    )
    made = {
        w.name: torch.full(w.buffer.shape, -7, dtype=torch.int32)
        for w in whole.workspaces
        if w.buffer.dtype == "int32"
    }
    interpret(Program(whole.calls[:-1], ()), x | made)
    return built, made


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [(-1, -1), (70, 0)], ids=str)
def test_no_row_sees_a_key_of_another_piece_and_hulls_are_those_of_pieces(kind, window):
    """Rows are cut where the definition says so: of 128 rows at most at the first such one."""
    ranges, want = KINDS[kind]
    case = replace(BASE, window=window)
    built, made = stored(case, ranges)
    rows = case.seqlen_q
    tokens = made["cut_tokens"].tolist()
    assert len(tokens) == 2 * -(-rows // CUT_ROWS) + 1
    assert sorted(set(tokens)) == sorted({*want, rows, 2 * rows})
    place = torch.arange(rows)
    for b, (start, end) in enumerate(zip(tokens, tokens[1:], strict=False)):
        for row in range(start, end, 64):
            piece = torch.arange(row, min(row + 64, end))
            begin, stop = ranges[row // rows, 0, piece % rows].unbind(-1)
            seen = (place >= begin[:, None]) & (place < stop[:, None])
            seen &= place <= (piece % rows)[:, None]
            if window[0] >= 0:
                seen &= place >= (piece % rows - window[0])[:, None]
            first = start % rows
            last = first + end - start
            assert not seen[:, :first].any() and not seen[:, last:].any()
            shown = seen[:, first:last]
            a, z = made["cut_ranges"][piece].unbind(-1)
            key = torch.arange(last - first)
            local = (key >= a[:, None]) & (key < z[:, None])
            local &= key <= (piece - start)[:, None]
            if window[0] >= 0:
                local &= key >= (piece - start - window[0])[:, None]
            assert torch.equal(local, shown)
            at = made["key_hulls"][start // 64 + b + (row - start) // 64].tolist()
            keys = shown.any(0).nonzero()[:, 0].tolist()
            assert at[:2] == ([keys[0], keys[-1] + 1] if keys else [1 << 30, 0])
            assert shown[:, at[2] : at[3]].all()


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
