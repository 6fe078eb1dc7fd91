"""The conditions of config rows hold up to their borders, and each operand of one counts alone; and
the numbers of a row are such as hardware and compilers take."""

import re
from dataclasses import fields, replace
from itertools import chain
from typing import get_args

import pytest

from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import LATENT_ROWS, AttentionProblem
from heedful.core.registry import conditions as c
from heedful.core.registry.configs import ROWS
from heedful.core.registry.tiles import Rescale

BASE = AttentionProblem.dense(2, 64, 512, 8, 2, 128)
WINDOW = MaskSpec.of(causal=True, window_size=(9, 0))
LEFT_ONLY = MaskSpec.of(window_size=(9, -1))
ONE_HEAD = {"heads_q": 8, "heads_k": 8}

# By condition: changes with which it holds, and with which it does not.
BORDERS: dict = {
    c.packs: (
        [{}, {"heads_q": 128}, {"heads_q": 4}, {"seqlen_q": 1}, {"softcap": 1.0}, {"sink": True}],
        [{name: True} for name in ("alibi", "bias", "rel_bias")]
        + [
            {"total_q": 100},
            {"dropout_p": 0.1},
            {"key_ranges": 1},
            {"seqlen_q": 65},
            {"heads_q": 130},
            ONE_HEAD,
        ],
    ),
    c.packs_in_one: (
        [{"seqlen_q": 16}, {"seqlen_q": 21, "heads_q": 4}, {"seqlen_q": 16, "heads_q": 6}],
        [{"seqlen_q": 17}, {"seqlen_q": 17, "heads_q": 6}, {"seqlen_q": 33, "heads_q": 4}]
        + [{"seqlen_q": 1, "alibi": True}],
    ),
    c.some_pressure: (
        [{"bias": True}, {"rel_bias": True}, {"dropout_p": 0.1}, {"tree_mask": True}]
        + [{"block_mask": 64}],
        [{}, {"aligned": False}, {"bias": True, "rel_bias": True}],
    ),
    c.high_pressure: (
        [
            {"aligned": False},
            {"bias": True, "dropout_p": 0.1},
            {"tree_mask": True, "rel_bias": True},
        ]
        + [{"block_mask": 64, "bias": True}],
        [{}, {"bias": True}],
    ),
    c.any_pressure: ([{"bias": True}, {"aligned": False}], [{}]),
    c.wider_keys: ([{"head_dim": 576, "head_dim_v": 512}], [{"head_dim": 512, "head_dim_v": 512}]),
    c.wider_keys_under_pressure: (
        [
            {"head_dim": 576, "head_dim_v": 512, **more}
            for more in ({"bias": True}, {"rel_bias": True}, {"aligned": False})
        ],
        [
            {"bias": True},
            {"head_dim": 576, "head_dim_v": 512},
            {"head_dim": 576, "head_dim_v": 512, "dropout_p": 0.1},
        ],
    ),
    c.narrow_values: (
        [{"head_dim": 129}, {"head_dim": 192, "head_dim_v": 128}],
        [{}, {"head_dim": 192, "head_dim_v": 129}, {"head_dim": 192, "page_size": 16}],
    ),
    c.lists_of_128: ([{"block_mask": 128}], [{}, {"block_mask": 64}]),
    c.lists_of_64: ([{"block_mask": 64}], [{}, {"block_mask": 128}]),
    c.holds_more: ([{"dropout_p": 0.1}, {"softcap": 1.0}], [{}]),
    c.holds_more_in_order: (
        [{"dropout_p": 0.1, "deterministic": True}, {"softcap": 1.0, "deterministic": True}],
        [{"dropout_p": 0.1}, {"deterministic": True}],
    ),
    c.few_rows: ([{}], [{"seqlen_q": 65}]),
    c.two_tiles_of_rows: ([{"seqlen_q": 128}], [{"seqlen_q": 129}]),
    c.small_grid: (
        [{"batch": 8}, {"batch": 4, "seqlen_q": 256}, {"batch": 4, "seqlen_q": 129}]
        + [{"seqlen_k": 2048}, {"batch": 3, "heads_q": 22}],
        [{"batch": 9}, {"batch": 5, "seqlen_q": 129}, {"seqlen_k": 2049}, {"num_splits": 1}],
    ),
    c.uneven: (
        [{"mask": WINDOW}, {"mask": LEFT_ONLY}, {"total_q": 100}, {"key_ranges": 1}]
        + [{"mask": MaskSpec.of(window_size=(0, -1))}],
        [{}, {"mask": MaskSpec.of(causal=True)}],
    ),
    c.uneven_masks: (
        [{"mask": WINDOW}, {"mask": LEFT_ONLY}],
        [{"mask": MaskSpec.of(causal=True)}, {"mask": WINDOW, "page_size": 16}],
    ),
    c.small_pages: ([{"page_size": 16}, {"page_size": 65}], [{}, {"page_size": 128}]),
    c.in_pages: ([{"page_size": 1}], [{}]),
    c.no_pages: ([{}], [{"page_size": 1}]),
    c.sixteen_rows: ([{"seqlen_q": 4}], [{"seqlen_q": 5}, {"seqlen_q": 4, "heads_q": 10}]),
    c.several_tiles_of_rows: ([{"seqlen_q": 17}], [{"seqlen_q": 16}]),
    c.long_caches: ([{"seqlen_k": 4096}], [{"seqlen_k": 4095}]),
    c.scaled_by_row: (
        [{}, {"kv_group": 128}, {"head_dim": 65}],
        [{"kv_group": 64}, {"head_dim": 64}, {"dtype": "float32"}],
    ),
    c.rows_of_bytes: ([{"kv_dtype": LATENT_ROWS}], [{}]),
    c.heads_share_lines: (
        [{"kv_dtype": "int4"}],
        [{"kv_dtype": "int8"}, {"kv_dtype": "int4", "page_size": 16}]
        + [{"kv_dtype": "int4", "heads_k": 1}, {"kv_dtype": "int4", "head_dim_v": 64}]
        + [{"kv_dtype": "int4", "dtype": "float32"}],
    ),
    c.merge_outlasts_waiting: (
        [{"seqlen_q": 32}, {"batch": 11, "seqlen_q": 16}, {"seqlen_q": 4}],
        [{"batch": 12, "seqlen_q": 16}, {"batch": 3, "seqlen_q": 4}, {"num_splits": 1, "batch": 1}],
    ),
    c.all_merge_sooner: (
        [{}, {"batch": 8}, {"batch": 8, "seqlen_q": 1}],
        [{"batch": 9}, {"num_splits": 2}],
    ),
    c.all_merge_sooner_in_lines: (
        [{}, {"seqlen_q": 2}],
        [{"seqlen_q": 65}, {"seqlen_q": 2, "batch": 9}],
    ),
    c.pairs_merge_sooner: (
        [{"seqlen_q": 16, "batch": 16}, {"seqlen_q": 128, "batch": 2}],
        [{"seqlen_q": 16, "batch": 17}, {"seqlen_q": 17, "batch": 9}]
        + [{"seqlen_q": 16, "batch": 2, "num_splits": 1}],
    ),
}
EACH = [
    pytest.param(condition, change, holds, id=f"{condition.__name__}-{change}-{holds}")
    for condition, both in BORDERS.items()
    for holds, changes in zip((True, False), both, strict=True)
    for change in changes
]


