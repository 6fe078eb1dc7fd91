"""New keys and values into slots of a paged cache, as serving engines write them before attention:
a slot is page_size * page + row of the page.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heedful.core.base import settings
from heedful.core.base.arrays import ArraySpec
from heedful.core.call.describe import FLOATS, check_last_dim, check_shape, check_writable
from heedful.core.call.quant import QUANT_MAX
from heedful.launch.bind import portable_cache
from heedful.torch.base.arrays import array_spec, dtype_name
from heedful.torch.base.device import device_spec
from heedful.torch.base.forked import check_device, on_own_thread
from heedful.torch.eager.cache_update import append_kv, stored
from heedful.torch.eager.execute import Case, address_of
from heedful.torch.eager.keys import tensor_keys
from heedful.torch.eager.kinds import Kinds, of_tensor, with_sizes
from heedful.torch.operands.checks import check_dtype, check_tensor

# The functions that write on a GPU, by metadata of all tensors; and their cases, by what lengths
# leave of it.
APPENDS = settings.forgotten(Kinds())
SLOTS = settings.forgotten(Kinds())
# The names that a kind has for arrays whose heads and dims are fixed.
_ROWS = {"k_new": "k", "v_new": "v"}


def append_slots(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Writes the first of the tokens of k and v, as many as there are slots, into a paged cache, in
    place, by one launch. Nothing is read back.

    Args:
        k, v: (tokens, heads_k, dim), float16, bfloat16 or float32. Last dim contiguous.
        k_cache, v_cache: (pages, page_size, heads_k, dim), of the dtype of k and v, or int8 or a
            float8, in which they are quantised. Last dim contiguous.
        slots: int32 or int64 (n,), n at most the tokens: page_size * page + row of the page. Tokens
            of a negative slot, or of one that no page has, are dropped.
        k_descale, v_descale: float32 () or (heads_k,), by which values are divided for a quantised
            cache; None is 1.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    arguments = k, v, k_cache, v_cache, slots, k_descale, v_descale
    if isinstance(k, Tensor) and device_spec(k.device).vendor == "cpu":
        _check(*arguments)
        return on_own_thread(_plainly, *arguments)
    run = APPENDS.of(tensor_keys(arguments), partial(_on_device, *arguments))
    run([*map(address_of, [tensor for tensor in arguments if tensor is not None])])


def slot_writer(*first: Tensor) -> Callable[[int, int], None] | None:
    """A function of the addresses of k and v alone that is `append_slots` of such k and v into
    these caches and slots; compiles when it is made. None on a CPU. first: k, v, k_cache, v_cache,
    slots; k and v of each call lie as these do."""
    if device_spec(first[0].device).vendor == "cpu":
        return None
    run = _on_device(*first, None, None)
    caches = [*map(address_of, first[2:])]

    def write(k: int, v: int) -> None:
        run([k, v, *caches])

    return write


def _plainly(k, v, k_cache, v_cache, slots, k_descale, v_descale) -> None:
    """As `append_slots`, in plain torch: each token is a sequence, which has all pages."""
    tokens, pages = slots.shape[0], k_cache.shape[0]
    table = torch.arange(pages, device=k.device).expand(tokens, pages)
    new = [
        stored(cache, rows[:tokens, None], scale, None)[0]
        for cache, rows, scale in ((k_cache, k, k_descale), (v_cache, v, v_descale))
    ]
    append_kv(k_cache, v_cache, new[0], new[1], slots, None, table, True)


def _on_device(*arguments: Tensor | None) -> Any:
    """A function that writes tensors like these, from their addresses; compiles when it is made."""
    _check(*arguments)
    names = ("k_new", "v_new", "k", "v", "slots", "k_descale", "v_descale")
    tensors = {n: t for n, t in zip(names, arguments, strict=True) if t is not None}
    device = tensors["slots"].device
    check_device(device)
    described = [of_tensor(_ROWS.get(name, name), tensor) for name, tensor in tensors.items()]
    kinds, values = [kind for kind, _ in described], [n for _, sizes in described for n in sizes]

    def make(numbers) -> Case:
        rest = iter(numbers)
        specs = dict(zip(tensors, (with_sizes(kind, rest) for kind in kinds), strict=True))
        program = portable_cache.append_slots(_laid(specs))
        return Case(program, device_spec(device).arch, device, tensors, {})

    case, numbers = SLOTS.of((*tensors, *kinds, device)).find(values, make)
    return case.bind(numbers)


def _laid(specs: dict[str, ArraySpec]) -> dict[str, ArraySpec]:
    """The arrays as the kernel has them: one sequence of new tokens, and scales of its heads."""
    tokens, heads = specs["slots"].shape[0], specs["k"].shape[2]
    laid = dict(specs)
    for name in ("k_new", "v_new"):
        spec = specs[name]
        shape, strides = (1, tokens, *spec.shape[1:]), (0, *spec.strides)
        laid[name] = spec._replace(shape=shape, strides=strides)
    for name in ("k_descale", "v_descale"):
        spec = specs.get(name)
        if spec is not None:
            strides = (0, *(spec.strides or (0,)))
            laid[name] = spec._replace(shape=(1, heads), strides=strides)
    return laid


def _check(k, v, k_cache, v_cache, slots, k_descale, v_descale) -> None:
    """Raises TypeError or ValueError as `append_slots`."""
    check_tensor("k", k)
    check_dtype("k", k, *FLOATS)
    others = {"v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    scales = {"k_descale": k_descale, "v_descale": v_descale}
    others |= {name: scale for name, scale in scales.items() if scale is not None}
    for name, tensor in others.items():
        check_tensor(name, tensor, k.device, "k")
    dtype = dtype_name(k.dtype)
    check_dtype("v", v, dtype)
    check_dtype("slots", slots, "int32", "int64")
    check_dtype("k_cache", k_cache, dtype, *[each for each in QUANT_MAX if each != "int4"])
    check_dtype("v_cache", v_cache, dtype_name(k_cache.dtype))
    ranks = {"k": (k, 3), "v": (v, 3), "k_cache": (k_cache, 4), "v_cache": (v_cache, 4)}
    for name, (tensor, rank) in (ranks | {"slots": (slots, 1)}).items():
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have {rank} dims, got shape {tuple(tensor.shape)}")
        check_last_dim(name, array_spec(tensor))
    tokens, heads, dim = k.shape
    check_shape("v", v.shape[:2], (tokens, heads), "(tokens, heads_k, ...)")
    pages, size = k_cache.shape[:2]
    for name, cache, last in (("k_cache", k_cache, dim), ("v_cache", v_cache, v.shape[2])):
        check_shape(
            name, cache.shape, (pages, size, heads, last), "(pages, page_size, heads_k, dim)"
        )
        check_writable(name, array_spec(cache))
    if slots.shape[0] > tokens:
        raise ValueError(f"slots must be at most k's {tokens} tokens, got {slots.shape[0]}")
    for name, scale in scales.items():
        if scale is not None:
            check_dtype(name, scale, "float32")
            if scale.dim():
                check_shape(name, scale.shape, (heads,), "(heads_k,)")
