"""heedful as an attention backend of Hugging Face diffusers:

import heedful.integrations.diffusers as plug_in

plug_in.register()
pipeline.transformer.set_attention_backend("heedful")
"""

from typing import Any

from heedful.integrations import check

check("diffusers")

from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from torch import Tensor  # noqa: E402

from heedful import flash_attn_func  # noqa: E402

__all__ = ["attention", "is_registered", "register", "unregister"]

_Name, _Registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
_names: list[str] = []


def register(name: str = "heedful") -> None:
    """Makes `set_attention_backend(name)` and `with attention_backend(name)` run heedful. A second
    call with one name does nothing.

    Raises:
        ValueError: the name is no identifier in lower case, or diffusers has it already.
    """
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise ValueError(f"name must be an identifier in lower case, got {name!r}")
    if name in _names:
        return
    if name in _Name._value2member_map_ or name.upper() in _Name._member_map_:
        raise ValueError(f"name must be free, got {name!r}, which diffusers has already")
    check("diffusers")
    member = _added(name)
    checks = [dispatch._check_device, dispatch._check_shape]
    _Registry.register(member, constraints=checks)(attention)
    _names.append(name)


def unregister(name: str | None = None) -> None:
    """Takes heedful out of diffusers, under this name or under all. If it is the active backend,
    torch's becomes active again. Models that use the name must be given another one first."""
    for each in [name] if name is not None else list(_names):
        if each not in _names:
            raise ValueError(f"name must be registered, got {each!r}; registered are {_names}")
        member = _Name(each)
        if _Registry._active_backend == member:
            _Registry.set_active_backend(_Name.NATIVE)  # pyright: ignore[reportArgumentType]
        for table in (
            _Registry._backends,
            _Registry._constraints,
            _Registry._supported_arg_names,
        ):
            table.pop(member, None)
        _Name._member_map_.pop(each.upper())
        _Name._member_names_.remove(each.upper())
        _Name._value2member_map_.pop(each)
        type.__delattr__(_Name, each.upper())
        _names.remove(each)


def is_registered() -> bool:
    return bool(_names)


def _added(name: str) -> Any:
    """A new member of diffusers' enumeration of backends, which diffusers itself cannot extend."""
    member: Any = str.__new__(_Name, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__ = _Name
    member._sort_order_ = len(_Name._member_names_)
    _Name._member_map_[name.upper()] = member
    _Name._member_names_.append(name.upper())
    _Name._value2member_map_[name] = member
    type.__setattr__(_Name, name.upper(), member)
    return member


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Attention of a processor.

    Args:
        query: (batch, q_length, heads, head_dim). key, value: (batch, k_length, heads_k, head_dim),
            with fewer heads only under enable_gqa.
        attn_mask: bool (True = visible) or float to add, (batch, k_length) or what broadcasts to
            (batch, heads, q_length, k_length).

    Returns:
        (batch, q_length, heads, head_dim). With return_lse: (out, lse), lse (batch, q_length,
        heads).

    Raises:
        ValueError: naming what is not served.
    """
    if _parallel_config is not None:
        raise ValueError("heedful does not serve context parallelism of diffusers yet")
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ValueError(
            f"key must have query's {query.shape[2]} heads without enable_gqa, got {key.shape[2]}"
        )
    if is_causal and (query.shape[1] != key.shape[1] or attn_mask is not None):
        raise ValueError(
            "is_causal wants as many queries as keys and no attn_mask: torch aligns it to the first"
            " key, heedful to the last"
        )
    if attn_mask is not None:
        of_keys = attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1])
        if of_keys:
            attn_mask = attn_mask[:, None, None, :]
    result = flash_attn_func(
        query, key, value, dropout_p, scale, is_causal, bias=attn_mask, return_lse=return_lse
    )
    return (result[0], result[1].transpose(1, 2)) if return_lse else result
