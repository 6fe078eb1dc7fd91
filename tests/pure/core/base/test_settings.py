"""Environment variables: typed, and of no effect where they are empty; a home that is not there."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import heedful
from heedful.core.base import settings
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning import log
from heedful.core.planning.plan import explain, plan


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for name in settings.TABLE:
        monkeypatch.delenv(settings.variable(name), raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("name", settings.TABLE)
def test_an_empty_variable_is_one_that_is_not_set(clean, monkeypatch, name):
    unset = settings.get(name)
    monkeypatch.setenv(settings.variable(name), "")
    assert settings.get(name) == unset and not settings.is_set(name)


def test_a_wrong_value_is_named_with_its_variable(clean, monkeypatch):
    for name, text in {
        **{"cache_limit": "much", "cache_read_only": "perhaps", "log": "loud"},
        **{"workers": "0", "compile_seconds": "inf", "sm_margin": "-1"},
    }.items():
        monkeypatch.setenv(settings.variable(name), text)
        with pytest.raises(ValueError, match=f"{settings.variable(name)}='{text}'"):
            settings.get(name)


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("name", "unset", "texts"),
    [
        ("backend", None, {"cpu": "cpu"}),
        ("workspace_limit", None, {"0": 0, "1": MIB, "300": 300 * MIB}),
        ("cache_limit", 2048 * MIB, {"0": 0, "7": 7 * MIB}),
        ("cache_read_only", False, {"1": True, "TRUE": True, "yes": True, "on": True}),
        ("cache_read_only", False, {"0": False, "false": False, "No": False, "off": False}),
        ("check_pages", False, {"1": True, "0": False}),
        ("sm_margin", 0, {"0": 0, "8": 8}),
        ("pack", None, {"/a/b": Path("/a/b")}),
        ("cache_dir", None, {"/a/b": Path("/a/b")}),
        ("triton", None, {"/a/b": Path("/a/b"), "process": Path("process")}),
        ("workers", max(1, min(8, (os.cpu_count() or 1) // 2)), {"1": 1, "70": 70}),
        ("compile_seconds", 600.0, {"0.5": 0.5, "3600": 3600.0}),
        ("log", "warning", {"DEBUG": "debug", "info": "info", "warning": "warning"}),
        ("log", "warning", {"Error": "error"}),
    ],
)
def test_texts_stand_for_values_and_none_for_the_default(clean, monkeypatch, name, unset, texts):
    if name != "cache_dir":
        assert settings.get(name) == unset
    for text, value in texts.items():
        monkeypatch.setenv(settings.variable(name), text)
        assert settings.get(name) == value and settings.is_set(name)


@pytest.mark.parametrize("name", ["workspace_limit", "cache_limit"])
@pytest.mark.parametrize("text", ["-1", "1.5", "many"])
def test_a_size_is_a_number_of_mib_from_0_on(clean, monkeypatch, name, text):
    monkeypatch.setenv(settings.variable(name), text)
    with pytest.raises(ValueError, match=f"^{settings.variable(name)}='{text}': "):
        settings.get(name)


def test_variables_are_heedfuls_and_each_is_explained():
    for name, setting in settings.TABLE.items():
        variable = settings.variable(name)
        assert variable.removeprefix(f"HEEDFUL_{name.upper()}") in ("", "_MB")
        assert variable.endswith("_MB") == ("MiB" in setting.help)
        assert setting.help


@pytest.mark.skipif(os.name == "nt", reason="homes are found another way there")
def test_without_home_in_the_environment_it_is_that_of_the_users_entry(clean, monkeypatch):
    import pwd
    from types import SimpleNamespace

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=f"/entry/{uid}"))
    assert settings.get("cache_dir") == Path(f"/entry/{os.getuid()}/.cache/heedful")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=""))
    assert settings.get("cache_dir") is None


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


def test_a_folder_from_a_home_that_is_not_there_is_refused_by_its_variable(clean, monkeypatch):
    def nowhere(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", "~/kernels")
    words = "^HEEDFUL_CACHE_DIR='~/kernels': there is no home folder for ~"
    with pytest.raises(ValueError, match=words):
        settings.get("cache_dir")


def test_where_users_have_no_entries_the_home_is_as_python_finds_it(clean, monkeypatch):
    monkeypatch.setitem(sys.modules, "pwd", None)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", "/found"))
    monkeypatch.delenv("HOME")
    assert settings.get("cache_dir") == Path("/found/.cache/heedful")


_HOMELESS = """
import os, pwd
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody
from heedful.core.base.device import by_name
from heedful.launch.code.artifact import Artifact
from heedful.launch.compiler import _disk_cache
from heedful.launch import validations
made = Artifact(b"code", "", "k", "cuda:90", 4, 32, 0, 1, (), 0)
assert _disk_cache().get_or_make("key", lambda: made) == (made, True)
assert validations.validated(by_name("H200")) == frozenset()
validations.remove(by_name("H200"))
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


