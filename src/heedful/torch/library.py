"""The same calls as operators of torch's dispatcher: for torch.compile, functorch transforms, fake
tensors and subclasses. `torch.ops.heedful.attention_v2` and its backward share validation, planning
and runners with the eager path; this file holds only what the dispatcher wants to know of them.
"""

from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heedful.core.operands import Operands
from heedful.torch.adapt import autocast, bias_gradient
from heedful.torch.autograd_rules import (
    attention_autograd,
    backward_autograd,
    inference_autograd,
    no_second_derivative,
)
from heedful.torch.batching import (
    attention_vmap,
    backward_vmap,
    inference_vmap,
)
from heedful.torch.calls import CALLS, Call, find, make_seed, tensor_keys
from heedful.torch.calls import attend as eager_attend
from heedful.torch.checks import (
    Options,
    check_constants,
    check_out,
    check_seed,
    check_tensors,
    describe,
)
from heedful.torch.dispatch import needs_dispatcher, untraced
from heedful.torch.plain import plain_options, plain_seed

_OPERANDS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Operands._fields)
_OPTIONS = (
    "str kind, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float dropout_p, float? softmax_scale,"
    " bool causal, int[] window_size, float softcap, bool deterministic, bool return_attn_probs,"
    " bool return_lse, int num_splits, str? backend, int[] dropout_origin"
)
_COUNT = len(Operands._fields)

# torch.compile keeps its code on disk under the names of operators: once released, a new schema
# wants a new name.
LIBRARY = torch.library.Library("heedful", "DEF")
LIBRARY.define(
    f"attention_v2({_OPERANDS}, {_OPTIONS}, bool needs_grad)"
    " -> (Tensor out, Tensor lse, Tensor probs)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    f"attention_v2_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_OPERANDS},"
    f" {_OPTIONS}, bool bias_grad, bool kv_grad)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# A gradient's gradient, which raises when it is computed: it can be traced where nobody wants it.
LIBRARY.define(
    "second_backward(Tensor grad, SymInt[] shape, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Dense attention of which nothing but the output is wanted. The dispatcher takes as long for each
# argument as for a tenth of the call, so that inference is not to pass 34 of them, and is to pass
# four where all else is as usual.
LIBRARY.define(
    "inference(Tensor q, Tensor k, Tensor v, bool causal=False) -> Tensor out",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "inference.options(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal,"
    " int[] window_size, float softcap, int num_splits, str? backend) -> Tensor out",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attend(q, k, v, extras: tuple | None, options: tuple, out=None, seed=None):
    """As `calls.attend`, through the dispatcher."""
    if extras is None:
        if out is None and seed is None and is_compiling() and _is_usual(q, k, v, options):
            return torch.ops.heedful.inference.default(q, k, v, options[5])
        extras = (None,) * (_COUNT - 3)
    given, x = Options(*options), Operands(q, k, v, *extras)
    check_tensors(x, given)
    given, seed = plain_options(options), plain_seed(seed, q.device)
    check_seed(seed, q.device)
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        x = Operands._make((*autocast(x[:4], device), *x[4:]))
    wants_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x.q, x.k, x.v, x.bias, x.sink)
    )
    if torch.is_grad_enabled():
        check_constants(x)
    if given.dropout_p > 0:
        x = x._replace(seed=make_seed(seed, q.device))
    if out is not None:
        check_out(out, x, (*x.q.shape[:-1], x.v.shape[-1]), wants_grad)
    if out is None and not wants_grad and _is_bare(x, given):
        return torch.ops.heedful.inference.options(
            *x[:3],
            given.softmax_scale,
            given.causal,
            given.window_size,
            given.softcap,
            given.num_splits,
            given.backend,
        )
    result, lse, probs = torch.ops.heedful.attention_v2.default(*x, *given, wants_grad)
    if out is not None:
        result = out.copy_(result)
    if given.return_attn_probs:
        return result, lse, probs
    return (result, lse) if given.return_lse else result


