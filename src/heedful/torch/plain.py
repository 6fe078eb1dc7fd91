"""Arguments that stand for plain Python values: numbers of NumPy or in small tensors, windows as
any sequence, lengths in tensors.

Calls are known by the values and types of their arguments. Only plain values are kept in such a
key, so these functions run where a type is unusual, or where a key is not known yet.
"""

import operator
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.compiler import is_compiling

from heedful.torch.checks import Options, wrong_type

# Where a call that is no shard begins in its dropout mask.
WHOLE = (0, 0, 0, 0)
_LARGEST_ORIGIN = 2**32 - 1


def plain_int(name: str, value: Any, wanted: str = "an int") -> Any:
    """The int that `value` stands for: anything with `__index__`, or an array or CPU tensor of one
    integer. Raises TypeError."""
    if type(value) is int or isinstance(value, SymInt):
        return value
    try:
        return operator.index(_item(name, value, wanted))
    except TypeError:
        wrong_type(name, wanted, value)


def plain_float(name: str, value: Any) -> Any:
    """The number that `value` stands for: anything with `__float__` or `__index__`, or an array or
    CPU tensor of one number. An int stays one. Raises TypeError or, beyond floats, ValueError."""
    if type(value) is float or isinstance(value, (SymInt, SymFloat)):
        return value
    if type(value) is int and is_compiling():
        return value
    wanted = "a float"
    item = _item(name, value, wanted)
    if not (hasattr(type(item), "__float__") or hasattr(type(item), "__index__")):
        wrong_type(name, wanted, value)
    try:
        real = float(item)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an int beyond the range of floats") from None
    return value if type(value) is int else real


def plain_flag(name: str, value: Any) -> bool:
    """The bool that `value` is, also NumPy's or one in a CPU tensor. Raises TypeError."""
    if type(value) is bool:
        return value
    item = _only_element(name, value, "a bool") if _is_array(value) else value
    if type(item) is not bool:
        wrong_type(name, "a bool", value)
    return item


def plain_window(window_size: Any) -> tuple[int, ...]:
    """The tuple of ints that `window_size` stands for: any sequence, array or CPU tensor of
    anything with `__index__`. Its length and range are left to MaskSpec.

    Raises TypeError, or ValueError where it is no sequence.
    """
    return _ints("window_size", window_size, "(left, right) or (left, right, first), each an int")


def plain_origin(origin: Any) -> tuple[int, ...]:
    """The four ints that `dropout_origin` stands for. Raises TypeError or ValueError."""
    wanted = f"(batch, head, row, column), each an int from 0 to {_LARGEST_ORIGIN}"
    plain = _ints("dropout_origin", origin, wanted)
    if len(plain) != 4 or not all(0 <= place <= _LARGEST_ORIGIN for place in plain):
        raise ValueError(f"dropout_origin must be {wanted}, got {origin!r:.100}")
    return plain


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


def plain_options(options: tuple) -> Options:
    """The fields of Options with a plain value each, the very one where it is plain already.

    Raises TypeError or ValueError naming the argument.
    """
    given = Options(*options)
    returns = "return_softmax_lse" if given.kind == "kvcache" else "return_lse"
    scale = given.softmax_scale
    plain = Options(
        given.kind,
        given.max_seqlen_q,
        given.max_seqlen_k,
        plain_float("dropout_p", given.dropout_p),
        None if scale is None else plain_float("softmax_scale", scale),
        plain_flag("causal", given.causal),
        plain_window(given.window_size),
        plain_float("softcap", given.softcap),
        plain_flag("deterministic", given.deterministic),
        plain_flag("return_attn_probs", given.return_attn_probs),
        plain_flag(returns, given.return_lse),
        plain_int("num_splits", given.num_splits),
        given.backend,
        plain_origin(given.dropout_origin),
    )
    if given.backend is not None and not isinstance(given.backend, str):
        wrong_type("backend", "a str or None", given.backend)
    if given.kind == "varlen":
        lengths = {name: plain_int(name, getattr(given, name)) for name in _LENGTHS}
        plain = plain._replace(**lengths)
    return plain


def is_same(plain: tuple, given: tuple) -> bool:
    """Whether both hold the very same values: nothing was made plain."""
    return all(map(operator.is_, plain, given))


_LENGTHS = ("max_seqlen_q", "max_seqlen_k")


def _is_array(value: Any) -> bool:
    """Whether it is a tensor, or an array or scalar as NumPy has them."""
    return isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "item"))


def _item(name: str, value: Any, wanted: str) -> Any:
    """What is in an array of one element; all else as it is. TypeError for bools."""
    item = _only_element(name, value, wanted) if _is_array(value) else value
    if isinstance(item, bool):
        wrong_type(name, wanted, value)
    return item


def _only_element(name: str, value: Any, wanted: str) -> Any:
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} must not require a gradient, as none is computed for it (detach it),"
                " got a tensor that does"
            )
        if value.device.type != "cpu":
            wrong_type(name, f"{wanted} (a tensor elsewhere would have to be waited for)", value)
    try:
        return value.item()
    except (RuntimeError, ValueError):
        # More or fewer elements than one, or a tensor without values (fake, under vmap).
        wrong_type(name, wanted, value)


def _ints(name: str, values: Any, wanted: str) -> tuple[int, ...]:
    """A tuple of ints, `values` itself if it is one. ValueError unless a sequence, TypeError unless
    of ints."""
    if values.__class__ is tuple:
        for value in values:
            if value.__class__ is not int:
                break
        else:
            return values
    if isinstance(values, Tensor) and values.device.type != "cpu":
        wrong_type(name, f"{wanted} (a tensor elsewhere would have to be waited for)", values)
    if isinstance(values, (str, bytes, Mapping, Set)):
        raise ValueError(f"{name} must be {wanted}, got {values!r:.100}")
    try:
        items = tuple(values)
    except TypeError:
        raise ValueError(f"{name} must be {wanted}, got {values!r:.100}") from None
    return tuple([plain_int(f"{name}[{index}]", item) for index, item in enumerate(items)])
