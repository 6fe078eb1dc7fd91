"""torch's own scaled_dot_product_attention, where it computes exactly what a call asks for.

Forward only, and without the log-sum-exp, which SDPA does not return. `core.capability` says which
problems these are.
"""

import torch
import torch.nn.functional as F

from heedful.core.operands import Operands
from heedful.core.problem import AttentionProblem
from heedful.cpu import tiled_forward

# Keys at or above which torch finds a row's largest score by vectors alone: more than
# any machine's vector of float32 holds.
VECTORS = 64


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
    if problem.seqlen_k < VECTORS and not result[..., 0].all():
        result = _with_nan(problem, x, result)
    return (result if out is None else out.copy_(result)), None, None


def _with_nan(problem: AttentionProblem, x: Operands, result: torch.Tensor) -> torch.Tensor:
    """The result with NaN in rows all of whose scores are NaN.

    Torch finds the largest of scores that fill no vector by comparisons, which a NaN loses: it then
    takes such a row for one without keys, and gives it 0. Torch 2.13 does.
    """
    if not (x.q.isnan().any() or x.k.isnan().any()):
        return result
    tiled, _, _ = tiled_forward.forward(problem, x)
    return torch.where((result == 0).all(-1, keepdim=True), tiled, result)
