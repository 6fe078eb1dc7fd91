"""The CDNA kernels on e4m3, each target its own: attention of the dequantised inputs within the
error budget, without a finding, and to the same bits whatever the order of the waves."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from emulated.helpers.backend import Emulated
from emulated.helpers.edited import run_edited
from support.problems.budget import backend_results, oracle_results, run
from support.problems.cases import Case, build
from support.problems.grids import in_turns, slow_but

DTYPES = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}
# Seven tiles of 64 keys or four of 128; multiples of nothing.
BASE = Case(
    batch=1,
    seqlen_q=70,
    seqlen_k=403,
    heads_q=1,
    heads_k=1,
    head_dim=128,
    backward=False,
    num_splits=1,
)
CASES = [
    BASE,
    replace(BASE, causal=True, head_dim=64),
    # More rows than a tile, in heads that share keys and a descale; the first rows see nothing.
    replace(BASE, causal=True, seqlen_q=500, heads_q=2),
    replace(
        BASE,
        head_dim=64,
        causal=True,
        varlen="qk",
        batch=2,
        seqlen_q=290,
        layout="packed",
        heads_q=2,
    ),
    replace(BASE, head_dim=64, causal=True, num_splits=2),
]
SCHEDULES = ("lockstep", "round-robin", "delay:0-3", "random:0")
MANY_SCHEDULES = ("lockstep", "round-robin", "random:0-9")


def of_target(case: Case, arch: str) -> Case:
    """The case in the e4m3 that a target multiplies."""
    return replace(case, dtype=DTYPES[arch])


@pytest.mark.parametrize("case, arch", in_turns(CASES, list(DTYPES), each=4), ids=str)
def test_forward_is_within_budget_under_every_kind_of_schedule(arch, case):
    run(Emulated(arch, "cdna", SCHEDULES), of_target(case, arch))


LONG = [
    *(replace(case, head_dim=dim) for case in CASES for dim in (64, 128)),
    *(
        replace(BASE, seqlen_k=n, causal=causal, head_dim=dim)
        for n in (384, 1031)
        for causal in (False, True)
        for dim in (64, 128)
    ),
    *(replace(BASE, seqlen_q=n, causal=True) for n in (1, 256, 257)),
    replace(BASE, causal=True, bottom_right=False, seqlen_q=300),
    replace(BASE, causal=True, shift=-90),
    replace(BASE, layout="heads_first", heads_q=2, heads_k=2, batch=2),
    replace(BASE, varlen="k", batch=2, lens_k=(0, 450), seqlen_k=450),
    replace(BASE, scale=0.8),
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", DTYPES)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_every_shape_is_within_budget_under_many_schedules(arch, case):
    run(Emulated(arch, "cdna", MANY_SCHEDULES), of_target(case, arch))


def results(arch: str, **descales):
    """(out, lse) as NumPy with these descales in place of the case's own."""
    built = build(of_target(replace(BASE, head_dim=64), arch))
    x = built.x._replace(**{f"{name}_descale": scale for name, scale in descales.items()})
    got = backend_results(Emulated(arch, "cdna"), replace(built, x=x))
    return got, oracle_results(replace(built, x=x))


@pytest.mark.parametrize("arch", slow_but({"gfx950"}, DTYPES))
def test_a_zero_descale_gives_every_key_the_same_weight(arch):
    got, want = results(arch, q=torch.zeros(1, 1))
    # 403 equal weights: e4m3 is exact, what is left is float32 and one rounding to bfloat16.
    assert np.allclose(want.lse, math.log(BASE.seqlen_k))
    assert np.allclose(got.lse, want.lse, rtol=2.0**-22)
    assert np.abs(got.out - want.out).max() <= 2.0**-8 * np.abs(want.out).max()


@pytest.mark.parametrize("arch", DTYPES)
def test_descales_of_any_sign_are_within_the_budget(arch):
    """Queries hold zeros, whose negative is a NaN in one of the formats."""

    def edit(built):
        x = built.x
        q = x.q.clone()
        q.view(torch.uint8)[:, ::3] = 0
        return replace(built, x=x._replace(q=q, q_descale=-x.q_descale, v_descale=-x.v_descale))

    run_edited(
        Emulated(arch, "cdna"), of_target(replace(BASE, head_dim=64, causal=True), arch), edit
    )


@pytest.mark.parametrize("arch", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_in_queries_stays(arch, sign):
    built = build(of_target(replace(BASE, head_dim=64), arch))
    q = built.x.q.clone()
    q.view(torch.uint8)[:, 5] = 0x80 if DTYPES[arch].endswith("uz") else 0x7F
    x = built.x._replace(q=q, q_descale=built.x.q_descale * sign)
    got = backend_results(Emulated(arch, "cdna"), replace(built, x=x))
    assert np.isnan(got.out[:, 5]).all() and np.isfinite(got.out[:, :5]).all()


@pytest.mark.parametrize("out_dtype, arch", in_turns(["float16", "float32"], list(DTYPES)))
def test_descales_are_optional_and_the_output_may_be_another_float(arch, out_dtype):
    def edit(built):
        x = built.x._replace(q_descale=None, k_descale=None, v_descale=None)
        return replace(built, x=x, problem=replace(built.problem, out_dtype=out_dtype))

    run_edited(Emulated(arch, "cdna"), of_target(replace(BASE, head_dim=64), arch), edit)


@pytest.mark.parametrize("arch", slow_but({"gfx950"}, DTYPES))
def test_long_keys_lose_nothing(arch):
    """Accumulation is in float32: as many keys as the emulator takes in seconds are as right as
    few."""
    run(
        Emulated(arch, "cdna"),
        of_target(replace(BASE, seqlen_q=3, seqlen_k=8201, head_dim=64), arch),
    )
