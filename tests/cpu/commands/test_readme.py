"""The README's Python runs as it stands, and prints what it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")


def test_every_python_block_runs_and_explain_prints_what_is_shown(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    shown = re.search(r"prints, on a CPU:\n\n((?:    .*\n)+)", README)
    assert shown, "the README no longer shows what explain prints"
    wanted = [line.strip() for line in shown.group(1).splitlines()]
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert printed == wanted


@pytest.mark.parametrize("line", re.findall(r"^    \+ (from heedful.* import .*)$", README, re.M))
def test_the_imports_that_replace_flash_attn_work(line):
    exec(line, {})


def test_the_table_of_levels_is_the_one_of_the_code():
    from heedful.core.registry.capability import LEVELS

    rows = re.findall(r"^\| ([a-z-]+) \| (.*) \|$", README, re.M)
    assert {name: words for name, words in rows if name in LEVELS}.keys() == LEVELS.keys()


def test_the_table_of_commands_is_complete():
    from heedful.cli import COMMANDS

    assert set(re.findall(r"^\| `heedful (\w+)` \|", README, re.M)) == set(COMMANDS)
