"""Names say what is in them: no variable, parameter, field or function is `given` or `found`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3] / "src/heedful"
# They tell where something is from, not what it is.
HIDING = {"own", "given", "found", "how", "like", "at", "on"}
# Where some remain, by folder or file: as words that say enough (`problem.at(lengths)`, the address
# that an instruction is at), as an argument of a public function, and in what nobody has renamed
# yet.
REMAINING = {
    "bench/parallel.py": {"found", "given"},
    "core/call/problem.py": {"at"},
    "core/registry/gates.py": {"own"},
    "distributed": {"found", "given", "like", "on", "own"},
    "emulator": {"at", "found", "given"},
    "kernels/hopper": {"at"},
    "kernels/portable/backward": {"at"},
    "launch/bind": {"found", "own"},
    "masks/block_mask.py": {"like"},
    "masks/ranges.py": {"like"},
    "torch/eager": {"at"},
}


def test_names_do_not_hide_what_they_name():
    named = {path: {*_names(ast.parse(path.read_text()))} & HIDING for path in ROOT.rglob("*.py")}
    assert len(named) > 300
    bad = {
        str(path.relative_to(ROOT)): names - _allowed(path)
        for path, names in named.items()
        if names - _allowed(path)
    }
    assert not bad, "\n".join(f"{path}: {', '.join(sorted(bad[path]))}" for path in sorted(bad))


def test_the_list_of_remaining_names_has_no_more_than_remain():
    for place, names in REMAINING.items():
        paths = [path for path in ROOT.rglob("*.py") if place in _places(path)]
        used = {name for path in paths for name in _names(ast.parse(path.read_text()))}
        assert names <= used, f"{place} has no {', '.join(sorted(names - used))} any more"


def _allowed(path: Path) -> set[str]:
    return {name for place in _places(path) for name in REMAINING.get(place, ())}


def _places(path: Path) -> list[str]:
    """The file and its folders, as REMAINING names them."""
    relative = path.relative_to(ROOT)
    return [str(place) for place in (relative, *relative.parents)]


def _names(tree: ast.AST) -> Iterator[str]:
    """The names that a module's code gives to anything."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(asname=str(name)):
                yield name
