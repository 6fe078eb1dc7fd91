"""Between padded batches and packed sequences: what code that was written for
`flash_attn.bert_padding` imports, with the same signatures and results.

    x, indices, cu_seqlens, longest, _ = unpad_input(hidden_states, attention_mask)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    padded = pad_input(out, indices, batch, seqlen)

Gradients go through all three. Shapes: (batch, seqlen, ...) padded, (tokens, ...) packed.
"""

import torch
from torch import Tensor

from heedful.core.base.numbers import whole
from heedful.torch.operands.checks import check_tensor

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that a mask keeps, one sequence after the other.

    Reads the masks on the host, which waits for their device.

    Args:
        hidden_states: (batch, seqlen, ...), of any dtype; differentiable.
        attention_mask: (batch, seqlen), bool or integers; not 0 keeps a token, wherever padding is.
        unused_mask: the same; not 0 is a token that has room but is not used.

    Returns:
        hidden_states: (tokens, ...), those of either mask.
        indices: int64 (tokens,), where each was among all batch * seqlen.
        cu_seqlens: int32 (batch + 1,), where sequences begin, and the last ends.
        max_seqlen: int, tokens of the longest sequence.
        seqused: int32 (batch,), tokens that `attention_mask` keeps in each sequence.

    Raises:
        TypeError, ValueError: an argument is no such tensor.
    """
    check_tensor("hidden_states", hidden_states)
    if hidden_states.dim() < 2:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states must be (batch, seqlen, ...), got shape {shape}")
    used = kept = _mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        kept = used | _mask("unused_mask", unused_mask, hidden_states)
    lengths = kept.sum(1, dtype=torch.int32)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    indices = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if len(lengths) else 0
    packed = hidden_states.flatten(0, 1).index_select(0, indices)
    return packed, indices, cu_seqlens, longest, used.sum(1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens back in a padded batch, zeros elsewhere.

    Args:
        hidden_states: (tokens, ...); differentiable.
        indices: int64 (tokens,), as `unpad_input` returns them.
        batch, seqlen: of the result.

    Returns:
        (batch, seqlen, ...).

    Raises:
        TypeError, ValueError: an argument is no such tensor or number; on a CPU also where an index
            lies outside of the batch.
    """
    batch, seqlen = whole("batch", batch), whole("seqlen", seqlen)
    for name, value in (("batch", batch), ("seqlen", seqlen)):
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}")
    check_tensor("hidden_states", hidden_states)
    _check_indices(indices, hidden_states, batch * seqlen)
    if len(indices) != len(hidden_states):
        count = len(hidden_states)
        raise ValueError(f"indices must be one a token, {count}, got {len(indices)}")
    rows = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded = rows.index_copy(0, indices.long(), hidden_states)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of these numbers; gradients of a row that is taken twice add up.

    Args:
        input: (rows, ...); differentiable.
        indices: int64 or int32 (tokens,).

    Returns:
        (tokens, ...).

    Raises:
        TypeError, ValueError: an argument is no such tensor; on a CPU also where there is no such
            row.
    """
    check_tensor("input", input)
    if not input.dim():
        raise ValueError("input must be (rows, ...), got shape ()")
    _check_indices(indices, input, len(input))
    return input.index_select(0, indices)


def _mask(name: str, mask: Tensor, hidden_states: Tensor) -> Tensor:
    """Where a mask keeps tokens, as bool."""
    check_tensor(name, mask, hidden_states.device, "hidden_states")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name} must be bool or of integers, got {mask.dtype}")
    if mask.shape != hidden_states.shape[:2]:
        wanted, got = tuple(hidden_states.shape[:2]), tuple(mask.shape)
        raise ValueError(f"{name} must have shape (batch, seqlen) = {wanted}, got {got}")
    return mask != 0


def _check_indices(indices: Tensor, tensor: Tensor, rows: int) -> None:
    check_tensor("indices", indices, tensor.device, "the rows")
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices must be int64 or int32, got {indices.dtype}")
    if indices.dim() != 1:
        raise ValueError(f"indices must be (tokens,), got shape {tuple(indices.shape)}")
    if indices.device.type == "cpu" and indices.numel():
        least, most = map(int, torch.aminmax(indices))
        if least < 0 or most >= rows:
            raise ValueError(f"indices must be within 0 and {rows - 1}, got {least} to {most}")
