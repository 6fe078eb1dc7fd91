"""How the folders of native code are walked to and locked: what the system is asked for, step by
step, and what is made of its answers."""

import errno
import os
import stat
from types import SimpleNamespace
from typing import Any

import pytest

from heedful.launch.code import folder as folders
from heedful.launch.code.folder import MOST_LINKS, Folder

fcntl = pytest.importorskip("fcntl")


def test_every_step_from_the_root_on_is_looked_at_once(tmp_path, monkeypatch):
    looked = []
    check = folders._check

    def noted(path, status, owners):
        looked.append(str(path))
        check(path, status, owners)

    monkeypatch.setattr(folders, "_check", noted)
    place = tmp_path / "a" / "b"
    Folder(place, create=True).__exit__()
    assert looked == [str(path) for path in (*reversed(place.parents), place)]


def test_a_folder_on_the_way_need_not_be_readable(tmp_path, monkeypatch):
    """Who is root may read all: what the system is asked for says it."""
    opened = []
    system = os.open

    def noted(name, flags, *mode, **where):
        opened.append(flags)
        return system(name, flags, *mode, **where)

    monkeypatch.setattr(os, "open", noted)
    Folder(tmp_path).__exit__()
    *on_the_way, last = opened
    assert len(on_the_way) == len(tmp_path.parts) and last == os.O_RDONLY
    passing = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW
    assert set(on_the_way) == {passing}


def test_a_flag_that_the_system_lacks_asks_for_nothing():
    assert folders._flag("O_OF_TOMORROW") == 0 and folders._flag("O_CREAT") == os.O_CREAT


def test_a_step_that_becomes_a_link_once_it_was_looked_at_is_not_followed(tmp_path, monkeypatch):
    for name in ("step", "other"):
        Folder(tmp_path / name / "in", create=True).__exit__()
    look = folders._entry

    def swapped(here, name, create):
        found = look(here, name, create)
        if name == "step":
            os.rename(tmp_path / "step", tmp_path / "gone")
            os.symlink("other", tmp_path / "step")
        return found

    monkeypatch.setattr(folders, "_entry", swapped)
    with pytest.raises(OSError):
        Folder(tmp_path / "step" / "in")


def test_as_many_links_are_followed_as_the_system_follows(tmp_path):
    Folder(tmp_path / "end", create=True).__exit__()
    before = "end"
    for number in range(1, MOST_LINKS + 2):
        os.symlink(before, tmp_path / str(number))
        before = str(number)
    most = tmp_path / str(MOST_LINKS)
    assert most.is_dir()
    Folder(most).__exit__()
    for follow in (os.stat, Folder):
        with pytest.raises(OSError) as raised:
            follow(tmp_path / before)
        assert raised.value.errno == errno.ELOOP


@pytest.mark.parametrize("mode, shared", [(0o711, False), (0o755, False), (0o1770, True)])
def test_whose_a_step_may_be_depends_on_who_may_write_to_the_folder_before(
    tmp_path, monkeypatch, mode, shared
):
    asked = []
    owners = folders._owners
    monkeypatch.setattr(folders, "_owners", lambda shared: asked.append(shared) or owners(shared))
    Folder(tmp_path / "a" / "b", create=True).__exit__()
    # The root itself lies in no folder.
    assert asked[0] is False
    os.chmod(tmp_path / "a", mode)
    Folder(tmp_path / "a" / "b").__exit__()
    assert asked[-1] is shared
    os.chmod(tmp_path / "a", 0o1702)
    Folder(tmp_path / "a" / "b").__exit__()
    assert asked[-1] is True


def group_of(name: str, members: list[str]) -> SimpleNamespace:
    return SimpleNamespace(gr_name=name, gr_mem=members, gr_gid=77)


@pytest.mark.parametrize(
    "group, own",
    [
        (group_of("me", []), 77),
        (group_of("me", ["me"]), 77),
        (group_of("me", ["me", "you"]), None),
        (group_of("me", ["you"]), None),
        (group_of("users", []), None),
        (group_of("users", ["me"]), None),
    ],
)
def test_a_group_is_ones_own_if_it_is_named_alike_and_has_no_other_member(group, own, monkeypatch):
    import grp
    import pwd

    user = SimpleNamespace(pw_name="me", pw_gid=5)
    monkeypatch.setattr(pwd, "getpwuid", {os.geteuid(): user}.__getitem__)
    monkeypatch.setattr(grp, "getgrgid", {5: group}.__getitem__)
    assert folders._own_group.__wrapped__() == own
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert folders._own_group.__wrapped__() is None


