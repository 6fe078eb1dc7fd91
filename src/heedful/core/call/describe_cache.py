"""Checks of a call over a KV cache that are not about attention itself."""

from typing import Any, NoReturn

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import AttentionCall, CacheUpdate, Options
from heedful.core.call.describe import (
    FLOATS,
    check,
    check_dtype,
    check_pair,
    check_rank,
    check_shape,
    check_writable,
    has_latent_rows,
)
from heedful.core.call.operands import Operands
from heedful.core.call.problem import LATENT_ROW_BYTES, LATENT_ROWS, AttentionProblem


def check_cache(call: AttentionCall, update: CacheUpdate) -> AttentionProblem:
    """The problem of a call over a cache, after all arguments about the cache are checked, too;
    nothing is written. update: its arrays are ArraySpecs, its length an int or an ArraySpec.

    Raises TypeError or ValueError.
    """
    if isinstance(update.cache_seqlens, ArraySpec):
        call = call._replace(x=call.x._replace(seqused_k=update.cache_seqlens))
    problem = check(call)
    if update.shared_prefix is not None:
        if problem.invariant:
            raise ValueError(
                "shared_prefix must be None with numerics='invariant': its result is merged with"
                " that of the cache, whose parts would end elsewhere; got arrays"
            )
        _check_prefix(call.x, problem, update.shared_prefix)
    check_pair("k", update.k, "v", update.v)
    check_pair("rotary_cos", update.rotary_cos, "rotary_sin", update.rotary_sin)
    if update.k is not None:
        _check_new_tokens(call.x, problem, update)
    if update.rotary_cos is not None:
        _check_rotary(call.x, problem, update)
    return problem


def attention_part(x: Operands, options: Options, update: CacheUpdate) -> tuple[Operands, Options]:
    """The attention over the cache alone, to be merged with that over a shared prefix. The sink
    enters once, in the merge."""
    if update.shared_prefix is None:
        return x, options
    return x._replace(sink=None), options._replace(return_lse=True)


def check_int_length(length: int, new: int, capacity: int) -> None:
    """ValueError unless `length` tokens and `new` more fit the cache."""
    if not 0 <= length <= capacity - new:
        raise ValueError(
            f"cache_seqlens must lie between 0 and {capacity - new}"
            f" (a capacity of {capacity} for {new} new tokens), got {length}"
        )


def last_rotated_length(update: CacheUpdate, q_len: int, advance: bool) -> int | None:
    """The greatest length before the new tokens at which each query has a row in the rotary tables;
    None where queries need no other rows than keys. There may be more queries than new keys; these
    have later positions, which the tables must have. advance: whether each query has another
    position.
    """
    if update.rotary_cos is None or not advance:
        return None
    return update.rotary_cos.shape[0] - update.position0 - q_len


def check_rotated_length(length: int, last: int, update: CacheUpdate) -> None:
    """ValueError where a query's position is past the rotary tables. last: the result of
    `last_rotated_length`."""
    if length > last:
        rows = update.rotary_cos.shape[0]
        raise ValueError(
            f"rotary_cos must have a row for each of the queries' {rows + length - last} positions,"
            f" got {rows}"
        )


def _check_new_tokens(x: Operands, problem: AttentionProblem, update: CacheUpdate) -> None:
    if update.cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v, to say where they go, got None")
    new_len = None
    is_quantised = quantises(x, update)
    for name, cache, dim in (("k", x.k, problem.head_dim), ("v", x.v, problem.head_dim_v)):
        new = getattr(update, name)
        dtype = x.q.dtype if is_quantised else cache.dtype
        if new.dtype != dtype:
            raise TypeError(
                f"{name} must be {_new_dtype(name, x, cache, is_quantised)}, got {new.dtype}"
            )
        check_rank(name, new.shape, "(batch, new_len, heads_k, dim)")
        new_len = new.shape[1] if new_len is None else new_len
        words = "head_dim" if is_quantised else f"{name}_cache's last dim"
        shape = (problem.batch, new_len, problem.heads_k, dim if is_quantised else cache.shape[-1])
        check_shape(name, new.shape, shape, f"(batch, new_len, heads_k, {words})")
        check_writable(f"{name}_cache", cache)
    if problem.kv_dtype == LATENT_ROWS:
        _check_whole_floats(x.k)
    if is_quantised and problem.kv_group:
        for name in ("k_descale", "v_descale", "k_shift", "v_shift"):
            _check_written_scale(name, getattr(x, name))
    if new_len is not None and new_len > problem.seqlen_k:
        raise ValueError(
            f"k must have at most the cache's {problem.seqlen_k} tokens, got {new_len}"
        )


def _check_whole_floats(rows: ArraySpec) -> None:
    """ValueError unless the scales within rows of latent vectors lie where float32 may."""
    if any(stride % 4 for stride in rows.strides[:-1]):
        raise ValueError(
            "k_cache must have rows at multiples of 4 bytes, as float32 scales are written into"
            f" them, got strides {tuple(rows.strides)}"
        )


