"""The Hopper fp8 forward against the float64 oracle on dequantised inputs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.reference import budget, eager, oracle
from heedful.reference.convert import as_numpy, operands_as_numpy
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9
from support.problems.budget import DRAWS, Error, run
from support.problems.cases import Case, variants
from support.runs.prepared import Prepared

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]

E4M3 = torch.float8_e4m3fn
BASE = Case(dtype="float8_e4m3fn", head_dim=64, heads_q=4, heads_k=2, backward=False)

LENGTHS = [(1, 1), (64, 128), (193, 127), (257, 129), (300, 1), (37, 700), (511, 513)]
DIMS = [(64, 64), (128, 128), (256, 256), (80, 80), (96, 96), (16, 240), (192, 128), (128, 64)]

CASES = [
    *(
        replace(BASE, seqlen_q=sq, seqlen_k=sk, causal=causal, head_dim=dim)
        for sq, sk in LENGTHS
        for causal in (False, True)
        for dim in (64, 128, 256)
    ),
    *(replace(BASE, seqlen_q=200, seqlen_k=333, head_dim=d, head_dim_v=e) for d, e in DIMS),
    *variants(
        replace(BASE, seqlen_q=200, seqlen_k=333),
        layout=("contiguous", "heads_first", "packed"),
        varlen=("", "qk", "q", "k"),
        window=((-1, -1), (-1, 0), (0, 0), (40, 0), (64, 128), (300, -1)),
        bottom_right=(True, False),
        shift=(0, 250, -250),
        softcap=(0.0, 3.0),
        sink=(False, True),
        scale=(0.0, 8.0, -0.3),
    ),
    # Scores hundreds apart, which the fast kernel cannot hold: 2^128 overflows.
    *(
        replace(BASE, seqlen_q=200, seqlen_k=700, head_dim=dim, scale=32.0, causal=causal)
        for dim in (64, 128, 256)
        for causal in (False, True)
    ),
    *variants(
        replace(BASE, seqlen_q=256, seqlen_k=256),
        window=((40, -1), (64, 128), (0, -1), (100, 300)),
        head_dim=(64, 128),
    ),
    # Several promotions of the accumulators, with references that move in between.
    *(
        replace(BASE, seqlen_q=70, seqlen_k=sk, head_dim=dim, scale=1.0, causal=causal)
        for sk in (1153, 2500)
        for dim in (64, 128, 256)
        for causal in (False, True)
    ),
]


# More tiles than an H200 has SMs, of unlike length: programs draw them, at D64 the packed ones.
MANY_TILES = [
    replace(BASE, batch=4, heads_q=16, seqlen_q=700, seqlen_k=900, head_dim=dim, window=window)
    for dim in (64, 128, 256)
    for window in ((-1, 0), (100, 0), (200, 300))
] + [
    replace(
        BASE,
        batch=40,
        heads_q=8,
        varlen=varlen,
        head_dim=dim,
        causal=True,
        seqlen_q=400,
        seqlen_k=400,
    )
    for dim in (64, 128, 256)
    for varlen in ("qk", "q")
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_within_its_error_budget(case):
    run(Prepared("hopper"), case, "cuda")


@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_programs_that_draw_their_tiles_compute_each(case):
    run(Prepared("hopper"), case, "cuda")


def drawn(problem: AttentionProblem, draw: int, descale=None, mean=0.0) -> Operands:
    """Operands of a dense problem, V of this mean. descale: makes one of shape (B, G)."""
    values = torch.Generator().manual_seed(draw)
    p = problem
    shapes = {
        "q": (p.batch, p.seqlen_q, p.heads_q, p.head_dim),
        "k": (p.batch, p.seqlen_k, p.heads_k, p.head_dim),
        "v": (p.batch, p.seqlen_k, p.heads_k, p.head_dim_v),
    }
    made = {name: torch.randn(shape, generator=values) for name, shape in shapes.items()}
    made["v"] += mean
    made = {name: x.to(E4M3).cuda() for name, x in made.items()}
    if descale is not None:
        size = (p.batch, p.heads_k)
        made |= {f"{name}_descale": descale(size, values).cuda() for name in "qkv"}
    return Operands(**made)


def climbing(problem: AttentionProblem) -> Operands:
    """Operands whose scores rise by head_dim * scale from 64 keys to the 64 before them, in the
    order in which the kernel visits keys: from the last to the first."""
    x = drawn(problem, 0)
    level = (problem.seqlen_k - 1 - torch.arange(problem.seqlen_k, device="cuda")) // 64
    k = level[None, :, None, None].expand(x.k.shape).float()
    return x._replace(q=torch.ones_like(x.q.float()).to(E4M3), k=k.to(E4M3))


def fp8_problem(*sizes, **facts) -> AttentionProblem:
    kind = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "return_lse": True}
    return AttentionProblem.dense(*sizes, **kind, **facts)


def check(problem: AttentionProblem, twin, **how) -> None:
    """AssertionError unless the kernel's results are within the budget that `twin` sets."""

    def results(forward, x):
        return budget.Results(*(as_numpy(r) for r in forward(problem, x)))

    def truth(x):
        return budget.Results(*oracle.forward(problem, operands_as_numpy(x)))

    def errors():
        worst: dict[str, Error] = {}
        for draw in range(DRAWS):
            x = drawn(problem, draw, **how)
            got = results(twin, x).present()
            for name, want in truth(x).present().items():
                error = Error.between(got[name], want)
                worst[name] = error.worst(worst.get(name, error))
            yield worst

    x = drawn(problem, 0, **how)
    out = torch.full((*x.q.shape[:-1], problem.head_dim_v), torch.nan, device="cuda")
    out = out.to(getattr(torch, problem.out_dtype))
    got = Prepared("hopper").forward(problem, x, out)
    got = budget.Results(*(as_numpy(r) for r in got))
    judged = budget.judge(got, truth(x), problem.out_dtype, errors())
    wrong = [j.wrong for j in judged.values() if j.wrong]
    assert not wrong, "\n".join(wrong)


