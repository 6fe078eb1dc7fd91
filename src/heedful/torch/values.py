"""Checks of values, which only the CPU can make without waiting for a device."""

import torch
from torch import Tensor

from heedful.core.operands import Operands
from heedful.core.problem import AttentionProblem

# Operands whose values say where to read.
INDICES = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "block_table",
    "kv_batch_idx",
    "leftpad_k",
)


def check_values(x: Operands, problem: AttentionProblem, kind: str) -> None:
    """ValueError where an index tensor points outside of what it indexes. For CPU tensors."""
    if x.leftpad_k is not None and problem.total_k is None:
        check_range("cache_leftpad", x.leftpad_k, 0, problem.seqlen_k)
    for side, tokens, longest in (
        ("q", problem.total_q, problem.seqlen_q),
        ("k", problem.total_k, problem.seqlen_k),
    ):
        bounds = getattr(x, f"cu_seqlens_{side}")
        room = None
        if bounds is not None:
            room = _check_bounds(f"cu_seqlens_{side}", bounds, tokens, side)
        used = getattr(x, f"seqused_{side}")
        if used is not None:
            name = "cache_seqlens" if kind == "kvcache" else f"seqused_{side}"
            _check_used(name, used, longest, room, x.leftpad_k if side == "k" else None)
        lengths = used if used is not None else room
        if bounds is not None and lengths is not None and lengths.numel():
            most = int(lengths.max())
            if most > longest:
                raise ValueError(
                    f"max_seqlen_{side} must be at least the longest sequence, {most},"
                    f" got {longest}"
                )
    if x.kv_batch_idx is not None:
        check_range("cache_batch_idx", x.kv_batch_idx, 0, x.k.shape[0] - 1)
    if x.block_table is not None:
        _check_table(x)


def check_range(name: str, tensor: Tensor, low: int, high: int) -> None:
    """ValueError unless every value lies in [low, high]."""
    outside = (tensor < low) | (tensor > high)
    if outside.any():
        raise ValueError(
            f"{name} must hold values from {low} to {high}, got {int(tensor[outside][0])}"
        )


def _check_bounds(name: str, bounds: Tensor, tokens: int | None, side: str) -> Tensor:
    """Room of each sequence, once cu_seqlens is known to rise and to end within the tokens."""
    room = bounds[1:] - bounds[:-1]
    if int(bounds[0]) < 0 or (room < 0).any():
        raise ValueError(f"{name} must rise from 0, got {bounds.tolist()}")
    if tokens is not None and int(bounds[-1]) > tokens:
        raise ValueError(f"{name} must end within {side}'s {tokens} tokens, got {int(bounds[-1])}")
    return room


def _check_used(name, used: Tensor, longest: int, room: Tensor | None, leftpad) -> None:
    limit = room if room is not None else torch.full_like(used, longest)
    start = 0 if leftpad is None else leftpad
    wrong = (used < 0) | (used + start > limit)
    if wrong.any():
        raise ValueError(
            f"{name} must lie between 0 and the {int(limit[wrong][0])} tokens that there are room"
            f" for, got {int(used[wrong][0])}"
        )


def _check_table(x: Operands) -> None:
    """Page numbers of the pages in use; the rest of a table may hold anything."""
    page_size, (_, pages) = x.k.shape[1], x.block_table.shape
    used = x.block_table.new_ones(x.block_table.shape, dtype=torch.bool)
    if x.seqused_k is not None:
        ends = x.seqused_k if x.leftpad_k is None else x.seqused_k + x.leftpad_k
        used = (
            torch.arange(pages, dtype=torch.int64, device=used.device) * page_size < ends[:, None]
        )
    check_range("block_table", x.block_table[used], 0, x.k.shape[0] - 1)
