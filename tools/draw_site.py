"""Builds the site: docs/ as the guide, and a reference made from docstrings; `make site`.

Pages lie as in the repository, so that their links hold: they are copied to .site/pages, where a
page of reference is written for each public module, and mkdocs turns all of it into .site/html. A
warning is an error.
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITE = ROOT / ".site"
PAGES = SITE / "pages"
COPIED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
# By public module where its names are defined; None: in itself.
MODULES = {
    "heedful": "src/heedful/__init__.py",
    "heedful.bert_padding": "src/heedful/bert_padding.py",
    "heedful.jax": "src/heedful/jax/__init__.py",
}
SETTINGS = """\
site_name: heedful
site_dir: html
docs_dir: pages
use_directory_urls: false
theme: {{name: mkdocs, highlightjs: false}}
nav:
  - README.md
  - Guide: docs/index.md
  - Reference:
{reference}
exclude_docs: |
  !.*
not_in_nav: |
  *.md
validation:
  nav: {{omitted_files: ignore}}
plugins:
  - mkdocstrings:
      handlers:
        python:
          paths: [{source}]
          options:
            docstring_style: google
            docstring_options: {{warnings: false, returns_named_value: false}}
            show_source: false
            show_root_heading: true
            show_root_full_path: false
            show_signature_annotations: true
            heading_level: 2
            signature_crossrefs: false
"""


def defined() -> dict[str, dict[str, str]]:
    """By public module its functions, with the module that each is defined in: read off sources."""
    found: dict[str, dict[str, str]] = {}
    for module, path in MODULES.items():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        imported = _imported(tree)
        for target, value in _assigned(tree):
            if target == "__all__" and module != "heedful":
                names = ast.literal_eval(value)
                found[module] = {name: imported.get(name, module) for name in names}
            elif target == "_PUBLIC":
                found[module] = ast.literal_eval(value)
    torch = _imported(ast.parse((ROOT / "src/heedful/torch/__init__.py").read_text()))
    found["heedful"] = {n: torch.get(n, m) for n, m in found["heedful"].items()}
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in froms for alias in node.names}


def _assigned(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def write_pages() -> None:
    shutil.rmtree(SITE, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, PAGES / name)
    shutil.copytree(ROOT / "docs", PAGES / "docs")
    shutil.copytree(ROOT / "measurements", PAGES / "measurements")
    for page in PAGES.rglob("*.md"):
        page.write_text(_without_sources(page), encoding="utf-8")
    lines = []
    for module, names in defined().items():
        page = PAGES / "reference" / f"{module}.md"
        page.parent.mkdir(exist_ok=True)
        blocks = [f"::: {home}.{name}" for name, home in names.items()]
        page.write_text("\n\n".join([f"# {module}", *blocks]) + "\n", encoding="utf-8")
        lines.append(f"      - {module}: reference/{module}.md")
    settings = SETTINGS.format(reference="\n".join(lines), source=ROOT / "src")
    (SITE / "mkdocs.yml").write_text(settings, encoding="utf-8")


def _without_sources(page: Path) -> str:
    """A page whose links to what the site does not have are words."""

    def kept(link: re.Match) -> str:
        words, target = link.groups()
        path = target.partition("#")[0]
        there = target.startswith(("http", "#")) or (page.parent / path).exists()
        return link[0] if there else words

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", kept, page.read_text(encoding="utf-8"))


def main() -> None:
    write_pages()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run([*command, "-f", str(SITE / "mkdocs.yml")])
    if done.returncode:
        sys.exit(done.returncode)
    for module, names in defined().items():
        text = (SITE / "html" / "reference" / f"{module}.html").read_text(encoding="utf-8")
        lost = [name for name, home in names.items() if f'id="{home}.{name}"' not in text]
        if lost:
            sys.exit(f"site: {module} lacks {', '.join(lost)}")
    sys.stdout.write(f"site: {SITE / 'html' / 'index.html'}\n")


if __name__ == "__main__":
    main()
