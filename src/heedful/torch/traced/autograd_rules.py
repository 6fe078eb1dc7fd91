"""The operators at the dispatcher's Autograd key, which all differentiation passes: eager autograd,
torch.func at each of its levels, and what torch.compile makes of either.
torch.library.register_autograd would serve the first alone: its function refuses functorch, and an
operator without a rule gives zero gradients. So operators for the output alone have a rule, too:
their callers need not know whether the call is differentiated, which torch.compile cannot tell
while it traces a transform.
"""

import torch
from torch import Tensor

from heedful.core.call.arguments import Options, split
from heedful.core.call.operands import Operands
from heedful.torch.base.dispatch import transforms_active
from heedful.torch.operands.checks import check_constants
from heedful.torch.traced.private import (
    OneLevelFunction,
    below_autograd,
    has_tangent,
    is_plain,
    record,
    untraced,
    wants_gradients,
)


@untraced
def attention_autograd(run, keyset, *args):
    """The rule of heedful::attention_v10, which `run` computes."""
    return _differentiable(Attention, run, torch.ops.heedful.attention_v10.default, keyset, args)


@untraced
def backward_autograd(run, keyset, *args):
    """The rule of heedful::attention_v10_backward, which `run` computes."""
    op = torch.ops.heedful.attention_v10_backward.default
    return _differentiable(Backward, run, op, keyset, args)


def inference_autograd(op, options: Options, args: tuple):
    """The rule of an overload of heedful::inference_v10 under transforms and tracers. options:
    those of this call. args: all its arguments.
    """
    _refuse_tangents(args)
    if not wants_gradients(args):
        return below_autograd(op, args)
    return torch.ops.heedful.attention_v10.default(*Operands(*args[:3]), *options, True)[0]


def _differentiable(function: type[OneLevelFunction], run, op, keyset, args: tuple):
    plain = is_plain(keyset)
    if not plain:
        _refuse_tangents(args)
    if wants_gradients(args):
        return record(function, op, args, plain)
    return run(*args) if plain else below_autograd(op, args)


def _refuse_tangents(args) -> None:
    if has_tangent(args):
        raise NotImplementedError(
            "heedful's attention has no forward-mode derivative (torch.func.jvp, jacfwd, hessian,"
            " torch.autograd.forward_ad); reverse mode has grad, vjp and jacrev"
        )


class Attention(OneLevelFunction):
    """Attention at one level of differentiation."""

    @staticmethod
    def forward(ctx, below, *args):
        x, ctx.options, _ = split(args)
        check_constants(x)
        # The caller could not know of the level that wants gradients.
        out, lse, probs = below(*args[:-1], True)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(probs)
        ctx.save_for_backward(out, lse, *x)
        return out, lse, probs

    @staticmethod
    @untraced
    def backward(ctx, dout, dlse, dprobs):
        # The gradients of the options and of needs_grad.
        none = (None,) * (len(ctx.options) + 1)
        if dout is None and dlse is None:
            return None, *(None,) * len(Operands._fields), *none
        out, lse, *x = ctx.saved_tensors
        needs = dict(zip(Operands._fields, ctx.needs_input_grad[1:], strict=False))
        dout = torch.zeros_like(out) if dout is None else dout
        asked = needs["bias"], needs["rel_bias"], needs["k"] or needs["v"]
        dq, dk, dv, dbias, dsink, drel_bias = torch.ops.heedful.attention_v10_backward.default(
            dout, dlse, out, lse, *x, *ctx.options, *asked
        )
        grads = Operands(dq, dk, dv, bias=dbias, sink=dsink, rel_bias=drel_bias)
        wanted = (grad if needs[name] else None for name, grad in grads._asdict().items())
        return None, *wanted, *none


def no_second_derivative() -> RuntimeError:
    """The error for a second derivative."""
    return RuntimeError(
        "trying to differentiate twice a function that was marked with @once_differentiable:"
        " heedful's attention has no second derivative"
    )


class Backward(OneLevelFunction):
    """The gradients at one level of differentiation; they are not differentiable."""

    @staticmethod
    def forward(ctx, below, *args):
        ctx.shapes = [(a.shape, a.dtype) if isinstance(a, Tensor) else None for a in args]
        return below(*args)

    @staticmethod
    @untraced
    def backward(ctx, *grads):
        if transforms_active():
            raise no_second_derivative()
        # torch.compile traces the gradients of all outputs, wanted or not: this raises only when it
        # is computed.
        raising = torch.ops.heedful.second_backward.default
        wanted = (
            raising(grads[0], *facts) if needed else None
            for needed, facts in zip(ctx.needs_input_grad[1:], ctx.shapes, strict=True)
        )
        return None, *wanted
