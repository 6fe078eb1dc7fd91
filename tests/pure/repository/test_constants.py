"""A golden table of constants: what modules and classes hold, and defaults of arguments. Most are
measured or agreed upon, so that no result tells a wrong one: a change shows here, to be looked at.

After a change that is meant:

    WRITE_GOLDEN_CONSTANTS=1 pytest tests/pure/repository/test_constants.py
"""

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import heedful

ROOT = Path(heedful.__file__).parent
GOLDEN = Path(__file__).with_name("golden_constants")
LAYERS = ("bench", "core", "cpu", "distributed", "jax", "launch", "masks", "torch", "validation")
# A value of the machine's or of another library's: not the same everywhere.
_ELSEWHERE = re.compile(r"\b(os|sys|platform|shutil|installed|version|find_spec|Path|time)\b")
# What it imports need not be there, and its tests are those of an integration.
_OF_OTHERS = ("heedful.bench.in_transformers",)


def _is_words(said: str) -> bool:
    """Whether it is a sentence for people."""
    return said[0] in "'\"" and said.count(" ") > 2


def written(value: Any) -> str | None:
    """How a plain value is written, None for any other."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value) if type(value) in (type(None), bool, int, float, str, bytes) else None
    if isinstance(value, re.Pattern):
        return f"r{value.pattern!r}"
    if isinstance(value, Mapping):
        pairs = [(written(k), written(v)) for k, v in value.items()]
        return _joined([None if None in pair else f"{pair[0]}: {pair[1]}" for pair in pairs], "{}")
    if isinstance(value, (set, frozenset)):
        found = [written(item) for item in value]
        return _joined(found if None in found else sorted(map(str, found)), "{}")
    if isinstance(value, (tuple, list)):
        return _joined([written(item) for item in value], "()")
    if _is_ours(value):
        return f"{type(value).__name__}({_fields(value)})"
    return None


def _is_ours(value: Any) -> bool:
    is_one = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_one and type(value).__module__.startswith("heedful.")


def _fields(value: Any) -> str:
    """Those of a dataclass that are not what they are by default, nor sentences."""
    usual = {f.name: f.default for f in dataclasses.fields(value)}
    given = {name: getattr(value, name) for name in usual}
    words = {
        name: _part(x) for name, x in given.items() if x is not usual[name] and x != usual[name]
    }
    return ", ".join(
        f"{name}={said}" for name, said in words.items() if said and not _is_words(said)
    )


def _function(function: Any) -> str:
    """Its name, and what a function that is made by another holds."""
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    words = {name: _part(x) for name, x in held.items()}
    inner = ", ".join(f"{name}={said}" for name, said in words.items() if said is not None)
    return function.__qualname__ + (f"({inner})" if inner else "")


def _part(value: Any) -> str | None:
    if isinstance(value, tuple) and all(map(inspect.isfunction, value)):
        return f"({', '.join(map(_function, value))})"
    return _function(value) if inspect.isfunction(value) else written(value)


def _joined(parts: Sequence[str | None], ends: str) -> str | None:
    return None if None in parts else ends[0] + ", ".join(map(str, parts)) + ends[1]


def held(body: list[ast.stmt], holder: Any, prefix: str) -> Iterator[str]:
    """Constants that these statements give a module or a class, and what is within."""
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            for name in () if _ELSEWHERE.search(ast.unparse(node.value)) else names:
                if not name.startswith("__"):
                    yield from lines_of(f"{prefix}{name}", getattr(holder, name, ...))
        elif isinstance(node, ast.ClassDef) and hasattr(holder, node.name):
            yield from held(node.body, getattr(holder, node.name), f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            words = defaults(getattr(holder, node.name, None))
            if words:
                yield f"{prefix}{node.name}({words})"


def lines_of(name: str, value: Any) -> Iterator[str]:
    """One, or one of each item of a table whose items are of a class of heedful's."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, (tuple, list)):
        pairs = [("...", item) for item in value]
    elif isinstance(value, Mapping):
        pairs = [(repr(key), item) for key, item in value.items()]
    if any(_is_ours(item) for _, item in pairs):
        for key, item in pairs:
            yield from lines_of(f"{name}[{key}]", item)
        return
    said = written(value)
    if said is not None and not _is_words(said):
        yield f"{name} = {said}"


def defaults(function: Any) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    given = ((p.name, written(p.default)) for p in parameters if p.default is not p.empty)
    return ", ".join(f"{name}={said}" for name, said in given if said is not None)


def table(layer: str) -> str:
    lines = []
    for path in sorted((ROOT / layer).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        if name.endswith("__main__") or name in _OF_OTHERS:
            continue
        module = importlib.import_module(name)
        found = held(ast.parse(path.read_text()).body, module, "")
        lines += [f"{name.removeprefix('heedful.')}: {line}" for line in found]
    return "\n".join(lines) + "\n"


def test_constants_are_those_of_the_golden_table():
    """In a process of its own: modules hold what was cached and looked up, too."""
    layers = [x for x in LAYERS if x not in ("bench", "jax") or find_spec("jax")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, *layers]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for layer, found in json.loads(done.stdout).items():
        golden = GOLDEN / f"{layer}.txt"
        if os.environ.get("WRITE_GOLDEN_CONSTANTS"):
            golden.write_text(found)
        assert found == golden.read_text(), layer


if __name__ == "__main__":
    sys.stdout.write(json.dumps({layer: table(layer) for layer in sys.argv[1:]}))
