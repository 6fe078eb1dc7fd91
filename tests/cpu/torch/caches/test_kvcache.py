"""Attention over a KV cache: what is read, what is written, and where."""

import pytest
import torch

import heedful.torch as heedful
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.torch.eager.cache_update import rotate
from support.problems.budget import check
from support.problems.cases import Case, build, variants
from support.runs.api import assert_agrees, dense_problem, results

READ = [
    Case(used="k", backward=False),
    *variants(
        Case(used="k", backward=False, batch=3, heads_q=4, causal=True),
        dtype=["float16", "bfloat16"],
        seqlen_q=[0, 1, 4],
        window=[(9, 3), (8, 0, 2)],
        softcap=[5.0],
        alibi=["h", "bh"],
        sink=[True],
        num_splits=[1, 4],
        head_dim_v=[48],
        page_size=[1, 3, 16, 256],
        kv_batch_idx=[True],
        leftpad_k=[True],
        layout=["heads_first", "offset"],
        seqlen_k=[0, 1],
        batch=[0, 1],
    ),
    Case(kv_batch_idx=True, backward=False),
    Case(leftpad_k=True, used="k", page_size=5, backward=False),
    Case(tree_mask=True, used="k", seqlen_q=6, lens_k=(50, 6), backward=False),
    Case(tree_mask=True, used="k", seqlen_q=6, lens_k=(50, 9), causal=True, backward=False),
    *variants(
        Case(used="k", backward=False, dtype="bfloat16", heads_q=4, seqlen_q=2),
        kv_dtype=["int8", "int4", "float8_e4m3fn", "float8_e5m2"],
    ),
    Case(
        used="k",
        backward=False,
        dtype="bfloat16",
        kv_dtype="int4",
        kv_group=16,
        kv_shift=True,
        page_size=8,
    ),
    Case(used="k", backward=False, kv_dtype="int8", kv_shift=True),
    Case(used="k", backward=False, kv_dtype="int8", kv_group=8, kv_batch_idx=True),
]


@pytest.mark.parametrize("case", READ, ids=str)
def test_reading_a_cache_agrees_with_the_oracle(case):
    built = build(case)
    check(built, results(built))


