"""Counts how the layers of this process were run."""

from collections import Counter

_counts: Counter[str] = Counter()
count = _counts.update


def paths() -> dict[str, int]:
    """How many calls of layers went each way in this process since `reset_paths`. A replay of a
    CUDA graph counts nothing.

    - append: new keys and values into the cache
    - paged: attention over the cache, of any batch
    - packed: attention of an encoder, without a cache
    - latent: a decode over latent vectors
    - latent append, latent prefill, latent context: the other steps of latent attention
    """
    return dict(_counts)


def reset_paths() -> None:
    """Begins to count from nothing."""
    _counts.clear()
