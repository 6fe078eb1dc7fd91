"""NumPy's numbers are taken wherever Python's are, and make the same plans, kernels and lists."""

import json
from dataclasses import asdict

import pytest

from heedful.core.base import numbers
from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.base.far import far_lse
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import explain, plan
from heedful.launch import record
from heedful.launch.code import identity
from heedful.launch.program.buffers import forward
from heedful.launch.program.programs import program

np = pytest.importorskip("numpy")


class Index:
    def __index__(self):
        return 5


FAR = numbers.FAR
WINDOWS = [
    ((3, 5), (3, 5)),
    ((FAR - 1, -1, 7), (FAR - 1, -1, 7)),
    ((FAR + 1, 2**70), (FAR, FAR)),
    # Leading keys that are all of them leave nothing for a left bound to hide, 0 among them.
    ((0, 5, FAR), (FAR, 5, FAR)),
    ((3, -1, FAR + 9), (FAR, -1, FAR)),
    ((-1, 5, FAR), (-1, 5, FAR)),
    ((0, FAR, 3), (0, FAR, 3)),
    ((0, FAR + 1, FAR - 1), (0, FAR, FAR - 1)),
    # Refused later, by name.
    ((-2, FAR + 1, FAR), (-2, FAR, FAR)),
    (("3", FAR + 1), ("3", FAR)),
]


@pytest.mark.parametrize(("sides", "wanted"), WINDOWS, ids=str)
def test_bounds_that_hide_nothing_are_one_number(sides, wanted):
    near = numbers.window(sides)
    assert near == wanted
    assert (near is sides) == (sides == wanted)


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), np.array(5), Index()])
def test_what_stands_for_an_int_is_that_int(value):
    assert type(numbers.whole("n", value)) is int and numbers.whole("n", value) == 5


@pytest.mark.parametrize("value", [True, np.True_, 5.0, np.float32(5), "5", None, [5]])
def test_what_is_no_int_is_named(value):
    with pytest.raises(TypeError, match=f"n must be an int, got {type(value).__name__}"):
        numbers.whole("n", value)


@pytest.mark.parametrize("value", [5, 5.0, np.float32(5), np.int16(5), Index()])
def test_what_stands_for_a_float_is_that_float(value):
    assert type(numbers.real("x", value)) is float and numbers.real("x", value) == 5.0


@pytest.mark.parametrize("value", [True, "5", None, 1j])
def test_what_is_no_float_is_named(value):
    with pytest.raises(TypeError, match="x must be a float"):
        numbers.real("x", value)


def test_flags_are_bools_and_nothing_else():
    assert numbers.truth("f", np.True_) is True and numbers.truth("f", False) is False
    for value in (1, np.int8(1), "yes", None, np.array([True])):
        with pytest.raises(TypeError, match="f must be a bool"):
            numbers.truth("f", value)


# Facts, and the same in NumPy's numbers.
FACTS = [
    {"batch": 2, "seqlen_q": 128, "seqlen_k": 4096, "heads_q": 8, "heads_k": 2, "head_dim": 64},
    {"num_splits": 3, "softcap": 30.0, "causal": True, "page_size": 16, "used_k": True},
    {"dropout_p": 0.25, "dropout_origin": (0, 1, 2, 3), "needs_grad": True},
    {"total_q": 256, "total_k": None, "scale": 0.5, "mask": MaskSpec.of(False, (5, 6, 1))},
]
WRAPPED = {int: np.int64, float: np.float64, bool: np.bool_, tuple: np.array}


def numpys(facts: dict) -> dict:
    facts = {name: WRAPPED.get(type(value), lambda x: x)(value) for name, value in facts.items()}
    if "mask" in facts:
        facts["mask"] = MaskSpec.of(np.False_, tuple(np.array([5, 6, 1])))
    return facts


@pytest.mark.parametrize("more", FACTS[1:])
def test_a_problem_of_numpys_numbers_is_the_problem_in_every_way(more):
    plain, same = (
        AttentionProblem.dense(**facts) for facts in (FACTS[0] | more, numpys(FACTS[0] | more))
    )
    assert same == plain and repr(same) == repr(plain)
    assert json.dumps(asdict(same)) == json.dumps(asdict(plain))
    device = by_name("H200")
    assert explain(plan(same, device)) == explain(plan(plain, device))


def test_the_kernels_of_numpys_numbers_are_the_same_kernels():
    made = []
    for facts in (FACTS[0], numpys(FACTS[0])):
        problem = AttentionProblem.dense(**facts)
        specs = {
            name: ArraySpec(tuple(np.array(b.shape)), tuple(np.array(b.strides)), b.dtype, np.True_)
            for name, b in forward(problem).items()
        }
        chosen = plan(problem, by_name("MI300X"))
        entry = record.Entry(problem, "forward", specs)
        calls = program(chosen, "forward", specs).calls
        made.append(
            (json.dumps(entry.to_json()), [identity.kernel_key(c, "gfx942") for c in calls])
        )
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"batch": 2.0}, "batch must be an int, got float"),
        ({"heads_k": "2"}, "heads_k must be an int"),
        ({"softcap": "30"}, "softcap must be a float"),
        ({"needs_grad": 1}, "needs_grad must be a bool"),
        ({"dropout_origin": (0, 0, 0, 1.5)}, r"dropout_origin\[3\] must be an int"),
    ],
)
def test_a_fact_of_another_kind_is_named(facts, named):
    with pytest.raises(TypeError, match=named):
        AttentionProblem.dense(**(FACTS[0] | facts))


def test_no_length_is_longer_than_positions_and_windows_reach_in_int32():
    assert numbers.LONGEST == 2**31 - 1
    assert numbers.FAR + 2 * (2**29 - 1) + 1 < 2**31 <= 4 * numbers.FAR


def test_there_are_no_more_parts_than_keys():
    most = numbers.LONGEST
    assert [numbers.parts(n) for n in (0, most - 1, most, most + 1, 2**40)] == [
        *(0, most - 1, most, most, most)
    ]
    assert numbers.parts(None) is None


@pytest.mark.parametrize("size, least", [(1, 1024.0), (2, 1024.0), (4, 64.0), (8, 64.0)])
def test_a_row_is_far_from_where_its_lse_rounds_as_its_dtype_does(size, least):
    assert far_lse(size) == least