class Cache:
    """A cache, contiguous or in pages, and what its sequences hold as plain per-sequence lists."""

    def __init__(self, lengths, capacity, page_size=0, dtype=torch.float32, heads=2, dim=16):
        self.lengths, self.capacity, self.page_size = lengths, capacity, page_size
        batch = len(lengths)
        if page_size:
            pages = -(-capacity // page_size)
            order = torch.randperm(batch * pages + 1)[: batch * pages]
            self.table = order.view(batch, pages).to(torch.int32)
            shape = (batch * pages + 1, page_size, heads, dim)
        else:
            self.table = None
            shape = (batch, capacity, heads, dim)
        self.k, self.v = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)

    @property
    def seqlens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)

    def place(self, b: int, position: int) -> tuple[int, int]:
        """Storage indices of a token."""
        if self.table is None:
            return b, position
        return int(self.table[b, position // self.page_size]), position % self.page_size

    def expected(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage after new tokens went in, token by token."""
        new_k, new_v = self.k.clone(), self.v.clone()
        for b, length in enumerate(self.lengths):
            for i in range(k.shape[1]):
                new_k[self.place(b, length + i)] = k[b, i]
                new_v[self.place(b, length + i)] = v[b, i]
        return new_k, new_v


@pytest.mark.parametrize("page_size", [0, 1, 3, 16])
@pytest.mark.parametrize("new", [1, 4])
def test_new_tokens_go_behind_the_old_ones_and_nowhere_else(page_size, new):
    cache = Cache([0, 7, 20], 24, page_size)
    q, k, v = torch.randn(3, new, 4, 16), torch.randn(3, new, 2, 16), torch.randn(3, new, 2, 16)
    want_k, want_v = cache.expected(k, v)
    got = heedful.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cache_seqlens=cache.seqlens, block_table=cache.table, causal=True
    )
    assert torch.equal(cache.k, want_k) and torch.equal(cache.v, want_v)
    after = heedful.flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        cache_seqlens=cache.seqlens + new,
        block_table=cache.table,
        causal=True,
    )
    assert torch.equal(got, after)


def test_new_tokens_go_into_the_rows_of_cache_batch_idx():
    k_cache, v_cache = torch.zeros(5, 8, 1, 4), torch.zeros(5, 8, 1, 4)
    rows, lengths = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32)
    k, v = torch.ones(2, 1, 1, 4), torch.full((2, 1, 1, 4), 2.0)
    heedful.flash_attn_with_kvcache(
        torch.randn(2, 1, 1, 4),
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=lengths,
        cache_batch_idx=rows,
    )
    assert k_cache.sum(-1).nonzero().tolist() == [[1, 5, 0], [4, 2, 0]]
    assert torch.equal(v_cache, 2 * k_cache)


def test_an_int_length_means_the_same_for_every_sequence():
    torch.manual_seed(0)
    one, other = Cache([5, 5], 12), Cache([5, 5], 12)
    other.k, other.v = one.k.clone(), one.v.clone()
    q, k, v = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 16)
    by_int = heedful.flash_attn_with_kvcache(q, one.k, one.v, k, v, cache_seqlens=5)
    by_tensor = heedful.flash_attn_with_kvcache(
        q, other.k, other.v, k, v, cache_seqlens=other.seqlens
    )
    assert torch.equal(by_int, by_tensor) and torch.equal(one.k, other.k)


def test_without_lengths_the_whole_cache_is_used():
    cache = Cache([9, 9], 9)
    q = torch.randn(2, 1, 4, 16)
    whole = heedful.flash_attn_with_kvcache(q, cache.k, cache.v)
    assert_agrees(whole, dense_problem(q, cache.k, cache.v), Operands(q, cache.k, cache.v))


def test_lengths_count_from_the_start_of_the_row_even_with_leftpad():
    cache = Cache([9, 12], 16)
    pad = torch.tensor([2, 5], dtype=torch.int32)
    q = torch.randn(2, 1, 4, 16)
    got = heedful.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.seqlens, cache_leftpad=pad
    )
    for b, (start, end) in enumerate(zip(pad.tolist(), cache.lengths, strict=True)):
        used = q[b : b + 1], cache.k[b : b + 1, start:end], cache.v[b : b + 1, start:end]
        assert_agrees(got[b : b + 1], dense_problem(*used), Operands(*used))


def turned(x: torch.Tensor, position: int, cos, sin, interleaved: bool) -> torch.Tensor:
    """One token's heads (heads, dim), rotated as complex numbers in float64."""
    half = cos.shape[1]
    rotary, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    if interleaved:
        pairs = torch.complex(rotary[..., 0::2], rotary[..., 1::2])
    else:
        pairs = torch.complex(rotary[..., :half], rotary[..., half:])
    pairs = pairs * torch.complex(cos[position].double(), sin[position].double())
    parts = [pairs.real, pairs.imag]
    rotary = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([rotary, rest], -1).to(x.dtype)


def exact_tables(positions: int, half: int, dtype=torch.float32):
    """Rotary tables by quarter turns and powers of two: rotating by them rounds nothing."""
    size = 2.0 ** torch.randint(-2, 2, (positions, half))
    size = torch.where(torch.rand(positions, half) < 0.5, size, -size)
    quarter = torch.rand(positions, half) < 0.5
    return torch.where(quarter, 0.0, size).to(dtype), torch.where(quarter, size, 0.0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["gptj", "neox"])
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
def test_rotary_positions_start_at_the_cache_length(interleaved, mask, dtype):
    """Keys advance; queries advance with them if causal or windowed, else all stand at the start:
    flash-attn's documented behaviour."""
    cache = Cache([0, 7], 24, dtype=dtype)
    new, advance = 3, mask != "full"
    q, k, v = (torch.randn(2, new, heads, 16).to(dtype) for heads in (4, 2, 2))
    cos, sin = exact_tables(24, 4, dtype)
    rotated_q, rotated_k = torch.empty_like(q), torch.empty_like(k)
    for b, start in enumerate(cache.lengths):
        for i in range(new):
            rotated_k[b, i] = turned(k[b, i], start + i, cos, sin, interleaved)
            rotated_q[b, i] = turned(q[b, i], start + i * advance, cos, sin, interleaved)
    want_k, want_v = cache.expected(rotated_k, v)
    keywords: dict = {"causal": mask == "causal", "return_softmax_lse": True, "backend": "cpu"}
    keywords |= {"window_size": (4, 2)} if mask == "window" else {}
    got = heedful.flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        k,
        v,
        cos,
        sin,
        cache_seqlens=cache.seqlens,
        rotary_interleaved=interleaved,
        **keywords,
    )
    assert torch.equal(cache.k, want_k) and torch.equal(cache.v, want_v)
    want = heedful.flash_attn_with_kvcache(
        rotated_q, want_k, want_v, cache_seqlens=cache.seqlens + new, **keywords
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("interleaved", [True, False], ids=["gptj", "neox"])
def test_rotation_by_any_angle_is_rounded_once(interleaved):
    x = torch.randn(1, 3, 2, 16)
    turns = torch.arange(3)[:, None] * 0.3 ** torch.arange(6)
    start = torch.zeros(1, dtype=torch.int32)
    got = rotate(x, turns.cos(), turns.sin(), start, interleaved)
    for i in range(3):
        want = turned(x[0, i].double(), i, turns.cos(), turns.sin(), interleaved)
        # Two products and a sum, each rounded: half a unit of the larger product, and of the sum.
        scale = x[0, i].abs().max() * torch.finfo(torch.float32).eps
        assert (got[0, i] - want).abs().max() <= 2 * scale


def test_decoding_token_by_token_is_one_causal_attention():
    """Prefill, then single tokens with rotary; the oracle sees everything at once."""
    total, prompt = 12, 7
    q, k, v = (torch.randn(2, total, heads, 16) for heads in (4, 2, 2))
    cos, sin = exact_tables(16, 8)
    caches = torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16)
    steps = []
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, total))]:
        new = slice(start, stop)
        step = heedful.flash_attn_with_kvcache(
            q[:, new], *caches, k[:, new], v[:, new], cos, sin, cache_seqlens=start, causal=True
        )
        steps.append(step)
    rotated_q, rotated_k = (
        torch.stack([turned(x[:, i], i, cos, sin, True) for i in range(total)], 1) for x in (q, k)
    )
    problem = dense_problem(rotated_q, rotated_k, v, causal=True)
    assert_agrees(torch.cat(steps, 1), problem, Operands(rotated_q, rotated_k, v))


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
def test_a_shared_prefix_equals_a_cache_that_begins_with_it(sink, rotary):
    prefix_len, new, capacity, lengths = 6, 3, 12, [0, 5]
    prefix = torch.randn(prefix_len, 2, 16), torch.randn(1, prefix_len, 2, 16)
    cache = Cache(lengths, capacity)
    q, k, v = (torch.randn(2, new, heads, 16) for heads in (4, 2, 2))
    cos, sin = exact_tables(capacity + prefix_len, 4)
    sinks = torch.randn(4) if sink else None
    out, lse = heedful.flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        k,
        v,
        *((cos, sin) if rotary else ()),
        cache_seqlens=cache.seqlens,
        shared_prefix=prefix,
        sink=sinks,
        causal=True,
        return_softmax_lse=True,
    )
    for b, length in enumerate(lengths):
        rows = range(prefix_len + length, prefix_len + length + new)
        turn = [turned(q[b, i], row, cos, sin, True) for i, row in enumerate(rows)]
        one_q = torch.stack(turn)[None] if rotary else q[b : b + 1]
        keys, values = (
            torch.cat([part.view(1, prefix_len, 2, 16), stored[b : b + 1, : length + new]], 1)
            for part, stored in zip(prefix, (cache.k, cache.v), strict=True)
        )
        turn = [turned(k[b, i], row, cos, sin, True) for i, row in enumerate(rows)]
        assert torch.equal(keys[0, -new:], torch.stack(turn) if rotary else k[b])
        problem = dense_problem(one_q, keys, values, causal=True, sink=sink)
        assert_agrees(
            out[b : b + 1], problem, Operands(one_q, keys, values, sink=sinks), lse[b : b + 1]
        )


