"""Calls in a forked child: on a CPU they work; on a GPU that the parent used they raise, as torch's
own do, since a child has no part in its parent's GPU contexts."""

from collections.abc import Callable
from typing import Any

import torch

from heedful.core import forks
from heedful.launch.driver.forked import FORKED


def on_own_thread(function: Callable, *arguments) -> Any:
    """function(*arguments), which computes on a CPU, where torch's threads are alive."""
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
