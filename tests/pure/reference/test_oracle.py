"""The oracle is attention: checked against loops over single scores and against differences."""

import math

import numpy as np
import pytest

from heedful.core.call.operands import Operands
from heedful.reference import oracle
from heedful.reference.convert import as_numpy, operands_as_numpy
from heedful.reference.philox import keep_mask
from heedful.reference.quant import dequantize, pack_int4, quantize, unpack_int4
from heedful.reference.sequences import sequences
from support.problems.cases import Case, build, variants

SMALL = Case(seqlen_q=5, seqlen_k=7, heads_q=4, heads_k=2, head_dim=3, head_dim_v=2)
EVERYTHING = Case(
    seqlen_q=6,
    seqlen_k=9,
    heads_q=4,
    heads_k=2,
    head_dim=3,
    head_dim_v=2,
    window=(3, 2, 1),
    shift=1,
    softcap=1.5,
    dropout_p=0.3,
    alibi="bh",
    bias="hqk",
    sink=True,
    tree_mask=True,
)
FEATURES = [
    SMALL,
    *variants(
        SMALL,
        causal=[True],
        window=[(2, 1), (0, 0), (1, -1, 2)],
        bottom_right=[False],
        shift=[-4],
        scale=[-0.7],
        softcap=[0.8],
        dropout_p=[0.4, 1.0],
        alibi=["h", "bh"],
        bias=["bhqk", "hqk", "bk", "q"],
        rel_bias=[1, 5, 80],
        sink=[True],
        tree_mask=[True],
        key_ranges=[1, 2],
        varlen=["q", "k", "qk"],
        used=["q", "qk"],
        page_size=[1, 3],
        kv_batch_idx=[True],
        leftpad_k=[True],
        seqlen_q=[0, 9],
        seqlen_k=[0, 1],
        batch=[0],
    ),
    EVERYTHING,
    *variants(EVERYTHING, varlen=["qk"], used=["qk"], page_size=[2], leftpad_k=[True]),
]


def built_numpy(case: Case):
    built = build(case)
    return built, operands_as_numpy(built.x), as_numpy(built.dout), as_numpy(built.dlse)


def naive(problem, x: Operands):
    """The same by loops over single scores, straight from the sentences of the design."""
    out = np.zeros((*x.q.shape[:-1], problem.head_dim_v)).reshape(
        -1, problem.heads_q, problem.head_dim_v
    )
    lse = np.full((problem.heads_q, len(out)), -math.inf)
    q, k, v = (a if a.ndim == 3 else a.reshape(-1, *a.shape[2:]) for a in (x.q, x.k, x.v))
    for seq in sequences(problem, x):
        tokens = [t + n for t, count in seq.k_spans for n in range(count)]
        off = problem.mask.offset(seq.len_q, seq.len_k)
        for h in range(problem.heads_q):
            g = h // (problem.heads_q // problem.heads_k)
            for i in range(seq.len_q):
                weights = {}
                for j in range(seq.len_k):
                    if not problem.mask.visible(i, j, seq.len_q, seq.len_k):
                        continue
                    new = j - (seq.len_k - seq.len_q)
                    if x.tree_mask is not None and new >= 0 and not x.tree_mask[seq.batch, i, new]:
                        continue
                    if x.key_ranges is not None:
                        own = x.key_ranges
                        row = own[i + seq.q_token] if own.ndim == 2 else own[seq.batch, h, i]
                        if not any(row[n] <= j < row[n + 1] for n in range(0, len(row), 2)):
                            continue
                    s = float(q[seq.q_token + i, h] @ k[tokens[j], g]) * problem.scale
                    if problem.softcap > 0:
                        s = problem.softcap * math.tanh(s / problem.softcap)
                    if x.alibi_slopes is not None:
                        s -= x.alibi_slopes[seq.batch, h] * abs(i + off - j)
                    if x.rel_bias is not None:
                        last = x.rel_bias.shape[1] - 1
                        place = i + off - j + (last + 1) // 2
                        s += x.rel_bias[h, min(max(place, 0), last)]
                    if x.bias is not None:
                        s += x.bias[seq.batch, h, i, j]
                    weights[j] = math.exp(s)
                total = sum(weights.values())
                total += math.exp(x.sink[h]) if x.sink is not None else 0.0
                if total == 0:
                    continue
                lse[h, seq.q_token + i] = math.log(total)
                keep = np.ones((1, 1, seq.len_k))
                if problem.dropout_p > 0:
                    p, seed, (b0, h0, i0, j0) = problem.dropout_p, int(x.seed[0]), (0, h, i, 0)
                    keep = keep_mask(seed, p, seq.batch, 1, 1, seq.len_k, (b0, h0, i0, j0))
                    keep = keep / (1 - p) if p < 1 else keep * 0.0
                for j, weight in weights.items():
                    out[seq.q_token + i, h] += weight / total * keep[0, 0, j] * v[tokens[j], g]
    return out, lse


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_forward_is_what_loops_over_scores_give(case):
    built, x, _, _ = built_numpy(case)
    out, lse, _ = oracle.forward(built.problem, x)
    want_out, want_lse = naive(built.problem, x)
    if not built.problem.varlen_q:
        lse = lse.swapaxes(0, 1).reshape(want_lse.shape)
    # Both are float64 sums of the same few terms in another order.
    close = 1e3 * np.finfo(float).eps
    np.testing.assert_allclose(out.reshape(want_out.shape), want_out, rtol=close, atol=close)
    np.testing.assert_allclose(lse, want_lse, rtol=close, atol=close)


