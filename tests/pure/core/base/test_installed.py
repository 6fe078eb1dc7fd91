"""Triton is found whatever distribution brought it, and its version is that of what is imported."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful.bench.harness import machine
from heedful.core.base import installed
from heedful.launch.code import identity


def imported() -> list[str]:
    """Modules of Triton that this process has."""
    return [name for name in sys.modules if name.split(".")[0] == "triton"]


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[Path]:
    """A site-packages folder, the only one; nothing of Triton has been imported."""
    stdlib = [p for p in sys.path if not p.endswith(("site-packages", "dist-packages"))]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *stdlib])
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    yield tmp_path
    # A test may have imported the folder's own, which others are not to find.
    for name in imported():
        del sys.modules[name]


def distribution(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def module(site: Path, text: str) -> None:
    (site / "triton").mkdir()
    (site / "triton" / "__init__.py").write_text(text)
    importlib.invalidate_caches()


NAMES = ["triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton", "a-name-of-tomorrow"]


@pytest.mark.parametrize("name", NAMES)
def test_triton_is_found_under_every_name_and_by_everyone_who_asks(site, name):
    distribution(site, name, "3.7.1")
    module(site, '"""Triton."""\n__version__ = "3.7.1"\nraise ImportError("not to be imported")\n')
    assert installed.triton_version() == "3.7.1"
    assert machine.version("triton") == "3.7.1"
    assert "3.7.1" in identity.toolchain()


@pytest.fixture
def device():
    """torch's side of the planner's facts, which are read anew."""
    device = pytest.importorskip("heedful.torch.base.device")
    device._versions.cache_clear()
    yield device
    device._versions.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_the_planner_sees_the_triton_of_every_distribution(device, site, name):
    distribution(site, name, "3.7.1")
    module(site, '__version__ = "3.7.1"\n')
    assert device.toolchain().triton == (3, 7, 1)


def test_to_plan_no_distribution_is_read(device, site, monkeypatch):
    """That takes milliseconds of a first call, whose kernels may need no compiler."""
    module(site, '__version__ = "3.7.1"\n')
    monkeypatch.setattr(installed.metadata, "distributions", None)
    assert device.toolchain().triton == (3, 7, 1)
    with pytest.raises(TypeError):
        installed.triton_version()


def test_a_module_that_names_its_build_is_believed(site):
    distribution(site, "triton", "3.9.0")
    module(site, "__version__ = '3.9.0+git0123'\n")
    assert installed.triton_version() == "3.9.0+git0123"


def test_a_build_of_a_distribution_is_told_from_another(site):
    distribution(site, "pytorch-triton", "3.5.0+git0123")
    module(site, "__version__ = '3.5.0'\n")
    assert installed.triton_version() == "3.5.0+git0123"


@pytest.mark.parametrize(
    "name",
    [
        "triton",
        "triton-rocm",
        "pytorch-triton-rocm",
        "pytorch-triton",
        "pytorch-triton-xpu",
        "triton-windows",
    ],
)
def test_builds_are_told_apart_of_every_distribution_that_is_known(site, name):
    distribution(site, name, "3.5.0+git0123")
    module(site, "__version__ = '3.5.0'\n")
    assert installed.triton_version() == "3.5.0+git0123"


def test_of_distributions_installed_over_one_another_the_one_with_the_files_counts(site):
    distribution(site, "triton", "3.6.0")
    distribution(site, "pytorch-triton-rocm", "3.7.0+rocm")
    module(site, "__version__ = '3.7.0'\n")
    assert installed.triton_version() == "3.7.0+rocm"


def test_a_distribution_that_disagrees_with_the_module_is_not_believed(site):
    distribution(site, "triton", "3.6.0")
    module(site, "__version__ = '3.9.0'\n")
    assert installed.triton_version() == "3.9.0"


def test_a_version_that_is_worked_out_on_import_is_found(site):
    module(site, "__version__ = '.'.join(['3', '8', '2'])\n")
    assert installed.triton_version() == "3.8.2"


@pytest.mark.parametrize("left", ["nothing", "metadata", "a folder", "a module that fails"])
def test_without_a_module_there_is_no_triton(site, left):
    if left != "nothing":
        distribution(site, "triton", "3.6.0")
    if left == "a folder":
        (site / "triton").mkdir()
    if left == "a module that fails":
        module(site, "import a_library_that_is_missing\n")
    importlib.invalidate_caches()
    assert installed.triton_version() is None
    assert identity.toolchain() == ""


def test_the_triton_of_this_environment_says_the_same_of_itself():
    triton = pytest.importorskip("triton")
    assert installed.numbers(installed.triton_version() or "") == installed.numbers(
        triton.__version__
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.11.0+cu130", (2, 11, 0)),
        ("3.5.0a0+git12", (3, 5, 0)),
        ("3.9", (3, 9)),
        ("2.12.0.dev20260801", (2, 12, 0)),
        ("dev", ()),
    ],
)
def test_the_numbers_of_a_version_are_its_leading_ones(text, expected):
    assert installed.numbers(text) == expected


@pytest.fixture
def data(site, tmp_path_factory, monkeypatch):
    """A data folder; the process's own Triton is 3.7.1."""
    folder = tmp_path_factory.mktemp("data")
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    monkeypatch.delenv("HEEDFUL_TRITON", raising=False)
    distribution(site, "triton", "3.7.1")
    module(site, '__version__ = "3.7.1"\n')
    installed._toolchain.cache_clear()
    yield folder
    installed._toolchain.cache_clear()


