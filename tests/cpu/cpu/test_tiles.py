"""How the CPU backend cuts a call up: blocks, scratch, threads. Nothing is left out and nothing
is done twice; which tiles it visits is in test_visited_tiles.py."""

import threading
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful import cpu
from heedful.cpu import blocks, scores, tiled_backward, tiled_forward, workers
from heedful.cpu.blocks import KEYS, Scratch
from heedful.cpu.scores import Tiles
from support.problems.budget import run
from support.problems.cases import Case, build

# Blocks.


def problem_of(batch, len_q, len_k, heads, group=1, **facts):
    case = Case(batch=batch, seqlen_q=1, seqlen_k=1, heads_q=1, heads_k=1, head_dim=1)
    problem = build(replace(case, backward=False)).problem
    sizes = {"batch": batch, "seqlen_q": len_q, "seqlen_k": len_k}
    return replace(problem, heads_q=heads * group, heads_k=heads, **sizes, **facts)


def test_threads_of_our_own_are_for_more_scores_than_four_million():
    assert not blocks.worth_threads(problem_of(1, 1024, 1024, 4))
    assert blocks.worth_threads(problem_of(1, 1024, 1025, 4))
    for more in ((2, 1024, 1024, 4), (1, 2048, 1024, 4), (1, 1024, 1024, 2, 4)):
        assert blocks.worth_threads(problem_of(*more))


SIZES = [
    (1, 64, 64, 8),
    (4, 512, 512, 8),
    (2, 4096, 4096, 4, 4),
    (64, 700, 300, 2),
    (1, 1, 9000, 32),
]
SIZES += [(3, 2048, 8, 40), (16, 1300, 1300, 12, 3), (0, 5, 5, 2), (2, 0, 7, 2), (2, 7, 0, 2)]
# Few rows over many keys: tiles so small that what limits them is work for each thread.
SIZES += [(1, 4, 1 << 20, 8), (1, 1, 1 << 20, 8)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_as_many_heads_share_a_tile_as_leave_every_thread_work(size, apart, threads):
    torch.set_num_threads(threads)
    problem = problem_of(*size)
    batch, len_q, len_k, heads_k = size[:4]
    count = blocks._matrices(problem, len_q, len_k, apart)
    rows = min(len_q, blocks.query_rows(problem))
    tile = max(1, rows * problem.group * min(len_k, KEYS))
    tiles = len_q // max(1, rows)

    def fits(count: int) -> bool:
        if not blocks.worth_threads(problem):
            # Torch's threads share a tile.
            return count * tile <= blocks.SCORES_PER_TILE * threads and count <= batch * heads_k
        small = count * tile <= blocks.SCORES_PER_TILE
        # Two pieces of work a thread, at least: query tiles of blocks, or half of them at a time.
        pieces = batch * heads_k * (tiles if apart else 2) // (2 * threads)
        return small and count <= pieces

    assert count >= 1 and (count == 1 or fits(count)) and not fits(count + 1)


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=3, seqlen_q=70, seqlen_k=90, heads_q=6, heads_k=3, head_dim=4),
        Case(batch=5, seqlen_q=700, seqlen_k=600, heads_q=5, heads_k=5, head_dim=4),
        Case(batch=3, varlen="qk", heads_q=4, head_dim=4),
        Case(batch=3, used="k", head_dim=4),
        Case(batch=3, page_size=16, heads_q=4, head_dim=4, backward=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [1, 100_000, 10**9])
@pytest.mark.parametrize("apart", [False, True])
def test_every_head_of_every_sequence_is_in_one_block(case, most, apart, monkeypatch):
    monkeypatch.setattr(blocks, "SCORES_PER_TILE", most)
    built = build(case)
    problem = built.problem
    found = list(blocks.blocks(problem, built.x, apart))
    places = [(b, h) for block in found for b in block.batches for h in block.kv_heads]
    assert sorted(places) == [(b, h) for b in range(case.batch) for h in range(problem.heads_k)]
    for block in found:
        assert block.heads == len(block.batches) * len(block.kv_heads)
        first, last = block.kv_heads.start * problem.group, block.kv_heads.stop * problem.group
        assert block.query_heads == range(first, last)
        assert (block.seq is None) == (not blocks.is_scattered(built.x))
        if block.seq is not None:
            assert len(block.batches) == 1
            assert (block.len_q, block.len_k) == (block.seq.len_q, block.seq.len_k)
    if most == 1:
        assert all(block.heads == 1 for block in found)
    elif most == 10**9 and not blocks.is_scattered(built.x) and not blocks.worth_threads(problem):
        assert len(found) == 1


# Scratch.


