"""Strides that kernels are given: of dims that an array lacks they are zero, so that any index of
such a dim leads to the one array that there is."""

import math
from dataclasses import replace
from typing import Any

import pytest

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.numbers import FAR
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.kernels.args import kinds
from heedful.launch.bind import groups, hopper_groups
from heedful.launch.spec import Pointer

SHAPE, STRIDES = (3, 5, 7, 9), (5000, 900, 90, 1)
TENSOR, VECTOR = ArraySpec(SHAPE, STRIDES, "float16"), ArraySpec(SHAPE, STRIDES, "float32")


def last(spec: ArraySpec, dims: int) -> dict[str, ArraySpec]:
    """An array of the last dims alone."""
    return {"x": spec._replace(shape=spec.shape[-dims:], strides=spec.strides[-dims:])}


def given(group: Any) -> dict[str, int]:
    """A group's strides by name; its address is that of the array."""
    found = group._asdict()
    pointer = found.pop("ptr")
    assert isinstance(pointer, Pointer) and (pointer.buffer, pointer.aligned) == ("x", False)
    return {name.removeprefix("stride_"): scalar.value for name, scalar in found.items()}


@pytest.mark.parametrize(
    "group, strides",
    [
        (groups.rows(last(TENSOR, 4), "x"), {"b": 5000, "n": 900, "h": 90}),
        (groups.rows(last(TENSOR, 3), "x"), {"b": 0, "n": 900, "h": 90}),
        (
            groups.split_rows(last(TENSOR, 4), "x", 1, True),
            {"s": 5000, "b": 0, "n": 900, "h": 90},
        ),
        (groups.split_rows(last(TENSOR, 3), "x", 1, False), {"s": 0, "b": 0, "n": 900, "h": 90}),
        (
            groups.split_rows(last(TENSOR, 4), "x", 1, False),
            {"s": 0, "b": 5000, "n": 900, "h": 90},
        ),
        (groups.row_vector(last(VECTOR, 3), "x"), {"b": 900, "h": 90}),
        (groups.row_vector(last(VECTOR, 2), "x"), {"b": 0, "h": 90}),
        (groups.split_row_vector(last(VECTOR, 4), "x", True), {"s": 5000, "b": 900, "h": 90}),
        (groups.split_row_vector(last(VECTOR, 3), "x", True), {"s": 900, "b": 0, "h": 90}),
        (groups.split_row_vector(last(VECTOR, 3), "x", False), {"s": 0, "b": 900, "h": 90}),
        (groups.split_row_vector(last(VECTOR, 2), "x", False), {"s": 0, "b": 0, "h": 90}),
        (groups.row_array(last(VECTOR, 3), "x"), {"b": 900, "h": 90, "m": 1}),
        (groups.row_array(last(VECTOR, 2), "x"), {"b": 0, "h": 90, "m": 1}),
        (groups.score_array(last(VECTOR, 4), "x"), {"b": 5000, "h": 900, "m": 90, "n": 1}),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, tuple) else str(sorted(x.values())),
)
def test_a_dim_that_an_array_lacks_has_no_stride(group, strides):
    assert given(group) == strides


@pytest.mark.parametrize("make", [groups.row_vector, groups.row_array, groups.score_array])
def test_an_array_that_is_not_there_has_no_strides(make):
    group = make({}, "x")
    assert group == type(group)(*[None] * len(group))
    assert groups.split_row_vector({}, "x", True) == kinds.SplitRowVector(None, None, None, None)
    assert groups.relative_bias({}) == kinds.RelativeBias(None, None, None)


@pytest.mark.parametrize("batch, stride", [(1, 0), (2, 25), (3, 25)])
def test_one_tree_serves_every_sequence(batch, stride):
    problem = AttentionProblem.dense(3, 5, 9, 2, tree_mask=True, mask=MaskSpec.of(True))
    tree = ArraySpec((batch, 5, 5), (25, 5, 1), "bool")
    made = groups.mask(problem, {"tree_mask": tree})
    assert (made.tree.stride_b.value, made.tree.stride_m.value) == (stride, 5)


