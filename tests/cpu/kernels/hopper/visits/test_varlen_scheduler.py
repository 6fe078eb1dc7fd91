"""The order of packed sequences' tiles, run by Triton's interpreter.

They run in a process of their own: see `support.runs.interpreted`.
"""

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.core.registry.tiles import RowsConfig
from heedful.launch.bind import hopper_groups
from heedful.launch.program import buffers, programs
from heedful.launch.spec import Program
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

UNTOUCHED = -7


def order(lengths_q: list[int], lengths_k: list[int] | None = None, backend: str = "hopper"):
    """(tiles as (sequence, its first tile), rows of a tile, draws) as the order kernel leaves
    them."""
    batch, total_k = len(lengths_q), None if lengths_k is None else sum(lengths_k)
    problem = AttentionProblem.dense(
        batch,
        max(lengths_q),
        max(lengths_k or [900]),
        4,
        head_dim=64,
        causal=True,
        total_q=sum(lengths_q),
        total_k=total_k,
    )
    chosen = plan(problem, by_name("H200"), backend=backend)
    whole = programs.program(chosen, "forward", buffers.forward(problem))
    assert whole.calls[0].kernel.function == "schedule_varlen_tiles"
    shapes = {w.name: w.buffer.shape for w in whole.workspaces}
    arrays = {
        name: torch.full(shapes[name], UNTOUCHED, dtype=torch.int32)
        for name in ("varlen_tiles", "tile_counter")
    }
    results = {"out": (sum(lengths_q), 4, 64), "partial_lse": shapes.get("partial_lse", (1,))}
    arrays |= {name: torch.full(shape, torch.nan) for name, shape in results.items()}
    for name, lengths in (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k)):
        if lengths is not None:
            arrays[name] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    interpret(Program(whole.calls[:1], ()), arrays)
    count, entries = int(arrays["varlen_tiles"][0]), arrays["varlen_tiles"][1:].reshape(-1, 2)
    assert (entries[count:] == UNTOUCHED).all()
    assert all(arrays[name].isnan().all() for name in results)
    rows = chosen.configs["hopper.forward"].block_m
    return entries[:count].tolist(), rows, int(arrays["tile_counter"][0])


def expected(sizes: list[int], lengths_q: list[int], rows: int) -> list[list[int]]:
    """Every sequence's tiles side by side, the largest sequence first, ties as they come."""
    tiles: list[list[int]] = []
    for sequence in sorted(range(len(sizes)), key=lambda b: -sizes[b]):
        tiles += [[sequence, len(tiles)]] * -(-lengths_q[sequence] // rows)
    return tiles


@interpreted
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_tiles_of_the_longest_sequence_come_first_and_each_comes_once(batch):
    torch.manual_seed(batch)
    lengths = torch.randint(0, 1500, (batch,)).tolist()
    lengths[-1] = 1500
    tiles, rows, draws = order(lengths, lengths)
    assert tiles == expected(lengths, lengths, rows)
    assert draws == 0


@interpreted
def test_keys_decide_which_sequence_is_long():
    lengths_q, lengths_k = [700, 10, 0, 300], [50, 800, 900, 800]
    tiles, rows, _ = order(lengths_q, lengths_k)
    assert tiles == expected(lengths_k, lengths_q, rows)


@interpreted
def test_queries_decide_where_keys_are_dense():
    tiles, rows, _ = order([700, 10, 0, 300, 2000])
    assert tiles == expected([700, 10, 0, 300, 2000], [700, 10, 0, 300, 2000], rows)


@interpreted
def test_short_sequences_of_a_mixed_batch_have_no_tiles():
    lengths = [1, 16, 17, 0, 700, 3, 300]
    tiles, rows, draws = order(lengths, backend=forced("mixed/portable"))
    long = [n if n > 16 else 0 for n in lengths]
    assert tiles == expected(long, long, rows) and len(tiles) > 3
    assert draws == 0
    assert order([1, 1, 16], backend=forced("mixed/portable"))[0] == []
    keys = [900, 5, 40, 70, 50, 900, 60]
    assert order(lengths, keys, backend=forced("mixed/portable"))[0] == expected(keys, long, rows)


@interpreted
def test_more_sequences_than_a_program_looks_at_at_once(monkeypatch):
    monkeypatch.setattr(hopper_groups, "VARLEN_SCHEDULER", RowsConfig(16))
    lengths = [(37 * b) % 500 for b in range(70)]
    tiles, rows, _ = order(lengths, lengths)
    assert tiles == expected(lengths, lengths, rows)


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
