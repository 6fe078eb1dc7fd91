"""The layers of the package: who may import whom, proven in fresh processes."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import heedful

ROOT = Path(heedful.__file__).parent
FRAMEWORKS = {"torch", "jax", "triton", "numpy"}
# Modules whose whole point is a framework that their layer may not have elsewhere.
EXCEPTIONS: dict[str, set[str]] = {
    "launch/code/triton_compat.py": {"triton"},
    "demo/in_jax.py": {"jax", "numpy"},
    "bench/harness/reader.py": {"triton"},
    "bench/in_jax.py": {"jax"},
    "bench/parallel.py": {"numpy"},
    "validation/micro.py": {"numpy"},
    "validation/on_device.py": {"numpy"},
    "validation/predicted.py": {"numpy"},
    "validation/probes.py": {"triton"},
    "reference/budget.py": {"torch"},
    "reference/eager.py": {"torch"},
    "reference/convert.py": {"torch"},
}
PAGE = ROOT.parents[1] / "docs" / "architecture.md"


def rows() -> Iterator[tuple[str, str]]:
    """By layer what the page's table says that it may import."""
    table = PAGE.read_text(encoding="utf-8").partition("## Layers")[2].partition("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for layer in re.findall(r"`(\w+)/`", cells[0]):
                yield layer, cells[2]


def granted() -> dict[str, set[str]]:
    """By layer the folders of the package that it may import."""
    found: dict[str, set[str]] = {}
    for layer, cell in rows():
        named = set(re.findall(r"`([\w/]+)`", cell))
        found[layer] = named | (set(found) if "everything above" in cell else set())
    return found


GRANTED = granted()
# By layer the frameworks that it may import at module level.
ALLOWED = {
    layer: set(re.findall(r"\w+", re.sub("`.*?`", "", cell).lower())) & FRAMEWORKS
    for layer, cell in rows()
}


def targets(tree: ast.Module) -> set[str]:
    """The modules of the package that a module imports anywhere, or finds by the public names of
    `heedful`; dotted, without the package's own name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "heedful":
            found.add(f"heedful.{node.attr}")
    own = {name.partition(".")[2] for name in found if name.startswith("heedful.")}
    public = {n: m.partition(".")[2] for n, m in heedful._PUBLIC.items()}
    return {public.get(name, name) for name in own}


def modules():
    return sorted(
        p.relative_to(ROOT).as_posix()
        for p in ROOT.rglob("*.py")
        if "/" in str(p.relative_to(ROOT))
    )


def frameworks(path: str) -> set[str]:
    """What a module imports of them at module level."""
    named = re.findall(r"^(?:from|import) ([\w.]+)", (ROOT / path).read_text(), re.M)
    return {name.split(".")[0] for name in named} & FRAMEWORKS


@pytest.mark.parametrize("path", modules())
def test_module_level_imports_stay_within_the_layer(path):
    assert frameworks(path) <= ALLOWED[path.split("/")[0]] | EXCEPTIONS.get(path, set())


def test_each_exception_is_needed():
    wanted = {path: frameworks(path) - ALLOWED[path.split("/")[0]] for path in EXCEPTIONS}
    assert wanted == EXCEPTIONS


def test_every_layer_has_its_row():
    folders = {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
    assert folders == GRANTED.keys()
    assert all(name.split("/")[0] in folders for names in GRANTED.values() for name in names)


@pytest.mark.parametrize("layer", GRANTED)
def test_a_layer_imports_what_its_row_grants_and_nothing_else(layer):
    allowed = [name.replace("/", ".") for name in {layer, *GRANTED[layer]}]
    # Where a folder is does not depend on what is in it.
    bare = {name.split(".")[0] for name in allowed}
    wrong = [
        f"{path.relative_to(ROOT)} imports heedful.{name}"
        for path in sorted((ROOT / layer).rglob("*.py"))
        for name in targets(ast.parse(path.read_text(encoding="utf-8")))
        if not (name in bare or name.startswith("__"))
        and not any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("layer", GRANTED)
def test_a_row_names_nothing_that_its_layer_does_not_import(layer):
    cell = dict(rows())[layer]
    used = {
        name
        for path in (ROOT / layer).rglob("*.py")
        for name in targets(ast.parse(path.read_text(encoding="utf-8")))
    }
    named = [name.replace("/", ".") for name in re.findall(r"`([\w/]+)`", cell)]
    assert all(any(f"{u}.".startswith(f"{name}.") for u in used) for name in named)
    loaded = {f for path in modules() if path.split("/")[0] == layer for f in frameworks(path)}
    assert ALLOWED[layer] <= loaded


def unit(name: str) -> str | None:
    """What a module belongs to within its layer: its folder, with the folders in it; or, of a layer
    that has folders, itself. None outside of the package."""
    path = ROOT / name.replace(".", "/")
    while not (path.is_dir() or path.with_suffix(".py").exists()):
        path = path.parent
    folder = path if path.is_dir() else path.parent
    if folder == ROOT:
        return None
    if folder.parent == ROOT:
        return (path if any(folder.glob("*/__init__.py")) else folder).relative_to(ROOT).as_posix()
    while folder.parent.parent != ROOT and any(folder.parent.glob("[!_]*.py")):
        folder = folder.parent
    return folder.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("layer", sorted(set(GRANTED) - {"emulator"}))
def test_no_folders_of_a_layer_import_each_other_in_a_circle(layer):
    """Wherever in a module the import stands. Parts of the emulator are one machine."""
    left: dict[str, set[str]] = {}
    for path in (ROOT / layer).rglob("*.py"):
        own = unit(path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", "."))
        found = {unit(name) for name in targets(ast.parse(path.read_text(encoding="utf-8")))}
        left.setdefault(own or "", set()).update(x for x in found if x and x.startswith(layer))
    while done := [one for one, needed in left.items() if not needed & left.keys() - {one}]:
        for one in done:
            del left[one]
    assert not left


def test_the_emulator_loads_nothing_else_of_the_package():
    paths = (p.relative_to(ROOT.parent).with_suffix("") for p in (ROOT / "emulator").rglob("*.py"))
    names = (".".join(p.parts) for p in paths if not p.stem.startswith("__"))
    imports = "\n".join(f"import {name}" for name in sorted(names))
    loaded = run(f"{imports}\nimport sys; print(*(m for m in sys.modules if 'heedful.' in m))")
    assert {name.split(".")[1] for name in loaded.split()} == {"emulator"}


def run(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "heedful",
        "heedful.core.planning.plan",
        "heedful.core.call.describe_cache",
        "heedful.launch.spec",
    ],
)
def test_importing_brings_no_framework(module):
    loaded = run(f"import {module}, sys; print(*sorted(m.split('.')[0] for m in sys.modules))")
    assert not set(loaded.split()) & FRAMEWORKS


def test_import_heedful_takes_under_50_ms():
    code = "import time; t = time.perf_counter(); import heedful; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.05


def test_planning_and_explaining_need_no_torch():
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'numpy', 'jax'): sys.modules[name] = None\n"
        "from heedful.core.planning.plan import plan, explain\n"
        "from heedful.core.call.problem import AttentionProblem\n"
        "from heedful.core.base.device import by_name\n"
        "print(explain(plan(AttentionProblem.dense(1, 64, 64, 8), by_name('MI355X'))))"
    )
    assert "portable" in run(code)


def test_every_environment_variable_is_in_the_settings_table():
    from heedful.core.base.settings import TABLE, variable

    known = set(map(variable, TABLE))
    used = set()
    for path in ROOT.rglob("*.py"):
        used |= set(re.findall(r"HEEDFUL_\w+", path.read_text()))
    assert used <= known


def typed_imports(path: Path) -> dict[str, str | None]:
    """By name, from where type checkers have what a module finds on first use."""
    tree = ast.parse(path.read_text())
    (typed,) = (
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    told = {}
    for node in typed.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            told[alias.name] = node.module
    return told


def test_type_checkers_see_the_names_that_users_get():
    """`import heedful` finds its names on first use, which no type checker can follow."""
    told = typed_imports(ROOT / "__init__.py")
    assert told.pop("*") == "heedful.torch"
    assert told == {n: m for n, m in heedful._PUBLIC.items() if m != "heedful.torch"}
    of_torch = typed_imports(ROOT / "torch/__init__.py")
    body = ast.parse((ROOT / "torch/__init__.py").read_text()).body
    (public,) = (
        ast.literal_eval(n.value)
        for n in body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_PUBLIC"
    )
    assert of_torch == public
    assert set(of_torch) == set(heedful._PUBLIC) - set(told)
    assert (ROOT / "py.typed").exists()
