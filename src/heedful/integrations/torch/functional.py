"""Replaces `F.scaled_dot_product_attention` by heedful within a `with` block. Torch's causal mask
is aligned top left and ours bottom right; this module converts it. Heads that broadcast are shared,
not expanded, where that is possible.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, are_deterministic_algorithms_enabled, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from heedful.core.base.forks import new_lock
from heedful.core.call.arguments import new_options
from heedful.core.call.problem import MAX_HEAD_DIM_V
from heedful.integrations.torch import ways
from heedful.integrations.torch.alignment import from_top_left
from heedful.integrations.torch.report import Report
from heedful.torch.api.attention import flash_attn_func
from heedful.torch.base.dispatch import has_shards
from heedful.torch.eager.calls import CALLS
from heedful.torch.eager.heads_first import is_ordinary
from heedful.torch.traced.private import constant_when_traced

NAME = "scaled_dot_product_attention"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The open reports, in a list that is replaced but never changed; torch's function; and the lock for
# changes of both.
_open: list[Report] = []
_torchs: Any = F.scaled_dot_product_attention
_lock = new_lock()


@contextmanager
def sdpa() -> Iterator[Report]:
    """A `with` block in which heedful runs `torch.nn.functional.scaled_dot_product_attention`. It
    holds for all threads, since autograd's threads may compute checkpoints again. Torch runs calls
    that heedful does not take. Open it before torch.compile traces the code. Blocks may nest.

    Yields:
        A Report that says how many calls ran on heedful, and why others did not.
    """
    global _open, _torchs
    report = Report()
    with _lock:
        # Ours may be there without an open block, if code saved it in a block and restored it
        # later.
        if F.scaled_dot_product_attention is not scaled_dot_product_attention and not _open:
            _torchs = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = scaled_dot_product_attention
        _open = [*_open, report]
    try:
        yield report
    finally:
        with _lock:
            # By identity: reports do not compare by value.
            _open = [other for other in _open if other is not report]
            if not _open and F.scaled_dot_product_attention is scaled_dot_product_attention:
                F.scaled_dot_product_attention = _torchs


class Call(NamedTuple):
    """Operands of `flash_attn_func`: heads after rows. window: None for no bound."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    causal: bool
    window: tuple[int, int] | None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch.nn.functional.scaled_dot_product_attention, by heedful where it can.

    A query that sees no key gives 0. The dropout mask is heedful's, drawn from torch's generator.
    Gradients cannot be differentiated again.
    """
    way_key = None
    if attn_mask is None and not dropout_p and not is_compiling():
        way_key, out = _known(query, key, value, (is_causal, scale, enable_gqa))
        if out is not None:
            return out
    call = translated(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if call.__class__ is not str and _open:
        q, k, v, bias, causal, window = call
        try:
            # The default window costs no check.
            if window is None:
                out = flash_attn_func(q, k, v, dropout_p, scale, causal, bias=bias)
            else:
                out = flash_attn_func(q, k, v, dropout_p, scale, causal, window, bias=bias)
        except ValueError as error:
            # Nothing was written. There is no kernel for it, or torch will say what is wrong.
            call = f"heedful refuses it: {error}"
        else:
            _note(None)
            # Results of a known call have four dims.
            if way_key is not None and not out.requires_grad and query.dim() == 4:
                options = new_options(
                    kind="dense",
                    dropout_p=dropout_p,
                    softmax_scale=scale,
                    causal=causal,
                    window_size=window or (-1, -1),
                    deterministic=are_deterministic_algorithms_enabled(),
                )
                ways.keep_forward(way_key, (query, key, value), (q, k, v), options, None)
            out = out.transpose(1, 2)
            return out if query.dim() == 4 else _ranked(out, query, key, value)
    _note(call)
    return _torchs(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _known(query: Any, key: Any, value: Any, facts: tuple) -> tuple[Any, Tensor | None]:
    """How a call without a mask is known, and its output if it came before: None for either. facts:
    all of it but tensors."""
    if not _open or not is_ordinary(query, key, value):
        return None, None
    try:
        records, deterministic = is_grad_enabled(), are_deterministic_algorithms_enabled()
        way_key = ("sdpa", facts, records, deterministic, query.shape, key.shape)
        way = CALLS.young.get(way_key)
        addresses = way and way.likeness.addresses((query, key, value))
    except (TypeError, RuntimeError):
        # An argument that cannot be hashed, or a tensor without plain memory.
        return None, None
    if way is None or addresses is None:
        return way_key, None
    out = way.run_on(addresses)[0]
    _note_now(None)
    return way_key, out


def translated(q, k, v, mask: Any, dropout_p, is_causal, enable_gqa) -> Any:
    """The Call for torch's arguments, or the reason why there is none."""
    if not 0 <= dropout_p <= 1:
        return "dropout_p is no probability"
    if mask is None and _are_usual(q, k, v, enable_gqa):
        # The same checks as below, in a third of the time.
        return _aligned(q, k, v, None, is_causal)
    reason = _refusal(q, k, v, mask, is_causal)
    if reason is not None:
        return reason
    causal, bottom_right = is_causal, False
    if mask is not None and _is_causal_bias(mask):
        causal, bottom_right = True, mask.variant.name == "LOWER_RIGHT"
        if (mask.seq_len_q, mask.seq_len_kv) != (q.shape[-2], k.shape[-2]):
            return "attn_mask is a CausalBias of other lengths"
        mask = None
    operands = _four_dims(q, k, v, enable_gqa)
    if operands.__class__ is str:
        return operands
    q4, k4, v4, lead = operands
    bias = None
    if mask is not None:
        if not _fits(mask.shape, (*lead, q.shape[-2], k.shape[-2])):
            return "attn_mask does not broadcast to the scores"
        bias = _bias(mask, lead)
    return _aligned(q4, k4, v4, bias, causal, bottom_right)


