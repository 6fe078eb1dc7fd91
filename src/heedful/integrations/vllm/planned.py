"""The reasons of heedful's planner against calls that a layer of vLLM would make."""

from typing import Any

import torch

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.arguments import AttentionCall, new_operands, new_options
from heedful.core.call.describe import describe
from heedful.core.planning.plan import plan
from heedful.torch.base.arrays import dtype_name

# The dtypes of vLLM's names of cache dtypes; "auto" means the model's.
E4M3 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16, **E4M3}
_PAGES, _SEQUENCES, _QUERIES = 64, 4, 2


def why_not(
    head_size: int,
    head_size_v: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int | None,
    has_sink: bool,
    capability: Any,
    latent: bool,
) -> str | None:
    """Why a layer cannot run: what the call says of its arguments, or the planner of a device of
    this capability. None where it can. A device that the planner does not know is not planned for.

    latent: whether the values lie in the keys.
    """
    page = block_size or 16
    make, queries = ArraySpec.contiguous, dtype_name(dtype)
    stored = dtype_name(STORED.get(kv_cache_dtype or "auto", dtype))
    row = head_size if latent else head_size + head_size_v
    strides = page * row, row, page * row, 1
    keys, values = (
        ArraySpec((_PAGES, page, 1, d), strides, stored) for d in (head_size, head_size_v)
    )
    lengths = make((_SEQUENCES,), "int32")
    scale = None if stored == queries else make((), "float32")
    shape = (_SEQUENCES, _QUERIES) if latent else (_SEQUENCES * _QUERIES,)
    packed = {} if latent else {"cu_seqlens_q": make((_SEQUENCES + 1,), "int32")}
    x = new_operands(
        q=make((*shape, 8, head_size), queries),
        k=keys,
        v=values,
        sink=make((8,), "float32") if has_sink else None,
        seqused_k=lengths,
        block_table=make((_SEQUENCES, 8), "int32"),
        k_descale=scale,
        v_descale=scale,
        **packed,
    )
    lengths_of = {} if latent else {"max_seqlen_q": _QUERIES, "max_seqlen_k": 8 * page}
    options = new_options(kind="kvcache" if latent else "varlen", causal=True, **lengths_of)
    try:
        problem = describe(AttentionCall(x, options, v_in_k=latent))
        arch = _arch(capability)
        if arch is not None:
            plan(problem, by_name(arch))
    except (TypeError, ValueError) as error:
        return f"heedful, of {queries} queries and kv_cache_dtype {kv_cache_dtype!r}: {error}"
    return None


def _arch(capability: Any) -> str | None:
    """The architecture of an NVIDIA GPU that the planner has figures of, else None."""
    if capability is None or torch.version.hip is not None:
        return None
    arch = f"sm_{capability.major}{capability.minor}"
    try:
        return by_name(arch).arch
    except ValueError:
        return None