@pytest.mark.parametrize("bound", [0, 1, FAR - 1, FAR, FAR + 1])
def test_kernels_are_given_each_side_of_a_window_and_no_number_beyond_the_farthest(bound):
    """A side of 0 is a bound; one below 0 is none."""
    problem = AttentionProblem.dense(3, 5, 9, 2)
    for side in ("left", "right", "first"):
        given: dict[str, Any] = {"left": -1, "right": -1, "first": 0} | {side: bound}
        made = groups.mask(replace(problem, mask=MaskSpec(**given)), {})
        wanted = {"left": FAR, "right": FAR, "first": 0} | {side: min(bound, FAR)}
        assert {name: getattr(made, name).value for name in wanted} == wanted
    for shift in (bound, -bound):
        made = groups.mask(replace(problem, mask=MaskSpec(shift=shift)), {})
        assert made.shift.value == max(-FAR, min(shift, FAR))


@pytest.mark.parametrize("value, kind", [(2**22 - 1, "i32"), (2**22, "i64"), (-(2**22), "i64")])
def test_rows_of_a_tile_are_found_in_32_bits_or_their_stride_has_64(value, kind):
    """256 rows of the largest stride that has 32 lie 2^30 apart."""
    assert groups.row_stride(value).type == kind and groups.stride(value).type == "i64"


@pytest.mark.parametrize(
    "k, page_size, keys",
    [((40, 2, 8), 0, 40), ((3, 9, 2, 8), 0, 9), ((0, 9, 2, 8), 0, 0), ((7, 4, 2, 8), 4, 20)],
)
def test_stored_keys_are_those_that_each_sequence_has_room_for(k, page_size, keys):
    arrays = {"k": ArraySpec.contiguous(k, "float16")}
    arrays["block_table"] = ArraySpec.contiguous((3, 5), "int32")
    assert groups.stored_keys(arrays, page_size) == keys


@pytest.mark.parametrize("word", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5, -1])
def test_a_word_is_given_as_the_signed_number_of_its_bits(word):
    found = groups.wrapped(word)
    assert -(2**31) <= found < 2**31 and (found - word) % 2**32 == 0


@pytest.mark.parametrize(
    "facts, adjusted",
    [
        ({}, False),
        ({"scale": 0.5}, False),
        ({"scale": -0.5}, True),
        ({"softcap": 0.5}, True),
        ({"alibi": True}, True),
        ({"bias": True}, True),
        ({"rel_bias": True}, True),
        ({"dtype": "float32"}, True),
    ],
    ids=str,
)
def test_scores_are_left_alone_where_a_positive_scale_is_all(facts, adjusted):
    made = groups.score_mods(AttentionProblem.dense(3, 5, 9, 2, **facts), {})
    found = made.IS_ADJUSTED, made.HAS_SOFTCAP
    assert found == (adjusted, "softcap" in facts)
    assert made.softcap.value == facts.get("softcap", 0.0)


def test_slopes_and_biases_are_found_by_the_strides_of_their_dims():
    problem = AttentionProblem.dense(3, 5, 9, 2, alibi=True, bias=True)
    arrays = {
        "alibi_slopes": ArraySpec((3, 2), (70, 3), "float32"),
        "bias": ArraySpec((3, 2, 5, 9), (900, 400, 50, 2), "float32"),
    }
    for made in (groups.score_mods(problem, arrays), hopper_groups.score_mods(problem, arrays)):
        assert made.stride_alibib.value == 70
        strides = (made.bias.stride_b, made.bias.stride_h, made.bias.stride_m, made.bias.stride_n)
        assert [stride.value for stride in strides] == [900, 400, 50, 2]


