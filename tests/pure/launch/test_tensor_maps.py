"""How arrays are seen by TMA: every row of every sequence and page is found, and nothing else."""

from typing import Any

import pytest

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.operands import own_shape
from heedful.core.call.problem import AttentionProblem
from heedful.core.call.storage import storage
from heedful.core.planning.plan import plan
from heedful.core.registry import configs
from heedful.core.registry.tiles import HopperForwardConfig, tile_dim
from heedful.launch.bind import hopper_maps as maps


def pages_of(pages: int, rows: int) -> ArraySpec:
    """Pages that begin so many rows apart."""
    return ArraySpec((pages, 16, 2, 64), (rows * 128, 128, 64, 1), "bfloat16")


@pytest.mark.parametrize("rows", [16, 17, 1000, 1024, 2**14])
@pytest.mark.parametrize("rows_v", [16, 1000, 2**14])
def test_a_number_that_is_no_page_is_past_all_pages_and_its_rows_have_31_bits(rows, rows_v):
    most = max(rows, rows_v)
    for pages in (0, 2, 1000, 2**16, 2**20 - 1, 2**20, 2**20 + 1, 2**22, 2**30 // most):
        buffers = {"k": pages_of(pages, rows), "v": pages_of(pages, rows_v)}
        if pages * most > 2**30:
            continue
        found = maps.no_page(buffers)
        assert found.bit_count() == 1 and pages <= found and found * most <= 2**31
        # One kernel for all caches of up to 2^20 pages whose rows have numbers.
        assert found == 2**20 or (pages <= 2**20 and 2**20 * most > 2**31) or pages > 2**20
        if found < 2**20:
            assert found * 2 * most > 2**31
        assert found < 2 * max(2**20, pages)


def test_one_page_of_any_size_has_a_number_that_is_no_page():
    buffers = {name: pages_of(1, 2**40) for name in "kv"}
    assert maps.no_page(buffers) == 2**20


@pytest.mark.parametrize("pages", [2**20 - 1, 2**20])
def test_more_rows_than_have_numbers_are_refused_by_the_plan(pages):
    """And those that are taken have a number that is no page."""
    cache = pages_of(pages, 2**10)
    q = ArraySpec.contiguous((1, 1, 2, 64), "bfloat16")
    facts: dict[str, Any] = {**storage(q, cache, cache, None)}
    problem = AttentionProblem.dense(1, 1, 64, 2, head_dim=64, page_size=16, used_k=True, **facts)
    if pages * 2**10 < 2**30:
        plan(problem, by_name("H200"), backend="hopper")
        assert maps.no_page({"k": cache, "v": cache}) > pages
    else:
        with pytest.raises(ValueError, match="or 2\\^30 rows"):
            plan(problem, by_name("H200"), backend="hopper")


@pytest.mark.parametrize(
    "shape, strides, row, between",
    [
        ((4, 3, 2, 64), (6000, 150, 64, 1), 150, 40),
        # A batch entry of one row is the next row.
        ((4, 1, 2, 64), (640, 77, 64, 1), 640, 1),
        ((2, 1, 2, 64), (640, 77, 64, 1), 640, 1),
        # An expanded one has the least stride that TMA takes: 16 bytes.
        ((2, 1, 2, 64), (0, 77, 64, 1), 8, 0),
        ((1, 1, 2, 64), (640, 77, 64, 1), 8, 0),
        ((1, 3, 2, 64), (640, 77, 64, 1), 77, 0),
        ((2, 2, 1, 64), (640, 320, 64, 1), 320, 2),
        ((5, 2, 64), (150, 64, 1), 150, None),
        ((1, 2, 64), (150, 64, 1), 8, None),
    ],
)
def test_rows_follow_one_another_within_batch_entries_and_from_one_to_the_next(
    shape, strides, row, between
):
    spec = ArraySpec(shape, strides, "bfloat16")
    assert maps.row_stride(spec) == row
    if between is not None:
        assert maps.rows_between(spec) == between


def test_a_stride_that_is_not_stepped_over_is_one_that_tma_takes():
    for dtype, least in (("bfloat16", 8), ("float8_e4m3fn", 16), ("float32", 4)):
        spec = ArraySpec((1, 3, 1, 1), (5, 7, 9, 1), dtype)
        assert [maps.stride(spec, axis) for axis in range(4)] == [least, 7, least, 1]
        assert [maps.stride(spec, axis - 4) for axis in range(4)] == [least, 7, least, 1]


def test_a_map_of_rows_alone_ends_behind_the_last_batch_entry():
    for batch, end in ((0, 17), (1, 17), (2, 37), (5, 97)):
        spec = ArraySpec((batch, 16, 2, 64), (20 * 128, 128, 64, 1), "bfloat16")
        assert maps.packed_map("k", spec, 64, 64).shape[1] == end


@pytest.mark.parametrize("dim, width", [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256)])
def test_a_tile_is_the_narrowest_that_holds_the_head_dim(dim, width):
    assert tile_dim(dim) == width


@pytest.mark.parametrize("dim, has", [(128, False), (129, True), (192, True), (193, False)])
@pytest.mark.parametrize("page_size", [0, 16])
def test_head_dims_of_three_boxes_have_a_third_unless_they_lie_in_pages(dim, has, page_size):
    facts = {"page_size": page_size, "used_k": bool(page_size)}
    for dims in ((dim, 64), (64, dim)):
        problem = AttentionProblem.dense(
            1, 64, 64, 1, head_dim=dims[0], head_dim_v=dims[1], **facts
        )
        has = has and not page_size
        config = configs.choose("hopper.forward", problem, by_name("H200")).config
        fitted = config.fitted(problem, None)
        assert isinstance(fitted, HopperForwardConfig)
        tails = has and dims[0] == dim, has and dims[1] == dim
        assert (fitted.tail_d, fitted.tail_e) == tails


def test_arrays_have_a_stride_for_each_dim():
    with pytest.raises(ValueError, match=r"strides must be as many as dims, got \(2, 1\)"):
        ArraySpec((2, 3, 4), (2, 1), "float32")
    with pytest.raises(ValueError):
        own_shape((2, 3), (1,))


@pytest.mark.parametrize("name", ["shape", "strides"])
def test_an_array_whose_numbers_are_not_whole_is_refused_by_name(name):
    facts = {"shape": (2, 3), "strides": (3, 1), name: (2, 1.5)}
    with pytest.raises(TypeError, match=rf"^{name}\[1\] must be an int"):
        ArraySpec(**facts, dtype="float32")  # pyright: ignore[reportArgumentType]


def test_steps_are_the_strides_that_are_stepped_over():
    spec = ArraySpec((1, 2, 0, 3), (9, 8, 7, 6), "float32")
    assert spec.steps == (0, 8, 0, 6)
    assert spec.nbytes == 0
