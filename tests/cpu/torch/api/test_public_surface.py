"""What users write against: public names, where they are imported from, their signatures, and the
operators' schemas, under whose names torch.compile keeps code on disk.

After a change that is meant:

    WRITE_GOLDEN_SURFACE=1 pytest tests/cpu/torch/api/test_public_surface.py
"""

import importlib
import inspect
import os
import re
from pathlib import Path

import torch

GOLDEN = Path(__file__).with_name("golden_surface.txt")
MODULES = ("heedful", "heedful.bert_padding", "heedful.emulator", "heedful.inspector")


def surface() -> list[str]:
    """One line for each public name and each operator."""
    lines = []
    for path in MODULES:
        module = importlib.import_module(path)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            kind = inspect.signature(value) if inspect.isfunction(value) else type(value).__name__
            lines.append(f"{path}.{name}: {kind}")
    schemas = torch._C._jit_get_all_schemas()
    return lines + sorted(f"torch.ops.{s}" for s in schemas if s.name.startswith("heedful::"))


def test_the_public_surface_is_as_it_was():
    got = surface()
    if os.environ.get("WRITE_GOLDEN_SURFACE") == "1":
        GOLDEN.write_text("\n".join(got) + "\n")
    assert got == GOLDEN.read_text().splitlines()


def test_names_for_pytorch_are_those_of_heedful_torch():
    package, module = importlib.import_module("heedful"), importlib.import_module("heedful.torch")
    assert set(module.__all__) == {n for n, m in package._PUBLIC.items() if m == module.__name__}
    for name in module.__all__:
        assert getattr(package, name) is getattr(module, name)


def test_operators_whose_code_calls_attention_have_its_number():
    """Else torch.compile's cache of an older heedful gives code that calls what is not there."""
    names = re.findall(r"^torch\.ops\.heedful::(\w+)_v(\d+)", GOLDEN.read_text(), re.MULTILINE)
    assert {name for name, _ in names} == {"attention", "inference", "prefixed_attention"}
    assert len({number for _, number in names}) == 1
