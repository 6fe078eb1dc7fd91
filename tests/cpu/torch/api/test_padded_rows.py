"""Sequences of length 0 and below, page numbers that do not exist, tokens of no sequence: what the
public functions make of them on a CPU, and what is told when they are checked."""

from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.core.base import settings
from heedful.torch.operands.values import check_pages, refuse_capture
from support.runs import standin

INF = float("inf")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def caches(page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Two caches of three sequences of 24 tokens; a table if they lie in pages."""
    if not page_size:
        return torch.randn(3, 24, 2, 16), torch.randn(3, 24, 2, 16), None
    pages = 24 // page_size
    table = torch.randperm(3 * pages).view(3, pages).int()
    shape = (3 * pages, page_size, 2, 16)
    return torch.randn(shape), torch.randn(shape), table


def decode(function=heedful.flash_attn_with_kvcache, **arguments):
    return function(**arguments, causal=True, return_softmax_lse=True)


@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("rotary", [False, True], ids=["still", "rotary"])
@pytest.mark.parametrize("page_size", [0, 8])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_a_padded_row_reads_and_writes_nothing(new, page_size, rotary, sink):
    """And the other rows do not notice it."""
    if rotary and not new:
        pytest.skip("rotary embedding needs new keys")
    k_cache, v_cache, table = caches(page_size)
    lengths = ints(-1, 7, -5)
    q, k, v = (torch.randn(3, max(1, new), heads, 16) for heads in (4, 2, 2))
    arguments: dict[str, Any] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_seqlens": lengths,
        # By name: with rows of a cache there is another first choice.
        "backend": "cpu",
    }
    arguments |= {"sink": torch.randn(4)} if sink else {}
    if new:
        arguments |= {"k": k, "v": v}
    if rotary:
        arguments |= {"rotary_cos": torch.randn(24, 4), "rotary_sin": torch.randn(24, 4)}
    shared = "rotary", "sink", "backend"
    alone = {n: t[1:2] for n, t in arguments.items() if not n.startswith(shared)}
    alone = arguments | alone
    alone |= {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    if table is None:
        alone["cache_batch_idx"] = ints(1)
    else:
        alone["block_table"] = table[1:2]
        # Nobody looks at the pages of a padded row.
        table[0], table[2] = 10**9, -1
        arguments["block_table"] = table
    out, lse = decode(**arguments)
    want, want_lse = decode(**alone)
    assert torch.equal(out[1:2], want) and torch.equal(lse[1:2], want_lse)
    assert torch.equal(k_cache, alone["k_cache"]) and torch.equal(v_cache, alone["v_cache"])
    for row in (0, 2):
        assert (out[row] == 0).all()
        empty = arguments["sink"][:, None] if sink else torch.tensor(-INF)
        assert (lse[row] == empty).all()


@pytest.mark.parametrize("page_size", [0, 8])
def test_a_compiled_call_treats_padded_rows_as_an_eager_one(page_size):
    torch._dynamo.reset()
    k_cache, v_cache, table = caches(page_size)
    q, k, v = (torch.randn(3, 2, heads, 16) for heads in (4, 2, 2))
    cos, sin = torch.randn(24, 4), torch.randn(24, 4)

    def step(k_cache, v_cache, lengths):
        return decode(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            k=k,
            v=v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=lengths,
            block_table=table,
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for lengths in (ints(-1, 7, 0), ints(-1, -4, -9), ints(3, 22, 5)):
        eager, traced = ((k_cache.clone(), v_cache.clone()) for _ in range(2))
        for got, want in zip(compiled(*traced, lengths), step(*eager, lengths), strict=True):
            assert torch.equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(traced, eager, strict=True))


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_used_lengths_below_zero_are_those_of_empty_sequences(paged):
    q, k = torch.randn(30, 2, 16), torch.randn(30, 2, 16)
    keys = torch.randn(6, 5, 2, 16) if paged else k
    cu, used = ints(0, 10, 20, 30), ints(-1, 4, -8)
    table = {"block_table": torch.arange(6).int().view(3, 2)} if paged else {}
    arguments: dict[str, Any] = {"seqused_k": used, "return_lse": True, **table}
    out, lse = heedful.flash_attn_varlen_func(q, keys, keys, cu, cu, 10, 10, **arguments)
    assert (out[:10] == 0).all() and (out[20:] == 0).all() and (out[10:20] != 0).all()
    assert (lse[:, :10] == -INF).all() and (lse[:, 20:] == -INF).all()
    out, lse = heedful.flash_attn_varlen_func(
        q, k, k, cu, cu, 10, 10, seqused_q=used, return_lse=True
    )
    seen = torch.zeros(30, dtype=torch.bool)
    seen[10:14] = True
    assert (out[~seen] == 0).all() and (lse[:, ~seen] == -INF).all()
    assert (out[seen] != 0).all() and lse[:, seen].isfinite().all()


def test_packed_tokens_of_no_sequence_are_zeros_and_minus_infinity():
    q = torch.randn(30, 2, 16)
    cu = ints(4, 10, 10, 23)
    out = torch.full_like(q, torch.nan)
    _, lse = heedful.flash_attn_varlen_func(q, q, q, cu, cu, 13, 13, out=out, return_lse=True)
    free = torch.ones(30, dtype=torch.bool)
    free[4:23] = False
    assert (out[free] == 0).all() and (lse[:, free] == -INF).all()
    assert (out[~free] != 0).all() and lse[:, ~free].isfinite().all()


def test_entries_past_a_length_may_hold_anything():
    k_cache, v_cache, table = caches(8)
    assert table is not None
    arguments: dict[str, Any] = {
        "q": torch.randn(3, 1, 4, 16),
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    arguments |= {"cache_seqlens": ints(8, 0, 17), "block_table": table}
    want = decode(**arguments)
    table[0, 1:], table[1] = -1, 2**30
    got = decode(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("wrong", [-1, 9, 2**31 - 1])
def test_a_page_that_does_not_exist_is_named_by_row_and_entry(wrong):
    k_cache, v_cache, table = caches(8)
    assert table is not None
    table[2, 1] = wrong
    arguments: dict[str, Any] = {
        "q": torch.randn(3, 1, 4, 16),
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    with pytest.raises(ValueError, match=rf"0 to 8 .*got {wrong} in row 2, entry 1$"):
        decode(**arguments, cache_seqlens=ints(8, 8, 9), block_table=table)
    decode(**arguments, cache_seqlens=ints(8, 8, 8), block_table=table)


def test_pages_are_checked_from_the_first_key_in_use_to_the_last():
    table = torch.tensor([[9, 0, 1, 9], [9, 9, 9, 9]])
    begin, end = torch.tensor([[4], [0]]), torch.tensor([[12], [0]])
    check_pages(table, 4, 2, begin, end)
    for row, first, last, entry in ((0, 3, 12, 0), (0, 4, 13, 3), (1, 7, 8, 1)):
        begin, end = torch.tensor([[4], [0]]), torch.tensor([[12], [0]])
        begin[row], end[row] = first, last
        with pytest.raises(ValueError, match=f"got 9 in row {row}, entry {entry}$"):
            check_pages(table, 4, 2, begin, end)


@pytest.mark.parametrize("new", [0, 2])
def test_on_a_gpu_pages_are_checked_if_asked_and_before_anything_is_launched(monkeypatch, new):
    pytest.importorskip("triton")
    k_cache, v_cache, table = caches(8)
    assert table is not None
    table[2, 1] = -1
    arguments: dict[str, Any] = {
        "q": torch.randn(3, 2, 4, 16),
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    arguments |= {name: torch.randn(3, new, 2, 16) for name in ("k", "v") if new}
    lengths = ints(8, 8, 9 - new)
    for asked in ("0", "1"):
        monkeypatch.setenv("HEEDFUL_CHECK_PAGES", asked)
        with standin.gpu() as gpu:
            if asked == "0":
                decode(**arguments, cache_seqlens=lengths, block_table=table)
                assert gpu.launches
                continue
            with pytest.raises(ValueError, match="got -1 in row 2, entry 1"):
                decode(**arguments, cache_seqlens=lengths, block_table=table)
            assert not gpu.launches
            decode(**arguments, cache_seqlens=lengths - 1, block_table=table)
            assert gpu.launches


def test_checking_pages_is_off_unless_asked_for_and_no_part_of_a_graph(monkeypatch):
    monkeypatch.delenv("HEEDFUL_CHECK_PAGES", raising=False)
    assert settings.get("check_pages") is False
    monkeypatch.setenv("HEEDFUL_CHECK_PAGES", "1")
    assert settings.get("check_pages") is True
    refuse_capture(False)
    with pytest.raises(ValueError, match=r"HEEDFUL_CHECK_PAGES must be 0 .* got 1"):
        refuse_capture(True)
