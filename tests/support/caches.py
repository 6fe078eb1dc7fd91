"""What the package keeps between calls, found in its sources.

A cache is a container of a module or of an object that begins empty and is filled later, an
attribute that is None until it is needed, or a function whose results are kept.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import heedful

ROOT = Path(heedful.__file__).parent
# Layers that a call passes. Kernels keep nothing, and what users run keeps what it likes.
LAYERS = ("core", "cpu", "distributed", "jax", "launch", "torch")
_CONTAINERS = {"dict", "list", "set", "Kinds", "LRU", "Cases", "WeakSet", "SimpleQueue"}
_DECORATORS = {"cache", "lru_cache", "cached_property"}


def found() -> set[str]:
    """`layer.module.name` or `layer.module.Class.attribute` of each."""
    names: set[str] = set()
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names |= {f"{layer}.{path.stem}.{name}" for name in _of_module(tree)}
    return names


def _of_module(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in _of_class(node))
        name, value = _assigned(node)
        if name is not None and (_is_container(value) or _is_keeper(value)):
            yield name
        if isinstance(node, ast.FunctionDef) and any(map(_is_keeper, node.decorator_list)):
            yield node.name


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    """Empty containers of objects, and attributes that are None at first and assigned later."""
    first: set[str] = set()
    later: set[str] = set()
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        if any(map(_is_keeper, method.decorator_list)):
            yield method.name
        begins = method.name in ("__init__", "_begin")
        for step in ast.walk(method):
            for name, value in _of_self(step):
                if begins and _is_container(value):
                    yield name
                elif begins and _is_none(value):
                    first.add(name)
                elif method.name != "__init__" and not _is_none(value):
                    later.add(name)
    yield from first & later


def _assigned(node: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None, None


def _of_self(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """What is assigned to attributes of self, chained and paired assignments among them."""
    if isinstance(node, ast.AnnAssign):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.Assign):
        pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
    else:
        return
    for target, value in pairs:
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            yield target.attr, value


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
    return list(zip(target.elts, values, strict=False))


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.ListComp):
        return isinstance(value.elt, ast.Dict) and not value.elt.keys
    if isinstance(value, ast.Call) and _name(value.func) == "forgotten":
        return True
    if isinstance(value, ast.Dict | ast.Tuple):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if isinstance(value, ast.List):
        return not value.elts or all(map(_is_none, value.elts))
    return isinstance(value, ast.Call) and _name(value.func) in _CONTAINERS and not value.keywords


def _is_keeper(node: ast.expr | None) -> bool:
    """Whether it is a decorator that keeps results, or a function so decorated."""
    while isinstance(node, ast.Call):
        node = node.func
    return node is not None and _name(node) in _DECORATORS


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
