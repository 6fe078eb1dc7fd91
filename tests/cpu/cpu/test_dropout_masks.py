"""Masks of dropout on a CPU: drawn in pieces, kept, and shared by a call's passes."""

import torch

from heedful import cpu
from heedful.cpu import philox
from support.problems.cases import Case, build


def test_a_dropout_mask_is_made_in_pieces_of_bounded_size(monkeypatch):
    sizes, run = [], philox.Words.run

    def noted(words, key, start):
        sizes.append(words.count)
        run(words, key, start)

    monkeypatch.setattr(philox.Words, "run", noted)
    monkeypatch.setattr(philox, "FEW", 0)
    monkeypatch.setattr(philox, "CHUNK", 1000)
    philox.keep_tile(1, 0.5, range(2), range(3), range(50), range(40))
    # 60 words a row of all heads: sixteen rows at a time.
    assert sizes == [960, 960, 960, 120]
    sizes.clear()
    philox.keep_tile(1, 0.5, range(2), range(3), range(1), range(4000))
    monkeypatch.undo()
    monkeypatch.setattr(philox.Words, "run", noted)
    philox.keep_tile(1, 0.5, range(1), range(1), range(20_000), range(4))
    assert sizes == [6000, 16384, 20_000 - 16384]
    sizes.clear()
    monkeypatch.setattr(philox, "CHUNK", 1000)
    philox.keep_tile(1, 0.5, range(2), range(3), range(2), range(4000))
    assert sizes == [6000, 6000]
    assert philox.keep_tile(1, 0.5, range(0), range(3), range(2), range(5)).shape == (0, 3, 2, 5)


def test_counters_that_are_kept_give_each_seed_its_own_mask(monkeypatch):
    """The rounds write to the memory of what they get."""
    places = [
        (range(1), range(8), range(16), range(16)),
        (range(2, 4), range(3), range(5), range(9)),
    ]
    draws = [
        (seed, 0.3, *where, origin)
        for seed in (1, 2, 1)
        for where in places
        for origin in ((0, 0, 0, 0), (1, 2**32 - 1, 7, 3))
    ]
    kept = [philox.draw(*which) for which in draws]
    monkeypatch.setattr(philox, "FEW", 0)
    for mask, which in zip(kept, draws, strict=True):
        assert torch.equal(mask, philox.draw(*which))
    assert not torch.equal(kept[0], kept[4])


def test_a_draw_during_another_has_memory_of_its_own(monkeypatch):
    where = 0.5, range(1), range(8), range(16), range(16), (0, 0, 0, 0)
    want, run, others = [philox.draw(seed, *where) for seed in (1, 2)], philox.Words.run, []

    def interrupted(words, key, start):
        run(words, key, start)
        if not others:
            others.append(None)
            others.append(philox.draw(2, *where))

    monkeypatch.setattr(philox.Words, "run", interrupted)
    assert torch.equal(philox.draw(1, *where), want[0]) and torch.equal(others[1], want[1])


def test_masks_of_dropout_are_kept_up_to_a_limit_the_latest_ones(monkeypatch):
    kept = philox.Masks()
    monkeypatch.setattr(philox, "KEPT", 1000)
    masks = [torch.zeros(size, dtype=torch.bool) for size in (251, 250, 250, 250, 250, 100)]
    for number, mask in enumerate(masks):
        kept.keep((number,), mask)
        kept.keep((number,), mask)
        # None of more than a quarter is, not even at first.
        assert (kept.find((number,)) is not None) == (mask.numel() <= 250)
    assert [kept.find((number,)) is not None for number in range(6)] == [False] * 2 + [True] * 4
    assert kept.bytes == 850


def test_a_mask_is_drawn_once_for_forward_and_backward(monkeypatch):
    drawn, draw = [], philox.draw
    monkeypatch.setattr(philox, "draw", lambda *which: drawn.append(which) or draw(*which))
    built = build(Case(dropout_p=0.3, seed=71))
    out, lse, _ = cpu.forward(built.problem, built.x)
    assert built.dout is not None
    cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
    assert len(drawn) == 1
