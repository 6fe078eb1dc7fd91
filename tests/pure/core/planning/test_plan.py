"""The planner: pure decisions with reasons, for devices that are not here."""

import struct
from dataclasses import replace
from typing import Any

import pytest

from heedful.core.base.device import KNOWN, DeviceSpec, by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import FEATURES, AttentionProblem
from heedful.core.planning.plan import explain, plan, stored_as
from heedful.core.planning.splits import choose_splits
from heedful.core.registry import capability, configs
from heedful.core.registry.by_hand import forced
from heedful.core.registry.capability import VARIANTS, Toolchain
from heedful.core.registry.tiles import HopperBackwardConfig
from heedful.launch.program.programs import program
from heedful.launch.spec import Pointer

dense = AttentionProblem.dense


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_device_has_a_kernel_for_a_plain_training_call(name):
    chosen = plan(dense(2, 1024, 1024, 8, 2, causal=True, needs_grad=True), by_name(name))
    assert chosen.backend and chosen.backward
    assert chosen.level in capability.LEVELS and chosen.backward_level in capability.LEVELS


def test_what_has_not_run_with_a_feature_says_so_and_keeps_its_level_without():
    h200 = by_name("H200")
    plain = dense(1, 1024, 1024, 8, head_dim=256, needs_grad=True)
    row = next(row for row in VARIANTS if row.label == "hopper/wide")
    new = replace(row, unrun=frozenset({"key_ranges"}))
    assert row.level(h200, replace(plain, key_ranges=1)) == "run"
    assert new.level(h200, replace(plain, key_ranges=1)) == "compile-only"
    assert new.level(h200, plain) == new.level(h200) == "run"
    for row in VARIANTS:
        assert row.unrun <= row.features | {"jax"}, row.label


def test_a_kernel_that_has_not_run_with_a_feature_leaves_it_to_one_that_has_unless_named():
    h200 = by_name("H200")
    used = dense(2, 512, 512, 8, head_dim=512, needs_grad=True, used_k=True)
    chosen = plan(used, h200)
    assert (chosen.backward, chosen.backward_level) == ("portable", "run")
    said = explain(chosen)
    assert (
        "hopper/halves backward: has not run with lengths used of each sequence: portable" in said
    )
    assert plan(replace(used, used_k=False), h200).backward_variant == "halves"
    named = plan(used, h200, backend=forced("hopper"))
    assert (named.backward_variant, named.backward_level) == ("halves", "compile-only")


def test_a_kernel_that_has_not_run_with_a_feature_runs_where_no_other_takes_it(monkeypatch):
    """No other takes 8-bit queries."""
    changed = (
        replace(row, unrun=frozenset({"q_offsets"})) if row.label == "hopper/fp8" else row
        for row in VARIANTS
    )
    monkeypatch.setattr(capability, "VARIANTS", tuple(changed))
    facts = {"q_offsets": True, "mask": MaskSpec.of(True), "dtype": "float8_e4m3fn"}
    chosen = plan(dense(1, 512, 512, 8, head_dim=128, **facts), by_name("H200"))
    assert (chosen.backend, chosen.level) == ("hopper", "compile-only")


def test_a_kernel_that_has_not_run_in_a_framework_leaves_its_calls_to_one_that_has_unless_named(
    monkeypatch,
):
    rows = (
        replace(row, unrun=frozenset({"jax"})) if row.label == "decode/wide" else row
        for row in capability.VARIANTS
    )
    monkeypatch.setattr(capability, "VARIANTS", tuple(rows))
    h200, wide = by_name("H200"), dense(8, 1, 4096, 16, 8, head_dim=512, used_k=True)
    torchs, jaxs = Toolchain(), Toolchain(framework="jax")
    assert (plan(wide, h200, torchs).variant, plan(wide, h200, torchs).level) == ("wide", "run")
    chosen = plan(wide, h200, jaxs)
    assert (chosen.backend, chosen.variant, chosen.level) == ("portable", "", "run")
    assert "decode/wide forward: has not run with JAX's calls: portable has" in explain(chosen)
    named = plan(wide, h200, jaxs, backend=forced("decode/wide"))
    assert (named.variant, named.level) == ("wide", "compile-only")


