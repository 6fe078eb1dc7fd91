"""New tokens that come to JAX as values for a quantised cache are stored as PyTorch stores them, to
the bit, and scales that are written are returned.

Products of 16-bit numbers are exact in float32, so rotations have the same bits however XLA fuses
them.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402
import heedful.torch as ht  # noqa: E402
from heedful.jax.traced.cache_update import rotate  # noqa: E402
from support.problems.grids import in_turns  # noqa: E402
from support.runs.jax_backend import as_array, as_tensor  # noqa: E402

BATCH, CAPACITY, NEW, HEADS, DIM, DIM_V = 4, 24, 3, 2, 32, 16
STORED = ("int4", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
CACHES, TABLES = ("k_cache", "v_cache"), ("rotary_cos", "rotary_sin")
SCALES = ("k_descale", "k_shift", "v_descale", "v_shift")
STEP: Any = partial(hj.flash_attn_with_kvcache, causal=True)
# One sequence has no tokens, one no room for another.
LENGTHS = (5, -1, 11, CAPACITY - NEW)

Arrays = dict[str, Any]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(dtype: torch.dtype = torch.bfloat16, columns: int = 8) -> Arrays:
    """Queries, new tokens, where they go, and rotary tables of so many columns."""
    shapes: dict[str, tuple[int, ...]] = {"q": (BATCH, NEW, 2 * HEADS, DIM)}
    shapes |= {"k": (BATCH, NEW, HEADS, DIM), "v": (BATCH, NEW, HEADS, DIM_V)}
    shapes |= {n: (CAPACITY, columns) for n in TABLES} if columns else {}
    made: Arrays = {n: drawn(*s, seed=i).to(dtype) for i, (n, s) in enumerate(shapes.items())}
    # A group of zeros has a scale of 1. Not of keys: signs of zeros that are rotated differ, and
    # the least of them may be either.
    made["v"][0, 1] = 0
    return made | {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}


def caches(storage: str, group: int | None, shifted: bool, page_size: int = 0) -> Arrays:
    """A full cache, and its scales of groups, if there are any."""
    rows = (BATCH * CAPACITY // page_size, page_size) if page_size else (BATCH, CAPACITY)
    made: Arrays = {}
    for seed, (name, dim) in enumerate((("k", DIM), ("v", DIM_V))):
        values = drawn(*rows, HEADS, dim, seed=10 + seed)
        parts = ht.quantize_kv(values, storage, group, shifted)
        names = (f"{name}_cache", f"{name}_descale", f"{name}_shift")[: 3 if group else 1]
        made |= {n: part for n, part in zip(names, parts, strict=False) if part is not None}
    if page_size:
        order = torch.randperm(rows[0], generator=torch.Generator().manual_seed(1))
        made["block_table"] = order.int().view(BATCH, -1)
    return made


def head_scales(given: str) -> Arrays:
    """The scales that all of a head's values share."""
    rows = drawn(BATCH, HEADS, seed=20).abs() + 0.1
    scale, shift = {
        "none": (None, None),
        "one": (torch.tensor(0.3), None),
        "heads": (rows, None),
        "shifted": (rows, torch.tensor([0.1])),
    }[given]
    made = {f"{name}_descale": scale for name in "kv"} | {f"{name}_shift": shift for name in "kv"}
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def as_jax(given: Arrays) -> Arrays:
    return {name: jnp.asarray(as_array(tensor)) for name, tensor in given.items()}


def stored_by_torch(given: Arrays) -> Arrays:
    """Caches and scales after the step of PyTorch, which writes them in place."""
    given = {name: tensor.clone() for name, tensor in given.items()}
    ht.flash_attn_with_kvcache(**given, causal=True)
    return {name: given[name] for name in (*CACHES, *SCALES) if name in given}


def named(results: tuple, given: Arrays) -> Arrays:
    """What a step that writes scales of groups returns, by name."""
    scales = [name for name in SCALES if name in given]
    return dict(zip(("out", *CACHES, *scales), results, strict=True))


def same_bits(one, tensor: torch.Tensor) -> bool:
    other = as_tensor(one)
    is_alike = other.dtype == tensor.dtype and other.shape == tensor.shape
    return is_alike and torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))


