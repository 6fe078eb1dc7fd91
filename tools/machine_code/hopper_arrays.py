"""The covering arrays of the Hopper backward and of the decodes, the portable one too."""

from typing import Any

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.problem import AttentionProblem
from heedful.launch.program import buffers
from heedful.launch.record import Entry
from machine_code.covering import Factors, Row
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

# batch, query rows, keys: tiles of the second are too few for the device, and are split where they
# may be.
BACKWARD_SIZES = {"long": (2, 4096, 4096), "few": (1, 2048, 2048)}
BACKWARD: Factors = {
    "dims": ((128, 128), (64, 64), (256, 256), (192, 128), (96, 96), (192, 192)),
    "dtype": ("bfloat16", "float16"),
    "mask": ("full", "causal", "left"),
    "storage": ("dense", "varlen"),
    "sizes": tuple(BACKWARD_SIZES),
    "group": (1, 4),
    "softcap": (0.0, 8.0),
    "dropout": FLAGS,
    "sink": FLAGS,
    "deterministic": FLAGS,
    "dlse": FLAGS,
    "key_ranges": (0, 1, 2),
    "lists": (0, 128, 64),
    "offsets": FLAGS,
}
_WIDE = ((256, 256), (192, 128), (192, 192))
_BACKWARD_PLAIN: Row = {name: values[0] for name, values in BACKWARD.items()}
# Calls as they are timed, of each kernel: a row of dQ's own warpgroup, of pairs, of wide keys.
_BACKWARD_SEEDS: tuple[Row, ...] = tuple(
    {**_BACKWARD_PLAIN, "dims": dims, "mask": mask}
    for dims in ((64, 64), (128, 128), (256, 256), (192, 128))
    for mask in ("full", "causal")
) + tuple(
    {**_BACKWARD_PLAIN, "dims": dims, "lists": side}
    for dims in ((64, 64), (128, 128), (256, 256))
    for side in (64, 128)
)


def backward_problem(row: Row) -> AttentionProblem:
    batch, rows, keys = BACKWARD_SIZES[row["sizes"]]
    packed = batch * rows - 30 if row["storage"] == "varlen" else None
    dim, dim_v = row["dims"]
    return AttentionProblem.dense(
        batch,
        rows,
        keys,
        2 * row["group"],
        2,
        dim,
        row["dtype"],
        head_dim_v=dim_v,
        mask=MASKS[row["mask"]],
        softcap=row["softcap"],
        dropout_p=0.1 if row["dropout"] else 0.0,
        total_q=packed,
        total_k=packed,
        sink=row["sink"],
        deterministic=row["deterministic"],
        key_ranges=row["key_ranges"],
        block_mask=row["lists"],
        q_offsets=row["offsets"],
        return_lse=True,
        needs_grad=True,
    )


def _backward(row: Row, target: str) -> Launched:
    _, entry = directions(backward_problem(row))
    arrays = dict(entry.buffers or {})
    if not row["dlse"]:
        del arrays["dlse"]
    return Launched("hopper", (Entry(entry.problem, "backward", arrays),))


# ---- decodes ----------------------------------------------------------------------------------

DECODE: Factors = {
    "dims": ((128, 128), (64, 64), (256, 256), (576, 512)),
    "dtype": ("bfloat16", "float16"),
    "kv": ("16 bits", "int8", "int4", "float8_e5m2"),
    "scales": ("rows", "heads", "groups", "groups-shifts"),
    # Rows of a KV head choose the tile.
    "tokens": (1, 4),
    "group": (4, 1, 16),
    "storage": ("dense", "used", "paged", "paged-24", "indexed", "leftpad", "varlen-paged"),
    "mask": ("full", "causal", "left", "causal-first"),
    "splits": (0, 1, 3),
    "softcap": (0.0, 8.0),
    "alibi": FLAGS,
    "sink": FLAGS,
    "tree_mask": FLAGS,
    "lse": FLAGS,
    "offsets": FLAGS,
}
_QUANTISED = ("int8", "int4", "float8_e5m2")
_decode_possible = excluded(
    {"dims": ((576, 512),), "kv": _QUANTISED},
    {"dims": ((576, 512),), "scales": ("heads", "groups", "groups-shifts")},
    {"kv": ("16 bits",), "scales": ("heads", "groups", "groups-shifts")},
    {"kv": ("int4",), "scales": ("heads",)},
    {"storage": ("varlen-paged",), "tree_mask": (True,)},
)
HOPPER_DECODE: Factors = {
    "dims": ((128, 128), (64, 64), (256, 256), (192, 128)),
    "dtype": ("bfloat16", "float16"),
    "tokens": (1, 4, 16),
    "group": (4, 1),
    "storage": ("dense", "used", "paged", "paged-48", "indexed", "leftpad")
    + ("varlen-paged", "varlen-used", "varlen-keys"),
    "mask": ("full", "causal", "left", "causal-first"),
    "splits": (0, 1, 3),
    "sink": FLAGS,
    "lse": FLAGS,
    "offsets": FLAGS,
}
MLA: Factors = {
    "group": (128, 16, 40),
    "dtype": ("bfloat16", "float16"),
    "tokens": (1, 4),
    "storage": ("paged-64", "paged", "dense", "used", "indexed", "leftpad"),
    "mask": ("full", "causal"),
    "splits": (0, 1, 3),
    "lse": FLAGS,
    "offsets": FLAGS,
}
MLA_SWAP_AB: Factors = {**MLA, "group": (16, 8, 4)}


