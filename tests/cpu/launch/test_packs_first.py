"""Kernels of a loaded pack are run whatever Triton is installed. Calls that no pack lists are
planned for that Triton."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from heedful import explain, flash_attn_func, flash_attn_with_kvcache
from heedful.core.registry.capability import Toolchain
from heedful.launch.code import packs, wheels
from heedful.launch.code.identity import kernel_key
from heedful.launch.program import bound
from heedful.torch.eager import backends
from support.packs import Installed
from support.runs import standin

OLD, NEW = (3, 6), (3, 9)


@contextmanager
def compiled(tools: Toolchain, monkeypatch) -> Iterator[list[tuple[str, str]]]:
    """On a stand-in for an H200 with these tools: (module, key) of each kernel asked for."""
    asked: list[tuple[str, str]] = []
    with standin.gpu("H200"), monkeypatch.context() as patch:
        make = bound.compile_call

        def compile_call(call, arch):
            asked.append((call.kernel.module, kernel_key(call, arch)))
            return make(call, arch)

        patch.setattr(bound, "compile_call", compile_call)
        patch.setattr(backends, "toolchain", lambda _=None: tools)
        yield asked


def rows(length: int, grad: bool = False) -> torch.Tensor:
    return torch.zeros(1, length, 2, 128, dtype=torch.bfloat16, requires_grad=grad)


def trained(length: int = 256, **options) -> None:
    q, k, v = (rows(length, grad=True) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True, **options)
    out.backward(torch.zeros_like(out))


def served() -> None:
    cache = rows(256), rows(256)
    lengths = torch.tensor([100], dtype=torch.int32)
    new = (rows(1), rows(1))
    flash_attn_with_kvcache(rows(1), *cache, *new, cache_seqlens=lengths, causal=True)


CALLS = {"trained": trained, "served": served}


@pytest.fixture(params=["pack", "wheel"])
def pack(monkeypatch, request):
    """Loads keys as of a pack, or of an installed wheel, for the newer Triton; returns tools beside
    the older one."""
    monkeypatch.setattr(packs, "load_default", lambda: None)
    monkeypatch.setattr(packs, "_loaded", {})
    monkeypatch.setattr(wheels, "_read", {})

    def load(asked: list[tuple[str, str]]) -> Toolchain:
        digests = dict.fromkeys([key for _, key in asked], "")
        if request.param == "wheel":
            monkeypatch.setattr(wheels, "_looked", True)
            monkeypatch.setattr(wheels, "_current", Installed(digests))
        else:
            packs._loaded.update({key: (Path(), "") for key in digests})
        return Toolchain(OLD, packs=frozenset({("hopper", NEW), ("hopper_decode", NEW)}))

    return load


@pytest.mark.parametrize("name", CALLS)
def test_calls_in_a_pack_run_the_kernels_of_its_triton(name, pack, monkeypatch):
    with compiled(Toolchain(NEW), monkeypatch) as want:
        CALLS[name]()
    with compiled(Toolchain(OLD), monkeypatch) as others:
        CALLS[name]()
    assert want and want != others
    with compiled(pack(want), monkeypatch) as asked:
        CALLS[name]()
    assert asked == want


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_no_pack_lists_run_the_kernels_of_the_installed_triton(name, pack, monkeypatch):
    with compiled(Toolchain(OLD), monkeypatch) as want:
        CALLS[name]()
    with compiled(pack([]), monkeypatch) as asked:
        CALLS[name]()
    assert asked == want


def test_a_direction_that_no_pack_lists_is_planned_without_packs_and_the_other_is_not(
    pack, monkeypatch
):
    with compiled(Toolchain(NEW), monkeypatch) as new:
        trained()
    with compiled(Toolchain(OLD), monkeypatch) as old:
        trained()
    forward = [one for one in new if "backward" not in one[0]]
    assert 0 < len(forward) < len(new)
    with compiled(pack(forward), monkeypatch) as asked:
        trained()
    assert asked == forward + [one for one in old if "backward" in one[0]]


def test_one_kernel_that_is_missing_plans_its_direction_without_packs(pack, monkeypatch):
    """Not the rest of it for a Triton that compiles nothing here."""
    with compiled(Toolchain(NEW), monkeypatch) as new:
        trained()
    with compiled(Toolchain(OLD), monkeypatch) as old:
        trained()
    backward = [one for one in new if "backward" in one[0]]
    with compiled(pack([one for one in new if one != backward[-1]]), monkeypatch) as asked:
        trained()
    assert asked == [one for one in new if "backward" not in one[0]] + [
        one for one in old if "backward" in one[0]
    ]


def test_a_named_backend_that_only_an_unlisted_pack_makes_possible_says_what_it_needs(
    pack, monkeypatch
):
    wanted = pytest.raises(ValueError, match="needs triton >= 3.9, got 3.6")
    with compiled(pack([]), monkeypatch), wanted:
        flash_attn_with_kvcache(rows(1), rows(256), rows(256), causal=True, backend="hopper_decode")


def test_explain_says_that_no_pack_has_a_direction(pack, monkeypatch):
    with compiled(pack([]), monkeypatch):
        words = explain(flash_attn_func, *(rows(256, grad=True) for _ in range(3)), causal=True)
    for direction in ("forward", "backward"):
        assert f"the {direction} is planned without packs: none has all of its kernels" in words


def test_lengths_stay_open_whatever_packs_are_asked_for(pack, monkeypatch):
    """A pack that lists all opens the cases that its Triton opens without one. One that lists none
    opens no more than the plans of both Tritons together: words and keys settle no length."""
    opened = []

    def runnable(*arguments):
        opened.append(arguments[1])
        return made_by(*arguments)

    made_by = backends.runnable
    monkeypatch.setattr(backends, "runnable", runnable)
    monkeypatch.setattr(logging.getLogger("heedful"), "level", logging.INFO)

    def cases(tools: Toolchain) -> tuple[int, list[tuple[str, str]]]:
        opened.clear()
        with compiled(tools, monkeypatch) as asked:
            for length in range(1024, 1024 + 12 * 256, 256):
                trained(length)
        return len(opened), asked

    of_new, want = cases(Toolchain(NEW))
    of_old, _ = cases(Toolchain(OLD))
    assert cases(pack(want)) == (of_new, want)
    packs._loaded.clear()
    wheels._current = None
    wheels._read.clear()
    assert cases(pack([]))[0] <= of_new + of_old < 12


def test_a_call_whose_kernel_does_not_load_says_where_it_lies(monkeypatch):
    with compiled(Toolchain(OLD), monkeypatch) as asked:

        def load(artifact, device):
            raise RuntimeError("it did not load")

        monkeypatch.setattr(bound.driver("nvidia"), "load", load)
        monkeypatch.setattr(bound, "place", lambda call, arch: f"It is {kernel_key(call, arch)}")
        with pytest.raises(RuntimeError) as error:
            trained()
    assert str(error.value) == f"it did not load. It is {asked[0][1]}"