def check_stored(got: Arrays, want: Arrays) -> None:
    assert all(same_bits(got[name], tensor) for name, tensor in want.items()), {
        name: int((as_tensor(got[name]) != tensor).sum()) for name, tensor in want.items()
    }


def check_read(got: Arrays, given: Arrays) -> None:
    """The step attends over what it stored, with its queries rotated."""
    start = given["cache_seqlens"]
    q = given["q"]
    if "rotary_cos" in given:
        q = jax.jit(rotate, static_argnums=4)(
            q, given["rotary_cos"], given["rotary_sin"], start, True
        )
    rest = {n: a for n, a in given.items() if n not in ("k", "v", "rotary_cos", "rotary_sin")}
    rest |= {name: got[name] for name in (*CACHES, *SCALES) if name in got}
    rest |= {"q": q, "cache_seqlens": jnp.where(start < 0, start, start + NEW)}
    out, *_ = jax.jit(STEP)(**rest)
    np.testing.assert_array_equal(np.asarray(out, "float32"), np.asarray(got["out"], "float32"))
    assert not np.asarray(got["out"], "float32")[LENGTHS.index(-1)].any()


def jitted(storage: str) -> Callable:
    """A step under jit. The emitters that tests/cpu/conftest.py asks for round a number in 200,000
    to e4m3fnuz otherwise than XLA does by default."""
    has_choice = "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]
    own = {"xla_cpu_use_fusion_emitters": True}
    return jax.jit(STEP, compiler_options=own if has_choice and "fnuz" in storage else None)


@pytest.mark.parametrize(
    ("storage", "case"),
    in_turns(STORED, [(8, False, 8), (8, True, 0), (16, False, 0), (16, True, 8)]),
    ids=str,
)
def test_groups_and_their_scales_are_stored_as_pytorch_stores_them(storage, case):
    """Keys are rotated first. Nothing is written for a sequence of negative length."""
    group, shifted, page_size = case
    given = tokens() | caches(storage, group, shifted, page_size)
    arrays = as_jax(given)
    got = named(jitted(storage)(**arrays), given)
    want = stored_by_torch(given)
    check_stored(got, want)
    check_read(got, arrays)
    assert len(want) == (6 if shifted else 4)
    assert not any(torch.equal(want[name], given[name]) for name in SCALES if name in given)


@pytest.mark.parametrize(
    ("storage", "case"),
    in_turns(STORED, [("none", 8), ("one", 0), ("heads", 8), ("shifted", 0)]),
    ids=str,
)
def test_scales_of_heads_are_used_and_not_returned(storage, case):
    scales, page_size = case
    given = tokens() | caches(storage, None, False, page_size) | head_scales(scales)
    arrays = as_jax(given)
    got: Arrays = dict(zip(("out", *CACHES), jitted(storage)(**arrays), strict=True))
    want = stored_by_torch(given)
    check_stored(got, {name: want[name] for name in CACHES})
    check_read(got, arrays)


@pytest.mark.parametrize(
    "scales, dtype", in_turns(["none", "heads", "groups"], [torch.float16, torch.float32])
)
def test_new_values_of_each_type_are_stored_as_pytorch_stores_them(scales, dtype):
    """Outside of jit, too."""
    given = tokens(dtype, columns=0) | caches("int8", 8 if scales == "groups" else None, True)
    given |= {} if scales == "groups" else head_scales(scales)
    for step in (STEP, jax.jit(STEP)):
        got: Arrays = dict(zip(("out", *CACHES, *SCALES), step(**as_jax(given)), strict=False))
        want = stored_by_torch(given)
        check_stored(got, {name: want[name] for name in want if name in got})
        assert (len(got) == 7) == (scales == "groups")