def test_scratch_is_used_again_and_grows_to_the_largest():
    scratch = Scratch(torch.float32)
    one = scratch.take("a", 3, 5)
    assert one.shape == (3, 5) and one.is_contiguous() and one.dtype == torch.float32
    assert scratch.take("a", 3, 5) is one and scratch.bytes == 64 * 4
    for size in (64, 1, 0, 15, 60):
        again = scratch.take("a", size)
        assert again.shape == (size,) and again.data_ptr() in (one.data_ptr(), 0)
    assert scratch.bytes == 64 * 4
    larger = scratch.take("a", 65)
    assert larger.untyped_storage().nbytes() == 128 * 4 == scratch.bytes
    assert larger.data_ptr() != one.data_ptr()
    other, low = scratch.take("b", 65), scratch.take("a", 65, dtype=torch.bfloat16)
    assert len({t.data_ptr() for t in (larger, other, low)}) == 3
    assert low.dtype == torch.bfloat16 and scratch.bytes == 2 * 128 * 4 + 128 * 2
    assert scratch.take("a", 65) is larger


def test_scratch_gives_its_largest_buffers_back_first():
    scratch = Scratch(torch.float32)
    sizes = {"a": 64, "b": 640, "c": 128, "d": 320}
    kept = {name: scratch.take(name, size) for name, size in sizes.items()}
    scratch.trim(sum(sizes.values()) * 4)
    assert all(scratch.take(name, size) is kept[name] for name, size in sizes.items())
    scratch.trim((64 + 128 + 320) * 4)
    assert scratch.bytes == (64 + 128 + 320) * 4 and scratch.take("d", 320) is kept["d"]
    scratch.trim((64 + 128 + 320) * 4 - 1)
    assert scratch.bytes == (64 + 128) * 4
    assert scratch.take("a", 64) is kept["a"] and scratch.take("c", 128) is kept["c"]
    scratch.trim(0)
    assert scratch.bytes == 0 and scratch.take("a", 64) is not kept["a"]
    scratch.clear()
    assert scratch.bytes == 0 and scratch.take("a", 64).shape == (64,)
    scratch.trim(10)
    assert scratch.bytes == 0


def test_what_inference_mode_made_can_be_written_outside_it():
    scratch = Scratch(torch.float32)
    with torch.inference_mode():
        made = scratch.take("a", 5)
    assert not made.is_inference() and not scratch.take("a", 4).is_inference()


def test_an_error_leaves_no_scratch(monkeypatch):
    built = build(Case(backward=False))
    cpu.forward(built.problem, built.x)
    assert scores._scratch_of_thread(False).bytes > 0
    with pytest.raises(KeyError), Tiles(built.problem, built.x):
        raise KeyError("in the middle")
    assert scores._scratch_of_thread(False).bytes == 0


def test_each_thread_and_precision_has_scratch_of_its_own():
    single, double = (scores._scratch_of_thread(is_double) for is_double in (False, True))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert scores._scratch_of_thread(False) is single is not double
    found = []
    thread = threading.Thread(target=lambda: found.append(scores._scratch_of_thread(False)))
    thread.start()
    thread.join()
    assert found[0] is not single


def test_sixteen_mebibytes_are_kept_from_call_to_call():
    built = build(Case(backward=False))
    with Tiles(built.problem, built.x) as tiles:
        tiles.scratch.take("small", 1 << 20)
        tiles.scratch.take("large", 6 << 20)
    assert 4 << 20 <= tiles.scratch.bytes < 16 << 20
    with Tiles(built.problem, built.x) as tiles:
        tiles.scratch.clear()
        tiles.scratch.take("all", 4 << 20)
    assert tiles.scratch.bytes == 16 << 20
    tiles.scratch.clear()


# Caches.


@pytest.mark.parametrize(
    ("text", "cache"), [("1024K\n", 1 << 20), ("2048K", 2 << 20), ("many", 0), (None, 0)]
)
def test_a_cores_cache_is_what_linux_tells(text, cache, monkeypatch):
    asked = []

    def read(path):
        asked.append(str(path))
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    assert blocks.inner_cache() == cache
    assert asked == ["/sys/devices/system/cpu/cpu0/cache/index2/size"]


def test_a_large_cache_holds_a_larger_tile():
    kib = 1024
    for cache in (0, kib * kib, 2 * kib * kib - 1):
        assert blocks.scores_per_tile(cache) == 256 * kib
    for cache in (2 * kib * kib, 4 * kib * kib):
        assert blocks.scores_per_tile(cache) == 1024 * kib
    assert blocks.SCORES_PER_TILE in (256 * kib, 1024 * kib)


