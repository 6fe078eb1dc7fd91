"""One word, one meaning: what the glossary has a word for goes by no other."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# What once was another word for it, as it stood in identifiers -> the glossary's.
RETIRED = {
    "Deal": "tile scheduler",
    "take_turn": "pingpong sync",
    "pass_turn": "pingpong arrive",
    "Cursor": "pipeline state",
    "turner": "transpose-V warps",
    "turned_v": "v_t",
    "recheck": "speculative softmax",
    "alarm": "overflow",
    "LAZY": "RESCALE",
    "flush": "promotion",
    "hide_keys": "apply_mask",
    "program_keys": "n-block range",
    "burdens": "register pressure",
    "sections": "L2 groups",
    "_at_barrier": "sync_named",
}


@pytest.mark.parametrize("word", RETIRED)
def test_what_has_a_word_goes_by_no_other(word):
    sources = [p for layer in ("core", "kernels", "launch") for p in _files(layer)]
    assert len(sources) > 50
    for path in [*sources, *PAGES]:
        text = path.read_text(encoding="utf-8").replace("--section", "")
        found = re.search(rf"(?<![a-z]){word}(?![a-z])", text)
        assert not found, f"{path.relative_to(ROOT)}: {word}, where {RETIRED[word]} is the word"


def test_code_that_is_bent_for_a_compiler_can_be_found_by_one_tag():
    lines = [line.strip() for path in _files("kernels") for line in path.read_text().splitlines()]
    named = [line for line in lines if line.startswith("#") and re.search("ptxas|LLVM ", line)]
    assert len([line for line in named if line.startswith("# ptxas: ")]) > 10
    assert not [line for line in named if not line.startswith("# ptxas: ")]


# A name before a colon is an argument or a field that the docstring explains.
_NOT_PLAIN = re.compile(
    r"(?:\A|\n\s*\n|[.!?:;][\")']?\s+|\n\s*[-*|]\s+)\s*((?:Of|What|Who|Unasked)\b[^.:;]*)"
    r"|(\bunasked\b(?!:))"
)


def test_docstrings_and_comments_are_plain():
    """No sentence of theirs begins with Of, What or Who; "by default" is not "unasked"."""
    assert _not_plain("One.\n\nOf two. Of three") == ["Of two", "Of three"]
    assert _not_plain("unasked: a field. Office. Sold unasked") == ["unasked"]
    paths = _files("")
    assert len(paths) > 200
    bad = [
        f"{path.relative_to(ROOT)}: {words}"
        for path in paths
        for text in _prose(path.read_text(encoding="utf-8"))
        for words in _not_plain(text)
    ]
    assert not bad, "\n".join(bad)


def _not_plain(text: str) -> list[str]:
    return [" ".join((m[1] or m[2]).split()) for m in _NOT_PLAIN.finditer(text)]


def _prose(source: str) -> Iterator[str]:
    """A module's docstrings, then its comments: lines that follow each other are one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {t.start[0]: t.string.lstrip("#: ") for t in tokens if t.type == tokenize.COMMENT}
    block: list[str] = []
    for number, line in lines.items():
        if number - 1 not in lines:
            yield "\n".join(block)
            block = []
        block.append(line)
    yield "\n".join(block)


def _files(layer: str) -> list[Path]:
    return list((ROOT / "src" / "heedful" / layer).rglob("*.py"))
