"""The weights of attention in plain PyTorch: no kernel stores them."""

import torch
from torch import Tensor


def attention_weights(
    q: Tensor, k: Tensor, bias: Tensor | None, options: dict, is_masked: bool
) -> Tensor:
    """The probabilities, (batch, heads, q_length, k_length) in q's dtype.

    Args:
        q: (batch, q_length, heads, head_dim). k: (batch, k_length, heads_k, head_dim).
        bias: what is added to the scores, or bool (True = visible): a mask, positions, or both.
        options: softmax_scale, causal, window_size, softcap and sink of the call.
        is_masked: whether the bias includes a mask, which replaces causal and window_size.
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scale = q.shape[-1] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * scale
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, float("-inf"))
    elif bias is not None:
        scores = scores + bias
    if not is_masked:
        sees = _sees(q.shape[1], k.shape[1], options, q.device)
        scores = scores.masked_fill(~sees, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    if options["sink"] is not None:
        lse = torch.logaddexp(lse, options["sink"].float().view(1, -1, 1, 1))
    return (scores - lse).exp().nan_to_num(0.0).to(q.dtype)


def _sees(q_length: int, k_length: int, options: dict, device: torch.device) -> Tensor:
    """Which keys the call's own mask shows: bool (q_length, k_length)."""
    diagonal = torch.arange(q_length, device=device)[:, None] + k_length - q_length
    key = torch.arange(k_length, device=device)[None]
    sees = key <= diagonal if options["causal"] else torch.ones_like(key <= diagonal)
    left, right = options["window_size"]
    if left >= 0:
        sees &= key >= diagonal - left
    if right >= 0:
        sees &= key <= diagonal + right
    return sees
