"""The public functions through the runner that serves GPUs, its kernels interpreted: see
`support.standin`."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

import heedful
from support import api, budget, standin
from support.cases import Case, build
from support.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

BASE = Case(seqlen_q=19, seqlen_k=27, head_dim=16, heads_q=4)
CASES = (
    replace(BASE, causal=True),
    replace(BASE, layout="packed", window=(9, 3), sink=True),
    replace(BASE, bias="hqk", alibi="bh", causal=True),
    replace(BASE, varlen="qk", used="qk", batch=3, causal=True),
    replace(BASE, dropout_p=0.3, return_probs=True),
    replace(BASE, page_size=4, backward=False),
    replace(BASE, page_size=4, backward=False, num_splits=3, seqlen_k=70, leftpad_k=True),
    replace(BASE, kv_dtype="int8", kv_group=8, kv_shift=True, backward=False),
)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_are_within_the_budget(case):
    built = build(case)
    with standin.gpu(interprets=True, tiles=(16, 16)) as gpu:
        budget.check(built, api.results(built))
    assert gpu.launches


@interpreted
def test_appending_to_a_cache_and_attending_is_what_the_cpu_does():
    values = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(shape, generator=values)

    def step(backend):
        rows, values = k_cache.clone(), v_cache.clone()
        out = heedful.flash_attn_with_kvcache(
            *(q, rows, values, k, v, cos, sin, lengths),
            block_table=table,
            causal=True,
            backend=backend,
        )
        return out, rows, values

    q, k, v = some(2, 3, 4, 16), some(2, 3, 2, 16), some(2, 3, 2, 16)
    k_cache, v_cache = some(8, 4, 2, 16), some(8, 4, 2, 16)
    cos, sin = some(16, 8), some(16, 8)
    lengths = torch.tensor([5, 0], dtype=torch.int32)
    table = torch.tensor([[6, 1, 3], [0, 7, 2]], dtype=torch.int32)
    want = step("cpu")
    with standin.gpu(interprets=True):
        got = step(None)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=8 * torch.finfo(torch.float32).eps)


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
