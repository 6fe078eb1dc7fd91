"""No tensor is made in what dtype or on what device happens to be the default."""

import ast
from pathlib import Path

import pytest

import heedful

ROOT = Path(heedful.__file__).parent
PARTS = ("torch", "cpu", "integrations", "masks")
FILES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))
# Tensors whose values say their dtype, on a device that is told.
PLACED = ("bench", "distributed", "validation")
# Problems are drawn where torch draws by default, and are moved then.
DRAWN = ROOT / "validation/grid.py"
PLACED_FILES = sorted({p for part in PLACED for p in (ROOT / part).rglob("*.py")} - {DRAWN})
# torch functions that take both from the defaults unless they are told.
FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
)
# Integers, whatever the default is: of int64.
INTEGERS = ("torch.arange", "torch.randint", "torch.randperm")


def unsaid(source: str) -> list[str]:
    """Calls of factories that leave something to the defaults, as "line: function without what"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            for called, given in _factories(node):
                wanted = {"device"} if called in INTEGERS else {"dtype", "device"}
                missing = wanted - given
                found += [f"{node.lineno}: {called} without {what}" for what in sorted(missing)]
    return found


def _factories(call: ast.Call) -> list[tuple[str, set]]:
    """The factory that is called, or that a call of on_own_thread or partial passes on."""
    keywords = {keyword.arg for keyword in call.keywords}
    names = [ast.unparse(node) for node in (call.func, *call.args[:1])]
    return [
        (name, keywords)
        for name in names
        if name.startswith("torch.") and name.removeprefix("torch.") in FACTORIES
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_new_tensor_says_its_dtype_and_device(path):
    assert unsaid(path.read_text()) == []


@pytest.mark.parametrize("path", PLACED_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_new_tensor_lies_where_it_says(path):
    assert [words for words in unsaid(path.read_text()) if words.endswith("device")] == []


def test_what_is_left_unsaid_is_found():
    source = """
torch.zeros(3)
torch.full((2,), 1.0, dtype=torch.float32)
partial(torch.empty, (3,), device=device)
torch.arange(3, dtype=torch.int64, device="cpu")
torch.zeros_like(x)
torch.arange(3)
"""
    assert unsaid(source) == [
        "2: torch.zeros without device",
        "2: torch.zeros without dtype",
        "3: torch.full without device",
        "4: torch.empty without dtype",
        "7: torch.arange without device",
    ]
