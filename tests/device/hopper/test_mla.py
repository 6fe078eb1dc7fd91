"""The MLA decodes on a GPU: their error budgets, and what shares of the keys may not change."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful.torch as heedful
from heedful.core.call.problem import LATENT_ROWS
from heedful.core.registry.by_hand import forced
from heedful.core.registry.gates import SWAP_AB_ROWS
from support.captures import graph_capture
from support.hopper.device import WITH_TRITON_3_9
from support.problems.budget import run
from support.problems.cases import Case
from support.runs.prepared import Prepared

pytestmark = [pytest.mark.gpu, WITH_TRITON_3_9]
KERNELS = ("mla", "mla_swap_ab")

PLAIN = Case(
    dtype="bfloat16",
    backward=False,
    seqlen_q=1,
    seqlen_k=603,
    heads_q=16,
    heads_k=1,
    head_dim=576,
    head_dim_v=512,
    v_in_k=True,
)
CASES = (
    PLAIN,
    replace(PLAIN, used="k", batch=5),
    replace(PLAIN, heads_q=128, used="k", batch=5, seqlen_k=1500),
    replace(PLAIN, heads_q=128, seqlen_q=2, causal=True, used="k", batch=3, dtype="float16"),
    replace(PLAIN, heads_q=40, seqlen_q=3, page_size=64, used="k"),
    replace(PLAIN, seqlen_q=4, causal=True, page_size=16, used="k", batch=3),
    replace(PLAIN, seqlen_q=5, heads_q=24, causal=True, page_size=48, used="qk", batch=3),
    replace(PLAIN, heads_q=128, seqlen_q=16, causal=True, page_size=256, used="k"),
    replace(PLAIN, leftpad_k=True, used="k", batch=3),
    replace(PLAIN, kv_batch_idx=True, used="k", batch=3),
    replace(PLAIN, layout="heads_first", head_dim=544),
    # Scores so far apart that references rise by more than the threshold again and again.
    replace(PLAIN, scale=3.0, seqlen_k=4096),
    replace(PLAIN, scale=3.0, heads_q=128, seqlen_k=4000, used="k", dtype="float16"),
    replace(PLAIN, heads_q=6, heads_k=2, seqlen_k=300, shift=-7, causal=True, seqlen_q=2),
)


def rows(case: Case) -> int:
    return case.seqlen_q * case.heads_q // case.heads_k


# Tiles of 16 rows and of 32, and how parts are merged.
SWAP_AB_CASES = (
    *(case for case in CASES if rows(case) <= SWAP_AB_ROWS),
    replace(PLAIN, heads_q=8, seqlen_q=3, causal=True, page_size=64, used="k", batch=4),
    replace(PLAIN, heads_q=32, used="k", batch=5, seqlen_k=1500, dtype="float16"),
    replace(PLAIN, heads_q=4, used="k", page_size=16, scale=3.0, seqlen_k=3000),
)
# Of 8 bits: rows must begin at multiples of 16 bytes; rows of bytes have 576 columns beside queries
# of bfloat16. Tiles of 16 rows, one of 32 and several.
CONVERTING_CASES = (
    *(replace(case, kv_dtype="float8_e4m3fn") for case in CASES),
    replace(PLAIN, heads_q=32, used="k", kv_dtype="float8_e4m3fn", dtype="float16"),
    *(
        replace(case, kv_dtype=LATENT_ROWS, dtype="bfloat16", layout="contiguous")
        for case in CASES
        if case.head_dim == 576
    ),
)
# Tiles of 64 rows.
PAIR_CASES = [
    *(case for case in CONVERTING_CASES if rows(case) > SWAP_AB_ROWS),
    replace(PLAIN, heads_q=64, used="k", batch=5, seqlen_k=1500, kv_dtype=LATENT_ROWS),
    replace(PLAIN, heads_q=64, leftpad_k=True, used="k", batch=3, kv_dtype="float8_e4m3fn"),
    replace(PLAIN, heads_q=64, kv_batch_idx=True, used="k", batch=3, kv_dtype="float8_e4m3fn"),
]
# Queries by a tensor map: boxes of 64 heads, of fewer heads at several positions, past the last
# position, and of fewer columns.
MAPPED_CASES = (
    replace(PLAIN, heads_q=128, used="k", batch=5, seqlen_k=1500),
    replace(PLAIN, heads_q=128, seqlen_q=2, causal=True, used="k", batch=3, dtype="float16"),
    replace(PLAIN, heads_q=32, heads_k=2, seqlen_q=5, causal=True, page_size=64, used="k", batch=3),
    replace(PLAIN, heads_q=64, layout="heads_first", head_dim=544),
)
MAPPED_BYTES = (
    *(replace(case, kv_dtype="float8_e4m3fn") for case in MAPPED_CASES),
    replace(MAPPED_CASES[0], kv_dtype=LATENT_ROWS),
)
BY_HAND = [
    *(("mla+query_map=1", case, 0) for case in MAPPED_CASES),
    *(("mla+query_map=1+thread_order=1+merge=1", case, 0) for case in MAPPED_CASES),
    *(
        ("mla+query_map=1+thread_order=1+merge=0", case, splits)
        for case in MAPPED_CASES
        for splits in (0, 3)
    ),
    ("mla_converting_pair+query_map=1+merge=1", MAPPED_BYTES[0], 0),
    *(("mla_converting_pair+query_map=1+thread_order=1+merge=1", case, 0) for case in MAPPED_BYTES),
    *(
        ("mla_converting_pair+query_map=1+thread_order=1+merge=0", case, splits)
        for case in MAPPED_BYTES
        for splits in (0, 3)
    ),
]
BY_KERNEL = [
    *(("mla_converting", case) for case in CONVERTING_CASES),
    *(("mla_converting+merge=1", case) for case in CONVERTING_CASES),
    *(("mla_converting_pair", case) for case in PAIR_CASES),
    *(("mla_converting_pair+merge=1", case) for case in PAIR_CASES),
    *(("mla", case) for case in CASES),
    *(("mla+query_boxes=2+merge=0", case) for case in CASES if rows(case) > SWAP_AB_ROWS),
    *(("mla_swap_ab", case) for case in SWAP_AB_CASES),
    *(("mla_swap_ab+merge=1", case) for case in SWAP_AB_CASES),
]


@pytest.mark.parametrize("num_splits", (0, 1, 3))
@pytest.mark.parametrize(("kernel", "case"), BY_KERNEL, ids=str)
def test_mla_is_within_its_error_budget(kernel, case, num_splits):
    run(Prepared(kernel), replace(case, num_splits=num_splits), "cuda")


@pytest.mark.parametrize(("kernel", "case", "num_splits"), BY_HAND, ids=str)
def test_queries_by_tensor_maps_and_parts_in_thread_order_are_within_budget(
    kernel, case, num_splits
):
    run(Prepared(kernel), replace(case, num_splits=num_splits), "cuda")


def variants() -> list[Case]:
    """What differs in what the kernel is compiled for."""
    return [
        replace(
            PLAIN,
            dtype=dtype,
            causal=causal,
            used="k",
            page_size=page,
            num_splits=splits,
        )
        for dtype, causal, page, splits in (
            ("bfloat16", False, 0, 0),
            ("bfloat16", True, 64, 0),
            ("bfloat16", True, 16, 3),
            ("float16", True, 0, 0),
            ("float16", False, 32, 0),
        )
    ]


@st.composite
def problems(draw, kernel: str, variant: Case) -> Case:
    """Lengths of 0 and 1 among them; rows of one tile and of several."""
    few = kernel == "mla_swap_ab"
    heads = draw(st.sampled_from((1, 5, 16, 32) if few else (1, 5, 16, 64, 128)))
    longest = draw(st.sampled_from((1, 65, 300, 2500)))
    return replace(
        variant,
        batch=draw(st.integers(1, 6)),
        heads_q=heads,
        seqlen_q=draw(st.integers(1, min(4, SWAP_AB_ROWS // heads) if few else 4)),
        seqlen_k=draw(st.integers(1, longest)),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("variant", variants(), ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_random_problem_is_within_its_error_budget(kernel, variant, data):
    run(Prepared(kernel), data.draw(problems(kernel, variant)), "cuda")


def latent(batch: int, longest: int, heads: int, size: int = 64):
    """Queries, and latent vectors in shuffled pages for that many keys of each sequence."""
    many = -(-longest // size)
    q = torch.randn(batch, 1, heads, 576, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch * many, size, 1, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * many, device="cuda").int().view(batch, many)
    return q, k, table


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_replayed_graph_reads_lengths_and_tables_anew(kernel):
    q, k, table = latent(6, 5000, 32)
    lengths = torch.tensor([5000, 3, 700, 0, 64, 2000], dtype=torch.int32, device="cuda")

    def step():
        return heedful.flash_attn_with_kvcache(
            q, k, k[..., :512], cache_seqlens=lengths, block_table=table, backend=kernel
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


@pytest.mark.parametrize("num_splits", (1, 8))
@pytest.mark.parametrize(("kernel", "heads"), (("mla", 128), ("mla_swap_ab", 16)))
def test_with_splits_given_a_sequence_has_the_same_bits_in_any_batch(kernel, heads, num_splits):
    q, k, table = latent(9, 9000, heads)
    lengths = torch.tensor([9000, 1, 64, 700, 8999, 0, 129, 3000, 17], device="cuda").int()

    def call(which):
        return heedful.flash_attn_with_kvcache(
            q[which],
            k,
            k[..., :512],
            cache_seqlens=lengths[which],
            block_table=table[which],
            num_splits=num_splits,
            return_softmax_lse=True,
            backend=kernel,
        )

    whole = call(torch.arange(9, device="cuda"))
    for which in ([0], [3], [8, 0], [4, 4, 4, 4], [7, 5, 2], list(range(8, -1, -1))):
        index = torch.tensor(which, device="cuda")
        for got, want in zip(call(index), whole, strict=True):
            assert torch.equal(got, want[index])


@pytest.mark.parametrize(
    ("kernel", "heads"), (("mla", 64), ("mla_swap_ab", 16), ("mla_swap_ab+merge=0", 32))
)
def test_many_parts_are_merged_whatever_the_order_they_end_in(kernel, heads):
    """More parts of a unit than are merged at once; fifty runs, of which each counts from zero."""
    q, k, table = latent(1, 60000, heads)

    def call():
        return heedful.flash_attn_with_kvcache(
            q, k, k[..., :512], block_table=table, cache_seqlens=60000, backend=forced(kernel)
        )

    first = call()
    for _ in range(50):
        assert torch.equal(call(), first)