def made(data: Path, version: str, tag: str = "") -> Path:
    """A toolchain as the command makes it."""
    folder = data / "heedful" / "toolchains" / f"triton-{version}-{tag or installed.python_tag()}"
    folder.mkdir(parents=True)
    distribution(folder, "triton", version)
    module(folder, f'__version__ = "{version.partition("+")[0]}"\n')
    return folder


def compiles() -> tuple[str, bool] | None:
    installed._toolchain.cache_clear()
    found = installed.compiler()
    return found and (found.version, found.apart)


def test_a_toolchain_compiles_where_it_is_newer_than_the_process_s_triton(data, site):
    assert compiles() == ("3.7.1", False)
    made(data, "3.6.0")
    made(data, "3.7.1+git123")
    assert compiles() == ("3.7.1", False)
    made(data, "3.10.0", "cpython-39-plan9")
    assert compiles() == ("3.7.1", False)
    made(data, "3.8.0")
    newest = made(data, "3.10.0+git7")
    assert compiles() == ("3.10.0+git7", True)
    found = installed.compiler()
    assert found is not None and found.root == newest and found.numbers == (3, 10, 0)
    assert "3.10.0+git7" in identity.toolchain()
    (site / "triton" / "__init__.py").unlink()
    importlib.invalidate_caches()
    assert compiles() == ("3.10.0+git7", True)


def test_which_toolchain_compiles_does_not_change_while_the_process_runs(data):
    assert compiles() == ("3.7.1", False)
    made(data, "3.9.0")
    found = installed.compiler()
    assert found is not None and found.version == "3.7.1"


def test_a_named_folder_compiles_whatever_its_version(data, tmp_path, monkeypatch):
    made(data, "3.9.0")
    old = tmp_path / "old"
    old.mkdir()
    module(old, "__version__ = '3.6.0'\n")
    monkeypatch.setenv("HEEDFUL_TRITON", str(old))
    assert compiles() == ("3.6.0", True)
    monkeypatch.setenv("HEEDFUL_TRITON", "process")
    assert compiles() == ("3.7.1", False)
    monkeypatch.setenv("HEEDFUL_TRITON", "")
    assert compiles() == ("3.9.0", True)
    monkeypatch.setenv("HEEDFUL_TRITON", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"^HEEDFUL_TRITON='.*gone': there is no Triton in that"):
        compiles()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEEDFUL_TRITON", "old")
    found = compiles() and installed.compiler()
    assert found and found.root == old


def test_the_planner_plans_for_the_triton_that_compiles(data, device):
    made(data, "3.9.0")
    installed._toolchain.cache_clear()
    device._versions.cache_clear()
    assert device.toolchain().triton == (3, 9, 0)


def test_the_assembler_says_its_version_or_that_it_is_not_known(tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho ptxas: release 13.4, V13.4.59\n")
    assert installed.assembler_version(tool) == "unknown"
    installed.assembler_version.cache_clear()
    tool.chmod(0o755)
    assert installed.assembler_version(tool) == "13.4.59"
    folder = tmp_path / "triton" / "backends" / "nvidia" / "bin"
    folder.mkdir(parents=True)
    tool.rename(folder / "ptxas")
    found = installed.Compiler("3.9.0", tmp_path, apart=True)
    assert found.words() == f"Triton 3.9.0 in workers, of {tmp_path}, ptxas 13.4.59"
