"""Choices that bench and tests make instead of the planner: a variant, and options of its
kernels."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from heedful.core.call.problem import AttentionProblem
from heedful.core.registry import capability, tiles
from heedful.core.registry.configs import ConfigRow

_BACKWARD = ("draws", "last_waves", "splits", "heads_innermost")
OPTIONS = {
    "hopper.backward": (
        *(*_BACKWARD, "block_n", "tail_splits", "dk_in_keys", "rotates", "hides_rows"),
        *("num_stages", "k_stages", "cuts_rows"),
    ),
    "hopper.backward_pair": _BACKWARD,
    "hopper.backward_wide": _BACKWARD,
    "hopper.backward_halves": _BACKWARD,
    "hopper.forward": ("key_splits", "part_keys", "cuts_rows"),
    "hopper.wide_forward": ("block_m", "num_stages", "key_splits"),
    "decode.forward": (
        *("block_m", "block_n", "num_warps", "num_stages"),
        *("least_tiles", "fewest_shares"),
        *("conversion", "programs", "registers", "merge_values", "merge_stages"),
        "fetch_ahead",
    ),
    "hopper_decode.forward": (
        *("block_n", "num_stages", "least_tiles", "fewest_shares", "overhead"),
        *("programs", "registers", "producer_regs", "merge_values", "merge"),
    ),
    "hopper_decode.wide_forward": (
        *("block_n", "num_stages", "least_tiles", "fewest_shares", "overhead"),
        *("producer_regs", "merge_values"),
    ),
    "mla_swap_ab.forward": (
        *("num_stages", "least_tiles", "overhead"),
        *("producer_regs", "merge_values", "merge"),
    ),
    "mla_converting.forward": (
        *("num_stages", "least_tiles", "overhead", "programs", "registers"),
        *("producer_regs", "merge_values", "merge"),
    ),
    "mla_converting_pair.forward": (
        *("num_stages", "least_tiles", "overhead"),
        *("consumer_regs", "producer_regs", "merge_values", "merge"),
        *("query_map", "thread_order"),
    ),
    "mla.forward": (
        *("query_boxes", "merge_values", "overhead", "least_tiles"),
        *("ahead", "in_order", "merge", "query_map", "thread_order"),
    ),
}


class Overrides(str):
    """A choice by hand, which a call takes as its `backend`. No plain string is equal to it: such a
    string chooses nothing, and the two have different keys. backend, variant: the kernels to run.
    For a direction without such a variant the planner chooses among the backend's others.
    options: some of OPTIONS, for the kernels that have them.
    """

    __slots__ = ("backend", "options", "variant")
    backend: str
    variant: str
    options: Mapping[str, int]

    def __new__(cls, backend: str, variant: str = "", options: Mapping[str, int] | None = None):
        options = {} if options is None else options
        words = "".join(f" {option}={value}" for option, value in options.items())
        by_hand = f" (by hand{words})" if words else ""
        made = super().__new__(cls, capability.label(backend, variant) + by_hand)
        made.backend, made.variant, made.options = backend, variant, options
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Overrides) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def kernels(self) -> list[capability.Variant]:
        """The kernels that may run."""
        variants = [v for v in capability.VARIANTS if v.backend == self.backend]
        chosen = {v.direction for v in variants if v.name == self.variant}
        return [v for v in variants if v.name == self.variant or v.direction not in chosen]


def named(backend: str, variant: str = "", **options: int) -> Overrides:
    """The choice of a variant and of options, for the `backend` of a call. Raises ValueError for an
    unknown kernel, and for options that it does not have.
    """
    chosen = Overrides(backend, variant, options)
    if backend not in capability.backends():
        raise ValueError(f"there is no backend {backend!r}")
    if variant and variant not in [each.name for each in chosen.kernels()]:
        raise ValueError(f"there is no variant {variant!r} of the backend {backend!r}")
    tiles = {kernel for each in chosen.kernels() for kernel in each.configs}
    known = {option for kernel in tiles for option in OPTIONS.get(kernel, ())}
    if not known.issuperset(options):
        words = ", ".join(sorted(known)) or "none"
        raise ValueError(f"{backend} has the options {words}, got {', '.join(options)}")
    return chosen


def forced(words: str) -> str:
    """The `backend` for a text BACKEND/VARIANT+OPTION=NUMBER+..., as command lines of bench have
    it. A backend's name alone, an alias, or a choice is returned as it is. Raises ValueError."""
    if isinstance(words, Overrides):
        return words
    kernel, *texts = words.split("+")
    backend, _, variant = kernel.partition("/")
    if not (texts or variant):
        return words
    backend, alias = capability.ALIASES.get(backend, (backend, ""))
    options = {}
    for text in texts:
        option, _, value = text.partition("=")
        if option in options or not value.isdecimal():
            raise ValueError(f"options must be OPTION=NUMBER, each once, got {words!r}")
        options[option] = int(value)
    return named(backend, variant or alias, **options)