def quantises(x: Operands, update: CacheUpdate) -> bool:
    """Whether new keys and values come unquantised, and are quantised as they are appended."""
    new = update.k
    return new is not None and x.k.dtype not in FLOATS and new.dtype in FLOATS


def _new_dtype(name: str, x: Operands, cache: ArraySpec, is_quantised: bool) -> str:
    """The dtype that new keys or values must have, in words."""
    stored = f"{cache.dtype} like {name}_cache"
    maker = "pack_latent" if has_latent_rows(cache) else "quantize_kv"
    if cache.dtype in FLOATS:
        return stored
    if name == "v":
        return f"{x.q.dtype} like q, as k is" if is_quantised else f"{stored}, as k is"
    if x.q.dtype not in FLOATS:
        return f"{stored} ({maker} makes it)"
    return f"{stored} ({maker} makes it) or {x.q.dtype} like q"


def _check_written_scale(name: str, scale: ArraySpec | None) -> None:
    """ValueError unless scales of groups can be written where they are."""
    if scale is None:
        return
    check_writable(name, scale)
    if scale.shape[-1] > 1 and scale.strides[-1] != 1:
        raise ValueError(
            f"{name} must have a contiguous last dim, as it is written, got strides"
            f" {tuple(scale.strides)}"
        )


def _check_rotary(x: Operands, problem: AttentionProblem, update: CacheUpdate) -> None:
    if update.k is None:
        raise ValueError("rotary_cos must be None without k and v to rotate, got a tensor")
    if update.k.dtype not in FLOATS:
        raise ValueError(
            "rotary_cos must be None where new k comes quantised (rotate before quantize_kv, or"
            " give k and v in q's dtype), got a tensor"
        )
    for name in ("rotary_cos", "rotary_sin"):
        table = getattr(update, name)
        check_dtype(name, table.dtype, *dict.fromkeys((x.q.dtype, "float32")))
        check_rank(name, table.shape, "(positions, rotary_dim / 2)")
    cos = update.rotary_cos
    if problem.kv_dtype == LATENT_ROWS:
        raise ValueError(
            f"rotary_cos must be None beside k_cache of {LATENT_ROW_BYTES} bytes a row (k's first"
            " columns are values; rotate the last ones before the call), got an array"
        )
    check_shape("rotary_sin", update.rotary_sin.shape, cos.shape, "of rotary_cos")
    if not 1 <= cos.shape[1] <= problem.head_dim // 2:
        raise ValueError(
            f"rotary_cos must have 1 to {problem.head_dim // 2} columns (head_dim"
            f" {problem.head_dim} / 2), got {cos.shape[1]}"
        )
    positions = problem.seqlen_k + update.position0
    if cos.shape[0] < positions:
        raise ValueError(
            f"rotary_cos must have a row for each of the cache's {positions} positions,"
            f" got {cos.shape[0]}"
        )
    last = last_rotated_length(update, problem.seqlen_q, problem.mask.bounded)
    if last is not None:
        check_rotated_length(0, last, update)


def _check_prefix(x: Operands, problem: AttentionProblem, prefix: tuple) -> None:
    if problem.mask.bounded and not problem.mask.causal:
        _refuse("window_size", "no kernel knows each sequence's distance to the prefix")
    if problem.alibi:
        _refuse("alibi_slopes", "no kernel knows each sequence's distance to the prefix")
    if problem.rel_bias:
        _refuse("rel_bias", "no kernel knows each sequence's distance to the prefix")
    if x.q.dtype not in FLOATS:
        _refuse("fp8 q", "the prefix has no descale")
    length = None
    for index, dim in enumerate((problem.head_dim, problem.head_dim_v)):
        name, part = f"shared_prefix[{index}]", prefix[index]
        check_dtype(name, part.dtype, x.q.dtype)
        shape = part.shape
        if len(shape) == 4 and shape[0] == 1:
            shape = shape[1:]
        words = "(prefix_len, heads_k, head_dim)"
        check_rank(name, shape, words)
        length = shape[0] if length is None else length
        check_shape(name, shape, (length, problem.heads_k, dim), words)


def check_prefix_pair(prefix: Any) -> None:
    """TypeError unless a shared_prefix is a tuple of two."""
    if not isinstance(prefix, tuple):
        raise TypeError(f"shared_prefix must be a tuple (k, v), got {type(prefix).__name__}")
    if len(prefix) != 2:
        raise TypeError(f"shared_prefix must be a tuple (k, v), got a tuple of {len(prefix)}")


def _refuse(what: str, why: str) -> NoReturn:
    raise ValueError(f"shared_prefix must be None beside {what} ({why}), got a tuple")
