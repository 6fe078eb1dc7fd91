"""The Hopper forward against the float64 oracle: lengths around tile edges, masks, storage, terms,
splits, and random problems over all that its row takes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.hopper.device import ON_HOPPER
from support.problems.budget import run
from support.problems.cases import Case, twins, variants
from support.problems.variants import problems, sample
from support.runs.prepared import Prepared

pytestmark = ON_HOPPER

BASE = Case(dtype="bfloat16", head_dim=64, heads_q=4, heads_k=2, backward=False, num_splits=1)

LENGTHS = [(1, 1), (64, 128), (193, 127), (257, 129), (300, 1), (37, 700), (511, 513)]
LENGTHS_OF_MANY = [(130, 2100), (1, 2048)]
DIMS = [(64, 64), (128, 128), (256, 256), (72, 72), (96, 96), (8, 248), (128, 64)]
# Three boxes of 64 columns, where other tiles are one box.
DIMS += [(192, 128), (192, 192), (136, 256), (64, 192), (144, 8)]

CASES = [
    *(
        Case(**{**vars(BASE), "seqlen_q": sq, "seqlen_k": sk, "causal": causal, "head_dim": dim})
        for sq, sk in LENGTHS
        for causal in (False, True)
        for dim in (64, 128, 256)
    ),
    *(Case(**{**vars(BASE), "seqlen_q": sq, "seqlen_k": sk}) for sq, sk in LENGTHS_OF_MANY),
    *(
        Case(**{**vars(BASE), "seqlen_q": 200, "seqlen_k": 333, "head_dim": d, "head_dim_v": e})
        for d, e in DIMS
    ),
    *variants(
        Case(**{**vars(BASE), "seqlen_q": 200, "seqlen_k": 333}),
        layout=("contiguous", "heads_first", "packed"),
        dtype=("bfloat16", "float16"),
        varlen=("", "qk", "q", "k"),
        window=((-1, -1), (-1, 0), (0, 0), (40, 0), (64, 128), (300, -1)),
        bottom_right=(True, False),
        shift=(0, 250, -250),
        softcap=(0.0, 3.0),
        sink=(False, True),
        scale=(0.0, 8.0),
    ),
    # Whole tiles of keys, so that the left bound alone masks the first tile visited.
    *variants(
        Case(**{**vars(BASE), "seqlen_q": 256, "seqlen_k": 256}),
        window=((40, -1), (64, 128), (0, -1), (100, 300)),
        head_dim=(64, 128),
    ),
]

# More tiles than an H200 has SMs, of unlike length: programs draw them.
MANY_TILES = [
    replace(BASE, batch=4, heads_q=16, seqlen_q=700, seqlen_k=900, head_dim=dim, window=window)
    for dim in (64, 128, 256)
    for window in ((-1, 0), (100, 0), (200, 300), (64, 0, 9))
] + [
    replace(
        BASE,
        batch=40,
        heads_q=8,
        varlen="qk",
        head_dim=dim,
        causal=True,
        seqlen_q=400,
        seqlen_k=400,
    )
    for dim in (64, 128, 256)
]

# What reads less than all of its storage: the rest of it is NaN.
STORAGE = Case(**{**vars(BASE), "seqlen_q": 150, "seqlen_k": 333, "batch": 3})
STORED = [
    *variants(
        STORAGE,
        used=("q", "k", "qk"),
        leftpad_k=(True,),
        kv_batch_idx=(True,),
        page_size=(16, 48, 64, 256),
    ),
    *variants(
        replace(STORAGE, causal=True, used="qk"), varlen=("q", "k", "qk"), head_dim=(128, 256)
    ),
    *variants(
        replace(STORAGE, used="k", causal=True, head_dim=128),
        leftpad_k=(True,),
        kv_batch_idx=(True,),
        layout=("heads_first", "packed"),
        seqlen_k=(1, 64),
    ),
    *variants(
        replace(STORAGE, page_size=32, causal=True),
        head_dim=(64, 72, 128, 256),
        head_dim_v=(128,),
        varlen=("q",),
        used=("q",),
        window=((40, 0), (64, -1, 9)),
        layout=("heads_first", "packed"),
        batch=(1,),
        dtype=("float16",),
    ),
]

TERMS = Case(**{**vars(BASE), "seqlen_q": 150, "seqlen_k": 333})
SCORES = [
    *(
        replace(TERMS, head_dim=dim, causal=causal, **term)
        for dim in (64, 128, 256)
        for causal in (False, True)
        for term in ({"alibi": "bh"}, {"bias": "bhqk"}, {"dropout_p": 0.3})
    ),
    *variants(
        TERMS,
        alibi=("h",),
        bias=("hqk", "qk", "bk", "q", "k"),
        dropout_p=(1.0, 2.0**-40),
        dropout_origin=((3, 2**32 - 1, 7, 2**32 - 4),),
    ),
    # Keys in whole eights, so that neighbours of the bias are one load.
    *variants(replace(TERMS, seqlen_k=336), bias=("bhqk", "bk")),
    *variants(
        replace(TERMS, bias="bhqk", alibi="bh", softcap=5.0, causal=True),
        dropout_p=(0.2,),
        varlen=("qk",),
        used=("qk",),
        sink=(True,),
        scale=(3.0,),
    ),
    replace(TERMS, dropout_p=0.3, dropout_origin=(0, 0, 5, 16), seqlen_k=2100),
]

LEADING = Case(**{**vars(BASE), "seqlen_q": 400, "seqlen_k": 700})
FIRST_KEYS = variants(
    LEADING,
    window=((40, -1, 4), (40, 0, 4), (3, 60, 200), (500, 0, 100), (0, 0, 1000), (64, -1, 65)),
) + variants(
    replace(LEADING, window=(30, 0, 5)),
    head_dim=(128, 256),
    num_splits=(2, 5),
    used=("qk",),
    varlen=("qk",),
    shift=(-650, 300),
    bottom_right=(False,),
    sink=(True,),
)

KEYS_IN_PARTS = [
    *(
        replace(TERMS, head_dim=dim, causal=causal, num_splits=splits, seqlen_k=1000)
        for dim in (64, 128, 256)
        for causal in (False, True)
        for splits in (0, 2, 7)
    ),
    *variants(
        replace(TERMS, num_splits=4, seqlen_k=1000),
        seqlen_q=(1, 64, 300),
        window=((40, 0), (64, 128)),
        sink=(True,),
        varlen=("q", "k", "qk"),
        used=("q", "qk"),
        head_dim_v=(72, 128),
        dropout_p=(0.3,),
        bias=("bhqk",),
        page_size=(64,),
        dtype=("float16",),
        num_splits=(40,),
    ),
    replace(TERMS, num_splits=0, seqlen_q=130, seqlen_k=5000),
    # Rows that are not in use have no sink, those that see no key have it.
    replace(TERMS, num_splits=3, used="q", sink=True, shift=-100, window=(0, 0)),
]


def in_float16(cases):
    """The cases, and in the slow tier their twins in float16, whose budget is narrower."""
    known = set(cases)
    return [
        case if case in known else pytest.param(case, marks=pytest.mark.slow)
        for case in twins(cases, "float16")
    ]


@pytest.mark.parametrize("case", in_float16(CASES), ids=str)
def test_a_case_is_within_its_error_budget(case):
    run(Prepared("hopper"), case, "cuda")


@pytest.mark.parametrize("case", in_float16(MANY_TILES), ids=str)
def test_programs_that_draw_their_tiles_compute_each(case):
    run(Prepared("hopper"), case, "cuda")


@pytest.mark.parametrize("case", in_float16(STORED), ids=str)
def test_what_a_sequence_does_not_use_of_its_storage_is_never_used(case):
    run(Prepared("hopper"), case, "cuda")


@pytest.mark.parametrize("case", in_float16(SCORES), ids=str)
def test_terms_and_dropout_are_within_their_error_budgets(case):
    run(Prepared("hopper"), case, "cuda")


@pytest.mark.parametrize("case", in_float16(FIRST_KEYS), ids=str)
def test_leading_keys_stay_visible_beside_a_window(case):
    run(Prepared("hopper"), case, "cuda")


@pytest.mark.parametrize("case", in_float16(KEYS_IN_PARTS), ids=str)
def test_split_keys_merge_to_the_whole(case):
    run(Prepared("hopper"), case, "cuda")


# Query heads of a KV head in one tile, in as many rows as the next power of two.
PACKED = [
    replace(BASE, heads_q=heads, heads_k=2, seqlen_q=sq, seqlen_k=sk, head_dim=dim, causal=causal)
    for heads, sq, sk in ((4, 1, 700), (16, 4, 333), (10, 37, 500), (6, 64, 129), (34, 2, 100))
    for dim in (64, 128, 256)
    for causal in (False, True)
] + variants(
    replace(BASE, heads_q=12, heads_k=2, seqlen_q=9, seqlen_k=900, batch=3),
    num_splits=(0, 4),
    used=("q", "k", "qk"),
    page_size=(64,),
    kv_batch_idx=(True,),
    leftpad_k=(True,),
    sink=(True,),
    softcap=(3.0,),
    window=((40, 0), (100, 3, 20)),
    layout=("heads_first", "packed"),
    head_dim_v=(128,),
    dtype=("float16",),
    heads_k=(1, 3, 12),
    varlen=("q", "k"),
    shift=(-895,),
)
PACKED += variants(
    replace(PACKED[-1], used="qk", sink=True, num_splits=3, shift=0, causal=True),
    page_size=(16,),
    head_dim=(128,),
    window=((300, 0, 7),),
)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_query_heads_that_share_a_tile_are_within_their_error_budgets(case):
    run(Prepared("hopper"), case, "cuda")


def _may_run(case: Case) -> bool:
    """Whether the hopper row takes a case, as far as it varies from problem to problem."""
    return bool(case.batch and case.seqlen_q and case.seqlen_k and case.page_size % 16 == 0)


def _hopper_variants(count: int) -> list[Case]:
    """Variants that the hopper row takes: it has no tree masks, no loads off 16 bytes, and no
    left-padded pages. Its backward is the portable one, tested there."""
    found = [
        replace(variant, backward=False, lse_grad=False, deterministic=False)
        for variant in sample(3 * count, seed=4, dtypes=("float16", "bfloat16"))
        if not (variant.tree_mask or variant.layout == "offset")
        and not (variant.leftpad_k and variant.page_size)
    ]
    return list({str(variant): variant for variant in found}.values())[:count]


def _hopper_problems(variant: Case):
    """Problems of a variant that the row takes, half of those that leave the splits to the planner
    with none: small ones get a tile of their own else."""
    return (
        problems(variant)
        .filter(_may_run)
        .map(lambda case: replace(case, num_splits=case.num_splits or case.seed % 2))
    )


# 50 x 40 problems; lengths choose among several tiles each, so that kernels are some 300.
VARIANTS, EACH = _hopper_variants(50), 40


@pytest.mark.parametrize("variant", VARIANTS[:3], ids=str)
@settings(max_examples=EACH)
@given(data=st.data())
def test_a_random_problem_is_within_its_error_budget(variant, data):
    run(Prepared("hopper"), data.draw(_hopper_problems(variant)), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[3:], ids=str)
@settings(max_examples=EACH)
@given(data=st.data())
def test_two_thousand_random_problems_are_within_their_error_budgets(variant, data):
    run(Prepared("hopper"), data.draw(_hopper_problems(variant)), "cuda")


def test_twenty_runs_are_bit_equal():
    import heedful

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1000, 8, 128, device="cuda").bfloat16() for _ in range(3))
    for splits in (1, 3):
        outs = [
            heedful.flash_attn_func(q, k, v, causal=True, num_splits=splits, backend="hopper")
            for _ in range(20)
        ]
        assert all(torch.equal(out, outs[0]) for out in outs)
