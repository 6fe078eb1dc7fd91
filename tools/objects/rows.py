"""The objects that are run, each on a small ragged problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from objects.problems import TRUNCATED, Problem, backward, forward
from objects.serving import latent, paged, product


@dataclass(frozen=True)
class Row:
    """One object: its file below hsa/CHIP, the problem in words, what builds it, and the object
    that has to run on its output, if one has."""

    chip: str
    file: str
    problem: str
    build: Callable[[str], Problem]
    after: str = ""


_ONE = partial(forward, lengths_q=[300], lengths_k=[333], heads=2)
_GROUP = partial(forward, lengths_q=[300, 150], lengths_k=[333, 200], heads=2, group=True)
_CAUSAL = partial(forward, lengths_q=[700], lengths_k=[700], heads_k=2, heads=2, causal=True)
_TRUNCATED = partial(_ONE, unit=TRUNCATED)
_WIDE = partial(_ONE, dims=(192, 128), tile=128)
_MI300 = "fmha_v3_fwd/MI300/fwd_"
_FWD, _BWD = "fmha_v3_fwd/fwd_", "fmha_v3_bwd/bwd_hd128_bf16_"

ROWS = [
    Row("gfx942", f"{_MI300}hd128_bf16_rtne.co", "300 x 333, heads 2:1", _ONE),
    Row("gfx942", f"{_MI300}hd128_bf16_rtz.co", "300 x 333, heads 2:1", _TRUNCATED),
    Row("gfx942", f"{_MI300}hd128_bf16_causal_rtne.co", "700 x 700, 2 heads", _CAUSAL),
    Row("gfx942", f"{_MI300}hd128_bf16_rtne_group.co", "300 x 333 and 150 x 200", _GROUP),
    Row("gfx942", f"{_MI300}hd128_fp8.co", "300 x 333, heads 2:1", partial(_ONE, kind="fp8")),
    Row("gfx942", f"{_MI300}hd192x128_bf16_rtne.co", "300 x 333, heads 2:1", _WIDE),
    Row("gfx950", f"{_FWD}hd128_bf16.co", "300 x 333, heads 2:1", _ONE),
    Row("gfx950", f"{_FWD}hd128_bf16_causal.co", "700 x 700, 2 heads", _CAUSAL),
    Row("gfx950", f"{_FWD}hd128_bf16_group.co", "300 x 333 and 150 x 200", _GROUP),
    Row("gfx950", f"{_FWD}hd128_fp8.co", "300 x 333, heads 2:1", partial(_ONE, kind="fp8")),
    Row("gfx950", f"{_FWD}hd192_hd128_bf16.co", "300 x 333, heads 2:1", _WIDE),
    Row(
        "gfx942",
        f"{_BWD}a32_rtne_psskddv.co",
        "200 x 250, heads 2:1",
        partial(backward, sq=200, sk=250, heads=2, tile=192),
    ),
    Row(
        "gfx942",
        f"{_BWD}a16_rtne.co",
        "192 x 192",
        partial(backward, sq=192, sk=192, tile=192, atomic=16),
    ),
    Row("gfx950", f"{_BWD}a32_psskddv.co", "256 x 256", partial(backward, sq=256, sk=256)),
    Row(
        "gfx950",
        f"{_BWD}a16_psskddv.co",
        "256 x 256",
        partial(backward, sq=256, sk=256, atomic=16),
        "fmha_v3_bwd/bwd_hd128_dq_shuffle.co",
    ),
    Row(
        "gfx942",
        "pa/pa_bf16_noquant_gqa8_1tg_4w.co",
        "100, 256 and 37 keys, heads 8:1",
        partial(paged, lengths=[100, 256, 37]),
    ),
    Row(
        "gfx950",
        "pa/pa_bf16_noquant_gqa8_1tg_4w.co",
        "100 and 300 keys, heads 16:2",
        partial(paged, lengths=[100, 300], heads=16, heads_k=2),
    ),
    Row(
        "gfx942",
        "mla/mla_a16w16_qh16_m16x4_n16x1_coex0_mask1.co",
        "2 queries, 100 and 200 keys",
        partial(latent, lengths=[100, 200], queries=2),
    ),
    Row(
        "gfx950",
        "mla/mla_a16w16_qh16_m16x4_n16x1_coex0_mask1.co",
        "4 queries, 100 and 200 keys, 2 splits",
        partial(latent, lengths=[100, 200], queries=4, splits=2),
    ),
    Row(
        "gfx942",
        "bf16gemm/bf16gemm_fp32bf16_tn_32x64_pf3_splitk.co",
        "64 x 128 x 256",
        partial(product, m=64, n=128, k=256),
    ),
    Row(
        "gfx950",
        "bf16gemm/bf16gemm_bf16_tn_256x256.co",
        "256 x 512 x 256",
        partial(product, m=256, n=512, k=256, tile=(256, 256)),
    ),
]
