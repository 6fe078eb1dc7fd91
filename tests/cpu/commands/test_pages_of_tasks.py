"""The programs of the pages for a task run as they stand, and hold what they assert."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {
    page: () for page in ("train", "serve", "quantised-cache", "context-parallel", "masks")
} | {"jax": ("jax",), "context-parallel-jax": ("jax",)}


@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_a_page_runs(page):
    for module in PAGES[page]:
        pytest.importorskip(module)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert program
    exec(compile(program[1], f"docs/{page}.md", "exec"), {"__name__": "page"})
