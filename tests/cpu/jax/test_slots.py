"""Which arrays of a launch from JAX are operands, which are results, and which are both."""

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from heedful.jax.gpu.empty import empty
from heedful.jax.gpu.programs import Slots, slots


@pytest.mark.parametrize(
    "order, writes, live, found",
    [
        ("q", "", "", Slots(("q",), (), {})),
        ("q out", "out", "", Slots(("q",), ("out",), {})),
        ("q out lse", "out lse", "", Slots(("q",), ("out", "lse"), {})),
        # What is not last, or has contents, is an operand and its alias.
        ("out q", "out", "", Slots(("out", "q"), ("out",), {0: 0})),
        ("q out", "out", "out", Slots(("q", "out"), ("out",), {1: 0})),
        ("q out lse", "out lse", "out", Slots(("q", "out"), ("lse", "out"), {1: 1})),
        ("q a b c", "a b c", "b", Slots(("q", "a", "b"), ("c", "a", "b"), {1: 1, 2: 2})),
        # Twice, last: the first is the operand.
        ("x q x", "x", "x", Slots(("x", "q"), ("x",), {0: 0})),
        ("x x", "x", "", Slots(("x",), ("x",), {0: 0})),
        ("x q x", "", "x", Slots(("x", "q", "x"), (), {})),
    ],
    ids=str,
)
def test_an_array_that_is_written_is_a_result_in_the_place_of_its_last_parameter(
    order, writes, live, found
):
    got = slots(tuple(order.split()), frozenset(writes.split()), frozenset(live.split()))
    assert got == found


@pytest.mark.parametrize("order", ["x x q", "x q x q", "x x x"])
def test_an_array_that_is_written_in_two_places_before_the_last_is_refused(order):
    with pytest.raises(RuntimeError, match="x is written, and more than one operand"):
        slots(tuple(order.split()), frozenset("x"), frozenset())


def test_memory_without_contents_has_a_name_that_tells_it_from_its_like():
    def two():
        return empty((2, 3), jnp.float16, "out"), empty((2, 3), jnp.float16, "lse")

    text = jax.jit(two).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @AllocateBuffer()") == 2 and text.count("tensor<2x3xf16>") > 2
    assert '"out"' in text and '"lse"' in text
