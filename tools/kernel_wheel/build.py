"""Builds the wheel of compiled kernels: `make kernels`,
python tools/kernel_wheel/build.py VENV FOLDER.

It compiles every kernel that the problems of `problems.py` need, into this user's cache, and
puts the machine code, without PTX, with a manifest into a package of data. VENV has what builds
wheels. The same commit gives the same bytes, and what did not change is not compiled again.
--cuda 12: the set for older drivers, by the assembler of CUDA 12 that Triton also has. What the
cache has of the set for CUDA 13 is only assembled anew.
--share 1/4 builds no wheel: it compiles a fourth of the kernels into the cache, and with --seconds
begins no more after that time. Machines can share the work: by --into a share's machine code,
without PTX, lies in a folder as in a cache, and a later build with HEEDFUL_CACHE_DIR=folder takes
it.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import heedful  # noqa: E402
from heedful.core.base import installed  # noqa: E402
from heedful.core.base.device import by_name  # noqa: E402
from heedful.launch.code.artifact import Artifact  # noqa: E402
from heedful.launch.code.cache import DiskCache  # noqa: E402
from heedful.launch.code.identity import cache_key, told  # noqa: E402
from heedful.launch.code.manifest import WheelFacts  # noqa: E402
from heedful.launch.code.wheels import NAMES  # noqa: E402
from heedful.launch.prebuild import compile_all, kernels, prebuild  # noqa: E402
from heedful.launch.record import Entry  # noqa: E402
from heedful.launch.spec import KernelCall  # noqa: E402
from kernel_wheel import older, problems  # noqa: E402

ARCH = "sm_90"
# Plans may differ between them, kernels do for few problems.
DEVICES = [by_name("H200"), by_name("H100")]
# By this Triton 3.9 is told an assembler, for Hopper too.
NAMED = "TRITON_PTXAS_BLACKWELL_PATH"
MOST_BYTES = 90 * 10**6
# It is data, for every machine that has such a GPU.
TAG = "py3-none-manylinux_2_17_x86_64.manylinux_2_17_aarch64"
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "Compiled kernels of heedful {version} for sm_90 (H100, H200), drivers of CUDA {cuda}"
readme = "README.md"
license = "MIT"
license-files = ["LICENSE"]
requires-python = ">=3.11"

[project.urls]
Source = "https://github.com/heedful/heedful"

[tool.hatch.build.targets.wheel]
packages = ["{module}"]

[tool.hatch.build.targets.wheel.hooks.custom]
"""
HOOK = """\
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tag(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data["tag"] = "{tag}"
"""
README = """\
Kernels that [heedful](https://github.com/heedful/heedful) {version} would otherwise compile at
first use, for NVIDIA's H100 and H200 and drivers that serve CUDA {cuda}. It holds machine code and
no Python code; `pip install "heedful[kernels]"` installs it, and heedful finds it.
"""


