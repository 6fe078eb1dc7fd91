"""Counts how attention layers' calls were run."""

import logging
from collections import Counter

from torch import Tensor
from torch.compiler import is_compiling

logger = logging.getLogger("heedful.integrations.transformers")
_counts: Counter[str] = Counter()
_said: set[str] = set()
# The attribute of a dense mask that says why it is one.
_WHY = "_heedful_why"


def paths() -> dict[str, int]:
    """How many layer calls were run in each way since `reset_paths`. Compiled code is not counted.

    - plain: no mask; the layer's own `is_causal` and window say all
    - compact, <call>: lengths and a window stand for the mask; by the call that took them
    - given: cu_seq_lens_q and the like came with the model's arguments
    - paged: continuous batching, over pages
    - dense: <why>: a mask of queries x keys, as the bias of the call
    """
    return dict(_counts)


def reset_paths() -> None:
    """Sets all counts to 0."""
    _counts.clear()


def count(path: str) -> None:
    if not is_compiling():  # Dynamo would guard on the number, and compile again for each.
        _counts[path] += 1


def tell_why(mask: Tensor, reason: str) -> Tensor:
    """The dense mask, with the reason why it is one attached. Each reason is logged once."""
    if not is_compiling():
        setattr(mask, _WHY, reason)
        if reason not in _said:
            _said.add(reason)
            logger.info("a mask of queries x keys: %s", reason)
    return mask


def count_dense(mask: Tensor | None, has_positions: bool) -> None:
    """Counts a call with a bias: a mask of queries x keys, of positions, or both."""
    if not is_compiling():
        reason = "a bias of positions"
        if not has_positions:
            reason = getattr(mask, _WHY, "the model made the mask itself")
        _counts[f"dense: {reason}"] += 1
