"""Which batches of packed sequences two kernels share, and what each of them is told."""

from dataclasses import replace

import pytest

from heedful.core.device import by_name
from heedful.core.mask import MaskSpec
from heedful.core.mixed import some_are_short
from heedful.core.plan import explain, plan
from heedful.core.problem import AttentionProblem
from heedful.core.tiles import DECODE_ROWS

H200, B200 = by_name("H200"), by_name("B200")
# 4 prefills of 2048 and 124 sequences of one new token.
SERVED = AttentionProblem.dense(
    128, 2048, 8192, 32, 8, causal=True, total_q=4 * 2048 + 124, page_size=16, used_k=True
)


def chosen(**facts) -> str:
    return plan(replace(SERVED, **facts), H200).backend


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"page_size": 0},
        {"num_splits": 1},
        {"dtype": "float16", "kv_dtype": "float16", "out_dtype": "float16"},
        {"return_lse": True, "sink": True, "softcap": 20.0, "alibi": True},
        {"mask": MaskSpec(1000, 0)},
        {"leftpad_k": True, "page_size": 0},
        {"used_q": True},
        {"head_dim": 64, "head_dim_v": 64},
        {"head_dim": 192},
        # One prefill beside one new token, whose mean is more than half of the longest.
        {"batch": 2, "seqlen_q": 2048, "total_q": 2049},
        {"batch": 2, "seqlen_q": 2048, "total_q": 2048 + 8},
        # Half of what equal lengths would have.
        {"batch": 8, "total_q": 4 * 2048},
        {"seqlen_q": 17, "total_q": 128},
    ],
    ids=str,
)
def test_sequences_of_few_and_of_many_queries_over_a_cache_have_a_kernel_each(facts):
    assert chosen(**facts) == "mixed"


@pytest.mark.parametrize(
    "facts, backend",
    [
        # All long, or nearly; all short; one.
        ({"batch": 8, "total_q": 8 * 2048}, "hopper"),
        ({"batch": 8, "total_q": 8 * 2048 - 600}, "hopper"),
        ({"batch": 8, "total_q": 4 * 2048 + 4 * 8}, "mixed"),
        ({"batch": 8, "total_q": 4 * 2048 + 4 * 8 + 1}, "hopper"),
        ({"batch": 2, "total_q": 2048 + 9, "seqlen_q": 2048}, "hopper"),
        ({"seqlen_q": 1, "total_q": 128}, "hopper_decode"),
        ({"seqlen_q": 8, "total_q": 128}, "hopper_decode"),
        ({"batch": 1, "total_q": 2048}, "hopper"),
        # Of so few tiles the Hopper forward splits the keys.
        ({"batch": 2, "seqlen_q": 128, "total_q": 129}, "hopper"),
        ({"batch": 2, "seqlen_q": 128, "total_q": 129, "num_splits": 1}, "mixed"),
        # Short sequences without a cache have few keys.
        ({"page_size": 0, "used_k": False, "total_k": 9000}, "hopper"),
        ({"needs_grad": True}, "hopper"),
        ({"num_splits": 2}, "hopper"),
        ({"dropout_p": 0.1}, "hopper"),
        ({"total_q": None}, "hopper"),
        ({"heads_q": 65, "heads_k": 1}, "hopper"),
        ({"page_size": 1}, "portable"),
        ({"kv_dtype": "float8_e4m3fn"}, "portable"),
        ({"aligned": False}, "portable"),
    ],
    ids=str,
)
def test_other_calls_run_what_they_ran(facts, backend):
    assert chosen(**facts) == backend


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"seqlen_q": 8, "total_q": 128}, "all sequences have few queries"),
        ({"page_size": 0, "used_k": False, "total_k": 9000}, "without a cache"),
        ({"batch": 2, "seqlen_q": 128, "total_q": 129}, "leave half of the device idle"),
        ({"batch": 4, "total_q": 4 * 2048}, "about as long as the longest"),
    ],
    ids=str,
)
def test_what_is_no_mixed_batch_says_why(facts, words):
    said = some_are_short(replace(SERVED, **facts), H200)
    assert said is not None and said.backend == "hopper" and words in said.why
    assert some_are_short(SERVED, H200) is None


