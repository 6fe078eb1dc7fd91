"""Numbers that are traced: what comes of them is what plain numbers give, for any values."""

import operator
import random
from typing import Any

import pytest

from heedful.core.base.symbols import (
    Symbol,
    Trace,
    if_above,
    joined,
    larger,
    opaque,
    smaller,
    value_of,
)
from support.traces import BINARY, COMPARED, lines, traced


@pytest.fixture
def number():
    (made,) = Trace().symbols([12])
    return made


@pytest.mark.parametrize(
    "unchanged",
    [
        lambda x: x + 0,
        lambda x: x - 0,
        lambda x: x * 1,
        lambda x: x // 1,
        lambda x: x << 0,
        lambda x: x >> 0,
        lambda x: x | 0,
        lambda x: x ^ 0,
        lambda x: 0 + x,
        lambda x: 1 * x,
        lambda x: 0 | x,
        lambda x: 0 ^ x,
    ],
)
def test_what_changes_nothing_is_the_number_itself(number, unchanged):
    assert unchanged(number) is number


@pytest.mark.parametrize(
    "made, step",
    [
        (lambda x, y: x, 1),
        (lambda x, y: x * 6 + y * 9, 3),
        (lambda x, y: x * 6 - 9, 3),
        (lambda x, y: -(x * 6), 6),
        (lambda x, y: abs(x * -6), 6),
        (lambda x, y: (x * 6) * (y * 5), 30),
        (lambda x, y: x * 24 | y * 20, 4),
        (lambda x, y: x * 24 | 12, 4),
        (lambda x, y: (x * 0) | (y * 12), 4),
        (lambda x, y: (x * 0) + (y * 12), 12),
        (lambda x, y: x * 24 // 4, 6),
        (lambda x, y: x * 24 // 5, 1),
        (lambda x, y: x * 24 // y, 1),
        (lambda x, y: larger(x * 24, 36), 12),
        (lambda x, y: if_above(x, y, x * 24, 0), 24),
    ],
)
def test_what_a_number_is_a_multiple_of_needs_no_question(made, step):
    """Whatever the inputs are: a remainder is 0 by itself, and is no line."""
    values = [(x, y) for x in (1, 2, 7, 16, 35) for y in (1, 3, 8)]
    trace = Trace()
    number = made(*trace.symbols(values[0]))
    before = len(lines(trace))
    assert type(number % step) is int and number % step == 0 and len(lines(trace)) == before
    evaluate = trace.function([number])
    found = [evaluate(value) for value in values]
    assert all(one is not None and one[0] % step == 0 for one in found)
    assert isinstance(number % (2 * step), Symbol)


@pytest.mark.parametrize(
    "changed, value",
    [
        (lambda x: 0 - x, -12),
        (lambda x: 1 // x, 0),
        (lambda x: 0 << x, 0),
        (lambda x: 1 << x, 4096),
        (lambda x: x * 0, 0),
        (lambda x: x + 1, 13),
        (lambda x: x & 0, 0),
    ],
)
def test_what_changes_a_number_is_another(number, changed, value):
    made = changed(number)
    assert made is not number and made.value == value


@pytest.mark.parametrize("sign", BINARY)
def test_an_operator_is_that_of_plain_numbers_whichever_side_is_traced(sign):
    compute: Any = BINARY[sign]
    trace = Trace()
    x, y = trace.symbols([13, 3])
    made = [compute(x, y), compute(x, 5), compute(40, y), compute(-40, y)]
    assert [n.value for n in made] == [
        compute(a, b) for a, b in ((13, 3), (13, 5), (40, 3), (-40, 3))
    ]
    assert lines(trace) == [
        ("t0", f"i0 {sign} i1"),
        ("t1", f"i0 {sign} 5"),
        ("t2", f"40 {sign} i1"),
        ("t3", f"(-40) {sign} i1"),
    ]
    evaluate = trace.function(made)
    for a, b in ((13, 3), (7, 2), (100, 9), (1, 1)):
        assert evaluate((a, b)) == (compute(a, b), compute(a, 5), compute(40, b), compute(-40, b))


@pytest.mark.parametrize("sign", COMPARED)
def test_a_comparison_is_a_guard_that_other_values_have_to_answer_alike(sign):
    compute: Any = COMPARED[sign]
    for a in (2, 3, 4):
        trace = Trace()
        x, y = trace.symbols([a, 3])
        assert compute(x, y) is compute(a, 3) and compute(x, 3) is compute(a, 3)
        start = "" if compute(a, 3) else "not "
        assert lines(trace) == [(None, f"{start}i0 {sign} i1"), (None, f"{start}i0 {sign} 3")]
        evaluate = trace.function([])
        for b in (2, 3, 4):
            assert evaluate((b, 3)) == (() if compute(b, 3) is compute(a, 3) else None)


@pytest.mark.parametrize("other", [1.5, None, True])
def test_an_operator_takes_whole_numbers_alone(number, other):
    for compute in BINARY.values():
        with pytest.raises(TypeError):
            compute(number, other)
        with pytest.raises(TypeError):
            compute(other, number)
    for compute in (operator.lt, operator.le, operator.gt, operator.ge):
        with pytest.raises(TypeError):
            compute(number, other)
    assert (number == other) is False and (number != other) is True
    assert lines(number.trace) == []


def test_a_sign_a_size_and_a_length_in_bits_are_steps_of_their_own():
    trace = Trace()
    x, y = trace.symbols([-9, 6])
    made = [-x, abs(x), x.bit_length(), y.bit_length(), -y, abs(y)]
    assert [n.value for n in made] == [9, 9, 4, 3, -6, 6]
    evaluate = trace.function(made)
    assert evaluate((-9, 6)) == (9, 9, 4, 3, -6, 6)
    assert evaluate((16, -1)) == (-16, 16, 5, 1, 1, 1)
    assert [code for _, code in lines(trace)] == [
        "-i0",
        "i0 if i0 > 0 else -i0",
        "i0.bit_length()",
        "i1.bit_length()",
        "-i1",
        "i1 if i1 > 0 else -i1",
    ]


@pytest.mark.parametrize(
    "use, plain",
    [
        (int, 12),
        (operator.index, 12),
        (hash, hash(12)),
        (float, 12.0),
        (lambda x: list(range(20))[x], 12),
        (lambda x: {12: "found"}[x], "found"),
    ],
)
def test_who_wants_the_plain_number_pins_it(number, use, plain):
    got = use(number)
    assert got == plain and type(got) is type(plain)
    assert (None, "i0 == 12") in lines(number.trace)
    assert number.trace.function([number])((12,)) == (12,)
    assert number.trace.function([number])((13,)) is None


def test_a_number_below_zero_and_an_answer_are_pinned_as_whole_numbers():
    def is_small(number: int) -> bool:
        return number < 9

    trace = Trace()
    x, y = trace.symbols([-5, 4])
    small: Any = opaque(is_small)(y)
    assert int(x) == -5 and int(small) == 1
    evaluate = trace.function([x, y, small])
    found = [evaluate(values) for values in ((-5, 4), (-5, 8), (5, 4), (-5, 9))]
    assert found == [(-5, 4, 1), (-5, 8, 1), None, None]


def test_words_about_a_number_pin_nothing(number):
    assert (repr(number), f"{number}", f"{number:04d}", value_of(number)) == ("12",) * 2 + (
        "0012",
        12,
    )
    assert value_of(7) == 7 and value_of("words") == "words"
    assert lines(number.trace) == []


@pytest.mark.parametrize("value, kept, others", [(3, True, (1, -2)), (0, False, (0,))])
def test_whether_a_number_is_zero_is_a_guard(value, kept, others):
    trace = Trace()
    (x,) = trace.symbols([value])
    assert bool(x) is kept
    assert lines(trace) == [(None, "i0 != 0" if kept else "not i0 != 0")]
    evaluate = trace.function(["same"])
    assert [evaluate((other,)) for other in others] == [("same",)] * len(others)
    assert evaluate((1 - int(kept),)) is None


def test_the_same_code_is_the_same_number_and_the_same_question_is_asked_once():
    trace = Trace()
    x, y = trace.symbols([4, 5])
    assert x + y is x + y and x + 1 is not x + 2
    assert x < y and x < y and not x > y
    assert lines(trace) == [
        ("t0", "i0 + i1"),
        ("t1", "i0 + 1"),
        ("t2", "i0 + 2"),
        (None, "i0 < i1"),
        (None, "not i0 > i1"),
    ]
    assert trace.guard("a question", True) is True
    with pytest.raises(AssertionError, match="^a question was True before$"):
        trace.guard("a question", False)
    assert trace.guard("another", False) is False


def test_inputs_are_numbered_through_all_that_are_given():
    trace = Trace()
    first, second = trace.symbols([7]), trace.symbols([8, 9])
    assert [(s.value, s.code, s.trace) for s in first + second] == [
        (7, "i0", trace),
        (8, "i1", trace),
        (9, "i2", trace),
    ]
    assert trace.function([first[0], "words", 5, second[1]])((1, 2, 3)) == (1, "words", 5, 3)


def test_what_has_no_inputs_is_as_it_is():
    assert Trace().function([3, None])(()) == (3, None)


def test_a_number_is_written_as_python_reads_it_beside_any_operator(number):
    for other in (0, 5, -5):
        assert (number - other).value == 12 - other and (other - number).value == other - 12
    assert [code for _, code in lines(number.trace)] == [
        "0 - i0",
        "i0 - 5",
        "5 - i0",
        "i0 - (-5)",
        "(-5) - i0",
    ]


def test_only_what_an_output_or_a_guard_draws_on_is_computed():
    """A division that nobody asks for would fail for a zero."""
    trace = Trace()
    x, y = trace.symbols([8, 2])
    unused = (x // y) * 3
    long_way = (x + y) * x
    assert trace.function([long_way])((5, 0)) == (25,)
    with pytest.raises(ZeroDivisionError):
        trace.function([unused])((5, 0))
    assert unused > 11
    with pytest.raises(ZeroDivisionError):
        trace.function([long_way])((5, 0))
    assert trace.function([long_way])((9, 2)) == (99,)
    assert trace.function([long_way])((7, 2)) is None


def gauge(a: int, b: int, c: int) -> int:
    """Not of the operators that are traced."""
    return int(f"{a}{b}{c}")


def test_an_opaque_function_is_one_step_of_symbols_and_itself_of_plain_numbers():
    called = opaque(gauge)
    assert called(1, 2, 3) == 123
    trace = Trace()
    x, y = trace.symbols([4, 5])
    made: list[Any] = [called(1, x, y), called(y, 6, 7), called(1, x, y)]
    assert [type(n) for n in made] == [Symbol] * 3 and made[0] is made[2]
    assert [n.value for n in made] == [145, 567, 145]
    assert lines(trace) == [("t0", "f_gauge(1, i0, i1)"), ("t1", "f_gauge(i1, 6, 7)")]
    assert trace.function(made)((8, 9)) == (189, 967, 189)


@pytest.mark.parametrize("a, b", [(3, 5), (5, 3), (4, 4)])
def test_the_larger_the_smaller_and_a_choice_are_no_cases(a, b):
    """Of plain numbers, of one symbol on either side, and of two: what is right for one pair of
    values is for all."""
    chosen = if_above(a, b, 10, 20)
    assert (larger(a, b), smaller(a, b), chosen) == (max(a, b), min(a, b), 10 if a > b else 20)
    for places in ((0, 1), (0,), (1,)):
        trace = Trace()
        given: list[Any] = [a, b]
        for place, symbol in zip(places, trace.symbols([given[i] for i in places]), strict=True):
            given[place] = symbol
        x, y = given
        made: list[Any] = [larger(x, y), smaller(x, y), if_above(x, y, 10, 20)]
        made += [if_above(x, y, x + 1, y - 1)]
        evaluate = trace.function(made)
        assert not any(name is None for name, _ in lines(trace))
        for c, d in ((1, 9), (9, 1), (6, 6)):
            now = [a, b]
            for place in places:
                now[place] = (c, d)[place]
            e, f = now
            picked = (10, e + 1) if e > f else (20, f - 1)
            want = max(e, f), min(e, f), *picked
            assert evaluate([now[i] for i in places]) == want
            if now == [a, b]:
                assert tuple(n.value for n in made) == want
    trace = Trace()
    x, y = trace.symbols([a, b])
    values = [value_of(n) for n in (larger(x, y), smaller(x, y), if_above(x, y, x, 7))]
    assert values == [max(a, b), min(a, b), a if a > b else 7]


def test_many_steps_give_for_other_values_what_plain_numbers_give():
    """Expressions drawn at random, computed with symbols once and with plain numbers each time."""
    rng = random.Random(0)
    for _ in range(60):
        steps = [(rng.choice([*BINARY]), rng.randrange(99), rng.randrange(99)) for _ in range(8)]

        def computed(values, steps=steps) -> list[Any]:
            found = [*values, 3]
            for sign, left, right in steps:
                a, b = found[left % len(found)], found[right % len(found)]
                if sign in ("<<", ">>"):
                    b = b % 5
                elif sign in ("//", "%"):
                    b = larger(1, abs(b))
                found.append(BINARY[sign](a, b))
            return found

        trace = Trace()
        made = computed(trace.symbols([11, 4]))
        evaluate = trace.function(made)
        for values in ((11, 4), (0, 0), (5, -7), (123, 456)):
            assert evaluate(values) == tuple(computed(values))
        assert [value_of(n) for n in made] == computed((11, 4))


def steps(x, y) -> list:
    """Questions within answers of others, and work that some answers alone want."""
    total = x + y
    if total > 10:
        if x % 2 == 0:
            return [total, x // 2]
        return [total * 3, y, x]
    unused = x * 17
    half = y // (x - 3) if x != 3 else unused
    return [half, total] if y > 4 else [total]


def test_cases_that_are_joined_answer_as_each_does_alone():
    """In whatever order they came."""
    rng = random.Random(1)
    drawn = [(rng.randrange(12), rng.randrange(12)) for _ in range(60)]
    for _ in range(20):
        rng.shuffle(drawn)
        cases: list[tuple] = []
        for values in drawn:
            if all(trace.function(outputs)(values) is None for trace, outputs, _ in cases):
                cases.append(traced(values, steps))
        evaluate = joined(cases)
        assert evaluate is not None and len(cases) == 6
        for values in ((a, b) for a in range(12) for b in range(12)):
            (alone,) = [
                (name, found)
                for trace, outputs, name in cases
                if (found := trace.function(outputs)(values)) is not None
            ]
            assert evaluate(values) == alone == (alone[0], tuple(steps(*values)))


def test_values_of_no_joined_case_have_no_answer():
    evaluate = joined([traced((1, 20), steps), traced((2, 20), steps)])
    assert evaluate is not None and evaluate((5, 5)) is None
    assert evaluate((4, 7)) == ("(2, 20)", (11, 2))


def test_what_joined_cases_share_is_computed_once():
    called = []

    def costly(number: int) -> int:
        called.append(number)
        return number

    asked: Any = opaque(costly)
    cases = [traced((n,), lambda x: [asked(x) > 5, asked(x) > 8]) for n in (3, 7, 9)]
    evaluate = joined(cases)
    assert evaluate is not None
    for n, name in ((2, "(3,)"), (8, "(7,)"), (10, "(9,)")):
        called.clear()
        found = evaluate((n,))
        assert found is not None and found[0] == name and called == [n]


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda x: [x > 5], lambda x: [x > 6]),
        (lambda x: [x + 1 > 5], lambda x: [x > 5]),
        (lambda x: [x > 5], lambda x: [x > 5, x > 2]),
        (lambda x: [], lambda x: [x > 5]),
        (lambda x: [x > 5], lambda x: [x > 5]),
    ],
)
def test_cases_that_part_elsewhere_than_at_a_question_are_not_joined(one, other):
    assert joined([traced((9,), one), traced((9,), other)]) is None


def test_functions_of_one_name_are_not_taken_for_one_another():
    def made(more: int) -> Any:
        def step(number: int) -> int:
            return number + more

        return opaque(step)

    one, other = made(1), made(2)
    cases = [traced((3,), lambda x: [one(x), x > 5]), traced((9,), lambda x: [other(x), x > 5])]
    assert joined(cases) is None


def test_two_functions_of_one_name_are_in_no_trace():
    def made(more: int) -> Any:
        def step(number: int) -> int:
            return number + more

        return opaque(step)

    (number,) = Trace().symbols([3])
    made(1)(number)
    with pytest.raises(AssertionError, match="f_step is two functions"):
        made(2)(number)