DESCALES = {
    "positive": lambda size, g: 0.25 + torch.rand(size, generator=g),
    "any sign": lambda size, g: torch.randn(size, generator=g),
    "zero": lambda size, g: torch.zeros(size),
    "one for all": lambda size, g: torch.full((1, 1), 0.5).expand(size),
    "strided": lambda size, g: torch.rand(size[::-1], generator=g).t(),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("descale", DESCALES.values(), ids=DESCALES)
def test_values_are_stored_times_descale_per_batch_and_kv_head(descale, causal):
    problem = fp8_problem(3, 130, 200, 6, 2, 128, causal=causal)
    check(problem, eager.forward, descale=descale)


def test_softcap_caps_descaled_scores():
    problem = fp8_problem(2, 130, 200, 4, 2, 64, softcap=2.0)
    check(problem, eager.forward, descale=DESCALES["any sign"])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_out_may_be_of_another_dtype(dtype):
    problem = replace(fp8_problem(2, 130, 200, 4, 2, 128), out_dtype=dtype)
    check(problem, eager.forward)


def rounded_probabilities(problem: AttentionProblem, x: Operands):
    """Attention in float64 but for probabilities, which are e4m3 with a row's largest at 64: the
    error that is left when sums are exact."""
    group = problem.group
    q, k, v = (t.double().transpose(1, 2) for t in (x.q, x.k, x.v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT * problem.scale
    p = torch.exp(s - s.amax(-1, keepdim=True))
    rounded = (p * 64).float().to(E4M3).double() / 64
    l_sum = p.sum(-1, keepdim=True)
    out = (rounded @ v / l_sum).transpose(1, 2).to(getattr(torch, problem.out_dtype))
    return out, s.logsumexp(-1).float(), None


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["centred", "all of one sign"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [1024, 131072])
def test_sums_over_many_keys_lose_nothing_to_the_matrix_unit(keys, dim, mean):
    problem = fp8_problem(1, 64, keys, 1, 1, dim)
    check(problem, rounded_probabilities, mean=mean)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rise", [1.5, 6.0, 140.0], ids=lambda r: f"2^{r} a step")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_that_climb_never_saturate(dim, rise, causal):
    """References that must move a little, at every tile, and by more than float32 can hold."""
    problem = fp8_problem(1, 700, 700, 2, 1, dim, causal=causal, scale=rise * math.log(2) / dim)
    x = climbing(problem)
    out = torch.full_like(x.q, torch.nan, dtype=torch.bfloat16)
    out, lse, _ = Prepared("hopper").forward(problem, x, out)
    want, want_lse = oracle.forward(problem, operands_as_numpy(x))[:2]
    # P to 4 bits takes 0.003 of it when emulated, out to 8 bits the rest; a p cut off at 448 would
    # take units.
    assert np.abs(as_numpy(out) - want).max() < 2.0**-5
    assert np.abs(as_numpy(lse) - want_lse).max() < 1e-3


@pytest.mark.parametrize("heads", [(3, 3), (8, 2)], ids=["heads-3", "heads-8-2"])
@pytest.mark.parametrize("keys", [100, 1024, 1030, 2500, 8192])
@pytest.mark.parametrize("dims", [(64, 64), (128, 80), (128, 128)], ids=str)
def test_v_turned_by_the_attention_kernel_gives_the_bits_that_v_turned_ahead_gives(
    dims, keys, heads
):
    """Few rows of queries have V transposed ahead, many have the attention kernel do it."""
    import heedful

    (heads_q, heads_k), rows = heads, 1024
    few = rows // (2 * heads_q // heads_k)
    torch.manual_seed(0)
    q = torch.randn(2, rows, heads_q, dims[0], device="cuda").to(E4M3)
    k, v = (torch.randn(2, keys, heads_k, dim, device="cuda").to(E4M3) for dim in dims)
    ahead = [
        heedful.flash_attn_func(q[:, start : start + few], k, v, backend="hopper")
        for start in range(0, rows, few)
    ]
    for _ in range(5):
        out = heedful.flash_attn_func(q, k, v, backend="hopper")
        assert torch.equal(out, torch.cat(ahead, 1))


def test_twenty_runs_are_bit_equal():
    import heedful

    torch.manual_seed(0)
    # Long enough for the dynamic scheduler.
    q, k, v = (torch.randn(2, 2500, 8, 128, device="cuda").to(E4M3) for _ in range(3))
    outs = [heedful.flash_attn_func(q, k, v, causal=True, backend="hopper") for _ in range(20)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_scale_of_zero_weighs_all_visible_keys_alike():
    import heedful

    q, k = (torch.randn(1, 300, 2, 64, device="cuda").to(E4M3) for _ in range(2))
    v = torch.randint(0, 2, q.shape, device="cuda").float()
    out = heedful.flash_attn_func(q, k, v.to(E4M3), softmax_scale=0.0, causal=True)
    rows = torch.arange(1, 301, device="cuda")[:, None, None]
    torch.testing.assert_close(out, (v.cumsum(1) / rows).to(out.dtype))


def test_fp8_calls_run_here_unasked():
    import heedful

    q = torch.randn(1, 100, 2, 128, device="cuda").to(E4M3)
    assert "forward   hopper" in heedful.explain(heedful.flash_attn_func, q, q, q)
