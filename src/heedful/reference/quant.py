"""Quantised keys and values in NumPy: value = stored * descale + shift.

A group is `dim / groups` consecutive values of one head vector that share a scale (and a shift).
int4 packs two values a byte, two's complement, the even one in the low nibble.
"""

import numpy as np

from heedful.core.call.problem import LATENT_ROW_DIM_V, LATENT_ROW_GROUP
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


def e4m3_values(stored) -> np.ndarray:
    """float8_e4m3fn bytes in float64: 1 bit of sign, 4 of exponent with bias 7, 3 of mantissa."""
    bits = np.asarray(stored).astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    size = np.where(bits & 127 == 127, np.nan, size)
    return np.where(bits & 128, -size, size)


def unpack_latent(rows) -> np.ndarray:
    """Latent vectors (..., 576) in float64 from rows of bytes (..., 656): e4m3 values, float32
    scales, and bfloat16 values, which are the upper halves of float32."""
    rows = np.ascontiguousarray(rows).astype(np.uint8)
    values, rest = rows[..., :LATENT_ROW_DIM_V], rows[..., LATENT_ROW_DIM_V:]
    ends = LATENT_ROW_DIM_V // LATENT_ROW_GROUP * 4
    scales = np.ascontiguousarray(rest[..., :ends]).view("<f4").astype(np.float64)
    halves = np.ascontiguousarray(rest[..., ends:]).view("<u2").astype(np.uint32) << 16
    rotary = halves.view(np.float32).astype(np.float64)
    latent = e4m3_values(values) * np.repeat(scales, LATENT_ROW_GROUP, -1)
    return np.concatenate([latent, rotary], -1)


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
