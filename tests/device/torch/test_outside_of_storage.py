"""On a GPU nothing outside of the caller's tensors is touched, whatever page numbers, indices and
lengths say, and every packed token has a result. Caches lie within larger tensors of NaN."""

from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.core.registry.by_hand import forced
from heedful.torch.base.device import toolchain
from heedful.torch.eager.cache_update import append_kv
from support.captures import graph_capture
from support.fenced import Fenced
from support.hopper.device import WITH_TRITON_3_9

pytestmark = pytest.mark.gpu

DECODE = forced("decode/portable")
BACKENDS = ["hopper", "portable", DECODE]
# Of packed queries.
OF_PACKED = [*BACKENDS, pytest.param("hopper_decode", marks=WITH_TRITON_3_9)]
MOST_ROWS = {DECODE: 64, "hopper_decode": 64}  # of all query heads of a KV head
INF = float("inf")
# Bad numbers next to the cache, whose guards show them, and anywhere else.
NEAR, FAR = (-1, -2, 0, 1), (2**31 - 1, -(2**31), 2**30 + 7, -12345678)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def randn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def fenced(*shape: int, layout: str = "contiguous") -> Fenced:
    """Random values; layout "heads_first" has rows of a head side by side."""
    if layout == "heads_first":
        first, rows, heads, dim = shape
        kept = Fenced.like(randn(first, heads, rows, dim))
        kept.inside = kept.inside.transpose(1, 2)
        return kept
    return Fenced.like(randn(*shape))


def poison_the_allocator(*shapes: tuple[int, ...]) -> None:
    """So that outputs nobody wrote are NaN."""
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def skip_what_it_does_not_take(backend: str, facts: str) -> None:
    if facts == "fp8" and backend == "portable":
        pytest.skip("8-bit inputs run on hopper kernels")
    if facts == "fp8" and backend == "hopper" and (toolchain().triton or ()) < (3, 9):
        pytest.skip("fp8 needs Triton 3.9")
    if facts == "fp8" and backend == "hopper_decode":
        pytest.skip("the Hopper decode takes 16-bit inputs alone")
    if facts in ("bias", "training") and backend in MOST_ROWS:
        pytest.skip("decodes take neither additive bias nor a later backward")