def test_a_link_is_used_itself_not_what_it_leads_to(tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    os.utime(tmp_path / "other", (5, 5))
    with Folder(tmp_path / "a", create=True) as folder:
        os.symlink(tmp_path / "other", tmp_path / "a" / "x")
        folder.touch("x")
        assert folder.stat("x").st_mtime > 5 and stat.S_ISLNK(folder.stat("x").st_mode)
    assert (tmp_path / "other").stat().st_mtime == 5


def test_a_link_in_the_place_of_a_lock_is_no_lock(tmp_path, caplog):
    with Folder(tmp_path / "a", create=True) as folder:
        os.symlink(tmp_path / "made", tmp_path / "a" / "l")
        with folder.lock("l", patience_s=1.0):
            assert "no lock on the cache" in caplog.text
    assert {record.name for record in caplog.records} == {"heedful.cache"}
    assert not (tmp_path / "made").exists()


def test_a_lock_is_given_back_though_a_copy_of_its_descriptor_is_open(tmp_path, caplog):
    """As a child has that another thread is just forking."""
    with Folder(tmp_path / "a", create=True) as folder:
        with folder.lock("l", patience_s=1.0):
            (handle,) = folders._held
            copy = os.dup(handle)
        assert not folders._held
        with folder.lock("l", patience_s=0.0):
            assert not caplog.records
    os.close(copy)


def test_a_child_that_leaves_the_lock_closes_nothing_of_its_own(tmp_path):
    with Folder(tmp_path / "a", create=True) as folder, folder.lock("l", patience_s=1.0):
        folders._after_fork()
        own = os.open(os.devnull, os.O_RDONLY)
    os.fstat(own)
    os.close(own)


def wait(patience_s: float) -> bool:
    return folders._wait(lambda: folders._lock(3), patience_s)


def test_whoever_frees_a_lock_takes_its_file_along(tmp_path):
    with Folder(tmp_path / "a", create=True) as folder:
        with folder.lock("l", patience_s=1.0):
            assert folder.names() == ["l"]
        assert folder.names() == []


def test_a_lock_on_a_file_that_is_gone_is_none(tmp_path, monkeypatch, caplog):
    """Whoever waited for the file that the holder removed, and whoever made one of its name since,
    would both be holders."""
    with Folder(tmp_path / "a", create=True) as folder:
        real, opened = folders._lock, []

        def lock(handle: int) -> bool:
            opened.append(os.fstat(handle).st_ino)
            if len(opened) == 1:
                os.rename(tmp_path / "a" / "l", tmp_path / "gone")
            return real(handle)

        monkeypatch.setattr(folders, "_lock", lock)
        with folder.lock("l", patience_s=5.0):
            assert len(opened) == 2 and folder.stat("l").st_ino == opened[1]
    assert not folders._held and not caplog.records


def test_any_of_several_locks_that_is_free_is_held(tmp_path, caplog):
    with (
        Folder(tmp_path / "a", create=True) as folder,
        folder.lock("1", "2", patience_s=1.0),
        folder.lock("1", "2", patience_s=1.0),
    ):
        assert sorted(folder.names()) == ["1", "2"] and not caplog.records
        with folder.lock("1", "2", patience_s=0.1):
            assert "is held for 0.1 s" in caplog.text
        assert sorted(folder.names()) == ["1", "2"]


class Locks:
    """fcntl of a system that answers as it is told; and its clock."""

    LOCK_EX, LOCK_NB, LOCK_UN = 2, 4, 8

    def __init__(self, *answers: OSError | None):
        self.answers, self.slept, self.now = list(answers), [], 0.0

    def flock(self, handle: int, operation: int) -> None:
        assert (handle, operation) == (3, self.LOCK_EX | self.LOCK_NB)
        answer = self.answers.pop(0) if self.answers else BlockingIOError()
        if answer is not None:
            raise answer

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def locks(monkeypatch):
    def answering(*answers: OSError | None) -> Locks:
        made: Any = Locks(*answers)
        monkeypatch.setattr(folders, "fcntl", made)
        clock = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
        monkeypatch.setattr(folders, "time", clock)
        return made

    return answering


def test_a_held_lock_is_asked_for_ever_more_rarely_but_20_times_a_second(locks):
    made = locks(*[BlockingIOError()] * 9, None)
    assert wait(60.0) is True
    assert made.slept == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05, 0.05]


def test_a_lock_is_waited_for_until_more_than_the_patience_has_passed(locks):
    made = locks()
    assert wait(0.003) is False
    assert made.slept == [0.001, 0.002, 0.004]


def test_a_file_system_without_locks_is_gone_on_with(locks, caplog):
    made = locks(OSError(errno.ENOLCK, "no locks"))
    assert wait(60.0) is True
    assert not made.slept and "no lock on the cache: [Errno" in caplog.text


def test_without_descriptors_of_folders_entries_are_paths(tmp_path, monkeypatch, caplog):
    """As on Windows."""
    monkeypatch.setattr(folders, "_POSIX", False)
    monkeypatch.setattr(folders, "fcntl", None)
    with pytest.raises(FileNotFoundError, match="b"):
        Folder(tmp_path / "a" / "b")
    for _ in range(2):
        with Folder(tmp_path / "a" / "b", create=True) as folder, folder.lock("l", patience_s=1.0):
            folder.write("x", b"one")
            os.utime(tmp_path / "a" / "b" / "x", (5, 5))
            folder.touch("x")
            assert folder.stat("x").st_mtime > 5
            assert folder.read("x") == b"one" and folder.names() == ["x"]
            folder.remove("x")
            assert folder.names() == []
    Folder(tmp_path / "a" / "b").__exit__()
    assert not caplog.records
