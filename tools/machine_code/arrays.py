"""The covering arrays: which problems, for which targets.

A factor is something that kernels are compiled for; sizes are run-time values, and stand here only
where the choice of a kernel or of its tiles depends on them.
"""

from dataclasses import replace
from typing import Any

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.problem import AttentionProblem
from heedful.launch.program import buffers
from heedful.launch.record import Entry
from machine_code.covering import Factors, Row
from machine_code.hopper_arrays import HOPPER_ARRAYS
from machine_code.table import (
    FLAGS,
    MASKS,
    PORTABLE_TARGETS,
    Array,
    Launched,
    always,
    directions,
    excluded,
)


def _dropout(row: Row) -> dict[str, Any]:
    kind = row.get("dropout", "none")
    if kind == "places":
        return {"dropout_p": 0.1, "origins": 4}
    origin = (0, 0, 0, int(kind == "singles"))
    return {"dropout_p": 0.0 if kind == "none" else 0.1, "dropout_origin": origin}


# ---- portable ---------------------------------------------------------------------------------

PORTABLE: Factors = {
    "dims": ((64, 64), (128, 128), (40, 40), (96, 64), (256, 256), (13, 29)),
    "dtype": ("bfloat16", "float16", "float32"),
    "mask": ("full", "causal", "window", "first"),
    "backward": FLAGS,
    "storage": ("dense", "varlen", "used", "paged", "leftpad"),
    "group": (1, 3),
    "softcap": (0.0, 8.0),
    "alibi": FLAGS,
    "bias": FLAGS,
    "dropout": ("none", "quads", "singles", "places"),
    "sink": FLAGS,
    "tree_mask": FLAGS,
    "aligned": (True, False),
    "offsets": FLAGS,
}


def portable_problem(row: Row) -> AttentionProblem:
    """Sizes are run-time values: any will do."""
    storage = row["storage"]
    heads_k, (dim, dim_v) = 4, row["dims"]
    packed = 3000 if storage == "varlen" else None
    return AttentionProblem.dense(
        2,
        1024,
        2048,
        heads_k * row["group"],
        heads_k,
        dim,
        row["dtype"],
        head_dim_v=dim_v,
        mask=MASKS[row["mask"]],
        softcap=row["softcap"],
        **_dropout(row),
        total_q=packed,
        total_k=packed,
        used_q=storage == "used",
        used_k=storage in ("used", "paged"),
        page_size=16 if storage == "paged" else 0,
        leftpad_k=storage == "leftpad",
        alibi=row["alibi"],
        bias=row["bias"],
        sink=row["sink"],
        tree_mask=row["tree_mask"],
        q_offsets=row["offsets"],
        needs_grad=row["backward"],
        bias_grad=row["bias"] and row["backward"],
        return_lse=True,
        aligned=row["aligned"],
    )


def _portable(row: Row, target: str) -> Launched:
    problem = portable_problem(row)
    return Launched("portable", directions(problem, problem.aligned))


# What the forward takes beyond that: quantised caches, splits, probabilities, indices, keys wider
# than any value.
QUANTISED: Factors = {
    "kv": ("int8", "int4", "float8_e5m2", "bfloat16"),
    "scales": ("heads", "groups", "groups-shifts"),
    "dims": ((64, 64), (128, 128), (96, 64), (576, 512)),
    "mask": ("full", "causal-first"),
    "storage": ("used", "paged", "indexed"),
    "splits": (1, 3),
    "probs": FLAGS,
    "group": (1, 3),
    "lse": FLAGS,
}
_quantised_possible = excluded(
    {"kv": ("bfloat16",), "scales": ("groups", "groups-shifts")},
    {"kv": ("int4",), "scales": ("heads",)},
    {"kv": ("int4", "int8", "float8_e5m2"), "dims": ((576, 512),)},
    {"dims": ((576, 512),), "scales": ("groups", "groups-shifts")},
    {"dims": ((576, 512),), "probs": (True,)},
    {"splits": (3,), "probs": (True,)},
    {"lse": (False,), "probs": (True,)},
)


