"""The mutation tool plants what its operators say and draws fair samples."""

import json
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from mutation.__main__ import equivalents
from mutation.covering import Choice, Map, Traced
from mutation.mutants import mutants, parses, sample
from mutation.server import Chosen

ROOT = Path(__file__).parents[3]

EACH = {
    "a = b < c": {"a = b <= c", "a = b >= c"},
    "a = (b) is not (c)": {"a = (b) is (c)"},
    "a = b not in c": {"a = b in c"},
    "a = b and c or d": {"a = b or c or d", "a = b and c and d"},
    "a = b + c": {"a = b - c"},
    "a = 7": {"a = 8", "a = 6"},
    "a = 0.0": {"a = 1.0"},
    "a = True": {"a = False"},
    "a = 'x'": {"a = 'x_'"},
    "a = 'a message'": set(),
    "a.b = c": {"pass"},
    "a += b": {"pass", "a = b"},
    "f(a, b, c=d)": {"pass", "f(b, a, c=d)", "f(a, b)"},
    "f(a, *b)": {"pass"},
    "log.warning('x', a)": set(),
    "a = not b": {"a = b"},
    "a = -b": {"a = b"},
    "a = b[c:d]": {"a = b[:d]", "a = b[c:]"},
    "a = min(b, c)": {"a = max(b, c)"},
    "a = b.transpose(c, d)": set(),
    "a = larger(b, c)": set(),
    "a = default_rng(0).normal(b)": set(),
    "a = str.__eq__(b, c)": set(),
    "a = promote_types(b, c)": set(),
    "a = zip(b, c, strict=True)": {"a = zip(c, b, strict=True)"},
    "a = maximum(b, c) or minimum(b, c)": {"a = maximum(b, c) and minimum(b, c)"},
    "a = [b for b in c if d]": {"a = [b for b in c if (not (d))]"},
    "if a == b:\n    c": {"if a != b:\n    c"},
    "if a:\n    raise B": {"if (not (a)):\n    raise B", "if a:\n    pass"},
    "def f():\n    return a": {"def f():\n    return None"},
    "def f(a: int | None = 3) -> str | None:\n    'text'": {
        f"def f(a: int | None = {n}) -> str | None:\n    'text'" for n in (2, 4)
    },
    "@f(1)\nclass A:\n    'x'\n    b: int = c": set(),
    "a = f'{b + c}'": set(),
    "a = TypeVar('b', bound=c)": set(),
}


@pytest.mark.parametrize("source", EACH)
def test_an_operator_makes_these_mutants_and_no_other(source):
    assert {m.apply(source) for m in mutants("m", source)} == EACH[source]


def test_in_kernels_a_load_does_not_lose_the_0_that_the_interpreter_gives_in_any_case():
    source = "a = tl.load(b, other=0.0)\nc = tl.load(d, other=inf)"
    for module, count in (("src/heedful/kernels/portable/x.py", 1), ("src/heedful/core/x.py", 2)):
        changed = [
            m for m in mutants(module, source) if "other" not in m.text and m.operator == "argument"
        ]
        assert len(changed) == count
        assert any(m.operator == "constant" for m in mutants(module, source))


def test_a_mutant_knows_the_lines_that_run_it_and_its_change():
    source = "def f(a):\n    return g(\n        a,\n        1,\n    )\n"
    (mutant,) = (m for m in mutants("m", source) if m.text == "2")
    assert (mutant.function, mutant.lines(source)) == ("f", {2, 4})
    assert mutant.change(source) == ("1,", "2,")


def test_a_mutant_knows_whether_importing_runs_it():
    """What classes hold and defaults do, too."""
    source = "A = 1\nclass C:\n    b = 1\n    def f(self, c=1):\n        return 1\n    d = 1\n"
    at_import = {m.line: m.at_import for m in mutants("m", source) if m.operator == "constant"}
    assert at_import == {1: True, 3: True, 4: True, 5: False, 6: True}


def test_a_sample_is_of_every_module_and_the_same_for_a_seed():
    sources = {
        str(path): path.read_text() for path in sorted((ROOT / "src/heedful/core").rglob("*.py"))
    }
    drawn = sample(sources, 60, 3)
    assert len(drawn) == 60 and drawn == sample(sources, 60, 3) != sample(sources, 60, 4)
    counts = Counter(mutant.module for mutant in drawn)
    assert set(counts) == {name for name, source in sources.items() if mutants(name, source)}
    assert all(parses(mutant.apply(sources[mutant.module])) for mutant in drawn)
    assert len({(m.module, m.site) for m in drawn}) == 60


def test_tests_that_run_the_lines_come_first_and_unlike_ones_early():
    def made(name, seconds, line):
        return Traced("plain", name, seconds, {"m": frozenset({line})})

    tests = [made("a::slow", 2.0, 5), made("a::fast", 1.0, 5), made("b::fast", 3.0, 5)]
    tests += [made("c::elsewhere", 0.1, 9), made("d::endless", 99.0, 5)]
    chosen, exact = Choice(tests).tests("m", {4, 5}, 20.0)
    assert [test.id for test in chosen] == ["a::fast", "b::fast", "a::slow", "c::elsewhere"]
    assert exact == 3