def test_a_plan_shows_the_level_of_its_kernel():
    ranges = dense(1, 1024, 1024, 8, head_dim=256, needs_grad=True, key_ranges=1)
    chosen = plan(ranges, by_name("H200"))
    assert (chosen.level, chosen.backward_level) == ("run", "run")
    assert "hopper/wide [run]" in explain(chosen)
    assert "portable [emulated]" in explain(plan(ranges, by_name("MI300X")))


def test_a_named_backend_that_cannot_raises_with_every_reason():
    problem = dense(1, 64, 32, 8, 2, causal=True, softcap=5.0, alibi=True)
    with pytest.raises(ValueError) as error:
        plan(problem, by_name("CPU"), backend="sdpa")
    for reason in ("softcap", "ALiBi", "causal mask of unequal lengths"):
        assert reason in str(error.value)


def test_an_unknown_backend_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="backend must be one of .*portable.*'tpu'"):
        plan(dense(1, 64, 64, 8), by_name("H200"), backend="tpu")


def test_every_kernel_that_was_not_chosen_says_why():
    chosen = plan(dense(1, 64, 64, 8, needs_grad=True), by_name("H200"))
    told = {(r.backend, r.direction) for r in chosen.rejected if r.reasons}
    told |= {(chosen.backend, "forward"), (chosen.backward, "backward")}
    assert told == {(v.backend, v.direction) for v in VARIANTS if v.serves("torch")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("A100", "float8_e4m3fn"), ("H200", "float8_e4m3fnuz"), ("RTX 4090", "float8_e4m3fnuz")],
)
def test_a_cache_type_that_the_device_cannot_convert_is_a_reason(name, dtype):
    with pytest.raises(ValueError, match=f"{dtype} on .*, which cannot convert it"):
        plan(dense(1, 4, 512, 8, kv_dtype=dtype), by_name(name))


def test_rows_far_apart_are_a_reason_against_cdna_alone():
    far = dense(2, 1024, 1024, 8, near_rows=False)
    for backend in ("cdna", "portable"):
        assert plan(dense(2, 1024, 1024, 8), by_name("MI355X"), backend=backend).backend == backend
    with pytest.raises(ValueError, match="rows of Q, K, V or the output 8 MiB apart or more"):
        plan(far, by_name("MI355X"), backend="cdna")
    chosen = plan(far, by_name("MI355X"))
    assert chosen.backend == "portable" and "8 MiB apart" in explain(chosen)
    assert plan(far, by_name("H200")).backend == "hopper"


def test_uneven_rows_matter_where_lengths_do():
    """A map of rows alone finds a batch entry only at a whole number of rows."""
    uneven = dense(2, 1024, 1024, 8, even_rows=False)
    assert plan(uneven, by_name("H200")).backend == "hopper"
    cache = dense(2, 1024, 1024, 8, even_rows=False, used_k=True)
    chosen = plan(cache, by_name("H200"))
    assert chosen.backend == "portable"
    assert "multiples of row strides" in explain(chosen)


@pytest.mark.parametrize("name", ["H200", "MI300X", "A100"])
def test_keys_in_pages_have_a_backward_that_gathers_them(name):
    paged = dense(2, 64, 512, 8, page_size=16, used_k=True, total_q=100, needs_grad=True)
    chosen = plan(paged, by_name(name))
    assert chosen.backward == "portable"
    assert "pages into dense keys" in explain(chosen)
    calls = program(chosen, "backward").calls
    gathered = plan(paged.gathered(), by_name(name), backend="portable")
    assert calls == program(gathered, "backward").calls
    pointers = (a for call in calls for a in call.arguments.values() if isinstance(a, Pointer))
    assert "block_table" not in {pointer.buffer for pointer in pointers}
    assert "dense keys" not in explain(plan(replace(paged, needs_grad=False), by_name(name)))
    assert "dense keys" not in explain(plan(paged, by_name("CPU")))


def wider_keys(**facts):
    return dense(1, 4, 512, 8, 1, head_dim=576, head_dim_v=512, **facts)


