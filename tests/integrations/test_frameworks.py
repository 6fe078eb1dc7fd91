"""Frameworks that heedful plugs into: found without an import, named where they are missing."""

import importlib.util
import subprocess
import sys
import warnings

import pytest

from heedful import integrations

FRAMEWORKS = ("transformers", "diffusers", "vllm")


def test_nothing_is_imported_until_asked():
    code = (
        "import sys, heedful, heedful.integrations as i; found = i.installed(); "
        "names = 'torch', 'transformers', 'diffusers', 'vllm'; "
        "print(*(name for name in names if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_table_names_each_framework_with_its_version_and_range():
    found = {each.name: each for each in integrations.installed()}
    assert set(found) == set(integrations.TESTED) >= set(FRAMEWORKS)
    for name, each in found.items():
        assert (each.version is None) == (importlib.util.find_spec(name) is None)
        assert (each.first, each.last) == integrations.TESTED[name]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_that_is_not_installed_is_named_with_its_extra(name):
    code = (
        "import importlib.metadata as m, sys\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        f"sys.modules[{name!r}] = None\n"
        f"try: import heedful.integrations.{name}\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"needs {name}, which is not installed: pip install 'heedful[{name}]'" in done.stdout


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("5.16.1", False), ("5.17.0", True), ("5.24.3.dev0", True), ("5.25.0", False), (None, False)],
)
def test_versions_within_the_tested_range_are_known(version, is_tested):
    each = integrations.Framework("transformers", version, "5.17", "5.24", False)
    assert each.is_tested == is_tested


def test_a_version_out_of_the_tested_range_warns_once(monkeypatch):
    monkeypatch.setattr(integrations, "version", lambda name: "9.1.0")
    monkeypatch.setattr(integrations, "_warned", set())
    with pytest.warns(UserWarning, match="transformers 5.17 to 5.24, and this is 9.1.0"):
        integrations.check("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integrations.check("transformers")
