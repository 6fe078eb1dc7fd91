"""`activate` and `restore`: torch's registry and ours agree on who runs its operators."""

import subprocess
import sys
import threading

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import attention

from heedful.integrations.torch import activate, is_active, registry, restore

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nobody_is_active():
    yield
    restore()
    assert attention.current_flash_attention_impl() is None


@pytest.fixture
def with_a_gpu(monkeypatch):
    """Torch says that there is one. Kernels are for tensors on CUDA, of which a CPU has none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def runs() -> bool:
    """Whether CPU tensors have a kernel."""
    q = torch.randn(1, 1, 2, 8)
    try:
        aten._scaled_dot_product_flash_attention(q, q, q)
    except NotImplementedError:
        return False
    return True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_activate_says_what_is_missing():
    with pytest.raises(
        RuntimeError, match=r"wants a GPU that torch can use.*sdpa\(\) runs on a CPU"
    ):
        activate()
    assert registry._active is None and attention.current_flash_attention_impl() is None


def test_activate_and_restore_may_come_twice(with_a_gpu):
    report = activate()
    assert activate() is report and attention.current_flash_attention_impl() == "heedful"
    assert is_active()
    restore()
    assert attention.current_flash_attention_impl() is None and not is_active()
    restore()
    assert activate() is not report


def test_operators_are_overridden_for_cuda_alone(with_a_gpu):
    assert not runs()
    activate()
    assert not runs()


def test_restore_takes_the_kernels_away():
    registry._activate("CPU")
    assert runs()
    restore()
    assert not runs()


def test_torchs_own_restore_is_ours():
    registry._activate("CPU")
    attention.restore_flash_attention_impl()
    assert registry._active is None and not runs()
    restore()


def test_torchs_own_activate_is_ours():
    """A registered name can be activated by torch's function, as a configuration does."""
    registry._activate("CPU")
    first = registry._active
    restore()
    attention.activate_flash_attention_impl(registry.NAME)
    assert registry._active not in (None, first) and runs()


def test_another_implementation_takes_the_place_and_gives_it_back(with_a_gpu):
    removed = []

    class Theirs:
        def remove(self):
            removed.append(True)

    attention.register_flash_attention_impl("theirs", register_fn=Theirs)
    activate()
    attention.activate_flash_attention_impl("theirs")
    assert registry._active is None
    restore()
    assert attention.current_flash_attention_impl() == "theirs" and not removed
    activate()
    assert removed and attention.current_flash_attention_impl() == "heedful"


def test_threads_activate_once(with_a_gpu, monkeypatch):
    made, register = [], registry.register

    def counted(key):
        made.append(key)
        return register(key)

    monkeypatch.setattr(registry, "register", counted)
    reports = []
    threads = [threading.Thread(target=lambda: reports.append(activate())) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert made == ["CUDA"] and len({id(report) for report in reports}) == 1


def test_nothing_is_replaced_on_import():
    code = (
        "import torch, torch.nn.functional as F\n"
        "from torch.nn import attention\n"
        "before, listed = F.scaled_dot_product_attention, attention.list_flash_attention_impls()\n"
        "import heedful.integrations.torch\n"
        "assert F.scaled_dot_product_attention is before\n"
        "assert attention.list_flash_attention_impls() == listed\n"
        "assert attention.current_flash_attention_impl() is None\n"
        "q = torch.randn(1, 1, 2, 8)\n"
        "try: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)\n"
        "except NotImplementedError: print('theirs')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "theirs\n", done.stderr


def test_importing_heedful_or_the_integrations_imports_no_torch():
    code = "import heedful, heedful.integrations, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
