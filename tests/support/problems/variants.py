"""Random problems in two steps: a bounded number of compiled variants, any number of problems of
each. What a kernel is compiled for is drawn first; lengths, sizes and values are drawn per problem.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from support.problems.cases import FRESH, LAYOUTS, Case


def sample(count: int, seed: int = 0, dtypes=("float16", "bfloat16", "float32")) -> list[Case]:
    """`count` distinct cases that differ in what kernels are compiled for."""
    return distinct(count, lambda rng: _variant(rng, dtypes), seed)


def distinct(count: int, draw: Callable[[random.Random], Case], seed: int = 0) -> list[Case]:
    """`count` distinct cases of those that `draw` makes."""
    rng = random.Random(seed + FRESH)
    found: dict[str, Case] = {}
    while len(found) < count:
        case = draw(rng)
        found.setdefault(str(case), case)
    return list(found.values())


def _variant(rng: random.Random, dtypes) -> Case:
    def sometimes(value, default: Any = False):
        return value if rng.random() < 0.3 else default

    dim = rng.choice((16, 32, 40, 64, 64, 96, 128, 128, 192, 256))
    varlen = sometimes(rng.choice(("q", "qk", "k")), "")
    paged = "k" not in varlen and rng.random() < 0.25
    forward_only = paged or rng.random() < 0.3
    return Case(
        head_dim=dim,
        head_dim_v=sometimes(rng.choice((24, 64, 128)), 0),
        dtype=rng.choice(dtypes),
        causal=rng.random() < 0.4,
        window=sometimes(rng.choice(((5, -1), (7, 3), (-1, 9), (6, 2, 3))), (-1, -1)),
        bottom_right=not sometimes(True),
        softcap=sometimes(8.0, 0.0),
        dropout_p=sometimes(0.3, 0.0),
        alibi=sometimes("bh", ""),
        bias=sometimes("bhqk", ""),
        sink=sometimes(True),
        tree_mask=rng.random() < 0.1,
        varlen=varlen,
        used=sometimes(rng.choice(("q", "k", "qk")), ""),
        page_size=16 if paged else 0,
        kv_batch_idx=forward_only and not paged and "k" not in varlen and rng.random() < 0.3,
        leftpad_k=rng.random() < 0.1,
        layout=rng.choice(("contiguous", "contiguous", *LAYOUTS)),
        backward=not forward_only,
        lse_grad=not forward_only and rng.random() < 0.5,
        deterministic=not forward_only and rng.random() < 0.3,
        num_splits=3 if forward_only and rng.random() < 0.3 else 0,
        q_offsets=rng.random() < 0.1,
    )


@st.composite
def problems(draw, variant: Case, longest: int = 300) -> Case:
    """A problem that runs the variant's compiled kernels."""
    heads_k = draw(st.sampled_from((1, 2, 3)))
    seqlen_q = draw(st.integers(0, longest))
    window = variant.window
    if window != (-1, -1):
        window = tuple(draw(st.integers(0, longest)) if bound >= 0 else -1 for bound in window)
    # Between 0.99 and 1 what is kept is scaled beyond the range of float16, by anybody's kernel.
    dropouts = st.floats(0.05, 0.99) | st.just(1.0)
    origins = st.tuples(*[st.integers(0, 2**20).map(lambda n: 4 * n) for _ in range(4)])
    return replace(
        variant,
        batch=draw(st.integers(0, 3)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if draw(st.booleans()) else draw(st.integers(0, longest)),
        heads_k=heads_k,
        heads_q=heads_k * draw(st.sampled_from((1, 1, 2, 5))),
        window=window,
        shift=0 if draw(st.booleans()) else draw(st.integers(-longest, longest)),
        scale=draw(st.sampled_from((0.0, 0.0, 0.3))),
        softcap=draw(st.floats(0.5, 30.0)) if variant.softcap else 0.0,
        dropout_p=draw(dropouts) if variant.dropout_p else 0.0,
        dropout_origin=draw(origins) if variant.dropout_p else (0, 0, 0, 0),
        alibi=draw(st.sampled_from(("h", "bh"))) if variant.alibi else "",
        bias=draw(st.sampled_from(("bhqk", "hqk", "bqk", "k", "q"))) if variant.bias else "",
        page_size=draw(st.sampled_from((1, 16, 29, 64))) if variant.page_size else 0,
        num_splits=draw(st.integers(2, 5)) if variant.num_splits else 0,
        seed=draw(st.integers(0, 2**16)),
    )


def sized(rng: random.Random, variant: Case, longest: int = 300) -> Case:
    """As `problems`, with sizes that are all as likely: most share their kernels, which are
    compiled for numbers that are 1 and that 16 divides, too."""
    heads_k, seqlen_q = rng.randint(1, 3), rng.randint(1, longest)
    return replace(
        variant,
        batch=rng.randint(1, 3),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if rng.random() < 0.3 else rng.randint(1, longest),
        heads_k=heads_k,
        heads_q=heads_k * rng.choice((1, 1, 2, 5)),
        window=tuple(rng.randint(0, longest) if bound >= 0 else -1 for bound in variant.window),
        shift=0 if rng.random() < 0.5 else rng.randint(-longest, longest),
        scale=rng.choice((0.0, 0.0, 0.3)),
        softcap=rng.uniform(0.5, 30.0) if variant.softcap else 0.0,
        seed=rng.randint(0, 2**16),
    )


def by_new_values(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases, one after the other that has most values of fields that none before it has."""
    rest, seen = list(cases), set()
    while rest:
        best = max(rest, key=lambda case: len(set(vars(case).items()) - seen))
        rest.remove(best)
        seen |= set(vars(best).items())
        yield best


def wide(variant: Case, **more: Any) -> Case:
    """The variant with a head dim above 256, without what kernels of wide heads leave to others.
    more: further changes."""
    return replace(
        variant,
        head_dim=512 if variant.seed % 2 else 320,
        head_dim_v=0,
        deterministic=False,
        return_probs=False,
        dropout_p=0.0,
        dropout_origin=(0, 0, 0, 0),
        alibi="",
        bias="",
        bias_dtype="",
        rel_bias=0,
        tree_mask=False,
        key_ranges=0,
        block_mask=0,
        kv_dtype="",
        kv_group=0,
        kv_shift=False,
        v_in_k=False,
        **more,
    )
