"""How rows of a quantised cache are cut for the decode kernel, and whose scales are refused."""

from types import SimpleNamespace

import pytest

from heedful.core.call.problem import AttentionProblem
from heedful.core.call.quant import check_scale
from heedful.launch.bind.decode import loads_once, slices, values
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
    ],
)
def test_a_row_is_as_many_products_as_it_has_scales_of_16_words_or_more(stored, group, dim, count):
    facts: dict = {"kv_dtype": stored, "kv_group": group, "used_k": True}
    problem = AttentionProblem.dense(1, 1, 64, 4, **facts)
    assert slices(problem, dim) == count
    assert values(problem) == (4 if stored == "int4" else 2)


@pytest.mark.parametrize(
    "facts, once",
    [
        ({}, True),
        ({"v_in_k": False}, False),
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
