"""docs/caches.md names every cache, and says what a fork and a change of settings do to it."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import heedful.torch as typed
from heedful.torch.api import merge  # noqa: F401  it registers its own
from support.caches import ROOT, found

heedful: Any = typed
PAGE = Path(ROOT).parents[1] / "docs" / "caches.md"
HEAD = "| cache | key | value | life | fork | configure |"

# What is filled while something is made, or lives for one call.
OF_ONE_CALL = {
    "core.symbols.Trace": "filled while a case is traced",
    "core.symbols._Path": "filled while a function is written",
    "cpu.scores.Tiles": "of a thread's part of a call",
    "cpu.tiled_backward._BlockBackward": "of a thread's part of a call",
    "cpu.tiled_forward._Split": "of a call",
    "cpu.workers._Pool": "work on its way to threads",
    "cpu.workers._Queue": "of a call",
    "distributed.calls.Lanes": "streams of a step",
    "distributed.calls._Asked": "filled while a step is asked for",
    "distributed.exchange.Exchange": "rows on their way",
    "distributed.gather.Keys": "of a step",
    "distributed.ring._Sums": "of a step",
    "distributed.peers.SharedPart.keys": "part of what is made",
    "distributed.peers.SharedPart.taken": "part of what is made",
    "launch.bound.ProgramKind._kernels": "part of what is made",
    "torch.dispatch.Likeness._dense": "part of what is made",
    "torch.execute.Case._made": "part of what is made",
}


def rows() -> dict[str, list[str]]:
    """By cache the cells that follow."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells if row[0].startswith("`")}


ROWS = rows()


def is_of_one_call(name: str) -> bool:
    return name in OF_ONE_CALL or name.rpartition(".")[0] in OF_ONE_CALL


def test_every_cache_has_its_row_and_every_row_its_cache():
    names = found()
    assert {name for name in names if not is_of_one_call(name)} == ROWS.keys()
    used = {name for name in OF_ONE_CALL if any(f"{n}.".startswith(f"{name}.") for n in names)}
    assert used == OF_ONE_CALL.keys()


def test_rows_say_value_life_and_who_empties_a_cache():
    for name, (_, value, life, fork, configure) in ROWS.items():
        assert value and life, name
        is_part = name.split(".")[-2][:1].isupper() or name.split(".")[-2][1:2].isupper()
        assert (fork, configure) == ("owner", "owner") or not is_part, name
        assert is_part or fork in ("anew", "kept") and configure in ("anew", "kept"), name


def container(name: str) -> Any:
    """The cache of a module, where it is a mapping or a set."""
    layer, module, attribute = name.split(".")
    paths = [p for p in (ROOT / layer).rglob(f"{module}.py")]
    (path,) = [p for p in paths if re.search(rf"^{attribute}\b", p.read_text(), re.M)]
    dotted = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return getattr(importlib.import_module(dotted), attribute)


def mappings() -> dict[str, Any]:
    """Caches of modules that a test can put something into."""
    own = {name for name in ROWS if name.count(".") == 2 and name.split(".")[0] != "jax"}
    made = {}
    for name in own:
        layer, module, attribute = name.split(".")
        text = "".join(p.read_text() for p in (ROOT / layer).rglob(f"{module}.py"))
        if re.search(rf"^{attribute}\b.*= ", text, re.M):
            made[name] = container(name)
    return {n: c for n, c in made.items() if isinstance(c, dict) or hasattr(c, "young")}


def told(column: int) -> dict[str, bool]:
    """By cache whether its row says that it begins anew."""
    return {name: ROWS[name][column] == "anew" for name in mappings()}


class Key:
    """In all caches at once, and in none of anybody else's."""


@pytest.fixture
def filled():
    """Mappings that all hold one key more, which is gone again afterwards."""
    key, caches = Key(), mappings()
    dicts = {name: getattr(cache, "young", cache) for name, cache in caches.items()}
    for cache in dicts.values():
        cache[key] = None
    yield lambda: {n: key not in getattr(c, "young", c) for n, c in caches.items()}
    for cache in caches.values():
        getattr(cache, "young", cache).pop(key, None)


def test_settings_that_change_empty_the_caches_whose_rows_say_so(filled):
    assert not any(filled().values())
    heedful_configure = importlib.import_module("heedful").configure
    heedful_configure()
    assert filled() == told(-1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_begins_the_caches_anew_whose_rows_say_so(filled):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, " ".join(n for n, is_gone in filled().items() if is_gone).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        gone = set(pipe.read().split())
    assert os.waitpid(child, 0)[1] == 0
    assert gone == {name for name, anew in told(-2).items() if anew}
    assert not any(filled().values())


def test_a_cache_without_a_row_would_be_found(tmp_path, monkeypatch):
    from support import caches

    (tmp_path / "torch").mkdir()
    text = """
from functools import cache, lru_cache
KNOWN = {}
FULL = {"a": 1}
KEPT = forgotten(Kinds())
TYPED: dict[int, int] = {}
pick = lru_cache(3)(max)

@cache
def facts(): ...

class Runner:
    def __init__(self):
        self.run = self.other = None
        self.kept, self.fixed = {}, 3
        self.each = [{} for _ in range(3)]
        self.never = None

    def bind(self):
        self.run = 1
        self.other: int = 2
"""
    (tmp_path / "torch" / "new.py").write_text(text)
    monkeypatch.setattr(caches, "ROOT", tmp_path)
    own = "KNOWN KEPT TYPED pick facts Runner.run Runner.other Runner.kept Runner.each"
    assert caches.found() == {f"torch.new.{name}" for name in own.split()}
