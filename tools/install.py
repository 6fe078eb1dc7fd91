"""Installs packages into an environment from where pip is configured to look.

    install.py VENV [options and requirements of pip install]

uv does it, which takes a quarter of pip's time. It gets pip's settings as its own; where they have
one that it lacks, or it cannot install what is asked for, this says so, and pip does it.
"""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Groups of pyproject.toml came with it.
PIP = "pip>=25.1"
# Settings of pip that uv has, too, by option or by environment.
OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "proxy": "ALL_PROXY",
}
# Which are about pip's words or itself.
WITHOUT_EFFECT = {
    "compile",
    "disable-pip-version-check",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "verbose",
}


def say(words: str) -> None:
    print(f"set-up: {words}", flush=True)


def settings(listed: str) -> dict[str, str]:
    """Settings of `pip install`, of what `pip config list` prints: a command's go ahead of all
    commands', and the environment's of both."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in found:
            found[section][key] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def as_uvs(of_pip: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """uv's options and environment variables of the same meaning as pip's settings. ValueError if
    it lacks one."""
    # pip takes the newest version of any index.
    options, variables = ["--index-strategy", "unsafe-best-match"], {}
    for key, value in of_pip.items():
        if key in OPTIONS:
            options += [word for one in value.split() for word in (OPTIONS[key], one)]
        elif key in VARIABLES:
            variables[VARIABLES[key]] = value
        elif key == "cache-dir":
            options += ["--cache-dir", str(Path(value, "uv"))]
        elif key in ("no-index", "no-cache-dir"):
            if value.lower() in ("1", "true", "yes", "on"):
                options.append(f"--{key.removesuffix('-dir')}")
        elif key not in WITHOUT_EFFECT:
            raise ValueError(f"uv has no option for pip's {key} = {value}")
    return options, variables


def by_uv(python: Path, wanted: list[str]) -> None:
    """Has uv install what is wanted; ValueError says why it cannot."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True)
    of_pip = settings(listed.stdout)
    if "--index-url" in wanted:
        of_pip.pop("index-url", None)
    options, variables = as_uvs(of_pip)
    (pin,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["installer"]
    if subprocess.run([*pip, "-q", "install", pin]).returncode:
        raise ValueError(f"{pin} cannot be installed")
    command = [python.parent / "uv", "pip", "install", "--python", python, *options, *wanted]
    if subprocess.run(command, env=os.environ | variables).returncode:
        raise ValueError("uv cannot")


def main() -> int:
    venv, *wanted = sys.argv[1:]
    # Not resolved: it would be the interpreter that the environment was made with.
    python = Path(venv).absolute() / "bin" / "python"
    try:
        by_uv(python, wanted)
        return 0
    except ValueError as reason:
        say(f"{reason}: pip installs {' '.join(wanted)}")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "-q", "install", "--upgrade", PIP])
    # It would compile 14,000 modules to bytecode one after the other, 40 s; Python compiles what it
    # imports.
    return done.returncode or subprocess.run([*pip, "install", "--no-compile", *wanted]).returncode


if __name__ == "__main__":
    sys.exit(main())
