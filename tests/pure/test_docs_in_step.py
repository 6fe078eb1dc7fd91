"""The documentation says what the code says."""

import re
from pathlib import Path

from heedful.cli import COMMANDS, matrix
from heedful.core import settings
from heedful.core.capability import ROWS

ROOT = Path(__file__).parents[2]


def test_support_matrix_page_is_what_the_capability_rows_say():
    page = (ROOT / "docs" / "support-matrix.md").read_text(encoding="utf-8")
    assert page == matrix.markdown(), "run `make docs`"


def test_support_matrix_states_every_level_of_every_row():
    page = matrix.markdown()
    for row in ROWS:
        line = next(
            x for x in page.splitlines() if x.startswith(f"| {row.backend} {row.direction}")
        )
        listed = [level for arch, level in row.levels.items() if not arch.endswith(":*")]
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        assert sorted(cell for cell in cells if cell != "-") == sorted(listed)


def test_every_command_of_the_documentation_exists():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"^\s*(?:\$ )?heedful ([a-z]+)", text, re.MULTILINE):
            assert name in COMMANDS, f"{page.name} shows `heedful {name}`"


def test_every_environment_variable_of_the_documentation_exists():
    known = {setting.variable for setting in settings.TABLE.values()}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named = set(re.findall(r"HEEDFUL_[A-Z_]+", page.read_text(encoding="utf-8")))
        assert named <= known, f"{page.name} names {named - known}"


def test_the_index_links_every_page_and_no_page_links_into_the_void():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = {}
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
        links[page] = {(page.parent / target).resolve() for target in targets}
        for target in links[page]:
            assert target.exists(), f"{page.name} links to {target.name}, which is not there"
    index = ROOT / "docs" / "index.md"
    unlinked = {page for page in (ROOT / "docs").glob("*.md") if page != index} - links[index]
    assert not unlinked, f"docs/index.md does not link {sorted(page.name for page in unlinked)}"