def test_tests_that_run_lines_close_by_come_before_others_of_the_module():
    def made(name, line):
        return Traced("plain", name, 1.0, {"m": frozenset({line})})

    tests = [made("a::far", 90), made("b::close", 40), made("c::exact", 50)]
    chosen, exact = Choice(tests).tests("m", {50}, 20.0)
    assert [test.id for test in chosen] == ["c::exact", "b::close", "a::far"] and exact == 1


def test_where_time_is_short_the_fastest_of_those_that_run_the_lines_are_run():
    def made(name, seconds):
        return Traced("plain", name, seconds, {"m": frozenset({5})})

    tests = [made(f"{file}::slow", 4.0) for file in "abc"]
    tests += [made(f"d::{n:02d}", 0.1) for n in range(30)]
    chosen, _ = Choice(tests).tests("m", {5}, 10.0)
    assert len([test for test in chosen if test.file == "d"]) == 30
    assert [test.id for test in chosen][:2] == ["d::00", "a::slow"]


def test_what_runs_at_import_is_tested_by_tests_of_little_else_first():
    def made(name, *others, mine=1):
        lines = {"m": frozenset(range(mine)), "n": frozenset(range(*others))}
        return Traced("plain", name, 1.0, lines)

    tests = [made(f"{file}::all", 1000) for file in "abcdef"] + [made("f::own", 3, mine=30)]
    chosen, exact = Choice(tests).tests("m", {900}, 4.0, wide=True)
    assert exact == 0 and [test.id for test in chosen][0] == "f::own"


def test_a_module_that_runs_at_import_alone_is_tested_by_its_folders_tests():
    lines = {"a/m.py": frozenset({1}), "b/n.py": frozenset({1})}
    tests = [Traced("plain", f"{name[0]}::own", 1.0, {name: on}) for name, on in lines.items()]
    chosen, exact = Choice(tests).tests("a/private.py", {3}, 4.0)
    assert [test.id for test in chosen] == ["a::own"] and exact == 0


def test_what_runs_at_import_is_tested_by_files_that_import_it_before_those_that_hold_its_letters():
    texts = {f"{n}.py": "calls run, and runs" for n in range(40)}
    texts |= {"u.py": "from a.b.run import X\n", "v.py": "from a.b import base, run\n"}
    texts["w.py"] = "from a.b.c import run\n"
    tests = [Traced("plain", f"{file}::t", 1.0, {}) for file in texts]
    tests += [Traced("plain", f"w.py::{n}", 1.0, {"src/a/b/run.py": frozenset({9})}) for n in "xyz"]
    for line in (3, 9):
        chosen, _ = Choice(tests, texts).tests("src/a/b/run.py", {line}, 2.0, wide=True)
        assert {"u.py::t", "v.py::t"} <= {test.id for test in chosen[:5]}


class Serves:
    """A test server that runs one test a file, and ends once as many others run as are expected."""

    def __init__(self, barrier: threading.Barrier):
        self._barrier = barrier

    def run(self, tree: Path, tests: list[str], seconds: float, trace: Path) -> dict:
        (file,) = tests
        trace.write_text(json.dumps({"tests": {file: {"seconds": 0, "lines": {}}}, "failed": []}))
        self._barrier.wait(10)
        return {"code": 0}


def test_entries_of_the_map_that_are_made_at_the_same_time_stay_apart(tmp_path):
    files = [f"tests/pure/test_{i}.py" for i in range(4)]
    (tmp_path / "tests/pure").mkdir(parents=True)
    for file in files:
        (tmp_path / file).write_text("")
    kept, server = Map(tmp_path), Serves(threading.Barrier(len(files)))
    makes = [partial(kept.make, server, "plain", file, tmp_path, 1) for file in files]
    threads = [threading.Thread(target=make) for make in makes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        entry = tmp_path / "map" / f"plain-{file.replace('/', '.')}.json"
        assert list(json.loads(entry.read_text())["tests"]) == [file]


def test_chosen_tests_run_in_their_order_and_a_case_of_another_name_as_all_of_its_test():
    """A planted bug that changes what a case is called is not noticed by that."""
    names = ("one[1]", "one[2]", "two", "six")
    items = [SimpleNamespace(nodeid=f"a.py::{name}") for name in names]
    chosen = Chosen(["a.py::two", "a.py::one[3]", "a.py::gone"])
    chosen.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["a.py::two", "a.py::one[1]", "a.py::one[2]"]


def test_a_chosen_file_runs_all_of_its_tests():
    """As one does that has no entry in the map."""
    names = ("a.py::one[1]", "b.py::two", "b.py::one[1]", "c.py::one")
    items = [SimpleNamespace(nodeid=name) for name in names]
    Chosen(["b.py", "a.py::one[1]"]).pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["b.py::two", "b.py::one[1]", "a.py::one[1]"]


def test_each_equivalent_mutant_is_still_one_of_the_sources():
    stale = dict(equivalents())
    for module in {key[0] for key in stale}:
        source = (ROOT / module).read_text()
        for mutant in mutants(module, source):
            stale.pop((module, mutant.function, *mutant.change(source)), None)
    assert not stale
