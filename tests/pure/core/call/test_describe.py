"""Calls are described, and bad ones refused, without any framework: ArraySpecs and plain values are
enough. What is said of a bad call is what `tests/cpu/torch/api/messages.txt` has of the same call
in torch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import (
    AttentionCall,
    CacheUpdate,
    Options,
    bind,
    one_sink,
    plain_options,
)
from heedful.core.call.describe import check_seed, describe
from heedful.core.call.describe_cache import check_cache, check_int_length
from heedful.core.call.mask import MaskSpec
from heedful.core.call.numerics import with_numerics
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.core.call.storage import copies

SAID = dict(
    line.split(": ", 1)
    for line in (Path(__file__).parents[3] / "cpu/torch/api/messages.txt").read_text().splitlines()
)


def spec(*shape: int, dtype: str = "float32", strides=None, **facts) -> ArraySpec:
    made = ArraySpec.contiguous(shape, dtype)._replace(**facts)
    return made if strides is None else made._replace(strides=strides)


def ints(*shape: int) -> ArraySpec:
    return spec(*shape, dtype="int32")


def dense(**changes) -> AttentionCall:
    """The dense call of tests/cpu/torch/api/test_bad_input.py, with these of its arguments
    instead."""
    given: dict[str, Any] = {"q": spec(2, 5, 4, 16), "k": spec(2, 7, 2, 16), "v": spec(2, 7, 2, 8)}
    return call("dense", {**given, **changes})


def varlen(**changes) -> AttentionCall:
    given: dict[str, Any] = {"q": spec(5, 4, 16), "k": spec(7, 2, 16), "v": spec(7, 2, 8)}
    given |= {"cu_seqlens_q": ints(3), "cu_seqlens_k": ints(3)}
    return call("varlen", {**given, "max_seqlen_q": 3, "max_seqlen_k": 4, **changes})


def call(kind: str, given: dict[str, Any]) -> AttentionCall:
    x, options, _ = bind(kind, given)
    return AttentionCall(x, plain_options(options), out=given.get("out"))


def cached(**changes) -> tuple[AttentionCall, CacheUpdate]:
    given: dict[str, Any] = dict.fromkeys(CacheUpdate._fields) | {"rotary_interleaved": True}
    given |= {"q": spec(2, 1, 4, 16), "k_cache": spec(2, 12, 2, 16), "v_cache": spec(2, 12, 2, 8)}
    given |= {"k": spec(2, 1, 2, 16), "v": spec(2, 1, 2, 8), "cache_seqlens": ints(2), **changes}
    x, options, update = bind("kvcache", given)
    return AttentionCall(x, plain_options(options), out=given.get("out")), update


# Words that one of the messages begins with, and who is to say it.
BAD = [
    (dense, {"q": spec(5, 4, 16)}, "dense-q-3"),
    (dense, {"k": spec(7, 2, 16)}, "dense-k-2"),
    (dense, {"q": spec(2, 5, 4, 16, dtype="float64")}, "dense-q-4"),
    (dense, {"k": spec(2, 7, 2, 16, dtype="float16")}, "dense-k-3"),
    (dense, {"v": spec(2, 7, 2, 8, dtype="bfloat16")}, "dense-v-3"),
    (dense, {"k": spec(3, 7, 2, 16), "v": spec(3, 7, 2, 8)}, "dense-k-v-1"),
    (dense, {"k": spec(2, 7, 2, 24)}, "dense-k-4"),
    (dense, {"k": spec(2, 7, 3, 16), "v": spec(2, 7, 3, 8)}, "dense-k-v-2"),
    (dense, {"q": spec(2, 5, 0, 16)}, "dense-q-7"),
    (dense, {"v": spec(2, 7, 2, 1000)}, "dense-v-4"),
    (dense, {"v": spec(2, 6, 2, 8)}, "dense-v-6"),
    (dense, {"dropout_p": 1.5}, "dense-dropout_p-2"),
    (dense, {"dropout_p": "0.1"}, "dense-dropout_p-4"),
    (dense, {"softmax_scale": 1j}, "dense-softmax_scale-6"),
    (dense, {"softcap": 10**400}, "dense-softcap-1"),
    (dense, {"causal": 1}, "dense-causal-1"),
    (dense, {"window_size": 5}, "dense-window_size-1"),
    (dense, {"window_size": (-2, 0)}, "dense-window_size-3"),
    (dense, {"window_size": (4.0, 0)}, "dense-window_size-5"),
    (dense, {"window_size": "40"}, "dense-window_size-11"),
    (dense, {"alibi_slopes": spec(3)}, "dense-alibi_slopes-1"),
    (dense, {"num_splits": -1}, "dense-num_splits-1"),
    (dense, {"num_splits": True}, "dense-num_splits-3"),
]


@pytest.mark.parametrize(("make", "changes", "name"), BAD, ids=[name for *_, name in BAD])
def test_a_bad_call_is_refused_in_the_words_that_torch_users_read(make, changes, name):
    describe(make())
    with pytest.raises((TypeError, ValueError)) as caught:
        describe(make(**changes))
    assert f"{caught.type.__name__}: {caught.value}".startswith(SAID[name])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": None}, "k must be given with v, got None"),
        ({"k": spec(2, 1, 2, 16, dtype="float16")}, "k must be float32 like k_cache, got float16"),
        ({"k": spec(2, 13, 2, 16), "v": spec(2, 13, 2, 8)}, "k must have at most the cache's 12"),
        ({"cache_seqlens": ints(3)}, r"cache_seqlens must have shape \(batch,\) = \(2,\)"),
        ({"rotary_cos": spec(12, 4)}, "rotary_sin must be given with rotary_cos, got None"),
        ({"k_cache": spec(2, 12, 2, 16, strides=(0, 32, 16, 1))}, "k_cache must not be expanded"),
        (
            {"rotary_cos": spec(11, 4), "rotary_sin": spec(11, 4)},
            "rotary_cos must have a row for each of the cache's 12 positions, got 11",
        ),
        ({"shared_prefix": (spec(4, 2, 8),) * 2}, r"shared_prefix\[0\] must have shape"),
    ],
)
def test_a_bad_call_over_a_cache_is_refused_by_name(changes, words):
    check_cache(*cached())
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        check_cache(*cached(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"k": spec(2, 12, 2, 16), "v": spec(2, 12, 2, 8)},
        {"rotary_cos": spec(12, 1), "rotary_sin": spec(12, 1)},
        {"rotary_cos": spec(12, 8), "rotary_sin": spec(12, 8)},
        {"shared_prefix": (spec(4, 2, 16), spec(4, 2, 8))},
        {"shared_prefix": (spec(1, 4, 2, 16), spec(1, 4, 2, 8))},
    ],
)
def test_what_just_fits_a_cache_is_taken(changes):
    assert check_cache(*cached(**changes)).seqlen_k == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rotary_cos": spec(12, 0), "rotary_sin": spec(12, 0)}, "rotary_cos must have 1 to 8 "),
        ({"rotary_cos": spec(12, 9), "rotary_sin": spec(12, 9)}, "rotary_cos must have 1 to 8 "),
        ({"rotary_cos": spec(12, 4), "rotary_sin": spec(12, 3)}, "rotary_sin must have shape"),
        ({"rotary_cos": spec(48), "rotary_sin": spec(48)}, "rotary_cos must be .positions"),
        ({"k": spec(2, 2, 16), "v": spec(2, 2, 8)}, "k must be .batch, new_len"),
        ({"v": spec(2, 2, 2, 8)}, "v must have shape"),
        ({"cache_seqlens": None}, "cache_seqlens must be given with k and v"),
        ({"shared_prefix": (spec(2, 4, 2, 16),) * 2}, r"shared_prefix\[0\] must be"),
        ({"shared_prefix": (spec(4, 2, 16), spec(3, 2, 8))}, r"shared_prefix\[1\] must have shape"),
    ],
)
def test_what_just_does_not_fit_a_cache_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        check_cache(*cached(**changes))


def test_a_length_must_leave_room_for_the_new_tokens():
    check_int_length(11, 1, 12)
    with pytest.raises(ValueError, match="between 0 and 11 "):
        check_int_length(12, 1, 12)


def test_a_call_is_described_by_what_it_is_given():
    assert describe(dense(causal=True, softcap=2.0, dropout_p=0.5)) == AttentionProblem(
        batch=2,
        heads_q=4,
        heads_k=2,
        seqlen_q=5,
        seqlen_k=7,
        head_dim=16,
        head_dim_v=8,
        dtype="float32",
        kv_dtype="float32",
        out_dtype="float32",
        scale=0.25,
        mask=MaskSpec.of(True),
        softcap=2.0,
        dropout_p=0.5,
    )
    packed = describe(varlen(out=spec(5, 4, 8)))
    lengths = packed.batch, packed.seqlen_q, packed.seqlen_k, packed.total_q, packed.total_k
    assert lengths == (2, 3, 4, 5, 7) and packed.out_shape == (5, 4, 8)
    assert describe(dense(window_size=[3, 1])).mask == MaskSpec(3, 1)


# Operands of a call over a cache that decide one fact of its problem each, and that fact.
ALONE: dict[str, tuple[ArraySpec, str]] = {
    "cache_batch_idx": (ints(2), "kv_batch_idx"),
    "cache_leftpad": (ints(2), "leftpad_k"),
    "seqused_q": (ints(2), "used_q"),
    "alibi_slopes": (spec(4), "alibi"),
    "bias": (spec(1, 12), "bias"),
    "sink": (spec(4), "sink"),
    "tree_mask": (spec(2, 1, 1, dtype="bool"), "tree_mask"),
}


@pytest.mark.parametrize("name", ALONE)
def test_an_operand_decides_its_own_fact_and_no_other(name):
    absent = dict.fromkeys(("k", "v", "cache_seqlens"))
    array, fact = ALONE[name]
    without, given = (describe(cached(**absent, **more)[0]) for more in ({}, {name: array}))
    assert given == replace(without, **{fact: True}) != without


def test_arguments_that_a_call_takes_by_another_name_reach_their_operands():
    given = {name: name for name in ("q", "k_cache", "v_cache", "cache_leftpad")}
    given |= dict.fromkeys(CacheUpdate._fields, "an update") | {"return_softmax_lse": True}
    x, options, update = bind("kvcache", given)
    assert x == Operands("q", "k_cache", "v_cache", leftpad_k="cache_leftpad")
    assert options == Options("kvcache", return_lse=True)
    assert set(update) == {"an update"}


def test_arrays_without_dense_rows_are_described_as_the_copies_that_kernels_get():
    odd = spec(2, 5, 4, 16, strides=(640, 128, 32, 2), aligned=False)
    assert copies(dense(q=odd).x) == ("q is copied: its last dim has stride 2",)
    assert describe(dense(q=odd)) == describe(dense())
    off = spec(2, 5, 4, 16, aligned=False)
    assert describe(dense(q=off)) == replace(describe(dense()), aligned=False)
    assert not copies(dense(q=off).x)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8"])
def test_a_cache_is_described_by_the_dtype_that_it_is_stored_in(dtype):
    given = {"q": spec(2, 1, 4, 16, dtype="bfloat16"), "k": None, "v": None}
    given |= {f"{x}_cache": spec(2, 12, 2, 16, dtype=dtype) for x in "kv"}
    made, _ = cached(**given, **{f"{x}_descale": spec(2, 2) for x in "kv"})
    assert (describe(made).dtype, describe(made).kv_dtype) == ("bfloat16", dtype)


def latent(**changes) -> tuple[AttentionCall, CacheUpdate]:
    """A call over rows of latent vectors, into which new ones are written."""
    given = {"q": spec(2, 1, 4, 576, dtype="bfloat16"), "k_cache": spec(2, 12, 1, 656)}
    rows = spec(2, 12, 1, 656, dtype="uint8", strides=changes.pop("strides", None))
    given |= {"k_cache": rows, "v_cache": rows, "k": spec(2, 1, 1, 576, dtype="bfloat16")}
    return cached(**{**given, "v": spec(2, 1, 1, 512, dtype="bfloat16"), **changes})


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_of_bytes_hold_whole_floats_where_they_are_written(axis):
    strides = [13 * 660, 660, 656, 1]
    assert check_cache(*latent(strides=tuple(strides))).kv_dtype == "fp8_ds_mla"
    strides[axis] += 2
    with pytest.raises(ValueError, match="^k_cache must have rows at multiples of 4 bytes"):
        check_cache(*latent(strides=tuple(strides)))


STORED = {f"{x}_cache": spec(2, 12, 2, 16, dtype="int8") for x in "kv"}
STORED |= {f"{x}_descale": spec(2, 2) for x in "kv"}


@pytest.mark.parametrize(
    "given, words",
    [
        (
            {"k": spec(2, 1, 2, 16, dtype="float16")},
            "k must be int8 like k_cache (quantize_kv makes it) or bfloat16 like q, got float16",
        ),
        (
            {"k": spec(2, 1, 2, 16, dtype="bfloat16")},
            "v must be bfloat16 like q, as k is, got int8",
        ),
        (
            {"v": spec(2, 1, 2, 16, dtype="bfloat16")},
            "v must be int8 like v_cache, as k is, got bfloat16",
        ),
    ],
)
def test_new_keys_come_as_they_are_stored_or_as_queries_are(given, words):
    plain = {"q": spec(2, 1, 4, 16, dtype="bfloat16"), **STORED}
    plain |= {x: spec(2, 1, 2, 16, dtype="int8") for x in "kv"}
    assert check_cache(*cached(**plain)).kv_dtype == "int8"
    with pytest.raises(TypeError) as caught:
        check_cache(*cached(**{**plain, **given}))
    assert str(caught.value) == words


def test_queries_of_8_bits_take_new_keys_as_they_are_stored_alone():
    e4m3 = {"dtype": "float8_e4m3fn"}
    given: dict[str, Any] = {"q": spec(2, 1, 4, 16, **e4m3), "k": spec(2, 1, 2, 16)}
    given |= {f"{x}_cache": spec(2, 12, 2, 16, **e4m3) for x in "kv"}
    with pytest.raises(TypeError) as caught:
        check_cache(*cached(**given, v=spec(2, 1, 2, 16)))
    words = "k must be float8_e4m3fn like k_cache (quantize_kv makes it), got float32"
    assert str(caught.value) == words


def test_scales_that_are_written_are_contiguous():
    plain = {"q": spec(2, 1, 4, 16, dtype="bfloat16"), **STORED}
    plain |= {x: spec(2, 1, 2, 16, dtype="int8") for x in "kv"}
    plain |= {x: spec(2, 1, 2, 16, dtype="bfloat16") for x in "kv"}
    scales = {f"{x}_descale": spec(2, 12, 2, 2) for x in "kv"}
    assert check_cache(*cached(**plain | scales)).kv_group == 8
    for name in ("k_descale", "v_descale"):
        apart = scales | {name: spec(2, 12, 2, 2, strides=(96, 8, 4, 2))}
        with pytest.raises(ValueError, match=f"^{name} must have a contiguous last dim, as it is"):
            check_cache(*cached(**plain | apart))
    # One group: its stride says nothing.
    one = {f"{x}_descale": spec(2, 12, 2, 1, strides=(96, 8, 4, 2)) for x in "kv"}
    assert check_cache(*cached(**plain | one)).kv_group == 16


def test_a_prefix_is_refused_where_no_bit_may_depend_on_how_a_call_is_made():
    prefix = {"shared_prefix": (spec(4, 2, 16), spec(4, 2, 8))}
    given, update = cached(**prefix)
    check_cache(given, update)
    backend = with_numerics(None, "invariant")
    invariant = given._replace(options=given.options._replace(backend=backend))
    with pytest.raises(ValueError, match="^shared_prefix must be None with numerics='invariant'"):
        check_cache(invariant, update)


@pytest.mark.parametrize("longest", ["max_seqlen_q", "max_seqlen_k"])
def test_a_window_of_any_size_is_taken_where_packed_tokens_are_few(longest):
    """max_seqlen_* may say more than there are."""
    wide = {"window_size": (2**29, 2**29)}
    made = describe(varlen(**wide, **{longest: 2**30}))
    assert not made.mask.bounded
    long = dict(zip("qkv", (spec(2**29 + 1, 4, 16), spec(7, 2, 16), spec(7, 2, 8)), strict=True))
    with pytest.raises(ValueError, match="window_size"):
        describe(varlen(**wide, **long, max_seqlen_q=2**30))


def test_a_seed_has_64_bits_and_a_sign_or_none():
    for seed in (-(2**63), -1, 0, 2**63, 2**64 - 1):
        check_seed(seed)
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(ValueError, match=f"^dropout_seed must fit 64 bits, got {seed}$"):
            check_seed(seed)


@pytest.mark.parametrize("given", [("sink", "s_aux"), ("s_aux", "learnable_sink"), ("sink",)])
def test_a_sink_has_one_of_three_names(given):
    named = {name: f"the {name}" for name in given}
    values = [named.get(name) for name in ("sink", "s_aux", "learnable_sink")]
    if len(given) == 1:
        assert one_sink(*values) == named[given[0]] and one_sink(None, None, None) is None
        return
    words = f"^sink must be given by one of its names, got {given[0]} and {given[1]}$"
    with pytest.raises(TypeError, match=words):
        one_sink(*values)


@pytest.mark.parametrize("shape, before", [((4, 2, 16), 4), ((1, 4, 2, 16), 4), (None, 0)])
def test_positions_of_a_cache_begin_behind_a_shared_prefix(shape, before):
    prefix = None if shape is None else (spec(*shape), spec(*shape))
    assert cached(shared_prefix=prefix)[1].position0 == before


E4M3: dict[str, Any] = {"dtype": "float8_e4m3fn"}
SMALL = {"q": spec(2, 5, 4, 16, **E4M3), **dict.fromkeys("kv", spec(2, 7, 2, 16, **E4M3))}


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_scales_of_heads_are_one_or_have_a_place_for_each(name):
    for shape in ((), (1,), (2, 2)):
        describe(dense(**SMALL, **{f"{name}_descale": spec(*shape)}))
    for shape in ((2,), (2, 4), (1, 1), (5, 2)):
        with pytest.raises(
            ValueError, match=f"^{name}_descale must have shape .. or .batch, heads"
        ):
            describe(dense(**SMALL, **{f"{name}_descale": spec(*shape)}))
    with pytest.raises(TypeError, match=f"^{name}_descale must be float32, got float16"):
        describe(dense(**SMALL, **{f"{name}_descale": spec(2, 2, dtype="float16")}))


@pytest.mark.parametrize(
    "scales, words",
    [
        ({"k": 4, "v": 8}, "v_descale must share as many values a scale as k_descale, got 2 and 4"),
        ({"k": 4, "v": 0}, "v_descale must share as many values .*, got a head and 4"),
        ({"k": 3, "v": 3}, "k_descale must have groups that divide 16, got 3"),
        ({"k": 4}, "v_descale must be given with k_descale, got None"),
        ({"v": 4}, "k_descale must be given with v_descale, got None"),
    ],
    ids=str,
)
def test_keys_and_values_have_scales_of_groups_of_one_size(scales, words):
    given = {"q": spec(2, 1, 4, 16, dtype="bfloat16"), "k": None, "v": None, "cache_seqlens": None}
    given |= {f"{x}_cache": spec(2, 12, 2, 16, dtype="int8") for x in "kv"}
    shapes = {x: (2, 12, 2, n) if n else (2, 2) for x, n in {"k": 4, "v": 4}.items()}
    made = describe(cached(**given, **{f"{x}_descale": spec(*s) for x, s in shapes.items()})[0])
    assert made.kv_group == 4
    shapes = {x: (2, 12, 2, n) if n else (2, 2) for x, n in scales.items()}
    with pytest.raises(ValueError, match=f"^{words}"):
        describe(cached(**given, **{f"{x}_descale": spec(*s) for x, s in shapes.items()})[0])


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_window_of_2_to_the_29_and_more_is_told_from_none_by_the_longer_side(side):
    """A window of FAR hides nothing of shorter sequences, and is refused beside longer ones."""
    wide, long = {"window_size": (2**29, 2**29)}, {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16)}
    assert not describe(dense(**wide)).mask.bounded
    long[side] = (2, 2**29 + 2, *long[side][2:])
    given = {name: spec(*shape) for name, shape in long.items()}
    given["v"] = spec(*long["k"][:3], 8)
    with pytest.raises(ValueError, match="^window_size"):
        describe(dense(**wide, **given))
