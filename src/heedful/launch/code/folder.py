"""Folders that native code is loaded from: opened step by step, and checked at each.

A path is a list of names, and whoever may write to a folder on the way can put another folder in a
name's place. So every folder and link on the way has to belong to this user or root and to be
writable by nobody else (a sticky folder such as /tmp excepted, where each entry is its owner's). A
folder, once opened, is then used through its descriptor: names are looked up in it, links are not
followed, and a file is checked after it is opened.
"""

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger("heedful.cache")

MOST_LINKS = 40
_POSIX = os.open in os.supports_dir_fd


def _flag(name: str) -> int:
    """A flag of os.open; a system that lacks it needs none."""
    return getattr(os, name, 0)


_NO_LINK = _flag("O_NOFOLLOW")
# A folder on the way need not be readable, only executable.
_PASS = _flag("O_PATH") | _flag("O_DIRECTORY") | _NO_LINK

# Locks that this process holds: a forked child closes its copies, or they would be held for as
# long as it lives.
_held: set[int] = set()


class NotTrusted(PermissionError):
    """Native code from here must not be loaded; the text says why."""


def why_not_trusted(
    owner: int, mode: int, group: int, owners: frozenset[int], own_group: int | None, only: bool
) -> str | None:
    """Why a folder or link on the way to native code cannot be trusted; None if it can. owner,
    mode, group: those of the folder or link. owners: user ids that may own it. own_group: a group
    of this user alone, which may write. only: whether nobody else may even enter it.
    """
    if owner not in owners:
        return f"belongs to user {owner}"
    others = mode & (0o077 if only else 0o022)
    if not only and group == own_group:
        others &= 0o002
    sticky_folder = stat.S_ISDIR(mode) and mode & stat.S_ISVTX
    if others and (only or not sticky_folder):
        return f"has mode {stat.S_IMODE(mode):o}"
    return None


