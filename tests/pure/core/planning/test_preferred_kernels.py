"""At which figures one kernel is preferred to another, or cannot."""

from dataclasses import replace
from typing import Any

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import explain, plan
from heedful.core.registry.capability import VARIANTS, variant

H200, MI300X = by_name("H200"), by_name("MI300X")
dense = AttentionProblem.dense
CAPPED = {"softcap": 9.0}
PAGED = {"page_size": 16, "used_k": True}


@pytest.mark.parametrize(
    "facts, backend",
    [
        # Rows of a KV head.
        ({"seqlen_q": 32, "used_k": True}, "hopper_decode"),
        ({"seqlen_q": 33, "used_k": True}, "hopper"),
        ({"seqlen_q": 33, "used_k": True, "dtype": "float8_e4m3fn"}, "decode"),
        # The same over keys of one length.
        ({"batch": 67, "seqlen_q": 16}, "hopper_decode"),
        ({"batch": 67, "seqlen_q": 17}, "hopper"),
        ({"batch": 2, "seqlen_q": 17}, "hopper"),
        ({"batch": 2, "seqlen_q": 17, "softcap": 9.0}, "hopper"),
        ({"batch": 2, "seqlen_q": 17, "tree_mask": True}, "decode"),
        ({"batch": 67}, "hopper_decode"),
        ({"batch": 67, "head_dim": 320, "head_dim_v": 256, "v_in_k": True}, "decode"),
        # What the Hopper decode does not take: KV heads of one length beside half of the 132 units.
        ({"batch": 33, "heads_q": 2, **CAPPED}, "decode"),
        ({"batch": 67, **CAPPED}, "hopper"),
        ({"batch": 67, "used_k": True, **CAPPED}, "decode"),
        ({"batch": 67, "out_dtype": "float32"}, "hopper"),
        ({"batch": 4, "seqlen_k": 8192, "out_dtype": "float32"}, "hopper"),
        ({"batch": 4, "used_k": True, "seqlen_k": 8192, "out_dtype": "float32"}, "decode"),
        # Few sequences of one length.
        ({"batch": 4, "seqlen_k": 8192, **CAPPED}, "hopper"),
        ({"batch": 4, "seqlen_k": 8191, **CAPPED}, "decode"),
        ({"batch": 5, "seqlen_k": 8192, **CAPPED}, "decode"),
        ({"batch": 4, "seqlen_k": 8192, "used_k": True, **CAPPED}, "decode"),
        ({"batch": 4, "seqlen_k": 8192, "head_dim": 64, **CAPPED}, "decode"),
        ({"batch": 4, "seqlen_k": 8192, "seqlen_q": 2, **CAPPED}, "decode"),
        ({"batch": 4, "seqlen_k": 8192, "mask": MaskSpec.of(True, (4095, 0)), **CAPPED}, "decode"),
        ({"batch": 4, "seqlen_k": 8192, "kv_dtype": "int8", "kv_group": 128}, "decode"),
        # Packed queries: the longest count. Packed keys are no cache.
        ({**PAGED, "total_q": 67, "batch": 67}, "hopper_decode"),
        ({**PAGED, "total_q": 40, "seqlen_q": 32, "num_splits": 1}, "hopper_decode"),
        ({**PAGED, "total_q": 70, "seqlen_q": 64, "num_splits": 3}, "hopper_decode"),
        ({**PAGED, "total_q": 70, "seqlen_q": 64, **CAPPED}, "decode"),
        ({**PAGED, "total_q": 70, "seqlen_q": 65, **CAPPED}, "hopper"),
        ({**PAGED, "total_q": 140, "seqlen_q": 128, "num_splits": 3}, "hopper_decode"),
        ({**PAGED, "total_q": 140, "seqlen_q": 129, "num_splits": 3}, "hopper"),
        ({**PAGED, "total_q": 67, "batch": 67, **CAPPED}, "decode"),
        ({"total_q": 67, "total_k": 9000, "batch": 67}, "decode"),
        ({"total_q": 67, "total_k": 9000, "batch": 67, "used_k": True}, "decode"),
        ({"total_q": 67, "total_k": 9000, "batch": 67, "needs_grad": True}, "hopper"),
        ({"total_q": 67, "total_k": 9000, "batch": 67, "seqlen_q": 33}, "hopper"),
        ({**PAGED, "total_q": 67, "batch": 67, "needs_grad": True}, "hopper"),
        # What neither Hopper kernel takes is not left to them.
        ({"seqlen_q": 33, "used_k": True, "scale": -0.1}, "decode"),
        ({"batch": 67, "scale": -0.1}, "decode"),
        ({"batch": 67, "seqlen_q": 17, "scale": -0.1}, "decode"),
        ({"batch": 4, "seqlen_k": 8192, "scale": -0.1}, "decode"),
    ],
)
def test_few_queries_are_decoded_unless_the_hopper_forward_is_as_fast(facts, backend):
    base = {"batch": 1, "seqlen_q": 1, "seqlen_k": 4096, "heads_q": 1}
    assert plan(dense(**{**base, **facts}), H200).variant_of("forward").packed_as == backend


