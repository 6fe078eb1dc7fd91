"""Checks of values. On a CPU they are always made. On a GPU, where they wait for the device, they
are made for calls with pages or lists of tiles under HEEDFUL_CHECK_PAGES.
"""

from operator import attrgetter

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heedful.core.base.numbers import FAR, LONGEST
from heedful.core.call.arguments import argument_name
from heedful.core.call.operands import LENGTHS, Operands, own_shape
from heedful.core.call.problem import AttentionProblem
from heedful.torch.base.dispatch import is_bare

# Operands whose values are lengths or indices.
indices = attrgetter(*LENGTHS, "origins", "block_table", "block_rows")


def is_readable(tensor: Tensor) -> bool:
    """Whether the value of a tensor may be read: the call is not traced, nor mapped over it."""
    return not is_compiling() and is_bare(tensor)


def check_values(x: Operands, problem: AttentionProblem, kind: str) -> None:
    """ValueError where an index tensor points outside of what it indexes. Sequences of length 0 and
    below are empty. Waits for the tensors' device."""
    if x.q.device.type == "cuda":
        with torch.cuda.device(x.q.device):
            refuse_capture(torch.cuda.is_current_stream_capturing())
    if x.leftpad_k is not None and problem.total_k is None:
        check_range(argument_name("leftpad_k", kind), x.leftpad_k, 0, problem.seqlen_k)
    if x.q_offsets is not None:
        check_range("q_offset", x.q_offsets, 1 - FAR, FAR - 1)
    if x.origins is not None:
        check_range("dropout_origin", x.origins, 0, LONGEST)
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
    if x.block_rows is not None:
        check_lists(x.block_rows, problem.seqlen_k, x.block_bits)
        check_lists(x.block_keys, problem.seqlen_q, x.block_bits)


def check_range(name: str, tensor: Tensor, low: int, high: int) -> None:
    """ValueError unless every value lies in [low, high]."""
    outside = (tensor < low) | (tensor > high)
    if outside.any():
        raise ValueError(
            f"{name} must hold values from {low} to {high}, got {int(tensor[outside][0])}"
        )


def check_room(name: str, lengths: Tensor, most: int) -> None:
    """ValueError if a length is more than `most`."""
    if lengths.numel() and int(lengths.max()) > most:
        raise ValueError(
            f"{name} must be at most the {most} tokens that there is room for,"
            f" got {int(lengths.max())}"
        )


def check_pages(table: Tensor, page_size: int, pages: int, begin, end) -> None:
    """ValueError, with row and entry, where a block_table (B, N) names a page that does not exist.

    pages: how many exist. begin, end: the storage rows that sequences use, (B, 1) or numbers;
    entries of other rows may hold anything.
    """
    first = torch.arange(table.shape[1], dtype=torch.int64, device=table.device) * page_size
    used = (first < end) & (first + page_size > begin) & (begin < end)
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        row, entry = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table must hold pages from 0 to {pages - 1} where they are in use,"
            f" got {int(table[row, entry])} in row {row}, entry {entry}"
        )


def check_lists(lists: Tensor, length: int, bits: Tensor) -> None:
    """ValueError, with row and entry, where a block mask lists a tile or bits that do not exist."""
    pool, side, _ = bits.shape
    entries = lists[tuple([slice(n) for n in own_shape(lists.shape, lists.stride())])]
    width = (entries.shape[-1] - 2) // 2
    whole, part = entries[..., 0], entries[..., 1]
    wrong = (whole < 0) | (part < 0) | (whole.long() + part > width)
    if wrong.any():
        b, h, row = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_mask must list from 0 to {width} tiles in a row, got"
            f" {entries[b, h, row, :2].tolist()} in row {row} of batch entry {b}, head {h}"
        )
    tile, index = entries[..., 2:].unflatten(-1, (width, 2)).unbind(-1)
    used = torch.arange(width, device=entries.device) < (whole + part)[..., None]
    tiles = -(-length // side)
    wrong = used & ((tile < 0) | (tile >= tiles) | (index < -1) | (index >= pool))
    if wrong.any():
        b, h, row, entry = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_mask must list tiles from 0 to {tiles - 1}, and bits from -1 to {pool - 1}, got"
            f" {int(tile[b, h, row, entry])} and {int(index[b, h, row, entry])} in entry {entry} of"
            f" row {row} of batch entry {b}, head {h}"
        )


def refuse_capture(is_capturing: bool) -> None:
    """ValueError while a CUDA graph is captured: what waits for the device cannot be part of it."""
    if is_capturing:
        raise ValueError(
            "HEEDFUL_CHECK_PAGES must be 0 where a CUDA graph is captured, as checking page numbers"
            " waits for the device, got 1"
        )


def _check_bounds(name: str, bounds: Tensor, tokens: int | None, side: str) -> Tensor:
    """The storage rows of each sequence, after a check that cu_seqlens rises and ends within the
    tokens."""
    room = bounds[1:] - bounds[:-1]
    if int(bounds[0]) < 0 or (room < 0).any():
        raise ValueError(f"{name} must rise from 0, got {bounds.tolist()}")
    if tokens is not None and int(bounds[-1]) > tokens:
        raise ValueError(f"{name} must end within {side}'s {tokens} tokens, got {int(bounds[-1])}")
    return room


def _check_used(name, used: Tensor, longest: int, room: Tensor | None, leftpad) -> None:
    if room is leftpad is None and (not used.numel() or int(used.max()) <= longest):
        return
    limit = room if room is not None else torch.full_like(used, longest)
    start = 0 if leftpad is None else leftpad
    wrong = (used > 0) & (used + start > limit)
    if wrong.any():
        raise ValueError(
            f"{name} must be at most the {int(limit[wrong][0])} tokens that there is room for,"
            f" got {int(used[wrong][0])}"
        )


def _check_table(x: Operands) -> None:
    """Checks the page numbers of the pages in use."""
    page_size, capacity = x.k.shape[1], x.k.shape[1] * x.block_table.shape[1]
    begin = 0 if x.leftpad_k is None else x.leftpad_k[:, None]
    end = capacity if x.seqused_k is None else begin + x.seqused_k[:, None]
    check_pages(x.block_table, page_size, x.k.shape[0], begin, end)