def test_mla_reads_values_from_the_keys_own_memory():
    k_cache = torch.randn(2, 20, 1, 96)
    q = torch.randn(2, 1, 16, 96)
    lengths = torch.tensor([20, 11], dtype=torch.int32)
    out = heedful.flash_attn_with_kvcache(q, k_cache, k_cache[..., :64], cache_seqlens=lengths)
    apart = heedful.flash_attn_with_kvcache(
        q, k_cache, k_cache[..., :64].clone(), cache_seqlens=lengths
    )
    assert out.shape == (2, 1, 16, 64)
    assert torch.equal(out, apart)


@pytest.mark.parametrize("dtype", ["int4", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("asymmetric", [False, True], ids=["symmetric", "asymmetric"])
def test_a_cache_of_quantize_kv_is_attended_as_its_real_values(dtype, asymmetric):
    k, v = torch.randn(2, 20, 2, 32), torch.randn(2, 20, 2, 32)
    q = torch.randn(2, 1, 4, 32)
    packed = [heedful.quantize_kv(x, dtype, 16, asymmetric) for x in (k, v)]
    (k_stored, k_scale, k_shift), (v_stored, v_scale, v_shift) = packed
    got = heedful.flash_attn_with_kvcache(
        q,
        k_stored,
        v_stored,
        cache_seqlens=20,
        k_descale=k_scale,
        v_descale=v_scale,
        k_shift=k_shift,
        v_shift=v_shift,
    )
    real = [heedful.dequantize_kv(*parts) for parts in packed]
    assert_agrees(got, dense_problem(q, *real), Operands(q, *real))


def test_quantised_tokens_are_appended_as_they_are():
    k_cache, v_cache = torch.zeros(1, 6, 1, 8, dtype=torch.uint8), torch.zeros(1, 6, 1, 8).byte()
    k, v = (heedful.quantize_kv(torch.randn(1, 2, 1, 16), "int4")[0] for _ in range(2))
    scale = torch.ones(1, 6, 1, 1)
    heedful.flash_attn_with_kvcache(
        torch.randn(1, 2, 1, 16),
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=3,
        k_descale=scale,
        v_descale=scale,
    )
    assert torch.equal(k_cache[:, 3:5], k) and torch.equal(v_cache[:, 3:5], v)
    assert not k_cache[:, [0, 1, 2, 5]].any()


def test_a_tree_of_drafts_is_attended_branch_by_branch():
    """Two branches of a draft in one call equal each branch decoded on its own."""
    past, parents = 9, [-1, 0, 0, 1, 2]
    tree = torch.zeros(1, 5, 5, dtype=torch.bool)
    for i, parent in enumerate(parents):
        tree[0, i, i] = True
        if parent >= 0:
            tree[0, i] |= tree[0, parent]
    k_cache, v_cache = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)
    q, k, v = (torch.randn(1, 5, heads, 16) for heads in (4, 2, 2))
    out = heedful.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=past, tree_mask=tree
    )
    for branch in ([0, 1, 3], [0, 2, 4]):
        keys = torch.cat([k_cache[:, :past], k[:, branch]], 1)
        values = torch.cat([v_cache[:, :past], v[:, branch]], 1)
        one = q[:, branch], keys, values
        assert_agrees(out[:, branch], dense_problem(*one, causal=True), Operands(*one))


