"""Code that is written at run time is evaluated in one file, and can be read."""

import re
from pathlib import Path

import pytest

import heedful
from heedful.core.base import evaluated
from heedful.core.base.symbols import Trace

ROOT = Path(heedful.__file__).parent


def test_a_function_sees_its_scope_alone_and_keeps_its_text():
    made = evaluated.function("a, b", ["c = a + three", "return c * b"], {"three": 3})
    assert made(1, 2) == 8
    assert evaluated.source(made) == ("def made(a, b):\n    c = a + three\n    return c * b")
    with pytest.raises(NameError):
        evaluated.function("", ["return evaluated"], {})()
    with pytest.raises(AttributeError):
        evaluated.source(len)


def test_each_function_is_printed_where_the_log_says_so(caplog):
    with caplog.at_level("DEBUG", logger="heedful.evaluated"):
        evaluated.function("a", ["return a"], {})
    assert caplog.messages == ["def made(a):\n    return a"]


def test_an_expression_is_its_value():
    scope = {"twice": lambda n: 2 * n}
    assert evaluated.value("twice(4) + 1", scope) == 9 and [*scope] == ["twice"]


def test_the_function_of_a_case_can_be_printed():
    trace = Trace()
    (length,) = trace.symbols([700])
    assert length > 64
    text = evaluated.source(trace.function([-(-length // 128)]))
    assert "if i0 <= 64: return None" in text and "// 128" in text


def test_no_other_file_evaluates_code():
    evaluates = re.compile(r"(?<![\w.])(eval|exec)\(")
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if evaluates.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"core/base/evaluated.py"}
