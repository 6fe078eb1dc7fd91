"""Folders: few modules in each; docstrings say what lives there and what it may import."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import heedful

PACKAGE = Path(heedful.__file__).parent
ROOT = PACKAGE.parents[1]
MOST_MODULES = 16
# What every family of kernels may import.
OF_ALL_KERNELS = {"kernels.args", "kernels.common"}


def with_modules(*parts: str) -> list[Path]:
    """The folders under these parts of the repository that hold modules, themselves included."""
    files = (path for part in parts for path in (ROOT / part).rglob("*.py"))
    return sorted({path.parent for path in files})


def name(folder: Path) -> str:
    return folder.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """The dotted name of a folder or a module of the package, without the package's own."""
    parts = path.relative_to(PACKAGE).parts
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


def docstring(folder: Path) -> str:
    init = folder / "__init__.py"
    if not init.exists():
        return ""
    return ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""


FOLDERS = with_modules("src", "tests", "tools")
# Folders of the package beside which the same layer has others.
ROOMS = [folder for folder in with_modules("src/heedful") if dotted(folder).count(".")]
EVERYTHING = {dotted(path) for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_folder_has_few_modules(folder):
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_folder_says_what_lives_there(folder):
    assert docstring(folder), f"{name(folder)}/__init__.py has no docstring"


def granted(folder: Path) -> set[str]:
    """The folders and modules of its layer that a folder's docstring lets it import, dotted."""
    text = " ".join(docstring(folder).split())
    told = re.findall(r"`([\w.]+)`", text.partition("May import ")[2])
    layer = dotted(folder).partition(".")[0]
    found = set(OF_ALL_KERNELS if layer == "kernels" else ())
    for each in told:
        short = each.removeprefix("heedful.")
        # `hopper.sm90` stands for `kernels.hopper.sm90`.
        full = short if short.split(".")[0] == layer else f"{layer}.{short}"
        assert full in EVERYTHING, f"{name(folder)} may import {each}, which is not there"
        found.add(full)
    return found


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that are loaded with a module, dotted."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        above, _, package = node.module.partition("heedful.")
        if above or not package:
            continue
        for alias in node.names:
            inner = f"{package}.{alias.name}"
            yield inner if inner in EVERYTHING else package


@pytest.mark.parametrize("folder", ROOMS, ids=dotted)
def test_a_folder_loads_what_its_docstring_says_and_nothing_else_of_its_layer(folder):
    own, layer = dotted(folder), dotted(folder).partition(".")[0]
    allowed = {own, *granted(folder)}
    wrong = {
        f"{path.name} loads {module}"
        for path in folder.glob("*.py")
        for module in imported(path)
        if module.split(".")[0] == layer
        and not any(f"{module}.".startswith(f"{prefix}.") for prefix in allowed)
    }
    assert not wrong


@pytest.mark.parametrize("folder", ROOMS, ids=dotted)
def test_a_docstring_grants_nothing_that_its_folder_does_not_import(folder):
    """A lazy import counts: what it names is said, too."""
    text = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    parent = dotted(folder).rpartition(".")[0]
    named = granted(folder) - OF_ALL_KERNELS - {parent, dotted(folder).partition(".")[0]}
    unused = [
        each
        for each in named
        if f"heedful.{each}" not in text
        and f"heedful.{each.rpartition('.')[0]} import {each.rpartition('.')[2]}" not in text
    ]
    assert not unused