def test_out_of_a_cache_call_is_written_in_place():
    cache = Cache([4, 9], 12)
    q = torch.randn(2, 1, 4, 16)
    out = torch.full_like(q, torch.nan)
    returned = heedful.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.seqlens, out=out
    )
    want = heedful.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=cache.seqlens)
    assert returned is out and torch.equal(out, want)


def test_no_gradient_is_recorded_even_where_it_could_be():
    cache = Cache([4, 9], 12)
    q = torch.randn(2, 1, 4, 16, requires_grad=True)
    k, v = (torch.randn(2, 1, 2, 16, requires_grad=True) for _ in range(2))
    out = heedful.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=cache.seqlens)
    assert not out.requires_grad and not cache.k.requires_grad


def test_rows_that_see_no_key_are_zero():
    cache = Cache([0, 3], 12)
    out, lse = heedful.flash_attn_with_kvcache(
        torch.randn(2, 2, 4, 16),
        cache.k,
        cache.v,
        cache_seqlens=cache.seqlens,
        return_softmax_lse=True,
    )
    assert not out[0].any() and (lse[0] == -torch.inf).all() and lse[1].isfinite().all()


def test_a_paged_varlen_call_reads_the_same_keys_as_a_cache_call():
    cache = Cache([5, 11], 16, page_size=4)
    q = torch.randn(2, 3, 4, 16)
    bounds = torch.tensor([0, 3, 6], dtype=torch.int32)
    keys = torch.tensor([0, 5, 16], dtype=torch.int32)
    keywords = {"block_table": cache.table, "causal": True}
    flat = q.flatten(0, 1), cache.k, cache.v, bounds
    by_used = heedful.flash_attn_varlen_func(
        *flat, None, 3, 16, seqused_k=cache.seqlens, **keywords
    )
    by_bounds = heedful.flash_attn_varlen_func(*flat, keys, 3, 11, **keywords)
    by_cache = heedful.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.seqlens, **keywords
    )
    x = Operands(q, cache.k, cache.v, seqused_k=cache.seqlens, block_table=cache.table)
    sizes = {"page_size": 4, "used_k": True, "causal": True}
    problem = AttentionProblem.dense(2, 3, 16, 4, 2, 16, "float32", **sizes)
    for got in (by_used, by_bounds, by_cache):
        assert_agrees(got.view_as(q), problem, x)


def test_a_shared_prefix_is_refused_beside_queries_of_fp8():
    low = torch.float8_e4m3fn
    q, k = torch.randn(2, 3, 4, 16).to(low), torch.randn(2, 12, 2, 16).to(low)
    prefix = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    with pytest.raises(ValueError, match="^shared_prefix must be None beside fp8 q "):
        heedful.flash_attn_with_kvcache(q, k, k, shared_prefix=prefix)
