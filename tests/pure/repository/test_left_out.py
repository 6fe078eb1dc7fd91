"""Tests that cannot run here, or take long, are left out and counted; alone they are skipped."""

from pathlib import Path
from types import SimpleNamespace

import pytest


class Item:
    """A test with these marks."""

    def __init__(self, *marks: str):
        self.nodeid, self.marks, self.skipped = "a.py::b", marks, []

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark) -> None:
        self.skipped.append(mark.kwargs["reason"])


@pytest.fixture
def ours(request, monkeypatch):
    """The conftest.py of all tests, where there is no GPU and nobody asks for long grids."""
    conftest = Path(__file__).parents[2] / "conftest.py"
    ours = request.config.pluginmanager.get_plugin(str(conftest))
    monkeypatch.setattr(ours, "_no_gpu", lambda: "no GPU")
    monkeypatch.delenv(ours.RUN_SLOW, raising=False)
    return ours


def collected(ours, items: list, asked: str = "") -> tuple[list, dict[str, int], list]:
    """What runs, what is counted by reason, and what pytest is told of."""
    told: list = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    config = SimpleNamespace(hook=hook, stash={}, getoption=lambda name: asked)
    ours.pytest_collection_modifyitems(config, items)
    return items, config.stash.get(ours.LEFT_OUT, {}), told


def test_what_cannot_run_here_is_left_out_and_counted(ours):
    one, gpu, both, slow, other = Item(), Item("gpu"), Item("gpu", "slow"), Item("slow"), Item()
    run, counts, told = collected(ours, [one, gpu, both, slow, other])
    assert run == [one, other] and told == [gpu, both, slow]
    assert counts == {"no GPU": 2, "a long grid: --run-slow or -m slow": 1}


def test_where_no_other_was_asked_for_each_is_skipped_with_the_reason(ours):
    gpu, slow = items = [Item("gpu"), Item("slow")]
    assert collected(ours, items) == ([gpu, slow], {}, [])
    assert gpu.skipped == ["no GPU"] and "--run-slow" in slow.skipped[0]


def test_long_grids_run_where_they_are_asked_for(ours):
    one, slow = Item(), Item("slow")
    assert collected(ours, [one, slow], "slow") == ([one, slow], {}, [])
