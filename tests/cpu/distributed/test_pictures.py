"""The pictures of docs/context-parallel.md show what layouts and steps are."""

from xml.etree import ElementTree

import pytest

import draw_ranks
from draw_ranks import HEADS, RANKS
from heedful.distributed.layouts import LAYOUTS
from heedful.distributed.plan import STRATEGIES


def test_each_token_of_a_strip_is_drawn_once_and_ranks_hold_as_much_as_the_layout_says():
    names = set()
    for name, lengths, boxes in draw_ranks.strips():
        names.add(name)
        ends = [0.0]
        for box in sorted(boxes, key=lambda box: box.begin):
            assert box.begin == pytest.approx(ends[-1]) and box.words == str(box.rank)
            ends.append(box.end)
        assert ends[-1] == pytest.approx(1) and {box.rank for box in boxes} == set(range(RANKS))
        if name == "documents":
            # Short ones are whole.
            held = sum(lengths)
            whole = [box.end - box.begin for box in boxes]
            assert min(abs(part * held - lengths[-1]) for part in whole) < 1e-9
    assert names == {*LAYOUTS}


def test_each_strategy_is_drawn_and_a_rank_runs_one_kernel_at_a_time():
    drawn = draw_ranks.schedules()
    assert [*drawn] == [*STRATEGIES]
    for name, boxes in drawn.items():
        for moves in (False, True):
            for rank in range(RANKS):
                own = sorted(box[1:3] for box in boxes if (box.rank, box.moves) == (rank, moves))
                for (_, end), (begin, _) in zip(own, own[1:], strict=False):
                    assert begin >= end - 1e-9, name
    # A ring's keys are each rank's once.
    for rank in range(RANKS):
        words = [box.words for box in drawn["ring"] if box.rank == rank and not box.moves]
        others = {f"{other}'s keys" for other in range(RANKS) if other != rank}
        assert words[0] == "own keys" and {*words[1:]} == others
    shared = [box.words for box in drawn["heads"] if not box.moves]
    assert shared == [f"heads {r * 2}-{r * 2 + 1}, whole batch" for r in range(HEADS // 2)]


@pytest.mark.parametrize("name, text", draw_ranks.pictures().items())
def test_a_picture_names_what_it_shows_and_is_well_formed(name, text):
    words = {element.text for element in ElementTree.fromstring(text).iter()}
    assert words >= ({*LAYOUTS} if name.startswith("layouts") else {*STRATEGIES})
