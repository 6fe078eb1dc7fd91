"""The packed forms of attention: q, k and v (or k and v) in one tensor. They are split by one
`unbind`, whose backward writes the packed gradient once.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from heedful.torch.api.attention import flash_attn_func, flash_attn_varlen_func
from heedful.torch.operands.checks import check_tensor

_LAYOUTS = {
    ("qkv", False): "(batch, seqlen, 3, heads, head_dim)",
    ("kv", False): "(batch, seqlen_k, 2, heads_k, head_dim)",
    ("qkv", True): "(total, 3, heads, head_dim)",
    ("kv", True): "(total_k, 2, heads_k, head_dim)",
}


def _unpacked(name: str, tensor, varlen: bool = False) -> tuple[Tensor, ...]:
    """The tensors along the third dim from the end; ValueError naming the argument."""
    layout = _LAYOUTS[name, varlen]
    check_tensor(name, tensor)
    if tensor.dim() != layout.count(",") + 1 or tensor.shape[-3] != len(name):
        raise ValueError(f"{name} must be {layout}, got shape {tuple(tensor.shape)}")
    return tensor.unbind(-3)


def in_own_words(error: Exception, name: str) -> None:
    """Turns an error about parts of a packed tensor into one about the caller's arguments."""
    said = re.sub(f"^([{name}]) must", rf"{name} (its \1) must", str(error))
    if name == "qkv":
        said = re.sub(r"\b(cu_seqlens|max_seqlen)_[qk]\b", r"\1", said)
    error.args = (said,)


def _call(
    function: Callable, name: str, before: tuple, packed: Tensor, after: tuple, keywords: dict
) -> Any:
    """A call of the function that a packed form stands for: with arguments before the parts of the
    packed one, whose name is `name`, and after them. Errors speak of the caller's arguments."""
    for keyword in keywords:
        if keyword not in function.__kwdefaults__:
            form = function.__name__.replace("func", f"{name}packed_func")
            raise TypeError(f"{form}() got an unexpected keyword argument {keyword!r}")
    parts = _unpacked(name, packed, function is flash_attn_varlen_func)
    try:
        return function(*before, *parts, *after, **keywords)
    except (TypeError, ValueError) as error:
        in_own_words(error, name)
        raise


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **keywords,
) -> Any:
    """Self-attention on packed q, k, v; all else as in flash_attn_func.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim).
        keywords: the keyword-only arguments of flash_attn_func.

    Returns, Raises: as flash_attn_func.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return _call(flash_attn_func, "qkv", (), qkv, (*options, return_attn_probs), keywords)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **keywords,
) -> Any:
    """Attention with packed k, v; all else as in flash_attn_func.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        kv: (batch, seqlen_k, 2, heads_k, head_dim).
        keywords: the keyword-only arguments of flash_attn_func.

    Returns, Raises: as flash_attn_func.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return _call(flash_attn_func, "kv", (q,), kv, (*options, return_attn_probs), keywords)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **keywords,
) -> Any:
    """Self-attention on packed sequences of packed q, k, v; all else as in flash_attn_varlen_func.

    Args:
        qkv: (total, 3, heads, head_dim).
        cu_seqlens, max_seqlen: of queries and keys alike.
        keywords: the keyword-only arguments of flash_attn_varlen_func.

    Returns, Raises: as flash_attn_varlen_func.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    after = (*lengths, *options, return_attn_probs)
    return _call(flash_attn_varlen_func, "qkv", (), qkv, after, keywords)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **keywords,
) -> Any:
    """Attention on packed sequences with packed k, v; all else as in flash_attn_varlen_func.

    Args:
        q: (total_q, heads_q, head_dim).
        kv: (total_k, 2, heads_k, head_dim).
        keywords: the keyword-only arguments of flash_attn_varlen_func.

    Returns, Raises: as flash_attn_varlen_func.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    after = (*lengths, *options, return_attn_probs)
    return _call(flash_attn_varlen_func, "kv", (q,), kv, after, keywords)


# Which function each packed form stands for.
STANDS_FOR = {
    flash_attn_qkvpacked_func: flash_attn_func,
    flash_attn_kvpacked_func: flash_attn_func,
    flash_attn_varlen_qkvpacked_func: flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func: flash_attn_varlen_func,
}


def unpacked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, by name, for the function that a packed form with these arguments calls."""
    arguments = dict(arguments)
    varlen = "cu_seqlens" in arguments or "cu_seqlens_q" in arguments
    for name in ("cu_seqlens", "max_seqlen"):
        if name in arguments:
            arguments[f"{name}_q"] = arguments[f"{name}_k"] = arguments.pop(name)
    name = "qkv" if "qkv" in arguments else "kv"
    parts = _unpacked(name, arguments.pop(name), varlen)
    return {**arguments, **dict(zip(name, parts, strict=True))}
