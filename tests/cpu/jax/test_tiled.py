"""JAX's tiled backend is attention, feature by feature, and linear in memory."""

from dataclasses import replace

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

from heedful.jax import flash_attn_func  # noqa: E402
from heedful.jax.tiled import philox  # noqa: E402
from heedful.reference.philox import keep_mask  # noqa: E402
from support.problems.budget import run  # noqa: E402
from support.problems.cases import Case, variants  # noqa: E402
from support.problems.grids import covering  # noqa: E402
from support.runs import jax_backend  # noqa: E402

SHORT = Case(heads_q=6, heads_k=2, head_dim=24, head_dim_v=8)
LONG = Case(batch=1, seqlen_q=301, seqlen_k=611, heads_q=2, heads_k=1, head_dim=16)
ALL: dict = dict(softcap=4.0, alibi="bh", bias="hqk", sink=True, dropout_p=0.15, window=(60, 3, 2))
BLOCKS = [
    *variants(SHORT, rel_bias=[1, 2, 9, 400]),
    replace(LONG, rel_bias=257, causal=True, dtype="bfloat16"),
    replace(
        SHORT, rel_bias=33, heads_q=6, varlen="qk", used="qk", batch=3, softcap=3.0, bias="hqk"
    ),
    replace(SHORT, rel_bias=8, window=(9, 3), dropout_p=0.2, alibi="h"),
    *variants(replace(SHORT, block_mask=32), ranges_of=["", "b", "h", "bh"], causal=[True]),
    replace(SHORT, block_mask=64, window=(9, 17, 3), sink=True, leftpad_k=True, used="qk"),
    replace(SHORT, block_mask=32, key_ranges=2, dropout_p=0.2, bias="hqk", alibi="h", softcap=3.0),
    replace(LONG, block_mask=128, causal=True, num_splits=3),
    replace(LONG, block_mask=32, dtype="bfloat16", seqlen_k=0),
    replace(SHORT, block_mask=32, varlen="qk", used="qk", ranges_of="bh", causal=True, batch=3),
    replace(SHORT, block_mask=32, varlen="q", page_size=16, key_ranges=1, softcap=3.0),
    replace(SHORT, block_mask=32, page_size=7, leftpad_k=True, tree_mask=True, sink=True),
    replace(SHORT, block_mask=32, kv_batch_idx=True, used="k", ranges_of="h"),
]
RANGES = [
    *variants(SHORT, key_ranges=[1, 2]),
    *variants(replace(SHORT, key_ranges=1), causal=[True], ranges_of=["h", ""], varlen=["qk"]),
    replace(SHORT, key_ranges=2, ranges_of="bh", window=(9, 17, 3), sink=True, leftpad_k=True),
    replace(SHORT, key_ranges=1, page_size=16, used="qk", dropout_p=0.2, bias="hqk", alibi="h"),
    replace(SHORT, key_ranges=2, varlen="q", page_size=16, causal=True, softcap=3.0),
    replace(LONG, key_ranges=2, causal=True, return_probs=True, num_splits=3),
    replace(LONG, key_ranges=1, dtype="bfloat16", seqlen_k=0),
]
CASES = [
    *RANGES,
    *BLOCKS,
    Case(**ALL, varlen="qk", used="qk", heads_q=4),
    Case(**ALL, varlen="qk", q_offsets=True, heads_q=4, rel_bias=9, batch=3),
    Case(causal=True, q_offsets=True, batch=4, key_ranges=1, block_mask=32),
    Case(**ALL, page_size=8, leftpad_k=True, heads_q=4, tree_mask=True),
    Case(**ALL, kv_batch_idx=True, used="k", layout="offset", return_probs=True),
    Case(scale=-0.4, window=(0, 0), alibi="h", bias="bk", varlen="q", head_dim=1, used="q"),
    Case(dropout_p=1.0, bias="q", varlen="k", shift=31, causal=True, batch=5),
    Case(bottom_right=False, causal=True, seqlen_q=90, bias="bhqk", num_splits=3),
    Case(dropout_p=0.3, dropout_origin=(7, 2**32 - 1, 5, 3), return_probs=True, heads_q=4),
    Case(dtype="float8_e4m3fn", causal=True, varlen="q", heads_q=4, backward=False),
    Case(dtype="float8_e4m3fnuz", heads_q=4, backward=False),
    Case(kv_dtype="int8", kv_group=8, kv_shift=True, backward=False, heads_q=4),
    Case(kv_dtype="int8", backward=False, kv_batch_idx=True, used="k"),
    Case(kv_dtype="int4", kv_group=16, kv_shift=True, backward=False, page_size=7),
    Case(kv_dtype="float8_e5m2", backward=False, dtype="bfloat16", varlen="qk"),
    Case(kv_dtype="float8_e4m3fn", backward=False, dtype="bfloat16", varlen="q", page_size=4),
    *variants(SHORT, seqlen_k=[0], seqlen_q=[0, 1], batch=[0]),
    *variants(LONG, window=[(99, 20, 5)], causal=[True], num_splits=[100]),
    *variants(LONG, dtype=["float16", "bfloat16"], sink=[True]),
]


