"""What a peer takes, on a GPU: lengths in tensors there, pages with gradients, wider keys, a place
in a larger problem."""

from typing import Any

import pytest
import torch

import heedful.torch as typed
from support.captures import graph_capture
from support.problems.budget import check
from support.problems.cases import Case, build, variants
from support.runs import api
from support.runs.api import results

pytestmark = pytest.mark.gpu

# What is passed here is more than the signatures say.
heedful: Any = typed

PACKED = Case(dtype="bfloat16", head_dim=64, heads_q=4, varlen="qk", batch=3, causal=True)
PAGED = [
    *variants(
        Case(dtype="bfloat16", head_dim=64, heads_q=4, varlen="q", used="k", page_size=16, batch=3),
        causal=[True],
        page_size=[1, 7, 256],
        varlen=["qk"],
        bias=["hqk"],
        sink=[True],
        dropout_p=[0.3],
        window=[(20, 5)],
        dtype=["float16", "float32"],
        layout=["packed", "offset"],
        deterministic=[True],
        batch=[0, 1],
    )
]
WIDER_KEYS = [
    *variants(
        Case(dtype="bfloat16", head_dim=576, head_dim_v=512, heads_q=16, heads_k=1, backward=False),
        dtype=["float16"],
        causal=[True],
        varlen=["qk"],
        num_splits=[3],
        layout=["offset"],
        bias=["k"],
        seqlen_q=[1, 130],
        head_dim=[513, 520],
    ),
    Case(
        dtype="bfloat16",
        head_dim=576,
        head_dim_v=512,
        heads_q=16,
        heads_k=1,
        seqlen_q=1,
        seqlen_k=3000,
        used="k",
        page_size=64,
        causal=True,
        backward=False,
    ),
]


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_gradients_of_keys_in_pages_agree_with_the_oracle(case):
    built = build(case, "cuda")
    check(built, results(built), "cuda")


@pytest.mark.parametrize("case", WIDER_KEYS, ids=str)
def test_keys_wider_than_values_agree_with_the_oracle(case):
    built = build(case, "cuda")
    check(built, results(built), "cuda")


@pytest.mark.parametrize(
    "case",
    variants(
        PACKED, head_dim=[64, 128], window=[(9, 3)], bias=["bhqk", "k"], used=["qk"], alibi=["h"]
    ),
    ids=str,
)
@pytest.mark.parametrize("backend", [None, "portable"])
def test_a_length_on_the_device_changes_nothing(case, backend, monkeypatch):
    class Api:
        @staticmethod
        def flash_attn_varlen_func(*args, **keywords):
            *rest, longest_q, longest_k = args
            lengths = (torch.tensor(n, device="cuda") for n in (longest_q, longest_k))
            return heedful.flash_attn_varlen_func(*rest, *lengths, backend=backend, **keywords)

    monkeypatch.setattr(api, "heedful", Api)
    built = build(case, "cuda")
    check(built, results(built), "cuda")


def packed() -> Any:
    bounds = torch.tensor([0, 100, 164, 420], dtype=torch.int32, device="cuda")
    tensors = [
        torch.randn(420, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    return tensors, bounds


def test_a_length_on_the_device_is_never_waited_for():
    tensors, bounds = packed()

    def step(longest):
        out = heedful.flash_attn_varlen_func(*tensors, bounds, bounds, longest, longest)
        return out, *torch.autograd.grad(out.float().sum(), tensors)

    want = step(256)
    longest = bounds.diff().max()
    step(longest)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(longest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_length_on_the_device_is_captured_into_a_graph():
    tensors, bounds = packed()
    q, k, v = (tensor.detach() for tensor in tensors)

    def step():
        longest = bounds.diff().max()
        return heedful.flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest, causal=True
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = step()
    for cuts in ([0, 100, 164, 420], [0, 0, 400, 420], [0, 420, 420, 420]):
        bounds.copy_(torch.tensor(cuts, dtype=torch.int32))
        graph.replay()
        want = heedful.flash_attn_varlen_func(q, k, v, bounds, bounds, 420, 420, causal=True)
        torch.testing.assert_close(out, want)


def test_gradients_of_pages_are_captured_and_the_same_bits_each_time():
    """Two sequences share half of their pages."""
    table = torch.tensor([[3, 1, 4, 0], [3, 1, 2, 5]], dtype=torch.int32, device="cuda")
    used = torch.tensor([60, 64], dtype=torch.int32, device="cuda")
    bounds = torch.tensor([0, 30, 64], dtype=torch.int32, device="cuda")
    shapes = ((64, 4, 64), (6, 16, 2, 64), (6, 16, 2, 64))
    tensors = [
        torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
    ]

    def step():
        out = heedful.flash_attn_varlen_func(
            *tensors, bounds, None, 34, 64, seqused_k=used, block_table=table, deterministic=True
        )
        return torch.autograd.grad(out.float().sum(), tensors)

    want = step()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(step(), want, strict=True))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        got = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_a_shard_of_the_heads_and_rows_draws_the_mask_of_the_whole(backend):
    q, k, v = (torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    keywords: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": 5, "backend": backend}
    whole = heedful.flash_attn_func(q, k, v, **keywords)
    part = heedful.flash_attn_func(
        q[1:, 128:, 2:], k[1:, :, 2:], v[1:, :, 2:], dropout_origin=(1, 2, 128, 0), **keywords
    )
    torch.testing.assert_close(part, whole[1:, 128:, 2:])


def test_numbers_on_the_cpu_serve_a_gpu():
    """A seed as well: it goes there with the call."""
    q, k, v = (torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = heedful.flash_attn_func(q, k, v, 0.25, 0.5, window_size=(9, 3), dropout_seed=7)
    got = heedful.flash_attn_func(
        *(q, k, v, torch.tensor(0.25), torch.tensor(0.5)),
        window_size=torch.tensor([9, 3]),
        dropout_seed=torch.tensor(7),
    )
    assert torch.equal(got, want)
    for wrong in ({"softcap": torch.ones((), device="cuda")}, {"window_size": want.new_ones(2)}):
        with pytest.raises(TypeError, match="waited for"):
            heedful.flash_attn_func(q, k, v, **wrong)
