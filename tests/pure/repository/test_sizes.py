"""How much a reader of device code has to keep in mind at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import heedful

ROOT = Path(heedful.__file__).parent
KERNELS = ROOT / "kernels"
MOST_PARAMETERS, MOST_LINES, MOST_FILE_LINES = 20, 120, 600


def is_jit(node: ast.FunctionDef) -> bool:
    """Whether it is device code: @triton.jit, @gluon.jit, with or without arguments."""
    return any(".jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def device_functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and is_jit(node):
            yield node


def lines(node: ast.FunctionDef) -> int:
    """Lines of a function with its signature and docstring."""
    return (node.end_lineno or 0) - node.lineno + 1


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_is_device_code_in_every_folder_but_that_of_arguments():
    kernels = [path for path in KERNELS.rglob("*.py") if list(device_functions(path))]
    folders = {path.parent for path in KERNELS.rglob("__init__.py")} - {KERNELS}
    without = {folder for folder in folders if not any(folder in path.parents for path in kernels)}
    assert {folder.relative_to(KERNELS).as_posix() for folder in without} == {"args"}


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=name)
def test_device_code_takes_few_parameters(path):
    found = {f.name: len(f.args.args) + len(f.args.kwonlyargs) for f in device_functions(path)}
    assert {n: count for n, count in found.items() if count > MOST_PARAMETERS} == {}


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=name)
def test_functions_of_device_code_are_short(path):
    found = {f.name: lines(f) for f in device_functions(path)}
    assert {n: count for n, count in found.items() if count > MOST_LINES} == {}


def test_files_are_short():
    lengths = {name(path): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {n: count for n, count in lengths.items() if count > MOST_FILE_LINES} == {}
