"""Checks of quantised keys and values, for all frameworks."""

from heedful.core.call.describe import FLOATS, check_dtype, check_shape
from heedful.core.call.problem import LATENT_ROW_BYTES, LATENT_ROW_DIM

# Storage -> the largest magnitude that is stored; int4 and int8 are used symmetrically around 0.
QUANT_MAX = {
    "int4": 7,
    "int8": 127,
    "float8_e4m3fn": 448,
    "float8_e4m3fnuz": 240,
    "float8_e5m2": 57344,
}


def check_quantize(
    shape: tuple[int, ...], dtype: str, storage: str, asked: object, group_size: int | None
) -> int:
    """How many values share a scale. shape, dtype: those of the values (..., head_dim). asked: the
    storage as the caller named it, for the message. Raises TypeError, ValueError.
    """
    check_dtype("x", dtype, *FLOATS)
    if storage not in QUANT_MAX:
        raise ValueError(f"dtype must be one of {', '.join(QUANT_MAX)}, got {asked}")
    if len(shape) < 1 or shape[-1] < 1:
        raise ValueError(f"x must be (..., head_dim), got shape {tuple(shape)}")
    dim = shape[-1]
    size = dim if group_size is None else group_size
    if size < 1 or dim % size:
        raise ValueError(f"group_size must divide head_dim {dim}, got {size}")
    if storage == "int4" and dim % 2:
        raise ValueError(f"x must have an even head_dim for int4, got {dim}")
    return size


def check_packed(shape: tuple[int, ...], dtype: str) -> None:
    """TypeError, ValueError unless such an array may hold quantised values."""
    check_dtype("packed", dtype, *("uint8" if name == "int4" else name for name in QUANT_MAX))
    if len(shape) < 1:
        raise ValueError(f"packed must be (..., head_dim), got shape {tuple(shape)}")


def check_scale(
    packed: tuple[int, ...],
    head_dim: int,
    scale: tuple[int, ...],
    shift: tuple[int, ...] | None,
) -> None:
    """ValueError unless scales, and shifts if there are any, belong to values of these shapes.

    head_dim: of the values, which for int4 is twice packed's last.
    """
    if len(scale) != len(packed) or scale[-1] < 1 or head_dim % scale[-1]:
        raise ValueError(
            f"scale must be (..., groups) with groups that divide {head_dim},"
            f" got shape {tuple(scale)}"
        )
    shape = (*packed[:-1], scale[-1])
    check_shape("scale", scale, shape, "(..., groups)")
    if shift is not None:
        check_shape("shift", shift, shape, "of scale")


def check_latent(name: str, shape: tuple[int, ...], dtype: str) -> None:
    """TypeError, ValueError unless x may be latent vectors, or packed rows of them."""
    is_packed = name == "packed"
    check_dtype(name, dtype, *(("uint8",) if is_packed else FLOATS))
    size = LATENT_ROW_BYTES if is_packed else LATENT_ROW_DIM
    if not shape or shape[-1] != size:
        raise ValueError(f"{name} must be (..., {size}), got shape {tuple(shape)}")


def check_unpacked_dtype(name: str, asked: object) -> None:
    """TypeError unless a dtype's name is that of unpacked values."""
    if name not in FLOATS:
        raise TypeError(f"dtype must be float16, bfloat16 or float32, got {asked}")
