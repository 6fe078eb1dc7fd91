"""The oracle is attention longhand: see `support.problems.longhand`, which shares no code with
it."""

import dataclasses
import math
import random

import numpy as np
import pytest

from heedful.core.call.operands import Operands
from heedful.reference import oracle
from heedful.reference.convert import as_numpy, operands_as_numpy
from support.problems.cases import FRESH, Case, build
from support.problems.longhand import Longhand, philox

# Both are sums of a few float64 terms, in another order.
CLOSE = 1e4 * np.finfo(float).eps
STEP = 1e-200


def draw(seed: int) -> Case:
    """A small problem of any features that go together."""
    rng = random.Random(seed)

    def sometimes(*choices):
        return rng.choice(choices) if rng.random() < 0.35 else None

    heads_k = rng.choice((1, 2))
    facts: dict = {
        "seqlen_q": rng.choice((1, 4, 5)),
        "seqlen_k": rng.choice((1, 5, 7)),
        "heads_k": heads_k,
        "heads_q": heads_k * rng.choice((1, 3)),
        "head_dim": 4,
        "head_dim_v": rng.choice((2, 4)),
        "causal": rng.random() < 0.4,
        "window": sometimes((2, 1), (1, -1, 2), (-1, 3), (0, 0)),
        "bottom_right": sometimes(False),
        "shift": sometimes(-3, 2),
        "scale": sometimes(-0.7, 0.4),
        "softcap": sometimes(0.8),
        "dropout_p": sometimes(0.4, 1.0),
        "alibi": sometimes("h", "bh"),
        "bias": sometimes("bhqk", "hq", "bk"),
        "sink": sometimes(True),
        "tree_mask": sometimes(True),
        "key_ranges": sometimes(1, 2),
        "block_mask": sometimes(32),
        "ranges_of": sometimes("", "h", "bh"),
        "used": sometimes("q", "k", "qk"),
        "leftpad_k": sometimes(True),
    }
    where = rng.choice(("dense", "dense", "packed", "paged", "indexed", "quantised", "fp8"))
    if where == "packed":
        facts |= {"varlen": rng.choice(("q", "k", "qk"))}
    elif where == "paged":
        facts |= {"page_size": rng.choice((1, 3)), "varlen": sometimes("q")}
    elif where == "indexed":
        facts |= {"kv_batch_idx": True}
    elif where == "quantised":
        facts |= {"kv_dtype": rng.choice(("int8", "int4")), "kv_group": 2, "backward": False}
        facts |= {"kv_shift": sometimes(True), "page_size": sometimes(2), "head_dim_v": 4}
    elif where == "fp8":
        facts |= {"dtype": "float8_e4m3fn", "backward": False}
    if facts["dropout_p"]:
        facts |= {"dropout_origin": sometimes((1, 2**32 - 2, 5, 2**32 - 3))}
        facts |= {"return_probs": sometimes(True)}
    facts |= {"index_dtype": sometimes("int64")}
    if facts["sink"]:
        facts |= {"sink_dtype": sometimes("bfloat16")}
    if facts["bias"]:
        facts |= {"bias_dtype": sometimes("bool")}
    facts |= {"rel_bias": sometimes(1, 4, 9)}
    facts |= {"q_offsets": sometimes(True)}
    if facts["dropout_p"]:
        facts |= {"origins": sometimes(1, 4)}
    facts = {name: value for name, value in facts.items() if value is not None}
    return Case(**facts, seed=seed + 1000 * FRESH)


CASES = [draw(seed) for seed in range(60)]


def plain(x: Operands) -> dict:
    """Nested lists, of the names that Operands has."""
    return {name: None if a is None else np.asarray(a).tolist() for name, a in x._asdict().items()}


def rows(case: Case, x: dict):
    """(batch, head, query, position in the outputs' first axes) of every query that is in use."""
    longhand = Longhand(case, x)
    for b in range(case.batch):
        first, count = longhand.queries(b)
        for i in range(count):
            where = (first + i,) if x["cu_seqlens_q"] is not None else (b, i)
            yield from ((b, h, i, where) for h in range(case.heads_q))


