"""What JAX's functions refuse is refused in a sentence that names the argument and what was got."""

from typing import Any

import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402
from heedful.core.call.arguments import Options  # noqa: E402
from heedful.core.call.operands import Operands  # noqa: E402
from heedful.jax import compat  # noqa: E402
from heedful.jax.distributed.attention import STRATEGIES, _check  # noqa: E402
from heedful.jax.distributed.layouts import axes_of, chunk_size, chunks_of  # noqa: E402
from heedful.jax.operands import plain  # noqa: E402
from heedful.jax.traced.call import check_arrays, run  # noqa: E402
from support.golden.refusals import each_refusal  # noqa: E402

f32, i32 = jnp.float32, jnp.int32
text: Any = "text"
half: Any = 2.5
two: Any = 2


def z(*shape: int, dtype: Any = f32) -> Any:
    return jnp.zeros(shape, dtype)


Q, K = z(2, 5, 4, 8), z(2, 7, 2, 8)
ROWS = z(9, 4, 8)
LSE, OUTS, LSES = z(2, 4, 5), z(3, 2, 5, 4, 8), z(3, 2, 4, 5)
BOUNDS = jnp.arange(3, dtype=i32)


def traced(call):
    """The call, of a number that is not known."""
    return lambda: jax.make_jaxpr(call)(jnp.int32(1))


def symbolic(call):
    """The call, of a size that is not known."""
    (length,) = jax.export.symbolic_shape("length")
    return lambda: jax.eval_shape(call, jax.ShapeDtypeStruct((2, length, 4, 8), f32))


def nn(*arrays, **more):
    return lambda: hj.dot_product_attention(*(arrays or (Q, K, K)), **more)


def merged(outs=OUTS, lses=LSES, sink=None):
    return lambda: hj.merge_attn_states(outs, lses, sink)


def into(**more):
    given = {"out": Q, "lse": LSE, "part": Q[:, :2], "part_lse": LSE[..., :2]} | more
    return lambda: hj.merge_into(**given)


def padded(**more):
    given: dict[str, Any] = {
        "q": Q,
        "k": K,
        "v": K,
        "cu_seqlens_q": BOUNDS,
        "cu_seqlens_kv": BOUNDS,
    }
    return lambda: compat.flash_attn_func(**given | more)


def cached(**more):
    given: dict[str, Any] = {"q": Q[:, :1], "k_cache": K, "v_cache": K} | more
    return lambda: hj.flash_attn_with_kvcache(**given)


def documents(**more):
    given = {
        "q": ROWS,
        "k": ROWS,
        "v": ROWS,
        "cu_seqlens": BOUNDS,
        "max_seqlen": 9,
        "dropout_p": 0.0,
    }
    return lambda: _check(**given | more)


def backward(**more):
    given: dict[str, Any] = {"dout": Q, "q": Q, "k": K, "v": K, "out": Q, "lse": LSE} | more
    return lambda: hj.attention_backward(**given)


NEW = {"k": K[:, :1], "v": K[:, :1], "cache_seqlens": 3}
TABLES = {"rotary_cos": z(4, 4), "rotary_sin": z(4, 4)}

