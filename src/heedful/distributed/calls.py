"""Calls on rows that are one sequence, or packed ones: more than one has cu_seqlens."""

from collections.abc import Sequence
from typing import Any

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


def _dense(given: Sequence[Tensor]) -> Any:
    return [x[None] if x.ndim == 3 else x for x in given]
