"""Rows whose scores are huge and close together, in the Hopper forwards: results are those of the
same scores near 0. What is compared is what no rounding of a far score can excuse."""

import math
from typing import Any

import pytest
import torch

import heedful
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]

DTYPES = [torch.bfloat16, torch.float16]
# Masks as they are in use; infinite where float16 does not hold them.
FAR = [-1e4, -1e9, -1e30, "least", 1e4, 1e30]
# Numbers of float32 with few digits, near 1e6, 1.7e7, 6.7e7 and 1.3e8.
SCORES = [2.0**20, 2.0**24, 2.0**26, 2.0**27]
# Queries, keys: of one tile, of several, few of many.
SIZES = [(1, 3), (70, 300), (300, 700), (3, 2100)]


def operands(size: tuple[int, int], dtype: torch.dtype, dim: int, dim_v: int = 0):
    values = torch.Generator().manual_seed(size[0] + dim)
    shapes = [(2, size[0], 2, dim), (2, size[1], 2, dim), (2, size[1], 2, dim_v or dim)]
    return [torch.randn(shape, generator=values).to(dtype).cuda() for shape in shapes]


def called(q, k, v, backend: str = "hopper", **how: Any):
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True, backend=backend, **how)
    return out, lse


def held(far: float | str, dtype: torch.dtype) -> float:
    """A far number of a type, or a skip where it has none."""
    value = torch.finfo(dtype).min if far == "least" else float(far)
    if abs(value) > torch.finfo(dtype).max:
        pytest.skip("float16 ends at 65504")
    return torch.tensor(value, dtype=dtype).item()


def assert_same(got, want, v, is_exact: bool):
    """That two results have the same bits, or differ by roundings of probabilities and results."""
    if is_exact:
        assert torch.equal(got, want)
    else:
        bound = 2.0 * torch.finfo(v.dtype).eps * v.abs().max()
        assert ((got.float() - want.float()).abs() <= bound).all()


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_rows_all_of_whose_keys_have_one_far_bias_are_those_without_one(far, dtype, dim, splits):
    """Where q is 0, and bit by bit where no parts are merged."""
    bias = held(far, dtype)
    for size in SIZES:
        _, k, v = operands(size, dtype, dim)
        q = torch.zeros(2, size[0], 2, dim, dtype=dtype, device="cuda")
        how: dict[str, Any] = {"num_splits": splits, "causal": size[0] > 1}
        near = called(q, k, v, bias=torch.zeros(1, 1, *size, dtype=dtype, device="cuda"), **how)
        full = torch.full((1, 1, *size), bias, dtype=dtype, device="cuda")
        out, lse = called(q, k, v, bias=full, **how)
        assert out.isfinite().all() and lse[near[1].isfinite()].isfinite().all()
        assert_same(out, near[0], v, splits == 1)
        # Of a sum of two float32 numbers one rounding is its own, one that of the logarithm.
        exact = near[1].double() + bias
        assert (
            ((lse.double() - exact).abs() <= 2.0**-22 * exact.abs()).logical_or(exact.isinf()).all()
        )


