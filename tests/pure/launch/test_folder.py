"""Folders that native code is loaded from: nobody else can put anything into them or in their
place, whichever step of the path it is that others may write to."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import heedful
from heedful.launch.code import folder as folders
from heedful.launch.code.folder import Folder, NotTrusted, why_not_trusted

pytestmark = pytest.mark.skipif(os.name == "nt", reason="modes and owners are POSIX")

DIRECTORY, FILE, STICKY = stat.S_IFDIR, stat.S_IFREG, stat.S_ISVTX
ME, MY_GROUP = 1000, 1000
MINE = frozenset({ME})
OURS = frozenset({0, ME})


@pytest.mark.parametrize(
    ("owner", "mode", "group", "owners", "only", "trusted"),
    [
        (ME, DIRECTORY | 0o755, 5, OURS, False, True),
        (0, DIRECTORY | 0o755, 5, OURS, False, True),
        (7, DIRECTORY | 0o700, 5, OURS, False, False),
        (0, DIRECTORY | 0o700, 5, MINE, True, False),
        (ME, DIRECTORY | 0o700, 5, MINE, True, True),
        (ME, DIRECTORY | 0o750, 5, MINE, True, False),
        (ME, DIRECTORY | 0o710, MY_GROUP, MINE, True, False),
        (ME, DIRECTORY | 0o701, 5, MINE, True, False),
        (ME, DIRECTORY | 0o775, 5, OURS, False, False),
        (ME, DIRECTORY | 0o775, MY_GROUP, OURS, False, True),
        (ME, DIRECTORY | 0o777, MY_GROUP, OURS, False, False),
        (ME, DIRECTORY | 0o757, 5, OURS, False, False),
        (0, DIRECTORY | STICKY | 0o777, 0, OURS, False, True),
        (7, DIRECTORY | STICKY | 0o777, 0, OURS, False, False),
        (ME, DIRECTORY | STICKY | 0o777, 5, MINE, True, False),
        (ME, FILE | 0o644, 5, OURS, False, True),
        (ME, FILE | 0o664, 5, OURS, False, False),
        (ME, FILE | STICKY | 0o666, 5, OURS, False, False),
    ],
)
def test_what_may_be_relied_on(owner, mode, group, owners, only, trusted):
    assert (why_not_trusted(owner, mode, group, owners, MY_GROUP, only) is None) == trusted


def test_a_new_folder_is_private_and_gives_back_what_was_written(tmp_path):
    with Folder(tmp_path / "a" / "b", create=True) as folder:
        folder.write("x", b"one")
        folder.write("x", b"two")
        assert folder.read("x") == b"two" and folder.names() == ["x"]
    assert {(tmp_path / p).stat().st_mode & 0o777 for p in ("a", "a/b")} == {0o700}


def test_a_missing_folder_is_not_made_unasked(tmp_path):
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "a")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["", "a", "a/b"])
def test_a_step_that_all_may_write_to_is_refused_wherever_it_is(tmp_path, step):
    Folder(tmp_path / "a" / "b" / "c", create=True).__exit__()
    os.chmod(tmp_path / step, 0o777)
    for create in (False, True):
        with pytest.raises(NotTrusted, match=f"{(tmp_path / step)} has mode 777"):
            Folder(tmp_path / "a" / "b" / "c", create=create)
    os.chmod(tmp_path / step, 0o1777)
    Folder(tmp_path / "a" / "b" / "c").__exit__()


def test_nothing_is_made_below_a_step_that_is_refused(tmp_path):
    os.chmod(tmp_path, 0o777)
    with pytest.raises(NotTrusted):
        Folder(tmp_path / "a", create=True)
    assert not any(tmp_path.iterdir())


needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)


@needs_root
@pytest.mark.parametrize("step", ["a", "a/b", "a/b/c"])
def test_a_step_of_somebody_else_is_refused_wherever_it_is(tmp_path, step):
    Folder(tmp_path / "a" / "b" / "c", create=True).__exit__()
    os.chown(tmp_path / step, 4321, -1)
    with pytest.raises(NotTrusted, match=f"{tmp_path / step} belongs to user 4321"):
        Folder(tmp_path / "a" / "b" / "c")


@needs_root
def test_a_link_of_somebody_else_is_refused_where_it_leads_to_a_folder_of_ours(tmp_path):
    Folder(tmp_path / "ours", create=True).__exit__()
    os.chmod(tmp_path, 0o1777)
    os.symlink("ours", tmp_path / "cache")
    Folder(tmp_path / "cache").__exit__()
    os.lchown(tmp_path / "cache", 4321, -1)
    with pytest.raises(NotTrusted, match="link .*cache belongs to user 4321"):
        Folder(tmp_path / "cache")


def test_where_root_is_unknown_its_folders_pass_but_not_in_shared_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_unknown_user", lambda: 65534)
    assert 65534 in folders._owners(shared=False) and 65534 not in folders._owners(shared=True)


@pytest.mark.parametrize("target", ["{}/real", "real", "../{name}/real", "./real/../real"])
def test_a_link_of_ours_is_followed_and_what_it_leads_to_is_checked(tmp_path, target):
    real = tmp_path / "real"
    with Folder(real / "cache", create=True) as folder:
        folder.write("x", b"here")
    os.symlink(target.format(tmp_path, name=tmp_path.name), tmp_path / "link")
    with Folder(tmp_path / "link" / "cache") as folder:
        assert folder.read("x") == b"here"
    os.chmod(real, 0o777)
    with pytest.raises(NotTrusted, match="real has mode 777"):
        Folder(tmp_path / "link" / "cache")


def test_a_link_that_is_put_where_a_folder_is_to_be_made_is_followed_as_one(tmp_path, monkeypatch):
    Folder(tmp_path / "ours", create=True).__exit__()
    mkdir = os.mkdir

    def late(name, mode, *, dir_fd):
        if name == "cache":
            os.symlink("ours", tmp_path / "cache")
        mkdir(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", late)
    with Folder(tmp_path / "cache", create=True) as folder:
        folder.write("x", b"here")
    assert (tmp_path / "ours" / "x").read_bytes() == b"here"


def test_links_in_a_circle_end(tmp_path):
    os.symlink("b", tmp_path / "a")
    os.symlink("a", tmp_path / "b")
    with pytest.raises(OSError, match="symbolic links"):
        Folder(tmp_path / "a")


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(OSError):
            Folder(path, create=True)


def test_what_is_put_in_the_place_of_an_open_folder_is_not_seen(tmp_path):
    with Folder(tmp_path / "a", create=True) as folder:
        folder.write("x", b"ours")
        os.rename(tmp_path / "a", tmp_path / "aside")
        os.mkdir(tmp_path / "a")
        (tmp_path / "a" / "x").write_bytes(b"theirs")
        assert folder.read("x") == b"ours"
        folder.write("y", b"more")
        assert sorted(folder.names()) == ["x", "y"]
    assert not (tmp_path / "a" / "y").exists() and (tmp_path / "aside" / "y").exists()


def test_a_file_that_is_a_link_is_not_read_and_is_replaced_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    with Folder(tmp_path / "a", create=True) as folder:
        os.symlink(tmp_path / "other", tmp_path / "a" / "x")
        with pytest.raises(NotTrusted, match="is a link"):
            folder.read("x")
        folder.write("x", b"ours")
        assert folder.read("x") == b"ours"
    assert (tmp_path / "other").read_bytes() == b"other"


def test_a_file_that_others_may_write_is_not_read(tmp_path):
    with Folder(tmp_path / "a", create=True) as folder:
        folder.write("x", b"ours")
        os.chmod(tmp_path / "a" / "x", 0o602)
        with pytest.raises(NotTrusted, match="x has mode 602"):
            folder.read("x")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_on(tmp_path):
    with Folder(tmp_path / "a", create=True) as folder:
        os.mkfifo(tmp_path / "a" / "x")
        with pytest.raises(NotTrusted, match="not a file"):
            folder.read("x")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "x\0"])
def test_a_name_that_is_a_path_is_refused(tmp_path, name):
    with Folder(tmp_path / "a", create=True) as folder:
        for use in (folder.read, folder.remove, lambda name: folder.write(name, b"")):
            with pytest.raises(ValueError, match="no name of a file"):
                use(name)


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with Folder(tmp_path / "a", create=True) as folder:
        folder.write("x", b"before")
        with pytest.raises(TypeError):
            folder.write("x", "text")  # pyright: ignore[reportArgumentType]
        assert folder.names() == ["x"] and folder.read("x") == b"before"


def test_a_folder_is_closed_after_use(tmp_path):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc")
    Folder(tmp_path / "a", create=True).__exit__()
    os.chmod(tmp_path / "a", 0o755)
    before = descriptors()
    for _ in range(5):
        with pytest.raises(NotTrusted):
            Folder(tmp_path / "a")
        with pytest.raises(FileNotFoundError):
            Folder(tmp_path / "b")
        with Folder(tmp_path / "a", private=False) as folder, folder.lock("l", patience_s=1.0):
            folder.write("x", b"")
    assert descriptors() == before


def test_one_thread_at_a_time_holds_a_lock(tmp_path):
    inside, most = [], []

    def work():
        with Folder(tmp_path, private=False) as folder, folder.lock("l", patience_s=60.0):
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20


def run(code: str, *arguments: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


_HOLD = """
import os, sys, time
from heedful.launch.code.folder import Folder
with Folder(sys.argv[1], private=False) as folder, folder.lock("l", patience_s=60.0):
    if "fork" in sys.argv and os.fork() == 0:
        os.close(1)
        time.sleep(120)
        os._exit(0)
    print("held", flush=True)
    if "die" in sys.argv:
        os._exit(0)
    time.sleep(30)
