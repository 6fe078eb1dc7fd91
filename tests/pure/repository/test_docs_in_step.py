"""The documentation says what the code says, in few words, and its links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

import draw_docs
from heedful.cli import COMMANDS, matrix
from heedful.core.base import settings
from heedful.core.registry.capability import VARIANTS

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
MEASUREMENTS, DECISIONS = ROOT / "measurements", DOCS / "decisions"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES += sorted(MEASUREMENTS.rglob("*.md"))
SOURCES = ROOT / "src" / "heedful"
# Where a page's files are that it names without a folder.
HOMES = {
    "hopper-forward": ["kernels/hopper"],
    "hopper-wide": ["kernels/hopper"],
    "hopper-fp8": ["kernels/hopper"],
    "hopper-backward": ["kernels/hopper", "kernels"],
    "mla": ["kernels/hopper"],
    "mla-swap-ab": ["kernels/hopper"],
    "mla-converting": ["kernels/hopper"],
    "hopper-decode": ["kernels/hopper"],
    "portable": ["kernels/portable", "kernels/common"],
    "cpu": ["cpu"],
    "jax": ["jax"],
}
TOOLS = ["emulator", "inspector"]
FAMILIES = [
    "hopper-forward",
    "hopper-wide",
    "hopper-fp8",
    "hopper-backward",
    "hopper-decode",
    "mla",
    "mla-swap-ab",
    "mla-converting",
    "cdna",
    "portable",
    "decode",
    "cpu",
]
FAMILIES += ["launching", *TOOLS]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def sources() -> list[Path]:
    return [path for folder in ("src", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]


def prose(page: Path) -> str:
    """A page without its blocks of code and diagrams."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def words(page: Path) -> int:
    """Words of a page's prose and tables; the targets of links are none."""
    return len(re.findall(r"\w[\w'./-]*", re.sub(r"\]\([^)]*\)", "]", prose(page))))