@pytest.mark.parametrize("name", ["H200", "MI300X", "MI355X", "A100", "CPU"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_of_576_beside_values_of_512_have_a_forward_everywhere(name, dtype):
    chosen = plan(wider_keys(dtype=dtype, causal=True, page_size=16, used_k=True), by_name(name))
    assert chosen.backend == ("cpu" if name == "CPU" else "portable")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": "float32"}, "head_dim 576 of float32: takes up to 512"),
        ({"needs_grad": True}, "portable: head_dim 576: takes up to 512"),
        ({"kv_dtype": "int8"}, "head_dim 576 of a quantised cache: takes up to 512"),
        ({"return_probs": True, "dropout_p": 0.1}, "head_dim 576 with returned probabilities"),
    ],
    ids=str,
)
def test_what_no_gpu_kernel_does_with_wider_keys_is_a_reason(facts, reason):
    """A CPU does it all."""
    with pytest.raises(ValueError, match=reason):
        plan(wider_keys(**facts), by_name("H200"))
    assert plan(wider_keys(**facts), by_name("CPU")).backend == "cpu"


def test_values_are_never_wider_than_512():
    for dim, dim_v in ((577, 512), (576, 513), (576, 576)):
        with pytest.raises(ValueError, match="must have a head_dim of 1 to"):
            dense(1, 4, 512, 8, head_dim=dim, head_dim_v=dim_v)


def test_explain_names_problem_device_choice_and_rejections():
    text = explain(plan(dense(1, 64, 64, 8, causal=True), by_name("MI355X")))
    for word in ("1x64x64", "causal", "MI355X", "gfx950", "cpu forward: no kernel for gfx950"):
        assert word in text


def test_rows_use_known_words_only():
    for row in VARIANTS:
        assert row.features <= set(FEATURES)
        assert set(row.levels.values()) <= set(capability.LEVELS)
        assert row.direction in ("forward", "backward")


def test_every_config_row_says_where_it_was_measured_and_belongs_to_a_variant():
    assert all(row.measured for row in configs.ROWS)
    assert {row.kernel for row in configs.ROWS} == {k for v in VARIANTS for k in v.configs}


@pytest.mark.parametrize(
    ("shape", "units", "splits"),
    [
        ((1, 1, 131072, 8), 132, 16),
        ((64, 1, 8192, 8), 132, 1),
        ((1, 4096, 4096, 16), 132, 1),
        ((1, 1, 64, 8), 132, 1),
        # The combine would take as long as the keys.
        ((1, 1, 256, 8), 132, 1),
        ((1, 1, 1024, 8), 132, 16),
        ((0, 1, 8192, 8), 132, 1),
    ],
)
def test_keys_are_split_only_where_the_grid_leaves_units_idle(shape, units, splits):
    device = DeviceSpec("test", "sm_90", units, 0, 0, 1.0, 1.0)
    batch, lq, lk, heads = shape
    assert choose_splits(dense(batch, lq, lk, heads), device, 64, 64, 1) == splits


def test_a_forced_number_of_splits_is_kept():
    problem = dense(64, 1, 8192, 8, num_splits=5)
    assert choose_splits(problem, by_name("H200"), 64, 64, 1) == 5


