"""The disk cache: compiled kernels shared by processes of one user.

It is safe if many processes start at once (one compiles, the others wait and load), if one is
killed at any point, if a file is damaged (the kernel is compiled again), if the disk is full or
read-only (the kernel is not kept), and if others may write to a folder on the way to it (the cache
is not used). Each kind of error is reported once.
"""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from heedful.launch.code import store
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.folder import Folder

log = logging.getLogger("heedful.cache")

# An entry's modification time says when it was last used, to this precision.
_TOUCH_SECONDS = 24 * 3600
# Longer than any kernel takes to compile.
PATIENCE_SECONDS = 600.0


class DiskCache:
    """Artifacts by key in a folder that only this user may use. folder: None means no cache.
    limit_bytes: if all entries together are larger, the least recently used are deleted. read_only:
    never write, never lock. why_not: why the last access failed, None if it did not.
    """

    def __init__(self, folder: Path | None, limit_bytes: int, read_only: bool):
        self._path = None if folder is None else folder / "kernels"
        self._limit, self._read_only = limit_bytes, read_only
        self._said: set[str] = set()
        self.why_not: str | None = None
        # Opened once, so that a warning comes early.
        with self._open() or nullcontext():
            pass

    def _open(self) -> Folder | None:
        """The folder, checked each time: it may have been created or replaced since."""
        self.why_not = None
        try:
            if self._path is None:
                raise FileNotFoundError("there is no home folder: set HEEDFUL_CACHE_DIR")
            return Folder(self._path, create=not self._read_only)
        except OSError as error:
            self.why_not = str(error)
            if not (self._read_only and isinstance(error, FileNotFoundError)):
                self._say("disk cache is off", error)
            return None

    def _say(self, what: str, error: Exception) -> None:
        """Warns, once for each kind of trouble."""
        first = what not in self._said
        self._said.add(what)
        log.log(logging.WARNING if first else logging.DEBUG, "%s: %s", what, error)

    def get(self, key: str) -> Artifact | None:
        """The artifact of a key, None if it is not there or damaged."""
        with self._open() or nullcontext() as folder:
            return None if folder is None else self._load(folder, key)

    def get_or_make(self, key: str, make: Callable[[], Artifact]) -> tuple[Artifact, bool]:
        """The artifact of a key and whether it had to be made; one process makes it."""
        with self._open() or nullcontext() as folder:
            if folder is None:
                return make(), True
            artifact = self._load(folder, key)
            if artifact is not None:
                return artifact, False
            if self._read_only:
                return make(), True
            with folder.lock(f"{key}.lock", patience_s=PATIENCE_SECONDS):
                artifact = self._load(folder, key)
                if artifact is not None:
                    return artifact, False
                made = make()
                self._keep(folder, key, made)
        return made, True

    def _load(self, folder: Folder, key: str) -> Artifact | None:
        name = f"{key}{store.SUFFIX}"
        try:
            artifact = store.parse(key, folder.read(name))
        except FileNotFoundError:
            return None
        except (OSError, store.CorruptArtifact) as error:
            log.warning("ignored cache entry %s: %s", folder.path / name, error)
            return None
        try:
            if not self._read_only and time.time() - folder.stat(name).st_mtime > _TOUCH_SECONDS:
                folder.touch(name)
        except OSError as error:
            self._say("cannot note that a cache entry was used", error)
        return artifact

    def _keep(self, folder: Folder, key: str, artifact: Artifact) -> None:
        try:
            folder.write(f"{key}{store.SUFFIX}", store.dump(key, artifact))
            self._trim(folder)
        except OSError as error:
            self._say(f"compiled kernels are not kept in {folder.path}", error)

    def _trim(self, folder: Folder) -> None:
        """Deletes the least recently used entries over the limit, and files that dead writers
        left."""
        entries, total = [], 0
        for name in folder.names():
            try:
                status = folder.stat(name)
            except FileNotFoundError:
                continue
            if name.endswith(store.SUFFIX):
                entries.append((status.st_mtime, status.st_size, name))
                total += status.st_size
            elif (
                name.endswith((".tmp", ".lock")) and time.time() - status.st_mtime > _TOUCH_SECONDS
            ):
                folder.remove(name)
        for _, size, name in sorted(entries):
            if total <= self._limit:
                break
            folder.remove(name)
            total -= size
