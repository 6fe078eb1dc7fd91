"""Attention over a prefix that all sequences share and over the cache of each after it, merged. A
float32 log-sum-exp far from 0 is not exact enough for the weights of two results. So on a GPU the
kernels also return what its rounding left (`rest`), and on a CPU maxima and sums are computed where
they are needed.
"""

from typing import Any

import torch
from torch import Tensor

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.far import far_lse
from heedful.core.call.arguments import CacheUpdate, Options, split
from heedful.core.call.describe_cache import attention_part, check_cache
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.torch.api.merge import DeviceMerge, merge_attn_states, merged
from heedful.torch.base.arrays import array_spec
from heedful.torch.base.device import device_spec
from heedful.torch.base.dispatch import has_shards, no_shards
from heedful.torch.base.forked import on_own_thread
from heedful.torch.eager.calls import CALLS, Call
from heedful.torch.eager.keys import tensor_keys
from heedful.torch.operands.cache_checks import cache_call
from heedful.torch.traced.batching import prefixed_vmap
from heedful.torch.traced.library import LIBRARY
from heedful.torch.traced.private import register_fake, untraced


def keeps_rest(q: Tensor) -> bool:
    """Whether a kernel merges results for these queries; it needs their `rest`."""
    return device_spec(q.device).vendor != "cpu" and q.numel() > 0


class Prefix:
    """The bound attention over a shared prefix, and its merge with the attention over the cache,
    whose results have a rest if `keeps_rest` says so. call: the attention over the prefix. merge:
    merges both results on a GPU; None on a CPU.
    """

    __slots__ = ("call", "merge")

    def __init__(
        self,
        q: Tensor,
        prefix: tuple[Tensor, Tensor],
        options: Options,
        problem: AttentionProblem,
        sink: Tensor | None,
        out: Tensor | None,
    ):
        """q: as attention gets it. problem, options: those of the whole call. Raises as Call."""
        dense = options._replace(kind="dense", causal=False, return_lse=True)
        self.merge, on_gpu = None, keeps_rest(q)
        self.call = Call(
            _operands(q, prefix), dense, (False, False, False), None, keeps_rest=on_gpu
        )
        if on_gpu:
            self.merge = _device_merge(problem, sink, out, q.device)

    def bind(self) -> None:
        """Compiles kernels that are not compiled yet, for a caller that writes something before
        this runs."""
        self.call.runner.bind()

    def merged(
        self, attention: Call, x: Operands, prefix, part, lse, sink, out
    ) -> tuple[Tensor, Tensor]:
        """out and lse of both together. x: the operands of the attention over the cache. part, lse:
        its results; on a GPU lse is a pair with its rest."""
        y, before = _operands(x.q, prefix), self.call
        sink = None if sink is None else sink.float()
        if not before.plain:
            y = before.operands(y, None)
        first, first_lse, _ = before.forward(y, None)
        if self.merge is None:
            far = far_lse(x.q.element_size())
            if _has_far_rows(first_lse, far) or _has_far_rows(lse, far):
                statistics: Any = (before.runner, y), (attention.runner, x)  # all of a CPU
                pair = [runner.statistics(operands) for runner, operands in statistics]
                return on_own_thread(_merged_by_statistics, first, part, *pair, sink, out)
            return on_own_thread(_merged, first, first_lse, part, lse, sink, out)
        (first_lse, first_rest), (lse, rest) = first_lse, lse
        tensors = {
            "partial_out": first.view(1, *part.shape),
            "partial_lse": _by_sequences(first_lse, part)[None],
            "partial_rest": first_rest,
            "apart_out": part,
            "apart_lse": lse,
            "apart_rest": rest,
        }
        if sink is not None:
            tensors["sink"] = sink.contiguous()
        return self.merge(tensors, out)


def _device_merge(
    problem: AttentionProblem, sink: Tensor | None, out: Tensor | None, device: torch.device
) -> DeviceMerge:
    """The merge of the results over the cache with those over the prefix. All are dense; for the
    prefix the batch was one sequence."""
    batch, rows, heads, _ = problem.out_shape
    lse = ArraySpec.contiguous(problem.lse_shape, "float32")
    of_prefix = ArraySpec((1, *problem.lse_shape), (0, rows, batch * rows, 1), "float32")
    # A kernel gets only the address of a rest.
    whole = ArraySpec.contiguous((1, heads, batch * rows), "float32")
    specs = {
        "partial_out": ArraySpec.contiguous((1, *problem.out_shape), problem.out_dtype),
        "partial_lse": of_prefix,
        "partial_rest": whole,
        "apart_out": ArraySpec.contiguous(problem.out_shape, problem.out_dtype),
        "apart_lse": lse,
        "apart_rest": lse,
    }
    if sink is not None:
        specs["sink"] = ArraySpec.contiguous((heads,), "float32")
    if out is not None:
        specs["out"] = array_spec(out)
    return DeviceMerge(specs, device)