def quantised_problem(row: Row) -> AttentionProblem:
    storage, (dim, dim_v) = row["storage"], row["dims"]
    heads_k = 4
    return AttentionProblem.dense(
        2,
        1024,
        2048,
        heads_k * row["group"],
        heads_k,
        dim,
        head_dim_v=dim_v,
        mask=MASKS[row["mask"]],
        kv_dtype=row["kv"],
        kv_group=0 if row["scales"] == "heads" else 32,
        kv_shift=row["scales"] == "groups-shifts",
        used_k=True,
        page_size=16 if storage == "paged" else 0,
        kv_batch_idx=storage == "indexed",
        num_splits=row["splits"],
        return_probs=row["probs"],
        return_lse=row["lse"],
    )


def _quantised(row: Row, target: str) -> Launched:
    return Launched("portable", directions(quantised_problem(row)))


# ---- Hopper -----------------------------------------------------------------------------------

# batch, query rows, keys, KV heads: "long" has more tiles than there are SMs, "medium" fewer,
# "small" so few keys that they are not split; of the rest the tiles have fewer rows.
SIZES = {
    "long": (2, 4096, 4096, 8),
    "medium": (2, 300, 3000, 8),
    "small": (1, 512, 1024, 4),
    "two-tiles": (2, 100, 3000, 4),
    "few": (2, 50, 3000, 4),
    "decode": (2, 5, 3000, 4),
}
HOPPER: Factors = {
    "dims": ((128, 128), (64, 64), (256, 256), (192, 128), (192, 192), (40, 192)),
    "dtype": ("bfloat16", "float16"),
    "mask": ("full", "causal", "left", "causal-first"),
    "storage": ("dense", "varlen", "varlen-paged", "used", "paged", "leftpad", "indexed"),
    "sizes": tuple(SIZES),
    "group": (1, 4),
    "splits": (1, 3),
    "softcap": (0.0, 8.0),
    "alibi": FLAGS,
    "bias": ("none", "wide", "narrow", "relative"),
    "dropout": ("none", "quads", "places"),
    "sink": FLAGS,
    "lse": FLAGS,
    "largest": FLAGS,
    "ranges": (0, 1, 2),
    "lists": (0, 128, 64),
    "offsets": FLAGS,
    "float_out": FLAGS,
}
_LISTS: Row = {"lists": (128, 64)}
_hopper_possible = excluded(
    {"sizes": ("small",), "splits": (3,)},
    {"largest": (True,), "splits": (3,)},
    {"mask": ("causal-first",), "ranges": (1, 2)},
    {**_LISTS, "ranges": (1, 2)},
    {**_LISTS, "mask": ("causal-first",)},
    {**_LISTS, "alibi": (True,)},
    {**_LISTS, "bias": ("wide", "narrow", "relative")},
    {**_LISTS, "dropout": ("quads", "places")},
    {"storage": ("paged", "varlen-paged"), "float_out": (True,)},
)
_PLAIN: Row = {name: values[0] for name, values in HOPPER.items()}
# Calls whose tiles neither biases, draws for each score, ranges nor lists decide.
_LIGHT: Row = {
    **{"bias": "none", "dropout": "none", "alibi": False},
    **{"largest": False, "ranges": 0, "lists": 0, "float_out": False},
}
_EVEN: Row = {**_LIGHT, "storage": "dense"}
# Calls as they are timed, and for each row of the config table one that it is chosen for.
_HOPPER_SEEDS: tuple[Row, ...] = (
    {**_PLAIN, "dims": (64, 64), "mask": "causal", "lse": True},
    {**_PLAIN, "mask": "causal"},
    {**_PLAIN, "storage": "varlen", "mask": "causal"},
    {**_EVEN, "sizes": "long", "dims": (128, 128), "mask": "full", "lse": True},
    {**_LIGHT, "sizes": "medium", "dims": (64, 64), "storage": "varlen", "mask": "left"},
    {**_EVEN, "sizes": "long", "dims": (64, 64), "alibi": True},
    {**_EVEN, "sizes": "long", "dims": (192, 128), "mask": "causal"},
    {**_EVEN, "sizes": "long", "dims": (192, 192)},
    {**_EVEN, "sizes": "long", "dims": (256, 256), "mask": "causal"},
    {**_LIGHT, "sizes": "medium", "dims": (128, 128), "bias": "wide", "storage": "dense"},
    {**_LIGHT, "sizes": "medium", "dims": (256, 256), "dropout": "quads"},
    {**_LIGHT, "sizes": "two-tiles", "dims": (64, 64)},
    *({**_EVEN, "sizes": "small", "dims": (dim, dim)} for dim in (64, 128, 256)),
    *({**_LIGHT, "sizes": "few", "dims": (dim, dim), "group": 1} for dim in (64, 128, 256)),
    *({**_EVEN, "sizes": "few", "dims": (dim, dim), "group": 4} for dim in (64, 128, 256)),
    *(
        {**_LIGHT, "sizes": "decode", "dims": (dim, dim), "group": 4, "storage": "paged"}
        for dim in (64, 128, 256)
    ),
    *(
        {**_EVEN, "sizes": "long", "dims": (dim, dim), "mask": "full", "lists": side}
        for dim in (64, 128, 256)
        for side in (64, 128)
    ),
)