def test_flops_count_visible_pairs_and_match_the_usual_formula():
    assert dense(2, 128, 256, 4, head_dim=64).flops() == 4 * 2 * 4 * 128 * 256 * 64
    causal = dense(1, 4096, 4096, 1, head_dim=128, causal=True)
    assert causal.flops() == 4 * 128 * (4096 * 4097 // 2)
    assert causal.flops(backward=True) * 2 == causal.flops() * 5


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"heads_q": 6, "heads_k": 4}, "whole multiple"),
        ({"head_dim": 513}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"dtype": "float8"}, "dtype"),
        ({"softcap": -1.0}, "softcap"),
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"num_splits": -1}, "num_splits"),
        ({"scale": float("nan")}, "softmax_scale"),
        ({"batch": -1}, "batch must be >= 0, got -1"),
        ({"seqlen_q": -1}, "seqlen_q must be >= 0, got -1"),
        ({"seqlen_k": -1}, "seqlen_k must be >= 0, got -1"),
        ({"heads_k": 0}, "whole multiple"),
        ({"heads_q": 0, "heads_k": 1}, "whole multiple"),
        ({"head_dim": 577, "head_dim_v": 8}, "q must have a head_dim of 1 to 576, got 577"),
        ({"head_dim": 8, "head_dim_v": 513}, "v must have a head_dim of 1 to 512, got 513"),
        ({"head_dim": 8, "head_dim_v": 0}, "v must have a head_dim of 1 to 512, got 0"),
        ({"kv_dtype": "int3"}, "kv_dtype must be one of float32, .*, got int3"),
        ({"out_dtype": "int3"}, "out_dtype must be one of float32, .*, got int3"),
        ({"scale": float("inf")}, "softmax_scale must be finite"),
        ({"softcap": float("inf")}, "softcap must be finite and >= 0"),
        ({"softcap": float("nan")}, "softcap must be finite and >= 0"),
        ({"dropout_p": -0.01}, r"dropout_p must be within \[0, 1\]"),
        ({"dropout_p": float("nan")}, r"dropout_p must be within \[0, 1\]"),
        ({"dropout_origin": (0, 0, 0)}, r"dropout_origin must be \(batch, head, row, column\)"),
        ({"dropout_origin": (0,) * 5}, r"dropout_origin must be \(batch, head, row, column\)"),
    ],
)
def test_impossible_problems_are_named(facts, says):
    base = {"batch": 1, "seqlen_q": 8, "seqlen_k": 8, "heads_q": 4}
    with pytest.raises(ValueError, match=says):
        dense(**{**base, **facts})


@pytest.mark.parametrize(
    "facts",
    [
        *({name: 0} for name in ("batch", "seqlen_q", "seqlen_k")),
        {"heads_q": 1, "heads_k": 1},
        {"heads_q": 4, "heads_k": 4},
        {"head_dim": 1},
        {"head_dim": 576, "head_dim_v": 512},
        {"dropout_p": 0.0},
        {"dropout_p": 1.0},
        {"softcap": 0.0},
        {"num_splits": 0},
        {"scale": -2.0},
    ],
    ids=str,
)
def test_the_least_and_the_largest_figures_are_problems(facts):
    made = dense(**{"batch": 1, "seqlen_q": 8, "seqlen_k": 8, "heads_q": 4, **facts})
    assert {name: getattr(made, name) for name in facts} == facts


def test_what_is_left_out_of_a_problem_is_the_usual():
    made = dense(1, 8, 9, 6)
    assert (made.heads_k, made.head_dim, made.head_dim_v) == (6, 128, 128)
    assert {made.dtype, made.kv_dtype, made.out_dtype} == {"bfloat16"}
    assert dense(1, 8, 8, 1, head_dim=16).scale == 0.25
    assert dense(1, 8, 8, 1, head_dim=1).scale == 1.0
    assert (made.softcap, made.dropout_p, made.dropout_origin) == (0.0, 0.0, (0, 0, 0, 0))
    assert made.mask == MaskSpec() and not made.mask.bounded
    assert made.aligned and made.even_rows and not made.features()
    for dtype in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"):
        assert dense(1, 8, 8, 1, dtype=dtype).out_dtype == "bfloat16"
    assert dense(1, 8, 8, 1, dtype="float16").out_dtype == "float16"
    with pytest.raises(TypeError, match="^head_dim must be an int"):
        dense(1, 8, 8, 1, head_dim="64")  # pyright: ignore[reportArgumentType]


def test_a_scale_counts_from_the_least_that_stands_for_all_nearer_to_zero():
    for scale, taken in ((2e-30, 2e-30), (-2e-30, -2e-30), (1.5e-30, 1.5e-30), (9e-31, 1e-30)):
        assert dense(1, 8, 8, 1, scale=scale).scale == taken


def test_the_log_sum_exp_of_packed_queries_has_no_batch():
    assert dense(3, 8, 9, 4).lse_shape == (3, 4, 8)
    assert dense(3, 8, 9, 4, total_q=20).lse_shape == (4, 20)
    assert dense(3, 8, 9, 4, total_q=0).lse_shape == (4, 0)