def _operands(q: Tensor, prefix) -> Operands:
    """Every query of the batch, as one sequence, over the prefix."""
    k, v = (t if t.dim() == 4 else t[None] for t in prefix)
    return Operands(q.reshape(1, -1, *q.shape[2:]), k, v)


def _by_sequences(vector: Tensor, part: Tensor) -> Tensor:
    """A view by sequences of a vector with a number for each row of a batch that was one sequence.
    part: the batch's results."""
    batch, q_len, heads, _ = part.shape
    return vector.view(heads, batch, q_len).transpose(0, 1)


def _has_far_rows(lse: Tensor, far: float) -> bool:
    """Whether a row's log-sum-exp is so far from 0 that a merge by it would be inexact."""
    return bool(((lse.abs() >= far) & lse.isfinite()).any())


def _merged_by_statistics(first: Tensor, part: Tensor, of_first, of_part, sink, out):
    """As `_merged`, but by maxima and sums of the rows."""
    vectors = [_by_sequences(vector, part) for vector in of_first]
    maxima, sums = (torch.stack(pair) for pair in zip(vectors, of_part, strict=True))
    both = torch.stack([first.view(part.shape), part])
    whole, lse = merged(both, maxima, sink, sums)
    return whole if out is None else out.copy_(whole), lse


def _merged(first: Tensor, first_lse: Any, part: Tensor, lse: Any, sink, out):
    """out and lse merged from two results; for the first the batch was one sequence."""
    first_lse = _by_sequences(first_lse, part)
    whole, lse = merge_attn_states([first.view(part.shape), part], [first_lse, lse], sink)
    return whole if out is None else out.copy_(whole), lse


# The same as an operator, for tracers and transforms.


def prefixed(x: Operands, options: Options, prefix: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
    """out and lse of the attention over a cache that is not extended, and over a prefix before it,
    through the dispatcher. x: includes the sink."""
    if has_shards((*prefix, *x)):
        raise no_shards("flash_attn_with_kvcache")
    return torch.ops.heedful.prefixed_attention_v10.default(*prefix, *x, *options)


class Prefixed:
    """All that one kind of call of the operator needs each time."""

    __slots__ = ("_attention", "_prefix")

    def __init__(self, x: Operands, options: Options, prefix: tuple[Tensor, Tensor]):
        """Raises TypeError or ValueError for a call that cannot be."""
        update = CacheUpdate(shared_prefix=prefix)
        problem = check_cache(*cache_call(x, options, update, None))
        part, part_options = attention_part(x, options, update)
        self._attention = Call(
            part, part_options, (False, False, False), None, keeps_rest=keeps_rest(x.q)
        )
        self._prefix = Prefix(x.q, prefix, options, problem, x.sink, None)

    def __call__(self, x: Operands, prefix: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        attention, sink, x = self._attention, x.sink, x._replace(sink=None)
        if not attention.plain:
            x = attention.operands(x, None)
        part, lse, _ = attention.forward(x, None)
        return self._prefix.merged(attention, x, prefix, part, lse, sink, None)


def _plain(args: tuple) -> tuple[Operands, Options]:
    """The operands and options among the operator's arguments; tuples that it takes as lists are
    tuples again."""
    x, options, _ = split(args)
    window, origin = tuple(options.window_size), tuple(options.dropout_origin)
    return x, options._replace(window_size=window, dropout_origin=origin)


@untraced
def _prefixed(k, v, *args):
    x, options = _plain(args)
    key = ("prefixed", options, tensor_keys((k, v)), tensor_keys(x))
    call = CALLS.young.get(key) or CALLS.find(key)
    if call is None:
        call = Prefixed(x, options, (k, v))
        CALLS.put(key, call)
    out, lse = call(x, (k, v))
    return out.contiguous(), lse.contiguous()


def _prefixed_fake(k, v, *args):
    x, options = _plain(args)
    update = CacheUpdate(shared_prefix=(k, v))
    problem = check_cache(*cache_call(x, options, update, None))
    return (
        x.q.new_empty(problem.out_shape, dtype=getattr(torch, problem.out_dtype)),
        x.q.new_empty(problem.lse_shape, dtype=torch.float32),
    )


LIBRARY.impl("prefixed_attention_v10", _prefixed, "CompositeExplicitAutograd")
register_fake("prefixed_attention_v10", _prefixed_fake)
torch.library.register_vmap("heedful::prefixed_attention_v10", prefixed_vmap)
