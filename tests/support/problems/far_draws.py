"""Random problems of far scores (see far_scores.py) for each backend in two steps: a bounded number
of compiled variants, any number of problems of each."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from heedful.core.registry.by_hand import forced
from support.problems.cases import Case
from support.problems.far_scores import (
    ABSORBING,
    LATENT,
    LEAST,
    SCORES,
    WHERE,
    Far,
    Tally,
    built,
    by_backend,
    far,
    run_many,
)
from support.problems.variants import by_new_values
from support.runs.planned import KernelsOf, commonest, kernels_by
from support.runs.prepared import Prepared


@dataclass(frozen=True)
class Takes:
    """What problems of a backend may have; `base` is what all of them have."""

    base: Case = Case()
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    dims: tuple[int, ...] = (64, 128)
    backward: bool = True
    terms: tuple[str, ...] = ("bias", "alibi", "softcap", "dropout", "sink")
    storage: tuple[str, ...] = ("varlen", "used", "window", "splits")
    quantized: bool = False
    rows: int = 150
    keys: int = 300
    # Powers of two near which scores of float16 lie.
    half_scores: tuple[int, ...] = SCORES
    heads: tuple[tuple[int, int], ...] = ((2, 2), (4, 2), (5, 1))


_DECODE = Case(backward=False, seqlen_q=2, heads_q=6)
# By a name: the backend that tests ask for, and what its problems have.
TAKES = {
    "cpu": ("cpu", Takes(dtypes=("float32", "float16", "bfloat16"), dims=(8, 32, 64))),
    "scan": ("scan", Takes(dtypes=("float32", "float16", "bfloat16"), dims=(8, 32, 64))),
    "portable": (
        "portable",
        Takes(dtypes=("float32", "float16", "bfloat16"), dims=(16, 64, 96, 128, 256)),
    ),
    "hopper": (
        "hopper",
        # Beyond, neither probabilities nor cotangents of float16 hold all digits (far_rows.py).
        Takes(dims=(64, 128, 192, 256), rows=300, keys=600, half_scores=(20, 23)),
    ),
    "decode": (
        "decode/portable",
        Takes(
            _DECODE,
            dims=(64, 128, 256),
            backward=False,
            terms=("alibi", "softcap", "sink"),
            storage=("used", "pages", "window", "varlen", "splits"),
            quantized=True,
            rows=4,
            keys=700,
            heads=((6, 2), (8, 1), (2, 2)),
        ),
    ),
    "hopper_decode": (
        "hopper_decode",
        Takes(
            _DECODE,
            dims=(64, 128, 256),
            backward=False,
            terms=("sink",),
            storage=("used", "pages", "window", "varlen", "splits"),
            rows=4,
            keys=900,
            heads=((6, 2), (8, 1), (2, 2)),
        ),
    ),
    "mla": (
        "mla",
        Takes(
            LATENT,
            dims=(576,),
            backward=False,
            terms=(),
            storage=("used", "pages", "splits"),
            rows=3,
            keys=600,
            heads=((16, 1), (40, 1), (16, 1), (24, 1), (128, 1)),
        ),
    ),
    "mla_swap_ab": (
        "mla_swap_ab",
        Takes(
            LATENT,
            dims=(576,),
            backward=False,
            terms=(),
            storage=("used", "pages", "splits"),
            rows=1,
            keys=900,
            heads=((8, 1), (16, 1), (32, 1)),
        ),
    ),
    "fp8": (
        "hopper",
        Takes(
            Case(backward=False),
            dtypes=("float8_e4m3fn",),
            dims=(64, 128, 256),
            backward=False,
            terms=("sink",),
            storage=("varlen", "window"),
            rows=150,
            keys=600,
        ),
    ),
    "cdna": (
        "cdna",
        Takes(
            Case(batch=1, backward=False),
            dims=(64, 128),
            backward=False,
            terms=(),
            storage=("splits",),
            rows=40,
            keys=450,
            heads=((1, 1), (2, 1)),
        ),
    ),
}


def variants(name: str, count: int = 16, seed: int = 0) -> list[Case]:
    """Cases that differ in what a backend's kernels are compiled for."""
    takes, rng = TAKES[name][1], random.Random(f"{name}{seed}")
    found: dict[str, Case] = {}
    for _ in range(100 * count):
        case = _variant(takes, rng)
        found.setdefault(str(case), case)
        if len(found) == count:
            break
    return list(found.values())


def _variant(takes: Takes, rng: random.Random) -> Case:
    def maybe(name: str, value, default: Any, chance: float = 0.3):
        offered = name in takes.terms + takes.storage
        return value if offered and rng.random() < chance else default

    # A bias is the usual way to far scores, where there is one.
    bias = maybe("bias", rng.choice(("bhqk", "hqk", "bqk", "bk", "q")), "", 0.6)
    dtype = rng.choice(takes.dtypes)
    pages = maybe("pages", rng.choice((16, 64)), 0)
    varlen = "" if pages else maybe("varlen", rng.choice(("q", "qk")), "")
    quantized = takes.quantized and not varlen and rng.random() < 0.4
    kinds: tuple = ({"kv_dtype": "int8"}, {"kv_dtype": "int8", "kv_group": 32, "kv_shift": True})
    kinds += ({"kv_dtype": "int4", "kv_group": 32}, {"kv_dtype": "float8_e4m3fn"})
    return replace(
        takes.base,
        dtype=dtype,
        head_dim=rng.choice(takes.dims),
        causal=rng.random() < 0.4,
        bias=bias,
        alibi=maybe("alibi", rng.choice(("h", "bh")), ""),
        softcap=maybe("softcap", 1.0, 0.0, 0.15),
        dropout_p=maybe("dropout", 0.25, 0.0, 0.15),
        sink=maybe("sink", True, False),
        varlen=varlen,
        used=maybe("used", "k", ""),
        page_size=pages,
        window=maybe("window", (40, 3) if rng.random() < 0.5 else (-1, 9), (-1, -1), 0.15),
        backward=takes.backward and rng.random() < 0.7,
        **(rng.choice(kinds) if quantized else {}),
    )


