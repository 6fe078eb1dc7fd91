"""Attention of a batch whose tokens are spread over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from heedful.core.base.numbers import truth
from heedful.core.call.numerics import is_invariant, with_numerics
from heedful.core.call.spread import Mask
from heedful.core.registry.tiles import PART_KEYS
from heedful.distributed import gather, heads, ring, traced
from heedful.distributed.calls import Again, key_of
from heedful.distributed.plan import DTYPES, ContextPlan, mask_of
from heedful.torch.base.dispatch import has_shards
from heedful.torch.base.once import once
from heedful.torch.operands.adapt import autocast
from heedful.torch.operands.checks import check_tensor

_REFUSED = {
    "bias": "its rows and columns lie on several ranks",
    "block_mask": "its tiles lie on several ranks; key_ranges are taken",
    "q_descale": "fp8 is not split over ranks",
    "k_descale": "fp8 is not split over ranks",
    "v_descale": "fp8 is not split over ranks",
    "dropout_origin": "the plan knows where each piece of the batch lies",
    "num_splits": "the plan cuts the keys",
    "out": "ranks keep what they return",
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    sink: Tensor | None = None,
    key_ranges: Tensor | None = None,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    numerics: str | None = None,
    backend: str | None = None,
    sm_margin: int | None = None,
    **refused: Any,
) -> Any:
    """`flash_attn_varlen_func` over the plan's whole batch, for the queries of this rank.

    A collective: every rank of the plan's group calls it, in the same order, with the same options.
    Nothing compares them, and the host waits for nothing. Differentiable, once.

    Args:
        q: (plan.tokens, heads_q, head_dim): float16, bfloat16 or float32. Or (batch, seqlen,
            heads_q, head_dim) where the documents have equal lengths, a row of the batch each. Or a
            DTensor, as k and v then are, sharded along its rows over the plan's ranks: its parts
            are those of `plan.shard`, in the plan's order. Autocast casts q, k and v.
        k: (plan.tokens, heads_k, head_dim), like q.
        v: (plan.tokens, heads_k, head_dim_v), like q.
        plan: of `heedful.distributed.plan`.
        dropout_p, softmax_scale, causal, softcap, deterministic, backend, sm_margin: as
            `flash_attn_func` has them, of documents as a whole.
        window_size: (left, right) or (left, right, first). Under strategy "gather" first keys come
            without dropout.
        alibi_slopes: float32 (heads_q,). With first keys under strategy "heads" alone.
        key_ranges: int32 (plan.tokens, 2 or 4), of this rank's rows: a query sees keys [a, b) of
            its document, or those of two ranges, among those that the other masks show. Positions
            are those of the whole document. With first keys under strategy "heads" alone.
        sink: float (heads_q,). Its gradient on a rank comes from that rank's queries or heads; the
            sum over ranks is the whole gradient, as for any other weight.
        dropout_seed: needed where dropout_p > 0, the same on every rank: the mask is the one that
            the whole batch would have.
        return_lse: also return the log-sum-exp of the scores.
        numerics: "invariant" gives out and lse the bits that `flash_attn_varlen_func` gives the
            whole batch by it; not where parts are merged ("ring", "heads x ring").

    Returns:
        out, as q with head_dim_v, a DTensor where q is one. With return_lse: (out, lse), where lse
        is float32 (heads_q, plan.tokens), or (batch, heads_q, seqlen).

    Raises:
        TypeError, ValueError: naming the argument, before anything is sent. Other ranks then wait
        until the group's time-out.
    """
    # A step that ranks begin together waits for what the host does before.
    more = softmax_scale, causal, softcap, deterministic, return_lse
    known, key = None, None
    if plan.__class__ is ContextPlan and plan.peers is not None and not (dropout_p or refused):
        is_plain = sink is alibi_slopes is key_ranges is dropout_seed is None
        if is_plain and window_size.__class__ is tuple:
            key = key_of(q, k, v, (*more, *window_size, numerics, backend, sm_margin))
            known = None if key is None else plan.recent.get(key)
    if known is not None:
        return _again(q, k, v, plan, known, return_lse)
    backend = with_numerics(backend, numerics, sm_margin)
    for name, value in refused.items():
        if name not in _REFUSED:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ValueError(f"{name} is not taken under context parallelism: {_REFUSED[name]}")
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
    truth("return_lse", return_lse)
    if has_shards((q, k, v)):
        more = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        named = {"sink": sink, "key_ranges": key_ranges, "dropout_seed": dropout_seed}
        named["backend"] = backend
        return _sharded({"q": q, "k": k, "v": v}, plan, return_lse, more, named)
    q, k, v = _cast(q, k, v)
    if is_compiling():
        told = (dropout_p, softmax_scale, causal, tuple(window_size), softcap, deterministic)
        seed = dropout_seed if dropout_p else None
        tensors = q, k, v, sink, alibi_slopes, key_ranges
        both = traced.attend(*tensors, plan, (*told, seed, backend))
        return both if return_lse else both[0]
    batch = q.shape[0] if q.ndim == 4 else None
    if batch is not None:
        _check_batch(q, k, v, plan)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    mask = mask_of(causal, window_size)
    mask = _check(q, k, v, plan, mask, dropout_p, dropout_seed, alibi_slopes, sink, backend)
    if key_ranges is not None:
        _check_ranges(key_ranges, q, plan, mask)
    options = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "key_ranges": key_ranges,
        "deterministic": deterministic,
        "dropout_seed": dropout_seed if dropout_p else None,
        "backend": backend,
    }
    options["return_lse"], options["key"] = return_lse, key
    records = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, sink)
    )
    if records:
        out, lse = _Attention.apply(q, k, v, sink, plan, mask, options)
    else:
        out, lse, *_ = _forward(q, k, v, sink, plan, mask, options)
    if batch is not None:
        out = out.unflatten(0, (batch, -1))
        lse = None if lse is None else lse.unflatten(1, (batch, -1)).movedim(1, 0)
    return (out, lse) if return_lse else out


def _again(q, k, v, plan: ContextPlan, known: "_Known", return_lse: bool) -> Any:
    """`attention` by a step that is known."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = _Attention.apply(q, k, v, None, plan, known.mask, known)
    else:
        out, lse, *_ = known.forward(q, k, v, return_lse)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Known:
    """A forward of "gather" that comes again. arguments: after tensors; wants_lse: of all rows."""

    run: Again
    mask: Mask
    arguments: tuple[Any, ...]
    wants_lse: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keeps: bool) -> Any:
        """As `_forward`. keeps: whether log-sum-exps are wanted by anybody."""
        out, lses = self.run(q, k, v, keeps)
        lse = gather.put_together(lses, self.arguments[1], q) if self.wants_lse else None
        return out, lse, (q, k, v, out, *lses), gather, self.arguments


