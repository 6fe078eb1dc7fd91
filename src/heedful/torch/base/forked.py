"""How calls run in a forked child. On a CPU they work, on a thread for which torch has threads. On
a GPU that the parent used they raise, as torch's own do, since a child cannot use its parent's GPU
contexts.
"""

from collections.abc import Callable
from typing import Any

import torch

from heedful.core.base import forks
from heedful.launch.driver.forked import FORKED
from heedful.torch.base.dispatch import any_autocast


def on_own_thread(function: Callable, *arguments) -> Any:
    """Calls function(*arguments), which computes on a CPU, on a thread for which torch has threads,
    and without autocast. Autocast has cast the call's tensors already, and would cast the
    function's steps, too."""
    if any_autocast() and torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)
        try:
            return on_own_thread(function, *arguments)
        finally:
            torch.set_autocast_enabled("cpu", True)
    if not forks.is_stranded():
        return function(*arguments)
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def work() -> Any:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return function(*arguments)

    return forks.on_own_thread(work)


def check_device(device: torch.device) -> None:
    """Raises RuntimeError for a GPU in a child of a process that had used it before the fork."""
    if device.type == "cuda" and torch.cuda._is_in_bad_fork():
        raise RuntimeError(f"q is on {device}: {FORKED}")
