"""The vote whether a warp's scores pass their rows' bounds, its assembly run as Python."""

import re
import struct
from itertools import product

import pytest

pytest.importorskip("triton.experimental.gluon")

from heedful.kernels.hopper.sm90 import softmax

INF, NAN = float("inf"), float("nan")
# Scores of a lane: two of one row, two of the other, in turns.
ROWS = (0, 0, 1, 1) * 4


def bits(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]


def voted(scores, bounds) -> bool:
    """What one lane's vote is."""
    names = [[f"s{i}" for i in range(len(scores))], ["b0", "b1"]]
    text = softmax._vote_at_bounds([["flag"]], names)
    found = dict(zip(names[0] + names[1], map(bits, (*scores, *bounds)), strict=True))
    for line in re.sub(r"\{\s*(\.reg[^;]*;\s*)*|\}", "", text).split(";"):
        if not line.strip():
            continue
        name, rest = line.strip().split(None, 1)
        target, *operands = (word.strip() for word in rest.split(","))
        given = [found[word] if word in found else int(word, 0) for word in operands]
        if name in ("mov.b32", "vote.sync.any.pred"):
            value = given[0]
        elif name == "max.s32":
            value = max(given)
        elif name == "selp.b32":
            value = given[0] if given[2] else given[1]
        else:
            tests = {"lt": given[0] < given[1], "ge": given[0] >= given[1]}
            value = int(tests[name.split(".")[1]] or any(given[2:]))
        found[target] = value
    return bool(found["flag"])


@pytest.mark.parametrize("place", range(len(ROWS)))
def test_any_score_at_its_own_rows_bound_is_found(place):
    for least, bounds in product(
        (-INF, -5.0, -0.0, 0.0, 0.5), ((1.0, 8.0), (8.0, 1.0), (0.5, INF))
    ):
        bound = bounds[ROWS[place]]
        scores = [min(least, 0.25)] * len(ROWS)
        assert not voted(scores, bounds)
        for score in (bound, 2.0 * bound, INF, NAN):
            assert voted([*scores[:place], score, *scores[place + 1 :]], bounds)
        if bound < INF:
            less = [*scores[:place], bound * (1.0 - 2.0**-20), *scores[place + 1 :]]
            assert not voted(less, bounds)


@pytest.mark.parametrize("bound", [-1.0, -1e9, -INF, -0.0])
def test_rows_whose_bound_is_negative_are_always_looked_at(bound):
    for least in (-INF, -5.0, 0.0):
        assert voted([least] * len(ROWS), (bound, 8.0)) and voted([least] * 16, (8.0, bound))


def test_the_bits_of_a_float():
    for value in (32.0, 12.0, 22.18, 8.8073549, 448.0, 1.0, 0.1):
        assert softmax.float_bits(value) == bits(value)
