"""The modules that a call passes on its way to a kernel: which they are, and how much they say."""

import ast
import io
import random
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful
from support.runs import standin

ROOT = Path(heedful.__file__).parent
# As `layer/module`. Who takes part of one of these elsewhere adds the module.
HOST = (
    *("core/evaluated", "core/symbols", "launch/bound"),
    *("torch/backends", "torch/cache_step", "torch/calls", "torch/dispatch", "torch/execute"),
    *("torch/cpu_runner", "torch/kinds", "torch/kvcache", "torch/saved", "torch/zeros"),
)
# Lines of code in all of them: 2,678 at 9738b06, 2,822 at 5337018.
MOST_LINES = 2400
# What a call passes besides: the public functions, and pure functions of what the calls are of.
BESIDE = {
    *("core/conditions", "core/preferences", "core/splits", "launch/packs"),
    *("torch/adapt", "torch/apart", "torch/attention"),
}


def code_lines(text: str) -> int:
    """Lines that hold code: no comments, no docstrings."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node) is not None and first is not None:
                docs |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    aside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in aside | {tokenize.ENDMARKER}:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def source(module: str) -> str:
    layer, stem = module.split("/")
    (path,) = (ROOT / layer).rglob(f"{stem}.py")
    return path.read_text(encoding="utf-8")


def test_lines_are_counted_without_comments_and_docstrings():
    text = '"""Of a\nmodule."""\n\nX = (\n    1,\n)\n\n\ndef f():\n    """Docs."""\n    # why\n'
    assert code_lines(text + '    return """a\nb"""  # c\n') == 3 + 1 + 2


def test_the_host_path_has_few_lines_of_code():
    lines = {module: code_lines(source(module)) for module in HOST}
    assert sum(lines.values()) <= MOST_LINES, lines


HALF = torch.bfloat16


def dense(length: int, grad: bool = False) -> Callable[[], Any]:
    q, k, v = (torch.empty(1, length, 4, 64, dtype=HALF, requires_grad=grad) for _ in range(3))
    if not grad:
        return lambda: heedful.flash_attn_func(q, k, v, causal=True)

    def both() -> None:
        out = heedful.flash_attn_func(q, k, v, causal=True)
        out.backward(torch.empty_like(out))

    return both


def packed(length: int) -> Callable[[], Any]:
    bounds = torch.tensor([0, length, length + 77], dtype=torch.int32)
    q, k, v = (torch.empty(length + 77, 4, 64, dtype=HALF) for _ in range(3))
    return lambda: heedful.flash_attn_varlen_func(q, k, v, bounds, bounds, length, length)


def step(pages: int) -> Callable[[], Any]:
    """One that appends, with rotary positions."""
    (q, k, v), rows = (torch.empty(2, 1, n, 64, dtype=HALF) for n in (4, 2, 2)), (pages, 16, 2, 64)
    k_pages, v_pages = (torch.empty(rows, dtype=HALF) for _ in range(2))
    table, used = torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    turns = torch.ones(128, 32, dtype=HALF)
    return lambda: heedful.flash_attn_with_kvcache(
        q, k_pages, v_pages, k, v, turns, turns, cache_seqlens=used, block_table=table
    )


CALLS = {
    "dense": dense,
    "dense, with gradients": lambda length: dense(length, grad=True),
    "packed": packed,
    "step": step,
}


def passed(call: Callable[[], Any]) -> set[str]:
    """The modules whose functions a call enters."""
    files: set[str] = set()

    def note(frame, event, _) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    own = [Path(file) for file in files if Path(file).is_relative_to(ROOT)]
    return {f"{path.relative_to(ROOT).parts[0]}/{path.stem}" for path in own}


@pytest.mark.parametrize("name", CALLS)
def test_known_calls_and_those_of_new_lengths_pass_no_module_that_is_not_listed(name):
    make, lengths = CALLS[name], random.Random(0).sample(range(600, 1000), 40)
    with standin.gpu("H200") as gpu:
        gpu.take = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
        known = make(512)
        for _ in range(4):
            known()
        assert passed(known) <= {*HOST, *BESIDE}
        if name == "step":  # of other caches it is of another kind
            return
        for length in lengths[1:]:
            make(length)()
        assert passed(make(lengths[0])) <= {*HOST, *BESIDE}
