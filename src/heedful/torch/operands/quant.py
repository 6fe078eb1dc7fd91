"""Quantised keys and values: value = stored * scale + shift, one scale per group of values."""

import torch
from torch import Tensor

from heedful.core.call.problem import LATENT_ROW_DIM_V, LATENT_ROW_GROUP
from heedful.core.call.quant import (
    QUANT_MAX,
    check_latent,
    check_packed,
    check_quantize,
    check_scale,
    check_unpacked_dtype,
)
from heedful.torch.base.arrays import dtype_name
from heedful.torch.operands.checks import check_dtype, check_tensor
from heedful.torch.operands.plain import plain_flag, plain_int


def quantize_kv(
    x: Tensor, dtype: str | torch.dtype, group_size: int | None = None, asymmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys or values in few bits, for the caches of flash_attn_with_kvcache.

    Args:
        x: (..., head_dim), float16, bfloat16 or float32.
        dtype: "int4" (two a byte, the even one in the low bits), "int8" or a float8, as a name or
            torch dtype.
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
    check_tensor("x", x)
    name = str(dtype).removeprefix("torch.")
    size = None if group_size is None else plain_int("group_size", group_size, "an int or None")
    size = check_quantize(tuple(x.shape), dtype_name(x.dtype), name, dtype, size)
    asymmetric = plain_flag("asymmetric", asymmetric)
    scale, shift = group_scales(x.detach(), name, size, asymmetric)
    return packed_values(x.detach(), name, scale, shift), scale, shift


def group_scales(
    x: Tensor, storage: str, size: int, asymmetric: bool
) -> tuple[Tensor, Tensor | None]:
    """(scale, shift or None), each float32 (..., head_dim / size), of values (..., head_dim)."""
    groups, shift = x.float().unflatten(-1, (x.shape[-1] // size, size)), None
    if asymmetric:
        low, high = groups.aminmax(dim=-1)
        shift = (low + high) / 2
        groups = groups - shift[..., None]
    scale = groups.abs().amax(-1) / QUANT_MAX[storage]
    return torch.where(scale > 0, scale, 1.0), shift


def packed_values(x: Tensor, storage: str, scale: Tensor, shift: Tensor | None) -> Tensor:
    """The stored numbers for values (..., head_dim), rounded to the nearest.

    scale, shift: float32 (..., groups), or as many dims of 1 and the other sizes as broadcast.
    """
    groups = x.float().unflatten(-1, (scale.shape[-1], -1))
    if shift is not None:
        groups = groups - shift[..., None]
    most = QUANT_MAX[storage]
    stored = (groups / scale[..., None]).clamp(-most, most).flatten(-2)
    if storage == "int4":
        nibbles = stored.round().to(torch.int8).view(torch.uint8) & 0xF
        return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)
    if storage == "int8":
        stored = stored.round()
    return stored.to(getattr(torch, storage))


def dequantize_kv(
    packed: Tensor, scale: Tensor, shift: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
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
    check_tensor("packed", packed)
    check_packed(packed.shape, dtype_name(packed.dtype))
    check_tensor("scale", scale)
    check_dtype("scale", scale, "float32")
    check_unpacked_dtype(str(dtype).removeprefix("torch."), dtype)
    values = _unpack_int4(packed) if packed.dtype == torch.uint8 else packed.float()
    if shift is not None:
        check_tensor("shift", shift)
        check_dtype("shift", shift, "float32")
    check_scale(packed.shape, values.shape[-1], scale.shape, None if shift is None else shift.shape)
    values = values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
    if shift is not None:
        values = values + shift[..., None]
    return values.flatten(-2).to(dtype)


def _unpack_int4(packed: Tensor) -> Tensor:
    """float32 (..., dim) of uint8 (..., dim / 2): two's complement, low nibble first."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
    return ((nibbles ^ 8) - 8).float()


def pack_latent(x: Tensor) -> Tensor:
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
    check_tensor("x", x)
    check_latent("x", tuple(x.shape), dtype_name(x.dtype))
    latent, rotary = x.detach()[..., :LATENT_ROW_DIM_V], x.detach()[..., LATENT_ROW_DIM_V:]
    scale, _ = group_scales(latent, "float8_e4m3fn", LATENT_ROW_GROUP, False)
    values = packed_values(latent, "float8_e4m3fn", scale, None)
    parts = values, scale, rotary.to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpack_latent(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The latent vectors of pack_latent's result.

    Args:
        packed: uint8 (..., 656).
        dtype: of the result: float16, bfloat16 or float32.

    Returns:
        (..., 576).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_tensor("packed", packed)
    check_latent("packed", tuple(packed.shape), dtype_name(packed.dtype))
    check_unpacked_dtype(str(dtype).removeprefix("torch."), dtype)
    return _latent_values(packed).to(dtype)


def _latent_values(packed: Tensor) -> Tensor:
    """float32 (..., 576) of rows (..., 656)."""
    ends = LATENT_ROW_DIM_V + LATENT_ROW_DIM_V // LATENT_ROW_GROUP * 4
    values = packed[..., :LATENT_ROW_DIM_V].contiguous().view(torch.float8_e4m3fn).float()
    scale = packed[..., LATENT_ROW_DIM_V:ends].contiguous().view(torch.float32)
    rotary = packed[..., ends:].contiguous().view(torch.bfloat16).float()
    latent = values.unflatten(-1, (-1, LATENT_ROW_GROUP)) * scale[..., None]
    return torch.cat([latent.flatten(-2), rotary], -1)