TYPES = [
    (
        lambda: check_arrays(Operands(Q, Q, None), Options("dense")),
        "v must be a jax.Array, got NoneType (None)",
    ),
    (
        lambda: check_arrays(Operands(Q, Q, Q, sink=text), Options("dense")),
        "sink must be a jax.Array, got str ('text')",
    ),
    (
        lambda: check_arrays(Operands(Q, Q, Q, kv_batch_idx=text), Options("kvcache")),
        "cache_batch_idx must be a jax.Array, got str ('text')",
    ),
    (lambda: hj.quantize_kv(text, "int8"), "x must be a jax.Array, got str ('text')"),
    (
        lambda: hj.quantize_kv(z(2, 8, dtype=i32), "int8"),
        "x must be float16 or bfloat16 or float32, got int32",
    ),
    (
        lambda: hj.quantize_kv(z(2, 8), "int8", half),
        "group_size must be an int or None, got float (2.5)",
    ),
    (lambda: hj.quantize_kv(z(2, 8), "int8", None, two), "asymmetric must be a bool, got int (2)"),
    (lambda: hj.dequantize_kv(text, z(2, 1)), "packed must be a jax.Array, got str ('text')"),
    (
        lambda: hj.dequantize_kv(z(2, 8), z(2, 1)),
        "packed must be uint8 or int8 or float8_e4m3fn or float8_e4m3fnuz or"
        " float8_e5m2, got float32",
    ),
    (
        lambda: hj.dequantize_kv(z(2, 8, dtype="int8"), text),
        "scale must be a jax.Array, got str ('text')",
    ),
    (
        lambda: hj.dequantize_kv(z(2, 8, dtype="int8"), z(2, 1, dtype="float16")),
        "scale must be float32, got float16",
    ),
    (
        lambda: hj.dequantize_kv(z(2, 8, dtype="int8"), z(2, 1), text),
        "shift must be a jax.Array, got str ('text')",
    ),
    (
        lambda: hj.dequantize_kv(z(2, 8, dtype="int8"), z(2, 1), z(2, 1, dtype="float16")),
        "shift must be float32, got float16",
    ),
    (
        lambda: hj.dequantize_kv(z(2, 8, dtype="int8"), z(2, 1), None, "int8"),
        "dtype must be float16, bfloat16 or float32, got int8",
    ),
    (lambda: hj.pack_latent(text), "x must be a jax.Array, got str ('text')"),
    (
        lambda: hj.pack_latent(z(2, 576, dtype=i32)),
        "x must be float16 or bfloat16 or float32, got int32",
    ),
    (lambda: hj.unpack_latent(text), "packed must be a jax.Array, got str ('text')"),
    (lambda: hj.unpack_latent(z(2, 656)), "packed must be uint8, got float32"),
    (
        lambda: hj.unpack_latent(z(2, 656, dtype="uint8"), "int8"),
        "dtype must be float16, bfloat16 or float32, got int8",
    ),
    (nn(text, K, K), "query must be a jax.Array, got str ('text')"),
    (nn(Q, text, K), "key must be a jax.Array, got str ('text')"),
    (nn(Q, K, text), "value must be a jax.Array, got str ('text')"),
    (nn(local_window_size="5"), "local_window_size must be an int or (left, right), got str ('5')"),
    (nn(local_window_size=(1, 2.5)), "local_window_size must be an int, got float (2.5)"),
    (nn(mask=text), "mask must be a jax.Array, got str ('text')"),
    (nn(return_residual=2), "return_residual must be a bool, got int (2)"),
    (nn(query_seq_lengths=text), "query_seq_lengths must be a jax.Array, got str ('text')"),
    (nn(query_seq_lengths=z(2)), "query_seq_lengths must be int32 or int64, got float32"),
    (nn(key_value_seq_lengths=text), "key_value_seq_lengths must be a jax.Array, got str ('text')"),
    (merged(text), "outs must be a jax.Array, got str ('text')"),
    (merged([Q, text], LSES), "outs[1] must be a jax.Array, got str ('text')"),
    (merged(OUTS.astype(i32)), "outs must be float16 or bfloat16 or float32, got int32"),
    (merged(OUTS, LSES.astype("float16")), "lses must be float32, got float16"),
    (merged(sink=text), "sink must be a jax.Array, got str ('text')"),
    (merged(sink=z(4, dtype=i32)), "sink must be float16 or bfloat16 or float32, got int32"),
    (into(out=text), "out must be a jax.Array, got str ('text')"),
    (into(part=z(2, 2, 4, 8, dtype=i32)), "part must be float16 or bfloat16 or float32, got int32"),
    (into(begin=text), "begin must be an int, got str ('text')"),
    (padded(cu_seqlens_q=text), "cu_seqlens_q must be a jax.Array, got str ('text')"),
    (padded(cu_seqlens_kv=z(3)), "cu_seqlens_kv must be int32, got float32"),
    (
        cached(cache_seqlens=2.5),
        "cache_seqlens must be an int, an int32 or int64 array or None, got float (2.5)",
    ),
    (cached(shared_prefix=(K[0], text)), "shared_prefix[1] must be a jax.Array, got str ('text')"),
    (cached(**NEW, rotary_interleaved=2), "rotary_interleaved must be a bool, got int (2)"),
    (documents(v=text), "v must be a jax.Array, got str ('text')"),
    (backward(out=None), "out must be a jax.Array, got NoneType (None)"),
    (backward(dlse=text), "dlse must be a jax.Array, got str ('text')"),
    (
        lambda: check_arrays(Operands(Q, None, Q), Options("varlen")),
        "k must be a jax.Array, got NoneType (None)",
    ),
    (
        lambda: check_arrays(Operands(Q, Q, Q), Options("varlen")),
        "cu_seqlens_q must be a jax.Array, got NoneType (None)",
    ),
    (
        lambda: check_arrays(Operands(Q, None, Q), Options("kvcache")),
        "k_cache must be a jax.Array, got NoneType (None)",
    ),
    (
        lambda: check_arrays(Operands(None, Q, Q), Options("dense")),
        "q must be a jax.Array, got NoneType (None)",
    ),
    (
        traced(lambda n: plain.origin_words((0, n, 0, 0.5))),
        "dropout_origin[3] must be an int, got float (0.5)",
    ),
    (
        lambda: plain.origin_words((0, 0, 0, hj.Quads(text))),
        "dropout_origin[3].count must be an int, got str ('text')",
    ),
    (lambda: plain.plain_int("n", 0.5), "n must be an int, got float (0.5)"),
    (lambda: plain.plain_float("n", text), "n must be a float, got str ('text')"),
    (lambda: plain.plain_flag("n", 3), "n must be a bool, got int (3)"),
    (
        traced(lambda n: plain.plain_int("n", n)),
        "n must be an int, known when it is traced, got a traced array",
    ),
    (
        traced(lambda n: plain.plain_float("n", n)),
        "n must be a float, known when it is traced, got a traced array",
    ),
    (
        traced(lambda n: plain.plain_flag("n", n)),
        "n must be a bool, known when it is traced, got a traced array",
    ),
    (
        traced(lambda n: plain.plain_options(Options("dense", window_size=(1, n)))),
        "window_size must be (left, right) or (left, right, first), each an int, known"
        " when it is traced, got a traced array",
    ),
    (
        lambda: plain.seed_words(text),
        "dropout_seed must be an int, a jax.random key, an int64 array of one element or"
        " uint32 (2,), low word first, got str ('text')",
    ),
]

