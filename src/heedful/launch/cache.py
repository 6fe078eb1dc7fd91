"""The disk cache: compiled kernels shared by processes of one user.

Safe when many processes start at once (one compiles, the others wait and load), when one is
killed at any point, and when a file is damaged (then it is compiled again).
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path

from heedful.core import settings
from heedful.launch import store
from heedful.launch.artifact import Artifact

log = logging.getLogger("heedful.cache")

# An entry's modification time says when it was last used, to this precision.
_TOUCH_SECONDS = 24 * 3600


class DiskCache:
    """Artifacts by key in a folder that only this user may use.

    limit_bytes: least recently used entries go when all of them together are larger.
    read_only: never write, never lock.
    """

    def __init__(self, folder: Path, limit_bytes: int, read_only: bool = False):
        self._folder = folder / "kernels"
        self._limit, self._read_only = limit_bytes, read_only
        self.why_not = self._open()
        if self.why_not:
            log.warning("disk cache is off: %s", self.why_not)

    def _open(self) -> str | None:
        if not self._read_only:
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                return str(error)
        return store.why_not_trusted(self._folder, (_user(),), 0o077)

    def get(self, key: str) -> Artifact | None:
        """The artifact of a key, None if it is not there or damaged."""
        if self.why_not:
            return None
        path = self._path(key)
        try:
            artifact = store.parse(path.read_bytes())
            if not self._read_only and time.time() - path.stat().st_mtime > _TOUCH_SECONDS:
                os.utime(path)
            return artifact
        except FileNotFoundError:
            return None
        except (OSError, store.CorruptArtifact) as error:
            log.warning("ignored cache entry %s: %s", path, error)
            return None

    def get_or_make(self, key: str, make: Callable[[], Artifact]) -> tuple[Artifact, bool]:
        """The artifact of a key and whether it had to be made; one process makes it."""
        found = self.get(key)
        if found is not None:
            return found, False
        with self._lock(key):
            found = self.get(key)
            if found is not None:
                return found, False
            made = make()
            self._put(key, made)
        return made, True

    def _put(self, key: str, artifact: Artifact) -> None:
        if self.why_not or self._read_only:
            return
        try:
            store.write(self._path(key), artifact)
            self._trim()
        except OSError as error:
            log.warning("could not keep %s: %s", key, error)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{store.SUFFIX}"

    def _lock(self, key: str):
        if self.why_not or self._read_only:
            return nullcontext()
        from filelock import FileLock

        return _held(FileLock(self._folder / f"{key[:2]}.lock"))

    def _trim(self) -> None:
        """Drops the least recently used entries over the limit, and what dead writers left."""
        entries, total = [], 0
        for path in self._folder.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix == store.SUFFIX:
                entries.append((status.st_mtime, status.st_size, path))
                total += status.st_size
            elif path.suffix == ".tmp" and time.time() - status.st_mtime > _TOUCH_SECONDS:
                path.unlink(missing_ok=True)
        for _, size, path in sorted(entries):
            if total <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= size


@contextmanager
def _held(lock):
    """Holds a lock, or goes on without one where the file system has none."""
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        log.warning("no lock on the cache: %s", error)
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else -1


def default() -> DiskCache:
    """The cache that the settings name."""
    return DiskCache(
        settings.get("cache_dir"), settings.get("cache_limit"), settings.get("cache_read_only")
    )
