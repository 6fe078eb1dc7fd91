"""torch.jit.trace records a call as an operator, and a batch of cotangents gives a batch of
gradients."""

from typing import Any

import pytest
import torch

import heedful.torch as typed

heedful: Any = typed
INT = torch.int32


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def dense(q, k, v, sink):
    return heedful.flash_attn_func(q, k, v, causal=True, sink=sink)


def plain(q, k, v):
    return heedful.flash_attn_func(q, k, v)


def with_lse(q, k, v):
    return heedful.flash_attn_func(q, k, v, return_lse=True)


def packed(q, k, v, bounds):
    return heedful.flash_attn_varlen_func(q, k, v, bounds, bounds, 16, 16)


def cached(q, k_cache, v_cache, lengths, k, v):
    cache = k_cache.clone(), v_cache.clone()
    return heedful.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, causal=True)


def merging(outs, lses):
    return heedful.merge_attn_states(outs, lses)


def rows(n: int) -> list[torch.Tensor]:
    return [some(2, n, 2, 8) for _ in range(3)]


# Operands to trace with, and others: of other lengths where nothing is recorded that they decide.
TRACED = {
    dense: ([*rows(5), some(2)], [*rows(9), some(2)]),
    plain: (rows(5), rows(7)),
    with_lse: (rows(5), rows(7)),
    packed: (
        [*(some(16, 2, 8) for _ in range(3)), torch.tensor([0, 6, 16], dtype=INT)],
        [*(some(20, 2, 8) for _ in range(3)), torch.tensor([0, 9, 11, 20], dtype=INT)],
    ),
    cached: tuple(
        [some(2, 1, 2, 8), some(2, 9, 2, 8), some(2, 9, 2, 8), torch.tensor(lengths, dtype=INT)]
        + [some(2, 1, 2, 8), some(2, 1, 2, 8)]
        for lengths in ([3, 8], [0, 5])
    ),
    merging: ([some(2, 1, 5, 2, 8), some(2, 1, 2, 5)], [some(2, 1, 5, 2, 8), some(2, 1, 2, 5)]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("function", TRACED, ids=lambda f: f.__name__)
def test_a_traced_call_computes_what_the_call_does(function, known):
    first, other = TRACED[function]
    if known:
        function(*first)
        function(*first)
    traced: Any = torch.jit.trace(function, tuple(first), check_trace=False)
    if function is not merging:
        assert "heedful::" in str(traced.graph)
    for given in (first, other):
        torch.testing.assert_close(traced(*given), function(*given))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "dropout_seed": 3}], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_a_vectorised_jacobian_is_that_of_one_row_after_the_other(sink, options):
    given = [some(1, 3, 2, 4), some(1, 3, 1, 4), some(1, 3, 1, 4)] + [some(2)] * sink

    def call(q, k, v, sink=None):
        return heedful.flash_attn_func(q, k, v, sink=sink, return_lse=True, **options)

    found, wanted = (
        torch.autograd.functional.jacobian(call, tuple(given), vectorize=vectorize)
        for vectorize in (True, False)
    )
    torch.testing.assert_close(found, wanted)


def test_a_vectorised_jacobian_of_packed_sequences_is_right():
    bounds = torch.tensor([0, 2, 5], dtype=INT)

    def call(q, k):
        return heedful.flash_attn_varlen_func(q, k, k, bounds, bounds, 3, 3)

    given = some(5, 1, 4), some(5, 1, 4)
    found, wanted = (
        torch.autograd.functional.jacobian(call, given, vectorize=vectorize)
        for vectorize in (True, False)
    )
    torch.testing.assert_close(found, wanted)