def loss(problem, x, dout, dlse) -> float:
    out, lse, _ = oracle.forward(problem, x)
    total = float(np.nansum(out * dout))
    if dlse is not None:
        finite = np.isfinite(lse)
        total += float((lse[finite] * dlse[finite]).sum())
    return total


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_gradients_are_the_differences_of_the_loss(case):
    built, x, dout, dlse = built_numpy(case)
    grads = oracle.backward(built.problem, x, dout, dlse)
    rng = np.random.default_rng(5)
    step = np.finfo(float).eps ** (1 / 3)  # balances truncation and rounding, central differences
    for name in ("q", "k", "v", "bias", "sink", "rel_bias"):
        array, grad = getattr(x, name), getattr(grads, f"d{name}")
        if array is None:
            assert grad is None
            continue
        assert np.isfinite(grad).all()
        if name == "bias":
            own = array[tuple(slice(0, n) for n in grad.shape)]
            assert own.size == grad.size
            array = own
        # One random direction per check moves every entry at once; entries of unused tokens are
        # NaN and stay so, and must have a zero gradient.
        unused = np.isnan(array)
        assert (grad[unused] == 0).all()
        direction = rng.standard_normal(array.shape)
        sides = []
        for sign in (1, -1):
            moved = array + sign * step * direction
            moved = np.broadcast_to(moved, x.bias.shape) if name == "bias" else moved
            sides.append(loss(built.problem, x._replace(**{name: moved}), dout, dlse))
        numeric = (sides[0] - sides[1]) / (2 * step)
        analytic = float((grad * direction).sum())
        # Central differences are good to about eps^(2/3) of the loss's size and curvature.
        size = 1 + abs(sides[0]) + float(np.abs(grad * direction).sum())
        assert abs(numeric - analytic) <= 100 * step**2 * size, name


def test_each_entry_of_every_gradient_is_its_own_difference():
    built, x, dout, dlse = built_numpy(EVERYTHING)
    grads = oracle.backward(built.problem, x, dout, dlse)
    step = np.finfo(float).eps ** (1 / 3)
    for name in ("q", "k", "v", "sink"):
        array, grad = getattr(x, name), getattr(grads, f"d{name}")
        for index in list(np.ndindex(array.shape))[::5]:
            sides = []
            for sign in (1, -1):
                moved = array.copy()
                moved[index] += sign * step
                sides.append(loss(built.problem, x._replace(**{name: moved}), dout, dlse))
            numeric = (sides[0] - sides[1]) / (2 * step)
            assert abs(numeric - grad[index]) <= 100 * step**2 * (1 + abs(sides[0])), (name, index)


@pytest.mark.parametrize("sink", [False, True])
def test_a_row_that_sees_no_key_is_zero_with_the_sink_as_its_lse(sink):
    case = Case(seqlen_q=9, seqlen_k=4, causal=True, sink=sink)
    built, x, dout, dlse = built_numpy(case)
    out, lse, _ = oracle.forward(built.problem, x)
    assert (out[:, :5] == 0).all()
    want = np.broadcast_to(x.sink[:, None] if sink else -np.inf, (2, 2, 5))
    np.testing.assert_allclose(lse[:, :, :5], want, rtol=1e-15)
    grads = oracle.backward(built.problem, x, dout, dlse)
    assert (grads.dq[:, :5] == 0).all() and np.isfinite(grads.dk).all()


