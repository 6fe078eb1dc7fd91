"""Calls that came before, known by the tensors that torch gives, whose heads lie before their rows:
from addresses straight to results, without the views, options and keys of our own functions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.core.call.arguments import NUMBERS, Options
from heedful.torch.base.dispatch import Likeness
from heedful.torch.eager.calls import ABSENT, CALLS, Call


class Way(NamedTuple):
    """like: tells tensors of such calls. on: from their addresses, in a list for this call alone,
    to results."""

    like: Likeness
    on: Callable[[list[int]], Any]


def find(how: tuple, given: Sequence[Tensor]) -> Any:
    """The results of a call that came before with tensors like these; None where there is none.
    how: a name, all of the call but its tensors, and shapes of these."""
    way = CALLS.young.get(how) or CALLS.find(how)
    if way is None:
        return None
    addresses = way.like.addresses(given)
    return None if addresses is None else way.on(addresses)


def keep_forward(how: tuple, given: Sequence[Tensor], qkv: tuple, options: Options, out) -> None:
    """Keeps the call that ran last, if it needs but addresses and came before that. qkv: its
    operands. out: what it wrote into, None if it made that."""
    q, k, v = qkv
    call = _latest(q, k, v, options, out)
    if call is not None and out is None:
        _keep(how, given, qkv, call.on)
    elif call is not None:
        lie = out.shape, out.stride()
        new = partial(torch.empty_strided, *lie, dtype=out.dtype, device=out.device)
        on: Any = call.on
        _keep(how, given, qkv, lambda addresses: on(addresses, new()))


def _latest(q: Tensor, k: Tensor, v: Tensor, options: Options, out=None) -> Call | None:
    """The call of q, k and v that needs nothing but addresses, if it was the last one that `attend`
    ran with these options, and came before that."""
    base = (torch.is_grad_enabled(), options[0], options[3:], *map(type, options[NUMBERS]))
    # The key under which `attend` keeps its latest call.
    how: Any = (base, (options.max_seqlen_q, options.max_seqlen_k))
    call = CALLS.latest.get(how if out is None else (*how, type(out), type(None)))
    like = call and call.on and call.like
    return call if like and like.addresses((q, k, v, *ABSENT, out)) else None


def keep_backward(how: tuple, given: Sequence[Tensor], call: Any, tensors, slot: int) -> None:
    """Keeps the backward of a call, if its latest one needs but the addresses of these tensors:
    operands, out, lse and dout. slot: as of Backwards."""
    layout = call and call.backwards.latest[slot]
    if layout and layout.on and layout.like and layout.like.addresses(tensors):
        _keep(how, given, tensors, layout.on)


def _keep(how: tuple, given: Sequence[Tensor], tensors: Sequence[Tensor], on) -> None:
    """given: what torch gave. tensors: what the kernels had, which may be copies of that."""
    if [x.data_ptr() for x in given] == [x.data_ptr() for x in tensors]:
        CALLS.put(how, Way(Likeness(given), on))
