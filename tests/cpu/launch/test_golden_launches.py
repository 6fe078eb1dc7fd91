"""A golden table of launches: whatever changes in what kernels are given shows here by operand and
by name, to be looked at. Numbers only: what they mean is checked by the tests that compute.

After a change that is meant:

    WRITE_GOLDEN_LAUNCHES=1 pytest tests/cpu/launch/test_golden_launches.py
"""

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton")

import numpy as np
from triton.experimental.gluon._runtime import GluonJITFunction

from heedful.core.registry.by_hand import forced
from support import launches
from support.problems.cases import FRESH, Built, Case, build
from support.runs import api, standin

GOLDEN = Path(__file__).with_name("golden_launches")
HALF = Case(dtype="bfloat16", head_dim=64, batch=2, seqlen_q=200, seqlen_k=300, heads_q=8)
FORWARD = replace(HALF, backward=False)
FP8 = replace(FORWARD, dtype="float8_e4m3fn", seqlen_k=512)
DECODE = replace(FORWARD, seqlen_q=1, seqlen_k=2000, used="k")
PACKED = replace(HALF, varlen="qk", batch=3)

SCORES = (
    HALF,
    replace(HALF, causal=True, layout="packed"),
    replace(HALF, window=(70, 30), scale=0.2),
    replace(HALF, window=(70, 0, 4), shift=-9, layout="heads_first"),
    replace(HALF, bottom_right=False, causal=True, softcap=9.0),
    replace(HALF, alibi="h", sink=True),
    replace(HALF, alibi="bh", softcap=9.0),
    replace(HALF, bias="bhqk"),
    replace(HALF, bias="hk", seqlen_k=304),
    replace(HALF, dropout_p=0.25, dropout_origin=(1, 2**32 - 3, 5, 2**32 - 8)),
    replace(HALF, dropout_p=1.0),
    replace(FORWARD, return_probs=True),
    replace(HALF, layout="offset"),
    replace(HALF, head_dim=96, head_dim_v=40),
    replace(HALF, head_dim=192, head_dim_v=128, heads_k=8),
    replace(HALF, head_dim=128, causal=True, seqlen_q=5000, seqlen_k=5000),
    replace(HALF, head_dim=256, dtype="float16"),
    replace(HALF, batch=1, heads_k=1),
)
LENGTHS = (
    PACKED,
    replace(PACKED, causal=True, used="qk", sink=True),
    replace(PACKED, head_dim=128, window=(64, 0)),
    replace(PACKED, q_offsets=True, causal=True),
    replace(FORWARD, varlen="q", used="k", page_size=16),
    DECODE,
    replace(DECODE, heads_q=2, heads_k=2, num_splits=1),
    replace(DECODE, num_splits=5, causal=True),
    replace(DECODE, page_size=16),
    replace(DECODE, page_size=48, num_splits=2, sink=True),
    replace(DECODE, kv_batch_idx=True, leftpad_k=True),
    replace(DECODE, seqlen_q=4, tree_mask=True),
    replace(DECODE, seqlen_q=4, q_offsets=True, causal=True, used=""),
    replace(DECODE, kv_dtype="int8", kv_group=16, kv_shift=True),
    replace(DECODE, kv_dtype="int4", kv_group=32),
    replace(DECODE, kv_dtype="float8_e5m2", page_size=16),
    replace(FORWARD, num_splits=3),
    replace(FORWARD, varlen="qk", num_splits=2),
)
EIGHT_BITS = (
    FP8,
    replace(FP8, causal=True, head_dim=128, seqlen_q=1024),
    replace(FP8, window=(99, 0), head_dim=256),
    replace(FP8, varlen="qk", causal=True, sink=True),
    replace(FP8, heads_q=2, heads_k=2, softcap=9.0, seqlen_q=2048, seqlen_k=2048, batch=1),
)
DECODES = (
    *(replace(DECODE, **{name: True}) for name in ("causal", "sink", "leftpad_k", "kv_batch_idx")),
    # Each of what lengths come from, alone.
    replace(DECODE, used=""),
    replace(DECODE, used="", leftpad_k=True),
    replace(DECODE, num_splits=5, seqlen_q=3),
    replace(DECODE, page_size=16, head_dim=128),
    replace(DECODE, page_size=48, head_dim=256, head_dim_v=40),
    replace(DECODE, window=(70, 0), softcap=9.0, alibi="bh"),
    replace(DECODE, kv_dtype="int8", kv_group=16, kv_shift=True),
    replace(DECODE, kv_dtype="int4", kv_group=32, head_dim=128),
    replace(DECODE, kv_dtype="int4", head_dim=128, page_size=16),
    replace(DECODE, kv_dtype="float8_e4m3fn", page_size=16),
    replace(DECODE, heads_q=48, heads_k=1, head_dim=128),
)
MIXED = replace(FORWARD, varlen="q", page_size=16, causal=True, batch=5)
MIXED = replace(MIXED, lens_q=(200, 1, 0, 16, 17))
MIXES = (
    MIXED,
    replace(MIXED, head_dim=128, sink=True, used="q"),
    replace(MIXED, num_splits=1, window=(70, 0), softcap=9.0, alibi="bh"),
    replace(MIXED, page_size=0, varlen="qk", used="qk", heads_k=8),
    replace(MIXED, heads_k=1, head_dim=256, head_dim_v=192),
    replace(MIXED, num_splits=3),
)
LATENT = replace(DECODE, heads_q=16, heads_k=1, head_dim=576, head_dim_v=512, v_in_k=True)
MLA = (
    LATENT,
    replace(LATENT, used=""),
    replace(LATENT, heads_q=128, seqlen_q=2, causal=True, page_size=64),
    replace(LATENT, page_size=48, num_splits=3, used="qk"),
    replace(LATENT, kv_batch_idx=True, num_splits=1),
    replace(LATENT, leftpad_k=True, shift=-3, causal=True, layout="heads_first"),
)
FEW_ROWS = (
    *MLA[:2],
    *(replace(case, heads_q=8, seqlen_q=1) for case in MLA[3:]),
    replace(LATENT, heads_q=16, seqlen_q=2, causal=True, page_size=64),
)
STORED_LATENT = (
    *(replace(case, kv_dtype="float8_e4m3fn") for case in (*MLA[:3], *MLA[4:])),
    replace(LATENT, kv_dtype="fp8_ds_mla"),
    replace(LATENT, kv_dtype="fp8_ds_mla", heads_q=128, page_size=64, num_splits=3),
)
STORED_PAIRS = (
    *(replace(case, kv_dtype="float8_e4m3fn", heads_q=64) for case in (*MLA[:3], *MLA[4:])),
    replace(LATENT, kv_dtype="fp8_ds_mla", heads_q=128, page_size=64, num_splits=3),
)
HOPPER_DECODES = (
    *DECODES[:4],
    replace(DECODE, used=""),
    replace(DECODE, num_splits=5, seqlen_q=3),
    replace(DECODE, num_splits=1, kv_batch_idx=True, leftpad_k=True, head_dim=80),
    replace(DECODE, page_size=16, head_dim=128, sink=True),
    replace(DECODE, page_size=48, head_dim=256, head_dim_v=40, used="qk"),
    replace(DECODE, window=(70, 0, 9), causal=True, layout="heads_first"),
    replace(DECODE, varlen="q", used="", page_size=16, batch=5, seqlen_q=7, causal=True),
    replace(DECODE, varlen="qk", used="qk", batch=3, num_splits=1),
)
CDNA = (
    replace(HALF, seqlen_k=2048),
    replace(HALF, seqlen_k=512, causal=True, head_dim=128, layout="packed"),
    replace(FORWARD, seqlen_k=512, varlen="qk", causal=True, shift=5),
    replace(FORWARD, seqlen_k=4096, num_splits=4),
)
DEVICES: dict[tuple[str, str], tuple[Case, ...]] = {
    ("H200", "mla"): MLA,
    ("H200", "mla_swap_ab"): FEW_ROWS,
    ("H200", "mla_converting"): STORED_LATENT,
    ("H200", "mla_converting_pair"): STORED_PAIRS,
    ("H200", "hopper_decode"): HOPPER_DECODES,
    ("H200", "mixed"): MIXES,
    ("H200", "hopper_mixed"): MIXES,
    ("H200", "hopper"): (*SCORES, *LENGTHS, *EIGHT_BITS),
    ("RTX 4090", "decode"): DECODES,
    ("MI300X", "decode"): DECODES[:8],
    ("B200", "portable"): (*SCORES, *LENGTHS),
    ("MI355X", "cdna"): (*CDNA, FP8),
    ("MI300X", "cdna"): (*CDNA, replace(FP8, dtype="float8_e4m3fnuz", causal=True)),
}