def test_gathered_keys_are_dense_and_as_long_as_is_used():
    paged = dense(2, 8, 64, 4, page_size=16, total_k=100, even_rows=False)
    dense_keys = paged.gathered()
    changed = {"page_size": 0, "total_k": None, "used_k": True, "even_rows": True}
    assert dense_keys == replace(paged, **changed)


def test_every_feature_has_words_and_a_problem_that_asks_for_it():
    base: dict[str, Any] = dict(batch=1, seqlen_q=8, seqlen_k=8, heads_q=4, head_dim=64)
    asks: dict[str, dict] = {
        name: {name: True}
        for name in (
            *("alibi", "bias", "rel_bias", "sink", "tree_mask", "kv_batch_idx", "leftpad_k"),
            *("q_offsets", "return_lse", "return_probs", "bias_grad", "rel_bias_grad"),
        )
    }
    asks |= {
        "causal": {"causal": True},
        "window": {"mask": MaskSpec(3, 3)},
        "first_keys": {"mask": MaskSpec(3, 3, 1)},
        "diagonal": {"mask": MaskSpec(-1, 0, 0, False)},
        "softcap": {"softcap": 0.5},
        "dropout": {"dropout_p": 0.1},
        "origins": {"dropout_p": 0.1, "origins": 4},
        "varlen": {"total_q": 4},
        "seqused": {"used_q": True},
        "paged": {"page_size": 1, "even_rows": True},
        "gqa": {"heads_k": 2},
        "head_dims_differ": {"head_dim_v": 32},
        "fp8": {"dtype": "float8_e4m3fn"},
        "float_out": {"out_dtype": "float32"},
        "quantized_kv": {"kv_dtype": "int8"},
        "key_ranges": {"key_ranges": 2},
        "block_mask": {"block_mask": 64},
        "max_scores": {"max_scores": True},
        "split_kv": {"num_splits": 2},
        "backward": {"needs_grad": True},
        "deterministic": {"needs_grad": True, "deterministic": True},
        "unaligned": {"aligned": False},
        "uneven_rows": {"even_rows": False, "used_k": True},
    }
    assert set(asks) == set(FEATURES)
    for mask in (MaskSpec(-1, 0, 0, False), MaskSpec(-1, 0, shift=3), MaskSpec(-1, 0, shift=-3)):
        assert dense(**base, mask=mask).features() == {"causal", "diagonal"}
    implied = {"first_keys": {"window"}, "diagonal": {"causal"}, "deterministic": {"backward"}}
    implied |= {"uneven_rows": {"seqused"}, "origins": {"dropout"}}
    for name, facts in asks.items():
        assert dense(**{**base, **facts}).features() == {name} | implied.get(name, set())
        assert FEATURES[name].strip()


@pytest.mark.parametrize("shared, takes", [(128 * 1024 - 1, False), (128 * 1024, True)])
def test_wide_float32_gradients_need_128_kib_of_shared_memory(shared, takes):
    wide = dense(1, 64, 64, 1, head_dim=264, dtype="float32", needs_grad=True)
    device = by_name("A100").live(shared_bytes=shared)
    if takes:
        assert plan(wide, device).backward == "portable"
    else:
        with pytest.raises(ValueError, match="128 KiB of shared memory"):
            plan(wide, device)


@pytest.mark.parametrize(
    "said", ["MI355X", "mi355x", " mi355x ", "RTX 4090", "rtx-4090", "Rtx_4090"]
)
def test_a_device_is_known_by_its_name_however_it_is_written(said):
    assert by_name(said).name == ("MI355X" if "35" in said else "RTX 4090")


@pytest.mark.parametrize(
    "arch, first, vendor",
    [
        ("sm_90", "H200", "nvidia"),
        ("gfx950", "MI350X", "amd"),
        ("cpu", "CPU", "cpu"),
        ("SM-80", "A100", "nvidia"),
    ],
)
def test_an_architecture_stands_for_its_first_device(arch, first, vendor):
    assert (by_name(arch).name, by_name(arch).vendor) == (first, vendor)


def test_an_unknown_device_is_named_with_those_that_are_known():
    with pytest.raises(ValueError, match="unknown device 'H300'; known: H200, H100, .*CPU, or"):
        by_name("H300")