# How many steps a plan knows: those of layers that differ.
_MOST_KNOWN = 32


def _sharded(rows, plan: ContextPlan, return_lse: bool, more: tuple, named: dict[str, Any]) -> Any:
    """`attention` of DTensors: of each rank's part, as DTensors."""
    from heedful.distributed.shards import local_rows

    (q, k, v), made = local_rows(rows, plan)
    out, lse = attention(q, k, v, plan, *more, **named, return_lse=True)
    out = made(out, out.ndim - 3)
    return (out, made(lse, lse.ndim - 1)) if return_lse else out


def _cast(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype where it is on. Raises TypeError for what is no tensor."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    return autocast((q, k, v), device)


def _check_batch(q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan) -> None:
    if len(set(plan.layout.lengths)) > 1 or q.shape[0] != len(plan.layout.lengths):
        raise ValueError(
            f"q must be (plan.tokens, heads_q, head_dim), got {tuple(q.shape)}: a batch of 4 dims"
            f" takes a plan of as many documents of equal length, got {len(plan.layout.lengths)}"
        )
    shard = plan.layout.shards[plan.rank]
    held = [sum(len(p) for p in shard if p.document == d) for d in range(q.shape[0])]
    if len(set(held)) > 1:
        raise ValueError(f"q must be packed: this rank holds {held} tokens of the documents")
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[:2] != q.shape[:2]:
            wanted = f"({q.shape[0]}, {q.shape[1]}, heads_k, ...), as q"
            raise ValueError(f"{name} must be {wanted}, got {tuple(x.shape)}")


def _check(
    q, k, v, plan: ContextPlan, mask: Mask, dropout_p, seed, alibi_slopes, sink, backend
) -> Mask:
    """Raises for a wrong argument. The mask, by which calls get keys."""
    for name, x, count in (("q", q, 0), ("k", k, 1), ("v", v, 1)):
        wanted = plan.tokens, plan.heads[count]
        if x.ndim != 3 or x.shape[:2] != wanted:
            raise ValueError(
                f"{name} must be ({wanted[0]}, {wanted[1]}, head_dim), the plan's tokens and heads"
                f" on rank {plan.rank}, got {tuple(x.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must be {q.dtype} on {q.device}, as q, got {x.dtype} on {x.device}"
            )
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    if dropout_p and type(seed) is not int:
        raise ValueError("dropout_seed must be an int, the same on every rank, where dropout_p > 0")
    for name, x in (("sink", sink), ("alibi_slopes", alibi_slopes)):
        if x is None:
            continue
        check_tensor(name, x, q.device)
        if tuple(x.shape) != (plan.heads[0],):
            raise ValueError(f"{name} must be ({plan.heads[0]},), got {tuple(x.shape)}")
    _check_derivatives(q, k, v, sink)
    _check_strategy(plan.strategy, mask, bool(dropout_p), alibi_slopes is not None)
    return _with_unit(plan, mask) if is_invariant(backend) else mask


def _check_derivatives(*tensors: Tensor | None) -> None:
    """NotImplementedError where one has a tangent, which results would lack."""
    if forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("attention over ranks has no forward-mode derivative")


def _with_unit(plan: ContextPlan, mask: Mask) -> Mask:
    """The mask of calls whose bits are the whole batch's: parts of their keys begin where those of
    documents do. ValueError where a strategy has no such calls."""
    strategy, under = plan.strategy, f"numerics must be 'fast' under strategy {plan.strategy!r}"
    if strategy.endswith("ring"):
        raise ValueError(f"{under}: it merges parts")
    if mask.first and strategy == "gather":
        raise ValueError(f"{under} with window_size[2]: take 'heads'")
    return mask if mask.left is None else replace(mask, unit=PART_KEYS)


def _check_ranges(key_ranges: Tensor, q: Tensor, plan: ContextPlan, mask: Mask) -> None:
    if not isinstance(key_ranges, Tensor) or has_shards((key_ranges,)):
        words = f"a plain tensor of this rank's rows, got {type(key_ranges).__name__}"
        raise TypeError(f"key_ranges must be {words}")
    shape = tuple(key_ranges.shape)
    if shape not in ((plan.tokens, 2), (plan.tokens, 4)):
        raise ValueError(
            f"key_ranges must be ({plan.tokens}, 2 or 4), the plan's tokens on rank {plan.rank},"
            f" got {shape}"
        )
    if key_ranges.dtype != torch.int32 or key_ranges.device != q.device:
        raise ValueError(
            f"key_ranges must be int32 on {q.device}, got {key_ranges.dtype} on {key_ranges.device}"
        )
    if mask.first and plan.strategy != "heads":
        under = f"with window_size[2] under strategy {plan.strategy!r}"
        raise ValueError(f"key_ranges must be None {under}: take 'heads'")


def _check_strategy(strategy: str, mask: Mask, drops: bool, has_slopes: bool) -> None:
    """ValueError for what a strategy cannot compute yet."""
    under = f"with window_size[2] under strategy {strategy!r}: take"
    if has_slopes and mask.first and strategy != "heads":
        raise ValueError(f"alibi_slopes must be None {under} 'heads'")
    if drops and mask.first and strategy == "gather":
        raise ValueError(f"dropout_p must be 0 {under} 'heads' or 'ring'")


def _forward(q, k, v, sink, plan: ContextPlan, mask: Mask, options: dict[str, Any]) -> Any:
    """out, lse or None, what the backward wants of tensors, by which module it is, and its other
    arguments. options: and return_lse."""
    options = options | {"sink": sink}
    wants_lse, key = options.pop("return_lse"), options.pop("key")
    by, arguments = _strategy(plan, mask, options, q.device)
    if by in (heads, heads.InGrid):
        return *by.forward(q, k, v, *arguments), by, arguments
    if by is ring:
        out, lse = ring.forward(q, k, v, *arguments)
        return out, lse, (q, k, v, out, lse), by, arguments
    out, lses, made = gather.forward(q, k, v, *arguments)
    if key is not None and made is not None and len(plan.recent) < _MOST_KNOWN:
        plan.recent[key] = _Known(made(), mask, arguments, wants_lse)
    lse = gather.put_together(lses, arguments[1], q) if wants_lse else None
    return out, lse, (q, k, v, out, *lses), by, arguments


def _strategy(
    plan: ContextPlan, mask: Mask, options: dict[str, Any], device: torch.device
) -> tuple[Any, tuple[Any, ...]]:
    """The module of the plan's strategy, and its arguments after tensors. options: with sink."""
    if plan.strategy == "heads":
        return heads, (plan, options | {"window_size": _window(mask)})
    is_ring, slopes = plan.strategy.endswith("ring"), options["alibi_slopes"] is not None
    alone = slopes and (is_ring or mask.right != 0)
    # A ring's call has keys of several pieces, whose positions do not follow one another.
    alone = alone or (is_ring and options["key_ranges"] is not None)
    which = mask, alone or bool(options["dropout_p"]), device
    if is_ring:
        steps = plan.steps(*which)
        by = (ring, plan) if plan.grid is None else (heads.InGrid, plan.grid)
        return by[0], (by[1], steps, options)
    return gather, (plan, plan.schedule(*which), options)


def differentiated(
    dout: Tensor,
    dlse: Tensor | None,
    rows: tuple[Tensor, ...],
    sink: Tensor | None,
    plan: ContextPlan,
    mask: tuple[bool, Sequence[int]],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink from q, k, v, out and lse of this rank's rows. mask: causal and
    window_size; options: those of kernels but for the sink."""
    by, arguments = _strategy(plan, mask_of(*mask), options | {"sink": sink}, dout.device)
    if by is ring:
        return ring.backward(dout, dlse, rows, *arguments)
    *inputs, lse = rows
    if by in (heads, heads.InGrid):
        made = plan if plan.grid is None else plan.grid.row
        return by.backward(dout, dlse, heads.kept(rows, made), *arguments)
    lses = [lse[:, call.rows].contiguous() for call in arguments[1].schedule.calls]
    return gather.backward(dout, dlse, (*inputs, *lses), *arguments)


# Options that a backward reads the values of.
_TENSORS = "sink", "alibi_slopes", "key_ranges"


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, plan: ContextPlan, mask: Mask, options: Any):
        ctx.set_materialize_grads(False)
        if isinstance(options, _Known):
            found = options.forward(q, k, v, True)
        else:
            found = _forward(q, k, v, sink, plan, mask, options)
        out, lse, saved, ctx.by, (*ctx.arguments, options) = found
        ctx.plan, ctx.options = plan, options | dict.fromkeys(_TENSORS)
        # Autograd raises if one of them is changed before the backward, which reads them again.
        ctx.save_for_backward(*saved, *[options.get(name) for name in _TENSORS])
        return out, lse

    @staticmethod
    @once
    def backward(ctx, *grads):
        dout, dlse = grads
        *saved, sink, slopes, ranges = ctx.saved_tensors
        plan = ctx.plan
        options = ctx.options | dict(zip(_TENSORS, (sink, slopes, ranges), strict=True))
        if dout is None:
            # All ranks must run the same collectives, whatever their gradients are.
            shape = plan.tokens, plan.heads[0], saved[2].shape[-1]
            dout = saved[0].new_zeros(shape)
        found = ctx.by.backward(dout, dlse, tuple(saved), *ctx.arguments, options)
        return *found, None, None, None


def _window(mask: Mask) -> tuple[int, ...]:
    bounds = -1 if mask.left is None else mask.left, -1 if mask.right is None else mask.right
    return (*bounds, mask.first) if mask.first else bounds