@pytest.mark.parametrize(
    "scales, interleaved, dtype",
    in_turns(["none", "groups"], [False, True], [torch.float16, torch.bfloat16]),
    ids=str,
)
def test_keys_that_are_rotated_are_rounded_before_they_are_quantised(scales, interleaved, dtype):
    """Whole heads: nothing stands between both then that keeps a compiler from joining them."""
    given = tokens(dtype, columns=DIM // 2)
    given |= caches("int8", 8 if scales == "groups" else None, False)
    got = jax.jit(partial(STEP, rotary_interleaved=interleaved))(**as_jax(given))
    want = {name: tensor.clone() for name, tensor in given.items()}
    ht.flash_attn_with_kvcache(**want, causal=True, rotary_interleaved=interleaved)
    written = [name for name in (*CACHES, *SCALES) if name in given]
    check_stored(dict(zip(written, got[1:], strict=True)), {n: want[n] for n in written})


def test_a_scale_that_the_program_knows_divides_as_any_other():
    """XLA would multiply by its reciprocal, which rounds twice."""
    given = tokens(columns=0) | caches("int8", None, False) | head_scales("one")
    arrays = as_jax(given)
    scales = {name: arrays.pop(name) for name in SCALES if name in arrays}
    _, *got = jax.jit(lambda arrays: STEP(**arrays, **scales))(arrays)
    want = stored_by_torch(given)
    check_stored(dict(zip(CACHES, got, strict=True)), {name: want[name] for name in CACHES})


def test_scales_follow_a_log_sum_exp_and_go_where_the_caches_go():
    """Into rows by index, behind a left padding; halves of keys are rotated."""
    given = tokens() | caches("int4", 8, True)
    given |= {
        "cache_batch_idx": torch.tensor([3, 0, 2, 1], dtype=torch.int32),
        "cache_leftpad": torch.tensor([2, 0, 1, 0], dtype=torch.int32),
    }
    more: Arrays = {"window_size": (9, 0), "rotary_interleaved": False}
    more |= {"return_softmax_lse": True}
    out, lse, *rest = jax.jit(partial(hj.flash_attn_with_kvcache, **more))(**as_jax(given))
    assert out.shape == (BATCH, NEW, 2 * HEADS, DIM_V) and lse.shape == (BATCH, 2 * HEADS, NEW)
    want = {name: tensor.clone() for name, tensor in given.items()}
    ht.flash_attn_with_kvcache(**want, **more)
    written = (*CACHES, *SCALES)
    check_stored(dict(zip(written, rest, strict=True)), {name: want[name] for name in written})


def test_values_that_come_stored_are_stored_as_they_are_and_no_scale_is_returned():
    given = tokens(columns=0) | caches("int8", 8, True)
    for name in "kv":
        given[name] = ht.quantize_kv(given[name], "int8", 8, True)[0]
    arrays = as_jax(given)
    _, *got = jax.jit(STEP)(**arrays)
    want = stored_by_torch(given)
    check_stored(dict(zip(CACHES, got, strict=True)), {name: want[name] for name in CACHES})


def test_scales_are_returned_where_no_token_is_new():
    given = tokens(columns=0) | caches("int8", 8, True)
    given |= {name: given[name][:, :0] for name in "kv"}
    got = named(jax.jit(STEP)(**as_jax(given)), given)
    check_stored(got, {name: given[name] for name in (*CACHES, *SCALES)})


def test_donated_caches_and_scales_are_extended_in_place_and_others_stay_as_they_are():
    """All caches, and all scales, of one type: JAX pairs what is donated with results by type."""
    given = tokens() | caches("int4", 8, True)
    for kind in ("", "_cache", "_descale", "_shift"):
        given[f"v{kind}"] = given[f"k{kind}"].flip(0)
    arrays = as_jax(given)
    written = {name: arrays[name] for name in (*CACHES, *SCALES)}
    copied = named(jax.jit(STEP)(**arrays), given)
    check_stored(written, {name: given[name] for name in written})
    places = {name: array.unsafe_buffer_pointer() for name, array in written.items()}
    donated = named(jax.jit(STEP, donate_argnames=tuple(written))(**arrays), given)
    assert {name: donated[name].unsafe_buffer_pointer() for name in places} == places
    assert all(array.is_deleted() for array in written.values())
    want = stored_by_torch(given)
    check_stored(copied, want)
    check_stored(donated, want)


def mesh_of_four():
    """Batch and heads over two devices each."""
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("b", "h"))


# How arrays lie on that mesh.
ROWS = ("b", None, "h")
PAGES = (None, None, "h")


def spread(mesh, given: Arrays, is_paged: bool) -> Arrays:
    """Arrays by name, each where its batch entries and heads are."""

    def spec(name: str, array):
        if name.startswith("rotary") or array.ndim < 2:
            return ("b",) if name == "cache_seqlens" else ()
        if name == "block_table" or (name in SCALES and array.ndim == 2):
            return ("b", "h") if name in SCALES else ("b",)
        return PAGES if is_paged and name in (*CACHES, *SCALES) else ROWS

    return {
        name: jax.device_put(
            array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec(name, array)))
        )
        for name, array in given.items()
    }


