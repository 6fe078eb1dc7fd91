"""What the Hopper kernels and the host both know, and what aggregates are made of."""

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from triton.experimental.gluon import language as gl

from heedful.core.registry import tiles
from heedful.kernels.hopper.fp8 import transpose_v
from heedful.kernels.hopper.sm90 import mma, sequences
from heedful.kernels.hopper.sm90.compat import aggregate


def test_the_device_cuts_rows_and_v_as_the_planner_does():
    assert mma.ROWS.value == tiles.CONSUMER_ROWS
    assert transpose_v.V_TILE_N.value == sequences.V_T_BLOCK.value == tiles.V_T_KEYS
    assert transpose_v.V_TILE_E.value == tiles.V_T_DIMS
    assert transpose_v.CHUNK_N.value == tiles.V_T_CHUNK


@aggregate
class Pair:
    first: gl.constexpr
    second: gl.constexpr = gl.constexpr(None)


def test_an_aggregate_is_made_of_its_fields_by_order_or_name():
    made: Any = Pair(1)
    assert made.first.value == 1 and made.second.value is None
    made = Pair(1, second=2)
    assert made.second.value == 2


@pytest.mark.parametrize(
    "given", [((), {}), ((1, 2, 3), {}), ((1,), {"third": 3}), ((1,), {"first": 1})]
)
def test_fields_that_are_missing_unknown_or_given_twice_are_a_type_error(given):
    args, named = given
    with pytest.raises(TypeError, match="Pair has the fields"):
        Pair(*args, **named)