@pytest.mark.parametrize("numbers", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize("layout", ["contiguous", "heads_first"])
@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
@pytest.mark.parametrize("rows, num_splits", [(1, 1), (1, 3), (200, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_do_not_exist_read_the_cache_or_nothing(
    backend, rows, num_splits, page_size, layout, numbers
):
    if 4 * rows > MOST_ROWS.get(backend, 4 * rows):
        pytest.skip("more rows than decode takes")
    pages, each = 9, 6
    k, v = (fenced(pages, page_size, 2, 128, layout=layout) for _ in range(2))
    table = torch.randint(0, pages, (3, each), device="cuda").int()
    table[0, 1], table[1, 0], table[1, 3], table[2, 2] = (
        n if n < 0 or n > 99 else pages + n for n in numbers
    )
    q, lengths = randn(3, rows, 8, 128), ints(*[each * page_size - n for n in (0, 7, 11)])
    keywords: dict[str, Any] = {"cache_seqlens": lengths, "num_splits": num_splits}
    keywords |= {"backend": backend, "return_softmax_lse": True}
    out, lse = heedful.flash_attn_with_kvcache(q, k.inside, v.inside, block_table=table, **keywords)
    assert out.isfinite().all() and lse.isfinite().all()
    if backend == "portable":
        near = table.clamp(0, pages - 1)
        want = heedful.flash_attn_with_kvcache(q, k.inside, v.inside, block_table=near, **keywords)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_past_a_length_are_not_looked_up(backend):
    k, v, q = randn(6, 16, 2, 64), randn(6, 16, 2, 64), randn(2, 1, 4, 64)
    table = ints(1, 2, 3, 4, 5, 0).view(2, 3)
    keywords: dict[str, Any] = {"cache_seqlens": ints(16, 33), "backend": backend}
    want = heedful.flash_attn_with_kvcache(q, k, v, block_table=table, **keywords)
    table[0, 1:] = 2**31 - 1
    got = heedful.flash_attn_with_kvcache(q, k, v, block_table=table, **keywords)
    assert torch.equal(got, want)


@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("rows, num_splits", [(1, 1), (1, 4), (150, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_below_one_read_nothing_and_give_zeros(backend, rows, num_splits, page_size, sink):
    if 2 * rows > MOST_ROWS.get(backend, 2 * rows):
        pytest.skip("more rows than decode takes")
    nothing = torch.full((4, 1024, 2, 64), torch.nan, device="cuda").bfloat16()
    keywords: dict[str, Any] = {}
    if page_size:
        nothing = nothing.view(-1, page_size, 2, 64)
        keywords["block_table"] = torch.full((4, 64), -1, device="cuda").int()
    if sink:
        keywords["sink"] = torch.randn(4, device="cuda")
    q = randn(4, rows, 4, 64)
    poison_the_allocator(q.shape, (4, 4, rows))
    out, lse = heedful.flash_attn_with_kvcache(
        q,
        nothing,
        nothing,
        cache_seqlens=ints(-1, 0, -(2**31), -300),
        num_splits=num_splits,
        return_softmax_lse=True,
        backend=backend,
        **keywords,
    )
    assert (out == 0).all()
    want = torch.full_like(lse, -INF)
    if sink:
        want = keywords["sink"][None, :, None].expand_as(lse)
    torch.testing.assert_close(lse, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_rows_and_padding_beyond_the_cache_stay_in_it(backend):
    k, v, q = fenced(3, 200, 2, 64), fenced(3, 200, 2, 64), randn(4, 3, 4, 64)

    def call(lengths, rows, pad):
        return heedful.flash_attn_with_kvcache(
            q,
            k.inside,
            v.inside,
            cache_seqlens=ints(*lengths),
            cache_batch_idx=ints(*rows),
            cache_leftpad=ints(*pad),
            causal=True,
            return_softmax_lse=True,
            backend=backend,
        )

    got = call((201, 2**31 - 1, 90, 200), (-1, 3, 1, 2**31 - 1), (0, 0, -3, 10))
    assert all(t.isfinite().all() for t in got)
    want = call((200, 200, 93, 200), (0, 2, 1, 2), (0, 0, 0, 10))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not call((150, 9, 3, 0), (0, 1, 2, 0), (500, 2**31 - 1, 200, -(2**31)))[0].isnan().any()


@pytest.mark.parametrize("rotary", [False, True], ids=["still", "rotary"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_new_tokens_that_have_no_place_are_dropped(page_size, rotary):
    new, capacity = 5, 48
    shape = (12, page_size, 2, 64) if page_size else (5, capacity, 2, 64)
    k, v = fenced(*shape), fenced(*shape)
    k_new, v_new, q = randn(5, new, 2, 64), randn(5, new, 2, 64), randn(5, new, 4, 64)
    lengths = ints(-1, 46, 2**31 - 1, 3, 14)
    table = rows = None
    if page_size:
        table = ints(5, 0, 3, 8, 1, 2, 4, 6, 7, 9, 10, 11, 2**31 - 1, 12, 0).view(5, 3)
    else:
        rows = ints(0, 1, 2, 3, 9)
    keywords: dict[str, Any] = {}
    if rotary:
        # Turns of nothing: positions beyond the tables must not be looked up.
        cos, sin = (Fenced.like(x(capacity, 16), "cuda") for x in (torch.ones, torch.zeros))
        keywords = {"rotary_cos": cos.inside, "rotary_sin": sin.inside}
    want = k.inside.cpu().clone(), v.inside.cpu().clone()
    at_rows, in_table = (None if t is None else t.cpu() for t in (rows, table))
    append_kv(*want, k_new.cpu(), v_new.cpu(), lengths.cpu(), at_rows, in_table, False)
    out = heedful.flash_attn_with_kvcache(
        q,
        k.inside,
        v.inside,
        k_new,
        v_new,
        cache_seqlens=lengths,
        cache_batch_idx=rows,
        block_table=table,
        causal=True,
        **keywords,
    )
    for kept, expected in zip((k, v), want, strict=True):
        kept.assert_whole()
        assert torch.equal(kept.inside.cpu(), expected)
    assert out.isfinite().all() and (out[0] == 0).all()


@pytest.mark.parametrize(
    "bounds",
    [(300, 500, 700, 1000), (0, 200, 500, 700), (77, 400, 400, 611), (0, 0, 0, 0)],
    ids=str,
)
@pytest.mark.parametrize("facts", ["plain", "causal", "splits", "used", "training", "fp8"])
@pytest.mark.parametrize("backend", OF_PACKED)
def test_packed_tokens_of_no_sequence_are_zeros_and_minus_infinity(backend, facts, bounds):
    dtype = torch.float8_e4m3fn if facts == "fp8" else torch.bfloat16
    skip_what_it_does_not_take(backend, facts)
    keys, few = ints(*bounds), 10 if backend in MOST_ROWS else 1
    bounds = [row // few for row in bounds]
    cu, total = ints(*bounds), 1000 // few
    q, k, v = (randn(rows, 4, 64, dtype=dtype) for rows in (total, 1000, 1000))
    keywords: dict[str, Any] = {"causal": facts == "causal"}
    if facts == "splits":
        keywords["num_splits"] = 3
    if facts == "used":
        keywords["seqused_q"] = ints(50, 20, -1)
    if facts == "training":
        q.requires_grad_()
    poison_the_allocator((total, 4, 64), (4, total), (3, total, 4, 64), (3, 4, total))
    out, lse = heedful.flash_attn_varlen_func(
        q, k, v, cu, keys, 500 // few, 500, return_lse=True, backend=backend, **keywords
    )
    seen = torch.zeros(total, dtype=torch.bool)
    for b, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        used = (50, 20, 0)[b] if facts == "used" else total
        seen[begin : min(end, begin + used)] = True
    seen = seen.to("cuda")
    assert (out[~seen] == 0).all() and (lse[:, ~seen] == -INF).all()
    assert out[seen].isfinite().all() and lse[:, seen].isfinite().all()
    if facts == "training":
        (dq,) = torch.autograd.grad(out.float().square().sum(), q)
        assert dq.isfinite().all() and (dq[~seen] == 0).all()


@pytest.mark.parametrize(
    "bounds", [(900, 100, 5000, 40), (-500, 800, 2**31 - 1, -(2**31))], ids=["falling", "outside"]
)
@pytest.mark.parametrize("facts", ["plain", "causal", "bias", "fp8"])
@pytest.mark.parametrize("backend", OF_PACKED)
def test_bounds_that_cannot_be_stay_in_the_tensors(backend, facts, bounds):
    skip_what_it_does_not_take(backend, facts)
    total = 1000
    q, k, v = (fenced(total, 4, 64).inside for _ in range(3))
    keywords: dict[str, Any] = {"causal": facts == "causal", "backend": backend}
    if facts == "bias":
        # Its rows and keys are fewer than those of the sequences.
        keywords["bias"] = fenced(3, 4, 96, 120).inside
    if facts == "fp8":
        q, k, v = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
    out = fenced(total, 4, 64)
    lengths = (96, 120) if facts == "bias" else (MOST_ROWS.get(backend, total), total)
    for _ in range(3):
        heedful.flash_attn_varlen_func(
            q, k, v, ints(*bounds), ints(*bounds), *lengths, out=out.inside, **keywords
        )
    torch.cuda.synchronize()
    out.assert_whole()


def test_checking_pages_names_row_and_entry_and_refuses_capture(monkeypatch):
    monkeypatch.setenv("HEEDFUL_CHECK_PAGES", "1")
    # Sizes of no other test: whether to check is asked when a kind of call is first seen.
    k, v, q = randn(5, 32, 2, 40), randn(5, 32, 2, 40), randn(2, 1, 2, 40)
    table, lengths = ints(0, 1, 2, 3, 4, 9).view(2, 3), ints(64, 63)
    kept = k.clone()
    for wrong in (-1, 5):
        table[1, 2] = wrong
        heedful.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
        with pytest.raises(ValueError, match=f"got {wrong} in row 1, entry 2"):
            heedful.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths + 2, block_table=table)
    # With new tokens before they are written, into pages that they alone reach.
    new = randn(2, 2, 2, 40)
    with pytest.raises(ValueError, match="got 5 in row 1, entry 2"):
        heedful.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths, block_table=table)
    assert torch.equal(k, kept)
    refused = pytest.raises(ValueError, match="HEEDFUL_CHECK_PAGES must be 0")
    with refused, graph_capture(torch.cuda.CUDAGraph()):
        heedful.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
