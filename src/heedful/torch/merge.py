"""Partial attention results of one query over disjoint keys, put together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful.core.describe import FLOATS, check_shape
from heedful.torch.checks import check_dtype, check_tensor


def merge_attn_states(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention over all keys from attentions over parts of them (split KV, shared prefixes,
    rings): softmax weights of the parts are exp(lse - lse of the whole).

    Differentiable, twice too. Parts must be computed without the sink; it enters here, once.

    Args:
        outs: (parts, batch, seqlen, heads, head_dim) or (parts, tokens, heads, head_dim): float16,
            bfloat16 or float32; or a list of such parts.
        lses: float32 (parts, batch, heads, seqlen) or (parts, heads, tokens): natural log-sum-exp,
            -inf where a part has no key for a query; or a list of such parts.
        sink: float32 (heads,), or None.

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
    check_tensor("lses", lses, outs.device, like="outs")
    *lead, rows, heads, _ = outs.shape
    words = "(parts, batch, heads, seqlen)" if outs.dim() == 5 else "(parts, heads, tokens)"
    check_shape("lses", lses.shape, (*lead, heads, rows), words)
    if sink is not None:
        check_tensor("sink", sink, outs.device, like="outs")
        check_dtype("sink", sink, "float32")
        check_shape("sink", sink.shape, (heads,), "(heads,)")
    return merged(outs, lses, sink)


def merged(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As merge_attn_states, on checked stacks; computes in the dtype of lses."""
    # The maximum is a shift that cancels: no gradient flows through it.
    top = lses.detach().amax(0)
    if sink is not None:
        top = torch.maximum(top, sink.detach()[:, None])
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    if sink is not None:
        total = total + torch.exp(sink[:, None] - top)
    empty = total == 0
    # log and division see 1 where there is no key at all, so that no NaN enters the gradients.
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