def hopper_problem(row: Row) -> AttentionProblem:
    storage, (dim, dim_v) = row["storage"], row["dims"]
    batch, rows, keys, heads_k = SIZES[row["sizes"]]
    return AttentionProblem.dense(
        batch,
        rows,
        keys + (row["bias"] == "narrow"),
        heads_k * row["group"],
        heads_k,
        dim,
        row["dtype"],
        head_dim_v=dim_v,
        out_dtype="float32" if row["float_out"] else row["dtype"],
        mask=MASKS[row["mask"]],
        softcap=row["softcap"],
        **_dropout(row),
        total_q=batch * rows - 30 if storage.startswith("varlen") else None,
        total_k=batch * keys - 30 if storage == "varlen" else None,
        used_q=storage == "used",
        used_k=storage in ("used", "paged", "varlen-paged", "indexed"),
        page_size=16 if storage in ("paged", "varlen-paged") else 0,
        leftpad_k=storage == "leftpad",
        kv_batch_idx=storage == "indexed",
        alibi=row["alibi"],
        bias=row["bias"] in ("wide", "narrow"),
        rel_bias=row["bias"] == "relative",
        sink=row["sink"],
        key_ranges=row["ranges"],
        block_mask=row["lists"],
        q_offsets=row["offsets"],
        return_lse=row["lse"],
        max_scores=row["largest"],
        num_splits=0 if row["sizes"] == "small" else row["splits"],
    )


def _hopper(row: Row, target: str) -> Launched:
    return Launched("hopper", directions(hopper_problem(row)))


FP8: Factors = {
    "dims": ((128, 128), (64, 64), (256, 256), (64, 128)),
    # Whether the attention kernel transposes V itself.
    "sizes": ("long", "medium"),
    "out": ("bfloat16", "float16", "float32"),
    "mask": ("full", "causal", "left"),
    "storage": ("dense", "varlen"),
    "group": (1, 4),
    "softcap": (0.0, 8.0),
    "sink": FLAGS,
    "lse": FLAGS,
    "descales": FLAGS,
    "offsets": FLAGS,
}
_FP8_PLAIN: Row = {name: values[0] for name, values in FP8.items()}
# Those whose loops tests/compile looks at, too: compiled once.
_FP8_SCALED: Row = {**_FP8_PLAIN, "descales": True}
_FP8_SEEDS: tuple[Row, ...] = (
    _FP8_SCALED,
    {**_FP8_SCALED, "dims": (64, 64), "mask": "causal", "lse": True},
)


def fp8_problem(row: Row, dtype: str = "float8_e4m3fn") -> AttentionProblem:
    (dim, dim_v), is_packed = row["dims"], row["storage"] == "varlen"
    batch, rows, keys, heads_k = SIZES[row["sizes"]]
    return AttentionProblem.dense(
        batch,
        rows,
        keys,
        heads_k * row["group"],
        heads_k,
        dim,
        dtype,
        head_dim_v=dim_v,
        out_dtype=row["out"],
        mask=MASKS[row["mask"]],
        softcap=row["softcap"],
        total_q=batch * rows - 30 if is_packed else None,
        total_k=batch * keys - 30 if is_packed else None,
        sink=row["sink"],
        q_offsets=row["offsets"],
        return_lse=row["lse"],
    )


