"""The mutation tool where there is no repository and packages are found by path, and its map from
a file."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mutation.__main__ import Hubs, Proof, Result, Worker, table
from mutation.covering import Choice, Map
from mutation.mutants import mutants
from mutation.server import GROUP, Hub, in_groups
from mutation.trees import Trees, listed

TOOLS = Path(__file__).parents[3] / "tools"
FINDS = "def test_finds():\n    import {0}\n    assert {0}.WHOSE == '{1}'\n"
FINDS_BY_PATH = FINDS.format("by_path", "away")
# In a process of its own.
STARTS = """
def test_starts():
    import subprocess, sys
    code = "import by_path, heedful_like; assert heedful_like.WHOSE == 'tree'"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def written(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="runs of tests are forks")
def test_a_run_and_what_it_starts_find_the_callers_packages_after_the_trees(tmp_path, monkeypatch):
    """As of a Triton that lies in a folder, and of a project that is not installed."""
    root, tree, away = (tmp_path / name for name in ("root", "root/copy", "away"))
    written(away, by_path_py="WHOSE = 'away'\n", json_like_py="WHOSE = 'away'\n")
    written(root, src__heedful_like_py="WHOSE = 'root'\n")
    written(tree, src__heedful_like_py="WHOSE = 'tree'\n")
    written(tree, tests__test_a_py=FINDS_BY_PATH + STARTS)
    written(tree, tests__test_b_py=FINDS.format("heedful_like", "tree"))
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", f"src:{away}")
    hub = Hub("plain", tmp_path / "cache", preloaded=())
    server, other = hub.connect(), hub.connect()
    try:
        ids = ["tests/test_a.py::test_finds", "tests/test_a.py::test_starts"]
        ids += ["tests/test_b.py::test_finds"]
        answer = server.run(tree, ids, 60.0)
    finally:
        again = other.run(tree, ids[:1], 60.0)
        server.close()
        other.close()
        hub.close()
    assert answer["code"] == 0, answer["output"]
    assert "3 passed" in answer["output"] and again["code"] == 0


# A test that fails by itself, one that the tree passes and one in a process of its own.
JUDGES = """
import subprocess, sys
from m import value

def test_fails_by_itself():
    assert value() == 2

def test_notices():
    assert value() == 1

def test_starts():
    code = "import m; assert m.other() == 5"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
MODULE = (
    "def value():\n    return 1\n\n\ndef other():\n    return 5\n\n\ndef loose():\n    return 7\n"
)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A worker, and the map of its tree."""
    folder = tmp_path_factory.mktemp("judged")
    tree, file = folder / "tree", "tests/pure/test_m.py"
    written(tree, src__m_py=MODULE, tests__pure__test_m_py=JUDGES)
    hubs = Hubs(folder / "cache", preloaded=())
    worker, kept = Worker(tree, hubs, Proof()), Map(folder)
    kept.make(worker.server("plain"), "plain", file, tree, 60.0)
    yield worker, kept.tests(tree)
    worker.close()
    hubs.close()


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="runs of tests are forks")
def test_the_map_holds_what_started_processes_run_and_no_test_that_fails(judged):
    worker, tests = judged
    name = "tests/pure/test_m.py::test_"
    assert {test.id: set(test.lines.get("src/m.py", ())) for test in tests} == {
        name + "notices": {2},
        # The whole module is imported there.
        name + "starts": {1, 5, 6, 9},
    }


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="runs of tests are forks")
def test_a_mutant_is_noticed_only_by_a_test_that_passes_without_it(judged):
    worker, tests = judged
    # As by a map of a machine on which it passed.
    broken = replace(tests[0], id="tests/pure/test_m.py::test_fails_by_itself", seconds=0.0)
    choice = Choice([broken, *tests])
    found = {
        mutant.line: worker.judge(mutant, choice, 60.0)
        for mutant in mutants("src/m.py", MODULE)
        if mutant.text in ("0", "4", "6")
    }
    assert {line: result.fate for line, result in found.items()} == {
        2: "killed",
        6: "killed",
        10: "survived",
    }
    assert "test_notices" in found[2].by and "test_starts" in found[6].by
    assert (worker.tree / "src/m.py").read_text() == MODULE


def test_few_files_are_collected_before_many():
    names = [f"{file}.py::{test}" for test in (1, 2) for file in range(9)]
    groups = in_groups(names)
    assert [name for group in groups for name in group] == names
    files = [len({name.split("::")[0] for name in group}) for group in groups]
    assert files == [GROUP, 2 * GROUP, 9]


