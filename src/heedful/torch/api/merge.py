"""Merges partial attention results over disjoint keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful.core.base import settings
from heedful.core.base.arrays import ArraySpec
from heedful.core.call.describe import FLOATS, check_shape
from heedful.launch.bind import portable
from heedful.launch.spec import Program
from heedful.torch.base.arrays import array_spec
from heedful.torch.base.device import device_spec
from heedful.torch.base.dispatch import are_bare, needs_dispatcher
from heedful.torch.base.forked import check_device
from heedful.torch.eager.execute import Case
from heedful.torch.eager.keys import tensor_keys
from heedful.torch.eager.kinds import Kinds
from heedful.torch.operands.adapt import dense_rows
from heedful.torch.operands.checks import check_dtype, check_tensor
from heedful.torch.traced.private import wants_gradients


def merge_attn_states(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention over all keys from attentions over parts of them (split keys, shared prefixes,
    ring attention): a part's weight is exp(lse of the part - lse of the whole). Twice
    differentiable. Parts must be computed without the sink; it enters here, once.

    The rounding of an lse to float32 changes it by up to 2^-24 |lse|. So out is off by up to
    tanh(2^-25 |lse|) of the distance between two parts' outputs, for the largest |lse| of a query:
    3e-6 at 100, 3e-4 at 1e4, 3 % at 1e6; from 1e8 on the weights of the parts are arbitrary. lse is
    off by up to 2^-23 |lse|. One call over all keys, with any num_splits, does not have this error.

    Args:
        outs: (parts, batch, seqlen, heads, head_dim) or (parts, tokens, heads, head_dim): float16,
            bfloat16 or float32; or a list of such parts.
        lses: float32 (parts, batch, heads, seqlen) or (parts, heads, tokens): natural log-sum-exp,
            -inf, or +inf as FlashAttention-2 has it, where a part has no key for a query; or a list
            of such parts.
        sink: float (heads,), or None.

    Returns:
        out, one part's shape and dtype, and lse, float32. A query without any key gives 0 and -inf.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashAttention's split combine; the state merge of FlashInfer's cascade.
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    check_dtype("outs", outs, *FLOATS)
    check_dtype("lses", lses, "float32")
    if outs.dim() not in (4, 5):
        raise ValueError(
            "outs must be (parts, batch, seqlen, heads, head_dim) or (parts, tokens, heads,"
            f" head_dim), got shape {tuple(outs.shape)}"
        )
    if outs.shape[0] < 1:
        raise ValueError("outs must hold at least one part, got 0")
    check_tensor("lses", lses, outs.device, peer="outs")
    *lead, rows, heads, _ = outs.shape
    words = "(parts, batch, heads, seqlen)" if outs.dim() == 5 else "(parts, heads, tokens)"
    check_shape("lses", lses.shape, (*lead, heads, rows), words)
    if sink is not None:
        check_tensor("sink", sink, outs.device, peer="outs")
        check_dtype("sink", sink, *FLOATS)
        check_shape("sink", sink.shape, (heads,), "(heads,)")
        sink = sink.float()
    tensors = (outs, lses) if sink is None else (outs, lses, sink)
    if (
        needs_dispatcher(outs, lses, tensors[-1])
        or wants_gradients(tensors)
        or not outs.numel()
        or device_spec(outs.device).vendor == "cpu"
    ):
        return merged(outs, lses, sink)
    key = tensor_keys(tensors)
    merge = MERGES.get(key)
    if merge is None:
        if not are_bare(zip(("outs", "lses", "sink"), tensors, strict=False)):
            return merged(outs, lses, sink)
        specs = {name: array_spec(tensor) for name, tensor in _stacks(outs, lses, sink).items()}
        merge = MERGES.of(key, lambda: DeviceMerge(specs, outs.device))
    return merge(_stacks(outs, lses, sink))


# The merge of one kind of stacks.
MERGES = settings.forgotten(Kinds())


def _stacks(outs: Tensor, lses: Tensor, sink: Tensor | None) -> dict[str, Tensor]:
    """The stacked arguments of the GPU's kernel."""
    tensors = {"partial_out": dense_rows(outs), "partial_lse": dense_rows(lses)}
    if sink is not None:
        tensors["sink"] = sink.contiguous()
    return tensors


class DeviceMerge:
    """As `merged`, for arrays of one kind on one GPU; compiles when it is made. specs: partial_out
    and partial_lse are stacks. apart_out and apart_lse, if they are there, are one more part; sink
    and out are optional, too.
    """

    def __init__(self, specs: dict[str, ArraySpec], device: torch.device):
        check_device(device)
        _, *shape = specs["partial_out"].shape
        _, *lse_shape = specs["partial_lse"].shape
        made = {"out": ArraySpec.contiguous(tuple(shape), specs["partial_out"].dtype)}
        made["lse"] = ArraySpec.contiguous(tuple(lse_shape), "float32")
        if "out" in specs:
            del made["out"]
        program, self._names = Program((portable.combine_call(specs | made),)), [*specs]
        self._run = Case(program, device_spec(device).arch, device, specs, made).alone()

    def __call__(
        self, tensors: dict[str, Tensor], out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """tensors: by the names of `specs`, all but `out`, which is made if it is None."""
        arrays = tensors if out is None else {**tensors, "out": out}
        made = self._run([arrays[name].data_ptr() for name in self._names])
        return made[0] if out is None else out, made[-1]


def merged(
    outs: Tensor, lses: Tensor, sink: Tensor | None = None, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As merge_attn_states, on checked stacks; computes in the dtype of lses. If `sums` is passed,
    `lses` are the parts' maxima, and `sums`, with the same shape, their sums of exp(score -
    maximum)."""
    lses = torch.where(lses == torch.inf, -torch.inf, lses)
    # The maximum cancels: no gradient flows through it.
    top = lses.detach().amax(0)
    if sink is not None:
        top = torch.maximum(top, sink.detach()[:, None])
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(lses - top)
    if sums is not None:
        weights = weights * sums
    total = weights.sum(0)
    if sink is not None:
        total = total + torch.exp(sink[:, None] - top)
    empty = total == 0
    # log and division get 1 where there is no key, so that no NaN enters the gradients.
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, top + torch.log(total))
    share = (weights / total).transpose(-1, -2)[..., None]
    out = (share * outs.to(lses.dtype)).sum(0)
    return out.to(outs.dtype), lse


def _stacked(name: str, parts) -> Tensor:
    if isinstance(parts, (list, tuple)):
        for index, part in enumerate(parts):
            check_tensor(f"{name}[{index}]", part)
            if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
                raise ValueError(
                    f"{name} must hold parts of one shape and dtype, {tuple(parts[0].shape)}"
                    f" {parts[0].dtype}, got {tuple(part.shape)} {part.dtype}"
                )
        if not parts:
            raise ValueError(f"{name} must hold at least one part, got none")
        return torch.stack(tuple(parts))
    check_tensor(name, parts)
    return parts
