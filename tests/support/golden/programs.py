"""Problems of the golden table of programs (tests/cpu/launch/test_golden_programs.py): facts, by
the device and the backend whose kernels are given them."""

from collections.abc import Iterable

from heedful.core.call.mask import MaskSpec
from heedful.core.registry.by_hand import forced

BASE = {"batch": 2, "seqlen_q": 200, "seqlen_k": 300, "heads_q": 8, "heads_k": 4, "head_dim": 128}
GRAD = {"needs_grad": True}
PACKED = {"total_q": 330, "total_k": 510}
ONE = {"batch": 1, "heads_q": 1, "heads_k": 1}
DECODE = {"seqlen_q": 1, "seqlen_k": 4000, "used_k": True}
CAUSAL = {"mask": MaskSpec.of(True)}
BIAS = {"bias": True, "bias_grad": True, **GRAD}
FP8 = {"dtype": "float8_e4m3fn"}
FAR = 2**29
# Facts, and arrays that lie otherwise than a contiguous call's: their strides, or unaligned.
Asked = tuple[dict, dict[str, tuple[int, ...] | None]]


def plain(*facts: dict) -> list[Asked]:
    return [(f, {}) for f in facts]


def sizes(**choices: Iterable) -> list[dict]:
    return [{name: value} for name, values in choices.items() for value in values]