VALUES = [
    (
        lambda: hj.quantize_kv(z(2, 8), "int3"),
        "dtype must be one of int4, int8, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, got int3",
    ),
    (
        lambda: hj.quantize_kv(z(2, 8), 4),
        "dtype must be one of int4, int8, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, got 4",
    ),
    (lambda: hj.quantize_kv(z(2, 8), "int8", 3), "group_size must divide head_dim 8, got 3"),
    (
        lambda: hj.dequantize_kv(z(2, 8, dtype="int8"), z(3, 1)),
        "scale must have shape (..., groups) = (2, 1), got (3, 1)",
    ),
    (
        lambda: hj.dequantize_kv(z(2, 8, dtype="int8"), z(2, 3)),
        "scale must be (..., groups) with groups that divide 8, got shape (2, 3)",
    ),
    (
        lambda: hj.dequantize_kv(z(2, 8, dtype="int8"), z(2, 1), z(2, 2)),
        "shift must have shape of scale = (2, 1), got (2, 2)",
    ),
    (lambda: hj.pack_latent(z(2, 575)), "x must be (..., 576), got shape (2, 575)"),
    (
        lambda: hj.unpack_latent(z(2, 655, dtype="uint8")),
        "packed must be (..., 656), got shape (2, 655)",
    ),
    (
        nn(Q[0, 0], K[0, 0], K[0, 0]),
        "query, key and value must all have 3 dims or 4, got (4, 8), (2, 8), (2, 8)",
    ),
    (
        nn(Q[None], K[None], K[None]),
        "query, key and value must all have 3 dims or 4, got (1, 2, 5, 4, 8), (1, 2, 7,"
        " 2, 8), (1, 2, 7, 2, 8)",
    ),
    (
        nn(Q, K[0], K),
        "query, key and value must all have 3 dims or 4, got (2, 5, 4, 8), (7, 2, 8), (2, 7, 2, 8)",
    ),
    (
        nn(Q, K, K[0]),
        "query, key and value must all have 3 dims or 4, got (2, 5, 4, 8), (2, 7, 2, 8), (7, 2, 8)",
    ),
    (nn(local_window_size=(1, 2, 3)), "local_window_size must be an int or two, got (1, 2, 3)"),
    (
        nn(query_seq_lengths=z(3, dtype=i32)),
        "query_seq_lengths must have shape (batch,) = (2,), got (3,)",
    ),
    (
        nn(key_value_seq_lengths=z(2, 1, dtype=i32)),
        "key_value_seq_lengths must have shape (batch,) = (2,), got (2, 1)",
    ),
    (
        merged([Q, K], LSES),
        "outs must hold parts of one shape and dtype, (2, 5, 4, 8) float32, got (2, 7,"
        " 2, 8) float32",
    ),
    (
        merged([Q, Q.astype("float16")], LSES),
        "outs must hold parts of one shape and dtype, (2, 5, 4, 8) float32, got (2, 5,"
        " 4, 8) float16",
    ),
    (merged([], LSES), "outs must hold at least one part, got none"),
    (merged(OUTS, []), "lses must hold at least one part, got none"),
    (merged(OUTS[:0], LSES[:0]), "outs must hold at least one part, got 0"),
    (
        merged(OUTS[0, 0], LSES),
        "outs must be (parts, batch, seqlen, heads, head_dim) or (parts, tokens, heads,"
        " head_dim), got shape (5, 4, 8)",
    ),
    (
        merged(OUTS, LSES[:, :1]),
        "lses must have shape (parts, batch, heads, seqlen) = (3, 2, 4, 5), got (3, 1, 4, 5)",
    ),
    (
        merged(OUTS[:, 0], LSES),
        "lses must have shape (parts, heads, tokens) = (3, 4, 5), got (3, 2, 4, 5)",
    ),
    (merged(sink=z(3)), "sink must have shape (heads,) = (4,), got (3,)"),
    (
        into(out=Q[0, 0]),
        "out must be (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), got"
        " shape (4, 8)",
    ),
    (into(lse=LSE[:, :1]), "lse must have shape (batch, heads, seqlen) = (2, 4, 5), got (2, 1, 5)"),
    (into(out=Q[0], lse=LSE), "lse must have shape (heads, seqlen) = (4, 5), got (2, 4, 5)"),
    (
        into(part=Q[0]),
        "part must have shape (batch, rows, heads, head_dim) of out = (2, 0, 4, 8), got (5, 4, 8)",
    ),
    (
        into(part=z(2, 2, 4, 9)),
        "part must have shape (batch, rows, heads, head_dim) of out = (2, 2, 4, 8), got"
        " (2, 2, 4, 9)",
    ),
    (
        into(part_lse=LSE),
        "part_lse must have shape (batch, heads, rows) = (2, 4, 2), got (2, 4, 5)",
    ),
    (
        into(out=Q[0], lse=LSE[0], part=Q, part_lse=LSE),
        "part must have shape (rows, heads, head_dim) of out = (0, 4, 8), got (2, 5, 4, 8)",
    ),
    (into(begin=-1), "begin must be 0 to 3, as 2 rows come, got -1"),
    (into(begin=4), "begin must be 0 to 3, as 2 rows come, got 4"),
    (padded(cu_seqlens_kv=None), "cu_seqlens_kv must be given with cu_seqlens_q, got None"),
    (
        padded(return_attn_probs=True),
        "cu_seqlens_q must be None with return_attn_probs, got an array",
    ),
    (padded(cu_seqlens_q=BOUNDS[:2]), "cu_seqlens_q must have shape (batch + 1,) = (3,), got (2,)"),
    (
        padded(cu_seqlens_kv=BOUNDS[:2]),
        "cu_seqlens_kv must have shape (batch + 1,) = (3,), got (2,)",
    ),
    (padded(v=K[0]), "v must be (batch, seqlen, heads, head_dim), got shape (7, 2, 8)"),
    (
        cached(**NEW | {"cache_seqlens": 7}),
        "cache_seqlens must lie between 0 and 6 (a capacity of 7 for 1 new tokens), got 7",
    ),
    (
        cached(cache_seqlens=-1),
        "cache_seqlens must lie between 0 and 7 (a capacity of 7 for 0 new tokens), got -1",
    ),
    (
        cached(cache_seqlens=8),
        "cache_seqlens must lie between 0 and 7 (a capacity of 7 for 0 new tokens), got 8",
    ),
    (
        cached(**NEW | TABLES | {"cache_seqlens": 4}),
        "rotary_cos must have a row for each of the cache's 7 positions, got 4",
    ),
    (
        cached(
            **NEW
            | {
                "q": Q,
                "causal": True,
                "rotary_cos": z(8, 4),
                "rotary_sin": z(8, 4),
                "cache_seqlens": 4,
            }
        ),
        "rotary_cos must have a row for each of the queries' 9 positions, got 8",
    ),
    (cached(**TABLES), "rotary_cos must be None without k and v to rotate, got a tensor"),
    (documents(k=ROWS[None]), "k must be (tokens, heads, head_dim), got shape (1, 9, 4, 8)"),
    (
        documents(q=Q[0], cu_seqlens=None, max_seqlen=None),
        "q must be (batch, tokens, heads, head_dim), got shape (5, 4, 8)",
    ),
    (documents(max_seqlen=None), "max_seqlen must be given with cu_seqlens, and not without it"),
    (documents(k=ROWS[:3]), "k must have q's tokens (9,), got (3,)"),
    (documents(dropout_p=0.25), "dropout_p must be 0 with cu_seqlens, got 0.25"),
    (lambda: chunks_of("rows", 2), "layout must be 'zigzag' or 'contiguous', got 'rows'"),
    (
        lambda: chunk_size("zigzag", 4, 12, "k"),
        "k must have a multiple of 8 tokens ('zigzag' over 4 devices; pad it), got 12",
    ),
    (
        lambda: chunk_size("contiguous", 4, 10, "q"),
        "q must have a multiple of 4 tokens ('contiguous' over 4 devices; pad it), got 10",
    ),
    (
        lambda: axes_of("x", "rows", STRATEGIES),
        "strategy must be one of ('gather', 'heads', 'ring', 'heads x ring'), got 'rows'",
    ),
    (
        lambda: axes_of("x", "heads x ring", STRATEGIES),
        "axis_name must be the axes of the ring and of heads under strategy 'heads x"
        " ring', got 'x'",
    ),
    (
        lambda: axes_of(("x", "y"), "ring", STRATEGIES),
        "axis_name must be the name of an axis under strategy 'ring', got ('x', 'y')",
    ),
    (
        lambda: axes_of(("x", "y", "z"), "heads x ring", STRATEGIES),
        "axis_name must be the axes of the ring and of heads, got ('x', 'y', 'z')",
    ),
    (
        traced(lambda n: plain.origin_words((0, n, 0))),
        "dropout_origin must be (batch, head, row, column), each an int from 0 to"
        " 4294967295, got a traced uint32 (3,)",
    ),
    (
        traced(lambda n: plain.origin_words(n[None])),
        "dropout_origin must be (batch, head, row, column), each an int from 0 to"
        " 4294967295, got a traced int32 (1,)",
    ),
    (
        traced(lambda n: plain.origin_words((0, n, 2**32, 0))),
        "dropout_origin must be (batch, head, row, column), each an int from 0 to"
        " 4294967295, got 4294967296",
    ),
    (
        traced(lambda n: plain.origin_words((0, n, -1, 0))),
        "dropout_origin must be (batch, head, row, column), each an int from 0 to"
        " 4294967295, got -1",
    ),
    (
        symbolic(lambda q: hj.attention_backward(q, q, q, q, q, LSE)),
        "q must have sizes that are known when it is traced, got (2, length, 4, 8)",
    ),
    (
        lambda: run(Operands(Q, K, K), Options("dense", dropout_p=0.5)),
        "dropout_seed must be given where dropout_p > 0 (an int, or a jax.random key), got None",
    ),
    (lambda: plain.seed_words(2**64), "dropout_seed must fit 64 bits, got 18446744073709551616"),
]


@each_refusal(TYPES, VALUES)
def test_what_is_refused_is_named_with_what_was_got(call, error, said):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == said
