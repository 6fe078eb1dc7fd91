"""What kernels are told of how arrays are stored: facts about strides, by example."""

from typing import Any

import pytest

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.operands import Operands
from heedful.core.call.storage import (
    are_mappable,
    copies,
    dense_rows,
    has_dense_rows,
    have_own_ranges,
    rows_follow,
    storage,
)

PLAIN = ArraySpec((2, 3, 1, 8), (24, 8, 8, 1), "float16")


def facts(**other: ArraySpec) -> dict[str, bool]:
    """Of a call whose arrays are plain but for these."""
    given: dict[str, Any] = {"q": PLAIN, "k": PLAIN, "v": PLAIN, "out": None, **other}
    return storage(**given)


@pytest.mark.parametrize(
    "shape, strides, dense",
    [
        ((), (), True),
        ((4,), (1,), True),
        ((4,), (2,), False),
        ((2,), (7,), False),
        ((1,), (7,), True),
        ((0,), (7,), True),
        ((1, 4), (9, 2), False),
        ((4, 1), (9, 2), True),
        ((4, 4), (1, 4), False),
        ((4, 1, 4), (8, 8, 2), False),
        ((4, 4, 4), (16, 1, 4), False),
    ],
)
def test_rows_are_dense_where_the_last_dim_has_no_gaps(shape, strides, dense):
    spec = ArraySpec(shape, strides, "float16", device="here")
    assert has_dense_rows(spec) is dense
    copy = ArraySpec.contiguous(shape, "float16", "here")
    assert dense_rows(spec) is spec if dense else dense_rows(spec) == copy


@pytest.mark.parametrize(
    "shape, strides, near",
    [
        ((2, 1, 8), ((1 << 21) - 1, 8, 1), True),
        ((2, 1, 8), (1 << 21, 8, 1), False),
        ((2, 1, 8), (-(1 << 21), 8, 1), False),
        # A row alone, heads far apart and batches far apart are no rows far apart.
        ((1, 1, 8), (1 << 21, 8, 1), True),
        ((2, 2, 8), (8, 1 << 24, 1), True),
        ((2, 2, 1, 8), (1 << 25, 8, 8, 1), True),
        ((2, 8), (1 << 25, 1), True),
    ],
)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_rows_are_near_within_8_mib(shape, strides, near, name):
    spec = ArraySpec(shape, strides, "float32")
    for far in ({name: spec}, dict.fromkeys(("q", "k", "v"), spec)):
        assert facts(**far)["near_rows"] is near


LIMIT = 1 << 29


@pytest.mark.parametrize(
    "shape, strides, even",
    [
        ((2, 3, 1, 8), (24, 8, 8, 1), True),
        ((2, 3, 1, 8), (25, 8, 8, 1), False),
        ((2, 2, 1, 8), (25, 8, 8, 1), False),
        ((1, 3, 1, 8), (25, 8, 8, 1), True),
        ((2, 1, 1, 8), (25, 8, 8, 1), True),
        ((2, 3, 1, 8), (24, 0, 8, 1), False),
        ((2, 3, 1, 1), (24, 1, 1, 1), True),
        ((2, 3, 1, 8), (8 * LIMIT, 8, 8, 1), False),
        ((2, 3, 1, 8), (8 * LIMIT - 8, 8, 8, 1), True),
        ((2, 3, 8), (25, 8, 1), True),
    ],
)
@pytest.mark.parametrize("name", ["k", "v"])
def test_rows_are_even_where_they_divide_a_batch_below_2_to_the_30(shape, strides, even, name):
    assert facts(**{name: ArraySpec(shape, strides, "float16")})["even_rows"] is even


@pytest.mark.parametrize(
    "shape, strides, base, aligned",
    [
        ((2, 3, 1, 8), (24, 8, 8, 1), True, True),
        ((2, 3, 1, 8), (24, 8, 8, 1), False, False),
        ((2, 3, 1, 8), (28, 8, 8, 1), True, False),
        ((1, 3, 1, 8), (28, 8, 8, 1), True, True),
        ((2, 3, 2, 8), (48, 16, 4, 1), True, False),
    ],
)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_an_array_is_aligned_with_base_and_strides(shape, strides, base, aligned, name):
    assert facts(**{name: ArraySpec(shape, strides, "float16", base)})["aligned"] is aligned


@pytest.mark.parametrize(
    "shape, strides, item, mappable",
    [
        ((2, 3, 8), (24, 8, 1), 2, True),
        ((2, 3, 8), (25, 8, 1), 2, False),
        ((2, 3, 8), (24, 4, 1), 2, False),
        ((2, 3, 8), (4, 4, 1), 4, True),
        ((2, 3, 8), (0, 8, 1), 2, False),
        ((1, 3, 8), (0, 8, 1), 2, True),
        ((2, 3, 8), (-24, 8, 1), 2, False),
        ((2, 1), (1, 1), 16, True),
        ((3, 16), (16, 1), 1, True),
    ],
)
def test_a_tensor_map_wants_strides_of_16_bytes_that_repeat_nothing(shape, strides, item, mappable):
    assert are_mappable(shape, strides, item) is mappable


def test_a_user_is_told_which_arrays_are_copied():
    wide = ArraySpec((2, 3, 1, 8), (48, 16, 16, 2), "float16")
    bias = ArraySpec((2, 3), (1, 2), "float16")
    assert copies(Operands(PLAIN, PLAIN, PLAIN, bias=bias)) == ()
    assert copies(Operands(wide, PLAIN, wide)) == (
        "q is copied: its last dim has stride 2",
        "v is copied: its last dim has stride 2",
    )


@pytest.mark.parametrize(
    "shape, strides, follow",
    [
        ((3, 5, 2, 8), (80, 16, 8, 1), True),
        ((3, 5, 2, 8), (100, 20, 8, 1), True),
        ((3, 5, 2, 8), (40, 20, 8, 1), False),
        ((3, 5, 2, 8), (96, 16, 8, 1), False),
        ((2, 5, 2, 8), (0, 16, 8, 1), False),
        ((1, 5, 2, 8), (7, 16, 8, 1), True),
        ((0, 5, 2, 8), (7, 16, 8, 1), True),
        ((5, 2, 8), (99, 8, 1), True),
    ],
)
def test_rows_of_an_entry_follow_those_of_the_one_before(shape, strides, follow):
    array, dense = ArraySpec(shape, strides, "float16"), ArraySpec.contiguous((2, 3, 2, 8), "int8")
    assert rows_follow(array) is follow
    given: dict[str, Any] = {"q": dense, "k": dense, "v": dense, "out": None}
    for name in given:
        assert storage(**{**given, name: array}, by_ranges=True)["rows_follow"] is follow
        assert storage(**{**given, name: array})["rows_follow"]


@pytest.mark.parametrize(
    "shape, strides, own",
    [
        ((3, 2, 5, 2), (20, 10, 2, 1), True),
        ((3, 2, 5, 2), (10, 0, 2, 1), False),
        ((3, 1, 5, 2), (10, 10, 2, 1), False),
        ((15, 2), (2, 1), False),
    ],
)
def test_heads_have_ranges_of_their_own_where_they_are_apart(shape, strides, own):
    assert have_own_ranges(ArraySpec(shape, strides, "int32")) is own
    assert not have_own_ranges(None)
