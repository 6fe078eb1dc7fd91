"""Attention with the arguments and the layout of torch's FlexAttention."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from heedful.core.call.arguments import ROWS
from heedful.core.call.describe import check_rank
from heedful.masks.block_mask import BlockMask
from heedful.masks.of_masks import is_of_torch
from heedful.torch.api.attention import flash_attn_func
from heedful.torch.operands.checks import check_tensor


class AuxOutput(NamedTuple):
    """Results beside the output: lse and the largest scores, float32 (batch, heads_q, seqlen_q), or
    None."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention of masks that are data: nothing is traced or compiled.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim).
        key: (batch, heads_k, seqlen_k, head_dim), value: (batch, heads_k, seqlen_k, head_dim_v).
        score_mod: None: scores are changed by arguments of flash_attn_func.
        block_mask: None, a heedful.BlockMask, or a BlockMask of torch. That is converted in each
            call, which waits for the device; BlockMask.of converts it once.
        scale: by default 1 / sqrt(head_dim).
        enable_gqa: whether heads_k may be less than heads_q, which it divides.
        kernel_options: None, or {"BACKEND": name} with the name of a backend of heedful.
        return_aux: an AuxRequest of torch, which asks for lse, max_scores or both.

    Returns:
        out (batch, heads_q, seqlen_q, head_dim_v); with return_aux (out, AuxOutput).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if score_mod is not None:
        raise ValueError(
            "score_mod must be None, as no function runs within the kernels, got one: softcap,"
            " alibi_slopes, rel_bias and bias of flash_attn_func change scores, and a mask is a"
            " block_mask"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        check_rank(name, tensor.shape, "(batch, heads, seqlen, head_dim)")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa must be True where key has other heads than query's {query.shape[1]}, got"
            f" {key.shape[1]}"
        )
    options = dict(kernel_options or {})
    backend = options.pop("BACKEND", None)
    if options:
        raise ValueError(
            "kernel_options must have no other key than BACKEND, as the planner chooses tiles, got"
            f" {', '.join(map(repr, options))}"
        )
    if is_of_torch(block_mask):
        if is_compiling():
            raise ValueError(
                "block_mask must be a heedful.BlockMask where the call is traced, as torch's needs"
                " its mask_mod to be evaluated (BlockMask.of, before), got a BlockMask of torch"
            )
        block_mask = BlockMask.of(block_mask)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    arguments: Any = {"softmax_scale": scale, "block_mask": block_mask, "backend": backend}
    if return_aux is None:
        return flash_attn_func(q, k, v, **arguments).transpose(1, 2)
    if not hasattr(return_aux, "lse"):
        raise TypeError(f"return_aux must be an AuxRequest of torch or None, got {return_aux!r}")
    wants_lse, wants_max = bool(return_aux.lse), bool(getattr(return_aux, "max_scores", False))
    arguments |= {"return_lse": wants_lse, "return_max_logits": wants_max and ROWS}
    results = flash_attn_func(q, k, v, **arguments)
    out, *more = results if wants_lse or wants_max else (results,)
    lse = more.pop(0) if wants_lse else None
    return out.transpose(1, 2), AuxOutput(lse, *more)
