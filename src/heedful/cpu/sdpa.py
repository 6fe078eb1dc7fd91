"""torch's own attention, where it computes exactly what a call asks for.

It takes plain and causal calls, with their gradients, and single queries over sequences of
different lengths. `core.registry.capability` says which problems these are. Its operators have
fixed costs of a few microseconds, and enter one parallel region each.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from heedful.core.base.far import far_lse
from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.problem import AttentionProblem
from heedful.cpu import tiled_backward, tiled_forward
from heedful.cpu.tiled_forward import statistics
from heedful.cpu.workers import for_each

__all__ = ["backward", "forward", "recorded", "records", "statistics"]

# From this many keys on torch finds a row's largest score with vector instructions: the floats of
# the widest vectors that torch 2.13 is built for, those of AVX-512.
VECTORS = 16

# From this many multiply-adds on single queries are worth threads of our own.
WORTH_THREADS = 512 * 1024

Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# Torch's own: whoever replaces `F.scaled_dot_product_attention` may call us. Torch's stubs have
# neither name.
_attention: Any = getattr(torch._C, "_nn").scaled_dot_product_attention  # noqa: B009
# The function of torch's bindings: the operator takes a quarter longer on a short sequence.
_flash: Any = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu")  # noqa: B009
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(problem: AttentionProblem, x: Operands, out: torch.Tensor | None = None) -> Results:
    """Attention of one call: (out, lse, None), as `heedful.cpu.forward`; lse is None where neither
    a caller nor a gradient wants it.

    x: q (B, Sq, H, D), k (B, Sk, G, D), v (B, Sk, G, E), and seqused_k if Sq is 1. out: written if
    passed.
    """
    if x.seqused_k is not None:
        by = _single_queries if problem.batch else tiled_forward.forward
        return by(problem, x, out)
    q, k, v = (a.transpose(1, 2) for a in (x.q, x.k, x.v))
    lse = None
    if problem.needs_grad or problem.return_lse:
        q, k, v = _dense_columns(q, k, v)
        result, lse = _flash(q, k, v, 0.0, problem.mask.causal, scale=problem.scale)
        lse = lse.contiguous()
    else:
        result = _attention(
            q,
            k,
            v,
            is_causal=problem.mask.causal,
            scale=problem.scale,
            enable_gqa=problem.group > 1,
        )
    result = result.transpose(1, 2)
    if problem.seqlen_k < VECTORS and _may_hide_nan(result, x.q, x.k):
        tiled, tiled_lse, _ = tiled_forward.forward(problem, x)
        result = torch.where((result == 0).all(-1, keepdim=True), tiled, result)
        lse = lse if lse is None else tiled_lse
    return (result if out is None else out.copy_(result)), lse, None


def records(problem: AttentionProblem, x: Operands) -> bool:
    """Whether `recorded` takes a problem with operands like these."""
    return all(a.stride(-1) == 1 for a in x[:3])


def recorded(problem: AttentionProblem, x: Operands) -> torch.Tensor | None:
    """out of one call, whose gradients torch's autograd makes by the operators that `backward`
    calls. None where these are not exact enough, as there."""
    q, k, v = x[:3]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = _flash(q, k, v, 0.0, problem.mask.causal, scale=problem.scale)
    if not float(torch.linalg.vector_norm(lse, torch.inf)) < far_lse(q.element_size()):
        return None
    out = out.transpose(1, 2)
    if problem.seqlen_k < VECTORS and _may_hide_nan(out, q, k):
        return None
    return out


def backward(
    problem: AttentionProblem,
    x: Operands,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """As `heedful.cpu.backward`, which takes the calls that torch's backward cannot: those with a
    gradient of lse, and with scores so far from 0 that lse is not exact enough."""
    far = far_lse(x.q.element_size())
    if dlse is not None or not float(torch.linalg.vector_norm(lse, torch.inf)) < far:
        return tiled_backward.backward(problem, x, out, lse, dout, dlse)
    q, k, v, out, dout = (a.transpose(1, 2) for a in (x.q, x.k, x.v, out, dout))
    q, k, v, out, dout = _dense_columns(q, k, v, out, dout)
    grads = _flash_backward(dout, q, k, v, out, lse, 0.0, problem.mask.causal, scale=problem.scale)
    dq, dk, dv = (grad.transpose(1, 2).contiguous() for grad in grads)
    return Gradients(dq, dk, dv)


def _single_queries(problem: AttentionProblem, x: Operands, out: torch.Tensor | None) -> Results:
    """One query for each sequence, over the keys in use: each sequence by itself, so that no other
    keys are read, and no sequence depends on another. Query heads of a KV head are rows of one
    tile."""
    shape = (problem.batch, problem.heads_k, problem.group, problem.head_dim)
    lengths = [min(max(length, 0), problem.seqlen_k) for length in x.seqused_k.tolist()]
    dense_q, *dense = _dense_columns(x.q, x.k, x.v)
    q, k, v = dense_q.reshape(shape).split(1), *(_used_rows(a, lengths) for a in dense)
    made: list[Any] = [None] * problem.batch

    def attend(_, b: int) -> None:
        if lengths[b]:
            made[b] = _flash(q[b], k[b], v[b], scale=problem.scale)
        else:
            made[b] = torch.zeros_like(q[b]), q[b].new_full(q[b].shape[:3], -torch.inf).float()

    if sum(lengths) * problem.heads_q * problem.head_dim > WORTH_THREADS:
        for_each([[b] for b in range(problem.batch)], attend, contextlib.nullcontext)
    else:
        for b in range(problem.batch):
            attend(None, b)
    results, lses = zip(*made, strict=True)
    result, lse = torch.cat(results), None
    if min(lengths) < VECTORS and not result[..., 0].all():
        short = [b for b, length in enumerate(lengths) if 0 < length < VECTORS]
        if any(_may_hide_nan(results[b], q[b], k[b]) for b in short):
            return tiled_forward.forward(problem, x, out)
    if problem.return_lse:
        lse = torch.cat(lses).reshape(problem.lse_shape)
    result = result.reshape(problem.batch, 1, problem.heads_q, problem.head_dim)
    return (result if out is None else out.copy_(result)), lse, None


def _used_rows(cache: torch.Tensor, lengths: list[int]) -> Sequence[torch.Tensor]:
    """The first rows of each sequence of a cache (B, rows, G, dim), (1, G, length, dim). Where the
    cache is one piece of memory, one split makes all these views; to narrow each takes thrice as
    long."""
    batch, rows, *row = cache.shape
    if batch < 2 or cache.stride(0) != rows * cache.stride(1):
        heads_first = cache.transpose(1, 2).split(1)
        return [a.narrow(2, 0, n) for a, n in zip(heads_first, lengths, strict=True)]
    sizes = [size for length in lengths for size in (length, rows - length)]
    return cache.view(1, batch * rows, *row).transpose(1, 2).split_with_sizes(sizes, 2)[::2]


def _dense_columns(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with a last stride of 1, as torch's operators assume."""
    return tuple(a if a.stride(-1) == 1 else a.contiguous() for a in tensors)


def _may_hide_nan(result: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether rows whose scores are all NaN may have a result of 0. With fewer keys than a vector,
    torch 2.13 finds a row's largest score by comparisons that ignore NaN: it then treats such a row
    as one without keys, and gives 0.
    """
    return not result[..., 0].all() and _has_nan(q, k)


def _has_nan(q: torch.Tensor, k: torch.Tensor) -> bool:
    return bool(q.isnan().any() or k.isnan().any())