def _with_descales(problem: AttentionProblem) -> Entry:
    descale = ArraySpec.contiguous((problem.batch, problem.heads_k), "float32")
    descales = {f"{name}_descale": descale for name in "qkv"}
    return Entry(problem, "forward", buffers.forward(problem) | descales)


def _fp8(row: Row, target: str) -> Launched:
    problem = fp8_problem(row)
    entries = (_with_descales(problem),) if row["descales"] else directions(problem)
    return Launched("hopper", entries)


# ---- CDNA -------------------------------------------------------------------------------------

CDNA: Factors = {
    "dims": (64, 128),
    # "float8": the target's own e4m3, with an output of 16 or 32 bits.
    "dtype": ("bfloat16", "float16", "float8", "float8-float32"),
    "mask": ("full", "causal"),
    "storage": ("dense", "varlen"),
    "group": (1, 4),
    "splits": (1, 3),
    "lse": FLAGS,
    "descales": FLAGS,
}
E4M3 = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}
_cdna_possible = excluded({"dtype": ("bfloat16", "float16"), "descales": (True,)})


def cdna_problem(row: Row, target: str) -> AttentionProblem:
    kind, _, out = row["dtype"].partition("-")
    dtype = E4M3[target] if kind == "float8" else kind
    packed = 3000 if row["storage"] == "varlen" else None
    return AttentionProblem.dense(
        1,
        4096,
        4096,
        2 * row["group"],
        2,
        row["dims"],
        dtype,
        row["mask"] == "causal",
        out_dtype=out or ("bfloat16" if kind == "float8" else kind),
        total_q=packed,
        total_k=packed,
        num_splits=row["splits"],
        return_lse=row["lse"],
    )


def _cdna(row: Row, target: str) -> Launched:
    problem = cdna_problem(row, target)
    entries = (_with_descales(problem),) if row["descales"] else directions(problem)
    return Launched("cdna", entries)


# ---- kernels beside attention: KV caches, splits of keys, storage of no sequence --------------

APPEND: Factors = {
    "dims": ((128, 128), (64, 64), (13, 29)),
    "dtype": ("bfloat16", "float16", "float32"),
    "rotary": ("none", "interleaved", "halves"),
    "storage": ("dense", "paged", "indexed", "leftpad"),
    "quantised": ("", "int8 heads", "int8 groups", "int4 groups"),
}
_append_possible = excluded({"dims": ((13, 29),), "quantised": ("int8 groups", "int4 groups")})


