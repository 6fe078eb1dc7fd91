"""Configs have what a problem decides of them, each fact of it alone."""

from dataclasses import replace

import pytest

from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.tiles import (
    HopperBackwardConfig,
    HopperConfig,
    HopperDecodeConfig,
    HopperForwardConfig,
    HopperFp8Config,
    HopperWideConfig,
    MlaConfig,
    MlaConvertingPairConfig,
    MlaSwapConfig,
    PortableConfig,
    TileConfig,
    backward_dim,
    may_cut_rows,
    product_dim,
    tile_dim,
)

CAUSAL, WINDOW = {"mask": MaskSpec(-1, 0)}, {"mask": MaskSpec(9, 0)}


def problem(**facts) -> AttentionProblem:
    base = {"batch": 2, "seqlen_q": 512, "seqlen_k": 512, "heads_q": 8, "heads_k": 2}
    return AttentionProblem.dense(**{**base, **facts})


def of_rows(rows: int, **facts) -> AttentionProblem:
    """So many query rows of a KV head."""
    return problem(seqlen_q=rows, heads_q=2, **facts)


@pytest.mark.parametrize("mask, tile", [(0, (128, 64)), (32, (32, 32)), (64, (64, 64))])
def test_a_portable_tile_divides_that_of_a_block_mask(mask, tile):
    made = PortableConfig(128, 64).fitted(problem(block_mask=mask), None)
    assert (made.block_m, made.block_n) == tile
    low = PortableConfig(16, 128).fitted(problem(block_mask=mask), None)
    assert (low.block_m, low.block_n) == (16, min(128, mask or 128))


def test_partial_results_of_few_rows_are_stored_in_few():
    """A power of two, no less than 4: more than 32 are those of the tile."""
    kept = {1: 4, 4: 4, 5: 8, 8: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 64, 99: 64}
    for rows, most in kept.items():
        for config in (MlaSwapConfig(64, 64), HopperDecodeConfig(64, 64)):
            assert config.kept_rows(of_rows(rows)) == most
        pair = MlaConvertingPairConfig(64, 128)
        assert pair.kept_rows(of_rows(rows)) == most
        assert replace(pair, thread_order=1).kept_rows(of_rows(rows)) == 64
        assert MlaConfig(64, 128).kept_rows(of_rows(rows)) == (16 if rows <= 16 else 64)
        assert MlaConfig(64, 128, thread_order=1).kept_rows(of_rows(rows)) == 64
        assert TileConfig(64, 128).group_rows(of_rows(rows)) == 1
    assert MlaSwapConfig(64, 64).kept_rows(problem(seqlen_q=2)) == 8


def test_a_packed_sequence_may_have_one_query():
    config = HopperDecodeConfig(64, 64)
    packed = problem(seqlen_q=4, total_q=9)
    assert (config.kept_rows(packed), config.fewest_rows(packed)) == (16, 4)
    assert config.fewest_rows(problem(seqlen_q=4)) == 16


@pytest.mark.parametrize(
    "heads, fills", [(2, True), (4, True), (6, False), (12, False), (64, True)]
)
def test_queries_come_by_a_map_where_heads_fill_its_boxes(heads, fills):
    asked = problem(heads_q=heads)
    for config in (MlaConfig(64, 128), MlaConvertingPairConfig(64, 128)):
        assert config.fitted(asked, None).query_map == fills
        assert replace(config, query_map=0).fitted(asked, None).query_map == 0


def test_a_hopper_config_counts_its_consumers_and_stages():
    for rows, consumers in ((64, 1), (128, 2), (192, 3)):
        config = HopperConfig(rows, 128)
        assert (config.consumers, config.query_stages) == (consumers, consumers)
        assert replace(config, q_stages=1).query_stages == 1
    config = HopperForwardConfig(128, 128, num_stages=3)
    assert (config.value_stages, replace(config, v_stages=1).value_stages) == (3, 1)
    intervals = [HopperFp8Config(128, keys).promotion_interval for keys in (64, 128, 256)]
    assert intervals == [8, 4, 2]


