"""Records of machine code: equal whatever things are called, and told apart by what differs."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

import heedful
from machine_code.__main__ import main
from machine_code.compare import differences
from machine_code.record import jobs, record

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
    with pytest.raises(ValueError, match="different problems: sm_90/hopper/0"):
        differences(recorded(), other)


def test_a_kernel_by_another_name_is_the_same_code(tmp_path, capsys):
    root = Path(heedful.__file__).parents[1]
    renamed = tmp_path / "renamed"
    shutil.copytree(root, renamed / "src", ignore=shutil.ignore_patterns("__pycache__"))
    names = {"append_keys": "keys_by_another_name"}
    for file in (renamed / "src" / "heedful").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for old, new in names.items():
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    wanted = [job for job in jobs(["append"], ["sm_90", "gfx942"]) if job["key"].endswith("/0")]
    paths = []
    for checkout in (root.parent, renamed):
        found = record(checkout, wanted, tmp_path / "cache", say=lambda line: None)
        paths.append(tmp_path / f"{checkout.name}.json")
        paths[-1].write_text(json.dumps(found))
    before, after = (json.loads(path.read_text()) for path in paths)
    assert [d.verdict for d in differences(before, after)] == ["same code"] * 2
    assert {k["function"] for k in after["kernels"].values()} == set(names.values())
    assert main(["compare", *map(str, paths)]) == 0
    assert "| gfx942/append | 1 |" in capsys.readouterr().out
