"""The CDNA kernels compute attention within the error budget, without a finding, and to the same
bits whatever the order of the waves."""

import inspect
import math
from dataclasses import replace

import pytest
import torch

from emulated.helpers.backend import Emulated
from emulated.helpers.edited import run_edited
from heedful.core.call.problem import ITEM_BITS
from heedful.kernels.cdna import softmax
from support.problems import far_scores
from support.problems.budget import oracle_results, run
from support.problems.cases import Built, Case, build
from support.problems.far_scores import SCORES, by_backend, check, far
from support.problems.grids import in_turns

# Keys for four turns of the hot loop and two with a mask; multiples of nothing.
BASE = Case(
    batch=1,
    seqlen_q=70,
    seqlen_k=403,
    heads_q=1,
    heads_k=1,
    head_dim=128,
    dtype="bfloat16",
    backward=False,
    num_splits=1,
)
CASES = [
    BASE,
    replace(BASE, causal=True, dtype="float16"),
    # More rows than a tile, in heads that share keys; the first rows see nothing.
    replace(BASE, causal=True, seqlen_q=500, heads_q=2),
    replace(BASE, causal=True, varlen="qk", batch=2, seqlen_q=290, layout="packed", heads_q=2),
]
NARROW = [
    replace(BASE, head_dim=64, causal=True),
    # Three tiles a split and one in the last, in which not every row sees a key.
    replace(BASE, head_dim=64, causal=True, num_splits=3),
]
LONG = [
    *(
        replace(case, head_dim=dim, dtype=dtype)
        for case in CASES
        for dim in (64, 128)
        for dtype in ("bfloat16", "float16")
    ),
    *(
        replace(BASE, seqlen_k=n, causal=causal)
        for n in (384, 448, 1031)
        for causal in (False, True)
    ),
    *(replace(BASE, seqlen_q=n, causal=True) for n in (1, 256, 257)),
    replace(BASE, causal=True, bottom_right=False, seqlen_q=300),
    replace(BASE, causal=True, shift=-90),
    replace(BASE, causal=True, shift=37, seqlen_q=513),
    replace(BASE, layout="heads_first", heads_q=2, heads_k=2, batch=2),
    replace(BASE, varlen="k", batch=2, lens_k=(0, 450), seqlen_k=450),
    replace(BASE, varlen="q", batch=3, lens_q=(70, 0, 1)),
    replace(BASE, scale=1.5),
    *(replace(CASES[-1], num_splits=2, head_dim=dim) for dim in (64, 128)),
    # More splits than any sequence has tiles.
    replace(CASES[-1], num_splits=9, head_dim=64),
]
SCHEDULES = ("lockstep", "round-robin", "delay:0-3", "random:0")
MANY_SCHEDULES = ("lockstep", "round-robin", "random:0-9")
TARGETS = ("gfx942", "gfx950")
E4M3 = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}


def cdna(arch, schedules=("lockstep",)) -> Emulated:
    """The CDNA kernels as planned for an architecture."""
    return Emulated(arch, "cdna", schedules)


@pytest.mark.parametrize("case, arch", in_turns([*CASES, *NARROW], TARGETS, each=4), ids=str)
def test_forward_is_within_budget_under_every_kind_of_schedule(arch, case):
    run(cdna(arch, SCHEDULES), case)


FAR = [
    far(replace(BASE, head_dim=64, causal=score == 23, dtype=dtype), score=score, below=score == 26)
    for score in SCORES
    for dtype in ("bfloat16", "float16")
]


@pytest.mark.parametrize(
    "problem, arch",
    [
        pytest.param(problem, arch, marks=[] if problem is FAR[0] else [pytest.mark.slow])
        for problem in FAR
        for arch in TARGETS
    ],
    ids=str,
)
def test_scores_far_from_0_are_within_budget(problem, arch):
    """A base is rounded, and in base 2: all that is compared with it has that rounding."""
    check(problem, by_backend(cdna(arch)))


@pytest.mark.parametrize("splits, arch", [(1, "gfx942"), (3, "gfx950")])
def test_a_result_keeps_what_the_rounding_of_its_log_sum_exp_left(splits, arch):
    one = replace(BASE, head_dim=64, num_splits=splits)
    one = far_scores.built(far(one, score=20))
    problem = replace(one.problem, keeps_rest=True)
    _, lse, rest = cdna(arch).forward(problem, one.x, torch.empty_like(one.x.q))
    want = oracle_results(one).lse
    assert lse is not None and rest is not None and want is not None
    alone, together = lse.double().numpy(), (lse.double() + rest.double()).numpy()
    # Of the sum of 403 exponentials each number was rounded once, as were some partial sums.
    assert abs(together - want).max() <= 32 * 2.0**-24 * math.log(403) < abs(alone - want).max()


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_every_shape_is_within_budget_under_many_schedules(arch, case):
    # Waves meet in one way, whatever numbers they carry.
    met = case.dtype == "float16"
    run(cdna(arch, SCHEDULES[:1] if met else MANY_SCHEDULES), case)