def told(built: Built, backend: str, device: str) -> list[str]:
    """The launches of a case, forward and backward; or why there are none."""
    with standin.gpu(device) as gpu:
        try:
            named = forced("mixed/portable") if backend == "mixed" else backend
            api.results(built, backend=named)
        except ValueError as error:
            return [f"  none: {str(error).split(': ', 1)[-1]}"]
    assert all(is_gluon(launch) == (launch.kernel.dialect == "gluon") for launch in gpu.launches)
    assert {launch.kernel.dialect for launch in gpu.launches} <= {"gluon", "triton"}
    return [line for launch in gpu.launches for line in launches.described(launch)]


def is_gluon(launch: standin.Launch) -> bool:
    kernel = getattr(import_module(launch.kernel.module), launch.kernel.function)
    return isinstance(kernel, GluonJITFunction)


def table(device: str, backend: str) -> str:
    lines = []
    for case in DEVICES[device, backend]:
        lines += [str(case), *told(build(case), backend, device)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("device, backend", DEVICES)
def test_launches_are_those_of_the_golden_table(device, backend):
    if FRESH:
        pytest.skip("the table is of the cases that `make test` draws")
    path = GOLDEN / f"{device} {backend}.txt"
    found = table(device, backend)
    if os.environ.get("WRITE_GOLDEN_LAUNCHES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert found == path.read_text()


def test_new_memory_is_poisoned_so_that_what_a_launch_skips_shows():
    with standin.gpu("H200"):
        out = api.results(build(replace(FORWARD, seqlen_q=3))).out
    assert np.isnan(out).all()
