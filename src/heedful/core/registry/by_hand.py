"""Options of kernels that a backend's name may carry."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.configs import ConfigRow

# Choices that may be made by hand, to be measured: backend="hopper+draws=1"
# (core/planning/plan.py).
OPTIONS = {
    "hopper.backward": ("draws", "last_waves", "splits"),
    "hopper.forward": ("key_splits",),
    "decode.forward": (
        *("block_m", "block_n", "num_warps", "num_stages"),
        *("least_tiles", "fewest_parts"),
        *("conversion", "programs", "registers", "merge_values", "merge_stages"),
        "fetch_ahead",
    ),
    "hopper_decode.forward": (
        *("block_n", "num_stages", "least_tiles", "fewest_parts", "overhead"),
        *("programs", "registers", "producer_regs", "merge_values", "merge"),
    ),
    "mla_swap_ab.forward": (
        *("num_stages", "least_tiles", "overhead"),
        *("producer_regs", "merge_values", "merge"),
    ),
    "mla.forward": (
        *("query_boxes", "merge_values", "overhead", "least_tiles"),
        *("ahead", "in_order", "merge"),
    ),
}


def with_options(row: ConfigRow, chosen: Mapping[str, int], problem: AttentionProblem) -> ConfigRow:
    """A row with these of its kernel's options. Raises ValueError for what cannot be."""
    own = {name: value for name, value in chosen.items() if name in OPTIONS.get(row.kernel, ())}
    if not own:
        return row
    types = {f.name: bool if f.type in (bool, "bool") else int for f in fields(row.config)}
    made: dict[str, Any] = {name: types[name](value) for name, value in own.items()}
    if problem.deterministic and not made.get("draws", True):
        raise ValueError("backend: a deterministic backward draws its tiles, got draws=0")
    if problem.num_splits and "key_splits" in made:
        raise ValueError(
            f"backend: key_splits stands for num_splits, got num_splits={problem.num_splits}, too"
        )
    highest = {"fetch_ahead": 64, "query_boxes": 2, "ahead": 8, "in_order": 1, "merge": 1}
    for name, most in highest.items():
        if not 0 <= made.get(name, 0) <= most:
            raise ValueError(f"backend: {name} must be 0 to {most}, got {made[name]}")
    for name in (
        *("programs", "merge_values", "merge_stages", "least_tiles", "num_stages"),
        *("fewest_parts", "key_splits"),
    ):
        value = made.get(name, 1)
        if value < 1 or value & (value - 1) and name == "merge_values":
            words = "a power of two" if name == "merge_values" else "at least 1"
            raise ValueError(f"backend: {name} must be {words}, got {value}")
    for name, least in (("block_m", 8), ("block_n", 16), ("num_warps", 1)):
        value = made.get(name, least)
        if value < least or value & (value - 1):
            raise ValueError(
                f"backend: {name} must be a power of two of at least {least}, got {value}"
            )
    regs = made.get("producer_regs", 24)
    if regs % 8 or not 24 <= regs <= 232:
        raise ValueError(
            f"backend: producer_regs must be a multiple of 8 from 24 to 232, got {regs}"
        )
    most = 2 if row.archs == ("sm_90",) else 0
    if made.get("conversion", 0) > most:
        raise ValueError(
            f"backend: conversion must be at most {most} here, got {made['conversion']}"
        )
    if made.get("fetch_ahead") and (most == 0 or problem.page_size or _has_odd_rows(problem)):
        raise ValueError(
            "backend: fetch_ahead is of caches in one piece, whose rows are a power of two bytes,"
            f" on sm_90; got {made['fetch_ahead']}"
        )
    return replace(row, config=replace(row.config, **made), measured="chosen by hand")


def _has_odd_rows(problem: AttentionProblem) -> bool:
    return any(dim & (dim - 1) for dim in (problem.head_dim, problem.head_dim_v))
