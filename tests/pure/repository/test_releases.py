"""What a release is made of says the same everywhere, and runs nothing that could change."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

import draw_site
import heedful
import index_page
import notes
from heedful import integrations
from heedful.core.base.installed import TESTED, numbers
from heedful.launch.code import wheels
from kernel_wheel import build

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE = '__version__ = "1.2.3"\n'


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_by_its_digest_and_named_by_its_version(path):
    uses = re.findall(r"uses: (.*)$", path.read_text(), re.MULTILINE)
    assert uses
    for line in uses:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_an_action_has_one_digest_everywhere():
    pinned = {
        line for path in WORKFLOWS for line in re.findall(r"uses: (.*)$", path.read_text(), re.M)
    }
    assert len(pinned) == len({line.split("@")[0] for line in pinned})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_no_right_that_it_does_not_name(path):
    text = path.read_text()
    (own,) = re.findall(r"^permissions:(.*(?:\n  .*)*)", text, re.MULTILINE)
    assert own.split() in ([], ["{}"], ["contents:", "read"])
    writes = re.findall(r"^ {6}([\w-]+): write", text, re.MULTILINE)
    assert set(writes) <= (
        {"id-token", "attestations", "contents"} if path.stem == "release" else set()
    )
    assert "secrets." not in text


def test_ci_runs_every_python_that_the_package_names():
    named = re.findall(r":: Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"\"(3\.\d+)\"", ci.split("python: [")[1].split("]")[0]) == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


def test_kernels_in_a_wheel_are_of_the_version_that_asks_for_them():
    (wanted,) = PROJECT["project"]["optional-dependencies"]["kernels"]
    assert wanted.split(";")[0] == f"{wheels.NAMES[0].replace('_', '-')}=={heedful.__version__}"


def test_kernels_in_a_wheel_are_for_every_machine_that_has_such_a_gpu():
    python, abi, platforms = build.TAG.split("-")
    assert (python, abi) == ("py3", "none")
    assert {name.partition("17_")[2] for name in platforms.split(".")} == {"x86_64", "aarch64"}


def test_a_release_has_the_wheels_of_its_kernels_and_attests_what_it_publishes():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    steps = re.findall(r"make \w+ PYTHON|subject-path: dist/\*|twine upload .* dist/\*", text)
    assert [step.split()[:2][-1] for step in steps] == ["wheels", "kernels", "dist/*", "upload"]
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\nkernels:")[1].split("\n\n")[0]
    assert re.findall(r"--cuda (\d+)|build.py", recipe) == ["", "", "12"]
    assert len(re.findall("build.py", recipe)) == len(wheels.NAMES)


def test_the_oldest_versions_are_those_of_the_extras():
    extras = PROJECT["project"]["optional-dependencies"]
    for name, (oldest, _) in TESTED.items():
        least = {
            version
            for extra, packages in extras.items()
            for package in packages
            for version in re.findall(rf"^{name}>=([\d.]+)", package)
            if extra != "jax-cuda"
        }
        assert least == {".".join(map(str, oldest))}, name


def pins(text: str) -> set[tuple[str, str]]:
    """Packages and versions of words such as "jax[cuda]==0.11.2"."""
    return set(re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", text))


def test_every_tool_is_pinned_and_by_the_same_version_everywhere():
    groups = [word for group in PROJECT["dependency-groups"].values() for word in group]
    words = [word.partition(";")[0].strip() for word in groups if isinstance(word, str)]
    own = set().union(*map(pins, words))
    assert len(own) == len(words)
    for path in WORKFLOWS:
        for name, version in pins(path.read_text()):
            assert (name, version) in own or name not in dict(own), (path.name, name)


def test_what_tests_run_with_is_within_what_is_said_to_be_tested():
    ranges: dict[str, tuple] = dict(TESTED)
    for name, (first, last) in integrations.TESTED.items():
        ranges[name] = (numbers(first)[:2], numbers(last)[:2])
    found = pins(str(PROJECT["dependency-groups"]))
    # The tests have this one's signatures, and not itself.
    recording = ROOT / "tests" / "recordings" / "vllm.json"
    found.add(("vllm", json.loads(recording.read_text())["version"]))
    for name, (oldest, newest) in ranges.items():
        versions = [numbers(version)[:2] for package, version in found if package == name]
        assert versions and all(oldest <= version <= newest for version in versions), name


def test_the_notes_of_a_release_are_its_section_of_the_changelog():
    changelog = "# Changelog\n\n## 1.2.3, 2026-12-01\n\n- One.\n\n## 1.2.2\n\n- Before.\n"
    assert notes.notes("1.2.3", changelog, PACKAGE) == "- One.\n"
    for version, text, words in (
        ("1.2.4", changelog, "the package is 1.2.3"),
        ("1.2.3", changelog.replace("1.2.3,", "1.3.0,"), "no section 1.2.3"),
        ("1.2.3", changelog.replace("2026-12-01", "unreleased"), "unreleased"),
    ):
        with pytest.raises(ValueError, match=words):
            notes.notes(version, text, PACKAGE)


def test_the_version_and_the_address_are_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {heedful.__version__}\n" in citation
    source = PROJECT["project"]["urls"]["Source"]
    assert f'repository-code: "{source}"' in citation
    pages = ["SECURITY.md", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml", "pyproject.toml"]
    text = "\n".join((ROOT / page).read_text() for page in pages)
    assert set(re.findall(r"https://github\.com/[\w-]+/[\w-]+", text)) == {source}


def test_an_index_shows_a_page_whose_links_and_pictures_lead_into_the_repository():
    project = {**PROJECT["project"], "version": "1.2.3"}
    path = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]
    assert ROOT / path == Path(index_page.__file__) and "readme" in project["dynamic"]
    index_page.get_metadata_hook()(str(ROOT), {}).update(project)
    page, own = project["readme"]["text"], (ROOT / "README.md").read_text(encoding="utf-8")
    assert not index_page.RELATIVE.search(page)
    source = PROJECT["project"]["urls"]["Source"]
    found = re.findall(rf"{source}/(raw|blob)/v1\.2\.3/([\w./-]+)", page)
    assert len(found) == len(index_page.RELATIVE.findall(own)) > 10
    for kind, name in found:
        assert (ROOT / name).exists() and (kind == "raw") == (Path(name).suffix == ".svg"), name


def test_an_index_shows_code_and_whole_addresses_as_they_are():
    page = "```python\nf[0](x)\n```\n[a](#b) [c](https://d.org) [e\nf](g/h.md#i)\n"
    shown = index_page.absolute(page, "https://github.com/x/y", "2")
    assert shown == page.replace("(g/", "(https://github.com/x/y/blob/v2/g/")


def test_the_reference_has_every_public_function_where_it_is_defined():
    found = draw_site.defined()
    assert found["heedful"].keys() == heedful._PUBLIC.keys()
    for module, names in found.items():
        assert names
        for name, home in names.items():
            value = getattr(importlib.import_module(home), name)
            assert value is getattr(importlib.import_module(module), name), name
            assert value.__doc__


def test_links_to_what_the_site_does_not_have_are_words(tmp_path):
    (tmp_path / "there.md").touch()
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#x) [b](../src/x.py) [c](https://c.org) [d](#d)")
    assert draw_site._without_sources(page) == "[a](there.md#x) b [c](https://c.org) [d](#d)"
