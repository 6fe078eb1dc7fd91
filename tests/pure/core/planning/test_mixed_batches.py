"""Which batches of packed sequences two kernels share, and what each of them is told."""

from dataclasses import replace

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import explain, plan
from heedful.core.registry.by_hand import forced
from heedful.core.registry.capability import Toolchain
from heedful.core.registry.mixed import some_fill_a_tile, some_fill_few_tiles
from heedful.core.registry.tiles import DECODE_ROWS
from heedful.launch.program.programs import program

H200, B200 = by_name("H200"), by_name("B200")
# 4 prefills of 2048 and 124 sequences of one new token.
SERVED = AttentionProblem.dense(
    128, 2048, 8192, 32, 8, causal=True, total_q=4 * 2048 + 124, page_size=16, used_k=True
)


# What the Hopper decode does not take.
CAPPED = {"softcap": 20.0}


def chosen(**facts) -> str:
    return plan(replace(SERVED, **facts), H200).variant_of("forward").packed_as


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"page_size": 0},
        {"num_splits": 1},
        {"dtype": "float16", "kv_dtype": "float16", "out_dtype": "float16"},
        {"return_lse": True, "sink": True},
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
        {"seqlen_q": 33, "total_q": 128},
    ],
    ids=str,
)
def test_sequences_of_few_and_of_many_queries_over_a_cache_have_a_kernel_each(facts):
    assert chosen(**facts) == "hopper_mixed"
    assert chosen(**facts, **CAPPED) == "mixed"
    before = Toolchain(triton=(3, 6))
    assert plan(replace(SERVED, **facts), H200, before).variant_of("forward").packed_as == "mixed"