def test_rows_past_seqused_are_zero_and_never_read():
    case = Case(used="qk", lens_q=(30, 37), lens_k=(53, 11))
    built, x, dout, dlse = built_numpy(case)
    assert np.isnan(x.q[0, 30:]).all() and np.isnan(x.k[1, 11:]).all()
    out, lse, _ = oracle.forward(built.problem, x)
    assert (out[0, 30:] == 0).all() and np.isneginf(lse[0, :, 30:]).all()
    assert np.isfinite(out).all() and np.isfinite(lse[1]).all()
    grads = oracle.backward(built.problem, x, dout, dlse)
    assert (grads.dq[0, 30:] == 0).all() and (grads.dk[1, 11:] == 0).all()


def test_paged_cache_is_the_contiguous_one_cut_up():
    rng = np.random.default_rng(1)
    built, x, _, _ = built_numpy(Case(seqlen_k=12, backward=False))
    order = rng.permutation(6)
    pages = {n: np.empty((6, 4, *getattr(x, n).shape[2:])) for n in ("k", "v")}
    for name, made in pages.items():
        made[order] = getattr(x, name).reshape(6, 4, *made.shape[2:])
    paged = x._replace(**pages, block_table=order.reshape(2, 3))
    for a, b in zip(
        oracle.forward(built.problem, x), oracle.forward(built.problem, paged), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_probs_are_normalised_and_negative_exactly_where_dropped():
    built, x, _, _ = built_numpy(Case(dropout_p=0.25, causal=True, return_probs=True))
    probs = oracle.forward(built.problem, x)[2]
    assert probs is not None
    np.testing.assert_allclose(np.abs(probs).sum(-1), 1.0, rtol=1e-13)
    hidden = ~oracle.visible(built.problem, x, next(iter(sequences(built.problem, x))))
    assert (probs[:, :, hidden] == 0).all()
    for b in range(2):
        keep = keep_mask(int(x.seed[0]), 0.25, b, 2, 37, 53)
        np.testing.assert_array_equal(probs[b][:, ~hidden] > 0, keep[:, ~hidden])


@pytest.mark.parametrize("dtype, group, asymmetric", [("int8", 8, False), ("int4", 16, True)])
def test_dequantised_values_are_within_half_a_step(dtype, group, asymmetric):
    x = np.random.default_rng(0).standard_normal((11, 3, 32)) + 0.5
    stored, descale, shift = quantize(x, dtype, group, asymmetric)
    assert stored.shape[-1] == (16 if dtype == "int4" else 32)
    values = unpack_int4(stored) if dtype == "int4" else stored
    back = dequantize(values, descale, shift, group)
    # float32 scales and shifts add their own rounding to the half step.
    half_step = np.repeat(descale, group, -1) / 2
    assert (np.abs(back - x) <= half_step + 8 * np.finfo(np.float32).eps * np.abs(x).max()).all()


def test_int4_packing_is_undone_for_every_value():
    values = np.arange(-8, 8, dtype=np.int8)
    np.testing.assert_array_equal(unpack_int4(pack_int4(values)), values)
    assert pack_int4(np.array([1, -1])).tolist() == [0xF1]  # the even value in the low nibble


def test_quantised_caches_are_their_dequantised_values():
    for case in (
        Case(kv_dtype="int8", kv_group=8, kv_shift=True, backward=False, page_size=5),
        Case(kv_dtype="int4", kv_group=16, backward=False),
        Case(dtype="float8_e4m3fn", backward=False),
    ):
        built, x, _, _ = built_numpy(case)
        got = oracle.forward(built.problem, x)[0]
        assert np.isfinite(got).all()
        real = {}
        for name in ("k", "v"):
            stored, scale, shift = (getattr(x, name + end) for end in ("", "_descale", "_shift"))
            stored = unpack_int4(stored) if case.kv_dtype == "int4" else stored
            if case.kv_group:
                scale, shift = (
                    a if a is None else np.repeat(a, case.kv_group, -1) for a in (scale, shift)
                )
                real[name] = stored * scale + (0 if shift is None else shift)
            else:
                real[name] = stored * scale[:, None, :, None]
        q = x.q if x.q_descale is None else x.q * x.q_descale[:, None, :, None]
        plain = build(Case(backward=False)).problem
        want, _, _ = oracle.forward(
            plain, Operands(q, **real, block_table=x.block_table, seqused_k=x.seqused_k)
        )
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_gradients_of_quantised_inputs_are_refused():
    built, x, _, _ = built_numpy(Case(dtype="float8_e4m3fn", backward=False))
    with pytest.raises(ValueError, match="descales"):
        oracle.backward(built.problem, x, np.zeros((2, 37, 2, 32)))
