"""torch.func.vmap over the operators: a mapped dim is merged into the batch if results do not
depend on an entry's place there; else its elements run one by one."""

import torch
from torch import Tensor

from heedful.core.call.arguments import Options, split
from heedful.core.call.batching import joins
from heedful.core.call.operands import Operands
from heedful.torch.traced.private import untraced


@untraced
def attention_vmap(info, in_dims, *args):
    """The rule of heedful::attention_v10."""
    x, options, _ = split(args)
    op = torch.ops.heedful.attention_v10.default
    if not _joins(x, Operands._make(in_dims[: len(x)]), options):
        return _one_by_one(op, info.batch_size, in_dims, args)
    folded = [_fold(t, dim, info.batch_size) for t, dim in zip(x[:3], in_dims, strict=False)]
    out, lse, more = op(*folded, *args[3:])
    sizes = info.batch_size, _batch(x.q, in_dims[0])
    results = out.unflatten(0, sizes), lse.unflatten(0, sizes)
    if not options.return_max_logits:
        return (*results, more), (0, 0, None)
    return (*results, more.unflatten(0, sizes)), (0, 0, 0)


@untraced
def prefixed_vmap(info, in_dims, *args):
    """The rule of heedful::prefixed_attention_v10. Its calls are over caches, which do not join."""
    op = torch.ops.heedful.prefixed_attention_v10.default
    return _one_by_one(op, info.batch_size, in_dims, args)


@untraced
def inference_vmap(op, info, in_dims, *args):
    """The rule of an overload of heedful::inference_v10, whose results do not depend on an entry's
    place in the batch."""
    folded = [_fold(t, dim, info.batch_size) for t, dim in zip(args[:3], in_dims, strict=False)]
    sizes = info.batch_size, _batch(args[0], in_dims[0])
    return op(*folded, *args[3:]).unflatten(0, sizes), 0


@untraced
def backward_vmap(info, in_dims, *args):
    """The rule of heedful::attention_v10_backward."""
    x, options, (bias_grad, rel_bias_grad, _) = split(args[4:])
    op = torch.ops.heedful.attention_v10_backward.default
    size = info.batch_size
    # The gradient of a sink or a bias sums over the batch, which must not be merged with another's.
    alone = x.sink is not None or rel_bias_grad or bias_grad
    if alone or not _joins(x, Operands._make(in_dims[4 : 4 + len(x)]), options):
        return _one_by_one(op, size, in_dims, args)
    folded = [
        t if t is None else _fold(t, dim, size) for t, dim in zip(args[:7], in_dims, strict=False)
    ]
    dq, dk, dv, *others = op(*folded, *args[7:])
    sizes = size, _batch(x.q, in_dims[4])
    grads = (grad.unflatten(0, sizes) for grad in (dq, dk, dv))
    return (*grads, *others), (0, 0, 0, *(None,) * len(others))


@untraced
def seed_vmap(info, in_dims, seed):
    """The rule of heedful::kept_seed."""
    return torch.ops.heedful.kept_seed.default(seed), in_dims[0]


def _joins(x: Operands, dims: Operands, options: Options) -> bool:
    """Whether the mapped dim may be merged into the batch. dims: its index in each argument, None
    if it is not mapped."""
    shapes = [
        None if t is None else tuple(n for i, n in enumerate(t.shape) if i != d)
        for t, d in zip(x, dims, strict=True)
    ]
    return joins(Operands(*shapes), [d is not None for d in dims], options)


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """(batch, ...) with a mapped dim somewhere, or without one -> (size * batch, ...)."""
    tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten(0, 1)


def _batch(tensor: Tensor, dim: int | None) -> int:
    """The first size of it without the mapped dim."""
    return tensor.shape[1 if dim == 0 else 0]


def _one_by_one(op, size: int, in_dims, args):
    """Each element of the mapped dim on its own, stacked."""
    results = [op(*_element(args, in_dims, index)) for index in range(size)]
    if not size:
        # A call with one element of zeros gives the shapes of a call with none.
        one = [
            t.new_zeros((1, *t.shape[:dim], *t.shape[dim + 1 :])) if isinstance(dim, int) else t
            for t, dim in zip(args, in_dims, strict=True)
        ]
        element = op(*_element(one, [0 if isinstance(dim, int) else None for dim in in_dims], 0))
        return tuple(part.new_empty((0, *part.shape)) for part in element), (0,) * len(element)
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _element(args, in_dims, index: int):
    """The arguments of one element of the mapped dim."""
    return (
        arg.select(dim, index) if isinstance(dim, int) else arg
        for arg, dim in zip(args, in_dims, strict=True)
    )