def test_changes_are_fields_of_a_problem():
    names = {field.name for field in fields(AttentionProblem)}
    changes = chain.from_iterable(chain.from_iterable(BORDERS.values()))
    assert {name for change in changes for name in change} <= names


@pytest.mark.parametrize("condition, change, holds", EACH)
def test_a_condition_holds_up_to_its_border(condition, change, holds):
    assert bool(condition(replace(BASE, **change))) is holds


def is_power_of_2(number: int) -> bool:
    return number > 0 and not number & (number - 1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kernel}-{row.max_dim}")
def test_a_config_has_sizes_that_a_kernel_can_have(row):
    sizes = {f.name: getattr(row.config, f.name) for f in fields(row.config)}
    rows = sizes.get("block_m", 16)
    # Three consumers of a warpgroup each have 192 rows.
    assert is_power_of_2(rows) or rows == 192
    for name in ("block_n", "num_warps", "merge_values"):
        assert is_power_of_2(sizes.get(name, 1)), name
    for name in ("producer_regs", "consumer_regs", "dq_regs", "registers"):
        # A warp has registers in eights.
        assert (sizes.get(name) or 0) % 8 == 0 and (sizes.get(name) or 0) <= 256, name
    assert 1 <= sizes.get("num_stages", 1) <= 8
    assert sizes.get("rescale", "exact") in get_args(Rescale)
    assert row.max_dim % 64 == 0 and row.measured and row.archs
    assert all(re.fullmatch(r"\*|sm_\d+|gfx9\w\w", arch) for arch in row.archs)
