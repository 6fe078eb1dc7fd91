"""The public functions on a GPU: graphs, streams, devices, compilation, and the cache kernels."""

import threading
from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.core.registry.by_hand import forced
from support.captures import graph_capture
from support.problems.budget import check
from support.problems.cases import Case, build, twins, variants
from support.problems.prefixes import whole_prefix
from support.runs.api import results

pytestmark = pytest.mark.gpu

CALLS = [
    *variants(
        Case(dtype="bfloat16", head_dim=64, heads_q=4),
        causal=[True],
        bias=["hqk"],
        sink=[True],
        dropout_p=[0.3],
        layout=["heads_first", "offset"],
        varlen=["qk"],
        num_splits=[3],
        seqlen_k=[0],
        batch=[0],
    ),
    *variants(
        Case(dtype="bfloat16", head_dim=64, heads_q=4, used="k", backward=False, causal=True),
        seqlen_q=[1],
        page_size=[1, 16],
        kv_batch_idx=[True],
        leftpad_k=[True],
        num_splits=[4],
    ),
    *variants(
        Case(dtype="bfloat16", head_dim=64, heads_q=4, bias="bhqk", bias_dtype="bool"),
        bias=["bhqk", "qk", "bk"],
        causal=[True],
        varlen=["qk"],
        sink=[True],
    ),
    *variants(
        Case(dtype="bfloat16", head_dim=64, used="qk", leftpad_k=True, causal=True, heads_q=4),
        used=["q", "k", ""],
        leftpad_k=[False],
        bias=["qk"],
        dropout_p=[0.3],
        window=[(9, 3)],
        seqlen_q=[1, 300],
        lens_k=[(0, 53)],
        head_dim=[128, 256],
        backward=[False],
    ),
    Case(dtype="bfloat16", head_dim=64, sink=True, sink_dtype="bfloat16", causal=True),
    Case(dtype="float16", head_dim=64, sink=True, sink_dtype="float16", varlen="qk"),
    Case(dtype="bfloat16", head_dim=64, heads_q=4, index_dtype="int64", causal=True, varlen="qk"),
    *variants(
        Case(
            dtype="bfloat16", head_dim=64, heads_q=4, index_dtype="int64", used="k", backward=False
        ),
        page_size=[16],
        kv_batch_idx=[True],
        leftpad_k=[True],
    ),
    Case(dtype="bfloat16", tree_mask=True, used="k", seqlen_q=6, lens_k=(50, 6), backward=False),
]


@pytest.mark.parametrize("case", twins(CALLS, "float16", "float32"), ids=str)
def test_public_calls_agree_with_the_oracle(case):
    built = build(case, "cuda")
    check(built, results(built), "cuda")


