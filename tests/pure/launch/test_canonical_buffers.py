"""The arrays that stand for a call's where none are given: their shapes, and what cannot be."""

from typing import Any

import pytest

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.problem import AttentionProblem
from heedful.launch.program import buffers


def problem(**facts) -> AttentionProblem:
    base = {"batch": 3, "seqlen_q": 5, "seqlen_k": 9, "heads_q": 4, "heads_k": 2, "head_dim": 64}
    return AttentionProblem.dense(**{**base, "head_dim_v": 32, **facts})


PLAIN = {
    "q": ((3, 5, 4, 64), "bfloat16"),
    "k": ((3, 9, 2, 64), "bfloat16"),
    "v": ((3, 9, 2, 32), "bfloat16"),
}
# Facts, and the arrays that a call has beside or in place of the plain ones.
GIVEN: list[tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], str]]]] = [
    ({}, {}),
    ({"total_q": 11}, {"q": ((11, 4, 64), "bfloat16"), "cu_seqlens_q": ((4,), "int32")}),
    (
        {"total_k": 20},
        {
            "k": ((20, 2, 64), "bfloat16"),
            "v": ((20, 2, 32), "bfloat16"),
            "cu_seqlens_k": ((4,), "int32"),
        },
    ),
    (
        {"page_size": 4, "used_k": True},
        {
            "k": ((9, 4, 2, 64), "bfloat16"),
            "v": ((9, 4, 2, 32), "bfloat16"),
            "block_table": ((3, 3), "int32"),
            "seqused_k": ((3,), "int32"),
        },
    ),
    (
        {"kv_dtype": "int8"},
        {
            "k": ((3, 9, 2, 64), "int8"),
            "v": ((3, 9, 2, 32), "int8"),
            **{f"{name}_descale": ((3, 2), "float32") for name in "kv"},
        },
    ),
    (
        {"kv_dtype": "int4", "kv_group": 16, "kv_shift": True},
        {
            "k": ((3, 9, 2, 32), "int4"),
            "v": ((3, 9, 2, 16), "int4"),
            **{f"k_{name}": ((3, 9, 2, 4), "float32") for name in ("descale", "shift")},
            **{f"v_{name}": ((3, 9, 2, 2), "float32") for name in ("descale", "shift")},
        },
    ),
    (
        {"kv_dtype": "fp8_ds_mla", "heads_k": 1, "head_dim": 576, "head_dim_v": 512},
        {
            "q": ((3, 5, 4, 576), "bfloat16"),
            **{name: ((3, 9, 1, 656), "uint8") for name in ("k", "v")},
        },
    ),
    ({"bias": True}, {"bias": ((3, 4, 5, 9), "bfloat16")}),
    ({"rel_bias": True}, {"rel_bias": ((4, 15), "bfloat16")}),
    ({"alibi": True}, {"alibi_slopes": ((3, 4), "float32")}),
    ({"sink": True}, {"sink": ((4,), "float32")}),
    ({"tree_mask": True}, {"tree_mask": ((3, 5, 5), "bool")}),
    ({"dropout_p": 0.1}, {"seed": ((1,), "int64")}),
    ({"origins": 4}, {"origins": ((3, 4), "int32")}),
    ({"key_ranges": 2}, {"key_ranges": ((3, 4, 5, 4), "int32")}),
    (
        {"key_ranges": 2, "total_q": 11},
        {
            "q": ((11, 4, 64), "bfloat16"),
            "cu_seqlens_q": ((4,), "int32"),
            "key_ranges": ((11, 4), "int32"),
        },
    ),
    *(
        (
            {"block_mask": 64, "seqlen_q": q, "seqlen_k": k},
            {
                "q": ((3, q, 4, 64), "bfloat16"),
                "k": ((3, k, 2, 64), "bfloat16"),
                "v": ((3, k, 2, 32), "bfloat16"),
                "block_rows": ((3, 4, tiles_q, 2 + 2 * max(1, tiles_k)), "int32"),
                "block_keys": ((3, 4, tiles_k, 2 + 2 * max(1, tiles_q)), "int32"),
                "block_bits": ((1, 64, 2), "int32"),
            },
        )
        # A list has room for an entry where there are no tiles, too.
        for q, k, tiles_q, tiles_k in ((128, 129, 2, 3), (0, 1, 0, 1), (65, 0, 2, 0))
    ),
    *(
        ({fact: True}, {name: ((3,), "int32")})
        for fact, name in (
            ("used_q", "seqused_q"),
            ("used_k", "seqused_k"),
            ("kv_batch_idx", "kv_batch_idx"),
            ("leftpad_k", "leftpad_k"),
            ("q_offsets", "q_offsets"),
        )
    ),
]


@pytest.mark.parametrize("facts, arrays", GIVEN, ids=str)
def test_a_call_has_the_arrays_that_its_facts_say(facts, arrays):
    found = buffers.inputs(problem(**facts))
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == PLAIN | arrays
    assert all(x.aligned for x in found.values())


