"""What a plan says of itself and of what cannot be, word by word."""

from dataclasses import replace
from typing import get_args

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import explain, plan, words_of_seen
from heedful.core.planning.sizes import Scheduler
from heedful.core.registry import capability, configs
from heedful.core.registry.by_hand import OPTIONS, forced, with_options
from heedful.core.registry.capability import Toolchain
from heedful.core.registry.tiles import (
    DecodeConfig,
    HopperForwardConfig,
    HopperFp8Config,
    Rescale,
    RowsConfig,
    cache_rows,
    combine_rows,
    pow2,
)

dense = AttentionProblem.dense
H200, CPU, A100 = (by_name(name) for name in ("H200", "CPU", "A100"))
# Backends that no CPU has, as the planner goes through them.
OF_GPUS = ("decode", "mixed", "hopper", "cdna", "portable")
BACKENDS = "backend must be one of decode, mixed, hopper, cdna, portable, sdpa, cpu, scan or None"
NO_LATENT = "head dims 128 and 128: takes V of 512 and K of up to 64 columns more"
NOT_PACKED = "queries that are not packed: all sequences have as many"
NOT_HERE = "rejected  cdna, sdpa, cpu forward: no kernel for sm_90"
NOT_THESE = "head dims 128 and 128: takes those above 256"
NOT_WIDE = f"rejected  hopper/forward_wide forward: {NOT_THESE}"


def test_a_split_training_call_is_explained():
    chosen = plan(dense(2, 20, 1000, 8, 4, needs_grad=True), H200)
    assert explain(chosen).splitlines() == [
        "problem   2x20x1000 h8/4 d128 bfloat16 needs_grad",
        "device    H200 (sm_90)",
        "forward   hopper/forward [run]",
        "backward  hopper/backward [run]",
        "splits    4",
        "tiles     hopper.forward: 64 x 128, 4 warps, 2 stages pack_gqa=True (sm_90, Triton 3.9:"
        " fewest spills of those compiled; others not timed)",
        "tiles     hopper.backward: 64 x 128, 4 warps, 2 stages draws=True last_waves=2 splits=0"
        " tail_splits=0 dk_in_keys=True rotates=True (H200, 2026-11-28, Triton 3.9: fastest of"
        " those tried)",
        "scheduler static",
        "grid      hopper.forward: 32 programs, row_blocks=1, tiles=8, l2_heads=1, l2_groups=7",
        "scratch   partial_out 655360, partial_lse 5120, partial_rest 5120 bytes",
        "grid      hopper.backward_prologue: 16 programs, q_blocks=1",
        "grid      hopper.backward: 64 programs, tiles=64, key_blocks=8, l2_heads=8, l2_groups=0,"
        " splits=1",
        "grid      hopper.backward_epilogue: 16 programs, q_blocks=1",
        "scratch   delta 1280, dq_accum 524288, lse_log2 1280, dout_scale 1280, tile_counter 4"
        " bytes",
        f"rejected  decode/mla_swap_ab forward: does not take a later backward; {NO_LATENT};"
        " 40 query rows of a KV head: takes up to 32",
        f"rejected  decode/mla forward: does not take a later backward; {NO_LATENT}",
        "rejected  decode/hopper, decode/portable forward: hopper is preferred for 40 query rows of"
        " a KV head: more than 32",
        f"rejected  decode/wide forward: does not take a later backward; {NOT_THESE};"
        " 40 query rows of a KV head: takes up to 32",
        f"rejected  mixed forward: does not take a later backward; {NOT_PACKED}",
        NOT_WIDE,
        NOT_HERE,
        "rejected  portable forward: hopper/forward is preferred",
        "rejected  hopper/pair, hopper/wide backward: head dims 128 and 128: takes those above 128,"
        " of V above 64",
        f"rejected  hopper/halves backward: {NOT_THESE}",
        "rejected  portable backward: hopper/backward is preferred",
        "rejected  sdpa, cpu backward: no kernel for sm_90",
    ]


