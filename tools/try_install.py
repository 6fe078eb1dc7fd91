"""Builds the wheel and tries it as a user would: `make test-install`.

Each extra that this machine can take goes into a fresh environment. There the README's tour and the
command line run outside of the checkout. Those that it cannot take are named with the reason.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_BYTES = 2 * 10**6
# Beside a torch that is installed, from files.
MOST_SECONDS = 10.0
# By extras what runs beside them: the modules that they bring, and commands.
COMMANDS = (
    ("--version",),
    ("doctor", "--json"),
    ("support",),
    ("explain", "--device", "MI355X", "--seqlen", "1", "--seqlen-k", "8192", "--page-size", "16"),
)
WITH_TORCH = (*COMMANDS, ("bench", "--list"), ("explain", "-g"))


def say(words: str) -> None:
    sys.stdout.write(f"install: {words}\n")
    sys.stdout.flush()


def run(*command: str | Path, where: Path, quiet: bool = True) -> str:
    """A command outside of the checkout, without what this environment says of Python."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=where, env=kept, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"install: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def built_twice(tools: Path, folder: Path) -> Path:
    """The wheel; sdist and wheel of two builds are compared byte by byte."""
    for name in ("one", "two"):
        run(ROOT / "tools" / "wheels.sh", tools, folder / name, where=ROOT)
    one, two = (sorted((folder / name).iterdir()) for name in ("one", "two"))
    if [p.name for p in one] != [p.name for p in two]:
        sys.exit("install: two builds have files of other names")
    for a, b in zip(one, two, strict=True):
        if a.read_bytes() != b.read_bytes():
            sys.exit(f"install: {a.name} differs from build to build")
    (wheel,) = (path for path in one if path.suffix == ".whl")
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"install: {wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    say(f"{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB, the same bytes twice")
    return wheel


def refused(extra: str) -> str | None:
    """Why this machine cannot take an extra."""
    if extra == "kernels":
        return "its wheel is built by `make kernels`"
    linux, has_nvidia = sys.platform == "linux", shutil.which("nvidia-smi") is not None
    if extra in ("cuda", "jax-cuda") and not (linux and has_nvidia):
        return "no NVIDIA GPU here"
    if extra == "rocm" and not Path("/dev/kfd").exists():
        return "no AMD GPU here"
    return None


def try_extra(extra: str, wheel: Path, folder: Path) -> None:
    where = folder / (extra.replace(",", "-") or "bare")
    run(sys.executable, "-m", "venv", where, where=folder)
    python, begun = where / "bin" / "python", time.perf_counter()
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q", "install")
    if "cpu" in extra.split(",") and sys.platform == "linux":
        torch = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["torch"]
        run(*pip, f"{torch[0]}+cpu", where=folder)
        begun = time.perf_counter()
    run(*pip, f"{wheel}[{extra}]" if extra else wheel, where=folder)
    seconds = time.perf_counter() - begun
    probe = "import heedful; print(heedful.__file__)"
    if str(where) not in run(python, "-I", "-c", probe, where=folder):
        sys.exit("install: the checkout was imported, not what was installed")
    names = extra.split(",")
    if "cpu" in names or "cuda" in names:
        tour(python, folder)
    if "jax" in names:
        page = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
        run(python, "-I", "-c", blocks(page)[0], where=folder)
    if "cli" in names:
        for words in WITH_TORCH if "cpu" in names else COMMANDS:
            run(where / "bin" / "heedful", *words, where=folder)
        json.loads(run(python, "-I", "-m", "heedful", "doctor", "--json", where=folder))
    if "cpu" in names:
        again_from_files(f"{wheel}[{extra}]", pip, folder)
    say(f"[{extra}] in {seconds:.0f} s: well")


def again_from_files(wheel: str, pip: tuple, folder: Path) -> None:
    """Without a network: everything else is there."""
    python, *_ = pip
    run(python, "-m", "pip", "-q", "uninstall", "-y", "heedful", where=folder)
    begun = time.perf_counter()
    run(*pip, "--no-index", wheel, where=folder)
    seconds = time.perf_counter() - begun
    if seconds > MOST_SECONDS:
        sys.exit(f"install: from files in {seconds:.1f} s, more than {MOST_SECONDS:g}")
    say(f"from files, beside torch, in {seconds:.1f} s")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def tour(python: Path, folder: Path) -> None:
    """The README's Python prints what the README says, on a CPU."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    code = "import torch; torch.cuda.is_available = lambda: False\n" + "\n".join(blocks(page))
    shown = re.search(r"prints, on a CPU:\n\n((?:    .*\n)+)", page)
    wanted = [line.strip() for line in shown[1].splitlines()] if shown else []
    printed = run(python, "-I", "-c", code, where=folder).splitlines()
    if [line.strip() for line in printed] != wanted:
        sys.exit("install: the README's tour printed\n" + "\n".join(printed))


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ["", *project["optional-dependencies"]]
    asked = sys.argv[2:] or [
        "",
        "cli",
        "cpu,cli",
        "jax",
        "reference",
        "cuda,cli",
        "rocm",
        "jax-cuda",
    ]
    with tempfile.TemporaryDirectory(prefix="heedful-install-") as folder:
        wheel = built_twice(Path(sys.argv[1]).absolute(), Path(folder))
        for extra in asked:
            names = extra.split(",")
            assert set(names) <= set(extras), extra
            reason = next((why for name in names if (why := refused(name))), None)
            if reason is not None:
                say(f"[{extra}] left out: {reason}")
            else:
                try_extra(extra, wheel, Path(folder))


if __name__ == "__main__":
    main()
