"""The disk cache and packs: shared, crash-safe, bounded, and careful about what they load."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import heedful
from heedful.launch import packs, store
from heedful.launch.artifact import Artifact, Parameter
from heedful.launch.cache import DiskCache

GIB = 1 << 30


def artifact(code: bytes = b"\x7fELF machine code\n\0") -> Artifact:
    return Artifact(
        code,
        "// text",
        "kernel",
        "cuda:90",
        4,
        32,
        1024,
        1,
        (Parameter("x_ptr", "*bf16", 0), Parameter("n", "i32", 8)),
        12,
        tensor_maps={"q": {"swizzle": 3, "block_size": [64, 64]}},
        toolchain="triton 3.9.0",
    )


def cache(folder: Path, limit: int = GIB, read_only: bool = False) -> DiskCache:
    return DiskCache(folder, limit, read_only)


def refuse():
    raise AssertionError("compiled although the cache had it")


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


_WORKER = """
import sys, time
from pathlib import Path
from heedful.launch.cache import DiskCache
from heedful.launch.artifact import Artifact
folder, action = Path(sys.argv[1]), sys.argv[2]
def make():
    with open(folder / "made", "a") as file:
        file.write("x")
    (folder / "making").touch()
    time.sleep(60 if action == "hang" else 0.3)
    return Artifact(b"code", "", "k", "cuda:90", 4, 32, 0, 1, (), 0)
found, made = DiskCache(folder, 1 << 30).get_or_make("k", make)
print(found.code.decode())
"""


def worker(folder: Path, action: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1])}
    command = [sys.executable, "-c", _WORKER, str(folder), action]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


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
    monkeypatch.setattr(packs, "_loaded", {})
    monkeypatch.setattr(packs, "_backends", set())


def test_a_pack_gives_back_what_was_put_in(tmp_path, no_packs):
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable"})
    assert packs.load_pack(tmp_path / "pack") == 1
    assert packs.find("key") == artifact()
    assert packs.find("other") is None
    assert packs.backends() == {"portable"}


def test_a_packed_kernel_that_was_changed_is_refused(tmp_path, no_packs):
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable"})
    packs.load_pack(tmp_path / "pack")
    (tmp_path / "pack" / "key.kernel").write_bytes(store.dump("key", artifact(b"other code")))
    with pytest.raises(ValueError, match="does not match the manifest"):
        packs.find("key")


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_a_pack_that_others_may_write_to_is_refused(tmp_path, no_packs):
    packs.write_pack(tmp_path / "pack", {"key": artifact()}, {"portable"})
    os.chmod(tmp_path / "pack", 0o777)
    with pytest.raises(ValueError, match="not trusted.*mode 777"):
        packs.load_pack(tmp_path / "pack")


@pytest.mark.parametrize("text", ["", "not json", json.dumps({"format": 99})])
def test_a_folder_without_a_good_manifest_is_no_pack(tmp_path, no_packs, text):
    folder = tmp_path / "pack"
    folder.mkdir(mode=0o700)
    (folder / packs.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="pack"):
        packs.load_pack(folder)