def lse_at(lse, h: int, where: tuple):
    return lse[h, where[0]] if len(where) == 1 else lse[where[0], h, where[1]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_is_attention_longhand(case):
    built = build(case)
    arrays = operands_as_numpy(built.x)
    out, lse, probs = oracle.forward(built.problem, arrays)
    x = plain(arrays)
    longhand = Longhand(case, x)
    seen_out, seen_lse = np.zeros(out.shape, bool), np.zeros(lse.shape, bool)
    for b, h, i, where in rows(case, x):
        want_out, want_lse, want_probs = longhand.row(b, h, i)
        np.testing.assert_allclose(out[(*where, h)], np.real(want_out), CLOSE, CLOSE)
        np.testing.assert_allclose(lse_at(lse, h, where), np.real(want_lse), CLOSE, CLOSE)
        seen_out[(*where, h)] = True
        seen_lse[(h, where[0]) if len(where) == 1 else (where[0], h, where[1])] = True
        if probs is not None:
            want = np.zeros(case.seqlen_k)
            for j, p in want_probs.items():
                want[j] = p.real
            np.testing.assert_allclose(probs[b, h, i], want, CLOSE, CLOSE)
    # Queries that are not in use.
    assert not out[~seen_out].any() and np.isneginf(lse[~seen_lse]).all()


@pytest.mark.parametrize("case", [case for case in CASES if case.backward], ids=str)
def test_the_oracles_gradients_are_complex_steps_longhand(case):
    built = build(case)
    arrays = operands_as_numpy(built.x)
    dout, dlse = (np.nan_to_num(np.array(as_numpy(t))) for t in (built.dout, built.dlse))
    grads = oracle.backward(built.problem, arrays, dout, dlse)
    rng = random.Random(case.seed)
    for name in ("q", "k", "v", "bias", "sink", "rel_bias"):
        grad = getattr(grads, f"d{name}")
        if grad is None:
            assert not getattr(case, name) or (name == "bias" and case.bias_dtype)
            continue
        indices = list(np.ndindex(grad.shape))
        for index in rng.sample(indices, min(5, len(indices))):
            x = plain(arrays)
            # A bias that repeats is stepped wherever it does.
            for place in repeats(index, grad.shape, np.shape(getattr(arrays, name))):
                step(x[name], place)
            want = derivative(case, x, dout, dlse)
            assert math.isclose(grad[index], want, rel_tol=CLOSE, abs_tol=CLOSE), (name, index)


def repeats(index: tuple, own: tuple, shape: tuple):
    """The places of an array that the element of a gradient stands for."""
    axes = [range(n) if o == 1 else (i,) for i, o, n in zip(index, own, shape, strict=True)]
    return [tuple(p) for p in np.array(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1).T]


def step(array: list, index: tuple) -> None:
    """Adds the imaginary step to one element of nested lists."""
    for at in index[:-1]:
        array = array[at]
    array[index[-1]] += STEP * 1j


def derivative(case: Case, x: dict, dout, dlse) -> float:
    longhand, total = Longhand(case, x), 0.0
    for b, h, i, where in rows(case, x):
        out, lse, _ = longhand.row(b, h, i)
        pairs = zip(out, dout[(*where, h)], strict=True)
        total += sum((complex(o) * float(d)).imag for o, d in pairs) / STEP
        if lse != -math.inf:
            total += (complex(lse) * float(lse_at(dlse, h, where))).imag / STEP
    return total


def test_philox_longhand_gives_the_published_words():
    assert philox((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2) == (
        *(0x408F276D, 0x41C83B0E),
        *(0xA20BC7C6, 0x6D5451FD),
    )


def test_the_drawn_problems_hold_every_feature():
    plain_case = Case()
    for field in dataclasses.fields(Case):
        left_alone = ("deterministic", "num_splits", "lens_q", "lens_k", "layout", "lse_grad")
        left_alone += ("v_in_k",)
        if field.name in (*left_alone, "batch", "seed"):
            continue
        assert any(getattr(c, field.name) != getattr(plain_case, field.name) for c in CASES)