@pytest.mark.parametrize("scales, page_size", in_turns(["groups", "heads", "one"], [0, 8]))
def test_sharded_caches_and_scales_are_extended_where_they_are(scales, page_size):
    """Pages are shared by all sequences: heads alone are spread then."""
    group = 8 if scales == "groups" else None
    given = tokens() | caches("int8", group, True, page_size)
    given |= {} if group else head_scales(scales)
    mesh, arrays = mesh_of_four(), as_jax(given)
    rows = spread(mesh, arrays, bool(page_size))
    run = jax.jit(STEP)
    want, got = run(**arrays), run(**rows)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, want)
    assert len(got) == (7 if group else 3)
    for array in got[1:]:
        assert array.sharding.spec[2] == "h"
        assert page_size or array.sharding.spec[0] == "b"
    if not page_size:
        assert "all-gather" not in run.lower(**rows).compile().as_text()


def test_shards_of_shard_map_extend_what_they_have():
    given = as_jax(tokens() | caches("int8", 8, True))
    spec = jax.sharding.PartitionSpec
    specs = {name: spec(*ROWS) for name in given}
    specs |= {"cache_seqlens": spec("b"), "rotary_cos": spec(), "rotary_sin": spec()}
    run = jax.shard_map(
        lambda given: STEP(**given),
        mesh=mesh_of_four(),
        in_specs=(specs,),
        out_specs=(spec(*ROWS),) * 7,
    )
    want, got = jax.jit(STEP)(**given), jax.jit(run)(given)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, want)


def test_vmap_writes_each_elements_scales():
    given = as_jax(tokens() | caches("int8", 8, True))
    both = {name: jnp.stack([array, array[::-1]]) for name, array in given.items()}
    got = jax.vmap(lambda given: STEP(**given))(both)
    want = [STEP(**{name: array[i] for name, array in both.items()}) for i in range(2)]
    for i in range(2):
        for one, other in zip(got[1:], want[i][1:], strict=True):
            np.testing.assert_array_equal(one[i], other)


def test_vmap_over_some_of_the_arrays_leaves_the_others_to_every_element():
    """One of them along another axis than the first."""
    given = as_jax(tokens() | caches("int8", 8, True))
    axes: dict[str, Any] = dict.fromkeys(given) | {"k": 2, "v_cache": 0}
    both = {
        name: array if axes[name] is None else jnp.stack([array, array[::-1]], axes[name])
        for name, array in given.items()
    }
    got = jax.vmap(lambda given: STEP(**given), in_axes=(axes,))(both)
    for i in range(2):
        own = {n: a if axes[n] is None else jnp.take(a, i, axes[n]) for n, a in both.items()}
        for one, other in zip(got[1:], STEP(**own)[1:], strict=True):
            np.testing.assert_array_equal(one[i], other)


BAD = {
    "k_descale, groups": ("k_descale", lambda t: torch.ones(*t.shape[:-1], 3)),
    "v_descale, rows": ("v_descale", lambda t: t[:, 1:]),
    "v_descale, values a group": ("v_descale", lambda t: t[..., :1]),
    "k_shift, shape": ("k_shift", lambda t: t[..., :1]),
    "v_descale, dtype": ("v_descale", lambda t: t.half()),
    "v_shift, dtype": ("v_shift", lambda t: t.bfloat16()),
    "k_descale, absent": ("k_descale", lambda t: None),
    "k, dtype": ("k", lambda t: t.half()),
    "v, stored": ("v", lambda t: t.to(torch.int8)),
    "v, head dim": ("v", lambda t: t[..., :8]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_stored_raises_what_pytorch_raises(name):
    argument, changed = BAD[name]
    given = tokens() | caches("int8", 8, argument.endswith("shift"))
    given[argument] = changed(given[argument])
    given = {n: t for n, t in given.items() if t is not None}
    with pytest.raises((TypeError, ValueError)) as theirs:
        ht.flash_attn_with_kvcache(**given)
    with pytest.raises((TypeError, ValueError)) as ours:
        hj.flash_attn_with_kvcache(**as_jax(given))
    assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))
    assert str(ours.value).startswith(argument)