def test_a_live_device_has_the_figures_that_were_read_and_the_others_of_the_table():
    live = by_name("H200").live(units=16, l2_bytes=5)
    assert live == replace(by_name("H200"), units=16, l2_bytes=5)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-50, -1e-50])
def test_no_scale_is_zero_as_the_float32_that_kernels_take(scale):
    """A hidden score is an infinity, and times 0 NaN."""
    problem = AttentionProblem.dense(1, 8, 8, 1, scale=scale)
    assert struct.unpack("f", struct.pack("f", problem.scale)) != (0.0,)


def test_the_key_tells_problems_apart_and_reads_like_the_problem():
    keys = {
        dense(1, 64, 64, 8).key(),
        dense(1, 64, 64, 8, causal=True).key(),
        dense(1, 64, 64, 8, softcap=2.0).key(),
        dense(1, 64, 64, 8, 2).key(),
        dense(1, 64, 64, 8, dtype="float16").key(),
    }
    assert len(keys) == 5
    assert dense(1, 64, 64, 8, causal=True).key() == "1x64x64 h8/8 d128 bfloat16 causal"


TRAINING = dense(1, 8192, 8192, 32, 8, 128, causal=True, needs_grad=True)


def test_options_that_are_chosen_by_hand_are_in_the_plan_and_said_to_be_chosen():
    chosen = plan(TRAINING, by_name("H200"), backend=forced("hopper+draws=1+last_waves=2"))
    assert chosen.backend == chosen.backward == "hopper"
    words = explain(chosen)
    said = "draws=True last_waves=2 splits=0 heads_innermost=True tail_splits=0 dk_in_keys=True"
    assert f"{said} (chosen by hand)" in words
    assert "hopper.backward: 132 programs" in words
    # Stored otherwise, as a backward finds its cotangents, it is the same.
    again = stored_as(chosen, even_rows=False)
    assert again.problem != chosen.problem
    assert again.configs["hopper.backward"] == chosen.configs["hopper.backward"]


def test_programs_of_decode_may_be_chosen_by_hand():
    step = dense(64, 1, 8192, 32, 8, 128)
    chosen = plan(
        step,
        by_name("H200"),
        backend=forced("decode/portable+programs=3+registers=168+merge_values=128"),
    )
    said = "programs=3 fewest_shares=8 merge_values=128 conversion=2 registers=168 (chosen by hand)"
    assert said in explain(chosen)
    usual = (
        plan(step, by_name("H200"), backend=forced("decode/portable"))
        .sizes()
        .launches["decode.forward"]
        .grid
    )
    assert chosen.sizes().launches["decode.forward"].grid[0] > usual[0]
    for option in ("programs=0", "merge_values=24", "merge_values=0", "merge_stages=0"):
        with pytest.raises(ValueError, match=f"backend: {option.split('=')[0]} must be"):
            plan(step, by_name("H200"), backend=forced(f"decode/portable+{option}"))
    for device, most in (("H200", 2), ("MI300X", 0), ("B200", 0)):
        plan(step, by_name(device), backend=forced(f"decode/portable+conversion={most}"))
        with pytest.raises(ValueError, match=f"conversion must be at most {most} here"):
            plan(step, by_name(device), backend=forced(f"decode/portable+conversion={most + 1}"))


@pytest.mark.parametrize(
    "name, words",
    [
        ("hopper+draw=1", "hopper has the options block_m, block_n, .*, draws, .*, got draw"),
        ("hopper+draws", "options must be OPTION=NUMBER"),
        ("hopper+draws=-1", "options must be OPTION=NUMBER"),
        ("hopper+draws=1+draws=0", "options must be OPTION=NUMBER, each once"),
        ("portable+draws=1", "portable has the options none, got draws"),
        ("tpu+draws=1", "there is no backend 'tpu'"),
        ("decode/mlb", "there is no variant 'mlb' of the backend 'decode'"),
    ],
)
def test_what_cannot_be_chosen_by_hand_is_refused(name, words):
    with pytest.raises(ValueError, match=words):
        forced(name)