def _are_usual(q: Any, k: Any, v: Any, enable_gqa: bool) -> bool:
    """Whether these are plain tensors of four dims that heedful takes unchanged."""
    if not (q.__class__ is k.__class__ is v.__class__ is Tensor):
        return False
    if q.is_nested or k.is_nested or v.is_nested:
        return False
    of_q, of_k, device, dtype = q.shape, k.shape, q.device, q.dtype
    if len(of_q) != 4 or of_k != v.shape or of_q[0] != of_k[0] or of_q[3] != of_k[3]:
        return False
    if of_q[1] != of_k[1] and not (enable_gqa and of_k[1] and of_q[1] % of_k[1] == 0):
        return False
    return (
        0 < of_q[3] <= MAX_HEAD_DIM_V
        and dtype in _DTYPES
        and dtype == k.dtype == v.dtype
        and (q.is_cuda or q.is_cpu)
        and device == k.device == v.device
        and (is_compiling() or forward_ad._current_level < 0)
    )


def _aligned(q, k, v, bias, causal: bool, bottom_right: bool = False) -> Call:
    """The Call of operands (batch, heads, rows, dim). bottom_right: whether a causal mask is
    aligned bottom right; else it is top left."""
    window = None
    if not bottom_right:
        k, v, causal, window = from_top_left(q, k, v, causal)
    return Call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, causal, window)


def _is_causal_bias(mask: Any) -> bool:
    """Whether it is torch's CausalBias, without an import of its module, which would load
    Dynamo."""
    of = type(mask)
    return of.__name__ == "CausalBias" and of.__module__ == "torch.nn.attention.bias"


