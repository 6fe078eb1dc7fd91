"""Short calls: rows that see all of their keys here, beside rows that have more elsewhere."""

import pytest
import torch

from heedful.core.call.operands import Operands
from heedful.cpu import whole
from support.problems.cases import Case, build

HERE = 24


def test_gradients_of_rows_with_more_keys_elsewhere_stand_beside_those_of_whole_rows():
    """Every other row also saw keys of another call, with which its out and lse were merged."""
    case = Case(batch=1, seqlen_q=20, seqlen_k=HERE, heads_q=2, head_dim=32, lse_grad=False)
    built = build(case)
    x, dout = built.x, built.dout
    assert whole.takes(built.problem, x) and dout is not None
    values = torch.Generator().manual_seed(1)
    more_k, more_v = (torch.randn(1, 30, 2, 32, generator=values) for _ in range(2))
    q, k, v, do, more_k, more_v = (
        t.double().transpose(1, 2) for t in (x.q, x.k, x.v, dout, more_k, more_v)
    )
    s = built.problem.scale * q @ torch.cat([k, more_k], 2).mT
    s[:, :, ::2, HERE:] = -torch.inf
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()
    out = p @ torch.cat([v, more_v], 2)
    p = p[..., :HERE]
    ds = p * (do @ v.mT - (do * out).sum(-1, keepdim=True)) * built.problem.scale
    wanted = ds @ k, ds.mT @ q, p.mT @ do

    out = out.transpose(1, 2).float().contiguous()
    made = whole.backward(built.problem, Operands(*x[:3]), out, lse.float(), dout, None)
    for got, want in zip(made[:3], wanted, strict=True):
        torch.testing.assert_close(got.double(), want.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "is_recorded"), [(7, True), (8, True), (9, False)])
def test_calls_are_recorded_whose_first_row_sees_a_key(queries, is_recorded):
    built = build(Case(batch=1, seqlen_q=queries, seqlen_k=8, causal=True))
    assert whole.records(built.problem, built.x) is is_recorded