def anchors(page: Path) -> set[str]:
    """What can stand behind a `#`: a page's headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_support_matrix_page_is_what_the_capability_rows_say():
    page = (DOCS / "support-matrix.md").read_text(encoding="utf-8")
    assert page == matrix.markdown(), "run `make docs`"


def test_support_matrix_states_every_level_of_every_row():
    page = matrix.markdown()
    for row in VARIANTS:
        line = next(x for x in page.splitlines() if x.startswith(f"| {row.label} {row.direction}"))
        listed = [level for arch, level in row.levels.items() if not arch.endswith(":*")]
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        assert sorted(cell for cell in cells if cell != "-") == sorted(listed)


def test_every_drawn_page_is_what_its_tables_say():
    drawn = draw_docs.pages()
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, f"{name(path)}: run `make docs`"
    measured = {path for path in drawn if path.parent == MEASUREMENTS}
    assert set(MEASUREMENTS.rglob("*.md")) == measured


def test_every_measured_table_is_drawn_and_says_when_and_where():
    folders = {path.stem for path in draw_docs.pages() if path.parent == MEASUREMENTS} - {"README"}
    tables = sorted(MEASUREMENTS.rglob("*.csv"))
    assert {path.parent.name for path in tables} == folders
    for path in tables:
        table = draw_docs.read(path)
        dates = [row["date"] for row in table.rows] if "date" in table.columns else []
        for date in dates or [table.head["date"]]:
            assert re.search(r"\b20\d\d-\d\d-\d\d\b", date), f"{name(path)}: no date in {date!r}"


@pytest.mark.parametrize(
    ("cell", "is_one"),
    [("", True), ("1.08", True), ("-3 %", True), ("+1..2 %", True), ("-4..-1", True)]
    + [("332 -> 314", True), ("1.0 -> 1.1 %", True), ("- 3 %", False), ("about 3", False)]
    + [("1,2", False), ("1.", False), ("3 us", False)],
)
def test_measurements_are_numbers_ranges_and_changes(cell, is_one):
    assert draw_docs.is_measurement(cell) is is_one


def test_a_table_that_lacks_something_is_refused(tmp_path):
    head = "# title: T\n# device: D\n# date: 2026-01-01\n# versions: V\n# numbers: x\n"
    path = tmp_path / "t.csv"
    path.write_text(f"{head}a,x\nb,1.5\n")
    assert draw_docs.read(path).rows == [{"a": "b", "x": "1.5"}]
    for bad in (f"{head}a,x\nb,fast\n", f"{head}a,y\nb,1\n", f"{head}a,x\nb\n"):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"t\.csv"):
            draw_docs.read(path)
    for key in ("title", "device", "date", "versions"):
        path.write_text(re.sub(f"# {key}: .*\n", "", head) + "a,x\nb,1\n")
        with pytest.raises(ValueError, match=f"says no {key}"):
            draw_docs.read(path)


def test_each_decision_has_one_answer_under_one_of_six_headings(monkeypatch, tmp_path):
    text = (DECISIONS / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == 6
    answers = re.findall(r"^- \[(\d{3})\. [^\]]+\]\([^)]+\): .+\.$", text, re.MULTILINE)
    assert sorted(answers) == [path.name[:3] for path in sorted(DECISIONS.glob("[0-9]*.md"))]
    monkeypatch.setattr(draw_docs, "DECISIONS", tmp_path)
    (tmp_path / "001-one.md").write_text("# 001. One\n")
    for index in ("[A]\n", '[A]\n001 = "a."\n[B]\n001 = "b."\n', '[A]\n002 = "a."\n'):
        (tmp_path / "index.toml").write_text(index)
        with pytest.raises(ValueError, match="another list than the folder"):
            draw_docs._decisions()


def test_every_family_that_was_measured_has_one_table_in_docs():
    text = draw_docs.SUMMARIES.read_text(encoding="utf-8")
    families = re.split(r"^## ", text, flags=re.MULTILINE)[1:-1]
    assert len(families) == 11
    for family in families:
        assert len(re.findall(r"^\| -", family, re.MULTILINE)) == 1, family.splitlines()[0]
        assert re.search(r"^More: \[[^]]+\]\(\.\./measurements/", family, re.MULTILINE)


def test_every_command_of_the_documentation_exists():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"^\s*(?:\$ )?heedful ([a-z]+)", text, re.MULTILINE):
            assert command in COMMANDS, f"{name(page)} shows `heedful {command}`"


def test_every_environment_variable_of_the_documentation_exists():
    known = set(map(settings.variable, settings.TABLE))
    for page in PAGES:
        named = set(re.findall(r"HEEDFUL_[A-Z_]+", page.read_text(encoding="utf-8")))
        assert named <= known, f"{name(page)} names {named - known}"


def test_no_page_links_into_the_void():
    link = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
    for page in PAGES:
        for target, anchor in link.findall(prose(page)):
            found = (page.parent / target).resolve() if target else page
            assert found.exists(), f"{name(page)} links to {target}, which is not there"
            assert not anchor or anchor in anchors(found), f"{name(page)}: no #{anchor}"


def test_every_page_can_be_reached_from_the_index():
    reached, new = set(), {DOCS / "index.md"}
    while new:
        reached |= new
        links = {
            (page.parent / target).resolve()
            for page in new
            for target in re.findall(r"\]\((?!https?:)([^)#\s]+\.md)", prose(page))
        }
        new = links - reached
    unreached = {*DOCS.rglob("*.md"), *MEASUREMENTS.rglob("*.md")} - reached
    assert not unreached, f"no way to {sorted(map(name, unreached))}"


def test_every_file_that_a_page_names_exists():
    """Pages of measurements are left out: they speak of the day on which they were made."""
    for page in PAGES:
        if MEASUREMENTS in page.parents:
            continue
        for path in re.findall(r"`([\w./-]+\.(?:py|toml|md))`", prose(page)):
            places = [ROOT, SOURCES, *(SOURCES / home for home in HOMES.get(page.stem, ()))]
            assert any((place / path).exists() for place in places), f"{name(page)} names {path}"


def test_every_name_that_a_page_shows_exists():
    """Other libraries' names are left out, and pages of measurements, which speak of their day."""
    texts = [path.read_text(encoding="utf-8") for path in sources()]
    known = set(re.findall(r"\w+", "\n".join([*texts, (ROOT / "Makefile").read_text()])))
    known |= set(map(settings.variable, settings.TABLE))
    for page in PAGES:
        if MEASUREMENTS in page.parents or page.name == "porting.md":
            continue
        shown = re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", prose(page))
        named = {word for names in shown for word in names.split(".") if word}
        assert named <= known, f"{name(page)} names {named - known}"


def test_every_page_that_the_code_names_exists():
    for path in sources():
        for page in re.findall(r"\bdocs/[\w/-]+\.\w+", path.read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), f"{name(path)} names {page}"


def sentences(page: Path) -> list[str]:
    """A page's sentences, list items and cells, without headings and the heads of tables."""
    text = re.sub(r"^#.*$|^\|.*\|\n(?=\|[ :|-]+\|$)", "", prose(page), flags=re.MULTILINE)
    text = re.sub(r"^(?:- |\d+\. )", "\n", text, flags=re.MULTILINE).replace("**", "")
    blocks = (re.sub(r"\s+", " ", block) for block in re.split(r"\n\s*\n|\s*\|\s*", text))
    return [one.strip() for block in blocks for one in re.split(r"(?<=[.!?:;]) ", block)]


