"""The decode kernel on a GPU: its error budgets, and what shares of the keys may not change."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful.torch as heedful
from heedful.core.registry.by_hand import forced
from support.captures import graph_capture
from support.hopper.device import DECODES, ON_HOPPER, WITH_TRITON_3_9
from support.problems.budget import run
from support.problems.cases import Case
from support.problems.variants import distinct
from support.runs.prepared import Prepared

pytestmark = pytest.mark.gpu

PLAIN = Case(dtype="bfloat16", backward=False, seqlen_q=3, seqlen_k=603, heads_q=6, head_dim=128)
CASES = (
    PLAIN,
    replace(PLAIN, causal=True, used="k", batch=5, dtype="float16"),
    replace(PLAIN, seqlen_q=9, heads_q=8, causal=True, sink=True),
    replace(PLAIN, seqlen_q=16, heads_q=8, causal=True),
    replace(PLAIN, window=(300, 0), used="k"),
    replace(PLAIN, window=(90, 5, 40), used="k", seqlen_q=7),
    replace(PLAIN, softcap=3.0, alibi="bh"),
    replace(PLAIN, tree_mask=True, used="k"),
    replace(PLAIN, page_size=7, batch=3),
    replace(PLAIN, page_size=16, leftpad_k=True),
    replace(PLAIN, varlen="q", used="k", batch=4, causal=True),
    replace(PLAIN, varlen="qk", used="q", batch=4),
    replace(PLAIN, head_dim=64),
    replace(PLAIN, head_dim=256),
    replace(PLAIN, head_dim=96, head_dim_v=40),
    replace(PLAIN, kv_dtype="int8"),
    replace(PLAIN, kv_dtype="int8", kv_group=128, kv_shift=True, page_size=5),
    replace(PLAIN, kv_dtype="int8", kv_group=64),
    replace(PLAIN, kv_dtype="int4", kv_group=128),
    replace(PLAIN, kv_dtype="int4", kv_group=32, kv_shift=True),
    replace(PLAIN, kv_dtype="int4", kv_group=64, dtype="float16"),
    # Rows of 64 bytes, fetched ahead: up to the last key there is, and by heads apart not at all.
    replace(PLAIN, kv_dtype="int4", kv_group=128, seqlen_q=1, used="k", batch=5),
    replace(PLAIN, kv_dtype="int4", kv_group=128, seqlen_q=1, varlen="k", batch=5),
    replace(PLAIN, kv_dtype="int4", kv_group=128, seqlen_q=1, layout="heads_first"),
    replace(PLAIN, kv_dtype="int4", seqlen_q=1, leftpad_k=True, kv_batch_idx=True, batch=3),
    replace(PLAIN, kv_dtype="float8_e4m3fn"),
    replace(PLAIN, kv_dtype="float8_e4m3fn", dtype="float16", page_size=16),
    replace(PLAIN, kv_dtype="float8_e5m2"),
    replace(PLAIN, kv_dtype="float8_e4m3fn", kv_group=128, page_size=16),
    replace(PLAIN, kv_dtype="float8_e4m3fn", kv_group=32),
    replace(PLAIN, kv_dtype="float8_e4m3fn", softcap=3.0, alibi="bh", used="k"),
    replace(PLAIN, kv_dtype="float8_e4m3fn", dtype="float8_e4m3fn"),
    replace(PLAIN, dtype="float8_e4m3fn", page_size=16, causal=True, heads_q=8, seqlen_q=16),
    # No other kernel takes 8-bit queries over a cache.
    replace(PLAIN, dtype="float8_e4m3fn", page_size=16, causal=True, heads_q=8, seqlen_q=170),
    replace(PLAIN, dtype="float8_e4m3fn", page_size=16, causal=True, varlen="q", seqlen_q=300),
    # Padded batches.
    replace(PLAIN, used="k", batch=9, lens_k=(0, 603, 0, 0, 7, 0, 300, 0, 0), sink=True),
    replace(PLAIN, page_size=16, batch=5, lens_k=(90, 0, 0, 603, 0), seqlen_q=16, heads_q=8),
    replace(PLAIN, page_size=16, batch=3, lens_k=(0, 0, 0), seqlen_q=1),
    replace(PLAIN, used="qk", leftpad_k=True, batch=600, seqlen_k=70, seqlen_q=1, sink=True),
)


@pytest.mark.parametrize("num_splits", (0, 3))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_is_within_its_error_budget(case, num_splits):
    run(Prepared("decode/portable"), replace(case, num_splits=num_splits), "cuda")


def _variant(rng: random.Random) -> Case:
    """A case that differs from others in what the kernel is compiled for."""
    kv = rng.choice(("", "", "", "int8", "int4", "float8_e4m3fn"))
    dim = rng.choice((64, 128, 128, 256))
    group = rng.choice((dim, 32, 16)) if kv.startswith("int") else 0
    varlen = rng.choice(("", "", "q", "qk")) if not kv else ""
    paged = "k" not in varlen and rng.random() < 0.4
    return replace(
        PLAIN,
        head_dim=dim,
        dtype=rng.choice(("bfloat16", "bfloat16", "float16")),
        causal=rng.random() < 0.5,
        window=rng.choice(((-1, -1), (-1, -1), (200, 0), (90, 4, 30))),
        softcap=rng.choice((0.0, 0.0, 8.0)),
        alibi=rng.choice(("", "", "bh")),
        sink=rng.random() < 0.3,
        tree_mask=not varlen and rng.random() < 0.2,
        varlen=varlen,
        used=rng.choice(("", "k", "k")),
        page_size=16 if paged else 0,
        kv_batch_idx=not paged and "k" not in varlen and rng.random() < 0.2,
        leftpad_k=rng.random() < 0.2,
        kv_dtype=kv,
        kv_group=group,
        kv_shift=bool(group) and rng.random() < 0.4,
        layout=rng.choice(("contiguous", "contiguous", "heads_first")),
    )


@st.composite
def problems(draw, variant: Case) -> Case:
    """A problem of at most 64 rows of a KV head, lengths of 0 and 1 among them."""
    group = draw(st.sampled_from((1, 2, 4, 5)))
    heads_k = draw(st.integers(1, 3))
    longest = draw(st.sampled_from((1, 17, 300, 2500)))
    return replace(
        variant,
        batch=draw(st.integers(1, 6)),
        heads_k=heads_k,
        heads_q=heads_k * group,
        seqlen_q=draw(st.integers(1, 64 // group if variant.tree_mask else 12)),
        seqlen_k=draw(st.integers(1, longest)),
        page_size=draw(st.sampled_from((1, 7, 16, 64))) if variant.page_size else 0,
        num_splits=draw(st.sampled_from((0, 0, 1, 4))),
        seed=draw(st.integers(0, 2**16)),
    )


MLA = replace(
    PLAIN, heads_q=16, heads_k=1, head_dim=576, head_dim_v=512, v_in_k=True, used="k", seqlen_q=1
)
WIDE = (
    MLA,
    replace(MLA, seqlen_q=2, heads_q=128, causal=True, batch=3),
    replace(MLA, seqlen_q=4, page_size=1, causal=True),
    replace(MLA, seqlen_q=3, heads_q=40, page_size=64, sink=True, dtype="float16"),
    replace(MLA, page_size=16, batch=5, window=(300, 0)),
    replace(MLA, seqlen_q=16, heads_q=128, causal=True, page_size=64),
    replace(MLA, layout="heads_first", softcap=20.0),
    # Narrow heads whose values are all of their keys.
    replace(MLA, head_dim=128, head_dim_v=128, heads_k=2),
    replace(MLA, head_dim=192, head_dim_v=128, kv_dtype="float8_e4m3fn"),
)
# The same over 8 bits: with scales of heads, and in rows of 656 bytes.
LATENT_8 = [
    replace(case, kv_dtype=stored, layout="contiguous", dtype=dtype)
    for stored, dtype in (
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e4m3fn", "float16"),
        ("fp8_ds_mla", "bfloat16"),
    )
    for case in WIDE[:7]
]


@pytest.mark.parametrize("size", (2.0**20, 2.0**-20))
def test_queries_that_float16_cannot_hold_meet_stored_floats_alike(size):
    q = torch.randn(2, 1, 8, 128, device="cuda").bfloat16()
    k, v = (torch.randn(2, 500, 2, 128, device="cuda").to(torch.float8_e4m3fn) for _ in "kv")

    def attend(q, scale):
        return heedful.flash_attn_with_kvcache(
            q, k, v, softmax_scale=scale, backend=forced("decode/portable")
        )

    assert torch.equal(attend(q, 0.1), attend(q * size, 0.1 / size))


@pytest.mark.parametrize("num_splits", (0, 1, 3))
@pytest.mark.parametrize("case", (*WIDE, *LATENT_8), ids=str)
def test_values_that_lie_in_keys_are_within_the_error_budget(case, num_splits):
    run(Prepared("decode/portable"), replace(case, num_splits=num_splits), "cuda")


def test_a_call_over_latent_vectors_runs_a_kernel_that_reads_them_once():
    latent = torch.randn(40, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(4, 1, 128, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(40, device="cuda").int().view(4, 10)
    lengths = torch.tensor([640, 1, 0, 333], dtype=torch.int32, device="cuda")
    given: Any = {"cache_seqlens": lengths, "block_table": table}
    text = heedful.explain(heedful.flash_attn_with_kvcache, q, latent, latent[..., :512], **given)
    assert "forward   decode/" in text
    got = heedful.flash_attn_with_kvcache(q, latent, latent[..., :512], **given)
    assert got[0].any() and not got[2].any()


@pytest.mark.parametrize("heads", (16, 128))
@pytest.mark.parametrize("is_rows", (False, True))
def test_a_replayed_graph_over_latent_vectors_of_8_bits_reads_lengths_anew(is_rows, heads):
    latent = torch.randn(40, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    stored = heedful.pack_latent(latent) if is_rows else latent.to(torch.float8_e4m3fn)
    values = stored if is_rows else stored[..., :512]
    q = torch.randn(4, 1, heads, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(40, device="cuda").int().view(4, 10)
    lengths = torch.tensor([640, 1, 0, 333], dtype=torch.int32, device="cuda")

    def step():
        return heedful.flash_attn_with_kvcache(
            q, stored, values, cache_seqlens=lengths, block_table=table
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = step()
    draw = random.Random(0)
    for _ in range(20):
        new = [draw.choice((0, 1, draw.randrange(640), 640, -1)) for _ in range(4)]
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, step())


VARIANTS = distinct(60, _variant)


@pytest.mark.parametrize("variant", VARIANTS[:10], ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_a_random_problem_is_within_its_error_budget(variant, data):
    run(Prepared("decode/portable"), data.draw(problems(variant)), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[10:], ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_two_thousand_random_problems_are_within_their_error_budgets(variant, data):
    run(Prepared("decode/portable"), data.draw(problems(variant)), "cuda")


def pages(batch: int, longest: int, size: int = 16):
    """Shuffled pages for that many keys of each sequence."""
    many = -(-longest // size)
    k, v = (
        torch.randn(batch * many, size, 2, 128, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    table = torch.randperm(batch * many, device="cuda").int().view(batch, many)
    return k, v, table


@pytest.mark.parametrize("backend", DECODES)
def test_a_replayed_graph_reads_lengths_and_tables_anew(backend):
    k, v, table = pages(6, 5000)
    q = torch.randn(6, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([5000, 3, 700, 0, 64, 2000], dtype=torch.int32, device="cuda")

    def step():
        return heedful.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, causal=True, backend=backend
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = step()
    draw = random.Random(0)
    for _ in range(20):
        new = [draw.choice((0, 1, 2, draw.randrange(5000), 5000, -1)) for _ in range(6)]
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        table.copy_(table[torch.randperm(6)])
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.parametrize(
    "backend, kernel, dims",
    [
        (forced("decode/portable"), "decode", (128, 128)),
        pytest.param("hopper_decode", "decode", (128, 128), marks=[*ON_HOPPER, WITH_TRITON_3_9]),
        pytest.param("mla_swap_ab", "mla_swap_ab", (576, 512), marks=[*ON_HOPPER, WITH_TRITON_3_9]),
        pytest.param("mla", "mla", (576, 512), marks=[*ON_HOPPER, WITH_TRITON_3_9]),
    ],
)
def test_a_replay_runs_one_kernel_and_fills_nothing(backend, kernel, dims):
    q = torch.randn(2, 1, 16, dims[0], device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 8000, 1, dims[0], device="cuda", dtype=torch.bfloat16)
    v = k[..., : dims[1]]
    lengths = torch.tensor([8000, 700], dtype=torch.int32, device="cuda")
    step = partial(heedful.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, backend=backend)
    step()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    ran = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
    assert [(event.key, event.count) for event in ran] == [(kernel, 1)]


@pytest.mark.parametrize("backend", DECODES)
@pytest.mark.parametrize("num_splits", (1, 8))
def test_with_splits_given_a_sequence_has_the_same_bits_in_any_batch(num_splits, backend):
    k, v, table = pages(9, 9000)
    q = torch.randn(9, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([9000, 1, 64, 700, 8999, 0, 129, 3000, 17], device="cuda").int()

    def call(which):
        return heedful.flash_attn_with_kvcache(
            q[which],
            k,
            v,
            cache_seqlens=lengths[which],
            block_table=table[which],
            num_splits=num_splits,
            return_softmax_lse=True,
            backend=backend,
        )

    whole = call(torch.arange(9, device="cuda"))
    for which in ([0], [3], [8, 0], [4, 4, 4, 4], [7, 5, 2], list(range(8, -1, -1))):
        index = torch.tensor(which, device="cuda")
        for got, want in zip(call(index), whole, strict=True):
            assert torch.equal(got, want[index])


@pytest.mark.parametrize("backend", DECODES)
def test_many_parts_are_merged_whatever_the_order_they_end_in(backend):
    """More parts of a unit than are merged at once; fifty runs, of which each counts from zero."""
    q = torch.randn(1, 1, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 40000, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    first = heedful.flash_attn_with_kvcache(q, k, v, backend=backend)
    for _ in range(50):
        assert torch.equal(heedful.flash_attn_with_kvcache(q, k, v, backend=backend), first)