def randn(*shape: int, device="cuda", dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_a_scale_of_zero_weighs_all_visible_keys_alike(backend):
    q, k = randn(1, 300, 2, 64), randn(1, 300, 2, 64)
    v = torch.randint(0, 2, q.shape, device="cuda").to(q.dtype)
    out = heedful.flash_attn_func(q, k, v, softmax_scale=0.0, causal=True, backend=backend)
    rows = torch.arange(1, 301, device="cuda")[:, None, None]
    torch.testing.assert_close(out, (v.float().cumsum(1) / rows).to(out.dtype))


def captured(function):
    """A graph of one call, after the warm-up that compiles and fills caches; and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        result = function()
    return graph, result


def test_a_replayed_graph_computes_what_the_call_computes():
    q, k, v = (randn(2, 65, 4, 64) for _ in range(3))
    graph, out = captured(lambda: heedful.flash_attn_func(q, k, v, causal=True))
    for _ in range(2):
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        assert torch.equal(out, heedful.flash_attn_func(q, k, v, causal=True))


def test_a_replayed_graph_reads_a_bool_bias_anew():
    q = randn(2, 65, 4, 64).requires_grad_()
    mask = torch.rand(65, 65, device="cuda") < 0.7
    dout = torch.randn_like(q)

    def step():
        out = heedful.flash_attn_func(q, q, q, bias=mask, deterministic=True)
        return out, *torch.autograd.grad(out, q, dout)

    graph, results = captured(step)
    mask.copy_(torch.rand(65, 65, device="cuda") < 0.3)
    graph.replay()
    for got, want in zip(results, step(), strict=True):
        assert torch.equal(got, want)


def test_a_replayed_graph_reads_lengths_of_int64_anew():
    q, k, v = randn(12, 4, 64), randn(12, 4, 64), randn(12, 4, 64)
    cu = torch.tensor([0, 3, 8, 12], device="cuda")

    def call():
        return heedful.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, causal=True)

    graph, out = captured(call)
    cu.copy_(torch.tensor([0, 1, 2, 12], device="cuda"))
    graph.replay()
    assert torch.equal(out, call())
    want = heedful.flash_attn_varlen_func(q, k, v, cu.int(), cu.int(), 12, 12, causal=True)
    assert torch.equal(out, want)


def test_gradients_are_captured_too():
    q, k, v = (randn(2, 65, 4, 64).requires_grad_() for _ in range(3))
    dout = randn(2, 65, 4, 64)

    def step():
        out = heedful.flash_attn_func(q, k, v, causal=True, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    graph, grads = captured(step)
    with torch.no_grad():
        for tensor in (q, k, v, dout):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for got, want in zip(grads, step(), strict=True):
        assert torch.equal(got, want)


def kept(p: float = 0.5, device="cuda", size: int = 64) -> torch.Tensor:
    """Which probabilities of a call survive dropout, read off an identity V."""
    q = torch.zeros(1, size, 1, 64, device=device, dtype=torch.bfloat16)
    v = torch.eye(size, device=device, dtype=torch.bfloat16).view(1, size, 1, size)
    return heedful.flash_attn_func(q, q, v, p) > 0


def test_every_replay_of_a_graph_draws_a_new_mask():
    graph, mask = captured(kept)
    masks = []
    for _ in range(20):
        graph.replay()
        masks.append(mask.clone())
    distinct = {bytes(m.flatten().to(torch.uint8).tolist()) for m in masks}
    assert len(distinct) == 20
    assert all(0 < int(m.sum()) < m.numel() for m in masks)


def test_a_replay_uses_one_mask_for_forward_and_backward():
    size = 64
    q = torch.zeros(1, size, 1, 64, device="cuda", dtype=torch.bfloat16)
    eye = torch.eye(size, device="cuda", dtype=torch.bfloat16).view(1, size, 1, size)
    v = eye.clone().requires_grad_()

    def step():
        out = heedful.flash_attn_func(q, q, v, 0.5)
        (dv,) = torch.autograd.grad(out, v, eye)
        return out.detach(), dv

    graph, (out, dv) = captured(step)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out[0, :, 0] > 0, (dv[0, :, 0] > 0).T)


def test_two_threads_on_two_streams_never_share_a_mask():
    masks: list[torch.Tensor] = []
    kept()

    def draw():
        with torch.cuda.stream(torch.cuda.Stream()):
            own = [kept() for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            masks.extend(own)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({bytes(m.flatten().to(torch.uint8).tolist()) for m in masks}) == 100


def test_the_mask_is_the_cpus_for_the_same_seed():
    q = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16)
    v = torch.eye(64, dtype=torch.bfloat16).view(1, 64, 1, 64).expand(1, 64, 2, 64)
    on_cpu = heedful.flash_attn_func(q, q, v, 0.3, dropout_seed=2**63 + 11) > 0
    on_gpu = heedful.flash_attn_func(q.cuda(), q.cuda(), v.cuda(), 0.3, dropout_seed=2**63 + 11) > 0
    assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_runs_on_the_device_of_its_tensors():
    """Not on the current one; and the same kind of call on two devices is two kinds."""
    q, k, v = (randn(2, 33, 4, 64) for _ in range(3))
    here = heedful.flash_attn_func(q, k, v, causal=True)
    others = [t.to("cuda:1").requires_grad_() for t in (q, k, v)]
    assert torch.cuda.current_device() == 0
    there = heedful.flash_attn_func(others[0], others[1], others[2], causal=True)
    assert there.device == torch.device("cuda:1") and torch.equal(there.to("cuda:0"), here)
    there.sum().backward()
    assert all(t.grad is not None and t.grad.device == t.device for t in others)
    lengths = torch.tensor([5, 9], dtype=torch.int32, device="cuda:1")
    cache = randn(2, 16, 4, 64, device="cuda:1"), randn(2, 16, 4, 64, device="cuda:1")
    new = others[0].detach()[:, :1]
    out = heedful.flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=lengths)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="k must be on cuda:0 like q, got cuda:1"):
        heedful.flash_attn_func(q, others[1].detach(), v)


def exact_tables(positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary tables by quarter turns and powers of two: rotating by them rounds nothing."""
    size = 2.0 ** torch.randint(-2, 2, (positions, half))
    quarter = torch.rand(positions, half) < 0.5
    cos, sin = torch.where(quarter, 0.0, size), torch.where(quarter, size, 0.0)
    return cos.cuda().bfloat16(), sin.cuda().bfloat16()


@pytest.mark.parametrize("page_size", [0, 1, 5, 16])
@pytest.mark.parametrize("interleaved", [True, False], ids=["gptj", "neox"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("new", [1, 37])
def test_the_cache_kernels_write_what_plain_torch_writes(page_size, interleaved, causal, new):
    """Contiguous and paged, with rotary, strided new tokens; the CPU runs plain torch."""
    capacity, lengths = 64, torch.tensor([0, 7, 20], dtype=torch.int32)
    table = None
    shape: tuple[int, ...] = (4, capacity, 2, 64)
    if page_size:
        pages = -(-capacity // page_size)
        capacity = pages * page_size
        table = torch.randperm(3 * pages).view(3, pages).to(torch.int32)
        shape = (3 * pages, page_size, 2, 64)
    rows = torch.tensor([3, 0, 1], dtype=torch.int32) if table is None else None
    caches = randn(*shape), randn(*shape)
    q = randn(3, 4, new, 64).transpose(1, 2)
    k, v = randn(3, new, 3, 64)[:, :, 1:], randn(3, 2, new, 64).transpose(1, 2)
    cos, sin = exact_tables(capacity, 16)
    given = (q, *caches, k, v, cos, sin, lengths.cuda())
    on_cpu = [t.cpu() for t in given]
    out = None
    for tensors in (given, on_cpu):
        keywords: dict[str, Any] = {
            "cache_batch_idx": None if rows is None else rows.to(tensors[0].device),
            "block_table": None if table is None else table.to(tensors[0].device),
            "causal": causal,
            "rotary_interleaved": interleaved,
        }
        out = heedful.flash_attn_with_kvcache(*tensors[:7], cache_seqlens=tensors[7], **keywords)
    for got, want in zip(caches, on_cpu[1:3], strict=True):
        assert torch.equal(got.cpu(), want)
    assert out is not None and out.isfinite().all()


def test_a_decoding_step_is_captured_and_reads_its_lengths_anew():
    cache = randn(2, 64, 2, 64), randn(2, 64, 2, 64)
    q, k, v = randn(2, 1, 4, 64), randn(2, 1, 2, 64), randn(2, 1, 2, 64)
    lengths = torch.tensor([3, 9], dtype=torch.int32, device="cuda")

    def step():
        return heedful.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, causal=True)

    graph, out = captured(step)
    for _ in range(4):
        lengths += 1
        graph.replay()
        assert torch.equal(out, step())
        for b, length in enumerate(lengths.tolist()):
            assert torch.equal(cache[0][b, length], k[b, 0])


def test_a_shared_prefix_equals_a_cache_that_begins_with_it():
    prefix = randn(40, 2, 64), randn(40, 2, 64)
    cache = randn(2, 64, 2, 64), randn(2, 64, 2, 64)
    q, lengths = randn(2, 3, 4, 64), torch.tensor([9, 30], dtype=torch.int32, device="cuda")
    out, lse = heedful.flash_attn_with_kvcache(
        q, *cache, cache_seqlens=lengths, causal=True, shared_prefix=prefix, return_softmax_lse=True
    )
    whole = [
        torch.cat([part.expand(2, -1, -1, -1), stored], 1)
        for part, stored in zip(prefix, cache, strict=True)
    ]
    exact = [t.cpu().float() for t in (q, *whole)]
    want, want_lse = heedful.flash_attn_with_kvcache(
        *exact, cache_seqlens=lengths.cpu() + 40, causal=True, return_softmax_lse=True
    )
    # Two parts and a merge, each rounded to bfloat16 once; the weights of a merge sum to one.
    eps, top = torch.finfo(torch.bfloat16).eps, whole[1].abs().max().item()
    assert (out.cpu().float() - want).abs().max() <= 2 * eps * top
    assert (lse.cpu() - want_lse).abs().max() <= 2 * eps


@pytest.mark.parametrize("backend", [None, "portable", "decode", forced("decode/portable")])
def test_every_query_sees_the_whole_prefix_also_where_keys_are_fewer(backend):
    lengths = [0, 1, 3, 4, 50]
    prefix = randn(40, 2, 64), randn(40, 2, 64)
    cache = randn(5, 64, 2, 64), randn(5, 64, 2, 64)
    q = randn(5, 4, 4, 64)
    out, lse = heedful.flash_attn_with_kvcache(
        q,
        *cache,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        causal=True,
        shared_prefix=prefix,
        return_softmax_lse=True,
        backend=backend,
    )
    first, stored = ((pair[0].cpu(), pair[1].cpu()) for pair in (prefix, cache))
    want, want_lse = whole_prefix(q.cpu(), first, stored, lengths)
    eps, top = torch.finfo(torch.bfloat16).eps, max(t.abs().max().item() for t in cache + prefix)
    assert (out.cpu() - want).abs().max() <= 2 * eps * top
    assert (lse.cpu() - want_lse).abs().max() <= 2 * eps


def test_compiled_calls_give_what_eager_calls_give():
    torch._dynamo.reset()

    def loss(q, k, v):
        keywords: dict[str, Any] = {"causal": True, "return_lse": True, "deterministic": True}
        out, lse = heedful.flash_attn_func(q, k, v, **keywords)
        return out.float().square().sum() + lse.sum()

    function = torch.compile(loss, fullgraph=True, dynamic=True)
    for length in (65, 40):
        tensors = [randn(2, length, 4, 64).requires_grad_() for _ in range(3)]
        want = torch.autograd.grad(loss(*tensors), tensors)
        got = torch.autograd.grad(function(*tensors), tensors)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_a_compiled_decoding_step_updates_the_cache_as_the_eager_one():
    torch._dynamo.reset()
    cos, sin = exact_tables(64, 16)
    caches = [(randn(2, 64, 2, 64), randn(2, 64, 2, 64)) for _ in range(2)]
    for one, other in zip(*caches, strict=True):
        other.copy_(one)

    def step(q, k, v, k_cache, v_cache, lengths):
        return heedful.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=lengths, causal=True
        )

    function = torch.compile(step, fullgraph=True)
    for i in range(3):
        q, k, v = randn(2, 1, 4, 64), randn(2, 1, 2, 64), randn(2, 1, 2, 64)
        lengths = torch.tensor([i, 9 + i], dtype=torch.int32, device="cuda")
        want = step(q, k, v, *caches[0], lengths)
        assert torch.equal(function(q, k, v, *caches[1], lengths), want)
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one, other)


def test_autocast_casts_q_k_v_and_bias():
    q, k, v = (randn(2, 33, 4, 64, dtype=torch.float32) for _ in range(3))
    bias = randn(33, 33, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = heedful.flash_attn_func(q, k, v, bias=bias)
    low = [t.bfloat16() for t in (q, k, v)]
    want = heedful.flash_attn_func(low[0], low[1], low[2], bias=bias.bfloat16())
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


def test_no_call_waits_for_the_gpu():
    """Synchronising raises here; one warm call compiles before."""
    q, k, v = (randn(2, 65, 4, 64).requires_grad_() for _ in range(3))
    cache = randn(2, 64, 4, 64), randn(2, 64, 4, 64)
    lengths = torch.tensor([5, 9], dtype=torch.int32, device="cuda")
    bounds = torch.tensor([0, 30, 130], dtype=torch.int32, device="cuda")

    def calls():
        heedful.flash_attn_func(q, k, v, 0.1, causal=True).sum().backward()
        packed = [t.detach().flatten(0, 1) for t in (q, k, v)]
        heedful.flash_attn_varlen_func(
            packed[0], packed[1], packed[2], bounds, bounds, 100, 100, causal=True
        )
        new = q.detach()[:, :1]
        heedful.flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=lengths)
        heedful.flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=7)

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pinned", [False, True])
def test_gradients_are_the_same_with_activations_offloaded(pinned):
    """q, k and v are chunks of one tensor, and come back dense."""
    q, k, v = (t.detach().requires_grad_() for t in randn(2, 300, 4, 192).chunk(3, -1))

    def gradients():
        out = heedful.flash_attn_func(q, k, v, causal=True, deterministic=True)
        return torch.autograd.grad(out.float().square().sum(), (q, k, v))

    want = gradients()
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        got = gradients()
    for a, b, c in zip(got, want, gradients(), strict=True):
        assert torch.equal(a, b) and torch.equal(c, b)
