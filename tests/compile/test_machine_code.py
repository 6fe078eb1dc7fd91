"""Records of machine code: equal whatever things are called, and told apart by what differs."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

import heedful
from machine_code import digests
from machine_code.__main__ import main
from machine_code.arrays import ARRAYS, FAMILIES
from machine_code.compare import differences
from machine_code.record import jobs, record, sampled

KERNEL = {
    "function": "forward",
    "code": "a",
    "order": "a",
    "opcodes": {"FADD": 2, "LDG": 1},
    "loop": {"FADD": 1},
    "registers": {"registers": 40},
    "spills": {"stack bytes": 8},
    "shared_bytes": 1024,
    "parameter_bytes": 64,
}
OTHER_CODE = {"code": "b"}
OTHER_ORDER = {**OTHER_CODE, "order": "b"}
OTHER_COUNTS = {**OTHER_ORDER, "opcodes": {"FADD": 3}, "loop": {"FADD": 2}}


def recorded(**kernels: dict) -> dict:
    """A record of problem 0 of an array."""
    return {"commit": "", "rows": {"sm_90/hopper/0": "plain"}, "kernels": kernels}


@pytest.mark.parametrize(
    ("changed", "verdict", "said"),
    [
        ({}, "same code", ()),
        (OTHER_CODE, "same order", ()),
        (OTHER_ORDER, "same counts", ()),
        (
            OTHER_COUNTS,
            "other counts",
            ("opcodes: 3 -> 3 (FADD +1, LDG -1)", "loop: 1 -> 2 (FADD +1)"),
        ),
        ({"spills": {"stack bytes": 0}}, "same code", ("spills: stack bytes 8 -> 0",)),
        ({"spills": {"stack bytes": 16}}, "same code", ("spills: stack bytes 8 -> 16",)),
        ({"registers": {"registers": 41}}, "same code", ("registers: registers 40 -> 41",)),
        ({"error": "CompileError: no"}, "error", ("after: CompileError: no",)),
    ],
    ids=str,
)
def test_what_differs_between_two_records_is_said(changed, verdict, said):
    before = recorded(**{"sm_90/hopper/0.0": KERNEL})
    (found,) = differences(before, recorded(**{"sm_90/hopper/0.0": {**KERNEL, **changed}}))
    assert (found.verdict, found.said) == (verdict, said)
    assert found.is_worse == ("error" in changed or changed.get("spills") == {"stack bytes": 16})
    assert found.is_loop_same == (changed is not OTHER_COUNTS and "error" not in changed)


def test_a_kernel_that_is_no_longer_launched_is_missing():
    (found,) = differences(recorded(**{"sm_90/hopper/0.0": KERNEL}), recorded())
    assert (found.verdict, found.is_worse) == ("missing", True)


def test_records_of_other_problems_are_refused():
    other = recorded() | {"rows": {"sm_90/hopper/0": "mask=causal"}}
    with pytest.raises(ValueError, match="different problems: sm_90/hopper"):
        differences(recorded(), other)


def test_a_problem_goes_by_its_values_and_not_by_its_number():
    before = {"commit": "", "rows": {"a/b/0": "plain", "a/b/1": "x=1"}}
    before["kernels"] = {"a/b/0.0": KERNEL, "a/b/1.0": {**KERNEL, "code": "of x"}}
    after = {"commit": "", "rows": {"a/b/0": "new", "a/b/4": "x=1"}}
    after["kernels"] = {"a/b/0.0": KERNEL, "a/b/4.0": {**KERNEL, "code": "of x"}}
    (found,) = differences(before, after)
    assert (found.key, found.verdict) == ("a/b/4.0", "same code")


def test_a_launch_that_is_new_leaves_the_others_as_they_are():
    first, second = (
        {**KERNEL, "code": code, "order": code, "opcodes": {code: 90}} for code in "xy"
    )
    row = "sm_90/hopper/0"
    before = recorded(**{f"{row}.0": first, f"{row}.1": second})
    changed = {**second, "code": "z", "opcodes": {"y": 89}}
    after = recorded(**{f"{row}.0": KERNEL, f"{row}.1": first, f"{row}.2": changed})
    verdicts = sorted(found.verdict for found in differences(before, after))
    assert verdicts == ["missing", "same code", "same order"]


@pytest.mark.parametrize(
    ("changed", "verdict", "said"),
    [
        ({}, "same code", ()),
        (OTHER_CODE, "same order", ()),
        (OTHER_ORDER, "same counts", ()),
        (
            {**OTHER_ORDER, "opcodes": {"FADD": 2, "LDG": 2}},
            "other counts",
            ("opcodes: 3 -> 4 (+1)",),
        ),
        (
            {**OTHER_ORDER, "opcodes": {"FADD": 1, "LDG": 2}},
            "other counts",
            ("opcodes: as many, others",),
        ),
        ({"shared_bytes": 512}, "same code", ("shared bytes 1024 -> 512",)),
        ({"spills": {"stack bytes": 16}}, "same code", ("spills: stack bytes 8 -> 16",)),
        ({"error": "Traceback\nCompileError: no"}, "error", ("after: CompileError: no",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kept", ["before", "both"])
def test_lines_of_a_record_say_the_same_but_for_single_opcodes(
    kept, changed, verdict, said, tmp_path
):
    row = "sm_90/hopper/0.0"
    sides = [recorded(**{row: KERNEL}), recorded(**{row: {**KERNEL, **changed}})]
    for number in range(1 if kept == "before" else 2):
        path = tmp_path / f"{number}.txt"
        path.write_text(digests.lines({**sides[number], "commit": "abc", "toolchain": ["3.9"]}))
        sides[number] = digests.read(path)
    assert sides[0]["commit"] == "abc"
    (found,) = differences(sides[0], sides[1])
    assert (found.verdict, found.said) == (verdict, said)
    assert found.function == "forward [plain]"


def test_a_line_that_is_no_kernels_is_refused(tmp_path):
    (tmp_path / "base.txt").write_text("# machine code\nsm_90 forward\n")
    with pytest.raises(ValueError, match="must have lines of kernels, got 'sm_90 forward'"):
        digests.read(tmp_path / "base.txt")


def test_a_sample_has_the_first_rows_and_some_of_the_others():
    numbers = [number for number, _ in sampled([{}] * 20, 6)]
    assert numbers[:3] == [0, 1, 2]
    assert len(set(numbers)) == 6
    assert max(numbers) > 10
    assert sampled([{"a": 1}, {"a": 2}], 5) == sampled([{"a": 1}, {"a": 2}], 0)


def test_families_name_every_array_once():
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(ARRAYS)
    with pytest.raises(SystemExit, match="families must be among forward, .*, got 'sm_90'"):
        main(["record", "out.json", "--families", "sm_90"])


# Text of each file, and its files, of a checkout with other names, as a move leaves them.
RENAMED = {
    "append_keys": "keys_by_another_name",
    "heedful.core.base.device": "heedful.core.facts.device",
    "heedful.launch.record": "heedful.launch.lists.entries",
    "bind import groups, portable_cache": (
        "bind import groups\nfrom heedful.launch.bind import caches as portable_cache"
    ),
    "bind import portable_cache": "bind import caches as portable_cache",
}
MOVED = {
    "core/base/device.py": "core/facts/device.py",
    "launch/record.py": "launch/lists/entries.py",
    "launch/bind/portable_cache.py": "launch/bind/caches.py",
}


def renamed(root: Path, folder: Path) -> Path:
    """A copy of the sources with other names."""
    copied = folder / "src" / "heedful"
    shutil.copytree(root / "heedful", copied, ignore=shutil.ignore_patterns("__pycache__"))
    for file in copied.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    for old, new in MOVED.items():
        (copied / new).parent.mkdir(exist_ok=True)
        (copied / old).rename(copied / new)
    return copied.parent


def test_a_kernel_by_another_name_in_a_module_elsewhere_is_the_same_code(tmp_path, capsys):
    root = Path(heedful.__file__).parents[1]
    wanted = [job for job in jobs(["append"], ["sm_90", "gfx942"]) if job["key"].endswith("/0")]
    wanted += [job for job in jobs(["combine"], ["sm_90"]) if job["key"].endswith("/0")]
    paths = []
    for name, sources in (("here", root), ("renamed", renamed(root, tmp_path))):
        found = record(sources, wanted, tmp_path / "cache", say=lambda line: None)
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(found))
    before, after = (json.loads(path.read_text()) for path in paths)
    assert [d.verdict for d in differences(before, after)] == ["same code"] * 3
    names = {k["function"] for k in after["kernels"].values()}
    assert names == {"keys_by_another_name", "combine_splits"}
    assert main(["compare", *map(str, paths)]) == 0
    assert "| gfx942/append | 1 |" in capsys.readouterr().out
