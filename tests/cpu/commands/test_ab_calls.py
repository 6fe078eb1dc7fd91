"""Two checkouts in turns: calls are those of the bench, and one source against itself is timed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import heedful
from ab import operands
from ab.__main__ import main
from ab.cases import TABLES, Cell, cells
from ab.worker import answer

SOURCES = str(Path(heedful.__file__).parents[1])
CPU = torch.device("cpu")


def small(cell: Cell) -> Cell:
    """The same call, of few and short sequences."""
    batch, rows, keys, heads, heads_k, dim = cell.shape
    lengths = tuple(min(n, 40) - place for place, n in enumerate(cell.lengths[:2]))
    queries = tuple(min(n, 9) for n in cell.queries[:2])
    # Pages are whole, where a step appends, and a cache that is dense is as long as its longest.
    keys = 48 if cell.new else max(lengths, default=min(keys, 40))
    batch = len(lengths) or min(batch, 2)
    group = min(heads // heads_k, 4)
    return replace(
        cell,
        shape=(batch, max(queries, default=min(rows, 40)), keys, group * 2, 2, dim)
        if heads_k > 1
        else (batch, max(queries, default=min(rows, 40)), keys, group, 1, dim),
        lengths=lengths,
        queries=queries,
        prefix=min(cell.prefix, 20),
        padded=min(cell.padded, 3),
    )


def kinds() -> dict[str, Cell]:
    """A cell of each kind of call, by a readable name."""
    found: dict[str, Cell] = {}
    for table in set(TABLES) - {"jax", "lengths"}:
        for cell in cells([table]):
            options = sorted(cell.options or {})
            has = [
                n
                for n in ("page", "prefix", "padded", "new", "rotary", "queries")
                if getattr(cell, n)
            ]
            has += [n for n in ("bias", "alibi", "sink", "by_head") if getattr(cell, n)]
            has += [cell.stored] if cell.stored else []
            mla = ["MLA"] * (cell.call == "cache" and cell.dim_v not in (0, cell.shape[-1]))
            name = " ".join((cell.call, cell.direction, *mla, *has, *options))
            found.setdefault(name, cell)
    return dict(sorted(found.items()))


KINDS = kinds()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_call_of_the_tables_is_taken(name):
    cell = small(KINDS[name])
    (call,) = operands.calls(cell.spec(), CPU, 1)
    made = call()
    for tensor in made if isinstance(made, tuple) else (made,):
        assert tensor.isfinite().all()


def test_operands_are_the_same_in_each_process_and_differ_between_sets():
    spec = small(KINDS["dense forward causal"]).spec()
    first, again = (operands.calls(spec, CPU, 2) for _ in range(2))
    assert torch.equal(first[0](), again[0]())
    assert not torch.equal(first[0](), first[1]())


def test_new_lengths_end_by_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(operands, "new_lengths", lambda seed: [30, 20])
    (cell,) = cells(["lengths"], "packed, forward and")
    calls = operands.new_calls(cell.spec(), CPU)
    next(calls)()
    next(calls)()
    with pytest.raises(ValueError, match="no new lengths are left"):
        next(calls)


def test_a_request_that_no_side_knows_is_refused():
    with pytest.raises(ValueError, match="do must be .*, got 'rest'"):
        answer({"do": "rest"}, {}, CPU)


@pytest.mark.slow
def test_one_source_against_itself_gives_figures_and_names_what_a_side_cannot_run(
    monkeypatch, tmp_path, capsys
):
    out, cell = tmp_path / "figures.jsonl", small(KINDS["cache forward page causal"])
    wrong = replace(small(KINDS["dense forward causal"]), options={"windows": 3})
    found = [each.spec() for each in (cell, wrong)]
    monkeypatch.setattr("ab.__main__._cells", lambda new, options: found)
    # Threads of two processes would wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--device", "cpu", "--rounds", "10", "--processes", "2", "--json-lines", str(out)]
    assert main([SOURCES, SOURCES, *options]) == 1
    (record,) = (json.loads(line) for line in out.read_text().splitlines())
    assert (record["name"], record["rounds"]) == (cell.name, 10)
    assert record["low"] <= record["ratio"] <= record["high"]
    assert record["equal"] is True
    said = capsys.readouterr().out
    assert f"base: {SOURCES}/heedful/__init__.py (cpu," in said
    assert f"{cell.table}: worst" in said
    last = said.splitlines()[-1]
    assert last.startswith(f"! {wrong.name}: base: TypeError: ")
    assert "windows" in last
