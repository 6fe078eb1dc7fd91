"""Plain Python values from torch's tensors and symbols; `core.base.numbers` handles other values. A
call's key has the values and types of its arguments, and keeps plain values only. So these
functions run if a type is unusual, or a key is new.
"""

import operator
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.compiler import is_compiling

from heedful.core.base import numbers
from heedful.core.base.numbers import wrong_type
from heedful.core.call import arguments as call
from heedful.core.call.arguments import CacheUpdate, Options

_WHOLE_NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def plain_int(name: str, value: Any, wanted: str = "an int") -> Any:
    """The int that `value` stands for: anything with `__index__`, or an array or CPU tensor of one
    integer. Raises TypeError."""
    if type(value) is int or isinstance(value, SymInt):
        return value
    _check_readable(name, value, wanted)
    return numbers.whole(name, value, wanted)


def plain_float(name: str, value: Any) -> Any:
    """The number that `value` stands for: anything with `__float__` or `__index__`, or an array or
    CPU tensor of one number. An int stays one. Raises TypeError or, beyond floats, ValueError."""
    if type(value) is float or isinstance(value, (SymInt, SymFloat)):
        return value
    if type(value) is int and is_compiling():
        return value
    _check_readable(name, value, "a float")
    real = numbers.real(name, value)
    return value if type(value) is int else real


def plain_flag(name: str, value: Any) -> bool:
    """The bool that `value` is, also NumPy's or one in a CPU tensor. Raises TypeError."""
    if type(value) is bool:
        return value
    _check_readable(name, value, "a bool")
    item = numbers.element(name, value, "a bool")
    if type(item) is not bool:
        wrong_type(name, "a bool", value)
    return item


def plain_window(window_size: Any) -> tuple[int, ...]:
    """The tuple of ints that `window_size` stands for, as `core.call.arguments.plain_window` has
    it."""
    _check_near("window_size", window_size, call.WINDOW)
    return call.plain_window(window_size, plain_int)


def plain_origin(origin: Any) -> tuple[int, ...]:
    """The four ints that `dropout_origin` stands for, as `core.call.arguments.plain_origin` has
    it."""
    _check_near("dropout_origin", origin, call.ORIGIN)
    return call.plain_origin(origin, plain_int)


def origin_of_each(origin: Any) -> tuple[tuple[int, ...], Tensor | None]:
    """(dropout_origin as four ints, None), or what kernels may rely on of the tensor where each
    sequence has its own, and that tensor."""
    first, origins = call.origin_of_each(origin)
    return (plain_origin(first) if origins is None else first), origins


def offset_of_each(q_offset: Any) -> tuple[Any, Tensor | None]:
    """(q_offset, None), or (None, the tensor) where each sequence has its own."""
    if isinstance(q_offset, Tensor) and q_offset.dim():
        return None, q_offset
    return q_offset, None


def plain_length(name: str, value: Any, bound: int) -> int:
    """The length that `value` stands for. A tensor on a device, or one that is traced, is not read:
    `bound`, which no sequence can pass, takes its place. Raises TypeError."""
    if not isinstance(value, Tensor):
        return plain_int(name, value)
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if value.numel() != 1 or not whole:
        wrong_type(name, "an int, also in a tensor of one element", value)
    if is_compiling() or value.device.type != "cpu":
        return bound
    try:
        return int(value.item())
    except RuntimeError:
        # Fake tensors and those of functorch have no value to read.
        return bound


def plain_seed(seed: Any, device: torch.device) -> int | Tensor | None:
    """`dropout_seed` as None, an int or an int64 tensor on the device. Raises TypeError."""
    if seed is None or type(seed) is int:
        return seed
    wanted = "an int or an int64 tensor"
    if not isinstance(seed, Tensor):
        return plain_int("dropout_seed", seed, wanted)
    if seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool:
        wrong_type("dropout_seed", wanted, seed)
    if seed.device.type == "cpu" and seed.numel() == 1:
        # Also beside a GPU: eight bytes that go there with the call.
        return seed.to(device, torch.int64)
    return seed.to(torch.int64)


def plain_options(options: Options) -> Options:
    """The options with plain values. A value that is plain already stays the same object. Raises
    TypeError or ValueError naming the argument."""
    _check_near("window_size", options.window_size, call.WINDOW)
    _check_near("dropout_origin", options.dropout_origin, call.ORIGIN)
    return call.plain_options(options, plain_int, plain_float, plain_flag)


def plain_update(update: CacheUpdate, q: Any) -> CacheUpdate:
    """The update with plain values; itself if all are plain already. TypeError naming the argument.
    A length in a tensor without dims is that of every sequence."""
    lengths, interleaved = update.cache_seqlens, update.rotary_interleaved
    if not isinstance(lengths, Tensor):
        if lengths is not None:
            lengths = plain_int(
                "cache_seqlens", lengths, "an int, an int32 or int64 tensor or None"
            )
    elif lengths.dim() == 0 and lengths.dtype in _WHOLE_NUMBERS and _has_rows(q):
        if lengths.dtype == torch.int64:
            lengths = lengths.clamp(-1, numbers.LONGEST)
        lengths = lengths.to(torch.int32).expand(q.shape[0])
    interleaved = plain_flag("rotary_interleaved", interleaved)
    if lengths is update.cache_seqlens and interleaved is update.rotary_interleaved:
        return update
    return update._replace(cache_seqlens=lengths, rotary_interleaved=interleaved)


def _has_rows(q: Any) -> bool:
    """Whether q has a first dim; later checks report one that has none."""
    return isinstance(q, Tensor) and q.dim() > 0


def is_same(plain: tuple, received: tuple) -> bool:
    """Whether both hold the same objects, so that nothing was made plain."""
    return all(map(operator.is_, plain, received))


def _check_near(name: str, value: Any, wanted: str) -> None:
    """TypeError for a tensor that is not on a CPU, for which the host would have to wait."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        wrong_type(name, f"{wanted} (a tensor elsewhere would have to be waited for)", value)


def _check_readable(name: str, value: Any, wanted: str) -> None:
    """TypeError or ValueError for a tensor whose element cannot be read."""
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} must not require a gradient, as none is computed for it (detach it),"
                " got a tensor that does"
            )
        _check_near(name, value, wanted)