@pytest.mark.parametrize("far", [far for far in FAR if far == "least" or far < -1e5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("side", ["left", "right", "both", "rows"])
def test_padding_far_below_is_padding_of_minus_infinity(far, dtype, dim, splits, side):
    """In rows that see another key, wherever the padding is, of a tile and more: what is seen
    first has a reference far below, which must leave nothing of its own. Bit by bit where all rows
    of a warp are padded as one: references of a warp move together."""
    bias = held(far, dtype)
    for size in SIZES:
        q, k, v = operands(size, dtype, dim)
        pad = torch.zeros(size, dtype=torch.bool, device="cuda")
        third = max(1, size[1] // 3)
        if side in ("left", "both"):
            pad[:, :third] = True
        if side in ("right", "both"):
            pad[:, -third:] = True
        if side == "rows":
            pad[::3, :third] = pad[1::3, -third:] = True
        pad = pad.expand(1, 1, *size)
        near = torch.randn(pad.shape, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
        how: dict[str, Any] = {"num_splits": splits}
        hidden = called(q, k, v, bias=near.masked_fill(pad, -torch.inf), **how)
        out, lse = called(q, k, v, bias=near.masked_fill(pad, bias), **how)
        sees = (~pad).any(3).expand(2, 2, size[0])
        seen_rows = sees.transpose(1, 2)
        assert_same(out[seen_rows], hidden[0][seen_rows], v, side != "rows")
        assert ((lse - hidden[1])[sees].abs() <= 2.0**-20 * (1.0 + hidden[1][sees].abs())).all()
        assert out.isfinite().all()


def one_score(size, dtype, dim, score, dim_v=0):
    """q, k, v and a scale where each score is the same, exact at every step."""
    _, k, v = operands(size, dtype, dim, dim_v)
    q = torch.zeros(2, size[0], 2, dim, dtype=dtype, device="cuda")
    k.zero_()
    # float16 holds no more.
    q[..., 3] = 2.0**10
    k[..., 3] = 2.0**10 if score >= 0 else -(2.0**10)
    return q, k, v, abs(score) * 2.0**-20


def assert_means(out, v, seen, p_dtype=None):
    """That every row of `out` is the mean of the values that it sees. seen: bool (Sq, Sk)."""
    weights = seen.double() / seen.sum(1, keepdim=True)
    want = torch.einsum("mn,bnhe->bmhe", weights, v.double())
    # Probabilities and results are rounded, each by half of eps.
    eps = torch.finfo(p_dtype or v.dtype).eps / 2 + torch.finfo(out.dtype).eps / 2
    size = torch.einsum("mn,bnhe->bmhe", weights, v.double().abs())
    assert ((out.double() - want).abs() <= 1.01 * eps * size).all()


@pytest.mark.parametrize("score", [*SCORES, *(-score for score in SCORES)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_equal_far_scores_by_q_and_k_weigh_the_same(score, dtype, dim, splits):
    for size in SIZES:
        q, k, v, scale = one_score(size, dtype, dim, score)
        for causal in (False, True):
            seen = torch.ones(size, dtype=torch.bool, device="cuda")
            if causal:
                seen = seen.tril(size[1] - size[0])
            out, lse = called(q, k, v, softmax_scale=scale, causal=causal, num_splits=splits)
            assert_means(out, v, seen)
            exact = score + seen.sum(1).double().log()
            assert ((lse.double() - exact).abs() <= 2.0**-22 * exact.abs()).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mods", ["", "dropout", "sink"])
def test_keys_that_are_far_above_those_before_leave_nothing_of_them(
    score, dtype, dim, splits, mods
):
    """Tiles are seen from the last to the first: references rise by a far score, after which scores
    are still compared exactly."""
    for size in SIZES:
        q, k, v, scale = one_score(size, dtype, dim, score)
        far = torch.arange(size[1], device="cuda") < size[1] - size[1] // 3
        k[:, ~far] = 0
        how: dict[str, Any] = {"softmax_scale": scale, "num_splits": splits}
        if mods == "sink":
            how["sink"] = torch.tensor([0.5, -100.0], device="cuda")
        if mods == "dropout":
            # As good as none, in the code of one.
            how |= {"dropout_p": 2.0**-31, "dropout_seed": 1}
        out, _ = called(q, k, v, **how)
        assert_means(out, v, far.expand(size))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (576, 512)], ids=str)
def test_equal_far_scores_of_a_decode_weigh_the_same(score, dtype, splits, dims):
    backends = ("mla", "mla_swap_ab") if dims[0] == 576 else ("hopper_decode",)
    for keys in (3, 300, 2100):
        for kept in (1.0, 0.5):
            values = torch.Generator().manual_seed(keys)
            k = torch.randn((2, keys, 1, dims[0]), generator=values).to(dtype).cuda()
            v = k[..., : dims[1]] if dims[0] > dims[1] else torch.randn_like(k)
            q = torch.zeros(2, 1, 16, dims[0], dtype=dtype, device="cuda")
            q[..., -1] = 2.0**10
            k[..., -1] = 2.0**10
            far = torch.arange(keys, device="cuda") < math.ceil(kept * keys)
            k[:, ~far, :, -1] = 0
            for backend in backends:
                out = heedful.flash_attn_with_kvcache(
                    *(q, k, v),
                    softmax_scale=score * 2.0**-20,
                    num_splits=splits,
                    backend=backend,
                )
                assert_means(out, v, far.expand(1, keys))


@pytest.mark.parametrize("score", [2.0**18, 2.0**20, 2.0**24])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_equal_far_scores_in_e4m3_weigh_the_same(score, dim, causal):
    for size in SIZES[1:]:
        q, k, v, scale = one_score(size, torch.bfloat16, dim, score)
        fp8 = torch.float8_e4m3fn
        for part in (1.0, 0.6):
            far = torch.arange(size[1], device="cuda") < part * size[1]
            q8, k8 = (q / 4).to(fp8), (k * far[:, None, None] / 4).to(fp8)
            v8 = v.to(fp8)
            seen = far.expand(size)
            if causal:
                seen = seen.tril(size[1] - size[0])
            out, _ = called(q8, k8, v8, softmax_scale=scale * 16, causal=causal)
            rows = seen.any(1)
            values = v8.to(torch.bfloat16)
            assert_means(out[:, rows], values, seen[rows], fp8)


# bfloat16 is scored in base 2, where a maximum of 2^30 is rounded by 2^6: it holds 2^64.
SLOPES = [(torch.bfloat16, 2.0**20), (torch.float16, 2.0**20), (torch.float16, 2.0**40)]


@pytest.mark.parametrize(("dtype", "slope"), SLOPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_steep_alibi_leaves_every_row_its_nearest_key(dtype, slope, dim, dropout):
    """However far the keys are that a row sees first, or the nearest one of more queries than
    keys is: no probability on the way is infinite."""
    for size in (*SIZES, (300, 100)):
        _, k, v = operands(size, dtype, dim)
        q = torch.zeros(2, size[0], 2, dim, dtype=dtype, device="cuda")
        slopes = torch.tensor([1.0, 1.37], device="cuda") * slope
        rows = torch.arange(size[0], device="cuda") + size[1] - size[0]
        nearest = torch.nn.functional.one_hot(rows.clamp(min=0), size[1]).bool()
        for causal in (False, True):
            how: dict[str, Any] = {"alibi_slopes": slopes, "causal": causal}
            out, lse = called(q, k, v, **how, dropout_p=dropout)
            assert out.isfinite().all() and not lse.isnan().any()
            if not dropout:
                assert_means(out[:, rows >= 0], v, nearest[rows >= 0])
                if not causal:
                    assert_means(out, v, nearest)