@pytest.mark.parametrize(
    "facts, bounds",
    [
        ({}, (None, None)),
        ({"total_q": 12}, (5, 9)),
        ({"total_k": 20}, (None, 9)),
        ({"page_size": 4, "used_k": True}, (None, 9)),
    ],
    ids=str,
)
def test_a_bias_bounds_lengths_that_may_differ_from_its_own(facts, bounds):
    problem = AttentionProblem.dense(3, 5, 9, 2, bias=True, **facts)
    arrays = {"bias": ArraySpec((3, 2, 5, 9), (90, 45, 9, 1), "float32")}
    made = hopper_groups.score_mods(problem, arrays)
    found = made.longest_q, made.longest_k
    assert tuple(None if x is None else x.value for x in found) == bounds
    alone = hopper_groups.score_mods(replace(problem, bias=False), {})
    assert alone.longest_q is None and alone.longest_k is None


@pytest.mark.parametrize("dtype, group", [("int4", 16), ("int8", 8), ("int8", 0)])
def test_keys_of_4_bits_and_groups_of_scales_are_told(dtype, group):
    facts = {"kv_dtype": dtype, "kv_group": group, "head_dim": 64}
    made = groups.descales(AttentionProblem.dense(3, 5, 9, 2, **facts), {})
    assert (dtype == "int4") == made.IS_INT4 and group == made.KV_GROUP


@pytest.mark.parametrize("softcap", [0.5, 1.0, 30.0])
def test_a_softcap_of_any_size_bounds_scores(softcap):
    """scale_log2 tanh(softcap_scale s / 2) is that of softcap tanh(scale s / softcap), base 2."""
    problem = AttentionProblem.dense(3, 5, 9, 2, scale=0.25, softcap=softcap, alibi=True)
    arrays = {"alibi_slopes": ArraySpec((3, 2), (2, 1), "float32")}
    made = hopper_groups.score_mods(problem, arrays)
    log2e = math.log2(math.e)
    found = made.scale_log2.value, made.softcap_scale.value, made.per_unit.value
    assert found == pytest.approx((softcap * log2e, 0.5 / softcap * log2e, 1 / softcap))
    assert made.HAS_SOFTCAP and made.unit is None
    biased = hopper_groups.score_mods(replace(problem, rel_bias=True), arrays)
    assert biased.unit.value == softcap and biased.per_unit is None
    plain = hopper_groups.score_mods(replace(problem, softcap=0.0), arrays)
    found = plain.scale_log2.value, plain.softcap_scale.value, plain.per_unit.value
    assert found == pytest.approx((0.25 * log2e, 0.0, 4.0)) and not plain.HAS_SOFTCAP


@pytest.mark.parametrize(
    "facts, natural",
    [
        ({}, False),
        ({"dtype": "float16"}, True),
        ({"kv_dtype": "int8"}, True),
        ({"dtype": "float16", "alibi": False}, False),
        ({"alibi": False, "rel_bias": True}, True),
        ({"alibi": False, "bias": True}, True),
    ],
    ids=str,
)
def test_scores_are_in_natural_units_under_a_bias_and_under_slopes_in_float16(facts, natural):
    facts = {"scale": 0.5, "alibi": True, **facts}
    problem = AttentionProblem.dense(3, 5, 9, 2, **facts)
    arrays = {"alibi_slopes": ArraySpec((3, 2), (2, 1), "float32")} if problem.alibi else {}
    arrays |= {"bias": ArraySpec.contiguous((3, 2, 5, 9), "float16")} if problem.bias else {}
    made = hopper_groups.score_mods(problem, arrays)
    assert (made.unit is not None) == natural
    assert (made.per_unit is not None) == (problem.alibi and not natural)


@pytest.mark.parametrize("rows", [1, 4, 5, 6])
@pytest.mark.parametrize("origins", [0, 1, 4])
def test_a_seed_of_five_numbers_says_which_shard_it_is_of(rows, origins):
    facts = {"dropout_p": 0.25, "dropout_origin": (1, 2, 3, 8), "origins": origins}
    problem = AttentionProblem.dense(3, 5, 9, 2, **facts)
    arrays = {"seed": ArraySpec.contiguous((rows,), "int64")}
    made = groups.dropout(problem, arrays | {"origins": ArraySpec.contiguous((3, 4), "int32")})
    given = [made.origin_b, made.origin_h, made.origin_m, made.origin_n]
    wanted = [None] * 4 if origins or rows == 5 else [1, 2, 3, 8]
    assert [None if x is None else x.value for x in given] == wanted
    assert (made.origins is not None) == bool(origins)
    assert (origins != 1, True) == (made.IS_QUAD, made.IS_ON)
    keep = made.inverse_keep.value, made.threshold.value % 2**32
    assert keep == (1 / 0.75, 3 * 2**30)
    without = groups.dropout(problem, {})
    assert (without.origin_b is None) == bool(origins)