_CONFIGURED = """
import logging, sys
if "configured" in sys.argv:
    logging.basicConfig()
import heedful.core.planning.log
log = logging.getLogger("heedful")
print(len(log.handlers), logging.getLevelName(log.level))
heedful.core.planning.log.configure()
print(len(log.handlers))
"""


@pytest.mark.parametrize("how, handlers", [("configured", 0), ("not", 1)])
def test_a_level_prints_only_where_the_application_has_configured_nothing(how, handlers):
    env = {**os.environ, "HEEDFUL_LOG": "Info"}
    env["PYTHONPATH"] = str(Path(heedful.__file__).parents[1])
    command = [sys.executable, "-c", _CONFIGURED, how]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [str(handlers), "INFO", str(handlers)], done.stderr


def test_where_nothing_is_configured_lines_begin_with_the_loggers_name(monkeypatch):
    monkeypatch.setenv("HEEDFUL_LOG", "info")
    monkeypatch.setattr(log.log, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    level = log.log.level
    try:
        log.configure()
        (handler,) = log.log.handlers
        assert log.log.level == logging.INFO
    finally:
        log.log.setLevel(level)
    said = logging.LogRecord("heedful.cache", logging.INFO, "", 0, "%s is off", ("it",), None)
    assert handler.format(said) == "heedful.cache: it is off"


@pytest.mark.parametrize(
    "facts, backend, said",
    [
        ({}, None, "-> hopper/forward"),
        ({"needs_grad": True}, None, "-> hopper/forward, backward hopper/backward"),
        ({"num_splits": 2}, "portable", "-> portable, 2 splits"),
        ({"num_splits": 1}, "portable", "-> portable"),
    ],
)
def test_decisions_are_told_at_level_info_and_in_full_at_debug(facts, backend, said, caplog):
    chosen = plan(AttentionProblem.dense(1, 64, 64, 8, **facts), by_name("H200"), backend=backend)
    with caplog.at_level("WARNING", "heedful"):
        log.decision(chosen)
    assert not caplog.records
    with caplog.at_level("INFO", "heedful"):
        log.decision(chosen)
    assert caplog.messages == [f"[{chosen.problem.key()}] {said}"]
    with caplog.at_level("DEBUG", "heedful"):
        log.decision(chosen)
    assert caplog.messages[1:] == [f"planned\n{explain(chosen)}"]


@pytest.mark.parametrize(("value", "handlers"), [("", 0), ("info", 1)])
def test_an_empty_level_leaves_logging_to_the_application(value, handlers):
    code = (
        "import logging, heedful.core.planning.log\n"
        "print(len(logging.getLogger('heedful').handlers))"
    )
    env = {**os.environ, "HEEDFUL_LOG": value}
    env["PYTHONPATH"] = str(Path(heedful.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == f"{handlers}\n", done.stderr