def asked(backend: str | None) -> Overrides | None:
    """The choice for a backend's name; None leaves it to the planner. Raises ValueError."""
    if backend is None or isinstance(backend, Overrides):
        return backend
    name, variant = capability.ALIASES.get(backend, (backend, ""))
    if name not in capability.backends():
        names = ", ".join(capability.backends())
        raise ValueError(f"backend must be one of {names} or None, got {backend!r}")
    return Overrides(name, variant)


def with_options(row: ConfigRow, chosen: Mapping[str, int], problem: AttentionProblem) -> ConfigRow:
    """A config row with those options that its kernel has. Raises ValueError for values that it
    cannot have."""
    values = {name: value for name, value in chosen.items() if name in OPTIONS.get(row.kernel, ())}
    if not values:
        return row
    types = {f.name: bool if f.type in (bool, "bool") else int for f in fields(row.config)}
    made: dict[str, Any] = {name: types[name](value) for name, value in values.items()}
    if problem.deterministic and not made.get("draws", True):
        raise ValueError("backend: a deterministic backward draws its tiles, got draws=0")
    if problem.num_splits and "key_splits" in made:
        raise ValueError(
            f"backend: key_splits stands for num_splits, got num_splits={problem.num_splits}, too"
        )
    are_boxed = int(tiles.heads_fill_boxes(problem))
    highest = {"fetch_ahead": 64, "query_boxes": 2, "ahead": 8, "in_order": 1, "merge": 1}
    highest |= {"thread_order": 1, "query_map": are_boxed}
    for name, most in highest.items():
        if not 0 <= made.get(name, 0) <= most:
            raise ValueError(f"backend: {name} must be 0 to {most}, got {made[name]}")
    for name in (
        *("programs", "merge_values", "merge_stages", "least_tiles", "num_stages"),
        *("fewest_shares", "key_splits"),
        "k_stages",
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
    keys = made.get("part_keys", row.config.block_n)
    if keys < 1 or keys % row.config.block_n or ("part_keys" in made and not problem.invariant):
        raise ValueError(
            f"backend: part_keys, of numerics='invariant', must be a multiple of"
            f" {row.config.block_n} keys, got {keys}"
        )
    if problem.invariant and made.get("key_splits", 1) > 1:
        raise ValueError(
            "backend: key_splits of numerics='invariant' is 1, so that programs take all parts in"
            f" turn, got {made['key_splits']}"
        )
    regs = made.get("producer_regs", 24)
    if regs % 8 or not 24 <= regs <= 232:
        raise ValueError(
            f"backend: producer_regs must be a multiple of 8 from 24 to 232, got {regs}"
        )
    if row.kernel == "hopper.backward" and made.get("block_n") not in (None, 64, 128):
        raise ValueError(f"backend: block_n must be 64 or 128, got {made['block_n']}")
    if row.kernel == "hopper.backward" and made.get("block_n") == 64 and not problem.block_mask:
        raise ValueError("backend: block_n=64 is of block masks, got a call without one")
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