def build(venv: Path, folder: Path, entries: list[Entry], cuda: int, jobs: int) -> Path:
    """The wheel. Raises ValueError if its kernels need another CUDA than it is to be for."""
    module = next(name for name in NAMES if ("cu12" in name) == (cuda == 12))
    name = module.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        facts = WheelFacts(heedful.__version__, ARCH, cuda)
        count = prebuild(entries, DEVICES, root / module, jobs, progress=_say, wheel=facts)
        (root / module / "__init__.py").write_text(f'"""Compiled kernels of heedful, {ARCH}."""\n')
        words = {"name": name, "module": module, "version": heedful.__version__, "cuda": cuda}
        (root / "pyproject.toml").write_text(PROJECT.format(**words))
        (root / "hatch_build.py").write_text(HOOK.format(tag=TAG))
        (root / "README.md").write_text(README.format(**words))
        shutil.copy(ROOT / "LICENSE", root)
        for path in (root, root / module):
            path.chmod(0o755)
        for path in root.rglob("*.*"):
            path.chmod(0o644)
        for old in folder.glob(f"{module}-*.whl"):
            old.unlink()
        command = (venv / "bin/python", "-m", "build", "--wheel", "--no-isolation")
        time = os.environ.get("SOURCE_DATE_EPOCH") or _time_of_commit()
        subprocess.run(
            [*command, "--outdir", folder, root],
            env=os.environ | {"SOURCE_DATE_EPOCH": time},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        (wheel,) = folder.glob(f"{module}-{heedful.__version__}-*.whl")
    size = wheel.stat().st_size
    sys.stdout.write(f"kernels: {count} kernels, {size / 1e6:.1f} MB, {wheel}\n")
    if size > MOST_BYTES:
        raise ValueError(f"{wheel} has {size} bytes, at most {MOST_BYTES} may be uploaded")
    return wheel


def compile_share(
    entries: list[Entry],
    share: tuple[int, int],
    seconds: float,
    jobs: int,
    folder: Path | None = None,
) -> tuple[int, int]:
    """Compiles a share of the kernels, which is the same on every machine; how many are done, and
    how many it has. share: which, counted from 0, and how many there are. folder: a cache that
    machine code is written to."""
    wanted, _ = kernels(entries, DEVICES)
    which, shares = share
    chosen = [wanted[key] for key in sorted(wanted)[which::shares]]
    cache = folder and DiskCache(folder, sys.maxsize, read_only=False)

    def keep(call: KernelCall, arch: str, artifact: Artifact) -> None:
        if cache:
            cache.get_or_make(cache_key(call, arch), lambda: replace(artifact, text=""))

    return compile_all(chosen, jobs, seconds, keep), len(chosen)


def share_of(text: str) -> tuple[int, int]:
    """ "2/4" -> (1, 4)."""
    which, _, of = text.partition("/")
    if not (which.isdecimal() and of.isdecimal() and 1 <= int(which) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: 1/4 to 4/4 are")
    return int(which) - 1, int(of)


def assembled_for(cuda: int) -> dict[str, str]:
    """What the environment says so that code is assembled for drivers of this CUDA: what is said
    already, by default what names the Triton's assembler of that version. Raises ValueError without
    one."""
    if NAMED in os.environ:
        return {NAMED: os.environ[NAMED]}
    compiler = installed.compiler()
    for path in compiler.assemblers.values() if compiler else ():
        if installed.assembler_version(path).startswith(f"{cuda}."):
            return {NAMED: str(path)}
    raise ValueError(f"the Triton here has no assembler of CUDA {cuda}: name one by {NAMED}")


def tell_assembler(entries: list[Entry], jobs: int, assembles: bool) -> None:
    """Tells the compiler of the assembler of CUDA 12. assembles: kernels that the cache has for
    CUDA 13, too; unless the compiler was told something else, which that assembler would not be."""
    named = assembled_for(12)
    wanted, _ = kernels(entries, DEVICES) if assembles and not told() else ({}, None)
    compiled = {key: cache_key(*one) for key, one in wanted.items()}
    os.environ |= named
    (assembler,) = map(Path, named.values())
    count = older.assemble_all(wanted, compiled, assembler, jobs)
    sys.stdout.write(f"kernels: {count} assembled for CUDA 12\n")


def _say(done: int, total: int, name: str) -> None:
    if done % 50 == 0 or done == total:
        sys.stdout.write(f"kernels: {done} of {total}\n")
        sys.stdout.flush()


def _time_of_commit() -> str:
    command = ("git", "log", "-1", "--format=%ct")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("venv", type=Path, nargs="?")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--cuda", type=int, choices=(12, 13), default=13)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--groups", nargs="*", help="those of problems.py alone")
    parser.add_argument("--share", type=share_of, help="compile it and build no wheel: 1/4 to 4/4")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a share")
    parser.add_argument("--into", type=Path, help="a folder for a share's machine code")
    given = parser.parse_args()
    if given.share is None and given.folder is None:
        parser.error("VENV and FOLDER are wanted where no --share is")
    entries = problems.entries(given.groups)
    if given.cuda == 12:
        tell_assembler(entries, given.jobs, given.share is None)
    if given.share is not None:
        share = given.share, given.seconds, given.jobs, given.into
        done, count = compile_share(entries, *share)
        sys.stdout.write(f"kernels: {done} of {count} in the cache\n")
        sys.exit(done < count)
    build(given.venv, given.folder, entries, given.cuda, given.jobs)


if __name__ == "__main__":
    main()
