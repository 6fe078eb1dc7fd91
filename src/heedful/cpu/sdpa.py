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
    """
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