@pytest.mark.parametrize(
    "bounds, arch", in_turns([(5, 40, 60), (0, 60, 70), (50, -9, 2**31 - 1)], TARGETS), ids=str
)
def test_packed_tokens_of_no_sequence_have_results_and_bounds_end_with_the_storage(arch, bounds):
    """The emulator finds what is read or written outside of an array."""
    case = replace(BASE, varlen="q", batch=2, lens_q=(35, 35), head_dim=64)
    built = build(case)
    cu = torch.tensor(bounds, dtype=torch.int32)
    x = built.x._replace(cu_seqlens_q=cu)
    poisoned = torch.full_like(x.q, torch.nan)
    out, lse, _ = cdna(arch).forward(built.problem, x, poisoned)
    assert out.isfinite().all() and not lse.isnan().any()
    first, *_, last = cu.clamp(0, len(x.q)).tolist()
    for tokens in (slice(0, first), slice(last, None)):
        assert (out[tokens] == 0).all() and (lse[:, tokens] == -math.inf).all()
    assert lse[:, first:last].isfinite().all()


def test_reads_of_lds_meet_no_bank_twice_on_cdna4():
    backend = cdna("gfx950")
    run(backend, BASE)
    assert not any(backend.reports[0].bank_conflicts.values())


# 8 waves of 32 rows, 7 tiles of keys.
WAVES, TILES = 8, 7
SQUARE = replace(BASE, head_dim=64, seqlen_q=256)


def raise_scores(built: Built, rows: slice, powers: float) -> Built:
    """Lets the scores of `rows` grow by `powers` in base 2 with every tile of 64 keys; other rows
    do not see the growing dim."""
    q, k = built.x.q, built.x.k
    if ITEM_BITS[built.case.dtype] == 8:
        one = torch.ones(1, 1)
        built = replace(built, x=built.x._replace(q_descale=one, k_descale=one))
    tile = torch.arange(k.shape[1]) // 64
    k[..., 0] = tile.to(k.dtype)[None, :, None]
    q[..., 0] = 0.0
    q[:, rows, :, 0] = powers * math.log(2.0) / built.problem.scale
    return built


def run_rising(backend: Emulated, case: Case, rows: slice, powers: float = 11.0) -> None:
    """As `run`, with the scores of some rows rising."""
    run_edited(backend, case, lambda built: raise_scores(built, rows, powers))


def of_dtype(case: Case, arch: str, dtype: str) -> Case:
    """The case in a dtype, or in the e4m3 that a target multiplies, then with as many tiles."""
    if dtype == "e4m3":
        return replace(case, dtype=E4M3[arch], head_dim=128)
    return replace(case, dtype=dtype)


def rescalings(backend: Emulated) -> int:
    """How often a wave ran the block in which sums and outputs shrink: it has one exponential."""
    lines, first = inspect.getsourcelines(softmax.rescale.fn)
    (within,) = (n for n, line in enumerate(lines) if "gl.exp2(" in line)
    source = f"softmax.py:{first + within}"
    (report,) = backend.reports
    return sum(
        count
        for pc, count in report.executed.items()
        if (at := report.program.code[pc]).mnemonic.startswith("v_exp_f32") and source in at.where()
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("arch", TARGETS)
def test_ordinary_scores_rescale_on_the_first_tile_alone(arch, causal):
    backend = cdna(arch)
    run(backend, replace(SQUARE, causal=causal))
    assert rescalings(backend) == WAVES


@pytest.mark.parametrize("dtype, arch", in_turns(["bfloat16", "float16", "e4m3"], TARGETS))
def test_rising_scores_rescale_on_every_tile(arch, dtype):
    backend = cdna(arch)
    run_rising(backend, of_dtype(SQUARE, arch, dtype), slice(None))
    assert rescalings(backend) == WAVES * TILES


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", TARGETS)
def test_scores_that_rise_within_the_slack_rescale_once(arch, dtype):
    backend = cdna(arch)
    run_rising(backend, replace(SQUARE, dtype=dtype), slice(None), powers=0.9)
    assert rescalings(backend) == WAVES


@pytest.mark.parametrize("arch", TARGETS)
def test_one_wave_whose_scores_rise_rescales_alone(arch):
    backend = cdna(arch)
    run_rising(backend, SQUARE, slice(70, 71))
    assert rescalings(backend) == WAVES + TILES - 1
