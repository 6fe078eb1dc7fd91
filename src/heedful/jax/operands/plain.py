"""Arguments that stand for plain Python values, where they are arrays of JAX's, and seeds: all else
is `core.base.numbers`."""

from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from heedful.core.base import numbers
from heedful.core.base.numbers import wrong_type
from heedful.core.call import arguments as call
from heedful.core.call.arguments import CacheUpdate, Options, Quads
from heedful.core.call.describe import check_seed
from heedful.core.call.operands import Operands
from heedful.jax.base.arrays import is_traced

_WORD = 0xFFFFFFFF
_SEED = "an int, a jax.random key, an int64 array of one element or uint32 (2,), low word first"


def plain_int(name: str, value: Any, wanted: str = "an int") -> Any:
    """The int that `value` stands for. Raises TypeError, also for what is traced."""
    _check_known(name, value, wanted)
    return numbers.whole(name, value, wanted)


def plain_float(name: str, value: Any) -> float:
    """The number that `value` stands for. Raises TypeError, also for what is traced."""
    _check_known(name, value, "a float")
    return numbers.real(name, value)


def plain_flag(name: str, value: Any) -> bool:
    """The bool that `value` is. Raises TypeError, also for what is traced."""
    _check_known(name, value, "a bool")
    return numbers.truth(name, value)


def plain_options(options: Options) -> Options:
    """The options with a plain value each. Raises TypeError or ValueError naming the argument."""
    for name, wanted in (("window_size", call.WINDOW), ("dropout_origin", call.ORIGIN)):
        _check_known(name, getattr(options, name), wanted)
    return call.plain_options(options, plain_int, plain_float, plain_flag)


def plain_update(update: CacheUpdate, batch: int) -> CacheUpdate:
    """The update with plain values for whatever stands for them. TypeError naming the argument. A
    length in an array without dims is that of every sequence; one that is no int32 counts as it."""
    lengths = update.cache_seqlens
    if isinstance(lengths, (Array, np.ndarray)):
        if lengths.ndim == 0 and jnp.issubdtype(lengths.dtype, jnp.integer):
            lengths = jnp.broadcast_to(as_int32(lengths), (batch,))
    elif lengths is not None:
        lengths = plain_int("cache_seqlens", lengths, "an int, an int32 or int64 array or None")
    interleaved = plain_flag("rotary_interleaved", update.rotary_interleaved)
    return update._replace(cache_seqlens=lengths, rotary_interleaved=interleaved)


def as_int32(lengths: Array | np.ndarray) -> Array:
    """Ints as they are, or the nearest that int32 has."""
    if lengths.dtype == np.int32:
        return jnp.asarray(lengths)
    library = jnp if isinstance(lengths, Array) else np
    return jnp.asarray(library.clip(lengths, *_lengths(lengths.dtype)).astype(np.int32))


def _lengths(dtype: Any) -> tuple[int, int]:
    """The least and the most that both this dtype and int32 have."""
    info = jnp.iinfo(dtype)
    return max(int(info.min), -numbers.LONGEST), min(int(info.max), numbers.LONGEST)


def offset_of_each(x: Operands, options: Options) -> tuple[Operands, Options]:
    """The operands with q_offset where it is traced or each sequence has its own, in place of the
    option."""
    offset = options.q_offset
    if not isinstance(offset, (Array, np.ndarray)) or not (offset.ndim or is_traced(offset)):
        return x, options
    if not offset.ndim:
        counted = x.q if x.cu_seqlens_q is None else x.cu_seqlens_q[1:]
        offset = jnp.broadcast_to(offset, counted.shape[:1])
    return x._replace(q_offsets=offset), options._replace(q_offset=None)


def origin_of_each(x: Operands, options: Options) -> tuple[Operands, Options]:
    """The operands with dropout_origin where each sequence has its own, and the option beside."""
    origin, origins = call.origin_of_each(options.dropout_origin)
    return x._replace(origins=origins), options._replace(dropout_origin=origin)


