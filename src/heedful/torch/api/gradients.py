"""The gradients of a call from its results, without autograd: for autograd functions of the
user's."""

from collections.abc import Sequence

import torch
from torch import Tensor, are_deterministic_algorithms_enabled

from heedful.core.call.arguments import (
    NUMBERS,
    UNBOUNDED,
    WHOLE,
    Options,
    new_operands,
    new_options,
    one_sink,
)
from heedful.core.call.describe import check_packed
from heedful.core.call.operands import Gradients, Operands
from heedful.masks.block_mask import BlockMask, block_operands
from heedful.torch.api.attention import plain_lengths
from heedful.torch.base.dispatch import is_bare, needs_dispatcher
from heedful.torch.eager.calls import CALLS
from heedful.torch.operands.plain import plain_origin, plain_window
from heedful.torch.operands.values import is_readable
from heedful.torch.traced import library
from heedful.torch.traced.private import wants_gradients


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    q_offset: int | None = None,
    key_ranges: Tensor | None = None,
    block_mask: BlockMask | None = None,
    bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    dropout_origin: Sequence[int] | Tensor = WHOLE,
    bias_grad: bool = True,
    backend: str | None = None,
) -> Gradients:
    """The gradients of sum(out * dout) + sum(lse * dlse) with respect to the inputs of a call of
    `flash_attn_func`, or with cu_seqlens_q of `flash_attn_varlen_func`. Arguments that are not
    listed are that function's, and must be those of the call. k and v may be a part of the keys, as
    under context parallelism, with out and lse of all keys: the gradients are then those of that
    part; on GPUs those of rows with |lse| below 64 in float32, 1024 in 16 bits, alone. Autocast
    casts nothing here: pass the tensors in the dtypes that the kernels had.

    Args:
        dout: as out, any strides.
        q, k, v: the call's.
        out: what the call returned.
        lse: the log-sum-exp that it returned, float32.
        dlse: the gradient with respect to lse, float32, as lse; None means zero.
        cu_seqlens_q: if passed, sequences are packed; cu_seqlens_k, max_seqlen_q, max_seqlen_k and
            block_table come with it alone, leftpad_k without it.
        dropout_seed: the seed that the call had; required if dropout_p > 0.
        bias_grad: whether the gradient of a bias is computed; a bool bias has none.

    Returns:
        A named tuple (dq, dk, dv, dbias, dsink, drel_bias), each in the shape and dtype of its
        input; the last three are None where there is no such input, dbias also without bias_grad.

    Raises:
        TypeError, ValueError: naming the argument, before anything is launched.
    """
    if s_aux is not None or learnable_sink is not None:
        sink = one_sink(sink, s_aux, learnable_sink)
    dispatched = needs_dispatcher(q, k, v)
    if dispatched or window_size is not UNBOUNDED:
        window_size = plain_window(window_size)
    if dispatched or dropout_origin is not WHOLE:
        dropout_origin = plain_origin(dropout_origin)
    if deterministic is False and are_deterministic_algorithms_enabled():
        deterministic = True
    packed = cu_seqlens_q is not None
    check_packed(packed, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, leftpad_k)
    if packed:
        lengths = max_seqlen_q, max_seqlen_k
        if max_seqlen_q.__class__ is not int or max_seqlen_k.__class__ is not int:
            max_seqlen_q, max_seqlen_k = plain_lengths(lengths, q, k, bias, block_table)
    options = (Options if dispatched else new_options)(
        kind="varlen" if packed else "dense",
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=True,
        q_offset=q_offset,
        backend=backend,
        dropout_origin=dropout_origin,
    )
    x = (Operands if dispatched else new_operands)(
        q=q,
        k=k,
        v=v,
        bias=bias,
        rel_bias=rel_bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        block_table=block_table,
        key_ranges=key_ranges,
    )
    if block_mask is not None:
        longest = (max_seqlen_q, max_seqlen_k) if packed else None
        x = x._replace(**block_operands(block_mask, q, k, is_readable, longest=longest))
    saved = dout, dlse, out, lse
    if dispatched or wants_gradients((*x, *saved)):
        return library.differentiate(x, options, saved, dropout_seed, bias_grad)
    return eager(x, options, saved, dropout_seed, bias_grad)


def known_as(x: Operands, options: Options, saved: tuple, seed, bias_grad, laid_out=False) -> tuple:
    """Where `eager` keeps the last such call in `CALLS.latest`."""
    types = map(type, (*options[NUMBERS], *x, *saved, seed, bias_grad))
    return "backward", options, bias_grad, laid_out, *types


def eager(
    x: Operands, options: Options, saved: tuple, seed, bias_grad: bool, laid_out: bool = False
) -> Gradients:
    """The gradients of a call that no transform or tracer sees. saved: dout, dlse, out, lse.
    laid_out: as in Backwards."""
    dout, dlse, out, lse = saved
    last_key, call = None, None
    try:
        last_key = known_as(x, options, saved, seed, bias_grad, laid_out)
        # If tensors are like those of the last such call, no key is made.
        call = CALLS.latest.get(last_key)
    except TypeError:
        # As in `calls.attend`.
        last_key = None
    if call is not None and (dlse is None or _lies_as(dlse, lse)):
        operands = x if call.plain else call.seeded(x, seed)
        tensors = *call.backwards.pick(operands), out, lse, dout
        grads = call.backwards.like_latest(tensors, dlse, 2 if laid_out else int(dlse is not None))
        if grads is not None:
            return library.own_gradients(grads, x)
    return library.differentiate(x, options, saved, seed, bias_grad, last_key, laid_out)


def _lies_as(dlse: Tensor, lse: Tensor) -> bool:
    """Whether dlse is contiguous, with the shape and dtype of lse."""
    return (
        dlse.shape == lse.shape
        and dlse.dtype == torch.float32
        and dlse.device == lse.device
        and dlse.is_contiguous()
        and is_bare(dlse)
    )