def test_a_call_on_pages_is_explained_with_its_notes():
    asked = dense(40, 1000, 1000, 8, 4, causal=True, page_size=16, used_k=True, needs_grad=True)
    measured = "(H200, 2026-11-20, Triton 3.6: fastest without spills of those tried)"
    assert explain(plan(asked, H200, notes=("told before",))).splitlines() == [
        "problem   40x1000x1000 h8/4 d128 bfloat16 used_k page_size=16 needs_grad causal",
        "device    H200 (sm_90)",
        "forward   hopper/forward [run]",
        "backward  portable [run]",
        "tiles     hopper.forward: 128 x 128, 4 warps, 3 stages consumer_regs=240 pingpong=True"
        " rescale=speculative v_stages=2"
        " (H200, 2026-11-20, Triton 3.9: fastest of those tried)",
        f"tiles     portable.backward_keys: 32 x 128, 8 warps, 4 stages {measured}",
        f"tiles     portable.backward_queries: 128 x 64, 8 warps, 3 stages {measured}",
        "scheduler single",
        "grid      hopper.forward: 2560 programs, row_blocks=8, tiles=2560, l2_heads=4,"
        " l2_groups=71",
        "grid      portable.backward_queries: 2560 programs, tiles=8, l2_heads=122",
        "grid      portable.backward_keys: 1280 programs, tiles=8, l2_heads=61",
        "scratch   delta 1280000, near 1280000, reference 1280000, factor 1280000 bytes",
        "note      told before",
        "note      the backward copies each sequence's pages into dense keys first",
        f"rejected  decode/mla_swap_ab forward: does not take a later backward; {NO_LATENT};"
        " 2000 query rows of a KV head: takes up to 32",
        f"rejected  decode/mla forward: does not take a later backward; {NO_LATENT};"
        " 2000 query rows of a KV head: takes up to 64",
        "rejected  decode/hopper, decode/portable forward: hopper is preferred for 2000 query rows"
        " of a KV head: more than 32",
        f"rejected  decode/wide forward: does not take a later backward; {NOT_THESE};"
        " 2000 query rows of a KV head: takes up to 32",
        f"rejected  mixed forward: does not take a later backward; {NOT_PACKED}",
        NOT_WIDE,
        NOT_HERE,
        "rejected  portable forward: hopper/forward is preferred",
        "rejected  hopper backward: does not take paged KV cache",
        "rejected  sdpa, cpu backward: no kernel for sm_90",
    ]


def test_a_call_without_kernels_is_explained_without_tiles_and_grids():
    lines = explain(plan(dense(2, 1000, 1000, 8, 4), CPU)).splitlines()
    assert lines[:3] == [
        "problem   2x1000x1000 h8/4 d128 bfloat16",
        "device    CPU (cpu)",
        "forward   sdpa [run]",
    ]
    assert lines[3:] == [
        f"rejected  {', '.join(OF_GPUS)} forward: no kernel for cpu",
        "rejected  cpu forward: sdpa is preferred",
    ]


def test_a_grid_of_one_program_and_one_of_two_dims_are_told():
    one = explain(plan(dense(1, 1, 5, 1, head_dim=64), by_name("B200"), backend="portable"))
    assert "grid      portable.forward: 1 programs, tiles=1, l2_heads=1\n" in one
    two = explain(plan(dense(1, 65, 500, 1, num_splits=3), by_name("B200"), backend="portable"))
    assert "splits    3\n" in two
    assert "grid      portable.forward: 2 x 3 programs, tiles=2, l2_heads=1\n" in two


