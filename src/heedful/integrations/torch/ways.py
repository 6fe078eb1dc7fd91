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
    """likeness: tells tensors of such calls. run_on: from their addresses, in a list for this call
    alone, to results."""

    likeness: Likeness
    run_on: Callable[[list[int]], Any]


def find(key: tuple, received: Sequence[Tensor]) -> Any:
    """The results of a call that came before with tensors like these; None where there is none.
    key: a name, all of the call but its tensors, and shapes of these."""
    way = CALLS.young.get(key) or CALLS.find(key)
    if way is None:
        return None
    addresses = way.likeness.addresses(received)
    return None if addresses is None else way.run_on(addresses)


def keep_forward(key: tuple, received: Sequence[Tensor], qkv: tuple, options: Options, out) -> None:
    """Keeps the call that ran last, if it needs but addresses and came before that: its results are
    a list of out, heads before rows, and of lse if that is asked for. qkv: its operands. out: what
    it wrote into, None if it made that."""
    q, k, v = qkv
    call = _latest(q, k, v, options, out)
    if call is None:
        return
    run = call.runner.turned(out)
    if out is None:
        _keep(key, received, qkv, run)
        return
    heads_first = out.transpose(1, 2)
    lie = heads_first.shape, heads_first.stride()
    new = partial(torch.empty_strided, *lie, dtype=out.dtype, device=out.device)

    def run_on(addresses: list[int]) -> list[Tensor]:
        made = new()
        addresses.append(made.data_ptr())
        return [made, *run(addresses)]

    _keep(key, received, qkv, run_on)


def _latest(q: Tensor, k: Tensor, v: Tensor, options: Options, out=None) -> Call | None:
    """The call of q, k and v that needs nothing but addresses, if it was the last one that `attend`
    ran with these options, and came before that."""
    base = (torch.is_grad_enabled(), options[0], options[3:], *map(type, options[NUMBERS]))
    # The key under which `attend` keeps its latest call.
    key: Any = (base, (options.max_seqlen_q, options.max_seqlen_k))
    call = CALLS.latest.get(key if out is None else (*key, type(out), type(None), q.shape))
    likeness = call and call.run_on and call.likeness
    return call if likeness and likeness.addresses((q, k, v, *ABSENT, out)) else None


def keep_backward(key: tuple, received: Sequence[Tensor], call: Any, tensors, slot: int) -> None:
    """Keeps the backward of a call, if its latest one needs but the addresses of these tensors:
    operands, out, lse and dout. Its results are dq, dk and dv, heads before rows. slot: as of
    Backwards."""
    layout = call and call.backwards.latest[slot]
    if layout and layout.run_on and layout.likeness and layout.likeness.addresses(tensors):
        _keep(key, received, tensors, layout.run.turned())


def _keep(key: tuple, received: Sequence[Tensor], tensors: Sequence[Tensor], run_on) -> None:
    """received: what torch gave. tensors: what the kernels had, which may be copies of that."""
    if [x.data_ptr() for x in received] == [x.data_ptr() for x in tensors]:
        CALLS.put(key, Way(Likeness(received), run_on))
