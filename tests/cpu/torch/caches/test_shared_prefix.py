"""A prefix is seen whole, also by the first of more queries than a sequence has keys."""

import numpy as np
import pytest
import torch

import heedful
from support.problems.prefixes import whole_prefix

# Of four queries: none, fewer, as many, more.
LENGTHS = [0, 1, 3, 4, 9]


def operands():
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(len(LENGTHS), 4, 4, 16, generator=draw)
    prefix, cache = (
        (torch.randn(*shape, generator=draw), torch.randn(*shape, generator=draw))
        for shape in ((6, 2, 16), (len(LENGTHS), 12, 2, 16))
    )
    return q, prefix, cache, torch.tensor(LENGTHS, dtype=torch.int32)


def assert_close(got, want):
    # Sums of at most 15 terms of order 1, in float32.
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=32 * 2.0**-23)


def test_every_query_sees_the_whole_prefix():
    q, prefix, cache, lengths = operands()
    out, lse = heedful.flash_attn_with_kvcache(
        q, *cache, cache_seqlens=lengths, causal=True, shared_prefix=prefix, return_softmax_lse=True
    )
    want = whole_prefix(q, prefix, cache, LENGTHS)
    assert_close(out.numpy(), want[0])
    assert_close(lse.numpy(), want[1])


def test_one_length_for_all_is_no_other_case():
    q, prefix, cache, _ = operands()
    out = heedful.flash_attn_with_kvcache(
        q, *cache, cache_seqlens=2, causal=True, shared_prefix=prefix
    )
    assert_close(out.numpy(), whole_prefix(q, prefix, cache, [2] * len(LENGTHS))[0])


def test_queries_of_a_sequence_without_new_tokens_see_the_prefix_alone():
    q, prefix, cache, lengths = operands()
    lengths[0] = -1
    new = torch.randn(len(LENGTHS), 1, 2, 16), torch.randn(len(LENGTHS), 1, 2, 16)
    out = heedful.flash_attn_with_kvcache(
        q, *cache, *new, cache_seqlens=lengths, causal=True, shared_prefix=prefix
    )
    after = [0, *(length + 1 for length in LENGTHS[1:])]
    assert_close(out.numpy(), whole_prefix(q, prefix, cache, after)[0])


@pytest.mark.parametrize("mapped", ["q", "cache", "prefix", "lengths", "all"])
def test_a_mapped_call_is_its_elements(mapped):
    given = operands()
    names = ("q", "prefix", "cache", "lengths")
    flags = [mapped in (name, "all") for name in names]

    def grown(value, flag):
        if not flag:
            return value
        if isinstance(value, tuple):
            return tuple(grown(t, True) for t in value)
        return torch.stack([value, value.flip(0)])

    def call(q, prefix, cache, lengths):
        return heedful.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=lengths, shared_prefix=prefix, return_softmax_lse=True
        )

    more = [grown(value, flag) for value, flag in zip(given, flags, strict=True)]
    got = torch.vmap(call, in_dims=tuple(0 if flag else None for flag in flags))(*more)
    for index in range(2):
        own = [
            value if not flag else element(value, index)
            for value, flag in zip(more, flags, strict=True)
        ]
        for one, want in zip(got, call(*own), strict=True):
            torch.testing.assert_close(one[index], want)


def element(value, index: int):
    return tuple(t[index] for t in value) if isinstance(value, tuple) else value[index]


def test_every_query_sees_the_whole_prefix_in_jax():
    jnp = pytest.importorskip("jax.numpy")
    import heedful.jax as hj

    q, prefix, cache, lengths = operands()
    as_jax = [jnp.asarray(t.numpy()) for t in (q, *cache)]
    out, lse, *_ = hj.flash_attn_with_kvcache(
        *as_jax,
        cache_seqlens=jnp.asarray(lengths.numpy()),
        causal=True,
        shared_prefix=(jnp.asarray(prefix[0].numpy()), jnp.asarray(prefix[1].numpy())),
        return_softmax_lse=True,
    )
    want = whole_prefix(q, prefix, cache, LENGTHS)
    assert_close(np.asarray(out), want[0])
    assert_close(np.asarray(lse), want[1])
