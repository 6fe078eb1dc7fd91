"""`attention` as an operator of torch's dispatcher, for torch.compile: its plan is a number in a
tensor of the CPU, so that a new plan compiles nothing.

The backward keeps out and lse of this rank's rows alone. So under strategy "heads" it sends q, k, v
and out once more.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_OPTIONS = (
    "float dropout_p, float? softmax_scale, bool causal, int[] window_size, float softcap,"
    " bool deterministic, int? dropout_seed, str? backend"
)
_NAMES = tuple(each.split()[-1] for each in _OPTIONS.split(", "))
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? alibi_slopes, Tensor? key_ranges,"
    " Tensor plan"
)
_LIBRARY = torch.library.Library("heedful_context", "DEF")
for _schema in (
    f"attention({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    f"backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
# By its number.
_PLANS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_count = iter(range(1 << 62))


def number_of(plan: Any) -> Tensor:
    """A number for a new plan: int64 () on the CPU."""
    number = next(_count)
    _PLANS[number] = plan
    return torch.tensor(number, device="cpu")


def attend(q, k, v, sink, alibi_slopes, key_ranges, plan: Any, more: tuple[Any, ...]) -> Any:
    """out and lse, by the operator. more: its options."""
    operator = torch.ops.heedful_context.attention.default
    return operator(q, k, v, sink, alibi_slopes, key_ranges, plan.number, *more)


def _forward(q, k, v, sink, alibi_slopes, key_ranges, plan, *more):
    from heedful.distributed.attention import attention

    options = dict(zip(_NAMES, more, strict=True)) | {"key_ranges": key_ranges}
    made = _PLANS[int(plan)]
    return attention(
        q, k, v, made, alibi_slopes=alibi_slopes, sink=sink, return_lse=True, **options
    )


def _lse_like(q: Tensor) -> Tensor:
    *batch, rows, heads, _ = q.shape
    return q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _fake_forward(q, k, v, sink, alibi_slopes, key_ranges, plan, *more):
    return q.new_empty((*q.shape[:-1], v.shape[-1])), _lse_like(q)


def _backward(dout, dlse, out, lse, q, k, v, sink, alibi_slopes, key_ranges, plan, *more):
    from heedful.distributed.attention import differentiated

    options = dict(zip(_NAMES, more, strict=True))
    options |= {"alibi_slopes": alibi_slopes, "key_ranges": key_ranges}
    mask = options.pop("causal"), options.pop("window_size")
    is_batch, batch = q.ndim == 4, q.shape[0]
    if is_batch:
        dout, out, q, k, v = (x.flatten(0, 1) for x in (dout, out, q, k, v))
        dlse, lse = (None if x is None else x.movedim(0, 1).flatten(1) for x in (dlse, lse))
    saved: Any = q, k, v, out, lse
    *grads, dsink = differentiated(dout, dlse, saved, sink, _PLANS[int(plan)], mask, options)
    if is_batch:
        grads = [x.unflatten(0, (batch, -1)) for x in grads]
    return *(x.contiguous() for x in grads), q.new_empty(0) if dsink is None else dsink


def _fake_backward(dout, dlse, out, lse, q, k, v, sink, alibi_slopes, key_ranges, plan, *more):
    like = torch.empty_like
    grads = (like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, q.new_empty(0) if sink is None else like(sink)


def _keep(ctx, inputs, output):
    tensors, ctx.more = inputs[:7], inputs[7:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, dout, dlse):
    *tensors, out, lse = ctx.saved_tensors
    if dout is None:
        # All ranks must run the same collectives, whatever their gradients are.
        dout = torch.zeros_like(out)
    arguments = dout, dlse, out, lse, *tensors, *ctx.more
    *grads, dsink = torch.ops.heedful_context.backward.default(*arguments)
    nothing = (None for _ in (*tensors[4:], *ctx.more))
    return *grads, None if tensors[3] is None else dsink, *nothing


def _second(ctx, *grads):
    raise NotImplementedError("attention over ranks has no second derivative")


def _nothing(ctx, inputs, output):
    pass


for _name, _impl, _fake, _setup, _rule in (
    ("attention", _forward, _fake_forward, _keep, _differentiate),
    ("backward", _backward, _fake_backward, _nothing, _second),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _impl, _key)
    torch.library.register_fake(f"heedful_context::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"heedful_context::{_name}", _rule, setup_context=_setup, lib=_LIBRARY
    )
