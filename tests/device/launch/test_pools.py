"""Calls while torch's allocator is routed to a pool: of torch.compile's CUDA graphs, of a graph of
the user's, of a MemPool. Nothing that outlives the pool's owner may be in it.
"""

import gc
import threading
from functools import partial
from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.torch.eager import zeros
from support.captures import graph_capture

pytestmark = pytest.mark.gpu

CAUSAL: dict[str, Any] = {"causal": True, "deterministic": True}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def dense():
    """Tiles of unlike length, which Hopper kernels draw by a counter."""
    return partial(heedful.flash_attn_func, **CAUSAL), [randn(4, 2500, 8, 64) for _ in range(3)]


def with_lse():
    function, tensors = dense()
    return partial(function, return_lse=True), tensors


def with_a_bias():
    bias = randn(1, 8, 1, 2500)
    function, tensors = dense()
    return partial(function, bias=bias), tensors


def packed():
    bounds = ints(0, 700, 2500, 4000)
    keywords = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    keywords |= {"max_seqlen_q": 1800, "max_seqlen_k": 1800, **CAUSAL}
    return partial(heedful.flash_attn_varlen_func, **keywords), [
        randn(4000, 8, 64) for _ in range(3)
    ]


def cached():
    lengths = ints(700, 30)
    tensors = [randn(2, 40, 8, 64), randn(2, 1024, 2, 64), randn(2, 1024, 2, 64)]
    return partial(heedful.flash_attn_with_kvcache, cache_seqlens=lengths, causal=True), tensors


def decoding():
    """Few queries, whose keys are split."""
    function, (_, k, v) = cached()
    return function, [randn(2, 1, 8, 64), k, v]


def appending():
    function, (_, k, v) = cached()
    new = {"k": randn(2, 1, 2, 64), "v": randn(2, 1, 2, 64)}
    return partial(function, **new), [randn(2, 1, 8, 64), k, v]


ENTRIES = [dense, with_lse, with_a_bias, packed, cached, decoding, appending]
TRAINED = [dense, with_lse, packed]


@pytest.fixture(autouse=True)
def first_of_the_process(monkeypatch):
    """As if no stream had a region yet: it is the first call that makes one."""
    monkeypatch.setattr(zeros, "_of_stream", {})
    torch._dynamo.reset()


def listed(results) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def assert_same(got, want):
    for a, b in zip(listed(got), listed(want), strict=True):
        assert torch.equal(a, b)


def draw_anew(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))


def gradients(function, *tensors):
    losses = [part.float().square().sum() for part in listed(function(*tensors))]
    return torch.autograd.grad(losses, tensors)


@pytest.mark.parametrize("entry", ENTRIES)
def test_reduce_overhead_gives_what_eager_calls_give(entry):
    function, tensors = entry()
    compiled = torch.compile(function, mode="reduce-overhead")
    for _ in range(5):
        draw_anew(tensors)
        want = function(*tensors)
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(compiled(*tensors), want)


@pytest.mark.parametrize("entry", TRAINED)
def test_reduce_overhead_gives_the_gradients_of_eager_calls(entry):
    function, tensors = entry()
    tensors = [tensor.requires_grad_() for tensor in tensors]
    compiled = torch.compile(function, mode="reduce-overhead")
    for _ in range(5):
        draw_anew(tensors)
        want = gradients(function, *tensors)
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(gradients(compiled, *tensors), want)


def captured(function):
    """A graph of a call, warmed up on a stream of its own."""
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


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_replayed_graph_gives_what_calls_give(entry):
    function, tensors = entry()
    graph, got = captured(lambda: function(*tensors))
    for _ in range(3):
        draw_anew(tensors)
        want = [part.clone() for part in listed(function(*tensors))]
        graph.replay()
        assert_same(got, want)


@pytest.mark.parametrize("entry", TRAINED)
def test_a_replayed_graph_gives_the_gradients_that_calls_give(entry):
    function, tensors = entry()
    tensors = [tensor.requires_grad_() for tensor in tensors]
    graph, got = captured(lambda: gradients(function, *tensors))
    for _ in range(3):
        draw_anew(tensors)
        graph.replay()
        assert_same(got, gradients(function, *tensors))


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_pool_of_the_users_keeps_nothing_of_ours(entry):
    function, tensors = entry()
    want = function(*tensors)
    zeros._of_stream.clear()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        got = function(*tensors)
    assert_same(got, want)
    del got
    gc.collect()
    torch.cuda.synchronize()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks and not any(block["state"] == "active_allocated" for block in blocks)
    # The pool goes, and what its memory becomes does not touch later calls.
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    torch.full((1 << 26,), -1, dtype=torch.int32, device="cuda")
    for _ in range(600):
        assert_same(function(*tensors), want)


def test_threads_on_one_stream_count_from_zero():
    """Enough calls to use the region up many times; a dirty counter would skip tiles."""
    function, tensors = dense()
    want = function(*tensors)
    wrong: list[int] = []

    def work(number: int):
        for _ in range(1200):
            if not torch.equal(function(*tensors), want):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_stream_that_captures_is_not_disturbed_by_a_first_call():
    """The region is made while another thread captures. (In the mode "global" no other thread may
    allocate, torch's own calls neither.)"""
    function, tensors = dense()
    want = function(*tensors)
    zeros._of_stream.clear()
    begun, made, results = threading.Event(), threading.Event(), []

    def first_call():
        begun.wait()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results.append(function(*tensors))
        finally:
            made.set()

    thread = threading.Thread(target=first_call)
    thread.start()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with graph_capture(graph, capture_error_mode="thread_local"):
        out += 1
        begun.set()
        made.wait()
    thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(results[0], want)
    assert (out == 1).all()
