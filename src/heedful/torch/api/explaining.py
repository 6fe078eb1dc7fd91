"""The plan of a call, in words, without running it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.numbers import truth
from heedful.core.call.arguments import AttentionCall, CacheUpdate, Options, bind
from heedful.core.call.describe import FLOATS, describe
from heedful.core.call.describe_cache import (
    attention_part,
    check_cache,
    check_int_length,
    check_rotated_length,
    last_rotated_length,
)
from heedful.core.call.operands import Operands
from heedful.core.call.storage import copies
from heedful.core.planning import plan
from heedful.launch.program.programs import as_run
from heedful.masks.block_mask import block_operands
from heedful.torch.api.attention import flash_attn_func, flash_attn_varlen_func, plain_lengths
from heedful.torch.api.kvcache import flash_attn_with_kvcache
from heedful.torch.api.packed import STANDS_FOR, in_own_words, unpacked_arguments
from heedful.torch.base.arrays import abstract_spec, array_spec, dtype_name
from heedful.torch.base.dispatch import OWN, has_shards, needs_dispatcher, no_shards
from heedful.torch.eager.backends import planned
from heedful.torch.operands.cache_checks import cache_call, lies_in
from heedful.torch.operands.checks import attention_call, check_tensors, gradients_wanted
from heedful.torch.operands.plain import plain_options, plain_seed, plain_update
from heedful.torch.operands.values import check_values, is_readable

_KINDS = {
    flash_attn_func: "dense",
    flash_attn_varlen_func: "varlen",
    flash_attn_with_kvcache: "kvcache",
}


def explain(function: Callable, *args, values: bool = False, **kwargs) -> str:
    """The kernels that would run `function(*args, **kwargs)`, and the reasons against others;
    nothing is launched or written.

    Args:
        function: one of heedful's attention functions. Its tensors may be fake: those without an
            address are taken to be aligned.
        values: whether to read lengths, key_ranges and block_mask, which waits for the device: how
            many tiles of the forward are seen whole, in part and not at all, and which TFLOP/s of
            seen pairs follow at most. A bias of bool is not read; nor are caches.

    Returns:
        The chosen kernels, their tiles, notes and every rejected kernel with its reasons, as text.

    Raises:
        TypeError, ValueError: as the call itself would.
    """
    values = truth("values", values)
    if function in STANDS_FOR:
        by_name = _by_name(function, args, kwargs)
        try:
            unpacked = unpacked_arguments(by_name)
            return explain(STANDS_FOR[function], values=values, **unpacked)
        except (TypeError, ValueError) as error:
            in_own_words(error, "qkv" if "qkv" in by_name else "kv")
            raise
    if function not in _KINDS:
        raise TypeError(f"function must be an attention function of heedful, got {function!r}")
    by_name = _by_name(function, args, kwargs)
    if has_shards(by_name.values()):
        raise no_shards("explain")
    kind = _KINDS[function]
    described, update = _cache_call(by_name) if kind == "kvcache" else (_call(kind, by_name), None)
    x, backend = described.x, described.options.backend
    chosen = as_run(planned(describe(described), x.q.device, backend, copies(x, kind)))
    words = plan.explain(chosen, None if update is None else _appended(chosen, update))
    return words if not values else "\n".join([words, *_words_of_mask(kind, by_name, chosen)])


def _words_of_mask(kind: str, arguments: dict[str, Any], chosen: plan.Plan) -> list[str]:
    """How many tiles the queries of a call see. Raises ValueError for a cache, for tensors without
    values, and for values that point outside of what there is."""
    from heedful.masks.seen import ARRAYS, seen_tiles

    if kind == "kvcache":
        raise ValueError("values must be False for flash_attn_with_kvcache, got True")
    tensors = _bound(kind, arguments)[0]
    read: dict[str, Any] = {}
    for name in ARRAYS:
        tensor = getattr(tensors, name)
        if tensor is not None and not is_readable(tensor):
            raise ValueError(f"values must be False where {name} has no values to read, got True")
        read[name] = None if tensor is None else tensor.detach().cpu().numpy()
    config, problem = chosen.forward_config, chosen.problem
    # No page is read.
    check_values(tensors._replace(block_table=None), problem, kind)
    side = problem.block_mask or 128
    tile = (side, side) if config is None else (config.block_m, config.block_n)
    seen = seen_tiles(problem, Operands(None, None, None, **read), tile)
    return plan.words_of_seen(chosen, tile, *seen)


def _appended(chosen: plan.Plan, update: CacheUpdate) -> str | None:
    """Why a launch before attention writes the new keys into the cache, or that none does; None
    without new keys. update: its arrays are ArraySpecs."""
    if update.k is None:
        return None
    leaves_q = update.shared_prefix is not None and update.rotary_cos is not None
    return chosen.appends_ahead(0 not in update.k.shape, leaves_q)


def _by_name(function: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call by name, defaults too. TypeError for those it does not take."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    keywords = bound.arguments.pop("keywords", {})
    return {**bound.arguments, **keywords}


def _bound(kind: str, arguments: dict[str, Any]) -> tuple[Operands, Options]:
    """The tensors of a dense or packed call as they came, and its options with plain lengths."""
    x, options, _ = bind(kind, arguments)
    longest = None
    if kind == "varlen":
        lengths = options.max_seqlen_q, options.max_seqlen_k
        longest = plain_lengths(lengths, x.q, x.k, x.bias, x.block_table)
        options = options._replace(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    mask = arguments.get("block_mask")
    return x._replace(**block_operands(mask, x.q, x.k, is_readable, longest=longest)), options


def _call(kind: str, arguments: dict[str, Any]) -> AttentionCall:
    x, options = _bound(kind, arguments)
    check_tensors(x, options)
    options, seed = plain_options(options), plain_seed(arguments["dropout_seed"], x.q.device)
    grad = gradients_wanted(x)
    described = attention_call(x, options, grad, arguments["out"], seed, _spec)
    cast = _autocast_dtype(x.q)
    if cast is None:
        return described
    x = described.x
    q, k, v, bias = (spec and _cast(spec, cast) for spec in (x.q, x.k, x.v, x.bias))
    return described._replace(x=x._replace(q=q, k=k, v=v, bias=bias))


def _cache_call(arguments: dict[str, Any]) -> tuple[AttentionCall, CacheUpdate]:
    """The attention over the extended cache, and the update as ArraySpecs."""
    x, options, update = bind("kvcache", arguments)
    mask = arguments["block_mask"]
    x = x._replace(**block_operands(mask, x.q, x.k, is_readable, block_table=x.block_table))
    check_tensors(x, options)
    options, update = plain_options(options), plain_update(update, x.q)
    call, specs = cache_call(x, options, update, arguments["out"], _spec)
    cast = _autocast_dtype(x.q)
    if cast is not None:
        call, specs = _cast_cache(call, specs, cast)
    problem = check_cache(call, specs)
    if type(specs.cache_seqlens) is int:
        new = 0 if specs.k is None else specs.k.shape[1]
        check_int_length(specs.cache_seqlens, new, problem.seqlen_k)
        last = last_rotated_length(specs, problem.seqlen_q, problem.mask.bounded)
        if last is not None:
            check_rotated_length(specs.cache_seqlens, last, specs)
    x, options = attention_part(call.x, options, specs)
    if specs.cache_seqlens is not None:
        dtype = getattr(specs.cache_seqlens, "dtype", "int32")
        x = x._replace(seqused_k=ArraySpec.contiguous((problem.batch,), dtype, x.q.device))
    if specs.rotary_cos is not None:
        # Attention gets the rotated q, which is dense.
        x = x._replace(q=ArraySpec.contiguous(x.q.shape, x.q.dtype, x.q.device))
    out = call.out if specs.shared_prefix is None else None
    lies_in_keys = _lies_in(arguments["v_cache"], arguments["k_cache"])
    return AttentionCall(x, options, out=out, v_in_k=lies_in_keys), specs


def _spec(tensor: Tensor) -> ArraySpec:
    """The facts about a tensor that may be fake, or wrapped by a transform."""
    try:
        return (array_spec if type(tensor) in OWN else abstract_spec)(tensor)
    except RuntimeError:
        return abstract_spec(tensor)


def _lies_in(v: Tensor, k: Tensor) -> bool:
    """As `lies_in`; False for tensors without an address and in traced calls."""
    return not needs_dispatcher(v, k, k) and lies_in(v, k)


def _autocast_dtype(q: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts floats, None where it is off."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(spec: ArraySpec, dtype: torch.dtype) -> ArraySpec:
    """The array in another dtype, if it holds floats."""
    if spec.dtype not in FLOATS or spec.dtype == dtype_name(dtype):
        return spec
    before = getattr(torch, spec.dtype)
    fake = torch.empty_strided(spec.shape, spec.strides, dtype=before, device="meta")
    return abstract_spec(fake.to(dtype))._replace(device=spec.device)


def _cast_cache(
    call: AttentionCall, update: CacheUpdate, dtype: torch.dtype
) -> tuple[AttentionCall, CacheUpdate]:
    """As `kvcache._autocast`: the cache stays as it is."""
    if call.x.k.dtype in FLOATS:
        dtype = getattr(torch, call.x.k.dtype)
        k, v = (spec and _cast(spec, dtype) for spec in (update.k, update.v))
        update = update._replace(k=k, v=v)
    return call._replace(x=call.x._replace(q=_cast(call.x.q, dtype))), update
