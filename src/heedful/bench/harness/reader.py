"""A kernel that reads memory and does nothing else: the bound of all that must read as much."""

from typing import Any

import torch
import triton
import triton.language as tl

WORDS = 8192


@triton.jit
def _read(x, sums, size, WORDS: tl.constexpr):
    """sums[pid]: of the program's own words."""
    places = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    words = tl.load(x + places, mask=places < size, other=0.0, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(words, 0))


def read_words(words: torch.Tensor) -> torch.Tensor:
    """Sums of 8192 float32 each: (programs,)."""
    programs = triton.cdiv(words.numel(), WORDS)
    sums = torch.empty(programs, dtype=torch.float32, device=words.device)
    launch: Any = _read[(programs,)]
    launch(words, sums, words.numel(), WORDS=WORDS, num_warps=8)
    return sums