def _refusal(q, k, v, mask, is_causal) -> str | None:
    """Why torch runs a call, whatever its shapes; None if it need not."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return "query, key or value is no tensor"
    if q.is_nested or k.is_nested or v.is_nested:
        return "query, key or value is nested"
    tensors = (q, k, v) if mask is None or _is_causal_bias(mask) else (q, k, v, mask)
    if has_torch_function(tensors) or has_shards(tensors):
        return "a tensor is of a subclass that sees the call"
    if mask is not None and is_causal:
        return "is_causal with attn_mask"
    device, dtype = q.device, q.dtype
    if device.type not in ("cpu", "cuda"):
        return f"device {device.type}"
    if not all([t.device == device for t in tensors[1:]]):
        return "tensors are on several devices"
    wanted = _DTYPES if torch.is_autocast_enabled(device.type) else (dtype,)
    if dtype not in _DTYPES or k.dtype not in wanted or v.dtype not in wanted:
        return f"dtypes {dtype}, {k.dtype}, {v.dtype}"
    if tensors[-1].dtype not in (torch.bool, *_DTYPES):
        return f"attn_mask is {tensors[-1].dtype}"
    if not is_compiling() and forward_ad._current_level >= 0:
        return "forward-mode derivatives"
    return None


def _four_dims(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> Any:
    """(q, k, v, lead): q, k and v as (batch, heads, rows, dim), and the batch dims and heads of the
    scores. Heads of k and v that broadcast stay shared. Or the reason why not: torch has no such
    call, or heads cannot be shared."""
    rank = q.dim()
    if not rank == k.dim() == v.dim():
        return "ranks differ"
    if rank < 2:
        return "rank below 2"
    dim, dim_v = q.shape[-1], v.shape[-1]
    if k.shape[-1] != dim or v.shape[-2] != k.shape[-2]:
        return "shapes that do not match"
    if not (0 < dim <= MAX_HEAD_DIM_V and 0 < dim_v <= MAX_HEAD_DIM_V):
        return f"head dims {dim} and {dim_v}: heedful has 1 to {MAX_HEAD_DIM_V}"
    if rank < 4:
        q, k, v = (t[(None,) * (4 - rank)] for t in (q, k, v))
    heads, shared, heads_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if enable_gqa and rank > 2 and (heads != shared or heads != heads_v):
        if shared != heads_v or shared == 0 or heads % shared:
            return "enable_gqa with heads that heedful does not share so"
    elif not heads == shared == heads_v:
        full = max(heads, shared, heads_v)
        if not {heads, shared, heads_v} <= {1, full}:
            return "shapes that do not match"
        if heads != full:
            q = q.expand(*q.shape[:-3], full, -1, -1)
        if shared != heads_v:
            k, v = (t.expand(*t.shape[:-3], full, -1, -1) for t in (k, v))
        heads = full
    batch, batch_k, batch_v = q.shape[:-3], k.shape[:-3], v.shape[:-3]
    if not batch == batch_k == batch_v:
        if not all([_are_broadcast(sizes) for sizes in zip(batch, batch_k, batch_v, strict=True)]):
            return "shapes that do not match"
        batch = torch.broadcast_shapes(batch, batch_k, batch_v)
        q, k, v = (t.expand(*batch, -1, -1, -1) for t in (q, k, v))
    if rank > 4:
        q, k, v = (t.flatten(0, -4) for t in (q, k, v))
    return q, k, v, (*batch, heads)


def _are_broadcast(sizes: tuple[int, ...]) -> bool:
    return set(sizes) <= {1, max(sizes)} or 0 in sizes and set(sizes) <= {0, 1}


def _fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a shape broadcasts to `full` without enlarging it."""
    if len(shape) > len(full):
        return False
    pairs = zip(reversed(shape), reversed(full), strict=False)
    return all([n in (1, whole) for n, whole in pairs])


def _bias(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """A mask that broadcasts to (*lead, rows, keys), in four dims at most."""
    if mask.dim() <= 3 or len(lead) == 2:
        return mask
    if any([n != 1 for n in mask.shape[:-3]]):
        mask = mask.expand(*lead[:-1], -1, -1, -1)
    return mask.flatten(0, -4)


def _ranked(out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output (batch, heads, rows, dim) with the call's number of dims."""
    if query.dim() < 4:
        return out[(0,) * (4 - query.dim())]
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    return out.unflatten(0, lead)


def _note(reason: str | None) -> None:
    if is_compiling():
        _note_traced(reason)
    else:
        _note_now(reason)


def _note_now(reason: str | None) -> None:
    for report in _open:
        report.count(NAME) if reason is None else report.decline(reason)


@constant_when_traced
def _note_traced(reason: str | None) -> bool:
    # Dynamo calls it while it traces; the graph does not contain it.
    _note_now(reason)
    return True
