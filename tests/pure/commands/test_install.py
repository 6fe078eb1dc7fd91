"""What makes the environments: uv installs from where pip is configured to look, else pip does."""

import subprocess
import sys
from pathlib import Path

import pytest

import install

ROOT = Path(__file__).parents[3]

LISTED = """
global.index-url='https://a.example/simple'
global.find-links='/wheels /more'
global.trusted-host='other.example'
install.trusted-host='a.example'
:env:.extra-index-url='https://b.example/simple\\nfile:///c'
:env:.index-url='https://d.example/simple'
:env:.cert='/certificates.pem'
:env:.no-input='1'
download.only-binary=':all:'
"""
MEANT = [
    *("--index-strategy", "unsafe-best-match"),
    *("--index-url", "https://d.example/simple"),
    *("--find-links", "/wheels", "--find-links", "/more"),
    *("--allow-insecure-host", "a.example"),
    *("--extra-index-url", "https://b.example/simple", "--extra-index-url", "file:///c"),
]

# Programs that note how they were called; pip's settings are beside them.
_NOTES = """#!{python}
import os, pathlib, sys
if sys.argv[1:2] == ["-m"]:
    del sys.argv[1:3]
    words = [word for word in sys.argv[1:] if word not in ("-q", "--disable-pip-version-check")]
    if words[:2] == ["config", "list"]:
        print(pathlib.Path({folder!r}, "settings").read_text())
        sys.exit()
else:
    words = ["uv", *sys.argv[1:], os.environ.get("SSL_CERT_FILE", "")]
with open(pathlib.Path({folder!r}, "calls"), "a") as calls:
    print(*words, file=calls)
failing = pathlib.Path({folder!r}, "failing").read_text().split()
sys.exit(any(word in failing for word in words))
"""


def test_settings_of_pip_are_uvs_and_the_environments_go_ahead():
    options, variables = install.as_uvs(install.settings(LISTED))
    assert options == MEANT
    assert variables == {"SSL_CERT_FILE": "/certificates.pem"}


@pytest.mark.parametrize(("value", "options"), [("true", ["--no-index"]), ("0", [])])
def test_a_setting_that_is_a_switch_may_be_off(value, options):
    assert install.as_uvs({"no-index": value})[0][2:] == options


def installed(folder: Path, *wanted: str, settings: str = LISTED, failing: str = ""):
    """What a run installs by, and what it says."""
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "uv"):
        (programs / name).write_text(_NOTES.format(python=sys.executable, folder=str(folder)))
        (programs / name).chmod(0o755)
    (folder / "settings").write_text(settings)
    (folder / "failing").write_text(failing)
    command = [sys.executable, str(ROOT / "tools" / "install.py"), str(folder / "venv"), *wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    python = str(programs / "python")
    calls = (folder / "calls").read_text().replace(python, "PYTHON").splitlines()
    return done, [line for line in calls if not line.startswith("install uv==")]


WANTED = ("--no-deps", "some==1")


def test_uv_installs_what_is_wanted_with_pips_settings(tmp_path):
    done, calls = installed(tmp_path, *WANTED)
    uvs = " ".join(["uv pip install --python PYTHON", *MEANT, *WANTED, "/certificates.pem"])
    assert (done.returncode, done.stdout, calls) == (0, "", [uvs])


def test_an_index_that_is_asked_for_is_in_place_of_pips(tmp_path):
    _, (call,) = installed(tmp_path, "--index-url", "https://e.example", "some")
    assert call.split().count("--index-url") == 1
    assert "--index-url https://e.example" in call


BY_PIP = [f"install --upgrade {install.PIP}", "install --no-compile --no-deps some==1"]


def test_a_setting_that_uv_lacks_leaves_it_to_pip_in_words(tmp_path):
    done, calls = installed(tmp_path, *WANTED, settings="install.no-binary='numpy'\n")
    assert done.returncode == 0 and calls == BY_PIP
    assert "uv has no option for pip's no-binary = numpy: pip installs --no-deps" in done.stdout


def test_what_uv_cannot_install_is_left_to_pip_in_words(tmp_path):
    done, calls = installed(tmp_path, *WANTED, failing="uv")
    assert done.returncode == 0 and calls[1:] == BY_PIP
    assert "uv cannot: pip installs --no-deps some==1" in done.stdout


def test_what_pip_cannot_install_fails(tmp_path):
    done, _ = installed(tmp_path, *WANTED, failing="uv some==1")
    assert done.returncode == 1
