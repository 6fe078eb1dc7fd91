"""The portable kernels on a GPU: bfloat16, sizes that fill whole tiles, determinism, 64-bit
offsets."""

from dataclasses import replace

import pytest
import torch

from heedful.core.call.problem import AttentionProblem
from heedful.torch.eager import backends
from support.problems import budget
from support.problems.cases import Case, build, twins
from support.runs.prepared import Prepared

pytestmark = pytest.mark.gpu

LONG = Case(seqlen_q=200, seqlen_k=333, head_dim=64, dtype="bfloat16")
CASES = (
    LONG,
    replace(LONG, causal=True),
    replace(LONG, causal=True, heads_q=6, head_dim=128),
    replace(LONG, window=(70, 50)),
    replace(LONG, window=(50, -1, 3), head_dim=128, bias="hqk", sink=True),
    replace(LONG, softcap=3.0, sink=True, varlen="qk", alibi="h", dropout_p=0.2, causal=True),
    replace(LONG, bias="bhqk"),
    replace(LONG, dropout_p=0.3, dropout_origin=(1, 2**32 - 3, 5, 2**32 - 6)),
    replace(LONG, varlen="qk", used="qk", batch=4, causal=True, head_dim=128),
    replace(LONG, tree_mask=True, head_dim=128),
    replace(LONG, leftpad_k=True),
    replace(LONG, head_dim=20, head_dim_v=48),
    replace(LONG, head_dim=3, layout="offset"),
    replace(LONG, head_dim=256),
    replace(LONG, head_dim=512, head_dim_v=64),
    replace(LONG, head_dim=96, layout="packed", causal=True),
    replace(LONG, page_size=7, backward=False),
    replace(LONG, leftpad_k=True, page_size=5, backward=False, num_splits=3),
    replace(LONG, kv_dtype="int8", kv_group=8, kv_shift=True, backward=False),
    replace(LONG, kv_dtype="int4", kv_group=16, page_size=4, backward=False),
    replace(LONG, kv_dtype="float8_e4m3fn", backward=False),
)


@pytest.mark.parametrize("case", twins(CASES, "float16", "float32"), ids=str)
def test_whole_tiles_are_within_the_budget(case):
    budget.run(Prepared("portable"), case, "cuda")


@pytest.mark.parametrize("causal", (False, True))
def test_the_backward_is_bit_equal_over_20_runs(causal):
    case = replace(LONG, seqlen_q=1500, seqlen_k=1500, heads_q=6, bias="hqk", sink=True)
    built = build(replace(case, causal=causal, deterministic=True), "cuda")
    runner = backends.prepare(replace(built.problem, return_lse=True), built.x, "portable")
    out, lse, _ = runner.forward(built.x)
    given = built.x, out, lse, built.dout, built.dlse
    first = runner.backward_of(*given)(*given)
    for _ in range(19):
        again = runner.backward_of(*given)(*given)
        for name, a, b in zip(first._fields, first, again, strict=True):
            assert a is None or torch.equal(a, b), f"{name} differs between runs"


def test_keys_beyond_2_to_the_31_elements_are_reached():
    heads, dim, seqlen = 8, 128, 2**31 // (8 * 128) + 4096
    k = torch.empty(1, seqlen, heads, dim, dtype=torch.bfloat16, device="cuda").zero_()
    v = torch.empty_like(k).fill_(1.0)
    q = torch.randn(1, 16, heads, dim, device="cuda").to(torch.bfloat16)
    k[:, -16:] = 40 * q / q.float().norm(dim=-1, keepdim=True)
    v[:, -16:] = -1.0
    problem = AttentionProblem.dense(1, 16, seqlen, heads, head_dim=dim, return_lse=True)
    x = build(Case(batch=1, seqlen_q=1, seqlen_k=1, backward=False), "cuda").x
    x = x._replace(q=q, k=k, v=v)
    out, _, _ = backends.prepare(problem, x, "portable").forward(x)
    # Each query's own key outweighs all two million zeros: exp(40) against 2e6.
    assert torch.all(out < -0.99)
