"""What is checked of a call over a KV cache beyond attention itself."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heedful.core.operands import Operands
from heedful.core.problem import AttentionProblem
from heedful.torch.checks import (
    FLOATS,
    check_dtype,
    check_shape,
    check_tensor,
    check_writable,
)
from heedful.torch.plain import plain_flag, plain_int

_WHOLE_NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def check_update(x: Operands, problem: AttentionProblem, update) -> None:
    """TypeError or ValueError for new keys, lengths or rotary tables that do not fit the cache.

    x: the caller's tensors, its lengths in seqused_k if they are a tensor. update: kvcache.Update,
    its shared prefix checked.
    """
    _both_or_none("k", update.k, "v", update.v)
    _both_or_none("rotary_cos", update.rotary_cos, "rotary_sin", update.rotary_sin)
    if update.k is not None:
        _check_new_tokens(x, problem, update)
    if update.rotary_cos is not None:
        _check_rotary(x, problem, update)


def plain_update(update, q: Tensor):
    """The update with plain values for whatever stands for them; itself if it has those already.
    TypeError naming the argument.

    update: kvcache.Update. A length in a tensor without dims is that of every sequence.
    """
    lengths, interleaved = update.cache_seqlens, update.rotary_interleaved
    if not isinstance(lengths, Tensor):
        if lengths is not None:
            lengths = plain_int("cache_seqlens", lengths, "an int, an int32 tensor or None")
    elif lengths.dim() == 0 and lengths.dtype in _WHOLE_NUMBERS and q.dim():
        lengths = lengths.to(torch.int32).expand(q.shape[0])
    interleaved = plain_flag("rotary_interleaved", interleaved)
    if lengths is update.cache_seqlens and interleaved is update.rotary_interleaved:
        return update
    return update._replace(cache_seqlens=lengths, rotary_interleaved=interleaved)


def check_int_length(length: int, new: int, capacity: int) -> None:
    """ValueError unless `length` tokens and `new` more fit the cache."""
    if 0 <= length <= capacity - new:
        return
    if is_compiling():
        # Dynamo formats no symbolic ints.
        raise ValueError("cache_seqlens must lie within the cache, with room for the new tokens")
    raise ValueError(
        f"cache_seqlens must lie between 0 and {capacity - new}"
        f" (a capacity of {capacity} for {new} new tokens), got {length}"
    )


def last_turned_length(update, q_len: int, advance: bool) -> int | None:
    """The most tokens before the new ones that leave a row of the rotary tables to each query; None
    where queries need no rows of their own.

    Queries may be more than the new keys, and then stand past those, though not past the tables.
    update: kvcache.Update. advance: whether queries have a position each.
    """
    if update.rotary_cos is None or not advance:
        return None
    return update.rotary_cos.shape[0] - update.position0 - q_len


def check_turned_length(length: int, last: int, update) -> None:
    """ValueError where a query stands past the rotary tables. last: of `last_turned_length`."""
    if length <= last:
        return
    if is_compiling():
        # As in `check_int_length`.
        raise ValueError("rotary_cos must have a row for each of the queries' positions")
    rows = update.rotary_cos.shape[0]
    raise ValueError(
        f"rotary_cos must have a row for each of the queries' {rows + length - last} positions,"
        f" got {rows}"
    )


def _both_or_none(name: str, value: Any, other_name: str, other: Any) -> None:
    if (value is None) != (other is None):
        missing, given = (name, other_name) if value is None else (other_name, name)
        raise ValueError(f"{missing} must be given with {given}, got None")


def _check_new_tokens(x: Operands, problem: AttentionProblem, update) -> None:
    if update.cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v, to say where they go, got None")
    new_len = None
    for name, cache in (("k", x.k), ("v", x.v)):
        new = getattr(update, name)
        check_tensor(name, new, x.q.device)
        if new.dtype != cache.dtype:
            hint = " (quantize_kv makes it)" if cache.dtype not in FLOATS else ""
            raise TypeError(
                f"{name} must be {_word(cache.dtype)} like {name}_cache{hint},"
                f" got {_word(new.dtype)}"
            )
        if new.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, new_len, heads_k, dim), got shape {tuple(new.shape)}"
            )
        new_len = new.shape[1] if new_len is None else new_len
        shape = (problem.batch, new_len, problem.heads_k, cache.shape[-1])
        check_shape(name, new, shape, f"(batch, new_len, heads_k, {name}_cache's last dim)")
        check_writable(f"{name}_cache", cache)
    if new_len is not None and new_len > problem.seqlen_k:
        raise ValueError(
            f"k must have at most the cache's {problem.seqlen_k} tokens, got {new_len}"
        )


def _check_rotary(x: Operands, problem: AttentionProblem, update) -> None:
    if update.k is None:
        raise ValueError("rotary_cos must be None without k and v to rotate, got a tensor")
    if x.k.dtype not in FLOATS:
        raise ValueError(
            "rotary_cos must be None for a quantised cache, whose new k comes quantised (rotate"
            " before quantize_kv), got a tensor"
        )
    for name in ("rotary_cos", "rotary_sin"):
        table = getattr(update, name)
        check_tensor(name, table, x.q.device)
        check_dtype(name, table, *dict.fromkeys((x.q.dtype, torch.float32)))
        if table.dim() != 2:
            raise ValueError(
                f"{name} must be (positions, rotary_dim / 2), got shape {tuple(table.shape)}"
            )
    cos = update.rotary_cos
    check_shape("rotary_sin", update.rotary_sin, cos.shape, "of rotary_cos")
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
    last = last_turned_length(update, problem.seqlen_q, problem.mask.bounded)
    if last is not None:
        check_turned_length(0, last, update)


def check_apart(k_cache: Tensor, v_cache: Tensor) -> None:
    """ValueError where writing values would overwrite the keys that were just rotated."""
    if k_cache.data_ptr() == v_cache.data_ptr() and k_cache.numel():
        raise ValueError(
            "rotary_cos must be None where v_cache shares the memory of k_cache (v would overwrite"
            " the rotated keys), got a tensor"
        )


def check_prefix(x: Operands, problem: AttentionProblem, prefix: Any) -> None:
    """TypeError or ValueError for a shared_prefix that does not fit the call."""
    if not isinstance(prefix, tuple):
        raise TypeError(f"shared_prefix must be a tuple (k, v), got {type(prefix).__name__}")
    if len(prefix) != 2:
        raise TypeError(f"shared_prefix must be a tuple (k, v), got a tuple of {len(prefix)}")
    if problem.mask.bounded and not problem.mask.causal:
        _refuse("window_size", "no kernel knows each sequence's distance to the prefix")
    if problem.alibi:
        _refuse("alibi_slopes", "no kernel knows each sequence's distance to the prefix")
    if x.q.dtype not in FLOATS:
        _refuse("fp8 q", "the prefix has no descale")
    length = None
    for index, dim in enumerate((problem.head_dim, problem.head_dim_v)):
        name, part = f"shared_prefix[{index}]", prefix[index]
        check_tensor(name, part, x.q.device)
        check_dtype(name, part, x.q.dtype)
        if part.dim() == 4 and part.shape[0] == 1:
            part = part[0]
        if part.dim() != 3:
            raise ValueError(
                f"{name} must be (prefix_len, heads_k, head_dim), got shape {tuple(part.shape)}"
            )
        length = part.shape[0] if length is None else length
        check_shape(name, part, (length, problem.heads_k, dim), "(prefix_len, heads_k, head_dim)")


def _refuse(what: str, why: str) -> NoReturn:
    raise ValueError(f"shared_prefix must be None beside {what} ({why}), got a tuple")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
