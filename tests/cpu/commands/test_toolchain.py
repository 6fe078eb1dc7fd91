"""`heedful toolchain`: what it installs compiles, what fails leaves nothing, and sizes are said
before anything is fetched. Links to this environment's Triton stand for what pip installs."""

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from typer.testing import CliRunner

from heedful.bench.harness import report, run
from heedful.cli import app
from heedful.core.base import installed
from heedful.launch.worker import toolchains

OWN = installed.compiler()
assert OWN is not None
VERSION = OWN.version.partition("+")[0]
NAME = f"triton-{VERSION}-{installed.python_tag()}"

# A pip that notes how it was called, and links a Triton in place of installing it.
_PIP = """
import os, sys
from pathlib import Path
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
target = Path(sys.argv[sys.argv.index("--target") + 1])
for name in {names!r}:
    os.symlink(os.path.join({root!r}, name), target / name)
sys.exit({code})
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("HEEDFUL_TRITON", raising=False)
    installed._toolchain.cache_clear()
    yield tmp_path / "data" / "heedful" / "toolchains"
    installed._toolchain.cache_clear()


@pytest.fixture
def pip(home, tmp_path, monkeypatch):
    """Has a pip of ours do so; what it was asked for."""

    def make(code: int = 0, names: list[str] | None = None) -> Path:
        assert OWN is not None
        folder, log = tmp_path / "pip", tmp_path / "log"
        if names is None:
            names = ["triton", *(path.name for path in OWN.root.glob("triton-*.dist-info"))]
        (folder / "pip").mkdir(parents=True, exist_ok=True)
        (folder / "pip" / "__init__.py").touch()
        text = _PIP.format(log=str(log), names=names, root=str(OWN.root), code=code)
        (folder / "pip" / "__main__.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return log

    return make


def heed(*arguments: str):
    installed._toolchain.cache_clear()
    done = CliRunner().invoke(app(), ["toolchain", *arguments], terminal_width=200)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def refused(*arguments: str) -> str:
    """What a command says that fails, and leaves nothing behind."""
    before = sorted(installed.toolchains(), key=str)
    code, said = heed(*arguments)
    assert code == 2 and said.startswith("error: ") or "error: " in said
    assert sorted(installed.toolchains(), key=str) == before
    base = toolchains.folder()
    assert not base.exists() or not [path for path in base.iterdir() if path.name[0] == "."]
    return said


def test_a_toolchain_is_installed_listed_and_removed(home, pip):
    log = pip()
    code, said = heed("install", VERSION)
    assert code == 0 and f"Triton {VERSION}: about 1.05 GB unpacked, " in said, said
    assert f"in workers, of {home / NAME}" in said
    (asked,) = log.read_text().splitlines()
    assert asked.startswith("install ") and asked.endswith(f" triton=={VERSION}")
    assert "--no-deps" in asked and "--no-index" not in asked
    assert heed("path") == heed("path", VERSION) == (0, str(home / NAME))
    code, said = heed()
    assert code == 0 and VERSION in said and "yes" in said
    # It is as old as the process's own.
    assert f"compiles here: Triton {OWN.version} in this process" in said  # pyright: ignore
    assert "is there already" in refused("install", VERSION)
    code, said = heed("remove", VERSION)
    assert code == 0 and not list(home.iterdir())
    assert "no toolchain is installed" in heed("list")[1]


def test_a_toolchain_is_for_this_user_alone_to_write(home, pip):
    pip()
    assert heed("install", VERSION)[0] == 0
    assert (home / NAME).stat().st_mode & 0o022 == 0
    os.chmod(home, 0o777)
    assert "has mode 777" in refused("install", "3.8.0")


def test_a_file_is_installed_without_a_network(home, pip, tmp_path):
    log, wheel = pip(), tmp_path / f"triton-{VERSION}-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("triton/__init__.py", "x" * 12_000_000)
    code, said = heed("install", str(wheel))
    assert code == 0 and f"Triton {VERSION}: 0.01 GB unpacked, " in said
    (asked,) = log.read_text().splitlines()
    assert "--no-index" in asked and asked.endswith(str(wheel))


def test_where_room_lacks_nothing_is_fetched(home, pip, monkeypatch):
    log = pip()
    usage = shutil.disk_usage("/")._replace(free=1_300_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "lacks room: 1.35 GB are needed" in refused("install")
    assert not log.exists()


def test_an_installer_that_fails_leaves_nothing(home, pip):
    pip(code=1)
    assert f"could not install triton=={VERSION}" in refused("install", VERSION)
    pip(names=[])
    assert "could not install" in refused("install", VERSION)


def test_a_triton_that_does_not_start_is_not_kept(home, pip, tmp_path):
    log = pip(names=[])
    broken = tmp_path / "pip" / "pip" / "__main__.py"
    said = "__version__ = '3.9.0'\nimport of_another_python\n"
    broken.write_text(
        "import sys; from pathlib import Path\n"
        "target = Path(sys.argv[sys.argv.index('--target') + 1]) / 'triton'; target.mkdir()\n"
        f"(target / '__init__.py').write_text({said!r})\n"
    )
    assert "No module named 'of_another_python'" in refused("install", "3.9.0")
    assert not log.exists()


def test_without_pip_uv_installs_and_without_both_that_is_said(home, pip, tmp_path, monkeypatch):
    log = pip()
    monkeypatch.setattr(toolchains, "find_spec", lambda name: None)
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert "neither pip nor uv is here" in refused("install", VERSION)
    (tools / "uv").write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -m pip "$@"\n')
    (tools / "uv").chmod(0o755)
    assert heed("install", VERSION)[0] == 0
    assert log.read_text().startswith(f"install --python {sys.executable} --compile-bytecode ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("install", "latest"), "must be a version or a wheel file, got 'latest'"),
        (("install", "gone-1.0.whl"), "No such file"),
        (("remove",), "remove wants a version"),
        (("remove", "1.2.3"), "there is no toolchain of Triton 1.2.3; installed: none"),
        (("path",), "there is no toolchain; installed: none"),
        (("list", "3.9.0"), "list takes nothing more, got '3.9.0'"),
    ],
)
def test_wrong_words_are_named(home, pip, arguments, says):
    log = pip()
    assert says in refused(*arguments)
    assert not log.exists()


def test_a_file_that_is_no_wheel_of_triton_is_refused(home, pip, tmp_path):
    log = pip()
    (tmp_path / "triton-1.0-x.whl").write_bytes(b"no archive")
    assert "is no wheel" in refused("install", str(tmp_path / "triton-1.0-x.whl"))
    with zipfile.ZipFile(tmp_path / "torch-2.0-x.whl", "w") as archive:
        archive.writestr("x", "x")
    assert "must be a wheel of Triton" in refused("install", str(tmp_path / "torch-2.0-x.whl"))
    assert not log.exists()


def test_without_a_home_folder_that_is_said(home, monkeypatch):
    from heedful.core.base import settings

    monkeypatch.setattr(settings, "data_folder", lambda: None)
    code, said = heed("install")
    assert code == 2 and "there is no home folder: set XDG_DATA_HOME" in said


def test_commands_say_which_triton_compiles_and_with_which_assemblers(home, monkeypatch):
    assert OWN is not None
    monkeypatch.setenv("HEEDFUL_TRITON", str(OWN.root))
    installed._toolchain.cache_clear()
    words = f"Triton {OWN.version} in workers, of {OWN.root}, ptxas "

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(app(), list(arguments))
        assert done.exit_code == 0, done.output
        return done.output

    assert json.loads(said("doctor", "--json"))["versions"]["compiler"].startswith(words)
    assert json.loads(said("explain", "--json"))["compiler"].startswith(words)
    assert "compiled by the newest Triton" in said("explain", "--device", "H200")
    assert "compiled by Triton 3.6" in said("explain", "--device", "H200", "--triton", "3.6")
    assert words in report.footer(run.surroundings(torch.device("cpu")))
    monkeypatch.setenv("HEEDFUL_TRITON", str(home))
    installed._toolchain.cache_clear()
    for command in ("doctor", "explain", "toolchain"):
        done = CliRunner().invoke(app(), [command])
        assert done.exit_code == 2 and "there is no Triton in that folder" in done.output
