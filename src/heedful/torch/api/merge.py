"""Merges partial attention results over disjoint keys."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.core.base import settings
from heedful.core.base.arrays import ArraySpec
from heedful.core.call.describe import FLOATS, check_last_dim, check_shape, check_writable
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
from heedful.torch.operands.apart import Apart
from heedful.torch.operands.checks import check_dtype, check_tensor
from heedful.torch.operands.plain import plain_int
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


def merge_into(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    *,
    begin: int = 0,
) -> None:
    """Merges the attention over other keys into `out` and `lse`, in place: running sums in float32,
    as a ring has them, whose parts may have fewer rows. `merge_attn_states` says what a merge is,
    and how exact; as each merge rounds lse once more, n of them err by up to n times as much. A row
    that saw no key in a part, with an lse of -inf (or +inf, as FlashAttention-2 has it), weighs
    nothing there, whatever its output holds.

    Args:
        out: float32 (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), with a
            contiguous last dim: a view of other rows of a larger tensor will do.
        lse: float32 (batch, heads, seqlen) or (heads, tokens), natural, likewise.
        part: (batch, rows, heads, head_dim) or (rows, heads, head_dim), float16, bfloat16 or
            float32: attention of `rows` consecutive queries.
        part_lse: float32 (batch, heads, rows) or (heads, rows). Neither lies in rows that are
            written.
        begin: the row of out, and of lse, that is the first of the part's.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    begin, count = _check_into(out, lse, part, part_lse, begin)
    sums = out.narrow(-3, begin, count), lse.narrow(-1, begin, count)
    tensors = dict(zip(_INTO, (*sums, part, part_lse), strict=True))
    Apart(tensors, _INTO[:2]).check([tensor.data_ptr() for tensor in tensors.values()])
    if not part.numel():
        return
    if (
        needs_dispatcher(out, part, lse)
        or not are_bare(tensors.items())
        or device_spec(out.device).vendor == "cpu"
    ):
        _merge_into(*sums, part, part_lse)
        return
    arrays = (*sums, dense_rows(part), part_lse.contiguous())
    specs: dict[str, ArraySpec] = dict(zip(_INTO, map(array_spec, arrays), strict=True))
    run = INTO.of(tensor_keys(arrays), lambda: DeviceMergeInto(specs, out.device))
    run(arrays)


def _check_into(out, lse, part, part_lse, begin: Any) -> tuple[int, int]:
    """The first row and the number of rows of the part of `merge_into`. Raises as it does."""
    check_tensor("out", out)
    check_dtype("out", out, "float32")
    for name, tensor in (("lse", lse), ("part", part), ("part_lse", part_lse)):
        check_tensor(name, tensor, out.device, peer="out")
        check_dtype(name, tensor, *(FLOATS if name == "part" else ("float32",)))
    if out.dim() not in (3, 4):
        raise ValueError(
            "out must be (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), got shape"
            f" {tuple(out.shape)}"
        )
    *lead, rows, heads, dim = out.shape
    words = ("(batch, heads, {})" if lead else "(heads, {})").format
    check_shape("lse", lse.shape, (*lead, heads, rows), words("seqlen"))
    count = part.shape[-3] if part.dim() == out.dim() else 0
    whole = "(batch, rows, heads, head_dim)" if lead else "(rows, heads, head_dim)"
    check_shape("part", part.shape, (*lead, count, heads, dim), f"{whole} of out")
    check_shape("part_lse", part_lse.shape, (*lead, heads, count), words("rows"))
    begin = plain_int("begin", begin)
    if not 0 <= begin <= rows - count:
        raise ValueError(f"begin must be 0 to {rows - count}, as {count} rows come, got {begin}")
    for name, tensor in (("out", out), ("lse", lse)):
        check_last_dim(name, array_spec(tensor))
        check_writable(name, array_spec(tensor))
    if wants_gradients((out, lse, part, part_lse)):
        raise ValueError(
            "part must not require a gradient, as out is written in place (merge_attn_states has"
            " gradients), got tensors of which one does"
        )
    return begin, count


def _merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merge_into` of checked tensors with as many rows, by torch's operations."""
    lse.masked_fill_(lse == torch.inf, -torch.inf)
    other = part_lse.masked_fill(part_lse == torch.inf, -torch.inf)
    # Shares of the two add up to 1, however lse was rounded: an error of lse moves out only by that
    # part of the distance between the two outputs. A row without keys has a share of 0.
    pairs = (lse - other, lse), (other - lse, other)
    old, new = (
        torch.sigmoid(x).masked_fill_(of == -torch.inf, 0.0).mT[..., None] for x, of in pairs
    )
    # A row without a share may hold anything, even NaN.
    out.mul_(old).masked_fill_(old == 0, 0.0)
    out.addcmul_(part.masked_fill(new == 0, 0.0), new)
    torch.logaddexp(lse, other, out=lse)


# The arrays of a merge in place, and the merge of one kind of them.
_INTO: tuple[str, ...] = ("out", "lse", "part", "part_lse")
INTO = settings.forgotten(Kinds())


class DeviceMergeInto:
    """`_merge_into` by one kernel, for arrays of one kind on one GPU; compiles when it is made."""

    def __init__(self, specs: dict[str, ArraySpec], device: torch.device):
        check_device(device)
        program = Program((portable.merge_into_call(specs),))
        self._run = Case(program, device_spec(device).arch, device, specs, {}).alone()

    def __call__(self, arrays: tuple[Tensor, ...]) -> None:
        self._run([tensor.data_ptr() for tensor in arrays])


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