def _append(row: Row, target: str) -> Launched:
    make, (dim, dim_v), dtype = ArraySpec.contiguous, row["dims"], row["dtype"]
    lead = (64, 16) if row["storage"] == "paged" else (6, 256)
    lengths = make((2,), "int32")
    arrays = {"k_new": make((2, 5, 4, dim), dtype), "v_new": make((2, 5, 4, dim_v), dtype)}
    kind, _, scales = row["quantised"].partition(" ")
    stored, values = ("uint8", 2) if kind == "int4" else (kind or dtype, 1)
    for name, width in (("k", dim), ("v", dim_v)):
        arrays[name] = make((*lead, 4, width // values), stored)
        if kind:
            shape = (*lead, 4, width // 32) if scales == "groups" else (2, 4)
            arrays[f"{name}_descale"] = make(shape, "float32")
    arrays |= {"seqused": lengths, "cache_seqlens": lengths}
    if row["rotary"] != "none":
        arrays |= dict.fromkeys(("rotary_cos", "rotary_sin"), make((4096, dim // 2), "float32"))
    extra = {"paged": "block_table", "indexed": "kv_batch_idx", "leftpad": "leftpad_k"}
    if row["storage"] in extra:
        is_paged = row["storage"] == "paged"
        arrays[extra[row["storage"]]] = make((2, 32), "int32") if is_paged else lengths
    options = {"page_size": 16 if row["storage"] == "paged" else 0}
    options |= {"interleaved": row["rotary"] != "halves", "position0": 2}
    return Launched("", cache="append_kv", arrays=arrays, options=options)


UPDATE: Factors = {**APPEND, "rotary": ("interleaved", "halves")}


def _update(row: Row, target: str) -> Launched:
    one = _append(row, target)
    q = ArraySpec.contiguous((2, 5, 8, row["dims"][0]), row["dtype"])
    arrays = {**(one.arrays or {}), "q": q, "rotated": q}
    return replace(one, cache="update", arrays=arrays)


COMBINE: Factors = {
    "dim": (128, 64, 40, 256),
    "dtype": ("bfloat16", "float16", "float32"),
    "storage": ("dense", "varlen"),
    "lse": FLAGS,
}


def _combine(row: Row, target: str) -> Launched:
    packed = 3000 if row["storage"] == "varlen" else None
    facts = {"total_q": packed, "num_splits": 3, "return_lse": row["lse"]}
    problem = AttentionProblem.dense(2, 1024, 2048, 4, 4, row["dim"], row["dtype"], **facts)
    return Launched("portable", directions(problem), last=1)


UNUSED: Factors = {
    "dim": (128, 40),
    "dtype": ("bfloat16", "float32"),
    "kernel": ("outside", "used", "gradients", "leftpad"),
    "lse": FLAGS,
}


def _unused(row: Row, target: str) -> Launched:
    kind = row["kernel"]
    packed = None if kind == "leftpad" else 3000
    problem = AttentionProblem.dense(
        0 if kind == "outside" else 2,
        1024,
        2048,
        4,
        4,
        row["dim"],
        row["dtype"],
        total_q=packed,
        total_k=packed,
        used_q=kind == "used",
        leftpad_k=kind == "leftpad",
        return_lse=row["lse"],
        needs_grad=kind in ("gradients", "leftpad"),
        num_splits=1,
    )
    return Launched("portable", directions(problem)[-1:], last=2 if kind == "gradients" else 1)


ARRAYS: dict[str, Array] = {
    "portable": Array(
        PORTABLE_TARGETS,
        PORTABLE,
        # Pages have no backward.
        excluded({"storage": ("paged",), "backward": (True,)}),
        _portable,
    ),
    "quantised": Array(PORTABLE_TARGETS, QUANTISED, _quantised_possible, _quantised),
    "hopper": Array(("sm_90",), HOPPER, _hopper_possible, _hopper, _HOPPER_SEEDS),
    "fp8": Array(("sm_90",), FP8, always, _fp8, _FP8_SEEDS),
    "cdna": Array(("gfx942", "gfx950"), CDNA, _cdna_possible, _cdna),
    "append": Array(PORTABLE_TARGETS, APPEND, _append_possible, _append),
    "update": Array(PORTABLE_TARGETS, UPDATE, _append_possible, _update),
    "combine": Array(PORTABLE_TARGETS, COMBINE, always, _combine),
    "unused": Array(
        PORTABLE_TARGETS,
        UNUSED,
        excluded({"kernel": ("gradients", "leftpad"), "lse": (False,)}),
        _unused,
    ),
    **HOPPER_ARRAYS,
}

# Names for several arrays.
FAMILIES: dict[str, tuple[str, ...]] = {
    "forward": ("hopper", "fp8"),
    "backward": ("backward",),
    "decode": ("hopper_decode", "decode", "step"),
    "mla": ("mla", "mla_swap_ab"),
    "mixed": ("mixed",),
    "cdna": ("cdna",),
    "portable": ("portable", "quantised", "append", "update", "combine", "unused"),
}


def in_words(name: str, row: Row) -> str:
    """The values of a row that are not the first of their factor."""
    plain = {factor: values[0] for factor, values in ARRAYS[name].factors.items()}
    said = (f"{factor}={row[factor]}" for factor in plain if row[factor] != plain[factor])
    return " ".join(said) or "plain"
