"""Plans over latent vectors (MLA): which kernel, its tiles, programs and scratch."""

import math
from dataclasses import replace
from typing import Any

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import explain, plan
from heedful.core.registry.by_hand import forced

# Latent vectors of 8 bits.
STORED = ("float8_e4m3fn", "fp8_ds_mla")


def latent(batch: int, seqlen: int, heads: int, **facts):
    dims = {"head_dim": 576, "head_dim_v": 512, "v_in_k": True}
    return AttentionProblem.dense(batch, 1, seqlen, heads, 1, used_k=True, **dims, **facts)


@pytest.mark.parametrize(
    "batch, heads, programs",
    [
        # Whole units, a unit's halves, and where that would leave places idle as many as fit.
        (64, 128, 2 * 64),
        (64, 16, 2 * 64),
        (128, 128, 2 * 64),
        (1, 16, 32),
        (50, 128, 2 * 66),
        (132, 64, 132),
    ],
)
def test_mla_cuts_equal_sequences_in_equal_parts_where_that_fills_the_device(
    batch, heads, programs
):
    chosen = plan(latent(batch, 8192, heads), by_name("H200"), backend="mla")
    launch = chosen.sizes().launches["mla.forward"]
    assert launch.grid == (programs, 1, 1) and launch.numbers == {"tiles": -(-heads // 64)}


@pytest.mark.parametrize(
    "heads, tokens, backend",
    [
        (1, 1, "mla_swap_ab"),
        (32, 1, "mla_swap_ab"),
        (16, 2, "mla_swap_ab"),
        (33, 1, "mla"),
        (16, 3, "mla"),
    ],
)
def test_up_to_32_rows_over_latent_keys_are_columns_of_products(heads, tokens, backend):
    step = replace(latent(4, 64, heads), seqlen_q=tokens)
    for family in (None, "decode"):
        assert plan(step, by_name("H200"), backend=family).variant == backend
    assert plan(step, by_name("H200"), backend="mla").variant == "mla"


@pytest.mark.parametrize(
    "batch, heads, num_splits, units, rows, merge",
    [
        (1, 16, 0, 132, 16, 1),
        (16, 16, 0, 132, 16, 1),
        # A tile has fewer than eight SMs.
        (17, 16, 0, 132, 16, 0),
        (16, 17, 0, 132, 32, 1),
        (64, 32, 0, 132, 32, 0),
        # With splits given a sequence has the same bits in any batch.
        (1, 16, 8, 132, 16, 0),
        # Programs that wait for each other need a unit each.
        (1, 16, 0, 16, 16, 1),
        (1, 16, 0, 15, 16, 0),
    ],
)
def test_few_rows_of_mla_have_small_tiles_and_are_merged_by_all_where_these_have_many_sms(
    batch, heads, num_splits, units, rows, merge
):
    device = replace(by_name("H200"), units=units)
    step = latent(batch, 8192, heads, num_splits=num_splits)
    chosen = plan(step, device, backend="mla_swap_ab")
    tile: Any = chosen.configs["mla_swap_ab.forward"]
    assert (tile.block_m, tile.merge) == (rows, merge)
    assert not merge or math.prod(chosen.sizes().launches["mla_swap_ab.forward"].grid) <= units


@pytest.mark.parametrize("page_size", (0, 64, 16))
@pytest.mark.parametrize(
    "batch, heads, tokens, chosen",
    [
        # As measured: a merge by one program takes longer than to wait for all of them.
        (1, 128, 1, "merge"),
        (8, 128, 1, "merge"),
        (1, 16, 1, "merge"),
        (8, 16, 1, ""),
        (64, 16, 1, ""),
        (64, 128, 1, "ahead"),
        # Tiles of which each has four SMs, and not; of fewer rows, as many more.
        (33, 64, 1, "merge"),
        (34, 64, 1, ""),
        (16, 128, 1, "merge"),
        (17, 128, 1, "ahead"),
        (16, 16, 8, "merge"),
        (17, 16, 8, "ahead"),
        (5, 16, 1, "merge"),
        (6, 16, 1, ""),
        (1, 2, 1, ""),
    ],
)
def test_mla_is_merged_by_all_where_one_would_take_longer_than_they_wait(
    page_size, batch, heads, tokens, chosen
):
    facts = {"page_size": page_size, "seqlen_q": tokens}
    step = replace(latent(batch, 8192, heads), **facts)
    tile: Any = plan(step, by_name("H200"), backend="mla").configs["mla.forward"]
    assert (tile.merge, tile.ahead, tile.in_order) == {
        "merge": (1, 0, 0),
        "ahead": (0, 1, 1),
        "": (0, 0, 0),
    }[chosen]
    assert (tile.consumer_regs, tile.producer_regs) == ((232, 40) if page_size == 16 else (240, 24))


@pytest.mark.parametrize(
    "batch, heads, seqlen, page_size, boxes",
    [
        (64, 128, 8192, 64, 2),
        (64, 128, 8192, 0, 2),
        # Short caches, one tile of rows, small pages, and where all merge.
        (64, 128, 4096, 64, 2),
        (64, 128, 4095, 64, 0),
        (64, 64, 8192, 64, 0),
        (64, 128, 8192, 16, 0),
        (1, 128, 8192, 64, 0),
    ],
)
def test_mla_keeps_queries_in_registers_where_two_tiles_share_many_keys(
    batch, heads, seqlen, page_size, boxes
):
    step = latent(batch, seqlen, heads, page_size=page_size)
    tile: Any = plan(step, by_name("H200"), backend="mla").configs["mla.forward"]
    assert tile.query_boxes == boxes


def test_mla_is_merged_by_one_where_the_same_bits_or_all_at_once_are_not_to_be_had():
    """With splits given a sequence has the same bits in any batch. Programs that wait for each
    other need a unit each."""
    step = latent(1, 8192, 128)
    for num_splits, units, merge in ((0, 132, 1), (8, 132, 0), (1, 132, 0), (0, 33, 1), (0, 32, 0)):
        device = replace(by_name("H200"), units=units)
        chosen = plan(replace(step, num_splits=num_splits), device, backend="mla")
        tile: Any = chosen.configs["mla.forward"]
        assert (tile.merge, tile.ahead) == (merge, 1 - merge)
        assert not merge or math.prod(chosen.sizes().launches["mla.forward"].grid) <= units


def test_how_mla_adds_values_may_be_chosen_by_hand():
    step = latent(64, 8192, 128)
    chosen = plan(step, by_name("H200"), backend=forced("mla+query_boxes=1+merge_values=64"))
    assert "merge_values=64 query_boxes=1 ahead=1 in_order=1 (chosen by hand)" in explain(chosen)
    for option in ("query_boxes=3", "least_tiles=0", "merge_values=24", "merge=2", "ahead=9"):
        with pytest.raises(ValueError, match=f"backend: {option.split('=')[0]} must be"):
            plan(step, by_name("H200"), backend=forced(f"mla+{option}"))


def test_each_half_of_mla_has_scratch_of_its_own():
    chosen = plan(latent(3, 4096, 128, num_splits=4), by_name("H200"), backend="mla")
    made = {w.name: w for w in chosen.sizes().workspaces}
    assert made["partial_out"].buffer.shape == (2 * 3 * 2 * 4, 64, 256)
    assert made["counts"].buffer.shape == (2 * 3 * 2,) and made["counts"].zeroed
    whole = plan(latent(3, 4096, 128, num_splits=1), by_name("H200"), backend="mla")
    assert not whole.sizes().workspaces


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("heads, tokens", [(1, 1), (16, 1), (128, 1), (128, 16)])
def test_latent_vectors_of_8_bits_are_converted_by_a_kernel_for_hopper(stored, heads, tokens):
    step = replace(latent(4, 8192, heads, kv_dtype=stored, page_size=64), seqlen_q=tokens)
    found = plan(step, by_name("H200"))
    variant = "mla_converting_pair" if heads * tokens > 32 else "mla_converting"
    assert (found.backend, found.variant) == ("decode", variant)
    assert f"KV of {stored} beside bfloat16" in explain(found)
    assert plan(step, by_name("B200")).variant == "portable"


@pytest.mark.parametrize(
    "stored, batch, heads, tokens, splits, merge",
    [
        (STORED[0], 16, 128, 1, 0, 1),
        (STORED[0], 17, 128, 1, 0, 0),
        (STORED[0], 33, 64, 1, 0, 1),
        (STORED[0], 1, 128, 1, 3, 0),
        (STORED[1], 11, 128, 1, 0, 1),
        (STORED[1], 16, 128, 1, 0, 0),
        (STORED[0], 1, 128, 16, 0, 1),
    ],
)
def test_more_than_32_rows_over_8_bits_have_tiles_of_64_that_all_merge_where_few_share_the_device(
    stored, batch, heads, tokens, splits, merge
):
    step = latent(batch, 8192, heads, kv_dtype=stored, num_splits=splits)
    chosen = plan(replace(step, seqlen_q=tokens), by_name("H200"))
    tile: Any = chosen.configs["mla_converting_pair.forward"]
    assert (tile.block_m, tile.merge) == (64, merge)
    grid = math.prod(chosen.sizes().launches["mla_converting_pair.forward"].grid)
    assert grid <= 132


def test_tiles_of_64_rows_over_8_bits_are_for_more_than_32_rows():
    step = latent(4, 8192, 32, kv_dtype=STORED[0])
    with pytest.raises(ValueError, match="32 query rows of a KV head: takes more than 32"):
        plan(step, by_name("H200"), backend="mla_converting_pair")


@pytest.mark.parametrize(
    "facts, reason",
    [
        ({"kv_dtype": "int8"}, "KV of int8 beside bfloat16"),
        ({"kv_dtype": "float8_e5m2"}, "KV of float8_e5m2 beside bfloat16"),
        ({}, "KV of bfloat16 beside bfloat16"),
        ({"kv_dtype": STORED[0], "head_dim": 552}, "head_dim 552 of a quantised cache"),
        ({"kv_dtype": STORED[0], "sink": True}, "does not take"),
        ({"kv_dtype": STORED[1], "dtype": "float16"}, "float16 queries over fp8_ds_mla"),
    ],
)
def test_the_kernel_that_converts_latent_vectors_says_what_it_does_not_take(facts, reason):
    step = replace(latent(4, 8192, 16), **facts)
    with pytest.raises(ValueError, match=reason):
        plan(step, by_name("H200"), backend="mla_converting")


@pytest.mark.parametrize(
    "stored, batch, heads, tokens, rows, stages, programs, merge",
    [
        (STORED[0], 1, 16, 1, 16, 2, 2, 1),
        (STORED[0], 16, 17, 1, 32, 2, 2, 1),
        (STORED[0], 17, 16, 1, 16, 2, 2, 0),
        (STORED[1], 16, 16, 1, 16, 2, 2, 1),
        # Probabilities of each group of columns leave room for one program alone.
        (STORED[1], 16, 32, 1, 32, 3, 1, 1),
        # Programs of all tiles of a sequence would have to run at once.
        (STORED[0], 1, 128, 4, 32, 2, 2, 1),
        (STORED[0], 1, 128, 5, 32, 2, 2, 0),
        (STORED[1], 1, 128, 16, 32, 3, 1, 0),
    ],
)
def test_latent_vectors_of_8_bits_have_tiles_of_which_two_share_an_sm_where_they_fit(
    stored, batch, heads, tokens, rows, stages, programs, merge
):
    step = replace(latent(batch, 8192, heads, kv_dtype=stored), seqlen_q=tokens)
    chosen = plan(step, by_name("H200"), backend="mla_converting")
    tile: Any = chosen.configs["mla_converting.forward"]
    found = tile.block_m, tile.num_stages, tile.programs, tile.merge
    assert found == (rows, stages, programs, merge)
    grid = math.prod(chosen.sizes().launches["mla_converting.forward"].grid)
    assert not merge or grid <= programs * 132
