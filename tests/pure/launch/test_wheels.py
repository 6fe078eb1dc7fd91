"""Kernels that pip installed are found and used; a faulty wheel costs one warning and no more."""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import heedful
from heedful.core.base import installed
from heedful.core.base.installed import served_cuda
from heedful.launch import compiler
from heedful.launch.code import packs, wheels
from heedful.launch.code.cache import DiskCache
from heedful.launch.code.manifest import MANIFEST, WheelFacts
from support.artifacts import artifact
from support.packs import forget

FACTS = WheelFacts(heedful.__version__, "sm_90", 13)
BACKENDS = {"hopper": "3.9.0", "portable": "3.9.0"}
CLAIMS = frozenset({("hopper", (3, 9, 0)), ("portable", (3, 9, 0))})


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages on the path; nothing is known of wheels and packs yet."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, value in (("_looked", False), ("_current", None), ("_read", {})):
        monkeypatch.setattr(wheels, name, value)
    forget(monkeypatch)
    packs.load_default.cache_clear()
    monkeypatch.setattr(wheels, "served_cuda", lambda: 13)
    yield tmp_path
    packs.load_default.cache_clear()


def install(site, name=wheels.NAMES[0], facts=FACTS, **kernels):
    """A wheel of kernels "one" and "two", or of others."""
    folder = site / name
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('a wheel of kernels is data')\n")
    kernels = kernels or {"one": artifact(b"1"), "two": artifact(b"2")}
    packs.write_pack(folder, kernels, BACKENDS, facts)
    return folder


def test_an_installed_wheel_gives_its_kernels_and_says_what_they_are_planned_for(site):
    install(site)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert packs.has("one") and not packs.has("three")
        assert packs.find("one") == artifact(b"1") == packs.find("one")
        assert packs.find("three") is None
    assert packs.backends() == packs.backends("sm_90") == CLAIMS
    assert packs.backends("sm_80") == packs.backends("gfx950") == frozenset()


def test_without_a_wheel_nothing_is_said(site):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not packs.has("one") and packs.find("one") is None
        assert packs.backends() == frozenset()


def test_a_loaded_pack_comes_before_the_wheel(site, tmp_path):
    install(site)
    packs.write_pack(tmp_path / "pack", {"one": artifact(b"mine")}, {"hopper": "3.6.0"})
    packs.load_pack(tmp_path / "pack")
    assert packs.find("one") == artifact(b"mine") and packs.find("two") == artifact(b"2")
    assert packs.backends("sm_90") == {("hopper", (3, 6, 0)), ("portable", (3, 9, 0))}


def test_a_wheel_is_trusted_as_what_is_imported_is(site):
    """Site-packages that a group may write to hold heedful itself."""
    folder = install(site)
    folder.chmod(0o775)
    site.chmod(0o775)
    assert packs.find("one") == artifact(b"1")


def cut(folder):
    path = folder / "one.kernel"
    path.write_bytes(path.read_bytes()[:-1])


def changed(folder):
    path = folder / "one.kernel"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def gone(folder):
    (folder / "one.kernel").unlink()


@pytest.mark.parametrize("damage", [cut, changed, gone])
@pytest.mark.parametrize("ask", [packs.has, packs.find])
def test_a_damaged_kernel_ends_the_wheel_with_one_warning(site, damage, ask):
    folder = install(site)
    assert packs.backends("sm_90") == CLAIMS
    damage(folder)
    with pytest.warns(RuntimeWarning, match="heedful-kernels-sm90 are not used: .*one.kernel"):
        assert not ask("one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not packs.has("two") and packs.find("two") is None and not ask("one")
        assert packs.backends("sm_90") == frozenset()


def no_manifest(folder):
    (folder / MANIFEST).unlink()


def a_manifest_cut_short(folder):
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:200])


def newer_format(folder):
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


def no_wheel(folder):
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"wheel": None}))


def more_facts(folder):
    path = folder / MANIFEST
    told = json.loads(path.read_text())
    told["wheel"]["moon"] = "full"
    path.write_text(json.dumps(told))


def a_number_in_words(folder):
    path = folder / MANIFEST
    told = json.loads(path.read_text())
    told["wheel"]["cuda"] = "thirteen"
    path.write_text(json.dumps(told))


