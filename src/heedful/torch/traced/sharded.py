"""DTensors: each rank of a mesh computes its part of batch and heads, and nothing is sent. Dims of
the mesh spread q, k and v evenly over the batch or over the heads, KV heads with their query heads,
or replicate them. Other operands are spread as q is. Other placements are refused by name, since to
gather would cost more than the call. Only incoming gradients are redistributed, to the placements
of their results. With dropout a rank draws its part of the whole's mask, from its first batch entry
and head.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from heedful.core.call.arguments import Options, argument_name, split
from heedful.core.call.describe import check
from heedful.core.call.operands import Operands
from heedful.torch.base.arrays import abstract_spec
from heedful.torch.base.dispatch import no_shards
from heedful.torch.operands.checks import attention_call
from heedful.torch.traced.private import are_in_order

_BATCH, _HEADS, _WHOLE = "batch", "heads", ""
# The axes of the dims of arrays, from the last dim: b batch, h heads, - anything else.
_OF_ANY = {
    "bias": "bh--",
    "rel_bias": "h-",
    "alibi_slopes": "bh",
    "sink": "h",
    "q_descale": "bh",
    "k_descale": "bh",
    "v_descale": "bh",
    "probs": "bh--",
    "key_ranges": "bh--",
    "block_rows": "bh--",
    "block_keys": "bh--",
}
_DENSE = {"q": "b-h-", "k": "b-h-", "v": "b-h-", "out": "b-h-", "lse": "bh-", **_OF_ANY}
_DENSE |= {"seqused_q": "b", "seqused_k": "b", "leftpad_k": "b", "q_offsets": "b"}
_DENSE["origins"] = "b-"
# Tokens of all sequences, or pages of keys.
_PACKED = {"q": "-h-", "k": "--h-", "v": "--h-", "out": "-h-", "lse": "h-", **_OF_ANY}
# These are broadcast where a dim has one element.
_BROADCAST = ("bias", "key_ranges", "block_rows", "block_keys", "alibi_slopes")
_BROADCAST += ("q_descale", "k_descale", "v_descale")
_LETTERS = {"b": _BATCH, "h": _HEADS, "-": _WHOLE}
# Every rank needs all of these: they may be plain tensors, equal on all ranks.
_SAME = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "q_offsets", "block_table")
_SAME += ("origins", "seed", "block_bits")


def check_shards(options: Options, out: Any, seed: Any) -> None:
    """ValueError for arguments that calls of DTensors cannot have."""
    if out is not None:
        raise ValueError("out must be None where q is a DTensor, got a tensor")
    if options.dropout_p > 0 and seed is None:
        raise ValueError(
            "dropout_seed must be given where q is a DTensor, as every rank has to draw from the"
            " same, got None"
        )


class Spread:
    """How the arrays of one call are placed on a mesh."""

    def __init__(self, x: Operands, options: Options, grads: tuple[bool, bool, bool]):
        """grads: of AttentionCall. Raises TypeError or ValueError, as for tensors of one device,
        and for placements that are not taken."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        self._q = x.q
        self._tensor, self._shard, self._same = DTensor, Shard, Replicate()
        self._kind, self._labels = options.kind, _DENSE if options.kind == "dense" else _PACKED
        if options.kind == "kvcache":
            raise no_shards("flash_attn_with_kvcache")
        for name in "qkv":
            self._check_type(name, getattr(x, name))
        self.problem = check(attention_call(x, options, grads, spec=abstract_spec))
        self.mesh, self._place = x.q.device_mesh, x.q.device_mesh.get_coordinate()
        if self._place is None:
            raise ValueError(f"q must lie on a mesh that this rank is part of, got {self.mesh}")
        self._axes = [self._axis(x.q, index) for index in range(self.mesh.ndim)]
        self._check_even(_BATCH, self.problem.batch, "batch entries")
        self._check_even(_HEADS, self.problem.heads_k, "KV heads")

    def _check_type(self, name: str, tensor: Any) -> None:
        if not isinstance(tensor, self._tensor):
            raise TypeError(
                f"{name} must be a DTensor, as others of this call are, got a"
                f" {type(tensor).__name__}"
            )

    def _axis(self, q: Any, index: int) -> str:
        """The axis that a dim of the mesh spreads."""
        place, labels = q.placements[index], self.labels("q", q.shape)
        if type(place) is self._shard and labels[place.dim % q.dim()]:
            return labels[place.dim % q.dim()]
        if place != self._same and self.mesh.size(index) > 1:
            taken = [f"Shard({i}) ({label})" for i, label in enumerate(labels) if label]
            raise ValueError(
                f"q must be placed on each dim of its mesh by {', '.join(taken)} or Replicate(),"
                f" got placements {q.placements}"
            )
        return _WHOLE

    def _check_even(self, label: str, count: int, words: str) -> None:
        parts = self._parts(label)
        if count % parts:
            raise ValueError(
                f"k must have a multiple of {parts} {words}, as so many ranks share them, got"
                f" {count}"
            )

    def _parts(self, label: str) -> int:
        sizes = [self.mesh.size(i) for i, axis in enumerate(self._axes) if axis == label]
        return prod(sizes)

    def labels(self, name: str, shape: Sequence[int]) -> list[str]:
        """The axis of each dim of an array."""
        letters = self._labels.get(name, "-")[-len(shape) :] if shape else ""
        labels = [_LETTERS[letter] for letter in letters.rjust(len(shape), "-")]
        if name in _BROADCAST:
            return [_WHOLE if n == 1 else label for n, label in zip(shape, labels, strict=True)]
        return labels

    def placements(self, name: str, shape: Sequence[int]) -> tuple:
        """The placements of an array of the call."""
        labels = self.labels(name, shape)
        return tuple(
            self._shard(labels.index(axis)) if axis and axis in labels else self._same
            for axis in self._axes
        )

    def local(self, name: str, tensor: Any) -> Any:
        """This rank's part of an operand, or of a result. Raises TypeError or ValueError."""
        is_same = name in _SAME and name not in self._labels
        if tensor is None or (is_same and not isinstance(tensor, self._tensor)):
            return tensor
        public = argument_name(name, self._kind)
        self._check_type(public, tensor)
        wanted = self.placements(name, tensor.shape)
        sizes = [self.mesh.size(index) for index in range(self.mesh.ndim)]
        alike = zip(tensor.placements, wanted, sizes, strict=True)
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"{public} must lie on q's mesh, {self.mesh}, got {tensor.device_mesh}"
            )
        if not all([size == 1 or part == place for part, place, size in alike]):
            raise ValueError(
                f"{public} must have placements {wanted} where q has {self._q.placements}, got"
                f" {tensor.placements}"
            )
        if not are_in_order(tensor):
            raise ValueError(
                f"{public} must be split by the dims of its mesh in their order, got a DTensor that"
                " is split in another"
            )
        part = tensor.to_local()
        shape = list(tensor.shape)
        for place, size in zip(wanted, sizes, strict=True):
            if place != self._same:
                shape[place.dim] //= size
        if list(part.shape) != shape:
            raise ValueError(
                f"{public} must have the same share on each rank, {tuple(shape)}, got"
                f" {tuple(part.shape)} on this one"
            )
        return part

    def operands(self, x: Operands) -> Operands:
        """This rank's part of a call's operands."""
        parts = Operands._make([self.local(*item) for item in x._asdict().items()])
        if x.origins is None:
            return parts
        places = parts.origins.clone()
        places[:, 1] += self._first(_HEADS, self.problem.heads_q)
        return parts._replace(origins=places)

    def options(self, options: Options) -> Options:
        """The options for this rank's part."""
        if options.dropout_p == 0 or self.problem.origins:
            return options
        batch, head, *rest = options.dropout_origin
        batch += self._first(_BATCH, self.problem.batch)
        head += self._first(_HEADS, self.problem.heads_q)
        return options._replace(dropout_origin=(batch, head, *rest))

    def _first(self, label: str, count: int) -> int:
        """The index of this rank's first batch entry or head, as the label says."""
        place = 0
        for index, axis in enumerate(self._axes):
            if axis == label:
                place = place * self.mesh.size(index) + self._place[index]
        return place * (count // self._parts(label))

    def cotangent(self, result: str, name: str, tensor: Any) -> Any:
        """This rank's part of a result's incoming gradient, whatever its placement."""
        if tensor is None:
            return None
        self._check_type(name, tensor)
        places = self.placements(result, tensor.shape)
        return tensor.redistribute(self.mesh, places).to_local()

    def whole(self, name: str, local: Tensor, shape: Sequence[int], is_sum: bool = False) -> Any:
        """The result of which each rank has a part. is_sum: it is a sum over the ranks over which
        it is not spread, as the gradient of a replicated tensor."""
        from torch.distributed.tensor import Partial

        places = list(self.placements(name, shape))
        for index, axis in enumerate(self._axes):
            if is_sum and axis and places[index] == self._same:
                places[index] = Partial()
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        size = torch.Size(shape)
        return self._tensor.from_local(
            local, self.mesh, places, run_check=False, shape=size, stride=tuple(strides)
        )

    def empty(self, local: Tensor) -> Any:
        """An empty result, in place of one that was not asked for."""
        return self._tensor.from_local(
            local, self.mesh, [self._same] * self.mesh.ndim, run_check=False
        )


def attend(op, args: tuple):
    """heedful::attention_v10 of DTensors."""
    x, options, (needs_grad,) = split(args)
    spread = Spread(x, options, (needs_grad, False, False))
    problem = spread.problem
    parts = spread.operands(x), spread.options(options)
    out, lse, more = op(*parts[0], *parts[1], needs_grad)
    if problem.max_scores:
        more = spread.whole("lse", more, problem.lse_shape)
    elif problem.return_probs:
        more = spread.whole("probs", more, problem.probs_shape)
    else:
        more = spread.empty(more)
    whole_out = spread.whole("out", out, problem.out_shape)
    return whole_out, spread.whole("lse", lse, problem.lse_shape), more


def infer(op, x: Operands, options: Options, rest: tuple):
    """An overload of heedful::inference_v10, of q, k, v and the rest, of DTensors."""
    spread = Spread(x, options, (False, False, False))
    out = op(*spread.operands(x)[:3], *rest)
    return spread.whole("out", out, spread.problem.out_shape)


def differentiate(op, args: tuple):
    """heedful::attention_v10_backward of DTensors."""
    dout, dlse, out, lse, *rest = args
    x, options, (bias_grad, rel_bias_grad, kv_grad) = split(tuple(rest))
    spread = Spread(x, options, (True, bias_grad, rel_bias_grad))
    grads = op(
        spread.cotangent("out", "dout", dout),
        spread.cotangent("lse", "dlse", dlse),
        spread.local("out", out),
        spread.local("lse", lse),
        *spread.operands(x),
        *spread.options(options),
        bias_grad,
        rel_bias_grad,
        kv_grad,
    )
    wanted = {"q": True, "k": kv_grad, "v": kv_grad, "bias": bias_grad}
    wanted |= {"sink": x.sink is not None, "rel_bias": rel_bias_grad}
    return tuple(
        spread.whole(name, grad, getattr(x, name).shape, is_sum=True)
        if wanted[name]
        else spread.empty(grad)
        for name, grad in zip(wanted, grads, strict=True)
    )


def twice(op, grad, shape, dtype):
    """heedful::second_backward of a DTensor, which raises when it is computed."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = grad.device_mesh
    made = op(grad.to_local(), shape, dtype)
    return DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)


def take_shards(rules: dict) -> None:
    """Makes torch call these functions (op, args) for operators with a DTensor among their
    arguments."""
    from torch.distributed.tensor import DTensor

    for op, rule in rules.items():
        torch.library.register_torch_dispatch(op, DTensor, _local_rule(rule))


def _local_rule(rule):
    def dispatched(_, op, types, args=(), kwargs=None):
        # Autograd has recorded the call above this level.
        with torch.no_grad():
            return rule(op, args)

    return dispatched