SCORES = plain(
    {},
    *({"mask": MaskSpec(m, n)} for m, n in ((0, 5), (5, 0), (-1, 0), (0, -1))),
    *({"mask": MaskSpec(3, 4, first)} for first in (1, 2, FAR + 3)),
    *({"mask": MaskSpec(m, n)} for m, n in ((FAR + 1, FAR + 2), (FAR - 1, FAR - 2))),
    *({"mask": MaskSpec(-1, 0, 0, False, s)} for s in (-FAR - 1, -FAR + 1, FAR - 1, FAR + 1)),
    *sizes(softcap=(0.5, 30.0), scale=(-0.2, 1e-40), dtype=("float16", "float32")),
    *sizes(dropout_p=(2.0**-34, 2.0**-32, 0.25, 1.0)),
    *(
        {"dropout_p": 0.25, "dropout_origin": o}
        for o in ((2**31, 2**32 - 1, 5, 6), (1, 2, 3, 8), (0, 2**32, 2**33 + 7, 12), (4, 4, 4, 5))
    ),
    {"alibi": True, "softcap": 0.5},
    {"alibi": True, **ONE},
    {"sink": True, "return_lse": True},
    {"return_lse": True},
    {"return_probs": True},
    {"out_dtype": "float32"},
    *sizes(max_scores=(True,), keeps_rest=(True,), rel_bias=(True,)),
    {"rel_bias": True, **PACKED},
    *({"dropout_p": 0.25, "origins": n} for n in (1, 4)),
    *({"invariant": True, "seqlen_k": n, "return_lse": True} for n in (300, 20_000)),
)
TERMS: list[Asked] = [
    ({"bias": True, "seqlen_k": 304}, {}),
    ({"bias": True, "seqlen_k": 304}, {"bias": (0, 304 * 200, 0, 1)}),
    ({"bias": True, "seqlen_k": 304}, {"bias": (8, 4, 304, 1)}),
    ({"bias": True, "seqlen_k": 304}, {"bias": None}),
    ({"bias": True}, {"bias": (1, 2, 3, 4)}),
    ({"bias": True, **ONE, "seqlen_q": 1, "seqlen_k": 8}, {}),
    ({"bias": True, "softcap": 3.0, "total_k": 510}, {}),
    ({"bias": True, **PACKED}, {}),
    ({"alibi": True}, {"alibi_slopes": (0, 1)}),
    ({"tree_mask": True, "seqlen_q": 5}, {}),
    ({"tree_mask": True, **ONE, "seqlen_q": 5}, {}),
    ({"tree_mask": True, "seqlen_q": 1}, {}),
]
LENGTHS = plain(
    PACKED,
    {**PACKED, "batch": 0},
    {**PACKED, "seqlen_q": 0},
    {**PACKED, **CAUSAL, "heads_q": 12},
    {**PACKED, **CAUSAL, "heads_q": 9, "heads_k": 9},
    *({**PACKED, "head_dim": d, "return_lse": True} for d in (8, 72)),
    {**PACKED, "page_size": 16},
    {**PACKED, **CAUSAL, "return_lse": True, "num_splits": 3},
    {**PACKED, "used_q": True, "return_lse": True},
    {**PACKED, "used_k": True, "batch": 300, "total_q": 6000},
    *sizes(total_k=(510,), total_q=(330,), used_q=(True,), used_k=(True,), leftpad_k=(True,)),
    {**CAUSAL, "q_offsets": True, "seqlen_q": 63},
    *sizes(kv_batch_idx=(True,), batch=(0, 1), seqlen_q=(1, 63, 64, 65), seqlen_k=(1, 2, 63)),
    {"total_q": 330, "used_k": True, "page_size": 16},
    {"total_q": 330, "used_k": True, "page_size": 16, "mask": MaskSpec.of(True, (50, 0))},
    *({"page_size": p, "used_k": True, "seqlen_k": 310} for p in (1, 16, 17, 48, 64, 256)),
    {"page_size": 16, "used_k": True, "leftpad_k": True},
    {**ONE, "seqlen_q": 1, "seqlen_k": 1},
    {"page_size": 16, "used_k": True, **ONE, "seqlen_k": 16},
)
MIXED = {**PACKED, "total_k": None, "used_k": True, **CAUSAL}
MIXES = plain(
    MIXED,
    *({**MIXED, **facts} for facts in ({"page_size": 16}, {"num_splits": 1}, {"return_lse": True})),
    *(
        {**MIXED, "heads_q": q, "heads_k": k}
        for q, k in ((8, 8), (16, 1), (17, 1), (64, 1), (65, 1))
    ),
    *(
        {**MIXED, "batch": b, "total_q": t}
        for b, t in ((1, 330), (300, 6000), (0, 330), (40, 20_000))
    ),
    *({**MIXED, "head_dim": d} for d in (64, 192, 256, 264)),
    {**MIXED, **PACKED, "used_q": True, "sink": True, "alibi": True},
)
DIMS = plain(
    *sizes(head_dim=(8, 12, 16, 40, 64, 72, 129, 136, 192, 193, 200, 256, 264, 512)),
    *(
        {"head_dim": d, "head_dim_v": e}
        for d, e in ((192, 128), (192, 64), (192, 136), (128, 192), (64, 192), (136, 72), (64, 256))
    ),
    {"head_dim": 192, "page_size": 16, "used_k": True},
    *(
        {"head_dim": d, "head_dim_v": e, "heads_k": 1}
        for d, e in ((513, 16), (528, 512), (529, 64), (576, 512), (544, 512))
    ),
    *({"head_dim": 192, "head_dim_v": e, "num_splits": 2} for e in (128, 192)),
)
CACHES = plain(
    *({**DECODE, "kv_dtype": d} for d in ("int8", "float8_e5m2")),
    *({**DECODE, "kv_dtype": "int4", "kv_group": g, "kv_shift": True} for g in (16, 32)),
    {**DECODE, "kv_dtype": "int8", "kv_group": 64, "page_size": 16},
    {**DECODE, "kv_dtype": "int8", "kv_group": 16, "kv_shift": True, "return_probs": True},
    {**DECODE, "return_probs": True, "page_size": 16},
)
WORK = plain(
    *({**DECODE, "heads_q": q, "heads_k": k} for q, k in ((8, 1), (4, 2), (6, 2), (5, 5), (2, 2))),
    *({**DECODE, "heads_q": 8, "heads_k": 1, "num_splits": n} for n in (1, 2, 7)),
    *({"num_splits": n} for n in (1, 2, 3)),
    {"num_splits": 2, "sink": True, "return_lse": True},
    {"num_splits": 2, **ONE, "seqlen_q": 1, "return_lse": True},
    {"num_splits": 2, "head_dim": 64, "seqlen_q": 31},
    {"num_splits": 2, "head_dim": 8, "return_lse": True},
    {**DECODE, "seqlen_q": 64, "heads_q": 8, "heads_k": 1},
    {**DECODE, "seqlen_q": 60, "heads_q": 6, "heads_k": 2},
    *(
        {"seqlen_q": 4096, "seqlen_k": 4096, "batch": 4, "head_dim": d, "head_dim_v": e, "bias": b}
        for d, e, b in (
            *((192, 128, False), (192, 192, False), (192, 64, False), (192, 256, False)),
            *((256, 256, False), (256, 128, False), (128, 192, False), (128, 64, False)),
            *((64, 64, False), (64, 128, False), (128, 128, True), (256, 256, True)),
        )
    ),
    {**CAUSAL, "seqlen_q": 4096, "seqlen_k": 4096, "mask": MaskSpec.of(True, (64, 0))},
    {"seqlen_q": 4096, "mask": MaskSpec.of(True, (64, 0)), "head_dim_v": 192},
    {"num_splits": 2, "head_dim": 256},
    {"num_splits": 2, "head_dim": 512},
    # Heads whose keys fill half of L2.
    *({"heads_k": 8, "heads_q": 8, "seqlen_k": n} for n in (10_000, 20_000, 30_720, 30_721)),
    *({"seqlen_k": n} for n in (61_440, 61_441, 200_000)),
    *({"seqlen_k": n, "head_dim": 64, "head_dim_v": 256} for n in (20_000, 60_000)),
    {"seqlen_k": 90_000, "kv_dtype": "int8", "heads_k": 8},
    {"seqlen_k": 0},
    # Tiles in sections, and dealt out.
    *(
        {**CAUSAL, "batch": b, "heads_q": h, "heads_k": h, "seqlen_q": n, "seqlen_k": k}
        for b, h, n, k in (
            (1, 132, 129, 129),
            (1, 66, 256, 256),
            (1, 67, 256, 256),
            (1, 1, 132 * 128, 5000),
            (1, 1, 133 * 128, 5000),
            (4, 32, 896, 896),
            (4, 32, 897, 897),
            (4, 32, 1024, 1024),
            (4, 32, 1025, 1025),
            (2, 8, 4096, 4096),
            (1, 3, 9000, 9000),
            (3, 100, 150, 60_000),
            (3, 100, 150, 6000),
        )
    ),
    *({**CAUSAL, "seqlen_q": 4096, "seqlen_k": 4096, fact: True} for fact in ("used_q", "used_k")),
    {**CAUSAL, "seqlen_q": 4096, "seqlen_k": 4096, "leftpad_k": True},
    {"seqlen_q": 4096, "seqlen_k": 4096, "batch": 4},
    {**CAUSAL, "seqlen_q": 4096, "head_dim": 64, "alibi": True},
    {"mask": MaskSpec.of(True, (64, 0)), "seqlen_q": 4096, "head_dim": 64},
)
EIGHT_BITS = plain(
    *({**FP8, "seqlen_q": n, "heads_q": 4} for n in (1023, 1024, 1025)),
    *({**FP8, "seqlen_q": n, "heads_q": 8, "seqlen_k": k} for n, k in ((511, 1), (512, 1024))),
    *({**FP8, "seqlen_q": 2048, "seqlen_k": k, "batch": 3} for k in (1025, 2048, 2049)),
    *({**FP8, "seqlen_q": 2048, "head_dim": d} for d in (64, 80, 256)),
    *({**FP8, "seqlen_q": 2048, "total_k": 510} for _ in (1,)),
    {**FP8, **PACKED, "seqlen_q": 2000, "total_q": 2100},
    {**FP8, **PACKED, **CAUSAL, "return_lse": True},
    {**FP8, **PACKED, **CAUSAL, "heads_q": 3, "heads_k": 3},
    {**FP8, **CAUSAL, "seqlen_q": 3000, "heads_q": 64},
    {**FP8, "mask": MaskSpec.of(False, (0, 3)), "softcap": 0.5},
    {**FP8, "return_lse": True, "heads_q": 6, "heads_k": 6},
)
LAID_OUT: list[Asked] = [
    ({}, {"q": (2**30, 2**22 - 8, 128, 1)}),
    ({}, {"q": (2**30, 2**22, 128, 1)}),
    ({}, {"k": (2**40, -(2**22), 128, 1)}),
    ({}, {"q": None}),
    ({}, {"v": (200000, 600, 130, 1)}),
    ({}, {"out": (204800 * 8, 8 * 1024, 1024, 1)}),
    (ONE, {"q": (3, 128, 7, 1), "k": (5, 136, 3, 1), "v": (9, 128, 1, 1)}),
    ({**ONE, "seqlen_q": 1, "seqlen_k": 1}, {"q": (3, 5, 7, 1), "out": (1, 1, 1, 1)}),
    ({"batch": 3, "seqlen_k": 1, "used_k": True}, {"k": (512 * 9, 0, 128, 1)}),
    ({"batch": 3, "seqlen_k": 1, "used_k": True}, {"k": (0, 0, 128, 1), "v": (0, 1, 128, 1)}),
    ({"batch": 3, "used_k": True}, {"k": (512 * 900, 1024, 128, 1)}),
    ({**GRAD}, {"q": (25600 * 8, 1032, 129, 1)}),
    ({**GRAD, "head_dim": 72}, {}),
    ({**GRAD, **PACKED}, {"lse": None}),
    # One array alone off 16 bytes.
    *(
        ({"num_splits": n, "return_lse": True}, {name: None})
        for n in (1, 2)
        for name in ("q", "k", "v", "out")
    ),
    *(({"return_probs": True}, {name: None}) for name in ("q", "k", "v", "out")),
    *(({**GRAD}, {f"{d}{name}": None}) for d in ("", "d") for name in ("q", "k", "v", "out")),
    *((PACKED, {name: None}) for name in ("q", "out")),
    *(({**GRAD, **PACKED}, {name: None}) for name in ("dq", "dk", "dv")),
]
GRADIENTS = plain(
    GRAD,
    {**GRAD, **PACKED},
    {**GRAD, "total_k": 510},
    {**GRAD, **PACKED, "used_k": True, "used_q": True},
    {**GRAD, "leftpad_k": True, "used_k": True},
    {**GRAD, "sink": True, "heads_k": 8},
    {**GRAD, "sink": True, **PACKED},
    BIAS,
    {**BIAS, "dtype": "float32", **ONE},
    {**GRAD, "seqlen_k": 40_000},
    {**GRAD, "page_size": 16, "used_k": True},
    {**GRAD, "head_dim": 40, "head_dim_v": 24},
    {**GRAD, **CAUSAL, "dropout_p": 0.5, "dropout_origin": (1, 2, 3, 5)},
)
CDNA = plain(
    {},
    *sizes(head_dim=(64,), batch=(1,), num_splits=(1, 2, 5), seqlen_q=(1, 257), dtype=("float16",)),
    *({"mask": MaskSpec(-1, 0, 0, False, s)} for s in (-FAR - 1, 0, FAR + 1)),
    CAUSAL,
    {**ONE, "return_lse": True},
    {"return_lse": True, "num_splits": 2, "total_q": 330},
    {"total_k": 5000},
    {"total_q": 330, "total_k": 5000, "return_lse": True},
    {"scale": 0.3},
) + [
    ({}, {"q": (2**30, 2**22 - 8, 128, 1)}),
    ({}, {"q": (2**30, 2**22, 128, 1)}),
    ({}, {"v": (2**30, -(2**22), 128, 1)}),
    (ONE, {"q": (3, 128, 7, 1), "k": (5, 136, 3, 1), "out": (9, 128, 8, 1)}),
]
# Steps of a decode: rows within a unit, pages, what is stored of keys.
STEPS: list[Asked] = [
    *(
        ({"seqlen_q": n, "heads_q": q, "heads_k": k}, {})
        for n, q, k in (
            (1, 4, 1),
            (1, 3, 1),
            (1, 5, 1),
            (2, 8, 4),
            (4, 8, 4),
            (16, 8, 8),
            (9, 6, 3),
        )
    ),
    *(({"page_size": p}, {}) for p in (1, 3, 16, 17, 48, 64)),
    *(({"kv_dtype": d}, {}) for d in ("int8", "float8_e5m2")),
    *(
        ({"kv_dtype": d, "kv_group": g, "kv_shift": s}, {})
        for d, g, s in (
            ("int8", 32, False),
            ("int8", 64, True),
            ("int4", 32, True),
            ("int4", 64, True),
        )
    ),
    *(({"head_dim": d, "head_dim_v": e}, {}) for d, e in ((64, 128), (72, 40), (256, 256))),
    ({"kv_dtype": "int8", "kv_group": 64, "head_dim": 192, "head_dim_v": 64}, {}),
    *(({"head_dim_v": e, "v_in_k": True}, {}) for e in (128, 64)),
    *(({"num_splits": n, "return_lse": True}, {}) for n in (1, 2, 7)),
    ({"total_q": 3, "total_k": 5000, "return_lse": True}, {}),
    ({"total_q": 3, "used_q": True, "return_lse": True}, {}),
    ({"total_q": 3, "batch": 0}, {}),
    *(({fact: True}, {}) for fact in ("used_q", "leftpad_k", "kv_batch_idx", "sink", "alibi")),
    ({"seqlen_q": 4, "tree_mask": True, "softcap": 0.5}, {}),
    ({"mask": MaskSpec.of(True, (64, 0)), "seqlen_q": 2}, {}),
    *(({}, {name: None}) for name in ("q", "k", "v", "out")),
    ({}, {"q": (8 * 1032, 1032, 129, 1)}),
    ({}, {"k": (2**40, 2**22, 128, 1)}),
]
LATENT = {"heads_q": 16, "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True}
LATENT_STEPS: list[Asked] = [
    *(({"seqlen_q": n, "heads_q": q}, {}) for n, q in ((1, 15), (1, 17), (2, 8), (2, 9), (1, 128))),
    *(({"page_size": p}, {}) for p in (1, 16, 48, 64, 128, 192)),
    ({"page_size": 64, "batch": 3}, {"k": (100 * 576, 576, 576, 1)}),
    ({"used_k": False}, {}),
    ({"total_q": 3, "return_lse": True}, {}),
    *(({"num_splits": n, "return_lse": True}, {}) for n in (1, 2)),
    ({"mask": MaskSpec.of(True), "seqlen_q": 3}, {}),
    *(({}, {name: None}) for name in ("q", "out")),
    ({"scale": 0.3}, {}),
    ({"leftpad_k": True}, {}),
]
HOPPER_STEPS: list[Asked] = [
    # Rows that are kept for a merge.
    *(({"seqlen_q": n, "heads_q": 8, "heads_k": 2}, {}) for n in (1, 2, 3, 5, 9)),
    *(({"head_dim": d}, {}) for d in (40, 64, 72, 192, 256)),
    *(({"head_dim": d, "page_size": p}, {}) for d, p in ((64, 64), (128, 16), (128, 48))),
    ({"used_k": False}, {}),
    ({"batch": 50}, {}),
    *(({"num_splits": n, "return_lse": True}, {}) for n in (1, 2)),
    ({"mask": MaskSpec(9, 0, 2), "seqlen_q": 3, "sink": True}, {}),
    *(({}, {name: None}) for name in ("q", "out")),
    ({"scale": 0.3, "leftpad_k": True}, {}),
    ({"total_q": 3, "return_lse": True}, {}),
    ({"total_q": 30, "seqlen_q": 9, "used_q": True, "page_size": 16}, {}),
    ({"total_q": 3, "total_k": 5000, "used_k": False}, {}),
]
WIDE_GRADIENTS = plain(
    *({**GRAD, "head_dim": d, "head_dim_v": e} for d, e in ((64, 64), (192, 128), (256, 256))),
    {**GRAD, "num_splits": 2, "return_lse": True},
    {**GRAD, **CAUSAL, "deterministic": True},
    {**GRAD, **PACKED, **CAUSAL, "deterministic": True},
    {**GRAD, "seqlen_q": 20_000, "heads_q": 1, "heads_k": 1, "batch": 1},
    {**GRAD, "alibi": True, "softcap": 0.5},
    {**GRAD, "mask": MaskSpec(3, 4, 2)},
)
# Block masks: each of what hides a position of them, alone; lists that entries or heads share.
ALONE = {"needs_grad": False}
LISTS: list[Asked] = [
    *plain(
        {},
        {"block_mask": 64},
        *(
            {**ALONE, **facts}
            for facts in (
                *sizes(used_q=(True,), used_k=(True,), total_q=(330,), total_k=(510,)),
                {"used_k": True, "page_size": 16},
                {"seqlen_q": 5, "tree_mask": True},
                {"q_offsets": True, "seqlen_q": 5, **CAUSAL},
                *sizes(alibi=(True,), num_splits=(2,)),
            )
        ),
        {**PACKED, "return_lse": True},
        *sizes(used_k=(True,), leftpad_k=(True,), sink=(True,), softcap=(0.5, 1.0)),
        {**CAUSAL, "q_offsets": True},
        {"mask": MaskSpec.of(True, (64, 0))},
        *sizes(batch=(1,), heads_k=(1, 8), head_dim=(64, 192), seqlen_q=(1, 128)),
        *({"seqlen_q": 129, "seqlen_k": n} for n in (1, 128, 129)),
        {"seqlen_q": 700, "block_mask": 64, "head_dim": 64},
        {"seqlen_q": 700, "block_mask": 64, "scattered": True},
    ),
    *(
        (facts, {"block_rows": (0, h, 8, 1), "block_keys": (0, h // 8 * 6, 6, 1)})
        for facts in ({}, CAUSAL, {**CAUSAL, "batch": 1}, {"leftpad_k": True})
        for h in (0, 16)
    ),
    ({}, {"block_rows": (128, 16, 8, 1), "block_keys": (144, 0, 6, 1)}),
]
RANGES = plain(
    {},
    {"own_ranges": True},
    {"key_ranges": 2},
    {**PACKED, "return_lse": True},
    *({**ALONE, **facts} for facts in sizes(used_q=(True,), bias=(True,), num_splits=(2,))),
    *sizes(used_k=(True,), softcap=(0.5,), batch=(0, 1), seqlen_q=(63, 64, 65)),
    *sizes(head_dim=(64, 256), heads_k=(1, 8)),
)
# Rows that are cut into packed sequences, and what of a call leaves them whole; a backward of few
# rows splits its visits, and does not cut.
CUTS: list[Asked] = [
    *plain(
        {},
        *sizes(own_ranges=(True,), sink=(True,), num_splits=(1,), rows_follow=(False,)),
        {**ALONE, "num_splits": 2},
        *sizes(heads_k=(1,), head_dim=(64,), batch=(0, 1), return_lse=(True,)),
        *({"seqlen_q": n, "seqlen_k": n} for n in (1, 128, 129, 300)),
    ),
    *(({}, {name: (1024 * 9001, 1024, 128, 1)}) for name in ("q", "out", "dout", "dk")),
]
CUT = {"key_ranges": 1, "seqlen_q": 9000, "seqlen_k": 9000, **CAUSAL, **GRAD}
TABLE: dict[tuple[str, str], list[Asked]] = {
    ("H200", "hopper"): [*SCORES, *TERMS, *LENGTHS, *DIMS, *WORK, *EIGHT_BITS, *LAID_OUT],
    ("B200", "portable"): [*SCORES, *TERMS, *LENGTHS, *DIMS, *CACHES, *WORK, *LAID_OUT, *GRADIENTS],
    ("RTX 4090", "decode"): [({**DECODE, **facts}, laid) for facts, laid in [({}, {}), *STEPS]],
    # Sequences may differ in length by each of these alone.
    ("MI300X", "decode"): plain(
        {**DECODE, "heads_q": 5, "heads_k": 1},
        *(
            {**DECODE, "used_k": False, **facts}
            for facts in (
                {},
                *sizes(used_q=(True,), leftpad_k=(True,), total_q=(3,), total_k=(5000,)),
                {"q_offsets": True, **CAUSAL},
            )
        ),
    ),
    ("H200", "mixed"): MIXES,
    ("H200", "hopper_mixed"): MIXES,
    ("H200", "mla"): [
        ({**DECODE, **LATENT, **facts}, laid) for facts, laid in [({}, {}), *LATENT_STEPS]
    ],
    ("H200", "mla_swap_ab"): [
        ({**DECODE, **LATENT, **facts, "heads_q": 16}, laid)
        for facts, laid in [({}, {}), *LATENT_STEPS]
    ],
    ("H200", "hopper_decode"): [
        ({**DECODE, **facts}, laid) for facts, laid in [({}, {}), *HOPPER_STEPS]
    ],
    # Behind a forward that takes them, the backward is Hopper's own or portable.
    ("H200", "best"): [*GRADIENTS, *WIDE_GRADIENTS],
    ("H200", "lists"): [({"block_mask": 128, **GRAD, **facts}, laid) for facts, laid in LISTS],
    ("H200", "ranges"): [({"key_ranges": 1, **GRAD, **facts}, laid) for facts, laid in RANGES],
    ("H200", "cuts"): [({**CUT, **facts}, laid) for facts, laid in CUTS],
    ("MI300X", "cdna"): [({"seqlen_k": 500, **facts}, laid) for facts, laid in CDNA],
    ("MI355X", "cdna"): plain({"seqlen_k": 500}, {"seqlen_k": 500, **FP8}),
}

# The backend of a table, where that is not its name; None is what is chosen by default.
NAMED = dict.fromkeys(("best", "lists", "ranges"))
NAMED |= {"mixed": forced("mixed/portable"), "cuts": forced("hopper+cuts_rows=1")}

# A cache's own launches: sizes of k_new (B, S, G, D), facts, and arrays as above.
CACHE: list[tuple[str, dict, dict[str, tuple[int, ...] | None]]] = [
    ("append", {}, {}),
    *(("append", facts, {}) for facts in ({"pages": 16}, {"pages": 48}, {"rows": True})),
    *(
        ("append", {"dim": d, "dim_v": e}, {})
        for d, e in ((12, 8), (64, 256), (512, 64), (576, 512))
    ),
    ("append", {"rotary": 64, "interleaved": False, "position0": 5}, {}),
    ("append", {"rotary": 16, "leftpad": True, "seqlen": 40}, {}),
    ("append", {"rotary": 64}, {"rotary_cos": (40, 1), "rotary_sin": (40, 1)}),
    ("append", {"rotary": 64}, {"rotary_cos": (40, 1)}),
    ("append", {}, {"k_new": None, "v": (99_999, 333, 129, 1)}),
    ("append", {"pages": 16}, {"block_table": (100, 1)}),
    ("append", {"batch": 0}, {}),
    *(("append", {}, {name: None}) for name in ("k_new", "v_new", "k", "v")),
    ("update", {"rotary": 64}, {}),
    ("update", {"rotary": 32, "interleaved": False, "advance": False, "position0": 7}, {}),
    ("update", {"rotary": 64, "dim": 64, "dim_v": 256, "pages": 16}, {}),
    ("update", {"rotary": 64}, {"k_new": None, "rotated": (10_000, 2**22, 130, 1)}),
    *(
        ("update", {"rotary": 32, "dim": d, "seqlen": n}, {})
        for d, n in ((512, 9), (64, 33), (64, 32))
    ),
    ("update", {"rotary": 32}, {"q": None, "rotated": (10_000, 2**22, 130, 1)}),
    ("update", {"rotary": 32, "batch": 1, "seqlen": 1}, {}),
    *(("update", {"rotary": 64}, {name: None}) for name in ("q", "rotated")),
    ("update", {}, {}),
]