def _is_usual(q, k, v, options: tuple) -> bool:
    """Whether a compiled call wants the output alone, and but for `causal` has no options.

    The compiled code looks again, at each call, at every value that was looked at in here: literals
    cost nothing.
    """
    causal = options[5]
    return (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and (causal is True or causal is False)
        and options[:5] == ("dense", None, None, 0.0, None)
        and options[6:] == ((-1, -1), 0.0, False, False, False, 0, None, (0, 0, 0, 0))
        and not (
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        )
    )


def _is_bare(x: Operands, given: Options) -> bool:
    """Whether q, k and v are all that goes in and out all that comes out."""
    wanted = given.return_attn_probs or given.return_lse
    return given.kind == "dense" and not wanted and all(t is None for t in x[3:])


def _split(args: tuple) -> tuple[Operands, Options]:
    return Operands(*args[:_COUNT]), Options(*args[_COUNT:])


def _call(x: Operands, options: Options, needs_grad: bool, bias_grad: bool) -> Call:
    """The call of these operands; the operator returns the lse whatever the caller reads."""
    options = options._replace(
        window_size=tuple(options.window_size),
        return_lse=True,
        dropout_origin=tuple(options.dropout_origin),
    )
    key = ("op", options, needs_grad, bias_grad, tensor_keys(x))
    call = CALLS.young.get(key)
    return call or find(key, x, options, (needs_grad, bias_grad), seed=x.seed)


@untraced
def _attention(*args):
    x, options = _split(args[:-1])
    call = _call(x, options, args[-1], False)
    out, lse, probs = call.forward(call.operands(x, x.seed), None)
    return out.contiguous(), lse, out.new_empty(0) if probs is None else probs


def _attention_fake(*args):
    x, options = _split(args[:-1])
    problem = describe(x, options, needs_grad=args[-1])
    out_dtype = getattr(torch, problem.out_dtype)
    out = x.q.new_empty((*x.q.shape[:-1], problem.head_dim_v), dtype=out_dtype)
    lse = x.q.new_empty(problem.lse_shape, dtype=torch.float32)
    probs_shape = (0,)
    if problem.return_probs:
        probs_shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return out, lse, x.q.new_empty(probs_shape, dtype=out_dtype)


def _inference_options(
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=0, backend=None
) -> tuple:
    """The fields of Options."""
    window = tuple(window_size)
    return (
        *("dense", None, None, 0.0, softmax_scale, causal, window, softcap),
        *(False, False, False, num_splits, backend, (0, 0, 0, 0)),
    )


_USUAL = {causal: _inference_options(causal=causal) for causal in (False, True)}


@untraced
def _inference(q, k, v, causal=False):
    return eager_attend(q, k, v, None, _USUAL[causal])


@untraced
def _inference_with(q, k, v, *args):
    return eager_attend(q, k, v, None, _inference_options(*args))


@untraced
def _inference_autograd(q, k, v, causal=False):
    if not needs_dispatcher(q, k, v):
        # To dispatch it again takes a fifth of its time, and this is differentiable too.
        return eager_attend(q, k, v, None, _USUAL[causal])
    args = q, k, v, causal
    return inference_autograd(torch.ops.heedful.inference.default, _USUAL[causal], args)


@untraced
def _inference_with_autograd(q, k, v, *args):
    options = _inference_options(*args)
    if not needs_dispatcher(q, k, v):
        return eager_attend(q, k, v, None, options)
    return inference_autograd(torch.ops.heedful.inference.options, options, (q, k, v, *args))


def _inference_fake(q, k, v, causal=False):
    return _empty_out(q, k, v, _USUAL[causal])


def _inference_with_fake(q, k, v, *args):
    return _empty_out(q, k, v, _inference_options(*args))


def _empty_out(q, k, v, options: tuple):
    problem = describe(Operands(q, k, v), Options(*options))
    out_dtype = getattr(torch, problem.out_dtype)
    return q.new_empty((*q.shape[:-1], problem.head_dim_v), dtype=out_dtype)