@pytest.mark.parametrize(
    "facts, backend",
    [
        # All long, or nearly; all short; one.
        ({"batch": 8, "total_q": 8 * 2048}, "hopper"),
        ({"batch": 8, "total_q": 8 * 2048 - 600}, "hopper"),
        ({"batch": 8, "total_q": 4 * 2048 + 4 * 16}, "hopper_mixed"),
        ({"batch": 8, "total_q": 4 * 2048 + 4 * 16 + 1}, "hopper"),
        ({"batch": 8, "total_q": 4 * 2048 + 4 * 8, **CAPPED}, "mixed"),
        ({"batch": 8, "total_q": 4 * 2048 + 4 * 8 + 1, **CAPPED}, "hopper"),
        ({"batch": 2, "total_q": 2048 + 17, "seqlen_q": 2048}, "hopper"),
        ({"batch": 2, "total_q": 2048 + 9, "seqlen_q": 2048, **CAPPED}, "hopper"),
        ({"seqlen_q": 1, "total_q": 128}, "hopper_decode"),
        ({"seqlen_q": 8, "total_q": 128}, "hopper_decode"),
        ({"seqlen_q": 32, "total_q": 128}, "hopper_decode"),
        ({"batch": 1, "total_q": 2048}, "hopper"),
        # Of so few tiles the Hopper forward splits the keys.
        ({"batch": 2, "seqlen_q": 128, "total_q": 129}, "hopper"),
        ({"batch": 2, "seqlen_q": 128, "total_q": 129, "num_splits": 1}, "hopper_mixed"),
        # Short sequences without a cache have few keys.
        ({"page_size": 0, "used_k": False, "total_k": 9000}, "hopper"),
        ({"needs_grad": True}, "hopper"),
        ({"num_splits": 2}, "hopper"),
        ({"dropout_p": 0.1}, "hopper"),
        ({"total_q": None}, "hopper"),
        ({"heads_q": 65, "heads_k": 1}, "hopper"),
        ({"page_size": 1}, "portable"),
        ({"kv_dtype": "float8_e4m3fn"}, "mixed"),
        ({"kv_dtype": "float8_e4m3fn", "kv_group": 64}, "portable"),
        ({"kv_dtype": "int8"}, "portable"),
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
    for wish in (some_fill_a_tile, some_fill_few_tiles):
        said = wish(replace(SERVED, **facts), H200)
        assert said is not None and said.backend == "hopper" and words in said.why
        assert wish(SERVED, H200) is None


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
            plan(replace(SERVED, **facts), H200, backend=forced("mixed/portable"))
        with pytest.raises(ValueError, match=said):
            plan(replace(SERVED, **facts), H200, backend="hopper_mixed")
    with pytest.raises(ValueError, match="no kernel for sm_100"):
        plan(SERVED, B200, backend="mixed")
    assert plan(SERVED, B200).backend == "portable"


# Who has the short sequences of whom.
KERNELS = {"mixed/portable": "decode.forward", "mixed/hopper": "hopper_decode.forward"}
ALONE = {"decode.forward": "decode/portable", "hopper_decode.forward": "decode/hopper"}
BY_KERNEL = pytest.mark.parametrize("backend, kernel", KERNELS.items())


@pytest.mark.parametrize(
    "backend, heads_k, short, tiles",
    [
        # Two tiles of one query's rows.
        *(
            ("mixed/portable", *row)
            for row in ((1, 2, 2), (2, 2, 2), (4, 4, 2), (8, 8, 2), (32, 16, 1))
        ),
        # One of 64 rows.
        *(("mixed/hopper", *row) for row in ((1, 2, 1), (2, 4, 1), (4, 8, 1), (8, 16, 1))),
        ("mixed/hopper", 32, 16, 1),
    ],
)
def test_a_short_sequence_has_few_tiles_of_what_a_decode_takes(backend, heads_k, short, tiles):
    found = plan(replace(SERVED, heads_k=heads_k), H200, backend=forced(backend))
    assert found.short_q == short
    assert short * 32 // heads_k <= DECODE_ROWS
    sizes, kernel = found.sizes(), KERNELS[backend]
    told = [sizes.launches[k].numbers["short_q"] for k in ("hopper.varlen_scheduler", kernel)]
    assert told == [short, short]
    assert sizes.launches[kernel].numbers["tiles"] == tiles


@BY_KERNEL
def test_each_kernel_has_the_tiles_that_its_sequences_alone_would_have(backend, kernel):
    mixed = plan(SERVED, H200, backend=forced(backend))
    prefills = plan(replace(SERVED, batch=4, total_q=4 * 2048), H200)
    alone = forced(ALONE[kernel])
    steps = plan(replace(SERVED, batch=124, seqlen_q=1, total_q=124), H200, backend=alone)
    assert prefills.backend == "hopper"
    assert mixed.configs == prefills.configs | steps.configs
    assert mixed.scheduler == prefills.scheduler and not mixed.is_split
    forward = [p.sizes().launches["hopper.forward"] for p in (mixed, prefills)]
    assert forward[0].grid == forward[1].grid
    assert mixed.sizes().launches[kernel].grid == (2 * H200.units, 1, 1)


@BY_KERNEL
def test_the_forward_begins_where_programs_of_the_decode_have_ended(backend, kernel):
    calls = program(plan(SERVED, H200, backend=forced(backend)), "forward").calls
    names = [call.kernel.function for call in calls]
    assert names == ["schedule_varlen_tiles", "decode", "forward"]
    assert [call.programmatic for call in calls] == [False, False, True]
    assert calls[-1].parameters["BEGINS_EARLY"]
    (_, alone) = program(plan(SERVED, H200, backend="hopper"), "forward").calls
    assert not alone.programmatic and not alone.parameters["BEGINS_EARLY"]


@BY_KERNEL
def test_scratch_is_that_of_both_and_only_parts_are_counted_from_zero(backend, kernel):
    found = plan(SERVED, H200, backend=forced(backend)).sizes()
    zeroed = {w.name: w.zeroed for w in found.workspaces}
    assert zeroed == {
        "tile_counter": False,
        "varlen_tiles": False,
        "partial_out": False,
        "partial_sums": False,
        "counts": True,
    }
    whole = plan(replace(SERVED, num_splits=1), H200, backend=forced(backend)).sizes()
    assert [w.name for w in whole.workspaces] == ["tile_counter", "varlen_tiles"]


@BY_KERNEL
def test_the_number_of_tokens_does_not_decide_on_what_is_counted(backend, kernel):
    """Units of short sequences alone."""
    asked = (replace(SERVED, total_q=n) for n in (300, 100_000))
    few, many = (plan(problem, H200, backend=forced(backend)).sizes() for problem in asked)
    counts = [{w.name: w.buffer for w in found.workspaces}["counts"] for found in (few, many)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "facts, backend, short", [({}, "mixed/hopper", 16), (CAPPED, "mixed/portable", 8)]
)
def test_both_kernels_are_explained(facts, backend, short):
    served, kernel = replace(SERVED, **facts), KERNELS[backend]
    said = explain(plan(served, H200)).splitlines()
    assert f"forward   {backend} [run]" in said
    assert f"sequences up to {short} queries: {kernel}; longer ones: hopper.forward" in said
    assert any(line.endswith(f", portable forward: {backend} is preferred") for line in said)
    for own in ("hopper.forward", kernel, "hopper.varlen_scheduler"):
        assert any(line.startswith(f"grid      {own}: ") for line in said)
    equal = explain(plan(replace(served, batch=8, total_q=8 * 2048), H200))
    why = "hopper is preferred where most sequences are about as long as the longest"
    told = next(line for line in equal.splitlines() if line.endswith(f" forward: {why}"))
    assert told.startswith("rejected  mixed")
    assert "sequences" not in {line.split()[0] for line in equal.splitlines()}
