"""Block masks: made of masks of every kind, taken by calls and transforms, refused where they are
wrong."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

import heedful.torch as heedful
from heedful import BlockMask, configure
from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.masks import of_masks
from support.problems.budget import check
from support.problems.cases import Case, build
from support.runs import api, standin

SIDE, ROWS, KEYS = 32, 70, 100


def dense(seqlen_q: int = ROWS, seqlen_k: int = KEYS) -> tuple:
    torch.manual_seed(0)
    shapes = ((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 8))
    return tuple(torch.randn(shape) for shape in shapes)


def drawn(batch: int = 2, heads: int = 1, seed: int = 3) -> torch.Tensor:
    """A mask with tiles of every kind: seen whole, in part, alike, and not at all."""
    torch.manual_seed(seed)
    tiles = torch.randint(0, 4, (batch, heads, 3, 4)).repeat_interleave(SIDE, 2)
    kind = tiles.repeat_interleave(SIDE, 3)[..., :ROWS, :KEYS]
    alike = (torch.arange(ROWS) % SIDE)[:, None] >= torch.arange(KEYS) % SIDE
    some = torch.where(kind == 2, alike, torch.rand(kind.shape) < 0.4)
    return torch.where(kind < 2, kind == 1, some)


def made(mask: torch.Tensor, **more) -> BlockMask:
    return BlockMask.of(mask, side=SIDE, **more)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_mask_is_the_mask_that_it_was_made_of(batch, heads, causal):
    q, k, v = dense()
    mask = drawn(batch, heads)
    got = heedful.flash_attn_func(q, k, v, causal=causal, block_mask=made(mask), return_lse=True)
    want = heedful.flash_attn_func(q, k, v, causal=causal, bias=mask, return_lse=True)
    torch.testing.assert_close(got, want)


# Scores of a row of tiles.
ONE_ROW = SIDE * 4 * SIDE


@pytest.mark.parametrize("part", [1, 3 * ONE_ROW, 8 * ONE_ROW, of_masks._PART])
def test_makers_agree_however_much_they_look_at_together(part, monkeypatch):
    monkeypatch.setattr(of_masks, "_PART", part)
    mask = drawn(2, 4)
    sizes = {"seqlen_q": ROWS, "seqlen_k": KEYS, "batch": 2, "heads": 4, "side": SIDE}
    of_function = BlockMask.of(lambda b, h, i, j: mask[b, h, i, j], **sizes, like=mask)
    for block_mask in (made(mask), made(mask, capacity=99), of_function):
        assert torch.equal(block_mask.to_dense(), mask)


def test_equal_tiles_share_their_bits():
    mask = torch.arange(8 * SIDE)[:, None] % SIDE >= torch.arange(8 * SIDE) % SIDE
    assert made(mask[None, None]).bits.shape == (1, SIDE, SIDE // 32)


def test_tiles_beyond_the_capacity_are_hidden_and_the_next_checked_call_raises():
    q, k, v = dense()
    mask, few = drawn(), made(drawn(), capacity=2)
    hidden = mask & ~few.to_dense()
    assert few.overflow and hidden.any() and not (few.to_dense() & ~mask).any()
    with pytest.raises(ValueError, match="capacity must be at least"):
        heedful.flash_attn_func(q, k, v, block_mask=few)


def test_a_capacity_of_as_many_tiles_as_are_seen_in_part_is_enough():
    mask = drawn()
    tiles = torch.nn.functional.pad(mask, (0, 128 - KEYS, 0, 96 - ROWS)).unflatten(3, (4, SIDE))
    tiles = tiles.unflatten(2, (3, SIDE)).swapaxes(3, 4)
    inside = torch.nn.functional.pad(torch.ones_like(mask), (0, 128 - KEYS, 0, 96 - ROWS))
    inside = inside.unflatten(3, (4, SIDE)).unflatten(2, (3, SIDE)).swapaxes(3, 4)
    part = tiles.flatten(-2).any(-1) & (inside & ~tiles).flatten(-2).any(-1)
    count = int(part.sum())
    enough, few = made(mask, capacity=count), made(mask, capacity=count - 1)
    assert not enough.overflow and torch.equal(enough.to_dense(), mask)
    enough.check()
    assert few.overflow and few.bits.shape[0] == count - 1
    # The last tile that is seen in part is the one that is hidden.
    assert (few.to_dense() != mask).sum() == (tiles[part][-1]).sum()
    with pytest.raises(ValueError, match=f"in part, got the {count - 1} of this mask$"):
        few.check()


def test_more_bits_than_a_limit_raise_and_name_the_bytes(monkeypatch):
    monkeypatch.setattr(of_masks, "_MOST_BYTES", 300)
    with pytest.raises(ValueError, match="at most 300 bytes of tiles.*got .* or more"):
        made(torch.rand(1, 1, ROWS, KEYS) < 0.5)


def test_lists_by_hand_show_whole_tiles_in_any_order():
    q, k, v = dense()
    counts = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    tiles = torch.tensor([[[[3, 1], [9, -9], [0, 7]]]], dtype=torch.int32)
    block_mask = BlockMask.of_lists(counts, tiles, seqlen_q=ROWS, seqlen_k=KEYS, side=SIDE)
    want = torch.zeros(1, 1, ROWS, KEYS, dtype=torch.bool)
    want[..., :32, 96:] = want[..., :32, 32:64] = want[..., 64:, :32] = True
    assert torch.equal(block_mask.to_dense(), want)
    got, lse = heedful.flash_attn_func(q, k, v, block_mask=block_mask, return_lse=True)
    torch.testing.assert_close(got, heedful.flash_attn_func(q, k, v, bias=want))
    assert (got[:, 32:64] == 0).all() and (lse[:, :, 32:64] == -torch.inf).all()


@pytest.mark.parametrize(
    "counts, tiles, words",
    [
        ([2, 0, 3], [[0, 1]] * 3, "counts must be from 0 to 2, got 3 in row 2"),
        ([2, -1, 0], [[0, 1]] * 3, "counts must be from 0 to 2, got -1 in row 1"),
        (
            [2, 0, 2],
            [[0, 1], [9, 9], [0, 4]],
            "tiles must be .* 3, got 4 in entry 1 of row 2",
        ),
    ],
)
def test_lists_out_of_bounds_raise_with_row_and_entry(counts, tiles, words):
    arrays = (torch.tensor([[a]], dtype=torch.int32) for a in (counts, tiles))
    with pytest.raises(ValueError, match=words):
        BlockMask.of_lists(*arrays, seqlen_q=ROWS, seqlen_k=KEYS, side=SIDE)


@pytest.mark.parametrize("counts", [(1, 1, 2), (1, 2, 3), (2, 1, 3)])
def test_lists_of_other_tiles_or_heads_than_their_counts_are_refused(counts):
    tiles = torch.zeros(1, 1, 3, 4, dtype=torch.int32)
    said = (
        f"counts and tiles must have 3 tiles of queries, as {ROWS} queries in tiles of {SIDE} are,"
        f" and the same batch and heads, got shapes {counts} and (1, 1, 3, 4)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        given = torch.zeros(counts, dtype=torch.int32), tiles
        BlockMask.of_lists(*given, seqlen_q=ROWS, seqlen_k=KEYS, side=SIDE)


@pytest.mark.parametrize(
    "place, value, words",
    [(0, -1, "from 0 to"), (1, 99, "from 0 to"), (2, 4, "entry 0"), (3, 99, "entry 0")],
)
def test_a_call_raises_for_lists_that_were_changed(place, value, words):
    q, k, v = dense()
    block_mask = made(torch.ones(1, 1, ROWS, KEYS, dtype=torch.bool))
    block_mask.rows[0, 0, 1, place] = value
    with pytest.raises(ValueError, match=f"block_mask must list .*{words}.* row 1 of"):
        heedful.flash_attn_func(q, k, v, block_mask=block_mask)


def test_a_known_call_on_a_gpu_checks_lists_once_the_setting_asks_for_it(monkeypatch):
    monkeypatch.delenv("HEEDFUL_CHECK_PAGES", raising=False)
    block_mask = made(drawn())
    block_mask.keys[1, 0, 2, 0] = 99
    with standin.gpu("H200") as gpu:
        heedful.flash_attn_func(*dense(), block_mask=block_mask)
        configure(check_pages=1)
        try:
            launches = len(gpu.launches)
            with pytest.raises(ValueError, match="in row 2 of batch entry 1, head 0"):
                heedful.flash_attn_func(*dense(), block_mask=block_mask)
            assert len(gpu.launches) == launches
        finally:
            configure(check_pages=None)


def wrong(name: str, change) -> BlockMask:
    given = made(drawn())
    arrays = {n: getattr(given, n) for n in ("rows", "keys", "bits")}
    return BlockMask(**arrays | {name: change(arrays[name])}, seqlen_q=ROWS, seqlen_k=KEYS)


BAD = [
    (drawn(), "block_mask must be a heedful.BlockMask.*got Tensor"),
    (made(drawn()[:, :, :-1]), "block_mask must be of 70 queries and 100 keys.*got one of 69"),
    (wrong("rows", lambda t: t.long()), "block_mask's rows must be int32, got int64"),
    (wrong("rows", lambda t: t[:, :, :2]), "block_mask's rows must be .* got shape"),
    (wrong("keys", lambda t: t[0]), "block_mask's keys must be .* got shape"),
    (wrong("keys", lambda t: t[..., :-1]), "block_mask's keys must be .* got shape"),
    (wrong("bits", lambda t: t[:, :16]), "block_mask's bits must be .* got shape"),
    (wrong("bits", lambda t: t[:0]), "block_mask's bits must be .* got shape"),
    (wrong("rows", lambda t: t.to("meta")), "block_rows must be on cpu like q, got meta"),
    (made(drawn(3)), "block_mask's rows must be .* got shape"),
    (made(drawn(2, 2)), "block_mask's rows must be .* got shape"),
]


@pytest.mark.parametrize("block_mask, words", BAD, ids=range(len(BAD)))
def test_a_mask_that_does_not_fit_is_refused_by_name(block_mask, words):
    with pytest.raises((TypeError, ValueError), match=words):
        heedful.flash_attn_func(*dense(), block_mask=block_mask)


BAD_MAKERS = [
    ({"mask": drawn().float()}, TypeError, "mask must be bool"),
    ({"mask": drawn()[0]}, ValueError, "mask must be "),
    ({"mask": drawn(), "side": 48}, ValueError, "side must be 32, 64, 128, got 48"),
    ({"mask": drawn(), "side": 32.0}, TypeError, "side must be an int, got float"),
    ({"mask": drawn(), "seqlen_q": 7}, ValueError, "seqlen_q must be None with an array, got 7"),
    ({"mask": drawn(), "batch": 7}, ValueError, "batch must be 1 with an array, got 7"),
    ({"mask": drawn(), "like": drawn()}, ValueError, "like must be None with an array"),
    ({"mask": drawn(), "capacity": 0}, ValueError, "capacity must be >= 1"),
    ({"mask": 3}, TypeError, "mask must be a torch.Tensor"),
    ({"mask": lambda *_: True, "like": drawn()}, TypeError, "seqlen_q must be an int"),
    (
        {"mask": lambda b, h, i, j: i - j, "like": drawn(), "seqlen_q": 3, "seqlen_k": 3},
        TypeError,
        "mask must return a bool array",
    ),
]


@pytest.mark.parametrize("given, kind, words", BAD_MAKERS, ids=range(len(BAD_MAKERS)))
def test_bad_arguments_of_makers_are_named(given, kind, words):
    with pytest.raises(kind, match=words):
        BlockMask.of(**given)


CASES = [
    Case(heads_q=4, block_mask=32, ranges_of="bh", seqlen_q=ROWS, seqlen_k=KEYS),
    Case(block_mask=64, causal=True, used="qk", seqlen_q=ROWS, seqlen_k=KEYS, sink=True),
    Case(block_mask=128, leftpad_k=True, ranges_of="h", softcap=3.0, dropout_p=0.2),
    Case(block_mask=32, key_ranges=2, bias="hqk", alibi="h", return_probs=True, dropout_p=0.3),
    Case(block_mask=32, varlen="qk", used="qk", causal=True, batch=3, heads_q=4, ranges_of="bh"),
    Case(block_mask=32, varlen="q", page_size=16, key_ranges=1, backward=False),
    Case(block_mask=32, page_size=7, leftpad_k=True, tree_mask=True, sink=True, backward=False),
    Case(block_mask=32, kv_batch_idx=True, used="k", ranges_of="h", seqlen_q=3, backward=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_with_other_features_are_within_their_budget(case):
    built = build(case)
    check(built, api.results(built))


def test_a_call_of_another_mask_is_not_the_last_one():
    q, k, v = dense()
    masks = [drawn(seed=seed) for seed in (1, 2, 1)]
    for mask in masks:
        got = heedful.flash_attn_func(q, k, v, block_mask=made(mask))
        torch.testing.assert_close(got, heedful.flash_attn_func(q, k, v, bias=mask))


def loss(q, k, v, block_mask):
    return heedful.flash_attn_func(q, k, v, block_mask=block_mask).square().sum()


def test_compiled_code_takes_a_mask_and_its_gradients():
    q, k, v = leaves = [t.requires_grad_() for t in dense()]
    block_mask = made(drawn())
    want = torch.autograd.grad(loss(q, k, v, block_mask), leaves)
    got = torch.autograd.grad(api.compiled(loss)(q, k, v, block_mask), leaves)
    torch.testing.assert_close(got, want)


def of_array(mask, lists):
    return BlockMask.of(mask, side=SIDE, capacity=20)


def of_lists(mask, lists):
    sizes: dict[str, Any] = {"seqlen_q": mask.shape[2], "seqlen_k": mask.shape[3], "side": SIDE}
    return BlockMask.of_lists(lists[..., 0] + 1, lists, **sizes)


@pytest.mark.parametrize("make", [of_array, of_lists])
def test_compiled_code_makes_a_mask(make):
    mask = drawn()
    lists = torch.zeros(*mask.shape[:2], -(-mask.shape[2] // SIDE), 2, dtype=torch.int32)
    compiled = torch.compile(make, fullgraph=True, backend="eager")
    assert torch.equal(compiled(mask, lists).to_dense(), make(mask, lists).to_dense())


@pytest.mark.parametrize("dims", [(None, None, None, 0), (0, None, 0, 0), (0, 0, 0, None)])
def test_vmap_maps_the_mask_alone_or_with_others(dims):
    given = [*dense(), made(drawn(), capacity=20)]
    other = [*(t.flip(1) for t in given[:3]), made(drawn(seed=4), capacity=20)]
    stacked = [
        pytree.tree_map(lambda *t: torch.stack(t), a, b) if dim == 0 else a
        for a, b, dim in zip(given, other, dims, strict=True)
    ]
    got = vmap(grad(loss), dims)(*stacked)
    second = [a if dim is None else b for a, b, dim in zip(given, other, dims, strict=True)]
    torch.testing.assert_close(got, torch.stack([grad(loss)(*given), grad(loss)(*second)]))


def test_the_backward_by_hand_takes_a_mask():
    q, k, v = dense()
    block_mask = made(drawn(1, 4))
    out, lse = heedful.flash_attn_func(q, k, v, block_mask=block_mask, return_lse=True)
    got = heedful.attention_backward(out * 2, q, k, v, out, lse, block_mask=block_mask)
    torch.testing.assert_close(got[:3], grad(loss, (0, 1, 2))(q, k, v, block_mask))


def packed() -> tuple[tuple, dict]:
    """q, k and v of two sequences, the second of which is shorter; and their places."""
    q, k, v = dense()
    bounds = [torch.tensor([0, n, n + m], dtype=torch.int32) for n, m in ((ROWS, 40), (KEYS, 75))]
    tokens = tuple(
        t.flatten(0, 1)[: b[-1]] for t, b in zip((q, k, v), (*bounds, bounds[1]), strict=True)
    )
    longest = {"max_seqlen_q": ROWS, "max_seqlen_k": KEYS}
    return tokens, {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1], **longest}


def test_positions_of_packed_sequences_count_from_the_first_of_each():
    (q, k, v), places = packed()
    mask = drawn(2, 4)
    got = heedful.flash_attn_varlen_func(q, k, v, **places, block_mask=made(mask))
    for b, (rows, keys) in enumerate(
        ((slice(ROWS), slice(KEYS)), (slice(ROWS, 110), slice(100, 175)))
    ):
        one = mask[b : b + 1, :, : len(q[rows]), : len(k[keys])]
        want = heedful.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], bias=one)
        torch.testing.assert_close(got[None, rows], want)


def test_the_backward_by_hand_of_packed_sequences_takes_a_mask():
    tokens, places = packed()
    block_mask, leaves = made(drawn(1, 4)), [t.requires_grad_() for t in tokens]
    more: dict[str, Any] = {**places, "block_mask": block_mask}
    out, lse = heedful.flash_attn_varlen_func(*leaves, **more, return_lse=True)
    want = torch.autograd.grad(out.square().sum(), leaves)
    with torch.no_grad():
        call = partial(heedful.attention_backward, out * 2, *leaves)
        got = call(out=out, lse=lse, **more)
    torch.testing.assert_close(got[:3], want)


def test_masks_of_other_lengths_than_a_packed_call_or_a_cache_are_refused():
    (q, k, v), places = packed()
    few = made(drawn()[:, :, 1:])
    words = "of 70 queries and 100 keys, as max_seqlen_q and max_seqlen_k say, got one of 69"
    with pytest.raises(ValueError, match=words):
        heedful.flash_attn_varlen_func(q, k, v, **places, block_mask=few)
    with pytest.raises(ValueError, match=words):
        heedful.attention_backward(q, q, k, v, q, q[..., 0], **places, block_mask=few)
    q, k, v = dense(3, 16)
    table = torch.zeros(2, 5, dtype=torch.int32)
    for call in (heedful.flash_attn_with_kvcache, explained):
        with pytest.raises(ValueError, match="of 3 queries and 80 keys, as q and its pages have"):
            call(q, k, v, block_table=table, block_mask=few)
        no_mask: Any = drawn()
        with pytest.raises(TypeError, match="block_mask must be a heedful.BlockMask"):
            call(q, k, v, block_mask=no_mask)


def explained(*args, **more) -> str:
    return heedful.explain(heedful.flash_attn_with_kvcache, *args, **more)


@pytest.mark.parametrize("compiles", [False, True])
def test_new_tokens_are_appended_and_seen_as_the_mask_of_the_whole_cache_says(compiles):
    q, k, v = dense(2, KEYS)
    block_mask = made(mask := drawn()[:, :, :2])
    lengths = torch.tensor([60, 98], dtype=torch.int32)
    new = [torch.randn(2, 2, 2, t.shape[-1]) for t in (k, v)]

    def step(k, v, block_mask):
        return heedful.flash_attn_with_kvcache(
            q, k, v, *new, cache_seqlens=lengths, causal=True, block_mask=block_mask
        )

    step = api.compiled(step) if compiles else step
    caches = k.clone(), v.clone()
    for _ in range(2):
        got = step(*caches, block_mask)
    whole = [t.clone() for t in (k, v)]
    for part, given in zip(whole, new, strict=True):
        for b, length in enumerate(lengths):
            part[b, length : length + 2] = given[b]
    assert all(map(torch.equal, caches, whole))
    want = heedful.flash_attn_func(q, *whole, causal=True, bias=mask, seqused_k=lengths + 2)
    torch.testing.assert_close(got, want)
    # Known calls without the mask, and with another, are not it.
    plain = heedful.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths + 2, causal=True)
    unmasked = heedful.flash_attn_func(q, *whole, causal=True, seqused_k=lengths + 2)
    torch.testing.assert_close(plain, unmasked)


def test_keys_of_a_shared_prefix_do_not_count_in_a_mask():
    q, k, v = dense(3, KEYS)
    mask = drawn()[:, :, :3]
    prefix = k[0, :5].clone(), v[0, :5].clone()
    got = heedful.flash_attn_with_kvcache(q, k, v, shared_prefix=prefix, block_mask=made(mask))
    whole = [
        torch.cat([p.expand(2, -1, -1, -1), t], 1) for p, t in zip(prefix, (k, v), strict=True)
    ]
    bias = torch.cat([torch.ones(2, 1, 3, 5, dtype=torch.bool), mask], -1)
    torch.testing.assert_close(got, heedful.flash_attn_func(q, whole[0], whole[1], bias=bias))


@pytest.mark.parametrize("sizes", [(0, KEYS), (ROWS, 0)])
def test_no_queries_or_no_keys_are_taken(sizes):
    q, k, v = dense(*sizes)
    for capacity in (None, 3):
        block_mask = made(torch.ones(1, 1, *sizes, dtype=torch.bool), capacity=capacity)
        assert block_mask.to_dense().shape == (1, 1, *sizes)
        assert (heedful.flash_attn_func(q, k, v, block_mask=block_mask) == 0).all()


def test_a_mask_is_a_pytree_whose_lengths_are_no_leaves():
    block_mask = made(drawn())
    leaves, spec = pytree.tree_flatten(block_mask)
    back = pytree.tree_unflatten(leaves, spec)
    assert [leaf for leaf in leaves if isinstance(leaf, int)] == []
    assert torch.equal(back.to_dense(), block_mask.to_dense())


@pytest.mark.parametrize("device", ["H200", "MI355X"])
def test_kernels_without_lists_say_that_they_do_not_take_a_block_mask(device):
    problem = build(Case(block_mask=32, dtype="bfloat16", head_dim=64)).problem
    chosen = plan(problem, by_name(device))
    assert (chosen.backend, chosen.backward) == ("portable", "portable")
    refused = [r for r in chosen.rejected if r.direction == "forward"]
    reasons = {
        "MI355X": ("cdna", "does not take block mask"),
        "H200": ("hopper", "a block mask of 32 rows a tile: takes 64 and 128"),
    }
    backend, reason = reasons[device]
    assert reason in [words for r in refused if r.backend == backend for words in r.reasons]
    for config in chosen.configs.values():
        assert max(config.block_m, config.block_n) <= 32


@pytest.mark.parametrize("facts", [{"bias": "k"}, {"return_probs": True, "dropout_p": 0.5}])
def test_no_kernel_computes_all_scores_beside_a_block_mask(facts):
    problem = build(Case(block_mask=32, dtype="bfloat16", **facts)).problem
    with pytest.raises(ValueError, match="beside a block mask"):
        plan(problem, by_name("H200"))


def test_explain_takes_a_block_mask():
    words = heedful.explain(heedful.flash_attn_func, *dense(), block_mask=made(drawn()))
    assert "block_mask=32" in words and "sdpa forward: does not take block mask" in words
    (q, k, v), places = packed()
    for words in (
        heedful.explain(
            heedful.flash_attn_varlen_func, q, k, v, **places, block_mask=made(drawn())
        ),
        explained(*dense(ROWS, KEYS), block_mask=made(drawn())),
    ):
        assert "block_mask=32" in words