def test_what_cannot_be_is_refused_by_name():
    for facts, said in (
        ({"kv_dtype": "int8"}, "KV of int8 beside bfloat16"),
        ({"num_splits": 2}, "does not take forced split of the keys"),
        ({"needs_grad": True}, "does not take a later backward"),
        ({"total_q": None}, "queries that are not packed"),
        ({"heads_q": 65, "heads_k": 1}, "65 query heads a KV head: takes up to 64"),
        ({"total_q": 0}, "no tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(replace(SERVED, **facts), H200, backend="mixed")
    with pytest.raises(ValueError, match="no kernel for sm_100"):
        plan(SERVED, B200, backend="mixed")
    assert plan(SERVED, B200).backend == "portable"


@pytest.mark.parametrize("heads_k, short", [(1, 2), (2, 2), (4, 4), (8, 8), (32, 16)])
def test_a_short_sequence_has_at_most_two_tiles_of_what_a_decode_takes(heads_k, short):
    found = plan(replace(SERVED, heads_k=heads_k), H200)
    group = 32 // heads_k
    assert found.short_q == short
    assert short * group <= DECODE_ROWS
    sizes = found.sizes()
    told = {kernel: sizes.launches[kernel].numbers["short_q"] for kernel in SHARING}
    assert set(told.values()) == {found.short_q}
    rows = found.configs["decode.forward"].block_m
    assert sizes.launches["decode.forward"].numbers["tiles"] == -(-found.short_q * group // rows)


SHARING = ("hopper.varlen_scheduler", "decode.forward")


def test_each_kernel_has_the_tiles_that_its_sequences_alone_would_have():
    mixed = plan(SERVED, H200)
    prefills = plan(replace(SERVED, batch=4, total_q=4 * 2048), H200)
    steps = plan(replace(SERVED, batch=124, seqlen_q=1, total_q=124), H200, backend="decode")
    assert prefills.backend == "hopper"
    assert mixed.configs == prefills.configs | steps.configs
    assert mixed.scheduler == prefills.scheduler and not mixed.is_split
    forward = [p.sizes().launches["hopper.forward"] for p in (mixed, prefills)]
    assert forward[0].grid == forward[1].grid
    assert mixed.sizes().launches["decode.forward"].grid == (2 * H200.units, 1, 1)


def test_scratch_is_that_of_both_and_only_parts_are_counted_from_zero():
    found = plan(SERVED, H200).sizes()
    zeroed = {w.name: w.zeroed for w in found.workspaces}
    assert zeroed == {
        "tile_counter": False,
        "varlen_tiles": False,
        "partial_out": False,
        "partial_lse": False,
        "counts": True,
    }
    whole = plan(replace(SERVED, num_splits=1), H200).sizes()
    assert [w.name for w in whole.workspaces] == ["tile_counter", "varlen_tiles"]


def test_the_number_of_tokens_does_not_decide_on_what_is_counted():
    """Units of short sequences alone."""
    few, many = (plan(replace(SERVED, total_q=n), H200).sizes() for n in (300, 100_000))
    counts = [{w.name: w.buffer for w in found.workspaces}["counts"] for found in (few, many)]
    assert counts[0] == counts[1]


def test_both_kernels_are_explained():
    said = explain(plan(SERVED, H200)).splitlines()
    assert "forward   mixed [run]" in said
    assert "sequences up to 8 queries: decode.forward; longer ones: hopper.forward" in said
    assert "rejected  hopper forward: mixed is preferred" in said
    for kernel in ("hopper.forward", "decode.forward", "hopper.varlen_scheduler"):
        assert any(line.startswith(f"grid      {kernel}: ") for line in said)
    equal = explain(plan(replace(SERVED, batch=8, total_q=8 * 2048), H200))
    assert (
        "rejected  mixed forward: hopper is preferred where most sequences are about as long as"
        " the longest\n"
    ) in equal
    assert "sequences" not in {line.split()[0] for line in equal.splitlines()}