class Folder:
    """A folder of this user (or, unless `private`, of root) whose path was checked. private: it
    must belong to this user, with mode 0700. create: make missing folders of the path. Raises
    NotTrusted with the reason, or OSError. It is a context manager; names are those of its entries.
    """

    def __init__(self, path: str | os.PathLike, private: bool = True, create: bool = False):
        self.path = Path(os.path.abspath(path))
        self._private = private
        self._fd: int | None = None
        if _POSIX:
            self._fd = _open_checked(self.path, private, create)
        elif create:
            self.path.mkdir(parents=True, exist_ok=True)
        elif not self.path.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def _at(self, name: str) -> str:
        """The path of an entry for system calls that have dir_fd."""
        if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
            raise ValueError(f"no name of a file: {name!r}")
        return name if self._fd is not None else str(self.path / name)

    def read(self, name: str) -> bytes:
        """A file's content. Raises NotTrusted for one that others may write, or that is a link."""
        # Without O_NONBLOCK, opening a pipe in the file's place would wait.
        flags = os.O_RDONLY | _NO_LINK | _flag("O_NONBLOCK")
        try:
            handle = os.open(self._at(name), flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotTrusted(f"{self.path / name} is a link") from None
            raise
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise NotTrusted(f"{self.path / name} is not a file")
            if _POSIX:
                _check(self.path / name, status, _users(self._private))
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Writes a file in one step: readers see all of it or nothing, whenever the writer dies."""
        temporary = f"{name}.{os.urandom(8).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        handle = os.open(self._at(temporary), flags, 0o600, dir_fd=self._fd)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            place = {"src_dir_fd": self._fd, "dst_dir_fd": self._fd}
            os.replace(self._at(temporary), self._at(name), **place)
        except BaseException:
            self.remove(temporary)
            raise

    def names(self) -> list[str]:
        return os.listdir(self.path if self._fd is None else self._fd)

    def stat(self, name: str) -> os.stat_result:
        """The status of an entry, of a link itself. Raises FileNotFoundError."""
        return os.stat(self._at(name), dir_fd=self._fd, follow_symlinks=False)

    def touch(self, name: str) -> None:
        """Sets the time of an entry's last change to now."""
        # Windows cannot say whether to follow a link.
        os.utime(self._at(name), dir_fd=self._fd, follow_symlinks=self._fd is None)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        try:
            os.unlink(self._at(name), dir_fd=self._fd)
        except FileNotFoundError:
            return

    @contextmanager
    def lock(self, *names: str, patience_s: float) -> Iterator[None]:
        """Holds the lock file of one of these names, among processes and threads; the system frees
        it when the process ends. Goes on without it if the file system has no locks, or after
        patience_s: a holder may be stopped, or on a machine that is gone. The file exists while the
        lock is held or waited for: whoever frees the lock removes it, and whoever gets a lock on a
        removed file tries again.
        """
        held: list[tuple[str, int]] = []

        def attempt() -> bool:
            for name in names:
                handle = self._lock_file(name)
                if handle is None or (_lock(handle) and self._is_there(name, handle)):
                    held.extend([(name, handle)] if handle is not None else [])
                    return True
                _held.discard(handle)
                os.close(handle)
            return False

        if not _wait(attempt, patience_s):
            log.warning("%s is held for %g s: going on", self.path / names[0], patience_s)
        try:
            yield
        finally:
            for name, handle in held:
                # In a child that was forked meanwhile it is closed already.
                if handle in _held:
                    with suppress(OSError):
                        self.remove(name)
                    _held.discard(handle)
                    _release(handle)

    def _is_there(self, name: str, handle: int) -> bool:
        """Whether the open file is still the one of this name."""
        try:
            return os.path.samestat(self.stat(name), os.fstat(handle))
        except FileNotFoundError:
            return False

    def _lock_file(self, name: str) -> int | None:
        if fcntl is None:
            return None
        try:
            flags = os.O_RDWR | os.O_CREAT | _NO_LINK
            handle = os.open(self._at(name), flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            log.warning("no lock on the cache: %s", error)
            return None
        _held.add(handle)
        return handle


def _wait(attempt: Callable[[], bool], patience_s: float) -> bool:
    """Whether an attempt succeeded in time. Attempts become less frequent."""
    give_up, pause = time.monotonic() + patience_s, 0.001
    while not attempt():
        if time.monotonic() > give_up:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _lock(handle: int) -> bool:
    """Whether the lock was free, or the file system has no locks."""
    assert fcntl is not None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("no lock on the cache: %s", error)
    return True


def _release(handle: int) -> None:
    assert fcntl is not None
    try:
        # Not by closing alone: a child that another thread is just forking has a copy.
        fcntl.flock(handle, fcntl.LOCK_UN)
    except OSError as error:
        log.debug("the cache's lock: %s", error)
    os.close(handle)


def _after_fork() -> None:
    # Closing a copy leaves the parent's lock as it is; unlocking would not.
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _open_checked(path: Path, private: bool, create: bool) -> int:
    """A descriptor of a folder after a check of every folder and link on the way."""
    here, shown, links = os.open("/", _PASS), "/", 0
    try:
        status = os.fstat(here)
        _check("/", status, _owners(False))
        left = list(reversed(path.parts[1:]))
        while left:
            name = left.pop()
            shared = bool(status.st_mode & 0o022)
            entry = _entry(here, name, create)
            step = os.path.normpath(os.path.join(shown, name))
            if stat.S_ISLNK(entry.st_mode):
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                if entry.st_uid not in _owners(shared):
                    raise NotTrusted(f"the link {step} belongs to user {entry.st_uid}")
                # The root, the first part of an absolute link, is a step like any other.
                left += reversed(Path(os.readlink(name, dir_fd=here)).parts)
                continue
            there = os.open(name, _PASS, dir_fd=here)
            os.close(here)
            here, shown = there, step
            status = os.fstat(here)
            _check(shown, status, _owners(shared))
        # A sticky folder will not do here: others could add files.
        mode = status.st_mode & ~stat.S_ISVTX
        why = why_not_trusted(
            status.st_uid, mode, status.st_gid, _users(private), _own_group(), private
        )
        if why:
            raise NotTrusted(f"{path} {why}")
        return os.open(".", os.O_RDONLY, dir_fd=here)
    finally:
        os.close(here)


def _entry(here: int, name: str, create: bool) -> os.stat_result:
    """The status of a name's entry in an open folder; if there is none and `create`, a new folder
    is made."""
    try:
        return os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        if not create:
            raise
    with suppress(FileExistsError):  # another process has just made it
        os.mkdir(name, 0o700, dir_fd=here)
    return os.stat(name, dir_fd=here, follow_symlinks=False)


def _check(path: str | Path, status: os.stat_result, owners: frozenset[int]) -> None:
    why = why_not_trusted(
        status.st_uid, status.st_mode, status.st_gid, owners, _own_group(), only=False
    )
    if why:
        raise NotTrusted(f"{path} {why}")


def _user() -> int:
    return os.geteuid()


def _users(private: bool) -> frozenset[int]:
    return frozenset({_user()} if private else {0, _user()})


def _owners(shared: bool) -> frozenset[int]:
    """The users who may own a folder or link on the way. In a user namespace without root, root's
    folders seem to belong to an unknown user: they pass where only root could have made them, but
    not in a shared folder."""
    unknown = _unknown_user()
    return frozenset({0, _user()} | ({unknown} if unknown is not None and not shared else set()))


@cache
def _unknown_user() -> int | None:
    """The user id that files of users outside of this user namespace, such as root's, appear with;
    None in a namespace that has all users."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


@cache
def _own_group() -> int | None:
    """The group of this user alone, where each user has one of the same name (umask 002)."""
    try:
        import grp
        import pwd

        user = pwd.getpwuid(_user())
        group = grp.getgrgid(user.pw_gid)
    except (ImportError, KeyError):
        return None
    alone = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return group.gr_gid if alone else None