@pytest.mark.parametrize(
    "facts, device, backend, said",
    [
        (
            {"head_dim": 12},
            H200,
            "hopper",
            "backend='hopper' cannot run the forward of [2x64x64 h8/8 d12 bfloat16] on H200:"
            " head_dim 12: takes multiples of 8; V's head_dim 12: takes multiples of 8",
        ),
        (
            {"head_dim": 12, "dtype": "float8_e5m2"},
            A100,
            None,
            "no kernel can run the forward of [2x64x64 h8/8 d12 float8_e5m2] on A100:"
            " decode: head_dim 12:"
            " takes multiples of 8, V's head_dim 12: takes multiples of 8, float8_e5m2 on sm_80,"
            " which cannot convert it; mixed: no kernel for sm_80; hopper: no kernel for sm_80;"
            " cdna: no kernel for sm_80; portable: dtype float8_e5m2: takes bfloat16, float16,"
            " float32, float8_e5m2 on sm_80, which cannot convert it; sdpa: no kernel for sm_80;"
            " cpu: no kernel for sm_80",
        ),
        (
            {"needs_grad": True, "dtype": "float8_e4m3fn"},
            CPU,
            "cpu",
            "no kernel can run the backward of [2x64x64 h8/8 d128 float8_e4m3fn needs_grad] on CPU:"
            " hopper: no kernel for cpu; portable: no kernel for cpu; sdpa: dtype float8_e4m3fn:"
            " takes bfloat16, float16, float32; cpu: dtype float8_e4m3fn:"
            " takes bfloat16, float16, float32",
        ),
        (
            {},
            H200,
            forced("hopper+draws=1"),
            "backend: no kernel of this call has the option 'draws'",
        ),
        # Options are no part of a name that a call may give, nor are variants.
        ({}, H200, "hopper+draws=0", f"{BACKENDS}, got 'hopper+draws=0'"),
        ({}, H200, "hopper/forward", f"{BACKENDS}, got 'hopper/forward'"),
        (
            {},
            H200,
            "nothing",
            f"{BACKENDS}, got 'nothing'",
        ),
        (
            {"needs_grad": True, "deterministic": True},
            H200,
            forced("hopper+draws=0"),
            "backend: a deterministic backward draws its tiles, got draws=0",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(facts, device, backend, said):
    with pytest.raises(ValueError) as caught:
        plan(dense(2, 64, 64, 8, **facts), device, backend=backend)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "name, option, said",
    [
        ("decode/portable", "programs=0", "programs must be at least 1, got 0"),
        ("decode/portable", "merge_values=24", "merge_values must be a power of two, got 24"),
        ("decode/portable", "block_m=4", "block_m must be a power of two of at least 8, got 4"),
        ("decode/portable", "block_n=48", "block_n must be a power of two of at least 16, got 48"),
        ("decode/portable", "merge_values=0", "merge_values must be a power of two, got 0"),
        ("decode/portable", "merge_stages=0", "merge_stages must be at least 1, got 0"),
        ("decode/portable", "num_stages=0", "num_stages must be at least 1, got 0"),
        ("decode/portable", "conversion=3", "conversion must be at most 2 here, got 3"),
        ("decode/portable", "fetch_ahead=65", "fetch_ahead must be 0 to 64, got 65"),
        ("hopper_decode", "merge=2", "merge must be 0 to 1, got 2"),
        (
            "hopper_decode",
            "producer_regs=25",
            "producer_regs must be a multiple of 8 from 24 to 232, got 25",
        ),
        (
            "hopper_decode",
            "producer_regs=240",
            "producer_regs must be a multiple of 8 from 24 to 232, got 240",
        ),
        ("hopper", "key_splits=0", "key_splits must be at least 1, got 0"),
        ("mla", "query_boxes=3", "query_boxes must be 0 to 2, got 3"),
        ("mla", "least_tiles=0", "least_tiles must be at least 1, got 0"),
        ("mla_swap_ab", "merge=2", "merge must be 0 to 1, got 2"),
    ],
)
def test_an_option_that_cannot_be_is_said(name, option, said):
    wide = {"head_dim": 576, "head_dim_v": 512, "v_in_k": True} if "mla" in name else {}
    asked = dense(64, 1, 8192, 8, 1, used_k=True, **wide)
    with pytest.raises(ValueError) as caught:
        plan(asked, H200, backend=forced(f"{name}+{option}"))
    assert str(caught.value) == f"backend: {said}"


@pytest.mark.parametrize(
    "device, facts",
    [("B200", {}), ("H200", {"page_size": 16}), ("H200", {"head_dim": 96})],
    ids=str,
)
def test_what_is_no_cache_in_one_piece_of_sm_90_is_not_fetched_ahead(device, facts):
    asked = dense(64, 1, 8192, 8, 2, used_k=True, **facts)
    with pytest.raises(ValueError, match="fetch_ahead is of caches in one piece"):
        plan(asked, by_name(device), backend=forced("decode/portable+fetch_ahead=3"))


@pytest.mark.parametrize(
    "facts, tiles",
    [
        ({}, 3),
        ({"page_size": 16}, 0),
        ({"heads_k": 1}, 0),
        ({"kv_dtype": "int8"}, 0),
        ({"head_dim": 256, "kv_group": 256}, 0),
    ],
    ids=str,
)
def test_rows_are_fetched_ahead_where_a_line_of_memory_has_those_of_several_heads(facts, tiles):
    given = {"kv_dtype": "int4", "kv_group": 128, "head_dim": 128, "heads_k": 2, **facts}
    asked = dense(64, 1, 8192, 8, used_k=True, **given)
    config = plan(asked, H200, backend=forced("decode/portable")).configs["decode.forward"]
    assert isinstance(config, DecodeConfig) and config.fetch_ahead == tiles


@pytest.mark.parametrize("splits", [1, 5, 40])
def test_keys_are_split_as_chosen_by_hand_whatever_the_lengths(splits):
    """Tiles are those of a call that leaves the splits to the planner, unlike with num_splits."""
    asked = dense(1, 128, 1000, 4)
    usual = plan(asked, H200)
    chosen = plan(asked, H200, backend=forced(f"hopper+key_splits={splits}"))
    assert chosen.num_splits == splits and chosen.is_split == (splits > 1)
    own = replace(usual.configs["hopper.forward"], key_splits=splits)
    assert chosen.configs["hopper.forward"] == own
    longer = chosen.sizes(replace(asked, seqlen_k=100_000).lengths)
    assert longer.num_splits == splits
    with pytest.raises(ValueError) as caught:
        plan(replace(asked, num_splits=3), H200, backend=forced(f"hopper+key_splits={splits}"))
    said = "backend: key_splits stands for num_splits, got num_splits=3, too"
    assert str(caught.value) == said


def test_options_change_the_config_of_their_kernel_alone():
    asked = dense(2, 1000, 1000, 8, 4, causal=True, needs_grad=True)
    usual = plan(asked, H200)
    chosen = plan(asked, H200, backend=forced("hopper+draws=0+splits=3+last_waves=7"))
    assert chosen.by_hand == {"draws": 0, "splits": 3, "last_waves": 7} and usual.by_hand == {}
    assert chosen.configs["hopper.forward"] == usual.configs["hopper.forward"]
    own = replace(usual.configs["hopper.backward"], draws=False, splits=3, last_waves=7)
    assert chosen.configs["hopper.backward"] == own
    assert chosen.measured["hopper.backward"] == "chosen by hand"
    assert chosen.measured["hopper.forward"] == usual.measured["hopper.forward"]
    with pytest.raises(LookupError) as caught:
        configs.choose("mla.forward", asked, A100)
    assert str(caught.value) == f"no config of mla.forward fits {asked.key()} on A100"


ORDER = "a deterministic backward of head dims above 128"


@pytest.mark.parametrize(
    "dim, dim_v, fits, in_order, drops",
    [
        (64, 64, True, True, True),
        (128, 128, True, True, True),
        (136, 136, True, False, True),
        (192, 128, True, False, True),
        (256, 192, True, False, True),
        (256, 128, True, False, True),
        (136, 72, True, False, True),
        (136, 64, False, False, True),
        (128, 192, False, False, True),
        (64, 128, False, True, True),
        (128, 64, False, True, True),
    ],
)
def test_which_head_dims_the_hopper_backward_takes(dim, dim_v, fits, in_order, drops):
    found = {}
    more: dict[str, dict] = {"": {}, "order": {"deterministic": True}, "drops": {"dropout_p": 0.1}}
    for name, facts in more.items():
        asked = dense(2, 512, 512, 8, head_dim=dim, head_dim_v=dim_v, needs_grad=True, **facts)
        chosen = plan(asked, H200)
        found[name] = chosen.backward_variant if chosen.backward == "hopper" else ""
    variant = "backward" if dim <= 128 else "pair" if dim <= 192 and dim_v <= 128 else "wide"
    assert found == {
        "": variant if fits else "",
        "order": variant if fits and in_order else "",
        "drops": ("backward" if dim <= 128 else "wide") if fits and drops else "",
    }


def test_tools_that_a_framework_lacks_are_named():
    row = capability.variant("portable", "forward")
    asked = dense(2, 64, 64, 8)
    on_jax = Toolchain(triton=(3, 9), torch=None, jax=(0, 10), framework="jax")
    assert row.why_not(asked, H200, on_jax) == ["needs jax >= 0.11.1, got 0.10"]
    assert row.why_not(asked, H200, replace(on_jax, jax=None, triton=(3, 5))) == [
        "needs triton >= 3.6, got 3.5",
        "needs jax >= 0.11.1, which is not installed",
    ]
    assert row.why_not(asked, H200, replace(on_jax, jax=(0, 11, 1))) == []
    scan = capability.variant("scan", "forward")
    assert scan.why_not(asked, CPU, on_jax) == []
    assert scan.why_not(asked, CPU, replace(on_jax, jax=(0, 9))) == ["needs jax >= 0.10, got 0.9"]
    assert scan.why_not(asked, CPU) == ["takes jax calls alone"]
    assert scan.why_not(asked, H200, on_jax) == ["no kernel for sm_90"]
    assert plan(asked, CPU, on_jax).backend == "scan"
    assert {r.backend for r in plan(asked, CPU, on_jax).rejected} == set(OF_GPUS)


@pytest.mark.parametrize(
    "dim, rows, splits, made, at_once",
    [
        (64, 2, 9, RowsConfig(16), 8),
        (128, 2, 2, RowsConfig(8), 8),
        (65, 500, 2, RowsConfig(8), 8),
        (512, 2, 2, RowsConfig(2), 8),
        (8, 2, 2, RowsConfig(16), 8),
        (2048, 2, 2, RowsConfig(1), 8),
        (64, 1, 1, RowsConfig(1, num_warps=1), 1),
        (512, 1, 1, RowsConfig(1, num_warps=1), 1),
        (513, 1, 1, RowsConfig(1, num_warps=4), 1),
        (64, 1, 2, RowsConfig(1), 64),
        (128, 1, 2, RowsConfig(1), 64),
        (256, 1, 2, RowsConfig(1), 32),
        (512, 1, 9, RowsConfig(1), 16),
        (2048, 1, 9, RowsConfig(1), 8),
    ],
)
def test_a_merge_takes_as_many_values_as_its_threads_have_registers_for(
    dim, rows, splits, made, at_once
):
    assert combine_rows(dim, rows, splits) == (made, at_once)


@pytest.mark.parametrize("dims, rows", [((64,), 32), ((64, 65), 16), ((512, 8), 4), ((1, 3), 128)])
def test_a_program_of_a_cache_takes_8_kib(dims, rows):
    assert cache_rows(*dims) == RowsConfig(rows, num_warps=4, num_stages=1)


@pytest.mark.parametrize("n, least, power", [(1, 16, 16), (16, 16, 16), (17, 16, 32), (3, 1, 4)])
def test_a_power_of_two_is_at_or_above_a_number(n, least, power):
    assert pow2(n, least) == power and (least != 16 or pow2(n) == power)
    assert pow2(1, 1) == 1 and pow2(64, 64) == 64 and pow2(0, 1) == 2


FORWARD = HopperForwardConfig(128, 128, rescale="speculative", out_in_q=True)


@pytest.mark.parametrize(
    "facts, triton, made",
    [
        ({}, None, {}),
        ({}, (3, 9), {}),
        ({}, (3, 8), {"rescale": "exact"}),
        ({"bias": True}, None, {"rescale": "threshold"}),
        ({"alibi": True}, (3, 9), {"rescale": "threshold"}),
        ({"dropout_p": 0.1}, None, {"rescale": "threshold"}),
        ({"dropout_p": 2.0**-33}, None, {"rescale": "threshold"}),
        ({"dropout_p": 2.0**-54}, None, {}),
        ({"head_dim": 192}, None, {"tail_d": True, "tail_e": True, "rescale": "threshold"}),
        (
            {"head_dim": 192, "head_dim_v": 128},
            None,
            {"tail_d": True, "rescale": "threshold"},
        ),
        (
            {"head_dim": 192, "head_dim_v": 64},
            None,
            {"tail_d": True, "rescale": "threshold", "out_in_q": False},
        ),
        ({"head_dim": 192, "page_size": 16}, None, {}),
        ({"head_dim": 193}, None, {}),
        ({"head_dim": 129}, None, {"tail_d": True, "tail_e": True, "rescale": "threshold"}),
        ({"head_dim": 256, "head_dim_v": 192}, None, {"tail_e": True, "out_in_q": False}),
        ({"head_dim": 128, "head_dim_v": 64}, None, {"out_in_q": False}),
        ({"head_dim": 72, "head_dim_v": 128}, None, {}),
    ],
)
def test_a_hopper_tile_is_fitted_to_a_problem(facts, triton, made):
    assert FORWARD.fitted(dense(1, 512, 512, 8, **facts), triton) == replace(FORWARD, **made)
    plain = replace(FORWARD, rescale="threshold", out_in_q=False)
    own = {name: value for name, value in made.items() if name != "out_in_q"}
    assert plain.fitted(dense(1, 512, 512, 8, **facts), triton) == replace(plain, **own)


@pytest.mark.parametrize(
    "facts, own",
    [
        ({}, True),
        ({"seqlen_q": 1023}, False),
        ({"seqlen_q": 512, "heads_k": 4}, True),
        ({"seqlen_q": 511, "heads_k": 4}, False),
        ({"total_q": 9000}, False),
        ({"total_k": 9000}, False),
        ({"out_dtype": "float32", "head_dim": 64}, True),
        ({"out_dtype": "float32", "head_dim": 80}, False),
        ({"out_dtype": "float16", "head_dim": 80}, True),
    ],
)
def test_values_are_transposed_by_warps_of_their_own_where_that_is_worth_it(facts, own):
    given = {"batch": 1, "seqlen_q": 1024, "seqlen_k": 999, "heads_q": 8, "head_dim": 128}
    asked = dense(**{**given, "dtype": "float8_e4m3fn", **facts})
    for asks in (True, False):
        config = HopperFp8Config(128, 128, transposes_v=asks)
        assert config.fitted(asked, None) == replace(config, transposes_v=own and asks)


def test_a_mask_in_a_key_has_all_its_parts():
    asked = dense(1, 2, 3, 4, mask=MaskSpec(5, -1, 6, bottom_right=False, shift=-7))
    assert asked.key() == "1x2x3 h4/4 d128 bfloat16 window=5,-1,6,top-left,shift=-7"
    assert dense(1, 2, 3, 4, mask=MaskSpec(-1, 0, shift=1)).key().endswith(" window=-1,0,shift=1")
    assert dense(1, 2, 3, 4, 2, 64, head_dim_v=32, kv_dtype="int8").key() == (
        "1x2x3 h4/2 d64/32 bfloat16/int8"
    )


def test_types_of_words_list_those_that_plans_have():
    calls: list[dict] = [{}, {"causal": True}, {"used_k": True}, {"alibi": True}]
    found = [
        plan(dense(4, 2048, 2048, 16, **facts), H200, Toolchain(triton=triton), "hopper")
        for facts in calls
        for triton in ((3, 8), (3, 9))
    ]
    assert {chosen.scheduler for chosen in found} == set(get_args(Scheduler))
    tiles = [chosen.configs["hopper.forward"] for chosen in found]
    assert {getattr(tile, "rescale", None) for tile in tiles} == set(get_args(Rescale))


# Least and largest values of options by hand, None where any larger one is taken.
ENDS: dict[str, tuple[int, int | None]] = {
    "fetch_ahead": (0, 64),
    "query_boxes": (0, 2),
    "ahead": (0, 8),
    **dict.fromkeys(("in_order", "merge", "thread_order", "query_map"), (0, 1)),
    **dict.fromkeys(("programs", "merge_values", "merge_stages", "least_tiles"), (1, None)),
    **dict.fromkeys(("num_stages", "k_stages", "fewest_shares", "key_splits"), (1, None)),
    "block_m": (8, None),
    "block_n": (16, None),
    "num_warps": (1, None),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_option_by_hand_has_values_from_a_least_to_a_largest(name):
    rows = {row.kernel: row for row in configs.ROWS if name in OPTIONS.get(row.kernel, ())}
    rows = {k: row for k, row in rows.items() if (k, name) != ("hopper.backward", "block_n")}
    least, most = ENDS[name]
    problem = dense(1, 64, 64, 8)
    assert rows
    for row in rows.values():
        for value in (least, 2 * least or 1, most):
            if value is not None:
                made = with_options(replace(row, archs=("sm_90",)), {name: value}, problem)
                assert getattr(made.config, name) == value and made.measured == "chosen by hand"
        for value in (least - 1, *([] if most is None else [most + 1])):
            with pytest.raises(ValueError, match=f"^backend: {name} must be .*, got {value}$"):
                with_options(row, {name: value}, problem)


def test_what_a_mask_shows_is_told_in_tiles_pairs_and_rates():
    seen = {
        "tile": (128, 64),
        "whole": 3,
        "part": 2,
        "hidden": 5,
        "pairs": 30_000,
        "scores": 40_960,
    }
    shape = (1, 512, 512, 8, 8, 96)
    problem = dense(*shape, head_dim_v=32)
    lines = words_of_seen(plan(problem, H200), **seen)
    assert lines == [
        "mask      tiles of 128 x 64: 3 seen whole, 2 in part, 5 left out",
        "mask      30000 pairs are seen, 73.2% of the scores of these tiles: the forward has"
        " 7.68e-06 TFLOP",
        "mask      at most 724 of 989 TFLOP/s follow",
    ]
    # No rate is known of float32, nor of every device.
    wide = dense(*shape, "float32", head_dim_v=32)
    assert words_of_seen(plan(wide, H200), **seen) == lines[:2]
    assert words_of_seen(plan(problem, H200.live(bf16_flops=0.0)), **seen) == lines[:2]
    nothing = words_of_seen(plan(problem, H200), **{**seen, "pairs": 0, "scores": 0})
    assert nothing[1:] == [
        "mask      0 pairs are seen, 0.0% of the scores of these tiles: the forward has 0 TFLOP",
        "mask      at most 0 of 989 TFLOP/s follow",
    ]
