"""Copies of the sources and tests, one for each that works at them."""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Hidden folders that belong to the sources; others are made.
HIDDEN = (".github", ".ci")


class Trees:
    """Folders that hold the same files."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders

    def copy(self, root: Path) -> None:
        """Makes each that of the repository, committed or not, with compiled code."""
        first, *others = self.folders
        shutil.rmtree(first, ignore_errors=True)
        for name in listed(root):
            (first / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, first / name)
        compiled = [sys.executable, "-m", "compileall", "-q", "-j", "0", "src", "tests"]
        subprocess.run(compiled, cwd=first, stdout=subprocess.DEVNULL)

        def repeat(folder: Path) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(first, folder)

        with ThreadPoolExecutor() as threads:
            list(threads.map(repeat, others))


def listed(root: Path) -> list[Path]:
    """The files that make up the sources, by their paths from the root: those that git knows or
    does not ignore; where there is no repository, all that nothing has made."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
        names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
        found = (Path(name) for name in names.decode().split("\0") if name)
    else:
        found = (path.relative_to(root) for path in _walked(root))
    return sorted(path for path in found if (root / path).is_file())


def _walked(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif path.name in HIDDEN or not path.name.startswith((".", "__pycache__")):
            yield from _walked(path)