# What is held, remembered or made in pieces changes no bit, and is made as seldom as may be.

FEATURES: dict[str, Any] = dict(window=(150, 20, 30), sink=True)
LONG = Case(batch=2, seqlen_q=1300, seqlen_k=1100, heads_q=2, heads_k=2, head_dim=8, **FEATURES)


def everything(built) -> list[torch.Tensor]:
    out, lse, _ = cpu.forward(built.problem, built.x)
    grads = cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
    return [t for t in (out, lse, *grads) if t is not None]


@pytest.mark.parametrize("case", [LONG, replace(LONG, dtype="bfloat16", varlen="qk")], ids=str)
def test_what_is_held_of_keys_queries_and_masks_changes_no_bit(case, monkeypatch):
    built = build(case)
    want = everything(built)
    for module, name, value in (
        (scores, "HELD", 0),
        (tiled_backward, "HELD", 0),
        (scores, "REMEMBERED_MASKS", 1),
        (scores, "KEPT", 0),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            for one, other in zip(everything(built), want, strict=True):
                assert torch.equal(one, other), name


def test_keys_of_a_block_are_loaded_once_where_several_query_tiles_see_them(monkeypatch):
    reads = []
    read = Tiles._read

    def noted(tiles, block, cols, name, *how, **more):
        reads.append((block.batches, block.kv_heads, name, cols))
        return read(tiles, block, cols, name, *how, **more)

    monkeypatch.setattr(Tiles, "_read", noted)
    built = build(replace(LONG, backward=False, window=(-1, 0)))
    cpu.forward(built.problem, built.x)
    assert len(reads) == len(set(reads)) and {cols for *_, cols in reads} == {range(0, 1100)}
    # Of one query tile, each tile of keys is read where it is needed.
    reads.clear()
    short = build(replace(LONG, backward=False, window=(-1, 0), seqlen_q=512))
    cpu.forward(short.problem, short.x)
    assert max(len(cols) for *_, cols in reads) == KEYS
    # Too many keys are not held.
    reads.clear()
    monkeypatch.setattr(scores, "HELD", 1100 * 16 * 4 - 1)
    cpu.forward(built.problem, built.x)
    assert max(len(cols) for *_, cols in reads) <= KEYS


def test_64_mebibytes_of_a_block_are_held():
    assert scores.HELD == 64 * 2**20


def test_masks_of_the_diagonal_are_made_once(monkeypatch):
    made, kept = [], []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **more: made.append(a) or full(*a, **more))
    case = Case(
        batch=1, seqlen_q=4096, seqlen_k=4096, heads_q=1, heads_k=1, head_dim=1, causal=True
    )
    built = build(replace(case, backward=False))
    with Tiles(built.problem, built.x) as tiles:
        (block,) = blocks.blocks(built.problem, built.x, apart=False)
        for rows in blocks.query_tiles(block):
            for cols, masked in blocks.key_tiles(block, rows):
                if masked:
                    tiles._hidden_by_position(block, rows, cols)
        # One for each of the two key tiles on the diagonal of a query tile.
        assert len(made) == 2
        for size in range(1, 20):
            tiles._hidden_by_position(block, range(size), range(3))
            kept.append(len(tiles._hidden))
    assert max(kept) == 8


def test_products_add_a_column_last_where_it_is_exact():
    built = build(Case(backward=False))
    tiles = Tiles(built.problem, built.x)
    double = Tiles(built.problem, built.x)
    double.scratch = Scratch(torch.float64)

    def folds(rows, cols, depth, tiles=tiles):
        a, b = torch.empty(1, rows, depth), torch.empty(1, cols, depth)
        return tiles.is_folded(a, b)

    assert folds(64, 64, 256) and folds(512, 256, 2)
    assert not folds(63, 64, 256) and not folds(64, 63, 256) and not folds(64, 64, 257)
    assert not folds(64, 64, 256, double)


@pytest.mark.parametrize("hardware", [False, True])
def test_bfloat16_is_within_budget_with_and_without_its_products(hardware, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: hardware)
    case = Case(seqlen_q=90, seqlen_k=300, heads_q=4, dtype="bfloat16", causal=True, sink=True)
    built = build(case)
    low = Tiles(built.problem, built.x).low
    assert low is (torch.bfloat16 if hardware else None)
    for other in (case, replace(case, dropout_p=0.2), replace(case, num_splits=2)):
        run(cpu, other)
    for dtype in ("float16", "float32"):
        plain = build(replace(case, dtype=dtype))
        assert Tiles(plain.problem, plain.x).low is None