def test_without_a_repository_files_are_those_of_a_walk(tmp_path):
    """What is made beside them is none."""
    written(tmp_path, src__a_py="", tests__test_a_py="", README="")
    wanted = [Path("README"), Path("src/a.py"), Path("tests/test_a.py")]
    for made in ("src/__pycache__/a.pyc", ".mutation/trees/0/src/a.py", ".venv/lib/b.py"):
        (tmp_path / made).parent.mkdir(parents=True)
        (tmp_path / made).write_text("")
    (tmp_path / ".github").mkdir()
    (tmp_path / ".github" / "ci.yml").write_text("")
    assert listed(tmp_path) == [Path(".github/ci.yml"), *wanted]


def test_in_a_repository_files_are_those_that_git_does_not_ignore(tmp_path):
    written(tmp_path, src__a_py="", out__b_py="")
    (tmp_path / ".gitignore").write_text("/out/\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert listed(tmp_path) == [Path(".gitignore"), Path("src/a.py")]


def test_copies_are_alike_and_leave_out_what_is_gone(tmp_path):
    root = tmp_path / "root"
    written(root, src__a_py="a = 1\n", tests__test_a_py="")
    folders = [tmp_path / "trees" / str(i) for i in range(3)]
    written(folders[1], src__gone_py="")
    Trees(folders).copy(root)
    for folder in folders:
        assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.py")) == [
            "src/a.py",
            "tests/test_a.py",
        ]
        assert list(folder.rglob("a.*.pyc"))


def test_a_map_is_the_same_from_its_file(tmp_path):
    tree, file = tmp_path / "tree", "tests/pure/test_a.py"
    written(tree, src__a_py="a = 1\n", tests__pure__test_a_py="")

    class Traces:
        def run(self, tree, tests, seconds, trace):
            lines = {f"{file}::t": {"seconds": 0.5, "lines": {"src/a.py": [1]}}}
            trace.write_text(json.dumps({"tests": lines, "failed": []}))
            return {"code": 0}

    made, loaded = Map(tmp_path / "one"), Map(tmp_path / "two")
    made.make(Traces(), "plain", file, tree, 1.0)
    made.save(tmp_path / "map.tar.xz")
    loaded.load(tmp_path / "map.tar.xz")
    assert loaded.tests(tree) == made.tests(tree) != []
    assert loaded.stale(tree) == []


def test_a_test_that_its_tracer_makes_slow_is_in_the_map_with_its_usual_time(tmp_path):
    """The golden table of plans takes 5 s, 43 with a tracer: too slow a test to notice anything."""
    tree, file = tmp_path / "tree", "tests/pure/test_a.py"
    written(tree, src__a_py="a = 1\n", tests__pure__test_a_py="")

    class Traces:
        def run(self, tree, tests, seconds, trace=None):
            if trace is None:
                assert tests != [f"{file}::quick"]
                return {"code": int(tests == [f"{file}::fails"]), "seconds": 4.0}
            traced = {"slow": 43.0, "quick": 0.5, "fails": 29.0}
            entries = {
                f"{file}::{name}": {"seconds": taken, "lines": {"src/a.py": [1]}}
                for name, taken in traced.items()
            }
            trace.write_text(json.dumps({"tests": entries, "failed": []}))
            return {"code": 0}

    made = Map(tmp_path / "map")
    made.make(Traces(), "plain", file, tree, 1.0)
    assert {test.id.split("::")[1]: test.seconds for test in made.tests(tree)} == {
        "slow": 4.0,
        "quick": 0.5,
        "fails": 29.0,
    }


def test_a_file_that_is_no_map_is_refused_and_nothing_of_it_kept(tmp_path):
    outside = tmp_path / "other.tar"
    (tmp_path / "evil").write_text("")
    subprocess.run(["tar", "cf", outside, "-C", tmp_path, "evil"], check=True)
    with pytest.raises(ValueError, match="evil"):
        Map(tmp_path / "map").load(outside)
    assert not (tmp_path / "map" / "evil").exists()


def test_the_table_counts_what_was_noticed_of_each_module():
    found = mutants("src/heedful/a.py", "a = 1\n") + mutants("src/heedful/b.py", "b = c + d\n")
    fates = ("killed", "survived", "equivalent")
    results = [Result(mutant, fate) for mutant, fate in zip(found, fates, strict=True)]
    assert [line.split() for line in table(results).splitlines()] == [
        ["module", "drawn", "noticed", "missed", "equivalent"],
        ["a.py", "2", "1", "1", "0"],
        ["b.py", "1", "0", "0", "1"],
        ["all", "3", "1", "1", "1"],
    ]


def test_the_tools_start_where_python_finds_them_by_path_alone(tmp_path):
    command = [sys.executable, "-m", "mutation", "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(TOOLS)}, capture_output=True, text=True
    )
    assert "--map" in done.stdout and done.returncode == 0, done.stderr
