"""What is written into a cache, from where, and at what cost; and keys gathered from pages."""

from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.core.call.operands import Gradients, Operands
from heedful.torch.eager import cache_update, pages
from heedful.torch.eager.cache_update import append_kv, rotate, used_keys


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_tokens_that_all_have_their_place_are_written_without_a_copy(monkeypatch):
    def refuse(*_):
        raise AssertionError("a copy for tokens that have no place")

    monkeypatch.setattr(cache_update, "_only_kept", refuse)
    q, stored = torch.randn(2, 2, 4, 16), torch.zeros(2, 2, 12, 2, 16)
    k, v = torch.randn(2, 2, 2, 2, 16)
    heedful.flash_attn_with_kvcache(q, stored[0], stored[1], k, v, cache_seqlens=ints(0, 10))
    assert torch.equal(stored[:, 0, :2], torch.stack([k, v])[:, 0])
    assert torch.equal(stored[:, 1, 10:], torch.stack([k, v])[:, 1])


@pytest.mark.parametrize("lengths", [(4, -1), (-1, 4), (9, 9)], ids=str)
@pytest.mark.parametrize("rows", [(1, 0), (5, -2)], ids=str)
def test_a_cache_stays_as_it_is_where_no_token_has_a_place(lengths, rows):
    k, v = torch.randn(2, 2, 4, 1, 8)
    before = k.clone(), v.clone()
    new = torch.ones(2, 2, 1, 8)
    append_kv(k, v, new, new, ints(*lengths), ints(*rows), None, False)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("paged", [False, True])
def test_what_an_update_makes_is_where_the_cache_is(paged):
    there = torch.device("meta")
    x, lengths = torch.empty(2, 3, 1, 8, device=there), ints(0, 2).to(there)
    table = torch.zeros(2, 3, dtype=torch.int32, device=there) if paged else None
    append_kv(x, x, x, x, lengths, None, table, False)
    cos, sin = torch.empty(9, 4, device=there), torch.empty(9, 4, device=there)
    for interleaved in (False, True):
        assert rotate(x, cos, sin, lengths, interleaved).device == there
    if table is not None:
        given = Operands(x, x, x, block_table=table, seqused_k=lengths)
        assert pages.page_numbers(given, 9).device == there


def test_a_table_of_one_row_turns_whatever_stands_beyond_it():
    x = torch.randn(2, 3, 1, 8)
    cos, sin = torch.randn(1, 4), torch.randn(1, 4)
    want = rotate(x, cos.expand(9, 4), sin.expand(9, 4), ints(0, 4), True)
    assert torch.equal(rotate(x, cos, sin, ints(0, 4), True), want)


def test_keys_are_counted_from_where_a_sequence_begins_and_of_no_sequence_are_none():
    start, pads = ints(-2, 0, 5), ints(0, 1, 2)
    x = Operands(None, None, None)
    assert used_keys(x, start, 0) is start
    assert used_keys(x, start, 3).tolist() == [-2, 3, 8]
    assert used_keys(x._replace(leftpad_k=pads), start, 0).tolist() == [-2, -1, 3]
    assert used_keys(x._replace(leftpad_k=pads), start, 3).tolist() == [-2, 2, 6]


# (longest, used, pads) -> pages of 4 keys of a table that also names some that are not there.
TABLE = ints(3, -7, 99, 5, 4, 2, 1, 0, 2, 99, 5, 5).view(3, 4)
GATHERED: list[tuple[int, tuple, Any, list]] = [
    (16, (16, 16, 16), None, [[3, 0, 5, 5], [4, 2, 1, 0], [2, 5, 5, 5]]),
    (9, (4, 5, 9), None, [[3, 0, 0], [4, 2, 0], [2, 5, 5]]),
    (8, (8, 0, -1), None, [[3, 0], [0, 0], [0, 0]]),
    (5, (1, 5, 4), None, [[3, 0], [4, 2], [2, 0]]),
    (4, (4, 1, 0), None, [[3], [4], [0]]),
    (12, (4, 4, 7), (0, 1, 2), [[3, 0, 0], [4, 2, 0], [2, 5, 5]]),
]


@pytest.mark.parametrize("longest, used, pads, wanted", GATHERED, ids=str)
def test_pages_are_those_that_hold_a_key_and_the_first_for_the_rest(longest, used, pads, wanted):
    stored = torch.randn(6, 4, 2, 8)
    leftpad = None if pads is None else ints(*pads)
    x = Operands(None, stored, stored, block_table=TABLE, seqused_k=ints(*used), leftpad_k=leftpad)
    numbers = pages.page_numbers(x, longest)
    assert numbers.tolist() == wanted and numbers.dtype == torch.int64
    rows = pages.gathered(stored, numbers)
    assert rows.shape == (3, 4 * len(wanted[0]), 2, 8)
    for row, its_pages in zip(rows, wanted, strict=True):
        assert torch.equal(row, torch.cat([stored[page] for page in its_pages]))


@pytest.mark.parametrize("kv_grad", [False, True])
@pytest.mark.parametrize("count", [0, 6])
def test_gradients_of_pages_are_sums_over_who_read_them(count, kv_grad):
    """In dense memory, whatever the pages' own strides; and none where there are no pages."""
    k, v = (torch.randn(count, dim, 2, 4).transpose(1, 3) for dim in (8, 3))
    table = TABLE if count else torch.zeros_like(TABLE)
    x = Operands(torch.randn(3, 1, 4, 8), k, v, block_table=table, seqused_k=ints(9, 12, 3))
    seen = []

    def dense(rows: Operands, *cotangents):
        seen.append((rows, cotangents))
        return Gradients("dq", torch.ones(rows.k.shape), torch.full(rows.v.shape, 2.0), "db", "ds")

    grads = pages.backward_of_pages(dense, x, 12, kv_grad, "dout", "dlse")
    ((rows, cotangents),) = seen
    assert cotangents == ("dout", "dlse") and rows.block_table is None and rows.q is x.q
    assert rows.k.shape == (3, 12, 2, 8) and rows.v.shape == (3, 12, 2, 3)
    assert (grads.dq, grads.dbias, grads.dsink) == ("dq", "db", "ds")
    if not kv_grad:
        assert grads.dk is grads.dv is None
        return
    read = [3, 0, 5, 4, 2, 1, 2, 0, 0] if count else []
    assert grads.dk.is_contiguous() and grads.dv.is_contiguous()
    assert grads.dk.shape == k.shape and grads.dv.shape == v.shape
    for page in range(count):
        assert (grads.dk[page] == read.count(page)).all()
        assert (grads.dv[page] == 2 * read.count(page)).all()