@untraced
def _backward(dout, dlse, out, lse, *args):
    *args, bias_grad, kv_grad = args
    x, options = _split(tuple(args))
    call = _call(x, options, True, bias_grad)
    assert call.backwards is not None
    grads = call.backwards(x, out, lse, dout, dlse, kv_grad)
    dbias = x.q.new_empty(0)
    if x.bias is not None and grads.dbias is not None:
        dbias = bias_gradient(grads.dbias, x.bias.shape).contiguous()
    dsink = x.q.new_empty(0) if grads.dsink is None else grads.dsink
    dk, dv = (g.contiguous() if kv_grad else x.q.new_empty(0) for g in grads[1:3])
    return grads.dq.contiguous(), dk, dv, dbias, dsink


def _backward_fake(dout, dlse, out, lse, *args):
    x, (bias_grad, kv_grad) = Operands(*args[:_COUNT]), args[-2:]
    empty = x.q.new_empty
    return (
        empty(x.q.shape),
        *(empty(t.shape if kv_grad else 0, dtype=t.dtype) for t in (x.k, x.v)),
        empty(x.bias.shape, dtype=x.bias.dtype) if bias_grad else empty(0),
        empty(x.sink.shape, dtype=x.sink.dtype) if x.sink is not None else empty(0),
    )


def _second_backward(grad, shape, dtype):
    raise no_second_derivative()


def _second_backward_fake(grad, shape, dtype):
    return grad.new_empty(shape, dtype=dtype)


def _overload(name: str):
    """The operator that is defined as `name`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.heedful, packet), overload or "default")


def _autocasting(name: str, count: int, device_type: str):
    """An operator under autocast: its first `count` tensors in its dtype."""

    @untraced
    def cast(*args):
        with torch.autocast(device_type, enabled=False):
            return _overload(name)(*autocast(args[:count], device_type), *args[count:])

    return cast


LIBRARY.impl("attention_v2", _attention, "CompositeExplicitAutograd")
LIBRARY.impl("attention_v2_backward", _backward, "CompositeExplicitAutograd")
LIBRARY.impl("second_backward", _second_backward, "CompositeExplicitAutograd")
LIBRARY.impl("inference", _inference, "CompositeExplicitAutograd")
LIBRARY.impl("inference.options", _inference_with, "CompositeExplicitAutograd")
torch.library.register_fake("heedful::attention_v2", _attention_fake, lib=LIBRARY)
torch.library.register_fake("heedful::attention_v2_backward", _backward_fake, lib=LIBRARY)
torch.library.register_fake("heedful::second_backward", _second_backward_fake, lib=LIBRARY)
torch.library.register_fake("heedful::inference", _inference_fake, lib=LIBRARY)
torch.library.register_fake("heedful::inference.options", _inference_with_fake, lib=LIBRARY)
torch.library.register_vmap("heedful::attention_v2", attention_vmap, lib=LIBRARY)
torch.library.register_vmap("heedful::attention_v2_backward", backward_vmap, lib=LIBRARY)
LIBRARY.impl("attention_v2", partial(attention_autograd, _attention), "Autograd", with_keyset=True)
LIBRARY.impl(
    "attention_v2_backward", partial(backward_autograd, _backward), "Autograd", with_keyset=True
)
LIBRARY.impl("inference", _inference_autograd, "Autograd")
LIBRARY.impl("inference.options", _inference_with_autograd, "Autograd")
for _name in ("inference", "inference.options"):
    _rule = partial(inference_vmap, _overload(_name))
    torch.library.register_vmap(f"heedful::{_name}", _rule, lib=LIBRARY)
for _device in ("cpu", "cuda"):
    # q, k, v and the bias of the one; q, k, v of the others.
    for _name, _tensors in (("attention_v2", 4), ("inference", 3), ("inference.options", 3)):
        _cast = _autocasting(_name, _tensors, _device)
        LIBRARY.impl(_name, _cast, f"Autocast{_device.upper()}")
