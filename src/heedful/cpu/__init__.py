"""Attention on a CPU: tiled, in plain torch, memory linear in sequence length."""

from heedful.cpu.tiled_backward import backward
from heedful.cpu.tiled_forward import forward, statistics
from heedful.cpu.whole import recorded, records

__all__ = ["backward", "forward", "recorded", "records", "statistics"]
