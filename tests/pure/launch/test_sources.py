"""Of which sources a kernel's key has a digest."""

import ast
import shutil
from functools import cache
from pathlib import Path

import pytest

from heedful.launch.code import identity

KERNELS = identity._KERNELS
KEPT = "hopper.mla.kernel", "hopper.forward.kernel", "portable.forward.kernel"
MODULES = sorted(f for f in KERNELS.rglob("*.py") if f.name != "__init__.py")


def name_of(file: Path) -> str:
    return ".".join(("heedful.kernels", *file.relative_to(KERNELS).with_suffix("").parts))


@cache
def imports(file: Path) -> set[Path]:
    """The kernels' modules that a file imports, by its syntax tree."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("heedful") for name in node.names), file
        elif isinstance(node, ast.ImportFrom) and (node.level or "heedful" in str(node.module)):
            assert not node.level and str(node.module).startswith("heedful.kernels."), file
            names = [str(node.module), *(f"{node.module}.{name.name}" for name in node.names)]
            paths = [KERNELS.joinpath(*name.split(".")[2:]).with_suffix(".py") for name in names]
            found |= {path for path in paths if path.exists()}
    return found


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_the_sources_of_a_kernel_are_those_that_it_imports_directly_or_not(file):
    reached, rest = set(), {file}
    while rest:
        reached |= rest
        rest = {found for module in rest for found in imports(module)} - reached
    assert identity.reached(file.with_suffix("")) == sorted(reached)


def test_packages_of_kernels_have_no_code():
    """Their files are in no digest but that of all kernels."""
    for file in KERNELS.rglob("__init__.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        assert all(isinstance(getattr(node, "value", None), ast.Constant) for node in body), file


def forget() -> None:
    for kept in (identity.source_digest, identity._kept, identity._imported):
        kept.cache_clear()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the kernels, and a function that gives digests of its modules as they are now."""
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(identity, "_KERNELS", folder)

    def digests() -> dict[str, str]:
        forget()
        return {name: identity.source_digest(f"heedful.kernels.{name}") for name in KEPT}

    yield folder, digests
    forget()


@pytest.mark.parametrize(
    "edited, others",
    [
        ("hopper/mla/consumer.py", {"hopper.mla.kernel"}),
        ("hopper/sm90/softmax.py", {"hopper.mla.kernel", "hopper.forward.kernel"}),
        ("cdna/tile.py", set()),
        (
            "common/constants.py",
            {"hopper.mla.kernel", "hopper.forward.kernel", "portable.forward.kernel"},
        ),
    ],
)
def test_an_edit_changes_the_digests_of_the_kernels_that_reach_it_and_of_no_other(
    copy, edited, others
):
    folder, digests = copy
    before = digests()
    with (folder / edited).open("a") as file:
        file.write("# edited\n")
    after = digests()
    assert {name for name, digest in after.items() if digest != before[name]} == others


def test_a_kernel_that_begins_to_import_a_module_has_its_source(copy):
    folder, digests = copy
    (folder / "common" / "more.py").write_text("MORE = 1\n")
    with (folder / "hopper" / "mla" / "consumer.py").open("a") as file:
        file.write("from heedful.kernels.common import more\n")
    before = digests()
    (folder / "common" / "more.py").write_text("MORE = 2\n")
    after = digests()
    assert after["hopper.mla.kernel"] != before["hopper.mla.kernel"]
    assert after["hopper.forward.kernel"] == before["hopper.forward.kernel"]
