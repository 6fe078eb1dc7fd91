"""Dense calls of tensors whose heads lie before their rows, as models hold them. Autograd records a
node for each view that turns them; a call that came before needs none, and is one node.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, are_deterministic_algorithms_enabled, is_grad_enabled
from torch.autograd import Function, forward_ad

from heedful.core.call.arguments import ABSENT, NUMBERS, Options, new_options
from heedful.torch.base.dispatch import (
    Likeness,
    any_autocast,
    bare_apply,
    bare_backward,
    transforms_active,
)
from heedful.torch.eager.calls import CALLS, Attention
from heedful.torch.operands.plain import plain_window


class _Known(NamedTuple):
    """likeness: tells tensors of such calls. run: from them and their addresses to out."""

    likeness: Likeness
    run: Callable[[Sequence[Tensor], list[int]], Tensor]


def is_ordinary(q: Any, k: Any, v: Any) -> bool:
    """Whether these are torch's own tensors, and neither autocast, a functorch transform nor
    forward-mode AD is active. `Likeness` sees a dispatch mode. Code that
    torch.compile traces asks for that first."""
    return (
        q.__class__ is k.__class__ is v.__class__ is Tensor
        and not any_autocast()
        and not transforms_active()
        and forward_ad._current_level < 0
    )


def find(q: Tensor, k: Tensor, v: Tensor, facts: tuple) -> tuple[Any, Tensor | None]:
    """The key of a call of q, k and v, (batch, heads, rows, dim), without other operands, and its
    out (batch, rows, heads, dim) if it came before. The key is None where calls are not known by
    one. facts: softmax_scale, causal, window_size and softcap."""
    if not is_ordinary(q, k, v):
        return None, None
    records, deterministic = is_grad_enabled(), are_deterministic_algorithms_enabled()
    key = ("heads first", facts, records, deterministic, q.shape, k.shape)
    try:
        known = CALLS.young.get(key) or CALLS.find(key)
        addresses = known and known.likeness.addresses((q, k, v))
    except (TypeError, RuntimeError):
        # An argument that cannot be hashed, or a tensor without plain memory.
        return None, None
    return key, None if addresses is None else known.run((q, k, v), addresses)


def keep(key: tuple, received: Sequence[Tensor], qkv: Sequence[Tensor]) -> None:
    """Keeps the call that ran last under its key, if it came before and needs no changes of its
    tensors. received: the tensors. qkv: their views with rows before heads, which it ran on."""
    _, (softmax_scale, causal, window_size, softcap), _, deterministic, *_ = key
    options = new_options(
        kind="dense",
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=plain_window(window_size),
        softcap=softcap,
        deterministic=deterministic,
    )
    call = _latest(qkv, options)
    if call is None:
        return
    if call.run_on is not None:
        run: Any = partial(_launched, call.run_on)
    elif call.wants_grad and call.plain and call.recorded is None:
        run = partial(_recorded, call)
    else:
        return
    CALLS.put(key, _Known(Likeness(received), run))


def _launched(run_on: Any, _: Sequence[Tensor], addresses: list[int]) -> Tensor:
    return run_on(addresses)[0]


def _recorded(call: Any, qkv: Sequence[Tensor], addresses: list[int]) -> Tensor:
    return _apply(call, None, None, None if call.saved_on is None else addresses, *qkv)


def _latest(qkv: Sequence[Tensor], options: Options) -> Any:
    """The call under which `attend` keeps its latest one with these options, if it is of tensors
    like these."""
    base = (is_grad_enabled(), options[0], options[3:], *map(type, options[NUMBERS]))
    call = CALLS.latest.get((base, (options.max_seqlen_q, options.max_seqlen_k)))
    likeness = call and call.likeness
    return call if likeness and likeness.addresses((*qkv, *ABSENT)) else None


class HeadsFirst(Function):
    """`Attention` of q, k and v (batch, heads, rows, dim) alone, with their gradients."""

    @staticmethod
    def forward(ctx, call, x, seed, addresses, q, k, v):
        """x and seed are None: arguments lie where those of `Attention` do."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return Attention.forward(ctx, call, x, seed, addresses, q, k, v)

    @staticmethod
    def backward(ctx, dout):
        dq, dk, dv = Attention.backward(ctx, dout)[4:7]
        turned = [None if x is None else x.transpose(1, 2) for x in (dq, dk, dv)]
        return None, None, None, None, *turned


_apply = bare_apply(HeadsFirst)
bare_backward(HeadsFirst)
