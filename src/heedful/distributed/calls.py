"""Calls on rows that are one sequence, or packed ones: more than one has cu_seqlens. And streams on
which the calls of a step run in turn."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from heedful.core.call.operands import Gradients
from heedful.torch import attention_backward, flash_attn_func, flash_attn_varlen_func


def placed(part: Any, offset: int) -> dict[str, Any]:
    """The window and `q_offset` of a call of one sequence, so that ALiBi's distances are those of
    the whole. part: a `Call` or `Part`, whose window has the last query on the last key."""
    (queries,), (keys,), (left, right) = part.lengths_q, part.lengths_k, part.window
    extra = keys - queries - offset
    bounds = left if left < 0 else left - extra, right if right < 0 else right + extra
    return {"window_size": bounds, "q_offset": offset}


def attended(given: Sequence[Tensor], more: dict[str, Any], out: Tensor) -> Tensor:
    """Writes the attention of q, k and v, which are packed rows, to `out`; returns lse. Rows of one
    sequence may have a first dim of 1."""
    if "cu_seqlens_q" in more:
        packed: Any = given
        return flash_attn_varlen_func(*packed, **more, out=out, return_lse=True)[1]
    return flash_attn_func(*_dense(given), **more, out=_dense([out])[0], return_lse=True)[1][0]


def differentiated(
    given: Sequence[Tensor], more: dict[str, Any], into: Sequence[Tensor] | None = None
) -> Gradients:
    """`attention_backward` of dout, q, k, v, out and lse, and of dlse in `more`."""
    if "cu_seqlens_q" in more:
        return attention_backward(*given, **more, into=into)
    if more["dlse"] is not None:
        more["dlse"] = more["dlse"][None]
    places = None if into is None else _dense(into)
    *rows, lse = given
    arguments: Any = (*_dense(rows), lse[None])
    found = attention_backward(*arguments, **more, into=places)
    return found if places else found._replace(dq=found.dq[0], dk=found.dk[0], dv=found.dv[0])


def part_of(x: Tensor, rows: slice, heads: slice) -> Tensor:
    """x[rows, heads], which is x itself if that is all: a view takes the host microseconds."""
    count, every = x.shape[:2]
    if rows.stop - rows.start == count and heads.stop - heads.start == every:
        return x
    return x[rows, heads]


def _dense(given: Sequence[Tensor]) -> Any:
    return [x[None] if x.ndim == 3 else x for x in given]


_STREAMS: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


class Lanes:
    """Streams of a step. Lane 0 is the current one, and the other lane lies beside it, so that work
    tiles of one call take the SMs that the last tiles of another leave idle. A third stream lies
    aside: kernels there wait for SMs, or for other ranks, and no call waits for them. With one lane
    all is the current stream.

    `begin` says once after what the other streams begin; `join` lets lane 0 wait for them.
    """

    def __init__(self, device: torch.device, count: int):
        self.count, self._device = count, device
        self._begin: Any = None
        self._streams: tuple[Any, ...] = ()
        self._used: list[Any] = []
        if count > 1:
            self._main = torch.cuda.current_stream(device)
            if device not in _STREAMS:
                _STREAMS[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._streams = _STREAMS[device]

    def begin(self, event: Any) -> None:
        """Other streams begin after this event, the first that is told."""
        self._begin = self._begin or event

    def on(self, index: int) -> AbstractContextManager:
        """Makes a lane the current stream. index: parts of a step take lanes in turn."""
        if not self._streams or index % self.count == 0:
            return nullcontext()
        return torch.cuda.stream(self._begun(self._streams[0]))

    def aside(self, event: Any) -> AbstractContextManager:
        """Makes the stream aside the current one, after an event of `mark`, or None."""
        if not self._streams:
            return nullcontext()
        stream = self._begun(self._streams[1])
        if event is not None:
            stream.wait_event(event)
        return torch.cuda.stream(stream)

    def _begun(self, stream: Any) -> Any:
        if stream not in self._used:
            self._used.append(stream)
            if self._begin is not None:
                stream.wait_event(self._begin)
        return stream

    def mark(self) -> Any:
        """An event of all that the current stream has now; None where there is no other."""
        if not self._streams:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def keep(self, made: Tensor, index: int) -> Tensor:
        """A tensor that was made on a lane, and is used after `join`."""
        if self._streams and index % self.count:
            made.record_stream(self._main)
        return made

    def join(self) -> None:
        """The current stream, lane 0, waits for the others."""
        for stream in self._used:
            self._main.wait_stream(stream)
