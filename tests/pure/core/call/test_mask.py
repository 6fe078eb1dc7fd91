"""MaskSpec: tile ranges against brute force, and what bad arguments say."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.core.call.mask import MaskSpec

masks = st.builds(
    lambda left, right, first, bottom_right, shift: MaskSpec(
        left, right, first if left >= 0 else 0, bottom_right, shift
    ),
    st.integers(-1, 9),
    st.integers(-1, 9),
    st.sampled_from([0, 0, 3]),
    st.booleans(),
    st.integers(-5, 5),
)
lengths = st.integers(0, 20)
tiles = st.sampled_from([1, 2, 3, 4, 7])


@given(masks, lengths, lengths, tiles, tiles)
def test_key_range_visits_every_visible_key_and_masks_every_hidden_one(mask, lq, lk, rows, tile):
    for row in range(0, lq, rows):
        r = mask.key_range(row, rows, tile, lq, lk)
        assert r.first_begin <= r.first_end <= r.begin <= r.full_begin <= r.full_end <= r.end
        visited = {*range(r.first_begin, r.first_end), *range(r.begin, r.end)}
        unmasked = range(r.full_begin, r.full_end)
        assert all((t + 1) * tile <= lk for t in unmasked)
        for i in range(row, min(row + rows, lq)):
            for j in range(lk):
                if mask.visible(i, j, lq, lk):
                    assert j // tile in visited
                else:
                    assert j // tile not in unmasked


@given(masks, lengths, lengths, tiles, tiles)
def test_key_range_stays_within_the_visible_keys(mask, lq, lk, rows, tile):
    mask = replace(mask, first=0)
    for row in range(0, lq, rows):
        r = mask.key_range(row, rows, tile, lq, lk)
        queries = range(row, min(row + rows, lq))
        seen = [j for j in range(lk) if any(mask.visible(i, j, lq, lk) for i in queries)]
        spanned = range(seen[0] // tile, seen[-1] // tile + 1) if seen else range(0)
        assert range(r.begin, r.end) == spanned or (not seen and r.begin == r.end)


@given(masks, lengths, lengths, tiles, tiles)
def test_query_range_visits_every_query_that_sees_a_key(mask, lq, lk, cols, tile):
    for col in range(0, lk, cols):
        begin, end = mask.query_range(col, cols, tile, lq, lk)
        for i in range(lq):
            if any(mask.visible(i, j, lq, lk) for j in range(col, min(col + cols, lk))):
                assert begin <= i // tile < end


@given(masks, lengths, lengths)
def test_count_visible_is_the_number_of_visible_pairs(mask, lq, lk):
    pairs = sum(mask.visible(i, j, lq, lk) for i in range(lq) for j in range(lk))
    assert mask.count_visible(lq, lk) == pairs


def test_causal_is_aligned_to_the_last_query_and_key():
    mask = MaskSpec.of(causal=True)
    assert [[mask.visible(i, j, 2, 4) for j in range(4)] for i in range(2)] == [
        [True, True, True, False],
        [True, True, True, True],
    ]


def test_causal_overrides_the_right_bound_and_keeps_the_left():
    assert MaskSpec.of(True, (3, 7)) == MaskSpec(left=3, right=0)


def test_leading_keys_stay_visible_left_of_the_window_but_never_ahead_of_the_diagonal():
    mask = MaskSpec.of(True, (0, -1, 2))
    assert [[mask.visible(i, j, 4, 4) for j in range(4)] for i in range(4)] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, False, True],
    ]


@pytest.mark.parametrize(
    ("causal", "window", "error", "says"),
    [
        (1, (-1, -1), TypeError, "causal"),
        (False, 5, ValueError, "window_size"),
        (False, (1,), ValueError, "window_size"),
        (False, (1, 2, 3, 4), ValueError, "window_size"),
        (False, (-2, 0), ValueError, "window_size"),
        (False, (1.0, 0), TypeError, "window_size"),
        (False, (0, 0, -1), ValueError, "window_size"),
    ],
)
def test_bad_masks_are_named(causal, window, error, says):
    with pytest.raises(error, match=says):
        MaskSpec.of(causal, window)


def brute_keys(mask: MaskSpec, row: int, rows: int, tile: int, lq: int, lk: int):
    """By key tile: whether any, and whether every query of these rows sees any, every key of it."""
    found = {}
    for start in range(0, lk, tile):
        seen = [
            mask.visible(i, j, lq, lk)
            for i in range(row, min(row + rows, lq))
            for j in range(start, min(start + tile, lk))
        ]
        found[start // tile] = (any(seen), bool(seen) and all(seen) and start + tile <= lk)
    return found


SMALL_MASKS = [
    MaskSpec.of(causal, window, bottom_right=aligned, shift=shift)
    for causal in (False, True)
    for window in ((-1, -1), (0, 0), (2, 1), (3, -1), (-1, 2), (1, 0, 2), (0, 2, 5))
    for aligned in (True, False)
    for shift in (0, -4, 3)
]


@pytest.mark.parametrize("lq, lk", [(5, 9), (9, 5), (1, 8), (6, 6), (4, 0), (0, 4), (3, 1)])
def test_ranges_are_no_wider_and_no_narrower_than_what_is_seen(lq, lk):
    for mask, tile, row, rows in product(SMALL_MASKS, (1, 2, 4), (0, 1, 4, 7), (1, 3)):
        got = mask.key_range(row, rows, tile, lq, lk)
        seen = brute_keys(mask, row, rows, tile, lq, lk)
        visible = [t for t, (some, _) in seen.items() if some]
        visited = [*range(got.first_end), *range(got.begin, got.end)]
        # A hole between the leading keys and the window is visited by no one; each end is exact.
        assert set(visible) <= set(visited), (mask, tile, row, rows)
        if visible:
            assert (visited[0], visited[-1]) == (visible[0], visible[-1])
        full = [t for t, (_, every) in seen.items() if every]
        # Leading keys are not called fully visible.
        if not mask.first:
            assert full == list(range(got.full_begin, got.full_end))
        assert set(full) >= set(range(got.full_begin, got.full_end))
        assert 0 <= got.first_end <= got.begin <= got.full_begin <= got.full_end <= got.end
        col, cols = row, rows
        queries = [
            i
            for i in range(lq)
            if any(mask.visible(i, j, lq, lk) for j in range(col, min(col + cols, lk)))
        ]
        first, last = mask.query_range(col, cols, tile, lq, lk)
        if queries:
            assert first <= queries[0] // tile and last > queries[-1] // tile
        if col >= lk or not lq:
            assert (first, last) == (0, 0)
        if queries and not mask.first:
            assert (first, last) == (queries[0] // tile, queries[-1] // tile + 1)


@pytest.mark.parametrize("mask", SMALL_MASKS, ids=str)
def test_visible_pairs_are_counted_exactly(mask):
    for lq, lk in product((0, 1, 5, 9), (0, 1, 4, 8)):
        pairs = sum(mask.visible(i, j, lq, lk) for i in range(lq) for j in range(lk))
        assert mask.count_visible(lq, lk) == pairs
        assert mask.causal == (mask.left < 0 and mask.right == 0)
        assert mask.bounded or pairs == lq * lk
