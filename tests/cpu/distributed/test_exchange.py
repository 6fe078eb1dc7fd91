"""How rows travel between ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from heedful.distributed import exchange
from heedful.distributed.exchange import Exchange, Transfer

GROUP: Any = "a group"


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
def asked(monkeypatch) -> Any:
    """The calls of torch that rank 0 of two makes; the other sends `come`."""
    said = SimpleNamespace(backend="gloo", lists=[], single=[], waits=0, come=None, facts=[])
    work = SimpleNamespace(wait=lambda: setattr(said, "waits", said.waits + 1))

    def single(into, rows, received, sent, group, async_op) -> Any:
        said.single.append((rows.clone(), received, sent, group, async_op))
        if said.come is not None:
            into.copy_(said.come.view(into.dtype).view(into.shape))
        return work

    def lists(outs, ins, group, async_op) -> Any:
        said.lists.append((outs, ins, group, async_op))
        return work

    def gather(every, mine, group=None) -> None:
        assert group == "a group"
        for row, facts in zip(every, said.facts, strict=True):
            row.copy_(mine if facts is None else torch.tensor(facts, device="cpu"))

    monkeypatch.setattr(dist, "get_backend", lambda group=None: said.backend)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: len(said.facts) or 2)
    monkeypatch.setattr(dist, "all_to_all_single", single)
    monkeypatch.setattr(dist, "all_to_all", lists)
    monkeypatch.setattr(dist, "all_gather", gather)
    return said


def test_rows_are_sent_as_bytes_and_waited_for_once(asked):
    asked.come = torch.arange(12.0).view(3, 2, 2)
    rows = torch.arange(20.0).view(5, 2, 2)
    transfer = exchange.swap("group", rows, [2, 3], (1, 2))  # pyright: ignore
    ((sent, *counts),) = asked.single
    assert sent.dtype == torch.uint8 and torch.equal(sent.view(torch.float32), rows.flatten(1))
    assert counts == [[1, 2], [2, 3], "group", True]
    assert torch.equal(transfer.wait(), asked.come) and torch.equal(transfer.wait(), asked.come)
    assert asked.waits == 1
    into = torch.zeros(3, 2, 2)
    assert exchange.swap(None, rows, [5, 0], [3, 0], into).wait() is into
    assert torch.equal(into, asked.come)


@pytest.mark.parametrize("rounds", [0, exchange.ROUNDS, exchange.ROUNDS + 1])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_few_slices_go_straight_where_the_backend_takes_lists_and_others_packed(
    asked, backend, rounds
):
    asked.backend = backend
    sent = [[], [torch.full((n + 1, 2), float(n)) for n in range(rounds)]]
    into = [[], [torch.zeros(2, 2), torch.zeros(1, 2)][: max(0, rounds - 1)]]
    like = torch.zeros(3, 2)
    asked.come = torch.arange(6.0).view(3, 2)[: sum(map(len, into[1]))]
    made = Exchange(None, sent, into, rounds, like)
    is_straight = backend == "nccl" and rounds <= exchange.ROUNDS
    assert (len(asked.lists), len(asked.single)) == ((rounds, 0) if is_straight else (0, 1))
    for index, (outs, ins, group, is_begun) in enumerate(asked.lists):
        assert (group, is_begun, len(outs[0]), len(ins[0])) == (None, True, 0, 0)
        assert ins[1] is sent[1][index]
        assert outs[1] is into[1][index] if index < len(into[1]) else len(outs[1]) == 0
    for packed, received, gone, _, _ in asked.single:
        assert gone == [0, sum(range(1, rounds + 1))]
        assert received == [0, sum(map(len, into[1]))]
        assert packed.numel() == 4 * sum(x.numel() for x in sent[1])
    made.wait()
    made.wait()
    assert asked.waits == (rounds if is_straight else bool(into[1]))
    if not is_straight and into[1]:
        assert torch.equal(torch.cat(into[1]), asked.come)


def test_of_one_rank_its_own_rows_arrive(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    rows = torch.randn(3, 2)
    assert torch.equal(exchange.swap(None, rows, [3], [3]).wait(), rows)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ([None, None, None], ""),
        ([None, [1, 3], None], "same b on every rank; ranks [1] have another than the other 2"),
        ([[9, 9], None, None, [8, 9]], "same a on every rank; ranks [0, 3] have another than the"),
        ([[0, 2], None, None], "same a on every rank; ranks [0] have another"),
    ],
)
def test_facts_that_differ_are_told_with_the_fewer_ranks(asked, facts, said):
    asked.facts = facts
    try:
        exchange.agree(GROUP, {"a": 1, "b": 2}, torch.device("cpu"))
        found = ""
    except ValueError as error:
        found = str(error)
    assert found.startswith("plan must get the " * bool(said) + said) and bool(found) == bool(said)


def test_facts_of_63_bits_are_compared_whole_on_the_device_that_is_told(asked):
    asked.facts = [None, [2**62 + 1]]
    with torch.device("meta"), pytest.raises(ValueError, match="the same a on"):
        exchange.agree(GROUP, {"a": 2**62}, torch.device("cpu"))


WIDE = torch.zeros(4, 6, 8, dtype=torch.float16)


@pytest.mark.parametrize(
    ("x", "is_wide"),
    [
        (WIDE, True),
        (WIDE[:, 1:3], True),
        (WIDE[..., 4:], True),
        # No multiple of 8 bytes: where it begins, how long a row is, and how far the next one lies.
        (WIDE[..., 2:6], False),
        (WIDE[..., :6], False),
        (torch.zeros(4, 6, 10, dtype=torch.float16)[..., :8], False),
        (WIDE.transpose(1, 2), False),
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 3), False),
        (torch.zeros(3, 3, dtype=torch.int64), True),
        (torch.zeros(3, 16, dtype=torch.uint8), True),
        (torch.zeros(3, 12, dtype=torch.uint8), False),
    ],
)
def test_rows_are_wide_words_where_all_of_them_begin_and_end_at_8_bytes(x, is_wide):
    words = exchange.words_of(x)
    assert words.dtype == (torch.int64 if is_wide else x.dtype)
    assert words.data_ptr() == x.data_ptr() and words.nbytes == x.nbytes


@pytest.mark.parametrize("dims", [(8, 4), (8, 3), (2, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("is_view", [False, True], ids=["out", "a view of it"])
def test_parts_lie_side_by_side_whatever_words_they_are(dims, is_view, monkeypatch):
    """In wide words if all can be."""
    real, taken = torch.cat, []
    monkeypatch.setattr(
        torch, "cat", lambda parts, **more: taken.append(parts[0].dtype) or real(parts, **more)
    )
    parts = [torch.randn(5, 3, dim).half() for dim in dims]
    out = torch.zeros(5, 3, sum(dims), dtype=torch.float16)
    place = exchange.words_of(out) if is_view else out
    exchange.side_by_side(parts, place)
    assert taken == [torch.float16 if any(dim % 4 for dim in dims) else torch.int64]
    assert torch.equal(out, real(parts, -1))


@pytest.mark.parametrize("begin", [0, 1, 4])
def test_a_copy_is_the_same_whatever_words_it_takes(begin):
    rows = torch.randn(5, 12).half()
    into = torch.zeros(5, 8, dtype=torch.float16)
    exchange.copy(into, rows[:, begin : begin + 8])
    assert torch.equal(into, rows[:, begin : begin + 8])
    exchange.copy(rows[:, begin : begin + 8], into + 1)
    assert torch.equal(rows[:, begin : begin + 8], into + 1)