@pytest.mark.parametrize(
    "damage",
    [no_manifest, a_manifest_cut_short, newer_format, no_wheel, more_facts, a_number_in_words],
)
def test_a_wheel_without_a_good_manifest_is_left_out_with_one_warning(site, damage):
    damage(install(site))
    with pytest.warns(RuntimeWarning, match="not used: .*manifest.json") as said:
        assert not packs.has("one") and packs.find("one") is None
        assert packs.backends() == frozenset()
    assert len(said) == 1


@pytest.mark.parametrize("damage", [no_manifest, cut])
def test_where_warnings_are_errors_one_call_raises_and_others_go_on(site, damage):
    damage(install(site))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="heedful-kernels-sm90 are not used"):
            packs.has("one")
        assert not packs.has("one") and packs.find("one") is packs.find("two") is None
        assert packs.backends("sm_90") == frozenset()


def test_a_wheel_of_another_heedful_is_left_out(site):
    install(site, facts=replace(FACTS, heedful="9.9"))
    with pytest.warns(RuntimeWarning, match=f"of heedful 9.9, this is {heedful.__version__}"):
        assert packs.backends() == frozenset()


def test_an_older_driver_gets_the_wheel_that_it_serves(site, monkeypatch):
    install(site)
    monkeypatch.setattr(wheels, "served_cuda", lambda: 12)
    with pytest.warns(RuntimeWarning, match="need a driver of CUDA 13.*serves CUDA 12.*cu12"):
        assert packs.find("one") is None
    wheels._looked = False
    packs.load_default.cache_clear()
    install(site, wheels.NAMES[1], replace(FACTS, cuda=12), one=artifact(b"older"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert packs.find("one") == artifact(b"older")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_a_kernel_that_does_not_load_is_named_by_its_file_with_a_remedy(
    site, tmp_path, monkeypatch
):
    monkeypatch.setattr(compiler, "kernel_key", lambda call, arch: call)
    monkeypatch.setattr(compiler, "cache_key", lambda call, arch: f"{call}-cached")
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path / "cache"))
    folder = install(site)
    call: Any = "one"
    again = f"`pip install --force-reinstall heedful-kernels-sm90=={heedful.__version__}`"
    assert compiler.place(call, "sm_90") == f"It is {folder}/one.kernel: {again} installs it anew"
    packs.write_pack(tmp_path / "pack", {"one": artifact(b"1")}, BACKENDS)
    packs.load_pack(tmp_path / "pack")
    assert compiler.place(call, "sm_90").startswith(f"It is {tmp_path}/pack/one.kernel: make that")
    call = "three"
    assert packs.place(call) == ""
    assert "This process compiled it" in compiler.place(call, "sm_90")
    cache = DiskCache(tmp_path / "cache", 10**6, read_only=False)
    cache.get_or_make("three-cached", lambda: artifact(b"3"))
    file = tmp_path / "cache" / "kernels" / "three-cached.kernel"
    assert compiler.place(call, "sm_90").startswith(f"It is {file}: without that file")


def test_a_machine_without_a_driver_is_told_what_a_driver_would_load(site, monkeypatch):
    install(site)
    monkeypatch.setattr(wheels, "served_cuda", served_cuda)
    assert served_cuda() is None
    assert packs.backends("sm_90") == CLAIMS


@pytest.mark.parametrize(
    ("code", "number", "served"), [(0, 13020, 13), (0, 12990, 12), (3, 0, None)]
)
def test_the_cuda_that_a_driver_serves_is_asked_of_it(code, number, served, monkeypatch):
    def ask(into) -> int:
        into._obj.value = number
        return code

    libraries = {"libcuda.so.1": SimpleNamespace(cuDriverGetVersion=ask)}
    monkeypatch.setattr(installed.ctypes, "CDLL", libraries.__getitem__)
    assert served_cuda() == served


def test_without_a_driver_no_cuda_is_served(monkeypatch):
    monkeypatch.setattr(installed.ctypes, "CDLL", Mock(side_effect=OSError))
    assert served_cuda() is None


def test_a_folder_without_a_manifest_is_no_pack(site, tmp_path):
    folder = tmp_path / "empty"
    for made in (False, True):
        if made:
            folder.mkdir(mode=0o700)
        with pytest.raises(
            ValueError, match=f"^pack {folder} has no readable {MANIFEST}: .*No suc"
        ):
            packs.load_pack(folder)
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match=f"^pack {folder}: "):
        packs.load_pack(folder)
    assert packs.backends() == frozenset()