@pytest.mark.parametrize(
    "facts, plain",
    [
        ({}, True),
        *(({name: True}, False) for name in ("used_q", "used_k", "leftpad_k", "tree_mask")),
        *(({name: 12}, False) for name in ("total_q", "total_k")),
        ({"page_size": 4}, False),
        ({"key_ranges": 1}, False),
        *(({"mask": mask}, False) for mask in (MaskSpec.of(True), MaskSpec(3, -1))),
        ({"return_lse": True, "softcap": 1.0}, True),
    ],
    ids=str,
)
def test_lists_alone_say_what_is_seen_where_nothing_else_hides_a_key(facts, plain):
    problem = AttentionProblem.dense(3, 5, 9, 2, block_mask=64, **facts)
    arrays = {"block_rows": ArraySpec((3, 2, 7, 12), (900, 300, 20, 1), "int32")}
    arrays["block_bits"] = ArraySpec.contiguous((11, 64, 2), "int32")
    made = groups.block_lists(problem, arrays, "block_rows")
    strides = [made.stride_b.value, made.stride_h.value, made.stride_m.value]
    assert (strides, made.width.value, made.pool.value) == ([900, 300, 20], 5, 11)
    assert (64, plain, False) == (made.SIDE, made.IS_PLAIN, made.IS_EXACT)
    # Packed sequences have as many tiles as the longest.
    wanted = 7 if problem.varlen_q or problem.varlen_k else None
    assert (made.tiles and made.tiles.value) == wanted
    absent = groups.block_lists(problem, arrays, "block_keys")
    assert absent.ptr is None and absent.SIDE is None


def test_ranges_of_packed_rows_have_no_batch_and_no_heads():
    shapes = {(3, 2, 5, 4): (700, 300, 40), (15, 4): (0, 0, 40)}
    for shape, wanted in shapes.items():
        spec = ArraySpec(shape, (700, 300, 40, 1)[-len(shape) :], "int32")
        made = groups.row_ranges({"key_ranges": spec})
        strides = [made.stride_b.value, made.stride_h.value, made.stride_m.value]
        assert tuple(strides) == wanted


def test_each_descale_has_its_own_place_and_groups_have_one_for_each_key():
    of_heads = {
        f"{x}_descale": ArraySpec((3, 2), (10 + i, 5), "float32") for i, x in enumerate("qkv")
    }
    problem = AttentionProblem.dense(3, 5, 9, 2, dtype="float8_e4m3fn")
    made = groups.descales(problem, of_heads)
    for i, name in enumerate("qkv"):
        found = getattr(made, name)
        assert (found.ptr.buffer, found.shift, found.stride_n) == (f"{name}_descale", None, None)
        assert (found.stride_b.value, found.stride_h.value) == (10 + i, 5)
    grouped = {f"{x}_descale": ArraySpec((3, 9, 2, 4), (900, 80, 7, 1), "float32") for x in "kv"}
    grouped |= {f"{x}_shift": grouped[f"{x}_descale"] for x in "kv"}
    made = groups.descales(replace(problem, dtype="bfloat16", kv_group=32), grouped)
    for name in "kv":
        found = getattr(made, name)
        assert (found.ptr.buffer, found.shift.buffer) == (f"{name}_descale", f"{name}_shift")
        strides = found.stride_b.value, found.stride_n.value, found.stride_h.value
        assert strides == (900, 80, 7)
    assert made.q.ptr is None