def decode_problem(row: Row, dims: tuple[int, int], heads_k: int) -> AttentionProblem:
    """A row of any decode."""
    storage, pages, size = row["storage"].partition("paged")
    packed = storage.startswith("varlen")
    kind, scales = row.get("kv", "16 bits"), row.get("scales", "heads")
    facts: dict[str, Any] = {}
    if kind != "16 bits":
        group = {"rows": dims[0], "heads": 0}.get(scales, 32)
        facts = {"kv_dtype": kind, "kv_group": group, "kv_shift": scales == "groups-shifts"}
    return AttentionProblem.dense(
        4,
        row["tokens"],
        4096,
        heads_k * row["group"],
        heads_k,
        dims[0],
        row["dtype"],
        head_dim_v=dims[1],
        mask=MASKS[row["mask"]],
        softcap=row.get("softcap", 0.0),
        total_q=4 * row["tokens"] - 1 if packed else None,
        total_k=9000 if storage == "varlen-keys" else None,
        used_k=storage not in ("dense", "leftpad", "varlen-keys"),
        page_size=(int(size[1:]) if size else 16) if pages else 0,
        kv_batch_idx=storage == "indexed",
        leftpad_k=storage == "leftpad",
        alibi=row.get("alibi", False),
        sink=row.get("sink", False),
        tree_mask=row.get("tree_mask", False),
        q_offsets=row.get("offsets", False),
        v_in_k=dims[0] > 256,
        return_lse=row["lse"],
        num_splits=row["splits"],
        **facts,
    )


def _decode(row: Row, target: str) -> Launched:
    dims = row["dims"]
    return Launched("decode", directions(decode_problem(row, dims, 1 if dims[0] > 256 else 4)))


def _hopper_decode(row: Row, target: str) -> Launched:
    return Launched("hopper_decode", directions(decode_problem(row, row["dims"], 4)))


def _mla(row: Row, target: str) -> Launched:
    return Launched("mla", directions(decode_problem(row, (576, 512), 1)))


def _mla_swap_ab(row: Row, target: str) -> Launched:
    return Launched("mla_swap_ab", directions(decode_problem(row, (576, 512), 1)))


STEP: Factors = {
    "backend": ("decode", "hopper_decode"),
    "dims": ((128, 128), (64, 64), (256, 256)),
    "dtype": ("bfloat16", "float16"),
    "kv": ("16 bits", "int8", "int4", "float8_e5m2"),
    "tokens": (1, 4),
    "storage": ("paged", "dense"),
    "mask": ("full", "causal"),
    "rotary": ("interleaved", "none", "halves"),
}


def _step(row: Row, target: str) -> Launched:
    """A decode that writes the new tokens itself."""
    whole = {**row, "group": 4, "lse": False, "splits": 0, "scales": "rows"}
    whole["storage"] = "used" if row["storage"] == "dense" else row["storage"]
    problem = decode_problem(whole, row["dims"], 4)
    arrays = buffers.forward(problem)
    arrays["cache_seqlens"] = arrays.pop("seqused_k")
    for name, dim in zip("kv", row["dims"], strict=True):
        new = ArraySpec.contiguous((problem.batch, row["tokens"], 4, dim), problem.dtype)
        arrays[f"{name}_new"] = new
    if row["rotary"] != "none":
        arrays["q_new"] = arrays.pop("q")
        for name in ("rotary_cos", "rotary_sin"):
            arrays[name] = ArraySpec.contiguous((8192, problem.head_dim // 2), problem.dtype)
    options = {"interleaved": row["rotary"] == "interleaved", "position0": 0}
    return Launched(row["backend"], (Entry(problem, "step", arrays, options=options),))


MIXED: Factors = {
    "backend": ("hopper_mixed", "mixed"),
    "dims": ((128, 128), (64, 64), (256, 256)),
    "dtype": ("bfloat16", "float16"),
    "group": (4, 1),
    "storage": ("varlen-paged", "varlen-used"),
    "mask": ("causal", "full", "left"),
    "sink": FLAGS,
    "lse": FLAGS,
}


def _mixed(row: Row, target: str) -> Launched:
    """Prefills of up to 512 queries beside single ones."""
    whole = {**row, "tokens": 512, "splits": 0}
    return Launched(row["backend"], directions(decode_problem(whole, row["dims"], 4)))


HOPPER_ARRAYS: dict[str, Array] = {
    "backward": Array(
        ("sm_90",),
        BACKWARD,
        excluded(
            {"dims": ((256, 256), (192, 192)), "dropout": (True,)},
            {"dims": _WIDE, "deterministic": (True,)},
            {"lists": (128, 64), "key_ranges": (1, 2)},
            {"lists": (128, 64), "deterministic": (True,)},
            {"lists": (128, 64), "dropout": (True,)},
        ),
        _backward,
        _BACKWARD_SEEDS,
    ),
    "decode": Array(PORTABLE_TARGETS, DECODE, _decode_possible, _decode),
    "hopper_decode": Array(("sm_90",), HOPPER_DECODE, always, _hopper_decode),
    "mla": Array(("sm_90",), MLA, always, _mla),
    "mla_swap_ab": Array(
        ("sm_90",), MLA_SWAP_AB, excluded({"group": (16,), "tokens": (4,)}), _mla_swap_ab
    ),
    "step": Array(
        ("sm_90",), STEP, excluded({"backend": ("hopper_decode",), "kv": _QUANTISED}), _step
    ),
    "mixed": Array(("sm_90",), MIXED, always, _mixed),
}
