"""The plug-in's classes have the interface of the recorded release: see tools/record_vllm.py."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from heedful import integrations
from support.integrations import vllm_stub
from support.integrations.vllm_stub import RECORDING, marks, signature

MODULES = RECORDING["modules"]
CLASSES = {name: facts for names in MODULES.values() for name, facts in names.items()}
PACKAGE = Path(integrations.__file__).parent / "vllm"
# Each class of ours.
OURS = {
    "backend": ["HeedfulBackend", "HeedfulImpl", "HeedfulMetadata", "HeedfulMetadataBuilder"],
    "mla": ["HeedfulMLABackend", "HeedfulMLABuilder", "HeedfulMLAImpl", "HeedfulMLAPrefill"],
}
EACH = [(module, name) for module, names in OURS.items() for name in names]


def ours(module: str, name: str) -> type:
    return getattr(importlib.import_module(f"{vllm_stub.OURS}.{module}"), name)


def members(made: type) -> dict:
    """What it and its bases of ours have."""
    classes = [each for each in made.__mro__ if each.__module__.startswith(vllm_stub.OURS)]
    return {name: member for each in reversed(classes) for name, member in vars(each).items()}


def recorded(made: type) -> list[dict]:
    """What is recorded of its bases, the nearest first."""
    return [CLASSES[base.__name__] for base in made.__mro__[1:] if base.__name__ in CLASSES]


def theirs(made: type, name: str) -> str | None:
    """The nearest recorded method of this name."""
    found = (facts.get("methods", {}).get(name) for facts in recorded(made))
    return next((text for text in found if text is not None), None)


@pytest.mark.parametrize(("module", "name"), EACH)
def test_methods_have_the_recorded_parameters(module, name):
    made = ours(module, name)
    checked = 0
    for method, own in members(made).items():
        text = theirs(made, method)
        if text is None or method in ("__new__", "__doc__", "__module__"):
            continue
        plain = inspect.signature(getattr(own, "__func__", own))
        given = [p for p in plain.parameters.values() if p.kind != p.VAR_KEYWORD]
        wanted = [*signature(text).parameters.values()]
        takes_more = len(given) < len(plain.parameters)
        names, others = ([p.name for p in each] for each in (given, wanted))
        assert names[: len(wanted)] == others[: len(given)], text
        assert takes_more or len(given) >= len(wanted), text
        for one, other in zip(given, wanted, strict=False):
            assert (one.default is one.empty) == (other.default is other.empty), (method, one)
            if other.default not in (other.empty, ...):
                assert one.default == other.default, (method, one)
        # Those that come on top may be left out.
        assert all(p.default is not p.empty for p in given[len(wanted) :]), method
        kinds = {"staticmethod": staticmethod, "classmethod": classmethod}
        for mark, kind in kinds.items():
            assert isinstance(own, kind) == (mark in marks(text)), method
        checked += 1
    assert checked or name == "HeedfulMetadata" or name == "HeedfulMLABuilder"


@pytest.mark.parametrize(("module", "name"), EACH)
def test_nothing_abstract_is_left_and_attributes_are_known(module, name):
    made = ours(module, name)
    assert not getattr(made, "__abstractmethods__", ())
    known = {x for facts in recorded(made) for x in facts.get("attributes", {})}
    own = {n for n, x in members(made).items() if not callable(x) and not hasattr(x, "__func__")}
    of_a_class = {n for n in own if n[:1] != "_" or n == "_cudagraph_support"}
    if name != "HeedfulMetadata":
        assert of_a_class <= known


def test_all_that_is_imported_from_vllm_is_recorded():
    found = []
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm"):
                found += [(node.module, alias.name) for alias in node.names]
            if isinstance(node, ast.Import):
                found += [(a.name, None) for a in node.names if a.name.startswith("vllm")]
    assert len(found) > 15
    for module, name in found:
        assert module in MODULES and (name is None or name in MODULES[module]), (module, name)


def test_the_release_is_the_one_that_is_tested():
    first, last = integrations.TESTED["vllm"]
    assert RECORDING["version"].startswith(f"{first}.") and first == last


def test_metadata_takes_all_fields_that_it_reads(vllm):
    source = (PACKAGE / "backend.py").read_text()
    fields = CLASSES["CommonAttentionMetadata"]["fields"]
    read = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "batch"
    }
    own = set(ours("backend", "HeedfulMetadata").__dataclass_fields__)  # pyright: ignore
    assert read - own <= set(fields) and {"seq_lens", "block_table_tensor"} <= read
