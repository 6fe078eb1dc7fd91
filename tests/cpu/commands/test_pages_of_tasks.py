"""The programs of the pages for a task run as they stand, and hold what they assert."""

import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {
    page: () for page in ("train", "serve", "quantised-cache", "context-parallel", "masks")
} | {
    "jax": ("jax",),
    "context-parallel-jax": ("jax",),
    "context-parallel-use": ("transformers",),
}
# Of these each block is a program of its own.
OF_PROGRAMS = {"context-parallel-use"}


@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_a_page_runs(page):
    for module in PAGES[page]:
        pytest.importorskip(module)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert programs
    try:
        for program in programs if page in OF_PROGRAMS else programs[:1]:
            exec(compile(program, f"docs/{page}.md", "exec"), {"__name__": "page"})
    finally:
        plug_in = sys.modules.get("heedful.integrations.transformers")
        if plug_in is not None and plug_in.is_registered():
            plug_in.unregister()
        if dist.is_initialized():
            dist.destroy_process_group()
