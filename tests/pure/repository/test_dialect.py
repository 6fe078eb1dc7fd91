"""What device code may not say, since an older Triton does not understand it."""

import ast
from pathlib import Path

import pytest

import heedful

ROOT = Path(heedful.__file__).parent / "kernels"
# CDNA's kernels need Triton 3.9.
SOURCES = [p for p in sorted(ROOT.rglob("*.py")) if not p.parent.name.startswith("cdna")]


def layouts_passed_unnamed(source: str) -> list[str]:
    """Calls of helpers (not of gl's own functions) with a tensor's layout among the arguments."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or isinstance(node.func, ast.Attribute):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(ast.unparse(argument).endswith(".type.layout") for argument in given):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_helpers_get_layouts_by_the_name_of_a_constant(path):
    """Triton 3.6 takes `x.type.layout` for a value there, and fails to compile."""
    assert not layouts_passed_unnamed(path.read_text())


def test_a_layout_without_a_name_is_found():
    assert layouts_passed_unnamed("f(a, x.type.layout)") == ["f(a, x.type.layout)"]
    assert not layouts_passed_unnamed("gl.f(x.type.layout)\nf(layout)")


def nested_targets(source: str) -> list[str]:
    """Assignments to tuples within tuples, in functions that Triton reads: all have a decorator."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                parts = node.targets[0].elts
                if any(isinstance(part, ast.Tuple) for part in parts):
                    found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_compiled_functions_assign_to_no_tuple_within_a_tuple(path):
    """Triton 3.6 puts the names of a target into a set, and fails at lists of them, also in
    functions that make assembly."""
    assert not nested_targets(path.read_text())


def test_a_tuple_within_a_tuple_is_found():
    wanted = "((a, b), c) = d"
    (found,) = nested_targets(f"@jit\ndef f(d):\n    {wanted}\n")
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(wanted))
    assert not nested_targets("@jit\ndef f(d):\n    a, c = d\n")