def test_heads_share_ranges_but_where_they_have_their_own():
    shared, own = (
        buffers.inputs(problem(key_ranges=2, own_ranges=own))["key_ranges"] for own in (False, True)
    )
    assert (shared.strides, own.strides) == ((20, 0, 4, 1), (80, 20, 4, 1))


@pytest.mark.parametrize(
    "facts, names",
    [
        ({}, ()),
        *(({fact: True}, ("lse",)) for fact in ("return_lse", "needs_grad")),
        ({"keeps_rest": True}, ("lse", "rest")),
        ({"max_scores": True}, ("lse", "max_scores")),
        ({"return_probs": True}, ("lse", "probs")),
    ],
    ids=str,
)
def test_a_forward_has_the_results_that_are_asked_for(facts, names):
    for more, rows in (({}, (3, 4, 5)), ({"total_q": 11}, (4, 11))):
        asked = problem(**facts, **more)
        found = buffers.results(asked)
        assert found.keys() == {"out", *names}
        assert (found["out"].shape, found["out"].dtype) == (asked.out_shape, "bfloat16")
        for name in {*names} - {"probs"}:
            assert (found[name].shape, found[name].dtype) == (rows, "float32")
        if "probs" in names:
            assert found["probs"] == ArraySpec.contiguous((3, 4, 5, 9), "bfloat16")
        assert buffers.forward(asked) == buffers.inputs(asked) | found


def test_a_backward_has_gradients_of_what_a_forward_was_given():
    facts = {"needs_grad": True, "bias": True, "sink": True, "rel_bias": True}
    asked = problem(**facts, return_probs=True, max_scores=True)
    found = buffers.backward(asked)
    given = buffers.forward(asked).keys() - {"probs", "max_scores"}
    assert found.keys() == given | {"dout", "dq", "dk", "dv", "dsink"}
    more = buffers.backward(problem(**facts, bias_grad=True, rel_bias_grad=True))
    assert more.keys() == found.keys() | {"dbias", "drel_bias"}
    for name in more:
        if name.startswith("d") and name[1:] in more:
            assert more[name] == more[name[1:]]
    assert "lse" in buffers.backward(problem())


@pytest.mark.parametrize("rotary, dim, angles", [("halves", 0, 32), ("pairs", 16, 8), ("", 16, 0)])
def test_a_step_has_new_keys_and_tables_of_the_angles_that_it_rotates(rotary, dim, angles):
    asked = problem(used_k=True, seqlen_q=2)
    found = buffers.step(asked, 2, rotary, dim)
    assert (found["k_new"].shape, found["v_new"].shape) == ((3, 2, 2, 64), (3, 2, 2, 32))
    assert "seqused_k" not in found and found["cache_seqlens"].shape == (3,)
    assert ("q_new" in found, "q" in found) == (bool(rotary), not rotary)
    tables = {name: found[name] for name in ("rotary_cos", "rotary_sin") if name in found}
    table = ArraySpec.contiguous((9, angles), "bfloat16")
    assert tables == (dict.fromkeys(("rotary_cos", "rotary_sin"), table) if rotary else {})


def test_the_last_result_begins_with_a_number_where_kernels_store_rows_of_sequences_alone():
    assert buffers.beginning({"out", "lse"}) is None
    assert buffers.beginning({"out", "probs", "max_scores"}) == 0.0
    assert buffers.beginning({"max_scores", "cu_seqlens_q"}) == float("-inf")
    assert buffers.beginning({"max_scores"}) is buffers.beginning({"cu_seqlens_q"}) is None


def test_arrays_that_no_kernel_can_be_given_are_refused():
    asked = problem(return_probs=True)
    arrays = buffers.forward(asked)
    buffers.check(asked, arrays)
    with pytest.raises(ValueError, match="^probs need lse"):
        buffers.check(asked, {name: x for name, x in arrays.items() if name != "lse"})
    paged = problem(page_size=4, used_k=True)
    buffers.check(paged, buffers.forward(paged))
    buffers.check(problem(total_k=9), buffers.forward(problem(total_k=9)))
    with pytest.raises(ValueError, match="^cu_seqlens_k beside block_table must come as seqused_k"):
        buffers.check(paged, buffers.forward(paged) | {"cu_seqlens_k": arrays["lse"]})
    scaled = problem(kv_dtype="int8", kv_group=16, kv_shift=True)
    arrays = buffers.forward(scaled)
    buffers.check(scaled, arrays)
    for name in ("k_shift", "v_shift"):
        other = arrays | {name: arrays[name]._replace(strides=(99, 8, 4, 1))}
        with pytest.raises(ValueError, match=f"^{name} must have the strides of {name[0]}_descale"):
            buffers.check(scaled, other)
