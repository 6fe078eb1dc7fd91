"""Replaces torch's operators of attention by heedful's in the whole process: `activate` and
`restore`."""

import warnings
from typing import Any

import torch
from torch.library import Library
from torch.nn import attention

from heedful.core.base.forks import new_reentrant_lock
from heedful.integrations.torch.aten import HANDED_BACK, Kernels
from heedful.integrations.torch.report import Report

# The name of the implementation in torch's registry; it has no other use.
NAME = "heedful"
# Held while the active kernels change. Torch's registry may call back meanwhile.
_lock = new_reentrant_lock()
_active: "Handle | None" = None


class Handle:
    """The handle that torch's registry keeps: the dispatcher has heedful's kernels until
    `remove`."""

    def __init__(self, library: Library, report: Report):
        self.library: Library | None = library
        self.report = report

    def remove(self) -> None:
        """Restores the kernels of torch's operators."""
        global _active
        with _lock:
            # Torch removes a library's kernels when the library object is deleted.
            self.library = None
            if _active is self:
                _active = None


def activate() -> Report:
    """Makes heedful run torch's attention on CUDA tensors, everywhere in this process: calls of
    `F.scaled_dot_product_attention` without a mask for which torch chooses FlashAttention, cuDNN
    or, in 16 bits, memory-efficient attention; and `torch.nn.attention.varlen.varlen_attn`. Torch
    still chooses the kernel: it runs calls with a mask, and those of its plain attention. Does
    nothing if heedful is active. In torch's registry of flash attention the name is "heedful"; if
    another implementation is active, torch's is restored first.

    Returns: A Report that counts calls by operator, and the reasons of calls that torch ran.

    Raises:
        RuntimeError: where torch sees no GPU. `sdpa` works on a CPU, too.
    """
    with _lock:
        if _active is None:
            if not torch.cuda.is_available():
                built = "none" if torch.version.cuda is None else torch.version.cuda
                raise RuntimeError(
                    "heedful.integrations.torch.activate wants a GPU that torch can use, got"
                    " torch.cuda.is_available() False (torch"
                    f" {torch.__version__}, CUDA {built}); sdpa() runs on a CPU, too"
                )
            _activate()
        assert _active is not None
        return _active.report


def restore() -> None:
    """Restores torch's attention. Does nothing if heedful is not active. Call it after the backward
    of all calls that ran while heedful was active: torch's kernels would drop other probabilities.
    """
    with _lock:
        if _active is None:
            return
        if attention.current_flash_attention_impl() == NAME:
            attention.restore_flash_attention_impl()
        else:
            _active.remove()


def is_active() -> bool:
    """Whether torch's operators are heedful's in this process."""
    return _active is not None


def _activate(key: str = "CUDA") -> None:
    """key: the dispatch key of the tensors that heedful runs."""
    attention.register_flash_attention_impl(NAME, register_fn=lambda: register(key))
    attention.activate_flash_attention_impl(NAME)


def register(key: str = "CUDA") -> Handle:
    """Registers heedful's kernels with the dispatcher."""
    global _active
    with _lock:
        report = Report()
        torchs = {
            name: kernel for name in HANDED_BACK if (kernel := _torchs(name, key)) is not None
        }
        library = Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            # Torch warns that the kernel is replaced, which is intended.
            warnings.filterwarnings("ignore", "[\\s\\S]*[Oo]verriding a previously registered")
            for name, kernel in Kernels(report, torchs).by_operator().items():
                if hasattr(torch.ops.aten, name):
                    library.impl(name, kernel, key, with_keyset=name in HANDED_BACK)
        _active = Handle(library, report)
        return _active


def _torchs(name: str, key: str) -> Any:
    """Torch's own kernel of an operator, None where it has none."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None
