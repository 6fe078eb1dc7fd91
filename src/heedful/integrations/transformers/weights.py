"""The weights of attention in plain PyTorch: no kernel stores them."""

import torch
from torch import Tensor


def attention_weights(
    q: Tensor, k: Tensor, bias: Tensor | None, how: dict, is_masked: bool
) -> Tensor:
    """The probabilities, (batch, heads, q_length, k_length) in q's dtype.

    Args:
        q: (batch, q_length, heads, head_dim). k: (batch, k_length, heads_k, head_dim).
        bias: what is added to the scores, or bool (True = visible): a mask, positions, or both.
        how: softmax_scale, causal, window_size, softcap and sink of the call.
        is_masked: whether the bias includes a mask, which replaces causal and window_size.
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scale = q.shape[-1] ** -0.5 if how["softmax_scale"] is None else how["softmax_scale"]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * scale
    if how["softcap"]:
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, float("-inf"))
    elif bias is not None:
        scores = scores + bias
    if not is_masked:
        sees = _sees(q.shape[1], k.shape[1], how, q.device)
        scores = scores.masked_fill(~sees, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    if how["sink"] is not None:
        lse = torch.logaddexp(lse, how["sink"].float().view(1, -1, 1, 1))
    return (scores - lse).exp().nan_to_num(0.0).to(q.dtype)


def _sees(q_length: int, k_length: int, how: dict, device: torch.device) -> Tensor:
    """Which keys the call's own mask shows: bool (q_length, k_length)."""
    at = torch.arange(q_length, device=device)[:, None] + k_length - q_length
    key = torch.arange(k_length, device=device)[None]
    sees = key <= at if how["causal"] else torch.ones_like(key <= at)
    left, right = how["window_size"]
    if left >= 0:
        sees &= key >= at - left
    if right >= 0:
        sees &= key <= at + right
    return sees
