"""Quantised keys and values: value = stored * scale + shift, one scale per group of values."""

from typing import Any

from jax import Array, lax
from jax import numpy as jnp

from heedful.core.call.describe import check_dtype
from heedful.core.call.problem import LATENT_ROW_DIM_V, LATENT_ROW_GROUP
from heedful.core.call.quant import (
    QUANT_MAX,
    check_latent,
    check_packed,
    check_quantize,
    check_scale,
    check_unpacked_dtype,
)
from heedful.jax.base.arrays import check_array, dtype_name
from heedful.jax.operands.plain import plain_flag, plain_int


def quantize_kv(
    x: Array, dtype: Any, group_size: int | None = None, asymmetric: bool = False
) -> tuple[Array, Array, Array | None]:
    """Keys or values in few bits, for the caches of flash_attn_with_kvcache.

    Args:
        x: (..., head_dim), float16, bfloat16 or float32.
        dtype: "int4" (two a byte, the even one in the low bits), "int8" or a float8, as a name or
            a dtype.
        group_size: how many consecutive values of a head share a scale; by default the whole head.
        asymmetric: also subtract the middle of each group's range, which is returned as shift.

    Returns:
        packed: (..., head_dim) of that dtype, for int4 uint8 (..., head_dim / 2).
        scale: float32 (..., head_dim / group_size).
        shift: as scale, or None.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: per-group KV quantisation as in xFormers' split-K decode; KIVI (Liu et al. 2024).
    """
    check_array("x", x)
    name = _name(dtype)
    size = None if group_size is None else plain_int("group_size", group_size, "an int or None")
    size = check_quantize(x.shape, dtype_name(x.dtype), name, dtype, size)
    asymmetric = plain_flag("asymmetric", asymmetric)
    values = lax.stop_gradient(jnp.asarray(x))
    scale, shift = group_scales(values, name, size, asymmetric)
    return packed_values(values, name, scale, shift), scale, shift


def _name(dtype: Any) -> str:
    """The name of a dtype, or of a storage; of what is neither, its text, which is no name."""
    try:
        return dtype if isinstance(dtype, str) else dtype_name(dtype)
    except TypeError:
        return str(dtype)


def group_scales(x: Array, storage: str, size: int, asymmetric: bool) -> tuple[Array, Array | None]:
    """(scale, shift or None), each float32 (..., head_dim / size), of values (..., head_dim)."""
    groups, shift = _grouped(x, x.shape[-1] // size), None
    if asymmetric:
        shift = (groups.min(-1) + groups.max(-1)) / 2
        groups = groups - shift[..., None]
    scale = _over(jnp.abs(groups).max(-1), jnp.float32(QUANT_MAX[storage]))
    return jnp.where(scale > 0, scale, 1.0), shift


def packed_values(x: Array, storage: str, scale: Array | None, shift: Array | None) -> Array:
    """The stored numbers for values (..., head_dim), rounded to the nearest.

    scale, shift: float32 (..., groups), or as many dims of 1 and the other sizes as broadcast;
    None for 1 and 0.
    """
    groups = _grouped(x, 1 if scale is None else scale.shape[-1])
    if shift is not None:
        groups = groups - shift[..., None]
    if scale is not None:
        groups = _over(groups, scale[..., None])
    most = QUANT_MAX[storage]
    stored = jnp.clip(groups, -most, most).reshape(x.shape)
    if storage == "int4":
        whole = lax.bitcast_convert_type(jnp.round(stored).astype(jnp.int8), jnp.uint8)
        nibbles = whole & 0xF
        return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)
    if storage == "int8":
        stored = jnp.round(stored)
    return stored.astype(jnp.dtype(storage))


def _grouped(x: Array, groups: int) -> Array:
    """Values (..., head_dim) as float32 (..., groups, head_dim / groups)."""
    return x.astype(jnp.float32).reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _over(x: Array, divisor: Array) -> Array:
    """x / divisor, rounded once. XLA multiplies by the reciprocal of a divisor that it knows, which
    rounds twice; one that depends on x it does not know."""
    return x / jnp.where(jnp.isnan(x), x, divisor)


