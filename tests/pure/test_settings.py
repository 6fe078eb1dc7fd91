"""Environment variables: typed, and of no effect where they are empty; a home that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import heedful
from heedful.core import settings


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for setting in settings.TABLE.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("name", settings.TABLE)
def test_an_empty_variable_is_one_that_is_not_set(clean, monkeypatch, name):
    unset = settings.get(name)
    monkeypatch.setenv(settings.TABLE[name].variable, "")
    assert settings.get(name) == unset and not settings.is_set(name)


def test_a_wrong_value_is_named_with_its_variable(clean, monkeypatch):
    for name, text in {"cache_limit": "much", "cache_read_only": "perhaps", "log": "loud"}.items():
        monkeypatch.setenv(settings.TABLE[name].variable, text)
        with pytest.raises(ValueError, match=f"{settings.TABLE[name].variable}='{text}'"):
            settings.get(name)


@pytest.mark.parametrize(
    ("base", "home", "expected"),
    [
        (None, "/home/me", "/home/me/.cache/heedful"),
        ("", "/home/me", "/home/me/.cache/heedful"),
        ("/scratch/me", "/home/me", "/scratch/me/heedful"),
        ("relative", "/home/me", "/home/me/.cache/heedful"),
        (None, "/", "/.cache/heedful"),
        ("/scratch/me", None, "/scratch/me/heedful"),
        (None, None, None),
        (None, "", None),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="homes are found another way there")
def test_the_cache_is_where_the_base_directory_specification_has_it(
    clean, monkeypatch, base, home, expected
):
    import pwd

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name, value in {"XDG_CACHE_HOME": base, "HOME": home}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert settings.get("cache_dir") == (expected and Path(expected))


def test_a_folder_may_be_given_from_home_on(clean, monkeypatch, tmp_path):
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("HEEDFUL_PACK", "~/pack")
    assert settings.get("cache_dir") == tmp_path / "kernels"
    assert settings.get("pack") == tmp_path / "pack"


_HOMELESS = """
import os, pwd
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody
from heedful.core.device import by_name
from heedful.launch.artifact import Artifact
from heedful.launch.compiler import _disk_cache
from heedful.validation import record
made = Artifact(b"code", "", "k", "cuda:90", 4, 32, 0, 1, (), 0)
assert _disk_cache().get_or_make("key", lambda: made) == (made, True)
assert record.validated(by_name("H200")) == frozenset()
record.remove(by_name("H200"))
from heedful.cli import doctor
assert "no home folder" in doctor._cache_words(None)
assert not os.listdir(".")
"""


@pytest.mark.skipif(os.name == "nt", reason="homes are found another way there")
@pytest.mark.parametrize("home", [None, ""])
def test_a_user_without_a_home_or_an_entry_gets_kernels_and_one_warning(tmp_path, home):
    pytest.importorskip("rich")
    kept = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env["PYTHONPATH"] = str(Path(heedful.__file__).parents[1])
    if home is not None:
        env["HOME"] = home
    done = subprocess.run(
        [sys.executable, "-c", _HOMELESS], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set HEEDFUL_CACHE_DIR") == 1 == len(done.stderr.splitlines())


@pytest.mark.parametrize(("value", "handlers"), [("", 0), ("info", 1)])
def test_an_empty_level_leaves_logging_to_the_application(value, handlers):
    code = "import logging, heedful.core.log; print(len(logging.getLogger('heedful').handlers))"
    env = {**os.environ, "HEEDFUL_LOG": value}
    env["PYTHONPATH"] = str(Path(heedful.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == f"{handlers}\n", done.stderr
