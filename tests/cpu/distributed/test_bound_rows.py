"""Bound calls of steps over ranks: what tells rows that a call is not good for, and the addresses
that it runs on."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from heedful.distributed import calls

OPTIONS: dict[str, Any] = {
    "sink": None,
    "alibi_slopes": None,
    "key_ranges": None,
    "dropout_p": 0.0,
    "deterministic": False,
    "softmax_scale": 0.5,
    "softcap": 0.0,
    "backend": None,
}


def test_ranges_counted_from_a_later_key_show_the_same_keys():
    """Of all rows from one key, of each from its own; empty ones stay empty."""
    pairs = torch.tensor([[0, 9], [3, 7], [-2, 4], [5, 5], [8, 2], [6, 40]], dtype=torch.int32)
    keys = torch.arange(16)
    each = torch.tensor([[0], [3], [4], [2], [1], [7]], dtype=torch.int32)
    for first in (0, 1, 6, each):
        made = calls.from_first(pairs, first)
        assert made.dtype == torch.int32 and made.shape == pairs.shape and made.amin() >= 0
        for row, ((begin, end), (new, last)) in enumerate(zip(pairs, made, strict=True)):
            start = first if isinstance(first, int) else int(first[row])
            seen = (keys >= begin) & (keys < end)
            assert torch.equal(seen[start:], ((keys >= new) & (keys < last))[: 16 - start])


def rows(heads: int = 4, dim: int = 8, dtype=torch.float32, tokens: int = 6) -> torch.Tensor:
    return torch.zeros(tokens, heads, dim, dtype=dtype)


def lies(q=None, k=None, v=None, **options) -> Any:
    q, k, v = (rows() if x is None else x for x in (q, k, v))
    return calls.lies(q, k, v, {**OPTIONS, **options})


OTHERS: dict[str, dict[str, Any]] = {
    "shape of q": {"q": rows(8)},
    "shape of k": {"k": rows(2)},
    "shape of v": {"v": rows(dim=16)},
    "dtype": {"q": rows(dtype=torch.bfloat16)},
    "strides of q": {"q": rows(6, tokens=4).transpose(0, 1)},
    "strides of k": {"k": rows(6, tokens=4).transpose(0, 1)},
    "strides of v": {"v": rows(6, tokens=4).transpose(0, 1)},
    "scale": {"softmax_scale": 0.25},
    "softcap": {"softcap": 3.0},
    "deterministic": {"deterministic": True},
    "backend": {"backend": "cpu"},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_rows_that_lie_otherwise_are_told_apart(other):
    assert lies() == lies() and lies(**other) not in (None, lies())


def test_settings_gradients_and_strict_algorithms_tell_calls_apart():
    known = lies()
    with torch.no_grad():
        assert lies() != known
    torch.use_deterministic_algorithms(True)
    try:
        assert lies() == lies(deterministic=True) != known
    finally:
        torch.use_deterministic_algorithms(False)
    calls.EPOCH.clear()
    assert lies() != known


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "given",
    [
        {"sink": rows()},
        {"alibi_slopes": rows()},
        {"dropout_p": 0.5},
        *({name: torch.zeros(200)[1:193].view(6, 4, 8)} for name in "qkv"),
        *({name: rows().as_subclass(Other)} for name in "qkv"),
    ],
    ids=lambda given: ", ".join(given),
)
def test_calls_with_more_operands_and_of_odd_tensors_are_not_bound(given):
    assert lies(**given) is None


def test_calls_under_autocast_are_not_bound():
    with torch.autocast("cpu"):
        assert lies() is None


@pytest.mark.parametrize("packed", [False, True])
def test_a_bound_call_runs_on_addresses_from_where_rows_begin(packed, monkeypatch):
    asked: list[Any] = []
    found = [torch.ones(1, 4, 6) if not packed else torch.ones(4, 6)]

    def run(addresses):
        asked.append(addresses)
        return found

    def bound(q, k, v, x, options, out):
        asked.append((q.shape, out.shape, options.kind, options.window_size, options.return_lse))
        tables = () if x is None else (x.cu_seqlens_q, x.cu_seqlens_k)
        assert all(a is b for a, b in zip(tables, given.tables, strict=True))
        return run, lambda placed: (*placed[:3], *(a for a in placed[3:] if a is not None))

    monkeypatch.setattr(calls, "bound", bound)
    q, k, v, out = (rows() for _ in range(4))
    given = SimpleNamespace(tables=(torch.zeros(3).int(), torch.zeros(3).int()) if packed else ())
    more = {
        "window_size": (7, 0),
        **{k: x for k, x in OPTIONS.items() if k[0] != "s" or "soft" in k},
    }
    more |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), given.tables, strict=False))
    begins = [x.data_ptr() - 64 * n for n, x in enumerate((q, k, v, out))]
    made = calls.Bound.of((q, k, v), more, out, begins)
    assert made is not None
    lse = made(1000, 2000, 3000, 4000)
    shape = (6, 4, 8) if packed else (1, 6, 4, 8)
    told, addresses = asked
    assert told == (shape, shape, "varlen" if packed else "dense", (7, 0), True)
    between = [table.data_ptr() for table in given.tables]
    assert addresses == [1000, 2064, 3128, *between, 4192] and lse.shape == (4, 6)


def test_what_no_gpu_runs_is_not_bound():
    q, k, v, out = (rows() for _ in range(4))
    more = {"window_size": (-1, -1), **OPTIONS}
    assert calls.Bound.of((q, k, v), more, out, [0, 0, 0, 0]) is None
