"""T5's bias by relative position as a `rel_bias`."""

from typing import Any

import numpy as np

from heedful.masks.arrays import check_count, is_torch, namespace, shape_of


def t5_bias(weight: Any, bidirectional: bool = True, max_distance: int = 128) -> Any:
    """T5's relative attention bias, expanded from buckets to distances.

    Keys of max_distance or more away share the last bucket of their side. So 2 * max_distance + 1
    entries are enough for sequences of any length: the first and the last stand for all beyond.

    Args:
        weight: (num_buckets, heads), the embedding of the buckets
            (`relative_attention_bias.weight`).
        bidirectional: whether keys after a query have buckets of their own, as in an encoder; else
            they have that of the query itself.
        max_distance: the distance from which on all keys share a bucket.

    Returns:
        (heads, 2 * max_distance + 1) in the weight's dtype, for `rel_bias`. Differentiable.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: T5 (Raffel et al. 2020), section 2.1.
    """
    xp = namespace("weight", weight)
    count, _ = shape_of("weight", weight, "(num_buckets, heads)")
    check_count("max_distance", max_distance, 1)
    exact = count // (4 if bidirectional else 2)
    if not exact or (bidirectional and count % 2):
        words = "an even number of at least 4 buckets" if bidirectional else "at least 2 buckets"
        raise ValueError(f"weight must have {words}, got {count}")
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must be > {exact}, as so many distances have a bucket each, got"
            f" {max_distance}"
        )
    buckets = _buckets(int(max_distance), count, bidirectional)
    if is_torch(xp):
        buckets = xp.from_numpy(buckets).to(weight.device)
    return weight.T[:, buckets]


def _buckets(max_distance: int, count: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each entry, int64 (2 * max_distance + 1,): entry e is of the key that is e -
    max_distance before its query."""
    before = np.arange(-max_distance, max_distance + 1)
    of_side = count // 2 if bidirectional else count
    distance = np.abs(before) if bidirectional else np.maximum(before, 0)
    exact = of_side // 2
    # Nearer ones have a bucket each, the others share them by the logarithm of their distance. In
    # float32, as in T5: at the border of two buckets rounding decides.
    ratio = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact))
    steps = ratio / np.float32(np.log(max_distance / exact)) * np.float32(of_side - exact)
    shared = np.minimum(exact + steps.astype(np.int64), of_side - 1)
    bucket = np.where(distance < exact, distance, shared)
    return bucket + np.where(before < 0, of_side, 0) if bidirectional else bucket