# Stands for a column that is not known, of which no kernel may take it to be a multiple of 4.
_ANY_COLUMN = 1


def origin_words(origin: Any) -> tuple[Any, Array | None]:
    """dropout_origin as plain ints and None or, where it is traced, what kernels may rely on of it,
    which is its column, and uint32 (4,).

    Raises TypeError or ValueError naming the argument.
    """
    column = _ANY_COLUMN
    if isinstance(origin, (tuple, list)) and origin and isinstance(origin[-1], Quads):
        count = origin[-1].count
        if not is_traced(count):
            count = numbers.whole("dropout_origin[3].count", count)
        # Four times any count is known to be a multiple of 4, as 0 is.
        origin, column = (*origin[:-1], count * 4), 0
    parts = origin if isinstance(origin, (tuple, list)) else [origin]
    if not any(map(is_traced, parts)):
        return origin, None
    if len(parts) == 4 and not is_traced(parts[3]):
        column = numbers.whole("dropout_origin[3]", parts[3])
    words = jnp.stack(list(map(_word, parts))) if isinstance(origin, (tuple, list)) else origin
    if words.shape != (4,) or not jnp.issubdtype(words.dtype, jnp.integer):
        raise ValueError(
            f"dropout_origin must be {call.ORIGIN}, got a traced {words.dtype} {words.shape}"
        )
    return (0, 0, 0, column), words.astype(jnp.uint32)


def _word(part: Any) -> Array:
    if not is_traced(part):
        part = numbers.whole("dropout_origin", part)
        if not 0 <= part <= _WORD:
            raise ValueError(f"dropout_origin must be {call.ORIGIN}, got {part}")
        return jnp.uint32(part)
    if part.ndim or not jnp.issubdtype(part.dtype, jnp.integer):
        wrong_type("dropout_origin", call.ORIGIN, part)
    return part.astype(jnp.uint32)


def seed_words(seed: Any) -> Array:
    """dropout_seed as uint32 (2,), the low word first. Raises TypeError or ValueError."""
    if isinstance(seed, Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.shape != ():
            raise ValueError(f"dropout_seed must be one key, got keys of shape {seed.shape}")
        return jax.random.bits(seed, (2,), jnp.uint32)
    if not isinstance(seed, (Array, np.ndarray, np.generic)):
        plain = plain_int("dropout_seed", seed, _SEED)
        check_seed(plain)
        return jnp.array([plain & _WORD, plain >> 32 & _WORD], jnp.uint32)
    if seed.dtype == np.uint32 and seed.shape == (2,):
        return jnp.asarray(seed)
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        wrong_type("dropout_seed", _SEED, seed)
    if seed.size != 1:
        raise ValueError(f"dropout_seed must have one element, got {tuple(seed.shape)}")
    if isinstance(seed, (np.ndarray, np.generic)):
        return seed_words(int(seed.reshape(())))
    whole = seed.reshape(())
    if whole.dtype.itemsize == 8:
        return lax.bitcast_convert_type(whole, jnp.uint32).reshape(2)
    signed = jnp.issubdtype(whole.dtype, jnp.signedinteger)
    low = whole.astype(jnp.int32 if signed else jnp.uint32)
    high = jnp.where(low < 0, jnp.uint32(_WORD), jnp.uint32(0))
    return jnp.stack([low.astype(jnp.uint32), high])


def _check_known(name: str, value: Any, wanted: str) -> None:
    """TypeError for what is traced, or lies on a device that would have to be waited for."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    for part in parts:
        if is_traced(part):
            raise TypeError(f"{name} must be {wanted}, known when it is traced, got a traced array")
        if isinstance(part, Array) and any(d.platform != "cpu" for d in part.devices()):
            where = "(an array elsewhere would have to be waited for)"
            wrong_type(name, f"{wanted} {where}", part)
