"""How rows of a quantised cache are cut for the decode kernel, and whose scales are refused."""

from types import SimpleNamespace

import pytest

from heedful.core.call.problem import AttentionProblem
from heedful.core.call.quant import (
    check_latent,
    check_packed,
    check_quantize,
    check_scale,
    check_unpacked_dtype,
)
from heedful.launch.bind.decode import group_of, loads_once, slices, values
from heedful.launch.spec import is_group


@pytest.mark.parametrize(
    "stored, group, dim, count",
    [
        ("int8", 0, 128, 1),
        ("int8", 16, 128, 1),
        ("int8", 32, 128, 4),
        ("int8", 64, 128, 2),
        ("int8", 128, 128, 1),
        ("int8", 256, 128, 1),
        ("int8", 48, 96, 1),
        ("int8", 33, 66, 1),
        ("float8_e5m2", 32, 64, 2),
        ("int4", 32, 128, 1),
        ("int4", 64, 128, 2),
        ("int4", 64, 256, 4),
        ("int4", 66, 132, 1),
        ("int4", 96, 192, 1),
        # Rows of latent vectors have a scale for each 128 values.
        ("fp8_ds_mla", 0, 512, 4),
        ("fp8_ds_mla", 0, 128, 1),
    ],
)
def test_a_row_is_as_many_products_as_it_has_scales_of_16_words_or_more(stored, group, dim, count):
    facts: dict = {"kv_dtype": stored, "kv_group": group, "used_k": True}
    problem = AttentionProblem.dense(1, 1, 64, 4, **facts)
    assert slices(problem, dim) == count
    assert group_of(problem) == (128 if stored == "fp8_ds_mla" else group)
    assert values(problem) == (4 if stored == "int4" else 2)


@pytest.mark.parametrize(
    "facts, once",
    [
        ({}, True),
        ({"v_in_k": False}, False),
        ({"kv_dtype": "int8"}, True),
        ({"kv_dtype": "int8", "kv_group": 64}, False),
        ({"head_dim_v": 64}, True),
        ({"head_dim_v": 32}, False),
        ({"head_dim_v": 96}, False),
    ],
)
def test_values_are_taken_from_keys_where_they_are_a_power_of_two_of_64_at_least(facts, once):
    given: dict = {"v_in_k": True, **facts}
    assert loads_once(AttentionProblem.dense(1, 1, 64, 4, head_dim=128, **given)) is once


def test_scales_belong_to_the_values_that_they_are_of():
    check_scale((2, 3, 64), 128, (2, 3, 4), None)
    check_scale((2, 3, 64), 128, (2, 3, 4), (2, 3, 4))
    for scale, shift, said in (
        ((2, 4), None, "scale must be (..., groups) with groups that divide 128, got shape (2, 4)"),
        ((2, 3, 0), None, "scale must be (..., groups) with groups that divide 128, got shape"),
        ((2, 3, 3), None, "scale must be (..., groups) with groups that divide 128, got shape"),
        ((2, 5, 4), None, "scale must have shape (..., groups) = (2, 3, 4), got (2, 5, 4)"),
        ((2, 3, 4), (2, 3, 2), "shift must have shape of scale = (2, 3, 4), got (2, 3, 2)"),
    ):
        with pytest.raises(ValueError) as caught:
            check_scale((2, 3, 64), 128, scale, shift)
        assert str(caught.value).startswith(said)


def test_a_group_is_a_tuple_with_names():
    assert [is_group(v) for v in ((1, 2), SimpleNamespace(_fields=()), None)] == [False] * 3


@pytest.mark.parametrize(
    "shape, storage, size, shared",
    [
        *(((3, 64), "int8", size, size or 64) for size in (None, 1, 32, 64)),
        ((1,), "float8_e4m3fn", None, 1),
        ((2,), "int4", 1, 1),
        ((5,), "float8_e5m2", 5, 5),
    ],
)
def test_so_many_values_share_a_scale(shape, storage, size, shared):
    assert check_quantize(shape, "float16", storage, storage, size) == shared


@pytest.mark.parametrize(
    "shape, dtype, storage, size, words",
    [
        ((64,), "int8", "int8", None, "^x must be "),
        ((64,), "float16", "int3", None, "^dtype must be one of int4, .*, got asked$"),
        ((), "float16", "int8", None, r"^x must be \(..., head_dim\), got shape \(\)"),
        ((3, 0), "float16", "int8", None, r"^x must be \(..., head_dim\), got shape \(3, 0\)"),
        *(
            ((64,), "float16", "int8", size, f"^group_size must divide head_dim 64, got {size}$")
            for size in (0, 48, 128)
        ),
        ((3,), "float16", "int4", 1, "^x must have an even head_dim for int4, got 3"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_name(shape, dtype, storage, size, words):
    with pytest.raises((TypeError, ValueError), match=words):
        check_quantize(shape, dtype, storage, "asked", size)


def test_packed_values_and_rows_have_the_dtypes_and_sizes_that_they_are_stored_in():
    for dtype in ("uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"):
        check_packed((1,), dtype)
    with pytest.raises(TypeError, match="^packed must be "):
        check_packed((1,), "int4")
    with pytest.raises(ValueError, match="^packed must be .* got shape"):
        check_packed((), "int8")
    check_latent("packed", (2, 656), "uint8")
    check_latent("x", (576,), "bfloat16")
    refused = [("packed", (656,), "int8"), ("x", (576,), "uint8"), ("packed", (576,), "uint8")]
    refused += [("x", (656,), "float16"), ("x", (), "float16"), ("packed", (), "uint8")]
    for name, shape, dtype in refused:
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be "):
            check_latent(name, shape, dtype)
    for dtype in ("float16", "bfloat16", "float32"):
        check_unpacked_dtype(dtype, dtype)
    with pytest.raises(TypeError, match="^dtype must be float16, bfloat16 or float32, got asked$"):
        check_unpacked_dtype("int8", "asked")
