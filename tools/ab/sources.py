"""Where a side's sources are: a folder, an archive, a bundle, or a commit."""

import subprocess
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz")


def sources(told: str, scratch: Path) -> Path:
    """The folder with `heedful/` in it. scratch: where archives are unpacked.

    Raises ValueError for what has no heedful in it.
    """
    path = Path(told)
    if path.is_dir():
        return _within(path.resolve(), told)
    scratch.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(ARCHIVES):
        with tarfile.open(path) as archive:
            archive.extractall(scratch, filter="data")
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            archive.extractall(scratch)
    elif path.suffix == ".bundle":
        _git("clone", "--quiet", "--no-checkout", str(path.resolve()), str(scratch))
        heads = _git("-C", str(scratch), "bundle", "list-heads", str(path.resolve()))
        _git("-C", str(scratch), "checkout", "--quiet", heads.split()[0])
    else:
        _unpack_commit(told, scratch)
    return _within(scratch.resolve(), told)


def _unpack_commit(commit: str, scratch: Path) -> None:
    archive = scratch / "src.tar"
    try:
        _git("-C", str(ROOT), "archive", "-o", str(archive.resolve()), commit, "src")
    except ValueError as error:
        raise ValueError(f"{commit!r} is no folder, archive, bundle or commit: {error}") from None
    with tarfile.open(archive) as packed:
        packed.extractall(scratch, filter="data")


def _within(folder: Path, told: str) -> Path:
    for found in (folder, folder / "src", *folder.glob("*/src")):
        if (found / "heedful" / "__init__.py").exists():
            return found
    raise ValueError(f"{told} must have heedful/ or src/heedful/ in it")


def _git(*arguments: str) -> str:
    """Raises ValueError with what git says is wrong."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError("git is not installed") from None
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return done.stdout
