"""What modules say that they export, they have."""

import importlib
from pathlib import Path

import pytest

import heedful
from heedful import integrations

ROOT = Path(heedful.__file__).parent
SOURCES = [path for path in ROOT.rglob("*.py") if "__all__" in path.read_text()]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_exported_name_is_there(path):
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for framework in integrations.TESTED:
        if name.startswith(f"heedful.integrations.{framework}"):
            pytest.importorskip(framework)
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert module.__all__ and not [n for n in module.__all__ if not hasattr(module, n)]
