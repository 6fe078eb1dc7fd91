"""Decoding over ranks: each holds a part of the keys of every sequence."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heedful.core.base.numbers import truth
from heedful.torch import flash_attn_with_kvcache, merge_attn_states
from heedful.torch.operands.checks import check_tensor

# Its name until torch 2.12 comes last.
_NAMES = "all_gather_single", "all_gather_into_tensor"
_all_gather = next(getattr(dist, name) for name in _NAMES if hasattr(dist, name))


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    owner: int | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """`flash_attn_with_kvcache` where each rank of a group has some of every sequence's keys, in
    any order and any number: the newest queries see them all, and each other causally.

    A collective: every rank calls it with the same q. Each computes its part, in float32, and one
    all-gather of (out, lse) puts parts together. For inference: no gradient is recorded. A CUDA
    graph may hold the step.

    Args:
        q: (batch, q_len, heads_q, head_dim), rotated.
        k_cache, v_cache: this rank's part, as of `flash_attn_with_kvcache`.
        k, v: (batch, q_len, heads_k, head_dim | head_dim_v), the queries' own keys, rotated. The
            owner appends them to its part; others may pass None.
        group: a process group; None is the default one.
        owner: the rank of the group that appends in this step, the same on every rank; None where
            nothing is appended: then all queries see all keys.
        cache_seqlens: int, or int32 or int64 (batch,): tokens that this rank holds, without the
            new ones. 0 is a sequence of which it holds none.
        cache_batch_idx, block_table, softmax_scale, softcap, k_descale, v_descale, backend: as of
            `flash_attn_with_kvcache`.
        sink: float (heads_q,), the same on every rank.
        return_lse: also return the log-sum-exp, float32 (batch, heads_q, q_len).

    Returns:
        out (batch, q_len, heads_q, head_dim_v), the same on every rank; or (out, lse).

    Raises:
        TypeError, ValueError: naming the argument, before anything is sent. Other ranks then wait
        until the group's time-out.
    """
    for name, x in (("q", q), ("v_cache", v_cache)):
        check_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dims, got shape {tuple(x.shape)}")
    truth("return_lse", return_lse)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if owner is not None and not (type(owner) is int and 0 <= owner < ranks):
        raise ValueError(f"owner must be a rank of the group from 0 to {ranks - 1}, got {owner!r}")
    appends = owner == rank
    if appends and (k is None or v is None):
        raise ValueError(f"k and v must be tensors on rank {rank}, the owner, got None")
    if owner is None and (k is not None or v is not None):
        raise ValueError("owner must be a rank where k and v are to be appended, got None")
    shape = *q.shape[:3], v_cache.shape[-1]
    count, rows = shape[0] * shape[1] * shape[2] * shape[3], q.shape[0] * q.shape[1] * q.shape[2]
    with torch.no_grad():
        mine = torch.empty(count + rows, dtype=torch.float32, device=q.device)
        out, lse = mine[:count].view(shape), mine[count:].view(shape[0], shape[2], shape[1])
        _, found = flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k if appends else None,
            v if appends else None,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            block_table=block_table,
            softmax_scale=softmax_scale,
            causal=appends,
            softcap=softcap,
            return_softmax_lse=True,
            k_descale=k_descale,
            v_descale=v_descale,
            # A sink is a logit of one softmax, and enters one part of it.
            sink=sink if rank == 0 else None,
            out=out,
            backend=backend,
        )
        lse.copy_(found)
        every = mine.new_empty((ranks, len(mine)))
        _all_gather(every.view(-1), mine, group=group)
        outs = every[:, :count].view(ranks, *shape)
        merged, lse = merge_attn_states(outs, every[:, count:].view(ranks, *lse.shape))
        merged = merged.to(q.dtype)
    return (merged, lse) if return_lse else merged
