"""A recording says how the arrays of a call lie: what is compiled from it is what would run."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful
from heedful.launch import record
from support.runs import standin


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float16)


def uneven(batch: int, rows: int, heads: int, dim: int) -> torch.Tensor:
    """Batch entries begin half a row apart from where a row would."""
    row = heads * dim
    return some(batch * (rows * row + row // 2)).as_strided(
        (batch, rows, heads, dim), (rows * row + row // 2, row, dim, 1)
    )


@pytest.mark.parametrize("which, even", [("q", True), ("k", False), ("v", False)])
def test_uneven_rows_of_keys_and_values_are_recorded_and_of_nothing_else(which, even, tmp_path):
    given: dict[str, Any] = {
        n: uneven(2, 24, 2, 16) if n == which else some(2, 24, 2, 16) for n in "qkv"
    }
    leaves = [t.requires_grad_() for t in given.values()]
    with standin.gpu(), record.record(tmp_path / "list.json"):
        heedful.flash_attn_func(**given).sum().backward(inputs=leaves)
    entries = record.load(tmp_path / "list.json")
    found = {entry.direction: entry.problem.even_rows for entry in entries}
    assert found == {"forward": even, "backward": even}
    for entry in entries:
        assert entry.buffers is not None
        strides = {n: entry.buffers[n].strides for n in "qkv"}
        assert strides == {n: t.stride() for n, t in given.items()}


def test_an_output_is_recorded_as_the_caller_laid_it_out(tmp_path):
    q, k, v, out = some(2, 9, 2, 16), some(2, 12, 2, 16), some(2, 12, 2, 16), some(2, 9, 2, 32)
    with standin.gpu(), record.record(tmp_path / "list.json"):
        heedful.flash_attn_func(q, k, v, out=out[..., :16])
    *_, entry = record.load(tmp_path / "list.json")
    assert entry.direction == "forward" and entry.problem.seqlen_k == 12
    assert entry.buffers is not None
    lies = {name: (spec.shape, spec.strides) for name, spec in entry.buffers.items()}
    given = {"q": q, "k": k, "v": v, "out": out[..., :16]}
    assert {name: lies[name] for name in given} == {
        name: (tuple(t.shape), t.stride()) for name, t in given.items()
    }
