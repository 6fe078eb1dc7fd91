"""What a known call is told by: whether tensors require gradients, whether they are contiguous, and
the settings that a plan depends on."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

import heedful.torch as typed
from heedful.core.registry.by_hand import named
from heedful.torch.eager.backends import FAMILIES
from heedful.torch.eager.calls import CALLS, KINDS, LATEST
from support.runs import standin

heedful: Any = typed
F16 = torch.float16


def some(rows: int, unaligned: bool = False) -> Tensor:
    made = torch.randn(2 * rows * 2 * 64 + 8).to(F16)[unaligned:]
    return made[: 2 * rows * 2 * 64].view(2, rows, 2, 64)


WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "aligned": (False, {}),
    "unaligned": (True, {}),
    "seeded": (False, {"dropout_p": 0.5, "dropout_seed": torch.tensor([3])}),
    "with a sink": (False, {"sink": torch.zeros(2)}),
}


@pytest.mark.parametrize("rows", [(40, 40), (40, 57)], ids=["same", "new"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", range(3))
def test_a_call_whose_tensor_requires_a_gradient_records_one(way, rows, place):
    unaligned, options = WAYS[way]
    with standin.gpu("H200"):
        for wants in (False, False, True, True, False):
            for n in rows:
                given = [some(n, unaligned) for _ in range(3)]
                given[place].requires_grad_(wants)
                out = heedful.flash_attn_func(*given, **options)
                assert out.requires_grad is wants
        with torch.no_grad():
            given[place].requires_grad_(True)
            assert not heedful.flash_attn_func(*given, **options).requires_grad


def wide(tensor: Tensor) -> Tensor:
    """The same values, rows further apart."""
    made = tensor.new_zeros((*tensor.shape[:-1], 128))
    made[..., :64] = tensor
    return made[..., :64]


def numbers(machine) -> dict[str, Any]:
    """All that the last launch was given, but for addresses."""
    launch = machine.launches[-1]
    maps = {n: a for n, a in launch.arguments.items() if n in launch.memory}
    told = {n: (a.shape, a.strides) if hasattr(a, "box") else None for n, a in maps.items()}
    return {**launch.arguments, **told, "grid": launch.grid, "constants": launch.constants}


@pytest.mark.parametrize("device", ["H200", ""])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("place", range(3))
def test_strides_of_a_call_of_new_lengths_are_its_own(device, grad, place):
    def run(n: int, strided: bool) -> None:
        given = [some(n) for _ in range(3)]
        if strided:
            given[place] = wide(given[place])
        given = [t.requires_grad_(grad) for t in given]
        out = heedful.flash_attn_func(*given, causal=True)
        if grad:
            out.backward(torch.zeros(out.shape, dtype=F16))

    found = []
    for known in (True, False):
        with standin.gpu(device) as machine:
            for n in (40, 41, 42, 43) if known else ():
                run(n, False)
            for n in (57, 58):
                run(n, True)
                found.append(numbers(machine))
    assert found[:2] == found[2:]


def backend_of(gpu) -> str:
    return gpu.launches[-1].kernel.module


@pytest.mark.parametrize("kept", ["families", "kinds"])
def test_a_backend_of_the_environment_is_in_the_keys_of_families_and_kinds(kept, monkeypatch):
    monkeypatch.delenv("HEEDFUL_BACKEND", raising=False)
    given = [some(40) for _ in range(3)]
    # Operands that are made for a call enter at a kind of their own.
    more: dict[str, Any] = {"dropout_p": 0.5} if kept == "families" else {}
    with standin.gpu("H200") as gpu:
        heedful.flash_attn_func(*given, **more)
        assert "hopper" in backend_of(gpu)
        for known in (CALLS, LATEST):
            known.clear()
        assert (len(FAMILIES), len(KINDS)) == ((1, 0) if more else (0, 1))
        monkeypatch.setenv("HEEDFUL_BACKEND", "portable")
        heedful.flash_attn_func(*given, **more)
        assert "portable" in backend_of(gpu)


def test_a_check_of_pages_is_in_the_key_of_kinds(monkeypatch):
    monkeypatch.delenv("HEEDFUL_CHECK_PAGES", raising=False)
    q, pages = torch.zeros(1, 1, 1, 64, dtype=F16), torch.zeros(2, 16, 1, 64, dtype=F16)
    bounds, used = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    table = torch.full((1, 2), 9, dtype=torch.int32)

    def run() -> None:
        more = {"block_table": table, "seqused_k": used}
        heedful.flash_attn_varlen_func(q[0], pages, pages, bounds, None, 1, 32, **more)

    with standin.gpu("H200"):
        run()
        CALLS.clear()
        LATEST.clear()
        monkeypatch.setenv("HEEDFUL_CHECK_PAGES", "1")
        with pytest.raises(ValueError, match="^block_table must hold pages from 0 to 1"):
            run()


@pytest.mark.parametrize("call", ["dense", "cache"])
def test_the_letters_of_a_choice_by_hand_find_no_call_of_it(call):
    """Bound calls are found by equal options: a string that is equal to a choice would run it."""
    chosen, q = named("decode", "portable", programs=3), some(40)

    def run(backend: str) -> None:
        if call == "dense":
            heedful.flash_attn_func(q[:, :1], q, q, backend=backend)
        else:
            heedful.flash_attn_with_kvcache(q[:, :1], q, q, backend=backend)

    with standin.gpu("H200"):
        for _ in range(3):
            run(chosen)
            with pytest.raises(ValueError, match="backend must be one of "):
                run(str(chosen))
