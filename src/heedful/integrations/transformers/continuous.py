"""Continuous batching (`generate_batch`), for which transformers allows only names that it knows.
It has had two designs. In the old one an implementation has a second entry, `paged|<name>`, which
updates the cache itself. In the new one it has one entry, and the cache gives the layers lengths
and pages. In both a few functions ask whether a name is one of flash-attn's, and ask flash-attn's
modules for the call over pages. The patch makes them answer yes for ours.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from heedful import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from heedful.integrations.transformers.attention import REFUSED, attention

_PACKAGE = "transformers.generation.continuous_batching"
_ASKS = "is_flash_attention_requested"
# By design, the module and the name of the function that finds the calls.
_ONE_ENTRY = (
    "lazy_import_flash_attention",
    ((flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, None, None), (dict, dict)),
)
_TWO_ENTRIES = (
    "lazy_import_paged_flash_attention",
    (flash_attn_varlen_func, flash_attn_with_kvcache),
)
_names: set[str] = set()
_originals: list[tuple[ModuleType, str, Any]] = []


def patch(name: str) -> None:
    """Allows a name in continuous batching. Raises RuntimeError, and changes nothing, if this
    version of transformers has neither design."""
    if not _originals:
        _originals.extend(_patched())
    _names.add(name)
    if _has_two_entries():
        AttentionInterface.register(f"paged|{name}", paged_attention)


def restore(name: str) -> None:
    """Undoes `patch`, if it was made for this name."""
    _names.discard(name)
    AttentionInterface._global_mapping.pop(f"paged|{name}", None)
    if not _names:
        while _originals:
            module, attribute, original = _originals.pop()
            setattr(module, attribute, original)


def _modules() -> tuple[ModuleType, ModuleType]:
    api = importlib.import_module(f"{_PACKAGE}.continuous_api")
    return api, importlib.import_module(f"{_PACKAGE}.initialization")


def _has_two_entries() -> bool:
    return hasattr(_modules()[1], _TWO_ENTRIES[0])


def _patched() -> list[tuple[ModuleType, str, Any]]:
    """Replaces the functions that check names. Returns the original ones."""
    api, initialization = _modules()
    loads, calls = _TWO_ENTRIES if _has_two_entries() else _ONE_ENTRY
    wanted = [(api, _ASKS), (initialization, _ASKS), (initialization, loads)]
    missing = [f"{module.__name__}.{name}" for module, name in wanted if not hasattr(module, name)]
    if missing:
        raise RuntimeError(
            "heedful does not know the continuous batching of this version of transformers: it has "
            f"no {', '.join(missing)}"
        )
    originals = [(module, name, getattr(module, name)) for module, name in wanted]
    for module, name, original in originals:
        new = _loading(original, calls) if name == loads else _asking(original)
        setattr(module, name, new)
    return originals


def _is_ours(implementation: Any) -> bool:
    return isinstance(implementation, str) and implementation.removeprefix("paged|") in _names


def _asking(original: Callable) -> Callable:
    def is_flash_attention_requested(
        config=None, requested_attention_implementation=None, version=None
    ) -> bool:
        asked = requested_attention_implementation
        if config is not None:
            asked = config._attn_implementation
        if _is_ours(asked):
            return True
        return original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _loading(original: Callable, calls: tuple) -> Callable:
    def lazy_import(implementation=None, *args, **kwargs):
        return calls if _is_ours(implementation) else original(implementation, *args, **kwargs)

    return lazy_import


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: Any,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: Any,
    block_table: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The second entry of the old design: brings the cache up to date, then runs
    `attention` with the lengths and the pages of this layer's kind."""
    # Some layers pass their window, some keep it; the cache knows all of them, 1 = none.
    window = cache.sliding_windows[module.layer_idx]
    window = None if window == 1 else window
    if isinstance(cu_seq_lens_k, dict):
        kind = "full_attention" if window is None else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    pages = {}
    if block_table is None:
        key, value = (
            x.transpose(0, 1)[None]
            for x in cache.update(
                key_states=key,
                value_states=value,
                layer_idx=module.layer_idx,
                read_index=others["read_index"],
                write_index=others["write_index"],
            )
        )
    else:
        group, place = cache.layer_index_to_group_indices[module.layer_idx]
        shape = -1, cache.block_size, cache.num_key_value_heads, cache.head_dim
        pages = {
            "block_table": block_table[group],
            "k_cache": cache.key_cache[place].view(shape),
            "v_cache": cache.value_cache[place].view(shape),
        }
    asked = "s_aux", "softcap", "position_bias", "output_attentions", *REFUSED
    kept = {name: others[name] for name in asked if name in others}
    out, _ = attention(
        module,
        query,
        key,
        value,
        None,
        scaling=others.get("scaling", getattr(module, "scaling", None)),
        sliding_window=window,
        is_causal=True,
        cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k,
        max_length_q=max_seqlen_q,
        max_length_k=max_seqlen_k,
        **kept,
        **pages,
    )
    return out, None