def test_sentences_are_split_where_they_begin(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# What\n\nOne. **Two:** three\nfour.\n\n- Five\n\n| what |\n|---|\n| Six |\n")
    found = [sentence for sentence in sentences(page) if sentence.strip("|- ")]
    assert found == ["One.", "Two:", "three four.", "Five", "Six"]


def test_no_sentence_begins_with_of_what_or_who():
    """Pages of measurements are left out: they are drawn from records of their day."""
    for page in PAGES:
        if MEASUREMENTS in page.parents or page == draw_docs.SUMMARIES:
            continue
        bad = [s for s in sentences(page) if re.match(r"(?:Of|What|Who|Unasked)\b", s)]
        assert not bad, f"{name(page)}: {bad}"
        assert not re.search(r"\bunasked\b", prose(page)), f'{name(page)}: "by default"'


def test_pages_of_families_leave_figures_to_measurements():
    figure = r"\d (?:us|ms|%|GB/s|TB/s|TFLOP/s)(?!\w)|\d times (?:cuDNN|FA|SDPA)|20\d\d-\d\d-\d\d"
    assert re.search(figure, "takes 4 us") and re.search(figure, "2 % of it, 2026-11-26")
    for family in FAMILIES:
        page = DOCS / f"{family}.md"
        assert not re.findall(figure, prose(page)), name(page)
        assert family == "inspector" or "measurements.md#" in page.read_text(), name(page)


def test_docstrings_have_one_measured_figure_at_most():
    """Where more were measured, measurements/ has them. Versions and links are no figures."""
    other = r"https?:\S+|(?:torch|Triton|jax|jaxlib|Python|version) \d+\.\d+(?: and \d+\.\d+)?"
    figure = r"(?<![\w.^])(?:\d+\.\d+(?![\w.])|\d+ (?:us|ms|%)(?!\w))"
    assert len(re.findall(figure, re.sub(other, "", "8 us not 9.5; of torch 2.13, 7 %"))) == 3
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            found = re.findall(figure, re.sub(other, "", text or ""))
            assert len(found) <= 1, f"{name(path)}, {getattr(node, 'name', 'module')}: {found}"


def test_pages_are_short():
    pages = [*FAMILIES, "even-shares", "decode-beside"]
    limits = {f"docs/{page}.md": 1000 for page in pages} | {"docs/architecture.md": 1300}
    limits |= {name(path): 200 for path in DECISIONS.glob("[0-9]*.md")}
    for page, most in limits.items():
        assert words(ROOT / page) <= most, f"{page} has more than {most} words"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in TOOLS])
def test_a_familys_page_has_a_diagram_and_invariants(family):
    text = (DOCS / f"{family}.md").read_text(encoding="utf-8")
    assert re.search(r"\n\n {4}\S", text) and "\n## Invariants\n" in text


@pytest.mark.parametrize(
    ("direction", "cases"), [("forward", 20), ("backward", 26)], ids=["forward", "backward"]
)
def test_the_readme_says_the_speeds_that_were_measured(direction, cases):
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (path,) = (MEASUREMENTS / f"hopper-{direction}").glob("*-peers-of-november-28.csv")
    table = draw_docs.read(path)
    assert len(table.rows) == cases
    for peer, words in (("cuDNN", "cuDNN"), ("FA4", "FlashAttention-4")):
        ratios = [float(row[f"{peer} / heedful"]) for row in table.rows]
        assert f"{min(ratios):.2f} to {max(ratios):.2f} times {words}" in text


def test_the_readme_says_how_short_calls_of_a_cpu_were_measured():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    table = draw_docs.read(MEASUREMENTS / "cpu" / "027-short-calls-idle.csv")
    one = {row["case"]: row["one thread"] for row in table.rows}
    plain, dropped = (
        [one[f"1 x {n}{more}"] for n in (16, 64, 128, 512)] for more in ("", ", dropout 0.1")
    )
    assert (
        f"{plain[0]} for 16 tokens, {plain[1]} for 64, {plain[2]} for 128 and {plain[3]} for 512"
        in text
    )
    assert "with dropout {}, {}, {} and {}".format(*dropped) in text


def test_a_decision_has_a_number_a_context_a_choice_and_evidence():
    for number, path in enumerate(sorted(DECISIONS.glob("[0-9]*.md")), 1):
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {number:03d}. ") and path.name.startswith(f"{number:03d}-")
        parts = re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)
        assert parts == ["Context", "Choice", "Evidence"], name(path)