def dequantize_kv(
    packed: Array, scale: Array, shift: Array | None = None, dtype: Any = jnp.float32
) -> Array:
    """The values of quantize_kv's result: packed * scale + shift.

    Args:
        packed: (..., head_dim) int8 or float8, or uint8 (..., head_dim / 2), two int4 a byte.
        scale: float32 (..., groups), each for head_dim / groups consecutive values.
        shift: as scale, or None.
        dtype: of the result: float16, bfloat16 or float32.

    Returns:
        (..., head_dim).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_array("packed", packed)
    stored = dtype_name(packed.dtype)
    check_packed(packed.shape, stored)
    check_array("scale", scale)
    check_dtype("scale", dtype_name(scale.dtype), "float32")
    name = _name(dtype)
    check_unpacked_dtype(name, dtype)
    packed = jnp.asarray(packed)
    values = unpack_int4(packed) if stored == "uint8" else packed
    values = values.astype(jnp.float32)
    dim = values.shape[-1]
    if shift is not None:
        check_array("shift", shift)
        check_dtype("shift", dtype_name(shift.dtype), "float32")
    check_scale(packed.shape, dim, scale.shape, None if shift is None else shift.shape)
    groups = values.reshape(*scale.shape, dim // scale.shape[-1]) * scale[..., None]
    if shift is not None:
        groups = groups + shift[..., None]
    return groups.reshape(values.shape).astype(jnp.dtype(name))


def unpack_int4(packed: Array) -> Array:
    """uint8 (..., dim / 2) -> int8 (..., dim), the even value from the low nibble."""
    nibbles = jnp.stack([packed & 0xF, packed >> 4], -1)
    flat = nibbles.reshape(*packed.shape[:-1], -1)
    return lax.bitcast_convert_type(flat ^ jnp.uint8(8), jnp.int8) - jnp.int8(8)


def pack_latent(x: Array) -> Array:
    """Latent vectors of MLA in rows of 656 bytes, for the caches of flash_attn_with_kvcache: 512
    values of float8_e4m3fn, a float32 scale for each 128 of them, and 64 of bfloat16.

    Args:
        x: (..., 576), float16, bfloat16 or float32; the last 64 columns are key alone.

    Returns:
        uint8 (..., 656), which is k_cache and v_cache.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the FP8 cache of https://github.com/deepseek-ai/FlashMLA; "fp8_ds_mla" of vLLM.
    """
    check_array("x", x)
    check_latent("x", x.shape, dtype_name(x.dtype))
    x = lax.stop_gradient(jnp.asarray(x))
    latent, rotary = x[..., :LATENT_ROW_DIM_V], x[..., LATENT_ROW_DIM_V:]
    scale, _ = group_scales(latent, "float8_e4m3fn", LATENT_ROW_GROUP, False)
    values = packed_values(latent, "float8_e4m3fn", scale, None)
    parts = values, scale, rotary.astype(jnp.bfloat16)
    rows = (lax.bitcast_convert_type(part, jnp.uint8) for part in parts)
    return jnp.concatenate([row.reshape(*x.shape[:-1], -1) for row in rows], -1)


def unpack_latent(packed: Array, dtype: Any = jnp.float32) -> Array:
    """The latent vectors of pack_latent's result.

    Args:
        packed: uint8 (..., 656).
        dtype: of the result: float16, bfloat16 or float32.

    Returns:
        (..., 576).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_array("packed", packed)
    check_latent("packed", packed.shape, dtype_name(packed.dtype))
    name = _name(dtype)
    check_unpacked_dtype(name, dtype)
    return latent_values(jnp.asarray(packed)).astype(jnp.dtype(name))


def latent_values(packed: Array) -> Array:
    """float32 (..., 576) of rows (..., 656)."""
    sizes, ends = packed.shape[:-1], LATENT_ROW_DIM_V + LATENT_ROW_DIM_V // LATENT_ROW_GROUP * 4

    def of_bytes(part: Array, dtype: Any) -> Array:
        parts = part.reshape(*sizes, -1, jnp.dtype(dtype).itemsize)
        return lax.bitcast_convert_type(parts, dtype).astype(jnp.float32)

    values = packed[..., :LATENT_ROW_DIM_V]
    values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
    scale = of_bytes(packed[..., LATENT_ROW_DIM_V:ends], jnp.float32)
    latent = values.reshape(*sizes, -1, LATENT_ROW_GROUP) * scale[..., None]
    rotary = of_bytes(packed[..., ends:], jnp.bfloat16)
    return jnp.concatenate([latent.reshape(values.shape), rotary], -1)
