"""The dropout mask is Philox4x32-10's, counted by score."""

import numpy as np
import pytest

from heedful.reference.philox import keep_mask, keep_scale, keep_threshold, philox4x32


def test_zero_key_and_counter_give_the_published_words():
    words = philox4x32((0, 0), (0, 0, 0, 0))
    assert [f"{w:08x}" for w in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_ones_and_digits_of_pi_give_the_published_words():
    # The other two vectors of Random123's kat_vectors.
    word = 0xFFFFFFFF
    ones = philox4x32((word, word), (word,) * 4)
    assert [f"{w:08x}" for w in ones] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    digits = philox4x32((0xA4093822, 0x299F31D0), counter)
    assert [f"{w:08x}" for w in digits] == ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]


@pytest.mark.parametrize("p, kept", [(0.0, True), (1.0, False)])
def test_p_0_keeps_and_p_1_drops_every_score(p, kept):
    assert (keep_mask(3, p, 0, 2, 64, 64) == kept).all()
    assert keep_threshold(p) == (2**32 if kept else 0)
    assert keep_scale(p) == float(kept)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.83])
def test_keep_rate_is_within_five_standard_deviations_over_a_million_scores(p):
    mask = keep_mask(20261120, p, 1, 4, 512, 512)
    deviation = np.sqrt(p * (1 - p) / mask.size)
    assert abs(mask.mean() - (1 - p)) < 5 * deviation
    # Nor do rows, columns or heads hang together.
    for axes in ((0, 1), (0, 2), (1, 2)):
        count = mask.size // mask.shape[({0, 1, 2} - set(axes)).pop()]
        assert np.abs(mask.mean(axes) - (1 - p)).max() < 6 * np.sqrt(p * (1 - p) / count)


def test_an_origin_cuts_the_shard_out_of_the_whole_mask():
    whole = {b: keep_mask(7, 0.4, b, 5, 33, 50) for b in range(3)}
    shard = keep_mask(7, 0.4, 1, 2, 20, 31, origin=(1, 3, 9, 6))
    np.testing.assert_array_equal(shard, whole[2][3:5, 9:29, 6:37])


def test_both_halves_of_the_seed_matter():
    masks = [keep_mask(seed, 0.5, 0, 1, 32, 32) for seed in (1, 1 << 32, 1 | 1 << 32, -1)]
    for i, a in enumerate(masks):
        assert all((a != b).any() for b in masks[i + 1 :])
