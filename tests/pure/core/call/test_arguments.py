"""The public functions fill Options and Operands by position, in the order of their fields."""

import ast
from pathlib import Path

import pytest

import heedful
from heedful.core.call.arguments import Options
from heedful.core.call.operands import Operands

API = Path(heedful.__file__).parent / "torch" / "api" / "attention.py"
FIELDS = {"Options": Options._fields, "Operands": Operands._fields}
# Positions that hold another name's value, or none.
OTHERS = {"kind", "return_max_logits"}


def by_position() -> list[tuple[str, list[ast.expr]]]:
    """What is made by position: its class, and the arguments."""
    found = []
    for node in ast.walk(ast.parse(API.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.IfExp) and node.args:
            assert isinstance(node.func.body, ast.Name)
            found.append((node.func.body.id, node.args))
    return found


@pytest.mark.parametrize(("made", "arguments"), by_position())
def test_arguments_by_position_are_named_as_their_fields(made, arguments):
    for field, argument in zip(FIELDS[made], arguments, strict=False):
        if isinstance(argument, ast.Name):
            assert argument.id == field
        else:
            is_absent = isinstance(argument, ast.Constant) and argument.value is None
            assert is_absent or field in OTHERS


def test_both_functions_fill_options_by_position_and_packed_calls_operands_too():
    assert sorted(made for made, _ in by_position()) == ["Operands", "Options", "Options"]
    for made, arguments in by_position():
        if made == "Options":
            assert len(arguments) == len(Options._fields)