@pytest.mark.parametrize("case", covering(CASES), ids=str)
def test_a_case_is_within_its_error_budget(case):
    run(jax_backend, case)


@pytest.mark.parametrize("seed", [0, 2**64 - 1, 0x123456789ABCDEF0])
def test_the_dropout_mask_is_that_of_the_reference_bit_for_bit(seed):
    origin, batch = (2**32 - 2, 9, 2**32 - 5, 2**30 * 4 - 3), 4
    words = jnp.array([seed & 0xFFFFFFFF, seed >> 32], jnp.uint32)
    index = lambda n, o: jnp.arange(n, dtype=jnp.uint32) + jnp.uint32(o)  # noqa: E731
    places = [index(n, o) for n, o in zip((3, 17, 29), origin[1:], strict=True)]
    got = philox.keep_tile(words, 0.37, jnp.uint32(batch + origin[0] & 0xFFFFFFFF), *places)
    assert np.array_equal(got, keep_mask(seed, 0.37, batch, 3, 17, 29, origin))


def test_the_known_answer_of_philox():
    zero = jnp.zeros((), jnp.uint32)
    words = philox.philox4x32((zero, zero), (zero,) * 4, ())
    assert [hex(int(w)) for w in words] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_memory_is_linear_in_the_lengths():
    """Scratch of a call and its gradient, of twice the tokens: about twice as much, and far below
    one matrix of scores."""
    sizes = []
    for seqlen in (2048, 4096):
        q = jax.ShapeDtypeStruct((1, seqlen, 2, 16), jnp.float32)
        loss = lambda q, k, v: flash_attn_func(q, k, v, causal=True).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] < 2.2 * sizes[0]
    assert sizes[1] < 2 * 4096 * 4096 * 4 / 4


def test_all_probabilities_are_kept_or_none_and_the_others_weigh_more():
    """At 1 nothing is kept, and nothing is divided by."""
    assert [philox.keep_scale(p) for p in (0.0, 0.5, 0.75, 1.0)] == [1.0, 2.0, 4.0, 0.0]
    assert [philox.keep_threshold(p) for p in (0.0, 0.25, 1.0)] == [2**32, 3 * 2**30, 0]
    seed, few = jnp.array([1, 2], jnp.uint32), jnp.arange(3, dtype=jnp.uint32)
    for p, kept in ((0.0, True), (1.0, False)):
        tile = philox.keep_tile(
            seed, p, jnp.uint32(0), few[:2], few, jnp.arange(5, dtype=jnp.uint32)
        )
        assert tile.shape == (2, 3, 5) and tile.dtype == bool and (tile == kept).all()
