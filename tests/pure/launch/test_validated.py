"""The record of a validated machine: read back, refused from others, honoured by the planner."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

import heedful
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry import capability
from heedful.core.registry.capability import Toolchain, Variant
from heedful.launch import validations
from heedful.launch.code import identity

DEVICE = by_name("MI355X")
PROBLEM = AttentionProblem.dense(1, 512, 512, 8)
GATED = Variant(
    "gated", "forward", "", {"gfx950": "emulated"}, ("bfloat16",), frozenset(), by_default=False
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("HEEDFUL_CACHE_READ_ONLY", raising=False)
    validations._read.cache_clear()
    yield tmp_path
    validations._read.cache_clear()


def write():
    return validations.write(DEVICE, frozenset({"gated"}), "2026-11-20T00:00:00+00:00")


def test_a_machine_without_a_record_has_validated_nothing():
    assert validations.validated(DEVICE) == frozenset()


def test_a_record_is_read_back_by_the_process_that_wrote_it_and_by_others():
    assert validations.validated(DEVICE) == frozenset()
    path = write()
    assert validations.validated(DEVICE) == {"gated"}
    validations._read.cache_clear()
    assert validations.validated(DEVICE) == {"gated"}
    text = path.read_text()
    facts = json.loads(text)
    assert (facts["device"], facts["arch"]) == (DEVICE.name, DEVICE.arch)
    assert (facts["heedful"], facts["compiler"]) == (heedful.__version__, identity.toolchain())
    # One fact a line, for who reads it.
    assert f' "device": "{DEVICE.name}",' in text.splitlines()


@pytest.mark.parametrize("changed", [{"name": "MI355X VF"}, {"arch": "gfx942"}])
def test_a_record_speaks_for_no_other_device(changed):
    path, other = write(), replace(DEVICE, **changed)
    # Even where it lies at the other device's place.
    os.replace(path, validations.path_of(other))
    assert validations.validated(other) == frozenset()


@pytest.mark.parametrize("what", ["heedful", "sources", "compiler"])
def test_a_record_speaks_for_no_other_version(what):
    path = write()
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, what: "another"}))
    assert validations.validated(DEVICE) == frozenset()


def test_a_change_of_any_kernel_voids_the_record(monkeypatch):
    write()
    monkeypatch.setattr(identity, "all_kernels_digest", lambda: "another")
    validations._read.cache_clear()
    assert validations.validated(DEVICE) == frozenset()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode bits")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_record_in_a_folder_that_others_may_use_is_refused(mode):
    path = write()
    path.parent.chmod(mode)
    validations._read.cache_clear()
    assert validations.validated(DEVICE) == frozenset()
    with pytest.raises(PermissionError, match="mode"):
        write()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no user ids")
def test_a_record_in_a_folder_of_somebody_else_is_refused(monkeypatch):
    write()
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    validations._read.cache_clear()
    assert validations.validated(DEVICE) == frozenset()


def test_a_damaged_record_is_no_record():
    write().write_text('{"device": ')
    assert validations.validated(DEVICE) == frozenset()


def test_a_read_only_cache_is_not_written(monkeypatch):
    monkeypatch.setenv("HEEDFUL_CACHE_READ_ONLY", "1")
    with pytest.raises(PermissionError, match="READ_ONLY"):
        write()
    assert not validations.path_of(DEVICE).exists()


def test_the_planner_takes_a_gated_kernel_unasked_only_where_it_was_validated(monkeypatch):
    monkeypatch.setattr(capability, "VARIANTS", (GATED, *capability.VARIANTS))
    assert plan(PROBLEM, DEVICE, Toolchain()).backend == "portable"
    assert plan(PROBLEM, DEVICE).backend == "portable"
    validated = Toolchain(validated=frozenset({"gated"}))
    assert plan(PROBLEM, DEVICE, validated).backend == "gated"
    # Validated or not, what a kernel does not take it does not get.
    causal = AttentionProblem.dense(1, 512, 512, 8, causal=True)
    assert plan(causal, DEVICE, validated).backend == "portable"


def test_a_record_is_removed_unless_the_cache_is_only_read(monkeypatch):
    path = write()
    monkeypatch.setenv("HEEDFUL_CACHE_READ_ONLY", "1")
    validations.remove(DEVICE)
    assert path.exists() and validations.validated(DEVICE) == {"gated"}
    monkeypatch.delenv("HEEDFUL_CACHE_READ_ONLY")
    validations.remove(DEVICE)
    assert not path.exists() and validations.validated(DEVICE) == frozenset()
    # Nor does it matter that there is none any more.
    validations.remove(DEVICE)
    path.parent.rmdir()
    validations.remove(DEVICE)


def test_without_a_home_nothing_is_validated_and_a_record_says_what_is_missing(monkeypatch):
    get = validations.settings.get
    nowhere = lambda name: None if name == "cache_dir" else get(name)  # noqa: E731
    monkeypatch.setattr(validations.settings, "get", nowhere)
    assert validations.validated(DEVICE) == frozenset()
    validations.remove(DEVICE)
    with pytest.raises(FileNotFoundError, match="no home folder: set HEEDFUL_CACHE_DIR"):
        write()


def test_a_record_is_read_once_in_a_process_and_by_device():
    path = write()
    assert validations.validated(DEVICE) == {"gated"}
    assert path.parent.name == "validated"
    assert re.fullmatch(rf"{DEVICE.arch}-[0-9a-f]{{16}}\.json", path.name)
    path.unlink()
    assert validations.validated(DEVICE) == {"gated"}
    validations._read.cache_clear()
    assert validations.validated(DEVICE) == frozenset()
    others = [replace(DEVICE, name="MI355X VF"), replace(DEVICE, arch="gfx942")]
    assert len({validations.path_of(device) for device in (DEVICE, *others)}) == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda facts: facts.pop("backends"), "is not readable: 'backends'"),
        (lambda facts: facts.pop("arch"), "is not readable: 'arch'"),
        (lambda facts: facts.update(backends=3), "is not readable: "),
        (lambda facts: facts.update(heedful="0.0"), ""),
    ],
)
def test_a_record_that_lacks_a_fact_is_told_and_not_used(changed, said, caplog):
    path = write()
    facts = json.loads(path.read_text())
    changed(facts)
    path.write_text(json.dumps(facts))
    with caplog.at_level("WARNING", logger="heedful.validation"):
        assert validations.validated(DEVICE) == frozenset()
    assert (said in caplog.text and str(path) in caplog.text) if said else not caplog.text


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_a_record_that_is_removed_as_it_is_read_is_none(gone, monkeypatch):
    path = write()
    path.unlink()
    if gone == "folder":
        path.parent.rmdir()
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert validations.validated(DEVICE) == frozenset()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode bits")
def test_a_record_that_is_not_trusted_is_told(caplog):
    path = write()
    path.parent.chmod(0o777)
    validations._read.cache_clear()
    with caplog.at_level("WARNING", logger="heedful.validation"):
        assert validations.validated(DEVICE) == frozenset()
    assert [record.name for record in caplog.records] == ["heedful.validation"]
    assert "the record of validation is not used: " in caplog.text and "mode" in caplog.text
