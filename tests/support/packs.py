"""Packs that no other test sees."""

import pytest

from heedful.launch.code import packs


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack is loaded and no wheel is known, until the test ends."""
    monkeypatch.setattr(packs, "_loaded", {})
    monkeypatch.setattr(packs, "_backends", frozenset())
    monkeypatch.setattr(packs, "_with_wheel", frozenset())
