"""Converts torch's causal mask, which is aligned top left, to heedful's, which is aligned bottom
right."""

from torch import Tensor


def from_top_left(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, bool, tuple[int, int] | None]:
    """(key, value, causal, window) that mean the same with heedful's alignment. All tensors are
    (batch, heads, rows, dim). window: None for no bound."""
    rows, keys = query.shape[2], key.shape[2]
    if not is_causal or rows == keys:
        return key, value, is_causal, None
    if rows < keys:
        # No row sees a later key.
        return key[:, :, :rows], value[:, :, :rows], True, None
    # The window's diagonal lies so many keys to the left.
    return key, value, False, (-1, rows - keys)
