"""heedful.masks by their definitions, of PyTorch and of JAX, and what they refuse."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import heedful.torch as heedful
from heedful import BlockMask, masks

N = 12
IDS = [[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 7, 0], [5] * N]
PLACES = [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 0], list(range(N))]
REAL = [[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]]
# A length that is none; a type checker is not to know.
WRONG: Any = 4.0
ROW, KEY = np.arange(N)[:, None], np.arange(N)[None]


def arrays(name: str):
    """The function that makes an array of this framework."""
    if name == "torch":
        return torch.tensor
    return pytest.importorskip("jax.numpy").asarray


def shown(ranges) -> np.ndarray:
    """The mask (batch, heads, M, N) of key_ranges."""
    ranges = np.asarray(ranges)
    assert ranges.dtype == np.int32
    pairs = [ranges[..., i : i + 2, None] for i in range(0, ranges.shape[-1], 2)]
    return np.logical_or.reduce([(p[..., 0, :] <= KEY[0]) & (KEY[0] < p[..., 1, :]) for p in pairs])


def runs(rows) -> np.ndarray:
    """Which places are of one document."""
    new = np.concatenate([[0], np.cumsum(np.diff(rows) != 0)])
    return new[:, None] == new[None]


ONE = torch.ones(1, 1, 1, dtype=torch.int32)
FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "jax"])


@FRAMEWORKS
def test_documents_are_runs_of_equal_numbers_or_of_rising_ones(framework):
    make = arrays(framework)
    want = np.stack([runs(row) for row in IDS])[:, None]
    assert (shown(masks.documents(make(IDS)).ranges) == want).all()
    assert (shown(masks.documents(position_ids=make(PLACES)).ranges) == want).all()
    assert shown(masks.documents(make([[3]])).ranges).tolist() == [[[[True] + [False] * (N - 1)]]]


@FRAMEWORKS
def test_a_prefix_is_seen_by_all(framework):
    got = shown(masks.prefix(arrays(framework)([4, 0]), N))
    assert (got == np.stack([(KEY < 4) | (KEY <= ROW), KEY <= ROW])[:, None]).all()


@FRAMEWORKS
def test_chunks_windows_and_leading_keys(framework):
    like = arrays(framework)([0])
    assert (shown(masks.chunks(5, N, like=like)) == ((KEY // 5 == ROW // 5) & (KEY <= ROW))).all()
    got = shown(masks.local_global(3, 2, N, like=like))
    assert (got == (((KEY >= ROW - 3) | (KEY < 2)) & (KEY <= ROW))).all()


@FRAMEWORKS
@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**70])
def test_a_number_beyond_all_positions_hides_nothing(framework, far):
    """As in `window_size`. No int32 holds most of these."""
    like, causal = arrays(framework)([0]), KEY <= ROW
    assert (shown(masks.chunks(far, N, like=like)) == causal).all()
    assert (shown(masks.local_global(far, 0, N, like=like)) == causal).all()
    assert (shown(masks.local_global(0, far, N, like=like)) == causal).all()


def test_ints_of_64_bits_beyond_all_positions_hide_nothing():
    far = torch.tensor([2**32, -(2**32)])
    want = np.stack([np.ones((N, N), bool), KEY <= ROW])[:, None]
    assert (shown(masks.prefix(far, N)) == want).all()
    ends = torch.full((1, 1, N, 1), 2**63 - 1)
    assert (shown(masks.from_flashmask(ends)) == (KEY <= ROW)).all()


# JAX has ints of 64 bits where it is told to.
DTYPES = ["int8", "uint8", "int16", "uint16", "uint32", "int64"]


@pytest.mark.parametrize(
    "framework, dtype", [*product(["torch"], DTYPES), *product(["jax"], DTYPES[:-1])]
)
def test_a_length_counts_as_it_is_in_each_dtype(framework, dtype):
    """Also one that is more than all positions, of which an int of 8 bits holds few."""
    most, seqlen = min(int(np.iinfo(dtype).max), 2**40), 300
    lengths = np.array([0, 100, most], dtype)
    if framework == "torch":
        ranges = masks.prefix(torch.from_numpy(lengths), seqlen)
    else:
        ranges = masks.prefix(arrays(framework)(lengths), seqlen)
    ends = np.maximum(np.arange(1, seqlen + 1), np.minimum([[0], [100], [most]], seqlen))
    assert (np.asarray(ranges)[:, 0, :, 1] == ends).all() and not ranges[..., 0].any()


@FRAMEWORKS
def test_documents_of_all_positions_that_few_bits_hold_part(framework):
    """After 255 an unsigned byte counts from 0 again."""
    places = np.tile(np.arange(256, dtype=np.uint8), 2)[None]
    ranges = np.asarray(masks.documents(position_ids=arrays(framework)(places)).ranges)
    assert (ranges[0, 0] == np.repeat([[0, 256], [256, 512]], 256, 0)).all()


@FRAMEWORKS
def test_padding_lies_on_either_side(framework):
    got = shown(masks.padding(arrays(framework)(REAL) > 0))
    assert (got == np.broadcast_to(np.array(REAL, bool)[:, None, None], (2, 1, N, N))).all()


def column_mask(rows: np.ndarray, causal: bool) -> np.ndarray:
    """FlashMask by its definition: (batch, heads, M, N)."""
    bounds = [rows[..., None, :, i] for i in range(rows.shape[-1])]
    if len(bounds) == 1:
        bounds.append(np.full_like(bounds[0], N))
    elif not causal and len(bounds) == 2:
        bounds = [bounds[0], np.full_like(bounds[0], N), np.zeros_like(bounds[0]), bounds[1]]
    hidden = np.zeros((*rows.shape[:2], N, N), bool)
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        hidden |= (start <= ROW) & (stop > ROW)
    return ~hidden & (KEY <= ROW) if causal else ~hidden


ENDS = [3, 3, 3, 5, 5, 10, 10, 10, 10, 10, 11, 12]
STARTS = [0, 0, 0, 3, 3, 5, 5, 5, 5, 5, 10, 11]


@FRAMEWORKS
@pytest.mark.parametrize(
    "columns, causal",
    [
        ([[e] for e in ENDS], True),
        ([[12]] * N, True),
        ([[5, 8]] * 4 + [[12, 12]] * 8, True),
        ([list(pair) for pair in zip(ENDS, STARTS, strict=True)], False),
        ([[12, 12, 0, s] for s in STARTS], False),
        # Two runs, of which the second ends before the last key.
        (([[12] * 4] * 3 + [[0, 12, 12, 12]] * 3) * 2, False),
        # Rows of one run, which begins behind key 0, beside rows of two.
        ([[0, 6, 12, 12]] * 2 + [[0, 12, 12, 12]] * 2 + [[12, 12, 12, 12]] * 8, False),
    ],
)
def test_flashmasks_of_row_ranges_are_converted(framework, columns, causal):
    given = np.array(columns, np.int32)[None, None]
    got = masks.from_flashmask(arrays(framework)(given), causal=causal)
    assert (shown(got) == column_mask(given, causal)).all()
    # No key is shown twice.
    _, end, *second = np.moveaxis(np.asarray(got), -1, 0)
    assert not second or ((second[0] >= second[1]) | (second[0] >= end)).all()


@FRAMEWORKS
def test_flashmasks_of_more_rows_than_are_looked_at_together_are_converted(framework):
    """Rows of no key and of one run have one range each, where no row has two."""
    seqlen = 300
    places = np.arange(seqlen)
    ends = np.where(places < 140, 140, np.where(places < 200, 270, seqlen))
    given = ends.astype(np.int32)[None, None, :, None]
    got = np.asarray(masks.from_flashmask(arrays(framework)(given)))
    want = np.stack([np.where(places < 140, 0, np.where(places < 270, 140, 200)), places + 1], -1)
    assert got.shape == (1, 1, seqlen, 2) and (got == want).all()
    for count in (128, 129):
        got = np.asarray(masks.from_flashmask(arrays(framework)(given[:, :, :count])))
        assert (got[0, 0] == np.stack([0 * places, places + 1], -1)[:count]).all()
    none = np.zeros((1, 2, 5, 1), np.int32)
    got = np.asarray(masks.from_flashmask(arrays(framework)(none)))
    assert got.shape == (1, 2, 5, 2) and (got[..., 0] >= got[..., 1]).all()


@FRAMEWORKS
@pytest.mark.parametrize("columns, causal", [(1, True), (2, True), (2, False), (4, False)])
def test_a_flashmask_of_no_rows_has_their_ranges(framework, columns, causal):
    given = np.zeros((2, 3, 0, columns), np.int64)
    got = masks.from_flashmask(arrays(framework)(given), causal)
    assert got.shape == (2, 3, 0, 2) and str(got.dtype).endswith("int32")


def test_a_row_of_three_runs_is_found_among_its_neighbours():
    """Which rows are looked at together is told, up to the last that there is."""
    for row, rows in ((0, "0 to 127"), (127, "0 to 127"), (128, "128 to 199"), (199, "128 to 199")):
        columns = torch.full((1, 1, 200, 4), 200)
        columns[..., 1], columns[..., 3] = 200, 200
        for key in (3, 9):
            columns[0, 0, key, :2] = torch.tensor([row, row + 1])
        with pytest.raises(ValueError, match=f"got 3 in one of rows {rows} "):
            masks.from_flashmask(columns, causal=False)


def test_flashmasks_of_more_than_two_runs_are_refused_in_a_sentence():
    holes = torch.tensor([[0, 12] if j % 2 else [12, 12] for j in range(N)])[None, None]
    with pytest.raises(ValueError, match="startend_row_indices must let each row see at most two"):
        masks.from_flashmask(holes)
    with pytest.raises(ValueError, match="startend_row_indices must have 1 or 2 numbers"):
        masks.from_flashmask(torch.zeros(1, 1, N, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    "call, argument, kind",
    [
        (lambda: masks.documents(), "ids", TypeError),
        (lambda: masks.documents([[0, 1]]), "ids", TypeError),
        (lambda: masks.documents(torch.zeros(4)), "ids", ValueError),
        (lambda: masks.documents(position_ids=torch.zeros(4)), "position_ids", ValueError),
        (lambda: masks.prefix(torch.zeros(1, 1), 4), "lengths", ValueError),
        (lambda: masks.prefix(torch.ones(1).int(), WRONG), "seqlen", TypeError),
        (lambda: masks.chunks(0, 4, like=torch.zeros(1)), "size", ValueError),
        (lambda: masks.chunks(2, 4, like=None), "like", TypeError),
        (lambda: masks.documents(torch.zeros(1, 4)), "ids", TypeError),
        (lambda: masks.documents(position_ids=torch.zeros(1, 4)), "position_ids", TypeError),
        (lambda: masks.prefix(torch.zeros(1), 4), "lengths", TypeError),
        (
            lambda: masks.from_flashmask(torch.zeros(1, 1, 4, 1)),
            "startend_row_indices",
            TypeError,
        ),
        (
            lambda: BlockMask.of_lists(ONE, ONE[..., None] * 1.5, seqlen_q=9, seqlen_k=9),
            "tiles",
            TypeError,
        ),
        (lambda: masks.padding(torch.zeros(1, 4)), "real", TypeError),
        (lambda: masks.local_global(-1, 0, 4, like=torch.zeros(1)), "left", ValueError),
    ],
)
def test_a_bad_argument_is_named(call, argument, kind):
    with pytest.raises(kind, match=f"^{argument} must "):
        call()


def test_makers_are_found_by_their_names():
    assert {*masks.__all__} <= {*dir(masks)} and "Any" not in dir(masks)
    assert dir(masks) == sorted(dir(masks))
    for name in masks.__all__:
        assert getattr(masks, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        masks.nothing  # noqa: B018  # pyright: ignore


def test_documents_are_told_in_one_of_two_ways():
    ids = torch.zeros(1, 4, dtype=torch.int32)
    for given in ({}, {"ids": ids, "position_ids": ids}):
        with pytest.raises(TypeError, match="^ids must be given, or position_ids, and not both"):
            masks.documents(**given)


def test_documents_in_one_row_are_packed_sequences():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, N, 2, 16).unbind(0)
    ranges = masks.documents(torch.tensor(IDS[:1]))
    got = heedful.flash_attn_func(q, k, v, causal=True, key_ranges=ranges)
    bounds = torch.tensor([0, 3, 5, 10, 11, 12], dtype=torch.int32)
    want = heedful.flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, 5, 5, causal=True)
    torch.testing.assert_close(got[0], want)


def test_masks_are_made_where_calls_are_traced():
    jax = pytest.importorskip("jax")
    ids = jax.numpy.asarray(IDS)
    made = jax.jit(masks.documents)(ids)
    assert type(made) is masks.Documents and (made.ranges == masks.documents(ids).ranges).all()
    compiled = torch.compile(masks.documents, fullgraph=True, backend="eager")
    made = compiled(torch.tensor(IDS))
    assert type(made) is masks.Documents
    assert torch.equal(made.ranges, masks.documents(torch.tensor(IDS)).ranges)


def test_compiled_masks_are_of_any_length():
    def all_of(lengths: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        count = rows.shape[0]
        return [
            masks.prefix(lengths, count),
            masks.chunks(5, count, like=rows),
            masks.local_global(3, 2, count, like=rows),
        ]

    compiled = torch.compile(all_of, fullgraph=True, dynamic=True, backend="eager")
    for count in (N, 3 * N):
        arguments = torch.tensor([4, 0]), torch.zeros(count)
        for found, want in zip(compiled(*arguments), all_of(*arguments), strict=True):
            assert torch.equal(found, want)