@pytest.mark.parametrize("keys, parts", [(0, 1), (1, 1), (100, 1), (101, 2), (200, 2), (201, 3)])
def test_parts_of_fixed_bounds_hold_all_keys(keys, parts):
    asked = problem(seqlen_k=keys)
    assert HopperForwardConfig(128, 128, part_keys=100).parts(asked) == parts
    assert HopperForwardConfig(128, 128).parts(asked) == HopperConfig(128, 128).parts(asked) == 1


@pytest.mark.parametrize("heads, rows", [(2, 1), (4, 2), (6, 4), (8, 4), (10, 8)])
def test_heads_that_share_a_tile_have_a_power_of_two_of_its_rows(heads, rows):
    asked = problem(heads_q=heads)
    assert HopperForwardConfig(128, 128, pack_gqa=True).group_rows(asked) == rows
    assert HopperForwardConfig(128, 128).group_rows(asked) == 1


FORWARD = HopperForwardConfig(
    128, 256, rescale="speculative", out_in_q=True, cuts_rows=True, pack_gqa=True
)


@pytest.mark.parametrize(
    "facts, made",
    [
        ({"rel_bias": True}, {"rescale": "threshold"}),
        ({"head_dim": 192, "kv_dtype": "int8"}, {}),
        ({"head_dim": 128, "head_dim_v": 129}, {"tail_e": True, "out_in_q": False}),
        ({"block_mask": 64}, {"block_m": 64, "block_n": 64, "pack_gqa": False}),
        ({"block_mask": 128}, {"block_n": 128, "pack_gqa": False}),
        ({"key_ranges": 1, **CAUSAL}, {"cuts_rows": True}),
    ],
)
def test_a_hopper_forward_is_fitted_to_masks_and_caches(facts, made):
    wanted = replace(FORWARD, **{"cuts_rows": False, **made})
    assert FORWARD.fitted(problem(**facts), None) == wanted
    plain = replace(FORWARD, cuts_rows=False)
    assert not plain.fitted(problem(**facts), None).cuts_rows


def test_the_wide_forward_is_as_its_row_says():
    wide = HopperWideConfig(128, 64, rescale="speculative", out_in_q=True)
    assert wide.fitted(problem(head_dim=192, bias=True, block_mask=64), (3, 6)) == wide


BACKWARD = HopperBackwardConfig(64, 128, heads_innermost=True, hides_rows=True, dk_in_keys=True)
BACKWARD = replace(BACKWARD, rotates=True, cuts_rows=True)
# What stays of these where all that a call has lets it.
KEPT = {"dk_in_keys", "rotates"}
PLAIN = {"heads_innermost": False, "hides_rows": False, "cuts_rows": False}


@pytest.mark.parametrize(
    "facts, kept",
    [
        ({}, KEPT),
        # Where heads are innermost nothing rotates.
        (CAUSAL, {"dk_in_keys", "heads_innermost"}),
        ({**CAUSAL, "heads_k": 8}, {"dk_in_keys"}),
        ({"mask": MaskSpec(-1, 3)}, {"dk_in_keys", "heads_innermost"}),
        ({"mask": MaskSpec(3, -1)}, {"dk_in_keys"}),
        (WINDOW, {"dk_in_keys"}),
        ({**CAUSAL, "deterministic": True}, set()),
        ({**CAUSAL, "total_q": 900}, set()),
        ({**CAUSAL, "total_k": 900}, set()),
        ({**CAUSAL, "key_ranges": 2}, set()),
        ({**CAUSAL, "block_mask": 128}, set()),
        ({"softcap": 0.5}, set()),
        ({"dropout_p": 0.1}, set()),
        ({"deterministic": True}, set()),
        *(({fact: True}, set()) for fact in ("used_k", "leftpad_k")),
        ({"used_q": True}, KEPT),
        ({"key_ranges": 1}, {"hides_rows"}),
        ({"key_ranges": 1, "block_mask": 128}, set()),
        ({"key_ranges": 1, **CAUSAL}, {"cuts_rows"}),
        ({"key_ranges": 1, **CAUSAL, "sink": True}, {"hides_rows"}),
    ],
)
def test_a_hopper_backward_keeps_what_a_call_lets_it(facts, kept):
    made = BACKWARD.fitted(problem(**facts), None)
    ways = ("heads_innermost", "hides_rows", "dk_in_keys", "rotates", "cuts_rows")
    assert {way for way in ways if getattr(made, way)} == kept
    none = replace(BACKWARD, **dict.fromkeys(ways, False)).fitted(problem(**facts), None)
    assert not any(getattr(none, way) for way in ways)