@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("queries", [1, 4, 16, 17, 2048])
def test_8_bit_queries_over_a_cache_are_decoded_however_many_they_are(queries, num_splits):
    """No other kernel takes them."""
    facts: dict[str, Any] = {"dtype": "float8_e4m3fn", "causal": True}
    facts |= {"used_k": True, "num_splits": num_splits}
    calls: list[dict[str, Any]]
    calls = [{"page_size": 16}, {"page_size": 16, "total_q": 64 * queries - 5}, {}]
    for more in calls:
        found = plan(dense(64, queries, 8192, 32, 8, **facts, **more), H200)
        assert found.backend == "decode"
        rows = found.configs["decode.forward"].block_m
        assert rows == {1: 8, 4: 16}.get(queries, 64)
    dense_keys = dense(64, queries, 8192, 32, 8, dtype="float8_e4m3fn", causal=True)
    assert plan(dense_keys, H200).backend == ("decode" if queries <= 16 else "hopper")
    assert plan(dense(2, 17, 64, 32, 8, used_k=True), H200).backend == "hopper"


def test_partial_results_of_cdna_are_within_reach_of_its_buffer_instructions():
    """Rows of float32 that are 8 MiB apart are not."""
    for heads, takes in ((16383, True), (16384, False)):
        why = variant("cdna", "forward").why_not(dense(1, 1, 512, heads), MI300X)
        assert (why == []) is takes


def test_only_wide_latent_keys_are_decoded_for_more_rows_than_a_tile_has():
    for dim, takes in ((256, False), (320, True)):
        asked = dense(1, 65, 4096, 1, head_dim=dim, head_dim_v=256, v_in_k=True)
        why = variant("decode", "forward", "portable").why_not(asked, H200)
        assert any("query rows" in reason for reason in why) is not takes


def test_a_wide_backward_begins_above_128_columns_of_keys():
    own = variant("hopper", "backward", "wide")
    for dim, takes in ((128, False), (129, True)):
        why = own.why_not(dense(1, 512, 512, 1, head_dim=dim, head_dim_v=72), H200)
        assert any("takes those above 128" in reason for reason in why) is not takes


def test_a_kernel_is_launched_or_runs_on_the_host():
    assert all(bool(r.program) != bool(r.module) for r in VARIANTS)


def test_a_backend_without_a_backward_leaves_it_to_the_next():
    chosen = plan(dense(1, 512, 512, 8, needs_grad=True), MI300X, backend="cdna")
    assert (chosen.backend, chosen.backward) == ("cdna", "portable")


def test_a_problem_that_cannot_be_has_no_plan():
    with pytest.raises(ValueError, match="batch must be >= 0, got -1"):
        plan(replace(dense(1, 512, 512, 8), batch=-1), H200)


def test_two_splits_are_explained():
    said = explain(plan(dense(1, 64, 4096, 8, num_splits=2), H200, backend="hopper"))
    assert "splits    2" in said.splitlines()


def test_packed_queries_of_several_tiles_have_the_hopper_decode_by_name():
    packed = dense(2, 256, 4096, 1, 1, **PAGED, total_q=400)
    assert plan(packed, H200).backend == "hopper"
    for name in ("hopper_decode", "decode"):
        assert plan(packed, H200, backend=name).variant == "hopper"
    with pytest.raises(ValueError, match="257 query rows of a KV head: takes up to 256"):
        plan(replace(packed, seqlen_q=257), H200, backend="hopper_decode")


# Features of a call, and Hopper's kernel that takes it by default.
BY_DEFAULT = [
    ("forward", "hopper/forward", {"out_dtype": "float32"}),
    ("backward", "hopper/backward", {"needs_grad": True, "used_k": True}),
    ("backward", "hopper/pair", {"needs_grad": True, "leftpad_k": True, "head_dim_v": 128}),
    ("backward", "hopper/backward", {"needs_grad": True, "used_q": True, "total_q": 900}),
]


@pytest.mark.parametrize("direction, kernel, facts", BY_DEFAULT, ids=str)
def test_partial_results_and_lengths_in_use_run_on_hopper_by_default(direction, kernel, facts):
    dim = 192 if "head_dim_v" in facts else 128
    chosen = plan(dense(2, 512, 512, 8, head_dim=dim, **facts), H200)
    level = chosen.level if direction == "forward" else chosen.backward_level
    assert (chosen.variant_of(direction).label, level) == (kernel, "run")


def test_lengths_of_dense_queries_are_refused_by_the_hopper_backward():
    problem = dense(2, 512, 512, 8, head_dim=128, needs_grad=True, used_q=True)
    why = variant("hopper", "backward", "backward").why_not(problem, H200)
    assert "lengths of queries that are not packed" in why
    packed = replace(problem, total_q=900)
    assert not variant("hopper", "backward", "backward").why_not(packed, H200)


def test_float32_results_over_keys_in_pages_are_refused_by_the_hopper_forward():
    paged = dense(2, 512, 512, 8, head_dim=128, used_k=True, page_size=64, out_dtype="float32")
    why = variant("hopper", "forward", "forward").why_not(paged, H200)
    assert why == ["float32 output over keys in pages"]
    for near in (replace(paged, page_size=0), replace(paged, out_dtype="bfloat16")):
        assert not variant("hopper", "forward", "forward").why_not(near, H200)