def test_bits_of_a_power_do_not_depend_on_its_place():
    scratch = Scratch(torch.float32)
    values = torch.linspace(-20, 3, 200)
    whole = scores.exp_(scratch.take("a", 200).copy_(values)).clone()
    torch.testing.assert_close(whole, values.exp(), rtol=4e-6, atol=0)
    for count in (1, 7, 63, 64, 65, 100, 130):
        for start in (0, 3, 70):
            part = scores.exp_(scratch.take("b", count).copy_(values[start : start + count]))
            assert torch.equal(part, whole[start : start + count])


def test_four_bit_values_come_low_nibble_first_and_signed():
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    want = [n - 16 if n > 7 else n for byte in range(256) for n in (byte & 15, byte >> 4)]
    got = scores.unpack_int4(packed)
    assert got.dtype == torch.int8 and got.shape == (2, 256) and got.flatten().tolist() == want


# Threads.


@pytest.fixture
def groups(monkeypatch):
    """What each pass gives to threads: (groups, whether in parallel)."""
    given = []

    def noted(groups, work, new_state, parallel):
        groups = list(groups)
        given.append((groups, parallel))
        workers.for_each(groups, work, new_state, parallel)

    monkeypatch.setattr(tiled_forward, "for_each", noted)
    monkeypatch.setattr(tiled_backward, "for_each", noted)
    return given


def test_rows_that_see_most_keys_come_first(groups):
    for window, down in (((-1, 0), True), ((-1, -1), False), ((90, -1), False)):
        built = build(replace(LONG, backward=False, window=window, num_splits=2))
        cpu.forward(built.problem, built.x)
        for group in groups.pop()[0]:
            tiles = [split.rows.start for split, _ in group]
            order = [start for start, _ in groupby(tiles)]
            assert order == sorted(set(tiles), reverse=down) and len(order) == 3
            # The parts of a tile follow each other in order.
            for split, own in groupby(group, key=lambda item: item[0]):
                assert [part for _, part in own] == list(range(len(split.parts)))


SHARED = [
    dict(bias="hqk"),
    dict(kv_batch_idx=True),
    dict(page_size=16),
]


@pytest.mark.parametrize(
    "features", [dict(sink=True), *SHARED, dict(bias="hqk", grads=False)], ids=str
)
def test_blocks_that_add_to_the_same_gradient_take_turns(features, groups, monkeypatch):
    monkeypatch.setattr(blocks, "SHORT", 0)
    grads = features.pop("grads", True)
    built = build(Case(batch=2, head_dim=8, heads_q=4, heads_k=2, **features))
    problem = replace(built.problem, bias_grad=bool(features.get("bias")) and grads)
    everything(replace(built, problem=problem))
    (_, forward), (_, backward) = groups
    features["grads"] = grads
    assert forward is True
    alone = problem.bias_grad or "kv_batch_idx" in features or "page_size" in features
    assert backward is not alone


def test_short_calls_are_left_to_torchs_threads(groups):
    built = build(Case(sink=True))
    everything(built)
    assert [parallel for _, parallel in groups] == [False, False]


# Precision and memory.


def test_sums_by_another_maximum_are_far_from_overflow():
    """Values may reach 2^95, and no more."""
    largest = torch.finfo(torch.float32).max
    assert tiled_forward.MOST * 2.0**95 <= largest < tiled_forward.MOST * 2.0**96


def test_query_tiles_are_held_up_to_a_limit(monkeypatch):
    built = build(Case(batch=2, seqlen_q=600, seqlen_k=40, heads_q=4, heads_k=2, head_dim=24))
    tiles = Tiles(built.problem, built.x)
    (block,) = blocks.blocks(built.problem, built.x, apart=False)
    size = 2 * 4 * 600 * (24 + 24) * 4
    for limit, holds in ((size, True), (size - 1, False)):
        monkeypatch.setattr(tiled_backward, "HELD", limit)
        pass_ = tiled_backward._BlockBackward(tiles, block, built.dout, None)
        assert pass_.holds is holds
        assert built.dout is not None and built.dlse is not None
        out, lse, _ = cpu.forward(built.problem, built.x)
        pass_.prepare(out, lse, built.dlse)
        assert len(pass_.held) == (len(pass_.rows) if holds else 0)


def test_keys_are_held_up_to_a_limit(monkeypatch):
    built = build(replace(LONG, backward=False, window=(-1, 0)))
    block = next(blocks.blocks(built.problem, built.x, apart=False))
    size = block.heads * 1100 * (8 + 8) * 4
    for limit, seen in ((size, range(0, 1100)), (size - 1, range(0))):
        monkeypatch.setattr(scores, "HELD", limit)
        tiles = Tiles(built.problem, built.x)
        tiles.hold_keys(block)
        assert tiles._seen == seen
    monkeypatch.undo()
    with Tiles(built.problem, built.x) as tiles:
        tiles.hold_keys(block)
        one = tiles.load_k(block, range(256, 512))
        assert tiles.load_k(block, range(256, 512)) is one
        tiles.hold_keys(block)
        assert tiles.load_k(block, range(256, 512)) is one


