"""The checks of `checks` for a call over a cache."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from heedful.core.base.arrays import ArraySpec
from heedful.core.call import describe_cache
from heedful.core.call.arguments import AttentionCall, CacheUpdate, Options
from heedful.core.call.operands import Operands
from heedful.core.call.storage import may_share
from heedful.torch.base.arrays import abstract_spec
from heedful.torch.base.dispatch import has_shards, no_shards
from heedful.torch.operands.apart import cache_values
from heedful.torch.operands.checks import attention_call, check_tensor

_TENSORS = ("k", "v", "rotary_cos", "rotary_sin")


def cache_call(
    x: Operands,
    options: Options,
    update: CacheUpdate,
    out: Tensor | None,
    spec: Callable[[Tensor], ArraySpec] = abstract_spec,
) -> tuple[AttentionCall, CacheUpdate]:
    """A call over a cache for `core.call.describe_cache`, as `attention_call` makes it, and the
    update of ArraySpecs; its length is an int, a tensor or None."""
    if has_shards(cache_values(x, update, out)):
        raise no_shards("flash_attn_with_kvcache")
    call = attention_call(x, options, (False, False, False), out, spec=spec)
    specs: dict[str, Any] = {}
    for name, value in update._asdict().items():
        if isinstance(value, Tensor) or (value is not None and name in _TENSORS):
            check_tensor(name, value, x.q.device)
            specs[name] = spec(value)
    if update.shared_prefix is not None:
        describe_cache.check_prefix_pair(update.shared_prefix)
        for index, part in enumerate(update.shared_prefix):
            check_tensor(f"shared_prefix[{index}]", part, x.q.device)
        specs["shared_prefix"] = tuple(map(spec, update.shared_prefix))
    return call, update._replace(**specs)


def lies_in(v: Tensor, k: Tensor) -> bool:
    """Whether v is a view of the first columns of k, as a cache of latent vectors has it (MLA)."""
    if v.shape[-1] > k.shape[-1] or v.shape[:-1] != k.shape[:-1] or not v.numel():
        return False
    return v.stride() == k.stride() and v.dtype == k.dtype and v.data_ptr() == k.data_ptr()


def check_int_length(length: int, new: int, capacity: int) -> None:
    """As `core.call.describe_cache.check_int_length`, in code that may be traced."""
    if is_compiling() and not 0 <= length <= capacity - new:
        # Dynamo formats no symbolic ints.
        raise ValueError("cache_seqlens must lie within the cache, with room for the new tokens")
    describe_cache.check_int_length(length, new, capacity)


def check_rotated_length(length: int, last: int, update: CacheUpdate) -> None:
    """As `core.call.describe_cache.check_rotated_length`, in code that may be traced."""
    if is_compiling() and length > last:
        raise ValueError("rotary_cos must have a row for each of the queries' positions")
    describe_cache.check_rotated_length(length, last, update)


def check_apart(k_cache: Tensor, v_cache: Tensor) -> None:
    """ValueError where writing values would overwrite the keys that were just rotated."""
    between = v_cache.data_ptr() - k_cache.data_ptr()
    if may_share(abstract_spec(k_cache), abstract_spec(v_cache), between):
        raise ValueError(
            "rotary_cos must be None where v_cache shares the memory of k_cache (v would overwrite"
            " the rotated keys), got a tensor"
        )