def drawn(name: str, count: int = 16, seed: int = 0) -> Iterator[Far]:
    """Problems of a backend without end, of `count` compiled variants in turns: for every seed the
    same variants, which each begins with another one, so that those who draw side by side compile
    each its own."""
    takes, rng = TAKES[name][1], random.Random(f"problems{name}{seed}")
    chosen = variants(name, count)
    first = seed % len(chosen)
    while True:
        for case in chosen[first:] + chosen[:first]:
            yield _problem(takes, case, rng)


# The long grid's variants of a backend, the most kernels that one has, and how many problems say
# which these are.
GROUPS, MOST_KERNELS, ASKED = 4, 5, 12


def groups(name: str, kernels: KernelsOf) -> list[tuple[Case, frozenset[str]]]:
    """Few variants of a backend for the long grid, each with its kernels."""
    chosen = []
    for case in by_new_values(variants(name, 60, seed=1)):
        rng = random.Random(f"kernels{name}{case}")
        some = (_problem(TAKES[name][1], case, rng) for _ in range(ASKED))
        own = commonest((built(problem).problem for problem in some), kernels)
        if len(own) <= MOST_KERNELS:
            chosen.append((case, own))
        if len(chosen) == GROUPS:
            break
    return chosen


def sharing(name: str, part: int, kernels: KernelsOf) -> Iterator[Far]:
    """Problems of a backend without end that share the kernels of one variant. A part has the
    kernels of the one GROUPS before it, and other problems: a kernel compiles for longer than a
    hundred of these run."""
    some = groups(name, kernels)
    case, own = some[part % len(some)]
    rng = random.Random(f"problems{name}{part}")
    while True:
        problem = _problem(TAKES[name][1], case, rng)
        if kernels(built(problem).problem) <= own:
            yield problem


def _problem(takes: Takes, variant: Case, rng: random.Random) -> Far:
    heads_q, heads_k = rng.choice(takes.heads)
    rows = rng.randint(1, takes.rows)
    splits = "splits" in takes.storage and not (variant.backward or variant.dropout_p)
    case = replace(
        variant,
        seqlen_q=rows,
        seqlen_k=rng.randint(max(rows, takes.keys // 3), max(rows, takes.keys)),
        heads_q=heads_q,
        heads_k=heads_k,
        num_splits=rng.choice((0, 1, 2, 3)) if splits else 0,
        seed=rng.randint(0, 1 << 16),
    )
    how: dict[str, Any] = {"far_sink": case.sink and rng.random() < 0.7}
    if case.bias:
        return _by_bias(case, rng, how)
    if case.alibi and rng.random() < 0.3:
        return far(replace(case, softcap=0.0), slope=20, **how)
    below = not case.softcap and rng.random() < 0.5
    # Beside scores far below 0 a sink near 0 leaves nothing to the keys.
    how["far_sink"] |= case.sink and below
    scores = takes.half_scores if case.dtype == "float16" else SCORES
    return far(case, score=rng.choice(scores), below=below, **how)


def _by_bias(case: Case, rng: random.Random, how: dict[str, Any]) -> Far:
    """A far problem of a case with a bias."""
    dims, kind = case.bias, case.dtype if rng.random() < 0.6 else "float32"
    wholly = [-1e30, LEAST[kind], 1e30]
    if kind == "float16":
        wholly = [LEAST["float16"]]
    offered = wholly if case.softcap else [*wholly, -1e4, *([] if kind == "float16" else [-1e9])]
    if case.softcap and kind == "float16":
        kind, offered = "float32", [-1e30, LEAST["float32"], 1e30]
    many = 1 if rng.random() < 0.7 else 2
    values = rng.sample(offered, min(many, len(offered)))
    how |= {"bias_dtype": kind, "where": rng.choice(WHERE), "hidden": rng.random() < 0.25}
    if not case.softcap and all(abs(b) < ABSORBING for b in values) and rng.random() < 0.2:
        how["score"] = rng.choice(SCORES)
    return far(case, values, dims, **how)


def backend_of(name: str) -> str:
    """What a call names for a backend of TAKES."""
    return forced(TAKES[name][0])


def check_many(name: str, count: int, seed: int = 0, device: str = "cuda") -> Tally:
    """Draws problems of a backend (a name of TAKES) until `count` counted, each on kernels that are
    planned for it by name."""
    results = by_backend(Prepared(backend_of(name)))
    return run_many(drawn(name, seed=seed), results, count, device)


def check_part(name: str, count: int, part: int, device: str = "cuda") -> Tally:
    """`check_many` of a part of the long grid, whose problems share their kernels."""
    backend = backend_of(name)
    problems = sharing(name, part, kernels_by(backend))
    return run_many(problems, by_backend(Prepared(backend)), count, device)