def test_keys_of_one_order_of_heads_rotate_under_a_causal_mask():
    plain = replace(BACKWARD, heads_innermost=False)
    for mask, rotates in ((CAUSAL, True), (WINDOW, False), ({"mask": MaskSpec(3, -1)}, False)):
        assert plain.fitted(problem(**mask), None).rotates == rotates


@pytest.mark.parametrize("dim, stages", [(64, 2), (65, 1), (128, 1)])
def test_a_block_mask_takes_the_memory_of_a_stage_of_wide_keys(dim, stages):
    made = BACKWARD.fitted(problem(block_mask=128, head_dim=dim), None)
    assert (made.k_stages, made.block_m, made.num_stages) == (stages, 64, 2)
    assert BACKWARD.fitted(problem(head_dim=dim), None).k_stages == 2
    single = replace(BACKWARD, k_stages=1).fitted(problem(), None)
    assert (single.k_stages, single.dk_in_keys) == (1, False)


def test_consumers_that_share_64_keys_have_more_stages_of_queries():
    shared = replace(BACKWARD, block_m=128, block_n=64)
    made = shared.fitted(problem(), None)
    assert made == replace(shared, block_m=64, num_stages=4, dk_in_keys=False, **PLAIN)
    listed = shared.fitted(problem(block_mask=64, head_dim=128), None)
    assert (listed.k_stages, listed.num_stages) == (2, 4)
    # Each consumer makes dQ: they share nothing.
    alone = replace(shared, dq_regs=None)
    assert alone.fitted(problem(), None) == replace(alone, **PLAIN)


CUT = {"key_ranges": 1, **CAUSAL}


@pytest.mark.parametrize(
    "facts",
    [
        {"key_ranges": 0},
        {"key_ranges": 2},
        {"block_mask": 128},
        {"own_ranges": True},
        {"seqlen_k": 513},
        {"seqlen_q": 511},
        *({"mask": mask} for mask in (MaskSpec(-1, 1), MaskSpec(-1, -1), MaskSpec(-1, 0, shift=1))),
        {"total_q": 900},
        {"total_k": 900},
        *({name: True} for name in ("used_q", "used_k", "leftpad_k", "alibi", "bias", "rel_bias")),
        {"dropout_p": 0.1},
        *({name: True} for name in ("q_offsets", "invariant")),
        {"out_dtype": "float32"},
        {"num_splits": 2},
        {"near_rows": False},
        {"rows_follow": False},
    ],
    ids=str,
)
def test_rows_are_cut_where_nothing_but_one_causal_range_tells_them_apart(facts):
    assert may_cut_rows(problem(**CUT)) and may_cut_rows(problem(**CUT, num_splits=1))
    assert may_cut_rows(problem(**{**CUT, "mask": MaskSpec(9, 0)}))
    assert not may_cut_rows(problem(**{**CUT, **facts}))


@pytest.mark.parametrize(
    "dim, tile, backward, products",
    [
        *((1, 64, 64, 64), (64, 64, 64, 64), (65, 128, 128, 96), (96, 128, 128, 96)),
        *((97, 128, 128, 128), (128, 128, 128, 128), (129, 256, 256, 192), (192, 256, 256, 192)),
        *((193, 256, 256, 256), (256, 256, 256, 256), (257, None, 512, 512)),
    ],
)
def test_a_head_dim_lies_in_a_tile_whose_zeros_no_product_reads_if_they_are_a_quarter(
    dim, tile, backward, products
):
    assert (backward_dim(dim), product_dim(dim)) == (backward, products)
    assert tile is None or tile_dim(dim) == tile
