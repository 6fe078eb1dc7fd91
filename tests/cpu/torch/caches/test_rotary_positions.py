"""Rotary tables have a row for each position of the cache, as in flash_attn. Queries may be more
than the new keys and then stand past those: what counts is where they stand, not where they could.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import heedful.torch as typed
from support.runs import standin

heedful: Any = typed
CAPACITY, NEW, QUERIES, PREFIX = 16, 2, 5, 4
LAST = CAPACITY - QUERIES  # the most tokens that leave a row for each query
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": (-1, 2)},
    "window": {"window_size": (3, 1)},
}


class Onlooker(TorchDispatchMode):
    """Sees every operator, and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(rows: int = CAPACITY, page_size: int = 0, **keywords) -> dict[str, Any]:
    """Two sequences whose queries are more than their new keys, beside tables of `rows` rows."""
    torch.manual_seed(0)
    angle = torch.rand(40, 4)[:rows]
    shape = (2 * CAPACITY // page_size, page_size) if page_size else (2, CAPACITY)
    given = {"q": torch.randn(2, QUERIES, 4, 16), "k_cache": torch.randn(*shape, 2, 16)}
    given |= {"v_cache": torch.randn(*shape, 2, 16), "k": torch.randn(2, NEW, 2, 16)}
    given |= {"v": torch.randn(2, NEW, 2, 16)}
    if page_size:
        given["block_table"] = torch.randperm(shape[0]).view(2, -1).int()
    return given | {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()} | keywords


def decode(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """out and the caches, the given ones left as they are."""
    given = given | {name: given[name].clone() for name in ("k_cache", "v_cache")}
    return heedful.flash_attn_with_kvcache(**given), given["k_cache"], given["v_cache"]


@pytest.mark.parametrize("lengths", [LAST, ints(0, LAST), ints(-1, LAST)], ids=["int", "", "pad"])
@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_tables_of_the_caches_positions_do_for_queries_that_stand_within(mask, page_size, lengths):
    facts = {"page_size": page_size, "cache_seqlens": lengths, **MASKS[mask]}
    got, want = decode(step(**facts)), decode(step(40, **facts))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("prefix", [0, PREFIX])
@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("lengths", [ints(0, LAST), LAST], ids=["tensor", "int"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_query_past_the_tables_is_refused_before_anything_is_written(
    mask, lengths, page_size, prefix
):
    rows = CAPACITY + prefix
    facts = {"page_size": page_size, "cache_seqlens": lengths, **MASKS[mask]}
    if prefix and "window_size" in facts:
        pytest.skip("a shared prefix goes with causal masks only")
    if prefix:
        facts["shared_prefix"] = (torch.randn(prefix, 2, 16), torch.randn(prefix, 2, 16))
    given = step(rows, **facts)
    decode(given)
    before = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    message = f"^rotary_cos must have a row for each .* {rows + 1} positions, got {rows}$"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            heedful.flash_attn_with_kvcache(**given | {"cache_seqlens": lengths + 1})
    for name, kept in before.items():
        assert torch.equal(given[name], kept)


def test_queries_that_all_stand_at_the_first_new_key_need_no_rows_of_their_own():
    for lengths in (CAPACITY - NEW, ints(CAPACITY - NEW, 0)):
        decode(step(cache_seqlens=lengths))


def test_more_queries_than_rows_are_refused_whatever_the_lengths():
    given = step(cache_seqlens=ints(0, 0), causal=True) | {"q": torch.randn(2, 17, 4, 16)}
    with pytest.raises(ValueError, match="17 positions, got 16"):
        decode(given)


def test_an_int_length_is_checked_by_a_call_that_the_dispatcher_sees():
    given = step(cache_seqlens=LAST, causal=True)
    want = decode(given)
    with Onlooker():
        for ours, theirs in zip(decode(given), want, strict=True):
            assert torch.equal(ours, theirs)
        with pytest.raises(ValueError, match="17 positions, got 16"):
            decode(given | {"cache_seqlens": LAST + 1})


@pytest.mark.parametrize("asked", ["0", "1"])
def test_lengths_on_a_gpu_are_read_only_if_asked(asked, monkeypatch):
    monkeypatch.setenv("HEEDFUL_CHECK_PAGES", asked)
    given = step(page_size=4, cache_seqlens=ints(0, LAST), causal=True)
    with standin.gpu() as gpu:
        decode(given)
        launches = len(gpu.launches)
        assert launches
        with pytest.raises(ValueError, match="17 positions, got 16"):
            decode(given | {"cache_seqlens": LAST + 1})
        assert len(gpu.launches) == launches
        beyond = given | {"cache_seqlens": ints(0, LAST + 1)}
        if asked == "0":
            decode(beyond)
            assert len(gpu.launches) > launches
            return
        with pytest.raises(ValueError, match="17 positions, got 16"):
            decode(beyond)
        assert len(gpu.launches) == launches