@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "packed", "offset"])
def test_gradients_are_contiguous_whatever_their_operands_are(layout):
    built = build(Case(layout=layout, heads_q=4, bias="hqk"))
    out, lse, _ = cpu.forward(built.problem, built.x)
    assert built.dout is not None
    grads = cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
    for grad, operand in zip(grads[:3], built.x[:3], strict=True):
        assert grad.is_contiguous() and grad.shape == operand.shape and grad.dtype == operand.dtype


@pytest.mark.parametrize(("real", "shape"), [("hqk", (1, 2, 37, 53)), ("bk", (2, 1, 1, 53))])
def test_a_bias_has_its_gradient_where_it_has_elements(real, shape):
    built = build(Case(bias=real, dtype="bfloat16"))
    out, lse, _ = cpu.forward(built.problem, built.x)
    assert built.dout is not None
    grads = cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
    assert grads.dbias is not None and tuple(grads.dbias.shape) == shape
    assert grads.dbias.dtype == built.x.bias.dtype


def test_only_splits_keep_what_a_part_made(groups):
    for splits, kept in ((1, 0), (2, 2)):
        built = build(Case(backward=False, seqlen_k=300, num_splits=splits, sink=True))
        cpu.forward(built.problem, built.x)
        ((own, _),) = groups
        assert {len(split._done) for group in own for split, _ in group} == {kept}
        groups.clear()


def test_sdpa_needs_no_second_opinion_where_a_row_fills_a_vector(monkeypatch):
    from heedful.cpu import sdpa

    asked = []
    monkeypatch.setattr(sdpa, "_has_nan", lambda q, k: asked.append(1))
    for len_q, len_k, causal, asks in (
        (9, 15, False, 1),
        (9, 16, False, 0),
        (15, 200, True, 0),
        (16, 200, True, 0),
        (200, 15, True, 1),
        (200, 16, True, 0),
    ):
        case = Case(seqlen_q=len_q, seqlen_k=len_k, causal=causal, bottom_right=False)
        built = build(replace(case, backward=False))
        sdpa.forward(built.problem, built.x)
        assert not asked
        sdpa.forward(built.problem, built.x._replace(v=torch.zeros_like(built.x.v)))
        assert len(asked) == asks, (len_q, len_k)
        asked.clear()


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_kernel_passes_nan_on_where_a_row_fills_a_vector(causal):
    """Of a query, whose row has no other score, and of keys, with a full vector before them."""
    from heedful.cpu import sdpa

    for length in (*range(sdpa.VECTORS, 66), 513, 517):
        q, k, v = torch.randn(3, 1, 2, length, 8).unbind()
        for spoilt in (q, k):
            spoilt[0, 0, -1] = torch.nan
            out, lse = sdpa._flash(q, k, v, 0.0, causal)
            assert out[0, 0, -1].isnan().all() and lse[0, 0, -1].isnan(), length
            spoilt[0, 0, -1] = 1.0
        q[0, 1, 0] = torch.nan
        assert sdpa._flash(q, k, v, 0.0, causal)[0][0, 1, 0].isnan().all(), length


def test_sdpa_asks_for_a_second_opinion_only_of_rows_that_may_be_nan(monkeypatch):
    from heedful.cpu import sdpa

    asked = []
    right = tiled_forward.forward
    monkeypatch.setattr(tiled_forward, "forward", lambda *a: asked.append(1) or right(*a))
    for len_q, len_k, causal in ((3, 3, False), (70, 3, True), (3, 63, False)):
        case = Case(seqlen_q=len_q, seqlen_k=len_k, causal=causal, bottom_right=False)
        built = build(replace(case, backward=False))
        zeros = built.x._replace(v=torch.zeros_like(built.x.v))
        for x in (built.x, zeros):
            given = torch.full_like(built.x.q, torch.nan)
            out, lse, probs = sdpa.forward(built.problem, x, given)
            assert out is given and lse is None and probs is None and not out.isnan().any()
        assert not asked
        for name in ("q", "k"):
            whole = torch.full_like(getattr(built.x, name), torch.nan)
            out, _, _ = sdpa.forward(built.problem, built.x._replace(**{name: whole}))
            assert out.isnan().all()
        asked.clear()