def test_options_of_kernels_that_take_no_part_are_refused():
    with pytest.raises(ValueError, match="no kernel of this call has the option 'draws'"):
        plan(replace(TRAINING, needs_grad=False), by_name("H200"), backend=forced("hopper+draws=1"))


def test_under_a_mask_the_last_group_of_heads_fills_the_device():
    """Its short tiles outlast its longest; without a mask groups are alike."""
    for problem in (TRAINING, replace(TRAINING, mask=MaskSpec())):
        found = {}
        for waves in (0, 2):
            options = f"draws=1+last_waves={waves}+heads_innermost=0"
            chosen = plan(problem, by_name("H200"), backend=forced(f"hopper+{options}"))
            found[waves] = chosen.sizes(direction="backward").launches["hopper.backward"].numbers
        last = 8 - found[2]["l2_groups"] * found[2]["l2_heads"]
        if problem.mask.bounded:
            assert last * found[2]["key_blocks"] >= 2 * 132
        else:
            assert found[2] == found[0]


def test_lengths_of_none_leave_every_head_in_one_group():
    chosen = plan(replace(TRAINING, mask=MaskSpec()), by_name("H200"))
    lengths = TRAINING.lengths._replace(seqlen_q=0)
    numbers = chosen.sizes(lengths, "backward").launches["hopper.backward"].numbers
    assert numbers["l2_heads"] == TRAINING.heads_k * TRAINING.batch


def test_a_deterministic_backward_is_the_hopper_kernel_s_and_draws_its_tiles():
    chosen = plan(replace(TRAINING, deterministic=True), by_name("H200"))
    assert chosen.backward == "hopper"
    config = chosen.configs["hopper.backward"]
    assert isinstance(config, HopperBackwardConfig) and config.draws and config.last_waves == 0


def test_the_sizes_of_a_plan_are_those_of_its_own_forward_unless_more_is_said():
    problem = dense(2, 300, 500, 8, 4, 64, causal=True, needs_grad=True)
    chosen = plan(problem, by_name("H200"))
    assert chosen.sizes() == chosen.sizes(problem.lengths, "forward", problem.seqlen_k)
    assert chosen.sizes() != chosen.sizes(direction="backward")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("share", [3, 7, 12])
def test_queries_cotangents_and_sums_of_a_group_of_heads_fill_their_share_of_the_cache(
    head_dim, share
):
    """40 % of L2: of each row Q and dO in 16 bits, and dQ in 32."""
    device = by_name("H200")
    row = 2 * head_dim + 2 * head_dim + 4 * head_dim
    rows = device.l2_bytes * 40 // 100 // (share * 2 * row)
    problem = dense(4, rows, 4096, 64, 32, head_dim, needs_grad=True)
    for longer, heads in ((0, share), (1, share - 1)):
        chosen = plan(replace(problem, seqlen_q=rows + longer), device, backend="hopper")
        numbers = chosen.sizes(direction="backward").launches["hopper.backward"].numbers
        assert numbers["l2_heads"] == heads


@pytest.mark.parametrize("head_dim, side", [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_a_list_of_64_keys_may_have_a_work_tile_of_its_own(head_dim, side):
    """By hand: two stages of queries for each consumer, and one more of keys."""
    asked = replace(TRAINING, head_dim=head_dim, head_dim_v=head_dim, block_mask=side)
    config = plan(asked, by_name("H200"), backend=forced("hopper+block_n=64")).configs[
        "hopper.backward"
    ]
    assert isinstance(config, HopperBackwardConfig)
    assert (config.block_m, config.block_n, config.num_stages, config.k_stages) == (64, 64, 4, 2)
    usual = plan(asked, by_name("H200"), backend="hopper").configs["hopper.backward"]
    assert isinstance(usual, HopperBackwardConfig) and usual.block_n == 128
    with pytest.raises(ValueError, match="block_n=64 is of block masks"):
        plan(replace(asked, block_mask=0), by_name("H200"), backend=forced("hopper+block_n=64"))
    with pytest.raises(ValueError, match="block_n must be 64 or 128, got 32"):
        plan(asked, by_name("H200"), backend=forced("hopper+block_n=32"))
