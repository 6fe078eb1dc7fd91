"""Quantised keys and values in NumPy: value = stored * descale + shift.

A group is `dim / groups` consecutive values of one head vector that share a scale (and a shift).
int4 packs two values a byte, two's complement, the even one in the low nibble.
"""

import numpy as np

from heedful.core.call.quant import QUANT_MAX


def unpack_int4(packed: np.ndarray) -> np.ndarray:
    """uint8 (..., dim / 2) -> int8 (..., dim)."""
    bytes_ = np.asarray(packed).astype(np.uint8)
    nibbles = np.stack([bytes_ & 0xF, bytes_ >> 4], axis=-1).astype(np.int8)
    return ((nibbles ^ 8) - 8).reshape(*bytes_.shape[:-1], 2 * bytes_.shape[-1])


def pack_int4(values: np.ndarray) -> np.ndarray:
    """Integers in [-8, 7] (..., dim), dim even -> uint8 (..., dim / 2)."""
    nibbles = np.asarray(values).astype(np.int8).astype(np.uint8) & 0xF
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def dequantize(stored, descale=None, shift=None, group: int = 0) -> np.ndarray:
    """stored * descale + shift in float64.

    stored: (N, G, dim). descale, shift: (G,) with group = 0, else (N, G, dim / group); None is
    1 and 0.
    """
    values = np.asarray(stored, np.float64)
    if group:
        spread = lambda a: np.repeat(np.asarray(a, np.float64), group, axis=-1)  # noqa: E731
    else:
        spread = lambda a: np.asarray(a, np.float64)[:, None]  # noqa: E731
    if descale is not None:
        values = values * spread(descale)
    return values if shift is None else values + spread(shift)


def quantize(
    x, dtype: str, group_size: int, asymmetric: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Per-group quantisation to int8 or int4 of x (..., dim): the values that `dequantize` undoes.

    Returns (stored int8 (..., dim), or uint8 (..., dim / 2) for int4; descale, shift or None:
    float32 (..., dim / group_size)).
    """
    x = np.asarray(x, np.float64)
    groups = x.reshape(*x.shape[:-1], -1, group_size)
    top = QUANT_MAX[dtype]
    shift = None
    if asymmetric:
        shift = ((groups.max(-1) + groups.min(-1)) / 2).astype(np.float32)
        groups = groups - shift[..., None]
    descale = (np.abs(groups).max(-1) / top).astype(np.float32)
    descale = np.where(descale > 0, descale, np.float32(1))
    stored = np.clip(np.rint(groups / descale[..., None]), -top, top).astype(np.int8)
    stored = stored.reshape(x.shape)
    return (pack_int4(stored) if dtype == "int4" else stored), descale, shift
