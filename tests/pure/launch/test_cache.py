"""The disk cache and packs: shared, crash-safe, bounded, and careful about what they load."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import heedful
from heedful.launch.code import manifest, packs, store
from heedful.launch.code.cache import DiskCache
from heedful.launch.code.folder import Folder
from support.artifacts import artifact
from support.packs import forget

GIB = 1 << 30


def cache(folder: Path | None, limit: int = GIB, read_only: bool = False) -> DiskCache:
    return DiskCache(folder, limit, read_only)


def refuse():
    raise AssertionError("compiled although the cache had it")


def run(code: str, *arguments: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_an_artifact_survives_the_file_format_unchanged():
    assert store.parse("k", store.dump("k", artifact())) == artifact()


@pytest.mark.parametrize("position", [0, 20, 100, 300, -1])
def test_any_changed_byte_is_noticed(position):
    data = bytearray(store.dump("k", artifact()))
    data[position] ^= 1
    with pytest.raises(store.CorruptArtifact):
        store.parse("k", bytes(data))


def test_a_truncated_file_is_noticed_at_every_length():
    data = store.dump("k", artifact())
    for length in range(len(data)):
        with pytest.raises(store.CorruptArtifact):
            store.parse("k", data[:length])


def test_what_was_made_once_is_found_by_the_next_process(tmp_path):
    assert cache(tmp_path).get_or_make("k", artifact) == (artifact(), True)
    assert cache(tmp_path).get_or_make("k", refuse) == (artifact(), False)


def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path):
    cache(tmp_path).get_or_make("k", artifact)
    (path,) = (tmp_path / "kernels").glob("*.kernel")
    path.write_bytes(path.read_bytes()[:-3])
    assert cache(tmp_path).get("k") is None
    assert cache(tmp_path).get_or_make("k", artifact) == (artifact(), True)
    assert cache(tmp_path).get("k") == artifact()


def test_a_read_only_cache_serves_hits_and_writes_nothing(tmp_path):
    cache(tmp_path).get_or_make("k", artifact)
    before = sorted(os.listdir(tmp_path / "kernels"))
    reader = cache(tmp_path, read_only=True)
    assert reader.get_or_make("k", refuse) == (artifact(), False)
    assert reader.get_or_make("other", artifact) == (artifact(), True)
    assert sorted(os.listdir(tmp_path / "kernels")) == before


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_a_folder_that_others_may_enter_is_not_trusted(tmp_path):
    cache(tmp_path).get_or_make("k", artifact)
    os.chmod(tmp_path / "kernels", 0o755)
    opened = cache(tmp_path)
    assert "mode 755" in (opened.why_not or "")
    assert opened.get("k") is None
    assert opened.get_or_make("k", artifact) == (artifact(), True)


def test_a_new_cache_folder_is_private(tmp_path):
    cache(tmp_path)
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700


def test_the_least_recently_used_entries_go_when_the_limit_is_passed(tmp_path):
    size = len(store.dump("a", artifact(b"x" * 1000)))
    small = cache(tmp_path, limit=3 * size)
    for age, key in enumerate("abc"):
        small.get_or_make(key, lambda: artifact(b"x" * 1000))
        stamp = time.time() - 1000 + age
        os.utime(tmp_path / "kernels" / f"{key}.kernel", (stamp, stamp))
    small.get_or_make("d", lambda: artifact(b"x" * 1000))
    assert [key for key in "abcd" if small.get(key)] == ["b", "c", "d"]


def test_an_entry_that_another_process_drops_meanwhile_does_not_end_the_trimming(
    tmp_path, monkeypatch
):
    size, names = len(store.dump("a", artifact(b"x" * 1000))), Folder.names
    small = cache(tmp_path, limit=2 * size)
    for age, key in enumerate("ab"):
        small.get_or_make(key, lambda: artifact(b"x" * 1000))
        stamp = time.time() - 1000 + age
        os.utime(tmp_path / "kernels" / f"{key}.kernel", (stamp, stamp))
    monkeypatch.setattr(Folder, "names", lambda self: ["gone.kernel", *names(self)])
    small.get_or_make("c", lambda: artifact(b"x" * 1000))
    assert [key for key in "abc" if small.get(key)] == ["b", "c"]


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_a_cache_that_others_may_put_another_in_the_place_of_is_not_trusted(tmp_path):
    (tmp_path / "a").mkdir()
    cache(tmp_path / "a").get_or_make("k", artifact)
    os.chmod(tmp_path, 0o777)
    opened = cache(tmp_path / "a")
    assert f"{tmp_path} has mode 777" in (opened.why_not or "")
    assert opened.get("k") is None
    assert opened.get_or_make("k", artifact) == (artifact(), True)


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_a_cache_is_looked_at_anew_each_time(tmp_path):
    opened = cache(tmp_path)
    opened.get_or_make("k", artifact)
    os.rename(tmp_path / "kernels", tmp_path / "aside")
    (tmp_path / "kernels").mkdir(mode=0o777)
    os.chmod(tmp_path / "kernels", 0o777)
    planted = store.dump("k", artifact(b"planted"))
    (tmp_path / "kernels" / "k.kernel").write_bytes(planted)
    assert opened.get("k") is None
    assert opened.get_or_make("k", artifact) == (artifact(), True)
    assert (tmp_path / "kernels" / "k.kernel").read_bytes() == planted


def test_a_cache_that_was_removed_meanwhile_is_made_anew(tmp_path):
    opened = cache(tmp_path)
    opened.get_or_make("k", artifact)
    shutil.rmtree(tmp_path / "kernels")
    assert opened.get_or_make("k", artifact) == (artifact(), True)
    assert opened.get_or_make("k", refuse) == (artifact(), False)


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
@pytest.mark.parametrize("how", ["link", "mode", "pipe", "folder"])
def test_an_entry_that_is_no_file_of_ours_is_not_loaded(tmp_path, how):
    cache(tmp_path).get_or_make("k", artifact)
    path = tmp_path / "kernels" / "k.kernel"
    if how == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "mode":
        path.chmod(0o666)
    else:
        path.unlink()
        os.mkfifo(path) if how == "pipe" else path.mkdir()
    assert cache(tmp_path).get("k") is None
    assert cache(tmp_path).get_or_make("k", artifact) == (artifact(), True)


def test_an_entry_under_the_name_of_another_is_not_loaded(tmp_path):
    cache(tmp_path).get_or_make("k", artifact)
    os.rename(tmp_path / "kernels" / "k.kernel", tmp_path / "kernels" / "other.kernel")
    assert cache(tmp_path).get("other") is None


def test_every_byte_of_an_entry_counts(tmp_path):
    cache(tmp_path).get_or_make("k", artifact)
    path = tmp_path / "kernels" / "k.kernel"
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        assert cache(tmp_path).get("k") is None, position
    path.write_bytes(whole + b"x")
    assert cache(tmp_path).get("k") is None
    path.write_bytes(whole)
    assert cache(tmp_path).get("k") == artifact()


@pytest.mark.parametrize("folder", [None, Path(os.devnull) / "folder"])
def test_without_a_folder_kernels_are_made_and_that_is_said_once(folder, caplog):
    opened = cache(folder)
    for key in "ab":
        assert opened.get_or_make(key, artifact) == (artifact(), True)
        assert opened.get(key) is None
    assert opened.why_not
    assert [(r.name, r.levelname) for r in caplog.records] == [("heedful.cache", "WARNING")]
    assert "disk cache is off" in caplog.text


_FULL = """
import logging, os, resource, sys
from pathlib import Path
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.cache import DiskCache
logging.basicConfig(stream=sys.stdout, format="%(message)s")
made = Artifact(os.urandom(40000), "", "k", "cuda:90", 4, 32, 0, 1, (), 0)
cache = DiskCache(Path(sys.argv[1]), 1 << 30, False)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for key in "abc":
    assert cache.get_or_make(key, lambda: made) == (made, True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
assert cache.get_or_make("a", lambda: made) == (made, True)
assert cache.get("a") == made
"""


@pytest.mark.skipif(os.name == "nt", reason="no limits on files there")
def test_where_no_more_can_be_written_kernels_are_made_and_that_is_said_once(tmp_path):
    told = run(_FULL, str(tmp_path)).communicate(timeout=60)[0]
    assert told.count("compiled kernels are not kept") == 1 == len(told.splitlines())
    assert [p.suffix for p in (tmp_path / "kernels").iterdir()] == [".kernel"]


def test_why_no_more_can_be_written_is_said(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Folder, "write", fail)
    opened = cache(tmp_path)
    for key in "ab":
        assert opened.get_or_make(key, artifact) == (artifact(), True)
    wanted = f"compiled kernels are not kept in {tmp_path / 'kernels'}: disk full"
    assert [record.getMessage() for record in caplog.records] == [wanted]


def test_an_entry_whose_use_cannot_be_noted_is_a_hit_and_that_is_said_once(
    tmp_path, monkeypatch, caplog
):
    cache(tmp_path).get_or_make("k", artifact)
    stamp = time.time() - 3 * 24 * 3600
    os.utime(tmp_path / "kernels" / "k.kernel", (stamp, stamp))

    def fail(*args, **kwargs):
        raise OSError("read-only file system")

    monkeypatch.setattr(os, "utime", fail)
    opened = cache(tmp_path)
    for _ in range(2):
        assert opened.get_or_make("k", refuse) == (artifact(), False)
    wanted = "cannot note that a cache entry was used: read-only file system"
    assert [record.getMessage() for record in caplog.records] == [wanted]


def test_the_use_of_an_entry_is_noted(tmp_path):
    cache(tmp_path).get_or_make("k", artifact)
    path = tmp_path / "kernels" / "k.kernel"
    stamp = time.time() - 3 * 24 * 3600
    os.utime(path, (stamp, stamp))
    cache(tmp_path, read_only=True).get("k")
    assert path.stat().st_mtime == stamp
    cache(tmp_path).get("k")
    assert path.stat().st_mtime > stamp


DAY = 24 * 3600
NOW = 2_000_000_000


@pytest.mark.parametrize("age, noted", [(DAY - 9, False), (DAY, False), (DAY + 9, True)])
def test_the_use_of_an_entry_is_noted_once_a_day(tmp_path, monkeypatch, age, noted):
    cache(tmp_path).get_or_make("k", artifact)
    path = tmp_path / "kernels" / "k.kernel"
    os.utime(path, (NOW - age, NOW - age))
    monkeypatch.setattr(time, "time", lambda: NOW)
    cache(tmp_path).get("k")
    assert (path.stat().st_mtime != NOW - age) == noted


def test_what_a_dead_writer_left_goes_after_a_day(tmp_path, monkeypatch):
    cache(tmp_path).get_or_make("a", artifact)
    folder = tmp_path / "kernels"
    names = {"new.tmp": 0, "day.tmp": DAY, "old.tmp": DAY + 9, "old": DAY + 9}
    for name, age in names.items():
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (NOW - age, NOW - age))
    monkeypatch.setattr(time, "time", lambda: NOW)
    cache(tmp_path).get_or_make("b", artifact)
    assert {p.name for p in folder.iterdir()} >= {*names} - {"old.tmp"}
    assert not (folder / "old.tmp").exists()


def test_who_wants_the_same_kernel_waits_ten_minutes(tmp_path, monkeypatch):
    """Longer than any takes to compile."""
    asked = []
    lock = Folder.lock

    def noted(self, *names, patience_s):
        asked.append((names, patience_s))
        return lock(self, *names, patience_s=patience_s)

    monkeypatch.setattr(Folder, "lock", noted)
    cache(tmp_path).get_or_make("abc", artifact)
    assert asked == [(("abc.lock",), 600)]


def test_other_kernels_are_made_meanwhile_whatever_their_keys_begin_with(tmp_path):
    inside = threading.Barrier(2, timeout=30)
    keys = ["ab" + "0" * 62, "ab" + "1" * 62]

    def make():
        inside.wait()
        return artifact()

    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda key: cache(tmp_path).get_or_make(key, make), keys)
        assert [one for _, one in made] == [True, True]
    assert {p.suffix for p in (tmp_path / "kernels").iterdir()} == {".kernel"}


def test_what_another_process_made_while_the_lock_was_waited_for_is_taken(tmp_path, monkeypatch):
    lock = Folder.lock

    def late(folder, *names, patience_s):
        folder.write("k.kernel", store.dump("k", artifact()))
        return lock(folder, *names, patience_s=patience_s)

    monkeypatch.setattr(Folder, "lock", late)
    assert cache(tmp_path).get_or_make("k", refuse) == (artifact(), False)


_WRITER = """
import sys
from heedful.launch.code import store
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.folder import Folder
made = Artifact(sys.argv[2].encode() * 50000, "", "k", "cuda:90", 4, 32, 0, 1, (), 0)
content = store.dump("k", made)
with Folder(sys.argv[1]) as folder:
    print("ready", flush=True)
    for _ in range(200):
        folder.write("k.kernel", content)
"""


def test_of_many_that_write_an_entry_at_once_readers_see_one_whole(tmp_path):
    reader = cache(tmp_path)
    reader.get_or_make("k", lambda: artifact(b"0" * 50000))
    writers = [run(_WRITER, str(tmp_path / "kernels"), letter) for letter in "xyz"]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
    seen = set()
    while any(writer.poll() is None for writer in writers):
        found = reader.get("k")
        assert found is not None and len(set(found.code)) == 1 and len(found.code) == 50000
        seen.add(found.code[:1])
    assert [w.communicate()[0] for w in writers] == [""] * 3
    assert len(seen) > 1
    assert not [name for name in os.listdir(tmp_path / "kernels") if name.endswith(".tmp")]


_WORKER = """
import sys, time
from pathlib import Path
from heedful.launch.code.cache import DiskCache
from heedful.launch.code.artifact import Artifact
folder, action = Path(sys.argv[1]), sys.argv[2]
def make():
    with open(folder / "made", "a") as file:
        file.write("x")
    (folder / "making").touch()
    time.sleep(60 if action == "hang" else 0.3)
    return Artifact(b"code", "", "k", "cuda:90", 4, 32, 0, 1, (), 0)
found, made = DiskCache(folder, 1 << 30, False).get_or_make("k", make)
print(found.code.decode())
"""


def worker(folder: Path, action: str) -> subprocess.Popen:
    return run(_WORKER, str(folder), action)


def test_of_32_processes_that_start_cold_one_compiles_and_all_get_it(tmp_path):
    workers = [worker(tmp_path, "make") for _ in range(32)]
    assert [w.communicate(timeout=120)[0].strip() for w in workers] == ["code"] * 32
    assert (tmp_path / "made").read_text() == "x"


def test_a_process_killed_while_compiling_blocks_nobody(tmp_path):
    victim = worker(tmp_path, "hang")
    while not (tmp_path / "making").exists():
        time.sleep(0.01)
    waiting = worker(tmp_path, "make")
    time.sleep(0.3)
    victim.send_signal(signal.SIGKILL)
    assert waiting.communicate(timeout=60)[0].strip() == "code"
    assert victim.wait() == -signal.SIGKILL
    if victim.stdout:
        victim.stdout.close()


@pytest.fixture
def no_packs(monkeypatch):
    forget(monkeypatch)


def test_a_pack_gives_back_what_was_put_in(tmp_path, no_packs):
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable": "3.9.0"})
    assert packs.load_pack(tmp_path / "pack") == 1
    assert packs.find("key") == artifact()
    assert packs.find("other") is None
    assert packs.backends() == {("portable", (3, 9, 0))}


def test_of_two_packs_of_a_backend_the_last_one_says_what_it_is_planned_for(tmp_path, no_packs):
    for name, triton in (("one", "3.9.0"), ("other", "3.6.0+git1")):
        packs.write_pack(tmp_path / name, {name: artifact()}, {name: triton, "portable": triton})
        packs.load_pack(tmp_path / name)
    older, newer = (3, 6, 0), (3, 9, 0)
    assert packs.backends() == {("portable", older), ("other", older), ("one", newer)}


def test_the_pack_that_the_environment_names_is_loaded_unasked_and_once(
    tmp_path, no_packs, monkeypatch
):
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable": "3.9.0"})
    monkeypatch.setenv("HEEDFUL_PACK", str(tmp_path / "pack"))
    packs.load_default.cache_clear()
    try:
        assert packs.backends() == {("portable", (3, 9, 0))}
        assert packs.find("key") == artifact()
        packs._loaded.clear()
        assert packs.find("key") is None
        packs.load_default.cache_clear()
        assert packs.find("key") == artifact()
    finally:
        packs.load_default.cache_clear()


def test_what_other_versions_have_to_tell_apart_is_named(tmp_path, no_packs):
    """Files made by a version that is out may not be taken for another's."""
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable": "3.9.0"})
    assert sorted(os.listdir(tmp_path / "pack")) == ["key.kernel", "manifest.json"]
    assert json.loads((tmp_path / "pack" / "manifest.json").read_text())["format"] == 4
    assert (tmp_path / "pack" / "key.kernel").read_bytes().startswith(b"heedful-kernel-3 ")


def test_a_manifest_says_which_kernels_there_are(tmp_path, no_packs):
    packs.write_pack(
        tmp_path / "pack", {"key": artifact()}, {"portable": "3.9.0", "hopper": "3.9.0"}
    )
    told = json.loads((tmp_path / "pack" / manifest.MANIFEST).read_text())
    assert told["backends"] == {"hopper": "3.9.0", "portable": "3.9.0"}
    # Packs of the same kernels are the same text, a fact a line.
    kernels = {"a": artifact(), "key": artifact()}
    for name, keys in (("one", "a key"), ("other", "key a")):
        entries = {key: kernels[key] for key in keys.split()}
        packs.write_pack(tmp_path / name, entries, {"portable": "3.9.0", "hopper": "3.9.0"})
    one, other = ((tmp_path / name / manifest.MANIFEST).read_text() for name in ("one", "other"))
    assert one == other == json.dumps(json.loads(one), indent=1, sort_keys=True)
    content = (tmp_path / "pack" / "key.kernel").read_bytes()
    assert told["kernels"] == {"key": hashlib.sha256(content).hexdigest()}
    # People read in its own file what it is.
    for words in (b'"target": "cuda:90"', b'"symbol": "kernel"', b'"toolchain": "triton 3.9.0"'):
        assert words in content


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_a_pack_may_be_for_all_to_read(tmp_path, no_packs):
    (tmp_path / "pack").mkdir()
    os.chmod(tmp_path / "pack", 0o755)
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable": "3.9.0"})
    assert packs.load_pack(tmp_path / "pack") == 1
    assert packs.find("key") == artifact()


def test_a_packed_kernel_that_was_changed_is_refused(tmp_path, no_packs):
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable": "3.9.0"})
    packs.load_pack(tmp_path / "pack")
    (tmp_path / "pack" / "key.kernel").write_bytes(store.dump("key", artifact(b"other code")))
    with pytest.raises(ValueError, match="does not match the manifest"):
        packs.find("key")


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_a_pack_that_others_may_write_to_is_refused(tmp_path, no_packs):
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable": "3.9.0"})
    os.chmod(tmp_path / "pack", 0o777)
    with pytest.raises(ValueError, match="not trusted.*mode 777"):
        packs.load_pack(tmp_path / "pack")


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_a_pack_that_others_may_put_another_in_the_place_of_is_refused(tmp_path, no_packs):
    packs.write_pack(tmp_path / "a" / "pack", {"key": artifact()}, {"portable": "3.9.0"})
    packs.load_pack(tmp_path / "a" / "pack")
    os.chmod(tmp_path / "a", 0o777)
    with pytest.raises(ValueError, match="not trusted.*mode 777"):
        packs.load_pack(tmp_path / "a" / "pack")
    with pytest.raises(ValueError, match="cannot be loaded.*mode 777"):
        packs.find("key")


def test_every_byte_of_a_packed_kernel_counts(tmp_path, no_packs):
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable": "3.9.0"})
    packs.load_pack(tmp_path / "pack")
    path = tmp_path / "pack" / "key.kernel"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(ValueError, match="does not match the manifest"):
            packs.find("key")
    path.unlink()
    with pytest.raises(ValueError, match="cannot be loaded"):
        packs.find("key")


def test_a_manifest_that_names_another_kernels_file_does_not_load_it(tmp_path, no_packs):
    packs.write_pack(
        tmp_path / "pack", {"a": artifact(), "b": artifact(b"b")}, {"portable": "3.9.0"}
    )
    os.replace(tmp_path / "pack" / "b.kernel", tmp_path / "pack" / "a.kernel")
    path = tmp_path / "pack" / manifest.MANIFEST
    told = json.loads(path.read_text())
    told["kernels"]["a"] = told["kernels"].pop("b")
    path.write_text(json.dumps(told))
    packs.load_pack(tmp_path / "pack")
    with pytest.raises(store.CorruptArtifact, match="another key"):
        packs.find("a")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        json.dumps({"format": 99}),
        json.dumps({"format": manifest.FORMAT}),
        json.dumps({"format": manifest.FORMAT, "kernels": {}}),
        json.dumps({"format": manifest.FORMAT, "kernels": {"k": {}}, "backends": {}}),
        json.dumps({"format": manifest.FORMAT, "kernels": [], "backends": {}}),
        json.dumps({"format": manifest.FORMAT, "kernels": {}, "backends": 3}),
        json.dumps({"format": manifest.FORMAT, "kernels": {}, "backends": ["portable"]}),
        json.dumps({"format": manifest.FORMAT, "kernels": {}, "backends": {"portable": 3}}),
    ],
)
def test_a_folder_without_a_good_manifest_is_no_pack(tmp_path, no_packs, text):
    folder = tmp_path / "pack"
    folder.mkdir(mode=0o700)
    (folder / manifest.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="pack .*manifest.json"):
        packs.load_pack(folder)
    assert packs.find("k") is None and packs.backends() == frozenset()
