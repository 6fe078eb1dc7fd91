"""The tables of other people's objects: hashes, classes, errors."""

import numpy as np

from heedful.emulator import Finding
from objects import classes
from objects.__main__ import blob, merged
from objects.problems import Problem, forward
from objects.rows import ROWS


def _row(chip, text):
    return next(r for r in ROWS if r.chip == chip and text in r.file)


def _finding(kind, message, at="line 5: v_nop (+0x8)", other=""):
    return Finding(kind, message, at, 1, other=other)


def test_an_object_is_named_by_the_hash_that_git_gives_it():
    assert blob(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert blob(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_a_finding_has_the_class_of_the_first_rule_that_fits_and_is_open_without_one():
    causal, full = _row("gfx950", "bf16_causal"), _row("gfx950", "fwd_hd128_bf16.co")
    race = [_finding("lds-race", "a race")]
    assert [c.kind for c in classes.classify(causal, race)] == [classes.TIMING]
    assert [c.kind for c in classes.classify(full, race)] == [classes.OPEN]
    mask = _finding("wait-states", "scalar from a vector instruction read: x", "v_cndmask_b32 v1")
    carry = _finding("wait-states", "scalar from a vector instruction read: x", "v_addc_co_u32 v1")
    found = classes.classify(full, [mask, carry, mask])
    assert [(c.kind, c.count) for c in found] == [(classes.OURS, 2), (classes.OURS, 1)]


def test_findings_of_one_class_become_one_line():
    rows = _row("gfx950", "fwd_hd128_bf16.co"), _row("gfx942", "hd128_bf16_rtne.co")
    first = _finding("wait-states", "m0 read by a load to LDS: x", "line 9: B", "line 7: A (+0x4)")
    found = [c for row in rows for c in classes.classify(row, [first])]
    (line,) = (c.line() for c in merged(found))
    assert line[0] == classes.OURS and line[3] == "2" and line[4] == "A (+0x4); B"
    assert line[2] == "2, gfx950/fwd_hd128_bf16.co first"


def test_an_output_that_was_not_written_has_an_infinite_error():
    problem = forward("gfx950", [4], [4])
    assert all(np.isinf(error) for error, _ in problem.errors().values())
    x = np.ones(3)
    errors = Problem((1,), [], {"x": (x, "f32", np.array([1.0, 1.0, 2.0]), 0.5)}, 64).errors()
    assert errors["x"] == (float(np.sqrt(1 / 6)), 0.5)


def test_arguments_go_by_the_offsets_of_slots_of_16_bytes():
    problem = forward("gfx942", [5, 3], [4, 6], heads=2, group=True)
    given = problem.arguments()
    assert list(given)[:3] == ["@0", "@16", "@32"]
    assert list(given["@432"]) == [0, 5, 8] and list(given["@448"]) == [0, 4, 10]
    assert problem.grid == (2, 2, 1)
