"""The decode kernel computes what the oracle computes: its programs, run by Triton's interpreter.
bfloat16 is left to GPU tests; the interpreter is wrong for it.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.bench.harness import reader
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.registry.tiles import DecodeConfig, TileConfig
from heedful.kernels.portable.decode import kernel
from heedful.kernels.portable.decode.cache import value_of_words
from heedful.kernels.portable.decode.kernel import log2_size, softmax_step
from heedful.kernels.portable.decode.queries import fitted
from heedful.kernels.split_kv.walk import share_of
from heedful.kernels.split_kv.work import SplitKVParams
from heedful.launch.bind import decode
from heedful.launch.program import buffers as canonical
from heedful.launch.spec import KernelCall, KernelRef, Pointer
from support.problems import budget, far_scores
from support.problems.cases import Case
from support.problems.grids import covering, in_turns
from support.runs.decode_programs import TILES, UNITS, Interpreted
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import run_call

# Of 8 rows, keys are the rows of products.
FEW = replace(TILES, block_m=8)
WIDE = replace(TILES, block_m=64)
PLAIN = Case(dtype="float16", backward=False, seqlen_q=3, seqlen_k=203, heads_q=6)
MLA = replace(
    PLAIN,
    v_in_k=True,
    seqlen_q=2,
    heads_q=16,
    heads_k=1,
    head_dim=576,
    head_dim_v=512,
    seqlen_k=131,
)
CASES = (
    PLAIN,
    replace(PLAIN, seqlen_q=1, heads_q=8, head_dim=64, head_dim_v=128),
    replace(PLAIN, causal=True, used="k", batch=5),
    replace(PLAIN, causal=True, seqlen_q=9, heads_q=8, sink=True),
    replace(PLAIN, window=(60, 0), used="k", batch=4),
    replace(PLAIN, window=(50, 3, 20), used="k", seqlen_q=8),
    replace(PLAIN, softcap=3.0, alibi="bh", sink=True),
    replace(PLAIN, scale=-0.3),
    replace(PLAIN, tree_mask=True, used="k"),
    replace(PLAIN, q_offsets=True, causal=True, batch=4),
    replace(PLAIN, q_offsets=True, window=(60, 0, 5), varlen="q", page_size=4, batch=4),
    replace(PLAIN, q_offsets=True, causal=True, kv_dtype="int8", used="k", batch=4, alibi="h"),
    replace(PLAIN, page_size=7, batch=3, causal=True),
    replace(PLAIN, page_size=16, leftpad_k=True, batch=3),
    replace(PLAIN, kv_batch_idx=True, leftpad_k=True, used="k"),
    replace(PLAIN, varlen="q", used="k", batch=4, causal=True),
    replace(PLAIN, varlen="qk", used="q", batch=4, causal=True, sink=True),
    replace(PLAIN, varlen="qk", batch=7, seqlen_q=11, seqlen_k=90),
    replace(PLAIN, varlen="q", page_size=4, batch=3),
    # Padded batches.
    replace(PLAIN, used="k", batch=9, lens_k=(0, 203, 0, 0, 7, 0, 16, 0, 0), sink=True),
    replace(PLAIN, used="qk", batch=5, seqlen_q=11, lens_k=(90, 0, 0, 203, 0), sink=True),
    replace(PLAIN, page_size=16, batch=4, lens_k=(0, 0, 0, 0), seqlen_q=1),
    replace(PLAIN, used="k", kv_batch_idx=True, leftpad_k=True, batch=4, lens_k=(0, 9, 203, 0)),
    replace(PLAIN, used="k", batch=4, lens_k=(0, 90, 0, 150), layout="heads_first", head_dim_v=24),
    replace(PLAIN, seqlen_k=0),
    replace(PLAIN, seqlen_q=0),
    replace(PLAIN, batch=0),
    replace(PLAIN, batch=0, varlen="qk"),
    replace(PLAIN, head_dim=40, head_dim_v=24),
    replace(PLAIN, layout="heads_first"),
    replace(PLAIN, layout="packed"),
    replace(PLAIN, kv_dtype="int8"),
    replace(PLAIN, kv_dtype="int8", head_dim=64, kv_group=64, used="k"),
    replace(PLAIN, kv_dtype="int8", head_dim=64, kv_group=64, kv_shift=True, page_size=5),
    replace(PLAIN, kv_dtype="int8", head_dim=64, head_dim_v=96, kv_group=32, kv_shift=True),
    replace(PLAIN, kv_dtype="int8", kv_group=8, kv_shift=True),
    replace(PLAIN, kv_dtype="int4", head_dim=64, kv_group=64, kv_shift=True),
    replace(PLAIN, kv_dtype="int4", head_dim=128, kv_group=64),
    replace(PLAIN, kv_dtype="int4", kv_group=16, page_size=4),
    replace(PLAIN, kv_dtype="float8_e4m3fn", page_size=16, causal=True),
    replace(PLAIN, kv_dtype="float8_e5m2", head_dim=48, tree_mask=True),
    replace(PLAIN, kv_dtype="float8_e4m3fn", varlen="q", page_size=4, batch=3, causal=True),
    replace(PLAIN, kv_dtype="float8_e4m3fn", varlen="qk", used="q", batch=4, seqlen_q=21),
    # Two tiles of rows and more, that read the same keys.
    replace(PLAIN, seqlen_q=9, heads_q=8, causal=True, used="k", batch=3),
    replace(PLAIN, seqlen_q=21, window=(60, 0), used="k", tree_mask=True),
    replace(MLA, used="k", batch=3, causal=True),
    replace(MLA, page_size=1, sink=True),
    replace(MLA, q_offsets=True, causal=True, used="k", batch=3),
    replace(MLA, page_size=64, heads_q=40, causal=True),
    replace(MLA, seqlen_q=1, layout="offset", window=(90, 0)),
    replace(MLA, head_dim=128, head_dim_v=128),
    replace(MLA, head_dim=80, head_dim_v=64, kv_dtype="int8"),
    replace(MLA, kv_dtype="float8_e4m3fn", page_size=16, causal=True),
    replace(MLA, kv_dtype="float8_e4m3fn", used="k", batch=3, heads_q=40, seqlen_q=1, sink=True),
    replace(MLA, kv_dtype="float8_e4m3fn", head_dim=520, kv_batch_idx=True),
    replace(MLA, kv_dtype="int8", seqlen_q=1, leftpad_k=True, used="k"),
    replace(MLA, kv_dtype="fp8_ds_mla", page_size=16, causal=True),
    replace(MLA, kv_dtype="fp8_ds_mla", used="k", batch=3, heads_q=40, seqlen_q=1, sink=True),
    replace(MLA, kv_dtype="fp8_ds_mla", kv_batch_idx=True, tree_mask=True, used="k"),
    replace(MLA, kv_dtype="fp8_ds_mla", window=(60, 0), leftpad_k=True, softcap=4.0),
    replace(MLA, head_dim=100, head_dim_v=96, heads_q=4),
)


@interpreted
@pytest.mark.parametrize("case, num_splits", covering(CASES, (0, 1, 3)), ids=str)
def test_decode_is_within_the_budget(case, num_splits):
    budget.run(Interpreted(num_splits), case)


@interpreted
@pytest.mark.parametrize(
    "case, num_splits",
    in_turns(CASES, (1, 3, 0), each=6),
    ids=str,
)
def test_tiles_of_8_rows_are_within_the_budget(case, num_splits):
    budget.run(Interpreted(num_splits, FEW), case)


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        replace(PLAIN, seqlen_q=25, causal=True, used="k"),
        replace(PLAIN, seqlen_q=33, window=(60, 0), sink=True, heads_q=2, kv_dtype="int8"),
    ],
    ids=str,
)
def test_tiles_of_64_rows_are_within_the_budget(case):
    """Of so many, sums are taken tile by tile."""
    budget.run(Interpreted(1, WIDE), case)


class Padded(Interpreted):
    """Lengths of 0 are below it."""

    def forward(self, problem, x, out):
        used = torch.where(x.seqused_k == 0, -3, x.seqused_k)
        return super().forward(problem, x._replace(seqused_k=used), out)


@interpreted
def test_lengths_below_0_are_of_padded_rows_too():
    case = replace(PLAIN, used="k", batch=7, lens_k=(0, 203, 0, 0, 7, 0, 0), sink=True)
    budget.run(Padded(), case)


@interpreted
@pytest.mark.parametrize("problem", far_scores.decode_grid(), ids=str)
def test_scores_far_from_0_are_within_the_budget(problem):
    backend = Interpreted(problem.case.num_splits)
    far_scores.check(problem, far_scores.by_backend(backend))


@triton.jit
def shares_of(out, seqs, shape, mask, work, tile):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    share, empty = share_of(
        pid,
        programs,
        tl.arange(0, 1),
        tl.arange(0, work.LOOKS),
        SplitKVParams(seqs, shape, mask, work, tile),
    )
    tl.store(out + 5 * pid, share.x)
    tl.store(out + 5 * pid + 1, share.end)
    tl.store(out + 5 * pid + 2, share.b)
    tl.store(out + 5 * pid + 3, share.base)
    tl.store(out + 5 * pid + 4, empty)


def dealt_out(lengths: list[int], num_splits: int, config: DecodeConfig = TILES) -> torch.Tensor:
    """By share: where it begins and ends, in which sequence, where that begins, and how many are
    empty."""
    problem = AttentionProblem.dense(
        len(lengths), 1, 400, 2, dtype="float16", used_k=True, num_splits=num_splits
    )
    specs = canonical.forward(problem)
    device = replace(by_name("MI300X"), units=UNITS)
    tiles: dict[str, TileConfig] = {"decode.forward": config}
    made = Plan(problem, device, "decode", "run", variant="portable", configs=tiles)
    (call,) = decode.forward(problem, made, specs).calls
    names = ("seqs", "shape", "mask", "work", "tile")
    parameters = {name: getattr(call.parameters["params"], name) for name in names}
    merge = parameters["work"].merge._replace(partial_out=None, partial_sums=None, counts=None)
    work = parameters["work"]._replace(merge=merge)
    out = torch.zeros(7, 5, dtype=torch.int32)
    asked = KernelCall(
        KernelRef(__name__, "shares_of"),
        (7, 1, 1),
        {"out": Pointer("out", "int32"), **parameters, "work": work},
    )
    run_call(asked, {"out": out, "seqused_k": torch.tensor(lengths, dtype=torch.int32)})
    return out


@interpreted
@pytest.mark.parametrize("num_splits", [0, 3, 10**9])
def test_padded_rows_take_no_share_of_the_keys(num_splits):
    live = [300, 17, 400, 16, 1]
    alone = dealt_out(live, num_splits)
    behind = dealt_out(live + [0, -1] * 40, num_splits)
    assert torch.equal(alone[:, :4], behind[:, :4])
    assert alone[:, 4].unique().tolist() == [0] and behind[:, 4].unique().tolist() == [80]
    between = dealt_out([0, 300, -1, 17, 0, 0, 400, 16, 1], num_splits)
    assert torch.equal(alone[:, [0, 1, 3]], between[:, [0, 1, 3]])


@interpreted
@pytest.mark.parametrize(
    "fewest, lengths, ends",
    [
        # Key tiles of 16; four of them at least, but where a line then has too few parts.
        (1, [100], [4, 7]),
        (4, [100], [2, 4, 6, 7]),
        (7, [100], [1, 2, 3, 4, 5, 6, 7]),
        (7, [30], [1, 2]),
        (4, [100, 100], [4, 8, 12, 14]),
        (2, [100, 0, 30], [4, 8, 9]),
        (3, [0], []),
    ],
)
def test_a_short_line_has_the_fewest_shares_there_may_be(fewest, lengths, ends):
    config = replace(TILES, least_tiles=4, fewest_shares=fewest)
    shares = dealt_out(lengths, 0, config)
    assert shares[shares[:, 1] > shares[:, 0], 1].tolist() == ends


@interpreted
@pytest.mark.parametrize("num_splits", (0, 3))
def test_short_lines_in_many_parts_are_within_the_budget(num_splits):
    config = replace(TILES, least_tiles=4, fewest_shares=8)
    case = replace(PLAIN, used="k", batch=3, lens_k=(203, 0, 17))
    budget.run(Interpreted(num_splits, config), case)


@triton.jit
def as_the_compiler_does(
    words,
    VALUES: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
    CONVERSION: tl.constexpr,
    i: tl.constexpr,
):
    """`value_of_words` without PTX, which the interpreter does not know."""
    return value_of_words(words, VALUES, STORED, DTYPE, tl.constexpr(0), i)


@interpreted
@pytest.mark.parametrize(
    "mods",
    [
        {},
        {"softcap": 3.0},
        {"alibi": "bh"},
        {"scale": 300.0},
        {"dtype": "float16", "kv_dtype": "float8_e4m3fn", "kv_group": 64, "head_dim": 64},
        {
            "dtype": "float16",
            "kv_dtype": "float8_e4m3fn",
            "kv_group": 64,
            "head_dim": 64,
            "alibi": "h",
        },
        {
            "dtype": "float16",
            "kv_dtype": "float8_e4m3fn",
            "kv_group": 128,
            "head_dim": 128,
            "used": "k",
            "causal": True,
            "sink": True,
        },
        # More queries than a tile has rows, which no other kernel takes.
        {"seqlen_q": 30, "causal": True, "used": "k", "lens_k": (103, 20)},
        {"seqlen_q": 40, "varlen": "q", "page_size": 16, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [16, 8])
def test_products_with_stored_floats_are_exact_in_float16(mods, rows):
    facts: dict[str, Any] = {"seqlen_q": 3, "seqlen_k": 103, "heads_q": 6, **mods}
    case = Case(**{"dtype": "float8_e4m3fn", "backward": False, **facts})
    tiles = replace(TILES, conversion=2, block_m=rows)
    with mock.patch.object(kernel, "value_of_words", as_the_compiler_does):
        budget.run(Interpreted(tiles=tiles), case)


@triton.jit
def weigh(scores, scales, weights, sums, M: tl.constexpr, N: tl.constexpr):
    """Of two tiles of keys: probabilities times scales, and the sum of probabilities; the first
    tile's by the second's reference too."""
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    m_M = tl.full([M], float("-inf"), tl.float32)
    l_M = tl.zeros([M], tl.float32)
    for tile in tl.static_range(2):  # pyright: ignore
        scale_N = tl.load(scales + tile * N + tl.arange(0, N))
        s_MN = tl.load(scores + tile * M * N + at)
        beside_N = log2_size(scale_N)
        p_MN, m_M, alpha_M = softmax_step(s_MN, m_M, 0.5, beside_N, False)  # pyright: ignore
        l_M = l_M * alpha_M + tl.sum(p_MN, 1)
        if tile == 1:
            tl.store(weights + at, tl.load(weights + at) * alpha_M[:, None])
        tl.store(weights + tile * M * N + at, p_MN * scale_N[None, :])
    tl.store(sums + tl.arange(0, M), l_M)


@interpreted
@pytest.mark.parametrize("low, high", [(-2, 2), (-60, 30), (20, 126), (-126, -90), (-126, 126)])
def test_probabilities_times_scales_of_any_size_fit_float16(low, high):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 8, 16, generator=generator) * 10
    scores[:, :, 3] = -torch.inf
    powers = torch.randint(low, high + 1, (2, 16), generator=generator)
    scales = (1 + torch.rand(2, 16, generator=generator)) * 2.0**powers
    scales[0, 5] = 0
    weights, sums = torch.zeros(2, 8, 16), torch.empty(8)
    weigh[1,](scores, scales, weights, sums, tl.constexpr(8), tl.constexpr(16))
    assert sums.isfinite().all() and weights.max() <= 1.07
    exact = (scores.double() / 2).exp()
    want = exact / exact.sum((0, 2), keepdim=True) * scales.double()[:, None]
    got = weights.double() / sums.double()[:, None]
    # To the digits of a product of the largest.
    largest = want.amax((0, 2), keepdim=True).clamp_min(2.0**-100)
    assert ((got - want).abs() <= 1e-5 * largest).all()


@interpreted
@pytest.mark.parametrize("scale", [0.0, 2.0**-126, -(2.0**-126), 2.0**-100])
def test_equal_probabilities_beside_the_smallest_scales_have_finite_sums(scale):
    weights, sums = torch.zeros(2, 8, 16), torch.empty(8)
    scales = torch.full((2, 16), scale)
    weigh[1,](torch.ones(2, 8, 16), scales, weights, sums, tl.constexpr(8), tl.constexpr(16))
    assert sums.isfinite().all()
    assert (weights.double() / sums[:, None].double() == scales[:, None].double() / 32).all()


@triton.jit
def fit(x, out, factors, M: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, M)[:, None] * D + tl.arange(0, D)[None, :]
    parts, times = fitted((tl.load(x + at), tl.load(x + M * D + at)), M)
    first, second = parts  # pyright: ignore[reportAssignmentType]
    tl.store(out + at, first)
    tl.store(out + M * D + at, second)
    tl.store(factors + tl.arange(0, M)[:, None], times)


@interpreted
def test_a_row_of_any_size_fits_float16_with_its_digits():
    sizes = torch.tensor([1e-38, 1e-30, 6e-8, 1.0, 300.0, 7e4, 1e30, 3e38])
    rows = torch.randn(2, 8, 16, generator=torch.manual_seed(0)).clamp(-1, 1)
    rows[0, :, 0], rows[:, 3] = 1.0, rows[:, 3] * 0
    x = (rows * sizes[:, None]).bfloat16().float()
    out, factors = torch.empty(2, 8, 16, dtype=torch.float16), torch.empty(8, 1)
    fit[1,](x, out, factors, tl.constexpr(8), tl.constexpr(16))
    error = (out.double() * factors.double() - x.double()).abs()
    # Of a subnormal of float16, where the largest of a row is at least 1.
    assert (error <= 2.0**-25 * x.double().abs().amax((0, 2))[:, None]).all()
    assert out.abs().max() < 4


@interpreted
@pytest.mark.parametrize("count", [1, 8192, 8193, 3 * 8192 - 5])
def test_what_is_read_is_summed_up_8192_words_at_a_time(count):
    words = torch.randint(-8, 9, (count + 1,)).float()
    # One word more lies behind those that are read.
    found = reader.read_words(words[:count])
    assert found.tolist() == [part.sum().item() for part in words[:count].split(8192)]


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
