"""Layers of a model whose tokens are spread over ranks: what runs inside of `with plan:`."""

from typing import Any

import torch
from torch import Tensor

from heedful.integrations.transformers.compact import Compact, is_compact, read
from heedful.integrations.transformers.paths import count
from heedful.integrations.transformers.patterns import Pattern

# Arguments of a layer that a plan has no part of.
_REFUSED = ("cu_seq_lens_q", "block_table", "position_bias", "output_attentions")


def mask_over_ranks(
    pattern: Pattern | str, padding: Tensor | None, tokens: int, device: torch.device | str
) -> Tensor:
    """A compact mask that says causal and window; the plan knows the documents. tokens: of this
    rank."""
    if isinstance(pattern, str):
        raise ValueError(f"a context-parallel plan does not serve {pattern}")
    if padding is not None:
        raise ValueError("attention_mask must be None inside of a plan, whose documents it hides")
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    used = ends[1:]
    return Compact(ends, ends, used, used, pattern.causal, pattern.left).as_mask()


def attention_over_ranks(
    plan: Any,
    rows: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    options: dict[str, Any],
    others: dict[str, Any],
) -> Tensor:
    """rows: q, k and v, (batch, tokens of this rank, heads, head_dim); options: of
    `flash_attn_func`. A batch of one row may hold any documents."""
    from heedful.distributed import attention

    for name in _REFUSED:
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name} must be None inside of a plan")
    if mask is not None:
        if not is_compact(mask):
            raise ValueError("attention_mask must be None inside of a plan, whose documents it has")
        lengths = read(mask, rows[0].shape[0], rows[0].shape[1], rows[1].shape[1])
        options = {**options, "causal": lengths.causal, "window_size": lengths.window}
    count("over ranks")
    is_row = rows[0].shape[0] == 1
    q, k, v = (x[0] for x in rows) if is_row else rows
    out = attention(q, k, v, plan, dropout, **options)
    return out[None] if is_row else out
