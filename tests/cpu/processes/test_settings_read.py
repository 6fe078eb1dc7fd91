"""Each setting is read when the table of settings says so, and `heedful.configure` changes what was
read at the first call of a kind."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("jax")

import torch

import heedful.torch as typed
from heedful import configure
from heedful.core.base import settings
from heedful.core.base.settings import KIND, START, TABLE, TRACE, USE, variable
from heedful.jax.base import device
from heedful.launch import compiler
from heedful.launch.code import packs
from support.runs import standin

heedful: Any = typed
INT = torch.int32


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """No setting is set, and none is left behind."""
    for name in TABLE:
        # A value to put back: that there is none.
        monkeypatch.setenv(variable(name), "")
        monkeypatch.delenv(variable(name))


def raises(run: Callable[[], Any]) -> bool:
    with contextlib.suppress(ValueError):
        run()
        return False
    return True


def attend(rows: int = 40, dtype=torch.float16) -> None:
    q = torch.zeros(1, rows, 1, 64, dtype=dtype)
    heedful.flash_attn_func(q, q, q)


def dropped(rows: int = 40, dtype=torch.float16) -> None:
    """A call that no kernel takes with numerics="invariant"."""
    q = torch.zeros(1, rows, 1, 64, dtype=dtype)
    heedful.flash_attn_func(q, q, q, dropout_p=0.5, dropout_seed=1)


def over_pages(rows: int, dtype=torch.float16) -> None:
    """A call whose first page does not exist."""
    q, pages = torch.zeros(1, rows, 1, 64, dtype=dtype), torch.zeros(2, 16, 1, 64, dtype=dtype)
    table, lengths = torch.full((1, 2), 9, dtype=INT), torch.tensor([20], dtype=INT)
    heedful.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)


MACHINES: list[standin.Gpu] = []


def leaves_sms(dtype=torch.float16) -> bool:
    """Whether a call of more tiles than an H200 has SMs is of fewer programs."""
    q = torch.zeros(1, 40000, 1, 64, dtype=dtype)
    heedful.flash_attn_func(q, q, q)
    return MACHINES[-1].launches[-1].grid[0] == 124


def in_parts(rows: int, dtype=torch.float16) -> None:
    """A call that needs scratch."""
    q, k = torch.zeros(1, rows, 8, 64, dtype=dtype), torch.zeros(1, 4096, 1, 64, dtype=dtype)
    heedful.flash_attn_with_kvcache(q, k, k, cache_seqlens=4000, num_splits=4)


# Of each: a text, and what tells whether it is heeded: of a known kind of call, and of a new one.
SEEN: dict[str, tuple[str, Callable[[], bool], Callable[[], bool]]] = {
    "backend": (
        "nobody's",
        lambda: raises(attend),
        lambda: raises(lambda: attend(41, torch.float32)),
    ),
    "numerics": (
        "invariant",
        lambda: raises(dropped),
        lambda: raises(lambda: dropped(41, torch.float32)),
    ),
    "workspace_limit": (
        "0",
        lambda: raises(lambda: in_parts(1)),
        lambda: raises(lambda: in_parts(1, torch.bfloat16)),
    ),
    "sm_margin": ("7", leaves_sms, lambda: leaves_sms(torch.bfloat16)),
    "check_pages": (
        "1",
        lambda: raises(lambda: over_pages(1)),
        lambda: raises(lambda: over_pages(1, torch.bfloat16)),
    ),
}
FOLDER = Path("/proc/nowhere")
# What tells whether a text is heeded.
USED: dict[str, tuple[str, Callable[[], bool]]] = {
    "cache_dir": (str(FOLDER), lambda: _cache()._path == FOLDER / "kernels"),
    "cache_limit": ("1", lambda: _cache()._limit == 1 << 20),
    "cache_read_only": ("1", lambda: _cache()._read_only),
    "workers": ("70", lambda: settings.get("workers") == 70),
    "compile_seconds": ("2.5", lambda: settings.get("compile_seconds") == 2.5),
    "device": ("H200", lambda: "H200" in device.device_spec("cuda").name),
}


def _cache() -> Any:
    return compiler._disk_cache()


def test_each_setting_is_read_at_one_of_these_times():
    assert {s.read for s in TABLE.values()} == {START, KIND, TRACE, USE}
    of = {name: setting.read for name, setting in TABLE.items()}
    assert {n for n, read in of.items() if read == KIND} == {*SEEN}
    assert {n for n, read in of.items() if read in (USE, TRACE)} == {*USED}
    assert {n for n, read in of.items() if read == START} == {"pack", "log", "triton"}


@pytest.mark.parametrize("name", SEEN)
def test_a_setting_of_kinds_is_read_by_new_ones_alone_until_all_are_forgotten(name, monkeypatch):
    text, of_known, of_new = SEEN[name]
    short = variable(name).removeprefix("HEEDFUL_").lower()
    with standin.gpu("H200") as machine:
        MACHINES[:] = [machine]
        assert not of_known() and not of_known()
        monkeypatch.setenv(variable(name), text)
        assert not of_known() and of_new()
        monkeypatch.delenv(variable(name))
        assert not of_known()
        configure(**{short: text})
        assert of_known() and of_new()
        configure(**{short: None})
        assert not of_known() and not of_new() and not settings.is_set(name)


@pytest.mark.parametrize("name", USED)
def test_other_settings_are_read_each_time(name, monkeypatch):
    text, is_heeded = USED[name]

    def heeded() -> bool:
        with contextlib.suppress(ValueError):
            return is_heeded()
        return False

    assert not heeded()
    monkeypatch.setenv(variable(name), text)
    assert heeded()
    monkeypatch.delenv(variable(name))
    assert not heeded()
    configure(**{variable(name).removeprefix("HEEDFUL_").lower(): text})
    assert heeded()


def test_what_is_read_once_stays_and_is_not_to_be_changed(monkeypatch):
    level = logging.getLogger("heedful").level
    monkeypatch.setenv("HEEDFUL_LOG", "debug")
    packs.load_default()
    monkeypatch.setenv("HEEDFUL_PACK", str(FOLDER))
    attend()
    packs.load_default()
    assert logging.getLogger("heedful").level == level
    for name in ("log", "pack", "triton"):
        with pytest.raises(ValueError, match=f"^{name} must be set as {variable(name)} bef"):
            configure(**{name: "debug"})


def test_wrong_changes_change_nothing():
    with pytest.raises(TypeError, match=r"^backends must be one of backend, numerics, "):
        configure(check_pages=True, backends="cpu")
    with pytest.raises(ValueError, match=r"^cache_limit_mb='much': "):
        configure(check_pages=True, cache_limit_mb="much")
    with pytest.raises(ValueError, match="no variable holds a null byte"):
        configure(check_pages=True, backend="cpu\0")
    assert not settings.get("check_pages")
    configure(check_pages=True, workspace_limit_mb=3)
    assert settings.get("check_pages") and settings.get("workspace_limit") == 3 << 20


def test_the_docs_say_when_each_setting_is_read():
    text = (Path(__file__).parents[3] / "docs/api.md").read_text()
    for name, setting in TABLE.items():
        assert f"| `{variable(name)}` | {setting.read} |" in text
