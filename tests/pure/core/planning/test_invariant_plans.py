"""With numerics="invariant" all that decides a row's bits is one for each head dim, whichever way a
call goes, however many SMs there are; and each kernel that takes no such call says why."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from heedful.core.base import settings
from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import KNOWN, by_name
from heedful.core.call.arguments import AttentionCall, Options
from heedful.core.call.describe import check
from heedful.core.call.mask import MaskSpec
from heedful.core.call.numerics import backend_of, is_invariant, with_numerics
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import explain, plan
from heedful.core.registry import capability, configs
from heedful.core.registry.by_hand import Overrides, forced
from heedful.core.registry.tiles import (
    HOPPER_MERGE_ROWS,
    PART_KEYS,
    DecodeConfig,
    HopperConfig,
    HopperDecodeConfig,
    MlaConfig,
    SharedKeysConfig,
)
from heedful.core.registry.toolchain import Toolchain
from heedful.launch.program import buffers
from heedful.launch.program.programs import program, step

# Ways of calls of each head dim, option and device.
DRAWS = 40

HEAD_DIMS = ((40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "sink": {"sink": True},
    "bias": {"bias": True},
    "ranges": {"key_ranges": 2},
    "tree": {"tree_mask": True},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
}
# Constants that decide bits, of kernels by their functions.
DECIDING = {
    "attention_in_parts": (
        {"BLOCK_M", "BLOCK_N", "BLOCK_D", "BLOCK_E", "BLOCK_R", "PRECISION", "PART_TILES"}
        | {"IS_ADJUSTED", "HEAD_DIM", "HEAD_DIM_V", "KV_GROUP"}
    ),
    "forward": {"BLOCK_N", "RESCALE", "PART_TILES", "HAS_SOFTCAP"},
    "merge_parts": {"PART_KEYS", "LAST_FIRST"},
}


def drawn(rng: random.Random, dims: tuple[int, int], option: dict[str, Any], device: str):
    """A way of a call: its problem, the arrays and the device."""
    entry = rng.choice(("dense", "packed", "cache", "pages", "packed over pages"))
    batch = rng.choice((1, 3, 64))
    seqlen_q = rng.choice((1, 5, 64, 200, 5000))
    seqlen_k = rng.choice((1, 127, 8192, 8193, 20000, 40000))
    facts: dict[str, Any] = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    facts |= {"head_dim": dims[0], "head_dim_v": dims[1], "invariant": True}
    facts |= {"heads_q": rng.choice((2, 8)), "heads_k": rng.choice((1, 2)), "dtype": "bfloat16"}
    if "pages" in entry:
        facts |= {"page_size": rng.choice((1, 7, 16, 64, 256)), "used_k": True}
    if "packed" in entry:
        facts["total_q"] = rng.choice((1, 100, 9000))
    if entry == "packed":
        facts["total_k"] = rng.choice((1, 100, 9000))
    if entry == "cache":
        facts |= {"used_k": True, "kv_batch_idx": rng.random() < 0.5}
        facts["leftpad_k"] = rng.random() < 0.5
    facts |= {name: rng.random() < 0.5 for name in ("return_lse", "used_q", "even_rows")}
    facts |= {"num_splits": rng.choice((0, 1)), "near_rows": rng.random() < 0.5}
    facts["mask"] = rng.choice((MaskSpec(), MaskSpec.of(True), MaskSpec.of(True, (100, 0))))
    facts |= option
    if facts.get("tree_mask") or facts.get("bias"):
        facts |= {"total_q": None, "total_k": None}
    aligned = facts["aligned"] = rng.random() < 0.6
    problem = AttentionProblem.dense(**facts)
    arrays = dict(buffers.forward(problem))
    if not aligned:
        arrays["q"] = _unaligned(arrays["q"])
    return problem, arrays, by_name(device).live(units=rng.choice((1, 16, 66, 132, 160)))


def _unaligned(spec: ArraySpec) -> ArraySpec:
    wider = ArraySpec.contiguous((*spec.shape[:-1], spec.shape[-1] + 1), spec.dtype)
    return ArraySpec(spec.shape, wider.strides, spec.dtype)


def deciding(problem, arrays, device, backend: str | None) -> dict[str, tuple]:
    """By kernel, all that decides bits."""
    chosen = plan(problem, device, backend=backend)
    found: dict[str, tuple] = {"plan": (chosen.variant_of("forward").label,)}
    for call in program(chosen, "forward", arrays).calls:
        wanted = DECIDING.get(call.kernel.function, ())
        constants = [(name.rpartition(".")[2], value) for name, value in call.constants.items()]
        kept = sorted((name, value) for name, value in constants if name in wanted)
        assert {name for name, _ in kept} == set(wanted)
        if wanted:
            found[call.kernel.function] = (*kept, *call.options.items())
    return found


def refused(problem, device, backend: str | None) -> bool:
    """Whether a call is refused for the storage of its operands."""
    try:
        plan(problem, device, backend=backend)
    except ValueError:
        ragged = problem.page_size or problem.used_k or problem.leftpad_k
        layout = not problem.aligned or ragged and not problem.even_rows
        assert layout or problem.page_size % 16 or problem.page_size and problem.leftpad_k
        return True
    return False


# Options that the Hopper forward takes, with head dims up to 256.
OF_HOPPER = ("plain", "softcap", "sink", "float16")


def taken_by(dims, option, device: str, backend: str | None) -> str:
    """The kernel that takes such calls, whatever their layout."""
    is_hopper = device == "H200" and option in OF_HOPPER and dims[0] <= 256
    return "forward" if is_hopper and backend != "portable" else "attention_in_parts"


ASKED = [
    *(
        (dims, option, device, None)
        for dims in HEAD_DIMS
        for option in OPTIONS
        for device in ("H200", "B200")
    ),
    *(
        (dims, option, "H200", backend)
        for dims in HEAD_DIMS[:-1]
        for option in OF_HOPPER
        for backend in ("hopper", "portable")
    ),
]


@pytest.mark.parametrize("dims, option, device, backend", ASKED, ids=str)
def test_all_that_decides_bits_is_one_for_each_head_dim(dims, option, device, backend):
    if option in ("float32", "e4m3") and dims[0] > 512:
        pytest.skip("no kernel takes these")
    rng, found = random.Random(f"{dims} {option} {device}"), {}
    for _ in range(DRAWS):
        problem, arrays, spec = drawn(rng, dims, OPTIONS[option], device)
        if taken_by(dims, option, device, backend) == "forward" and refused(problem, spec, backend):
            continue
        for kernel, decides in deciding(problem, arrays, spec, backend).items():
            assert found.setdefault(kernel, decides) == decides, (problem.key(), spec.units)
    kernel = taken_by(dims, option, device, backend)
    assert set(found) == {"plan", kernel, "merge_parts"}
    tiles = dict(found[kernel])
    assert tiles["PART_TILES"] * tiles["BLOCK_N"] == PART_KEYS
    assert dict(found["merge_parts"])["PART_KEYS"] == PART_KEYS


def test_fast_calls_differ_in_what_decides_bits():
    """So that the test above looks at what it should."""
    found = set()
    for rows in (1, 64, 5000):
        chosen = plan(AttentionProblem.dense(4, rows, 4096, 8), by_name("H200"))
        found |= {(name, c.block_n, c.words()) for name, c in chosen.configs.items()}
    assert len(found) > 1


PLAIN: dict[str, Any] = {"batch": 2, "seqlen_q": 64, "seqlen_k": 512, "heads_q": 8, "heads_k": 8}


@pytest.mark.parametrize("device", KNOWN)
def test_each_kernel_takes_such_calls_or_says_why_not(device):
    problem = AttentionProblem.dense(**PLAIN, invariant=True)
    for row in capability.VARIANTS:
        if row.direction == "forward" and row.level(KNOWN[device]) is not None:
            reasons = row.why_not(problem, KNOWN[device])
            told = [reason for reason in reasons if reason.startswith("numerics='invariant': ")]
            assert row.varies == told[0].split(": ", 1)[1] if row.varies else not told
            assert row.varies or row.label in ("portable", "hopper/forward")


LAYOUTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"aligned": False}, "off 16 bytes"),
    ({"used_k": True, "even_rows": False}, "no multiples of row strides"),
    ({"used_k": True, "page_size": 24}, "page_size 24"),
    ({"used_k": True, "page_size": 16, "leftpad_k": True}, "left-padded pages"),
)


@pytest.mark.parametrize("facts, words", LAYOUTS, ids=str)
def test_options_choose_the_kernel_and_a_layout_that_it_does_not_take_is_refused(facts, words):
    """Another kernel would give other bits; it takes all layouts where it is named."""
    usual = AttentionProblem.dense(**PLAIN, invariant=True)
    assert plan(usual, by_name("H200")).backend == "hopper"
    problem = replace(usual, **facts)
    with pytest.raises(ValueError, match=f"{words}.*hopper/forward is preferred with numerics"):
        plan(problem, by_name("H200"))
    assert plan(problem, by_name("H200"), backend="portable").backend == "portable"
    with pytest.raises(ValueError, match="ALiBi"):
        plan(replace(usual, alibi=True), by_name("H200"), backend="hopper")
    # With an option that the Hopper forward does not take, every layout is the portable kernels'.
    assert plan(replace(problem, alibi=True), by_name("H200")).backend == "portable"


def test_a_call_without_tokens_is_taken_in_every_layout():
    facts: dict[str, Any] = {**PLAIN, "seqlen_k": 0}
    problem = AttentionProblem.dense(**facts, invariant=True)
    assert plan(problem, by_name("H200")).backend == "portable"


@pytest.mark.parametrize("batch, seqlen_q", [(1, 1), (200, 1), (1, 30000), (1, 300)])
def test_parts_are_merged_in_one_order_by_a_kernel_or_by_the_programs(batch, seqlen_q):
    """Few programs leave the merge to a kernel, which begins with the last part, as programs do."""
    facts = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": 30000, "used_k": True}
    problem = AttentionProblem.dense(**PLAIN | facts, invariant=True)
    chosen = plan(problem, by_name("H200"), backend="hopper")
    calls = {call.kernel.function: call for call in program(chosen, "forward").calls}
    is_in_turn = batch * seqlen_q > 1000 or batch == 200
    assert (chosen.num_splits, chosen.in_turn) == ((1, True) if is_in_turn else (4, False))
    assert ("merge_parts" in calls) != is_in_turn
    held = [space for space in chosen.sizes().workspaces if space.name == "held"]
    assert len(held) == is_in_turn
    if not is_in_turn:
        assert dict(calls["merge_parts"].constants)["LAST_FIRST"]


@pytest.mark.parametrize(
    "seqlen_q, heads, causal, is_in_turn",
    [
        # Times are those of in turn over apart (H200, 2026-11-28).
        (16384, 1, True, False),  # 198 us over 124
        (16384, 1, False, True),  # 186 over 201
        (16384, 2, True, True),  # 207 over 228
        (16384, 8, True, True),  # 715 over 791
        (16384, 8, False, True),  # 1395 over 1480
        (2048, 8, True, True),  # 389 over 412
        # A second wave would be nearly empty.
        (16384 + 1024, 1, False, False),
    ],
)
def test_programs_take_parts_in_turn_unless_sms_wait_for_each_other(
    seqlen_q, heads, causal, is_in_turn
):
    facts = {"heads_q": heads, "heads_k": heads, "seqlen_q": seqlen_q, "batch": 1}
    facts |= {"seqlen_k": max(seqlen_q, 32768 if seqlen_q == 2048 else 0)}
    problem = AttentionProblem.dense(**PLAIN | facts, mask=MaskSpec.of(causal), invariant=True)
    assert plan(problem, by_name("H200")).in_turn == is_in_turn
    # Longer keys than others': nobody knows before.
    used = plan(replace(problem, used_k=True), by_name("H200"))
    assert not used.in_turn


def by_hand(options: str, **facts: Any):
    """The plan of a call of 30000 keys with these options of the Hopper forward."""
    problem = AttentionProblem.dense(**PLAIN | {"seqlen_k": 30000, **facts})
    return plan(problem, by_name("H200"), backend=forced(f"hopper/forward+{options}"))


def test_parts_are_as_long_as_chosen_by_hand_and_taken_in_turn():
    chosen = by_hand("part_keys=1024", invariant=True)
    assert (chosen.num_splits, chosen.in_turn) == (30, False)
    calls = {call.kernel.function: call for call in program(chosen, "forward").calls}
    assert calls["forward"].constants["params.split.PART_TILES"] == 1024 // 128
    assert calls["merge_parts"].constants["PART_KEYS"] == 1024
    chosen = by_hand("key_splits=1+part_keys=2048", invariant=True)
    assert (chosen.num_splits, chosen.in_turn) == (1, True)


@pytest.mark.parametrize(
    "options, facts, words",
    [
        ("part_keys=1000", {"invariant": True}, "a multiple of 128 keys, got 1000"),
        ("part_keys=0", {"invariant": True}, "a multiple of 128 keys, got 0"),
        ("part_keys=1024", {}, "part_keys, of numerics='invariant', must be"),
        ("key_splits=3", {"invariant": True}, "in turn, got 3"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_refused(options, facts, words):
    with pytest.raises(ValueError, match=words):
        by_hand(options, **facts)


@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_appended_is_rotated_as_plain_operators_do(invariant):
    """Where bits matter: the compiler then fuses no product with a sum."""
    problem = AttentionProblem.dense(**PLAIN, used_k=True, invariant=invariant)
    chosen = plan(problem, by_name("H200"), backend="hopper")
    made = step(chosen, buffers.step(problem, 64, "halves"), False, 0)
    (append,) = (c for c in made.calls if c.kernel.function == "append_and_rotate")
    assert append.options.get("enable_fp_fusion", True) is not invariant
    assert all("enable_fp_fusion" not in c.options for c in made.calls if c is not append)


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"num_splits": 3}, "num_splits 3"),
        ({"dropout_p": 0.5}, "dropout"),
        ({"block_mask": 128}, "a block mask"),
    ],
    ids=str,
)
def test_what_cannot_be_invariant_is_refused_with_its_reason(facts, words):
    problem = AttentionProblem.dense(**PLAIN, **facts, invariant=True)
    with pytest.raises(ValueError, match=f"numerics='invariant' with {words}"):
        plan(problem, by_name("H200"))


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_deterministic_gradients_have_one_way_for_each_head_dim(dims):
    """Dense or packed, in any batch, on any number of SMs."""
    found, rng = set(), random.Random(str(dims))
    for _ in range(60):
        seqlen = rng.choice((64, 1000, 9000))
        facts: dict[str, Any] = {}
        if rng.random() < 0.5:
            facts |= {"total_q": 9000, "total_k": 9000}
        batch, heads = rng.choice((1, 3, 64)), rng.choice((1, 8))
        facts |= {"head_dim": dims[0], "head_dim_v": dims[1], "causal": True, "invariant": True}
        problem = AttentionProblem.dense(
            batch, seqlen, seqlen, heads, needs_grad=True, deterministic=True, **facts
        )
        chosen = plan(problem, by_name("H200").live(units=rng.choice((16, 66, 132))))
        label = chosen.variant_of("backward").label
        tiles = [(n, c.block_m, c.block_n, c.words()) for n, c in chosen.configs.items()]
        found.add((label, *(tile for tile in tiles if "backward" in tile[0])))
        assert label == ("hopper/backward" if dims[0] <= 128 else "portable")
    assert len(found) == 1 and "splits=0" not in str(found)


def test_no_cpu_takes_an_invariant_call():
    problem = AttentionProblem.dense(**PLAIN, invariant=True)
    with pytest.raises(ValueError, match="numerics='invariant': sizes of the call decide"):
        plan(problem, by_name("CPU"))


def test_explain_has_the_fine_print():
    problem = AttentionProblem.dense(**PLAIN, invariant=True)
    words = explain(plan(problem, by_name("H200")))
    assert f"parts of {PART_KEYS} keys" in words
    for said in ("one architecture", "one version", "compiler or pack", "finite"):
        assert said in words
    assert [line.split()[0] for line in words.splitlines()][:3] == ["problem", "device", "forward"]
    fast = explain(plan(AttentionProblem.dense(**PLAIN), by_name("H200")))
    assert "numerics" not in fast.replace("numerics='invariant'", "")


def test_numerics_travel_beside_the_name_of_a_backend():
    assert with_numerics("portable", None) == "portable"
    assert with_numerics(None, None) is None
    for backend in (None, "portable"):
        for numerics in settings.NUMERICS:
            option = with_numerics(backend, numerics)
            assert backend_of(option) == backend
            assert is_invariant(option) == (numerics == "invariant")
    assert backend_of("portable") == "portable" and not is_invariant("portable")


def test_wrong_numerics_are_named():
    with pytest.raises(ValueError, match="numerics must be one of fast, invariant or None"):
        with_numerics(None, "exact")
    with pytest.raises(TypeError, match="numerics must be a str or None"):
        with_numerics(None, 1)
    with pytest.raises(TypeError, match="backend must be a str or None"):
        with_numerics(1, "fast")
    with pytest.raises(ValueError, match="numerics must be None beside portable"):
        with_numerics(Overrides("portable"), "fast")


def test_the_setting_holds_where_a_call_names_none(monkeypatch):
    row = ArraySpec.contiguous((1, 8, 2, 16), "float16", "cpu")
    monkeypatch.setenv("HEEDFUL_NUMERICS", "invariant")

    def is_so(numerics) -> bool:
        options = Options("dense", backend=with_numerics(None, numerics))
        return check(AttentionCall(Operands(row, row, row), options)).invariant

    assert is_so(None) and is_so("invariant") and not is_so("fast")
    monkeypatch.setenv("HEEDFUL_NUMERICS", "exact")
    with pytest.raises(ValueError, match="HEEDFUL_NUMERICS='exact': wanted one of fast, invariant"):
        is_so(None)


@pytest.mark.parametrize("dims", HEAD_DIMS[:-1], ids=str)
@pytest.mark.parametrize("option", ["plain", "softcap", "sink", "ranges", "float16"])
def test_calls_of_jax_get_the_kernels_and_grids_of_calls_of_torch(dims, option):
    """Each way of a call: the same code by its key, the same numbers, memory and launch."""
    rng, names = random.Random(f"{dims} {option}"), set()
    for _ in range(12):
        problem, arrays, device = drawn(rng, dims, OPTIONS[option], "H200")
        # XLA stores arrays densely.
        problem = replace(problem, aligned=True, even_rows=True, near_rows=True)
        arrays = buffers.forward(problem)
        made = []
        for framework in ("torch", "jax"):
            try:
                chosen = plan(problem, device, Toolchain(framework=framework))
            except ValueError:
                assert problem.page_size % 16 or problem.leftpad_k
                continue
            made.append(program(chosen, "forward", arrays))
        assert len(made) in (0, 2) and made[:1] == made[1:]
        names |= {call.kernel.function for each in made for call in each.calls}
    assert names >= {taken_by(dims, option, "H200", None)}


@pytest.mark.parametrize("keys", [0, 1, PART_KEYS, PART_KEYS + 1, 100_000])
def test_keys_have_parts_where_tiles_end_them_and_are_one_elsewhere(keys):
    problem = AttentionProblem.dense(1, 5, keys, 8, 2, head_dim=64)
    tiles = [row.config for row in configs.ROWS if isinstance(row.config, HopperConfig)]
    found = {(getattr(tile, "part_keys", 0), tile.parts(problem)) for tile in tiles}
    assert found == {(0, 1), (PART_KEYS, max(1, math.ceil(keys / PART_KEYS)))}


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("rows", "stored"), [(3, 4), (6, 8), (9, 16), (18, 32), (33, 0)])
def test_partial_rows_of_a_decode_are_stored_up_to_a_power_of_two(rows, stored, group):
    """0: as many as a tile has. The portable decode, and a merge in the order of threads, store all
    of a tile's; the MLA decode 16 of few."""
    problem = AttentionProblem.dense(2, rows // group, 900, 2 * group, 2, head_dim=64)
    packed = problem.at(problem.lengths._replace(total_q=rows + 2))
    tiles = [row.config for row in configs.ROWS if isinstance(row.config, SharedKeysConfig)]
    assert len({type(tile) for tile in tiles}) == 6
    for tile in tiles:
        want = stored or tile.block_m
        if isinstance(tile, DecodeConfig) or getattr(tile, "thread_order", 0):
            want = tile.block_m
        elif isinstance(tile, MlaConfig):
            want = HOPPER_MERGE_ROWS if rows <= HOPPER_MERGE_ROWS else tile.block_m
        assert tile.kept_rows(problem) == tile.kept_rows(packed) == want
        if isinstance(tile, HopperDecodeConfig):
            assert (tile.fewest_rows(problem), tile.fewest_rows(packed)) == (want, 4)