"""


def test_a_lock_that_is_held_for_ever_is_waited_for_only_so_long(tmp_path, caplog):
    holder = run(_HOLD, str(tmp_path))
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with Folder(tmp_path, private=False) as folder, folder.lock("l", patience_s=0.2):
            assert "is held for 0.2 s" in caplog.text
    finally:
        holder.kill()
        holder.communicate()


def test_a_child_forked_under_a_lock_does_not_go_on_holding_it(tmp_path, caplog):
    holder = run(_HOLD, str(tmp_path), "fork", "die")
    assert holder.stdout and holder.stdout.readline() == "held\n"
    holder.communicate(timeout=60)
    with Folder(tmp_path, private=False) as folder, folder.lock("l", patience_s=20.0):
        assert "is held" not in caplog.text


ALL_USERS, FEW_USERS = "0 0 4294967295\n", "0 100000 65536\n"


@pytest.mark.parametrize(
    "files, user",
    [
        ({"/proc/self/uid_map": ALL_USERS, "/proc/sys/kernel/overflowuid": "65534"}, None),
        ({"/proc/self/uid_map": FEW_USERS, "/proc/sys/kernel/overflowuid": "65534"}, 65534),
        ({"/proc/self/uid_map": FEW_USERS, "/proc/sys/kernel/overflowuid": "none"}, None),
        ({"/proc/self/uid_map": FEW_USERS}, None),
        ({}, None),
    ],
)
def test_users_from_outside_of_the_namespace_are_those_that_the_kernel_names(
    monkeypatch, files, user
):
    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(str(path))
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert folders._unknown_user.__wrapped__() == user


def test_a_new_file_and_a_new_lock_are_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        with Folder(tmp_path / "a", create=True) as folder, folder.lock("l", patience_s=1.0):
            folder.write("x", b"")
            assert {stat.S_IMODE(folder.stat(name).st_mode) for name in ("x", "l")} == {0o600}
    finally:
        os.umask(before)


@pytest.mark.parametrize("unknown, shared", [(None, False), (None, True), (65534, True)])
def test_a_step_is_roots_or_this_users(monkeypatch, unknown, shared):
    monkeypatch.setattr(folders, "_user", lambda: ME)
    monkeypatch.setattr(folders, "_unknown_user", lambda: unknown)
    assert folders._owners(shared) == folders._users(private=False) == OURS
    assert folders._users(private=True) == MINE
