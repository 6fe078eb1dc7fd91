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
    Quads,
    new_operands,
    new_options,
    one_sink,
)
from heedful.core.call.describe import check_last_dim, check_packed, check_writable
from heedful.core.call.numerics import Documents, with_block_mask, with_documents, with_numerics
from heedful.core.call.operands import Gradients, Operands
from heedful.masks.block_mask import BlockMask, block_operands
from heedful.torch.api.attention import plain_lengths
from heedful.torch.base.arrays import array_spec
from heedful.torch.base.dispatch import is_bare, needs_dispatcher
from heedful.torch.eager.calls import CALLS
from heedful.torch.eager.written import write
from heedful.torch.operands.checks import check_tensor
from heedful.torch.operands.plain import offset_of_each, origin_of_each, plain_window
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
    q_offset: int | Tensor | None = None,
    key_ranges: Tensor | Documents | None = None,
    block_mask: BlockMask | None = None,
    bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    dropout_origin: Sequence[int] | Tensor | Quads = WHOLE,
    bias_grad: bool = True,
    rel_bias_grad: bool = True,
    backend: str | None = None,
    sm_margin: int | None = None,
    into: Sequence[Tensor] | None = None,
    accumulate: Sequence[Tensor] | None = None,
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
        rel_bias_grad: whether that of rel_bias is.
        into: tensors (dq, dk, dv) to write into: as q, k and v, of any strides with a contiguous
            last dim.
        accumulate: float32 tensors (dq, dk, dv), to which these gradients are added, once they are
            rounded to the dtypes of q, k and v. At most one of the two may be passed.

    Returns:
        A named tuple (dq, dk, dv, dbias, dsink, drel_bias), each in the shape and dtype of its
        input; the last three are None where there is no such input, dbias also without bias_grad,
        drel_bias without rel_bias_grad.
        The first three are those of `into` or `accumulate` where passed.

    Raises:
        TypeError, ValueError: naming the argument, before anything is launched.
    """
    if s_aux is not None or learnable_sink is not None:
        sink = one_sink(sink, s_aux, learnable_sink)
    dispatched = needs_dispatcher(q, k, v)
    if dispatched or window_size is not UNBOUNDED:
        window_size = plain_window(window_size)
    origins = None
    if dispatched or dropout_origin is not WHOLE:
        dropout_origin, origins = origin_of_each(dropout_origin)
    if sm_margin is not None:
        backend = with_numerics(backend, None, sm_margin)
    if key_ranges is not None:
        backend, key_ranges = with_documents(backend, key_ranges)
    if block_mask is not None:
        backend = with_block_mask(backend, block_mask)
    q_offsets = None
    if q_offset is not None:
        q_offset, q_offsets = offset_of_each(q_offset)
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
        q_offsets=q_offsets,
        origins=origins,
        block_table=block_table,
        key_ranges=key_ranges,
    )
    if block_mask is not None:
        longest = (max_seqlen_q, max_seqlen_k) if packed else None
        x = x._replace(**block_operands(block_mask, q, k, is_readable, longest=longest))
    saved = dout, dlse, out, lse
    is_asked = into is not None or accumulate is not None
    places = _check_places(x, into, accumulate) if is_asked else None
    asked = bias_grad, rel_bias_grad
    if dispatched or wants_gradients((*x, *saved)):
        grads = library.differentiate(x, options, saved, dropout_seed, asked)
    elif into is not None:
        return _into(x, options, saved, dropout_seed, asked, tuple(into))
    else:
        grads = eager(x, options, saved, dropout_seed, asked)
    return grads if places is None else _put(grads, places, accumulate is not None)


def _check_places(x: Operands, into, accumulate) -> tuple[Tensor, ...]:
    """The caller's tensors for gradients. Raises TypeError or ValueError naming the argument."""
    if into is not None and accumulate is not None:
        raise ValueError("into must be None where accumulate is passed, got both")
    name, places = ("into", into) if into is not None else ("accumulate", accumulate)
    if not isinstance(places, (tuple, list)) or len(places) != 3:
        raise TypeError(f"{name} must be (dq, dk, dv), got {type(places).__name__}")
    for number, (place, operand) in enumerate(zip(places, x[:3], strict=True)):
        of = f"{name}[{number}]"
        check_tensor(of, place, x.q.device)
        wanted = torch.float32 if into is None else operand.dtype
        if place.dtype != wanted:
            raise TypeError(f"{of} must be {wanted}, got {place.dtype}")
        if place.shape != operand.shape:
            raise ValueError(f"{of} must be {tuple(operand.shape)}, got {tuple(place.shape)}")
        check_last_dim(of, array_spec(place))
        check_writable(of, array_spec(place))
        if place.requires_grad:
            raise ValueError(f"{of} must not require a gradient: it is written in place")
    return tuple(places)


def _put(grads: Gradients, places: tuple[Tensor, ...], adds: bool) -> Gradients:
    for place, grad in zip(places, grads, strict=False):
        place.add_(grad) if adds else place.copy_(grad)
    return grads._replace(dq=places[0], dk=places[1], dv=places[2])


def _into(x: Operands, options: Options, saved, seed, asked: tuple, places: tuple) -> Gradients:
    """`eager` that writes dq, dk and dv into these tensors."""
    dout, dlse, out, lse = saved
    # Parts of a step differ in shapes alone.
    shapes = x.q.shape, x.k.shape
    last_key = "into", shapes, known_as(x, options, saved, seed, asked)
    call = CALLS.latest.get(last_key)
    if call is not None and (dlse is None or _lies_as(dlse, lse)):
        kept = *call.backwards.pick(x if call.plain else call.seeded(x, seed)), out, lse
        grads = write(call.backwards, kept, dout, dlse, places, is_like=True)
        if grads is not None:
            return library.own_gradients(grads, x)
    grads = library.differentiate(x, options, saved, seed, asked, last_key, places=places)
    return grads if grads.dq is places[0] else _put(grads, places, False)


def known_as(
    x: Operands, options: Options, saved: tuple, seed, asked: tuple, laid_out=False
) -> tuple:
    """Where `eager` keeps the last such call in `CALLS.latest`."""
    types = map(type, (*options[NUMBERS], *x, *saved, seed, *asked))
    return "backward", options, asked, laid_out, *types


def eager(
    x: Operands, options: Options, saved: tuple, seed, asked: tuple, laid_out: bool = False
) -> Gradients:
    """The gradients of a call that no transform or tracer sees. saved: dout, dlse, out, lse.
    asked: bias_grad and rel_bias_grad. laid_out: as in Backwards."""
    dout, dlse, out, lse = saved
    last_key, call = None, None
    try:
        last_key = known_as(x, options, saved, seed, asked, laid_out)
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
    return library.differentiate(x, options, saved, seed, asked, last_key, laid_out)


def _lies_as(dlse: Tensor, lse: Tensor) -> bool:
    """Whether dlse is contiguous, with the shape and dtype of lse."""
    return (
        dlse.shape == lse.shape
        and dlse.dtype == torch.float32
        and dlse.device == lse.device
        and dlse.is_contiguous()
        and is_bare(dlse)
    )
