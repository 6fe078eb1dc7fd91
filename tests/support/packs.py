"""Packs that no other test sees, and wheels without files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import heedful
from heedful.launch.code import packs, wheels
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.manifest import Manifest, WheelFacts
from support.artifacts import artifact


class Installed(wheels.Wheel):
    """A wheel of kernels by their keys. Its files are read as they are to be."""

    def __init__(self, keys: Iterable[str], backends: Mapping[str, tuple[int, ...]] | None = None):
        facts = WheelFacts(heedful.__version__, "sm_90", 13)
        manifest = Manifest(dict.fromkeys(keys, ""), backends or {}, facts)
        super().__init__("a wheel", Path(), manifest, facts)

    def read(self, key: str) -> Artifact:
        return artifact()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack is loaded and no wheel is known, until the test ends."""
    monkeypatch.setattr(packs, "_loaded", {})
    monkeypatch.setattr(packs, "_backends", frozenset())
    monkeypatch.setattr(packs, "_with_wheel", frozenset())
