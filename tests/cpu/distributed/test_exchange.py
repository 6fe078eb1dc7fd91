"""How rows travel between ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.distributed import exchange
from heedful.distributed.exchange import Exchange, Transfer


def copied_on_a_gpu(into: list[Tensor], rows: list[Tensor]) -> None:
    """`torch._foreach_copy_` as of CUDA: 16-bit floats go through float32, so that all NaNs become
    one."""
    for place, given in zip(into, rows, strict=True):
        if given.dtype in (torch.bfloat16, torch.float16):
            given = given.where(~given.isnan(), torch.nan)
        place.copy_(given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_of_nans_arrive_as_they_were_sent(monkeypatch, dtype):
    """Log-sum-exps of float32 travel in rows of 16-bit floats: some of their halves are NaNs."""
    monkeypatch.setattr(torch, "_foreach_copy_", copied_on_a_gpu)
    monkeypatch.setattr(exchange, "swap", lambda _, rows, *counts: Transfer(rows, None, rows))
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    rows = every.view(dtype)
    into = torch.zeros_like(rows)
    sent, places = ([list(x.split(1 << 14))] for x in (rows, into))
    Exchange(None, sent, places, exchange.ROUNDS + 1, rows).wait()
    assert torch.equal(into.view(torch.int16), every)


def test_a_transfer_has_a_head_start_on_gpus_alone(monkeypatch):
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    exchange.head_start(torch.device("cpu"))
    assert not slept
    exchange.head_start(torch.device("cuda:0"))
    assert slept == [exchange.HEAD_START]


@pytest.fixture
def sent(monkeypatch) -> list[Any]:
    """What collectives are given, of which each arrives as a copy of what leaves."""
    given: list[Any] = []

    class Work:
        def wait(self) -> None:
            given.append("waited")

    def in_lists(outs, ins, group, async_op):
        given.append(([x.shape for x in outs], [x.shape for x in ins], group, async_op))
        for place, rows in zip(outs, ins, strict=True):
            place.copy_(rows)
        return Work()

    def in_one(into, rows, received, sent, group, async_op):
        given.append((received, sent, group, async_op, into.dtype, rows.shape))
        into.copy_(rows)
        return Work()

    monkeypatch.setattr(exchange.dist, "all_to_all", in_lists)
    monkeypatch.setattr(exchange.dist, "all_to_all_single", in_one)
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda group: 1 if group == "one" else 3)
    return given


@pytest.mark.parametrize("rounds", [exchange.ROUNDS, exchange.ROUNDS + 1])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_slices_travel_as_they_lie_where_the_backend_can_and_they_are_few(
    backend, rounds, sent, monkeypatch
):
    """A rank has one slice for itself, none for the next and two for the last."""
    monkeypatch.setattr(exchange.dist, "get_backend", lambda group: backend)
    group: Any = "a group"
    rows = torch.arange(7 * 3).bfloat16().view(7, 3)
    leaving = [[rows[:2]], [], [rows[2:3], rows[3:7]]]
    into = [[torch.zeros_like(x) for x in theirs] for theirs in leaving]
    travelling = Exchange(group, leaving, into, rounds, rows)
    if backend == "nccl" and rounds <= exchange.ROUNDS:
        first, second = ([(2, 3), (0, 3), (1, 3)], [(0, 3), (0, 3), (4, 3)])
        assert sent == [(shapes, shapes, group, True) for shapes in (first, second)]
    else:
        assert sent == [([2, 0, 5], [2, 0, 5], group, True, torch.uint8, (7, 6))]
    sent.clear()
    travelling.wait()
    assert sent == ["waited"] * (2 if backend == "nccl" and rounds <= exchange.ROUNDS else 1)
    arrived = torch.cat([place for theirs in into for place in theirs])
    assert torch.equal(arrived, torch.arange(7 * 3).bfloat16().view(7, 3))
    travelling.wait()
    assert len(sent) <= 2


def test_rows_that_are_swapped_arrive_where_they_are_wanted(sent):
    rows = torch.arange(30.0).view(6, 5)[:, 1:]
    group: Any = "a group"
    found = exchange.swap(group, rows, [1, 2, 3], [3, 2, 1])
    assert sent == [([3, 2, 1], [1, 2, 3], group, True, torch.uint8, (6, 16))]
    assert torch.equal(found.wait(), rows) and torch.equal(found.wait(), rows)
    assert sent[1:] == ["waited"]
    into = torch.zeros(6, 4)
    assert exchange.swap(group, rows, [6, 0, 0], [6, 0, 0], into).rows is into
    sent.clear()
    alone: Any = "one"
    single = exchange.swap(alone, rows, [6], [6])
    assert torch.equal(single.wait(), rows) and single.rows is not rows and not sent


def test_ranks_that_were_told_otherwise_are_named_by_what_most_were_told(monkeypatch):
    others: Any = {"lengths": [5, 5, 7, 5], "heads": [1, 1, 1, 1]}
    asked = []

    def all_gather(every, mine, group):
        asked.append((mine.dtype, mine.tolist(), group))
        for row, told in zip(every, zip(*others.values(), strict=True), strict=True):
            row.copy_(torch.tensor(told))

    monkeypatch.setattr(exchange.dist, "all_gather", all_gather)
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda group: 4)
    group: Any = "a group"
    for own in (5, 7):
        said = r"^plan must get the same lengths on every rank; ranks \[2\] have another than the"
        with pytest.raises(ValueError, match=said + " other 3$"):
            exchange.agree(group, {"lengths": own, "heads": 1}, torch.device("cpu"))
    assert asked == [(torch.int64, [own, 1], group) for own in (5, 7)]
    others["lengths"] = [5] * 4
    exchange.agree(group, {"lengths": 5, "heads": 1}, torch.device("cpu"))


def laid_out(dtype: torch.dtype, width: int, gap: int, first: int) -> Tensor:
    """(5, 3, width) with a gap behind each row, from an element of its memory on."""
    values = torch.arange(5 * 3 * (width + gap) + first).to(dtype)
    return values[first:].view(5, 3, width + gap)[..., :width]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize(("width", "gap"), [(8, 0), (8, 8), (8, 3), (6, 2), (4, 2)])
def test_rows_are_copied_in_words_of_8_bytes_where_all_begin_at_one(dtype, first, width, gap):
    x = laid_out(dtype, width, gap, first)
    each = 8 // x.itemsize
    fits = not any(size % each for size in (width, width + gap, first))
    words = exchange.words_of(x)
    assert words.data_ptr() == x.data_ptr()
    assert words.dtype == (torch.int64 if fits else dtype)
    assert words.shape == ((5, 3, width // each) if fits else x.shape)
    turned = x.transpose(0, 2)
    assert exchange.words_of(turned).shape == turned.shape
    for source in (x, laid_out(dtype, width, 0, 0)):
        into = torch.zeros(5, 3, width, dtype=dtype)
        exchange.copy(into, source)
        assert torch.equal(into, source)


@pytest.mark.parametrize(("widths", "gap"), [((8, 4), 0), ((8, 4), 3), ((6, 2), 0), ((3, 5), 1)])
def test_two_tensors_come_side_by_side_into_words_or_elements(widths, gap):
    k, v = (laid_out(torch.bfloat16, width, gap, 0) for width in widths)
    out = torch.zeros(5, 3, sum(widths), dtype=torch.bfloat16)
    exchange.side_by_side([k, v], out)
    assert torch.equal(out, torch.cat([k, v], -1))
    if sum(widths) % 4 == 0:
        again = torch.zeros_like(out)
        exchange.side_by_side([k, v], again.view(torch.int64))
        assert torch.equal(again, out)
