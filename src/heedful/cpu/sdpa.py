"""torch's own scaled_dot_product_attention, where it computes exactly what a call asks for.

Forward only, and without the log-sum-exp, which SDPA does not return. `core.capability` says which
problems these are.
"""

import torch
import torch.nn.functional as F

from heedful.core.operands import Operands
from heedful.core.problem import AttentionProblem


def forward(
    problem: AttentionProblem, x: Operands, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, None, None]:
    """Plain or causal attention of one call: (out, None, None), as `heedful.cpu.forward`.

    x: q (B, Sq, H, D), k (B, Sk, G, D), v (B, Sk, G, E), nothing else. out: written if given.

    Raises ValueError for a problem that SDPA computes otherwise or not at all.
    """
    reason = why_not(problem)
    if reason:
        raise ValueError(f"backend 'sdpa' cannot run this call: {reason}")
    q, k, v = (a.transpose(1, 2) for a in (x.q, x.k, x.v))
    result = F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=problem.mask.causal,
        scale=problem.scale,
        enable_gqa=problem.group > 1,
    ).transpose(1, 2)
    return (result if out is None else out.copy_(result)), None, None


def why_not(problem: AttentionProblem) -> str | None:
    """Why SDPA would compute something else, or None."""
    mask = problem.mask
    if mask.bounded and (not mask.causal or mask.shift):
        return "its only mask is the causal one, aligned top left"
    if mask.causal and mask.bottom_right and problem.seqlen_q != problem.seqlen_k:
        return "it aligns the causal mask of unequal lengths top left"
    if problem.head_dim != problem.head_dim_v:
        return "it makes all scores at once where the head dims of q and v differ"
    extra = problem.features() - {"causal", "diagonal", "gqa", "unaligned"}
    return f"it has no {', '.join(sorted(extra))}" if extra else None
