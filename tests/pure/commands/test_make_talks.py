"""What takes minutes says that it runs: `make test` and the set-up of a bare checkout."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
TICKS = ROOT / "tools" / "ticks.sh"


def ticks(*command: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "TICK": "0.05"}
    words = [str(TICKS), "lint", *command]
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=60)


def test_a_command_that_holds_its_output_back_is_said_to_run():
    done = ticks("sh", "-c", "sleep 0.5; echo done")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == "lint: begun" and "done" in lines
    assert len([line for line in lines if re.fullmatch(r"lint: \d+ s", line)]) >= 3


def test_a_command_that_fails_fails():
    assert ticks("sh", "-c", "exit 3").returncode == 3


def test_make_test_is_never_silent_for_30_seconds_before_its_tests():
    """By what the recipe says: the commands whose output is held back run under ticks."""
    recipe = (ROOT / "Makefile").read_text().split("\ntest:")[1].split("\n\n")[0]
    held, tests = recipe.index("-Otarget"), recipe.index("pytest")
    assert recipe.index("tools/ticks.sh") < held < recipe.index("@echo") < tests
    default = re.search(r"\$\{TICK:-(\d+)\}", TICKS.read_text())
    assert default and int(default[1]) < 30


def test_the_set_up_says_that_it_moves():
    """Every installation of packages is under ticks; uv and pip say what they fetch."""
    text = (ROOT / "tools" / "set-up.sh").read_text()
    body = text.split("install() {")[1]
    assert body.count("tools/install.py") == 1 and "tools/ticks.sh" in body.splitlines()[0]
    assert len(re.findall(r"^ +install ", body, re.M)) == 6
    assert "quiet" not in text and "-q" not in body
