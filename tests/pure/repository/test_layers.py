"""The layers of the package: who may import whom, proven in fresh processes."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

ROOT = Path(heedful.__file__).parent
FRAMEWORKS = {"torch", "jax", "triton", "numpy"}
# Layer -> what it may import of the frameworks, at module level.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "kernels": {"triton"},
    "launch": set(),
    "reference": {"numpy"},
    "emulator": {"numpy"},
    "inspector": {"numpy"},
    "cpu": {"numpy", "torch"},
    "torch": {"torch"},
    "jax": {"jax", "numpy"},
    "bench": {"torch", "numpy"},
    "demo": {"torch", "numpy"},
}
# Modules whose whole point is a framework that their layer may not have elsewhere.
EXCEPTIONS: dict[str, set[str]] = {
    "launch/code/triton_compat.py": {"triton"},
    "launch/interpret.py": {"triton", "torch"},
    "demo/in_jax.py": {"jax", "numpy"},
    "bench/harness/reader.py": {"torch", "triton"},
    "bench/in_jax.py": {"torch", "jax"},
    "reference/budget.py": {"torch", "numpy"},
    "reference/eager.py": {"torch", "numpy"},
    "reference/convert.py": {"torch", "numpy"},
}
PAGE = ROOT.parents[1] / "docs" / "architecture.md"


def granted() -> dict[str, set[str]]:
    """By layer the folders of the package that the page's table lets it import."""
    found: dict[str, set[str]] = {}
    table = PAGE.read_text(encoding="utf-8").partition("## Layers")[2].partition("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 3 or not cells[0].startswith("`"):
            continue
        named = set(re.findall(r"`([\w/]+)`", cells[2]))
        for layer in re.findall(r"`(\w+)/`", cells[0]):
            found[layer] = named | (set(found) if "everything above" in cells[2] else set())
    return found


GRANTED = granted()


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


@pytest.mark.parametrize("path", modules())
def test_module_level_imports_stay_within_the_layer(path):
    layer = path.split("/")[0]
    text = (ROOT / path).read_text()
    named = re.findall(r"^(?:from|import) ([\w.]+)", text, re.M)
    frameworks = {name.split(".")[0] for name in named} & FRAMEWORKS
    allowed = EXCEPTIONS.get(path, ALLOWED.get(layer, FRAMEWORKS))
    assert frameworks <= allowed


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
        "heedful.launch.program.spec",
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
    from heedful.core.base.settings import TABLE

    known = {setting.variable for setting in TABLE.values()}
    used = set()
    for path in ROOT.rglob("*.py"):
        used |= set(re.findall(r"HEEDFUL_\w+", path.read_text()))
    assert used <= known


def test_type_checkers_see_the_names_that_users_get():
    """`import heedful` finds its names on first use, which no type checker can follow."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (typed,) = (
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    told = {}
    for node in typed.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            told[alias.name] = node.module
    assert told.pop("*") == "heedful.torch"
    assert told == {n: m for n, m in heedful._PUBLIC.items() if m != "heedful.torch"}
    body = ast.parse((ROOT / "torch/__init__.py").read_text()).body
    (listed,) = (ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign))
    assert set(listed) == set(heedful._PUBLIC) - set(told)
    assert (ROOT / "py.typed").exists()
