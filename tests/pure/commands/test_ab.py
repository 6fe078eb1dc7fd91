"""Two checkouts in turns: who has a turn, what ratios say, and where sources come from."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ab import figures
from ab.__main__ import main
from ab.cases import TABLES, cells
from ab.sides import Side, SideError, begin, turns
from ab.sources import sources

# A side that writes down when it is at work, and takes as long as its last argument says.
FAKE = """
import json, sys
log, name, us = sys.argv[1], sys.argv[2], float(sys.argv[3])
for line in sys.stdin:
    request = json.loads(line)
    with open(log, "a") as file:
        file.write(f"{name} {request['do']}\\n")
    answers = {"begin": {"equal": name}, "count": {"count": 3}, "time": {"us": us}}
    if us < 0 and request["do"] == "time":
        answers["time"] = {"error": "ValueError: no"}
    print(json.dumps(answers.get(request["do"], {})), flush=True)
"""


@pytest.fixture
def fakes(tmp_path):
    """Makes two sides that take so many microseconds, and the log of what they did."""
    log, made = tmp_path / "log", []

    def make(base: float, new: float) -> tuple[tuple[Side, Side], Path]:
        for name, us in (("base", base), ("new", new)):
            command = [sys.executable, "-c", FAKE, str(log), name, str(us)]
            made.append(Side(name, tmp_path, "cpu", command))
        return (made[0], made[1]), log

    yield make
    for side in made:
        side.close()


def test_a_round_is_four_turns_each_side_first_and_last_once(fakes):
    sides, log = fakes(10.0, 20.0)
    count, equal = begin(sides, {})
    assert (count, equal) == (3, False)
    assert turns(sides, count, 2) == [(10.0, 20.0)] * 2
    told = [line.split()[0] for line in log.read_text().splitlines() if line.endswith("time")]
    assert told == ["base", "new", "new", "base"] * 2


def test_the_burst_is_sized_when_both_sides_have_begun(fakes):
    sides, log = fakes(1.0, 1.0)
    begin(sides, {})
    *begun, last = log.read_text().splitlines()
    assert sorted(begun) == ["base begin", "new begin"]
    assert last == "base count"


def test_an_error_of_a_side_names_it_and_a_side_that_ended_is_told(fakes):
    sides, _ = fakes(1.0, -1.0)
    with pytest.raises(SideError, match="new: ValueError: no"):
        turns(sides, 1, 1)
    sides[0]._process.kill()
    with pytest.raises(RuntimeError, match="the base side ended with -9"):
        sides[0].ask("hello")


def test_a_side_that_imports_other_sources_is_refused(tmp_path):
    command = [sys.executable, "-c", 'input(); print(\'{"heedful": "/else/heedful/__init__.py"}\')']
    with (
        Side("base", tmp_path, "cpu", command) as side,
        pytest.raises(RuntimeError, match="got /e"),
    ):
        side.check()


def test_a_side_keeps_the_path_of_its_caller_after_its_own_sources(tmp_path, monkeypatch):
    """Another Triton may be on it: without it both sides would be timed on the installed one."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "triton"))
    told = "import json, os; input(); print(json.dumps({'path': os.environ['PYTHONPATH']}))"
    with Side("base", tmp_path / "src", "cpu", [sys.executable, "-c", told]) as side:
        path = side.ask("hello")["path"].split(os.pathsep)
    assert path[0] == str(tmp_path / "src") and path[-1] == str(tmp_path / "triton")


def rounds_of(*ratios: float) -> figures.Figure:
    return figures.figure("t", "case", [(100.0, 100.0 * ratio) for ratio in ratios])


def test_a_figure_is_the_median_ratio_within_its_interval():
    found = rounds_of(1.0, 1.01, 1.02, 1.03, 1.10)
    assert found.ratio == pytest.approx(1.02)
    assert 1.0 <= found.low <= found.ratio <= found.high <= 1.11
    assert found == rounds_of(1.0, 1.01, 1.02, 1.03, 1.10)


@pytest.mark.parametrize(
    ("ratios", "is_slower"),
    [([1.02] * 8, True), ([1.004] * 8, False), ([0.9, 1.2] * 4, False), ([0.98] * 8, False)],
)
def test_slower_is_what_the_spread_does_not_explain(ratios, is_slower):
    found = [rounds_of(*ratios)]
    assert bool(figures.verdict(found, 0.5, 0.5)) == is_slower


def test_a_case_may_be_slower_by_more_than_the_mean_of_its_table():
    found = [rounds_of(*[ratio] * 8) for ratio in (1.015, 0.99, 0.99)]
    assert figures.verdict(found, 0.5, 2.0) == []
    assert figures.verdict(found, 0.5, 1.0) == ["case: more than 1 % slower"]
    (mean,) = figures.means(found)
    assert mean.worst is found[0]
    assert mean.ratio == pytest.approx((1.015 * 0.99 * 0.99) ** (1 / 3))


@pytest.mark.parametrize("kind", ["src", "root", "tar", "bundle"])
def test_a_side_is_a_folder_an_archive_or_a_bundle(kind, tmp_path):
    package = tmp_path / "tree" / "src" / "heedful"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    root, scratch = tmp_path / "tree", tmp_path / "scratch"
    told = {"src": root / "src", "root": root}.get(kind, tmp_path / "base.tar.gz")
    if kind == "tar":
        with tarfile.open(told, "w:gz") as archive:
            archive.add(root / "src", "src")
    if kind == "bundle":
        told = tmp_path / "base.bundle"
        git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@example.org"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
            subprocess.run([*git, *command], check=True)
        subprocess.run([*git, "bundle", "create", "-q", str(told), "HEAD"], check=True)
    found = sources(str(told), scratch)
    assert (found / "heedful" / "__init__.py").exists()


def test_what_is_no_side_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must have heedful/"):
        sources(str(tmp_path), tmp_path / "scratch")
    with pytest.raises(ValueError, match="'no-commit' is no folder, archive, bundle or commit"):
        sources("no-commit", tmp_path / "scratch")


def test_unknown_tables_and_words_that_no_case_has_are_refused():
    with pytest.raises(ValueError, match="tables must be among forward, .*, got 'speed'"):
        cells(["speed"])
    with pytest.raises(ValueError, match="no case of cpu has 'd77'"):
        cells(["cpu"], "d77")
    with pytest.raises(SystemExit, match="needs --rounds >= 5"):
        main(["src", "src", "--rounds", "9", "--processes", "2"])


def test_names_of_cases_tell_them_apart():
    for table in set(TABLES) - {"steps"}:
        names = [cell.name for cell in cells([table])]
        assert len(names) == len(set(names)), table


def test_a_side_has_the_environment_that_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "callers")
    told = (
        "import json, os; input();"
        "print(json.dumps({name: os.environ[name] for name in ('HEEDFUL_TRITON', 'PYTHONPATH')}))"
    )
    settings = {"HEEDFUL_TRITON": "/apart", "PYTHONPATH": "triton"}
    with Side("new", tmp_path, "cpu", [sys.executable, "-c", told], settings) as side:
        found = side.ask("hello")
    assert found["HEEDFUL_TRITON"] == "/apart"
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert found["PYTHONPATH"].split(os.pathsep)[-1] == "triton"


@pytest.mark.parametrize("told", ["HEEDFUL_TRITON", "=x", ""])
def test_an_environment_that_is_no_name_and_value_is_refused(told):
    with pytest.raises(SystemExit, match="NAME=VALUE"):
        main(["src", "src", "--new-env", told])
