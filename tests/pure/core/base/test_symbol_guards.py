"""What guards say of traced numbers is made use of, and changes no answer."""

import random
from typing import Any

import pytest

from heedful.core.base.symbols import Symbol, Trace, if_above, joined, larger, opaque, settled
from support.traces import BINARY, COMPARED, lines, traced


def drawn_program(rng: random.Random):
    """Steps, choices and questions about what came before, with answers that go on unlike."""

    def draw() -> tuple:
        what, sign = rng.choice(("step", "choice", "const", "pair")), rng.choice([*COMPARED])
        numbers = rng.randrange(99), rng.randrange(99), rng.randrange(-3, 5)
        return what, sign, rng.choice(("+", "-", "*", "//", "%")), *numbers

    steps = [draw() for _ in range(9)]

    def program(x, y) -> list:
        found = [x, y]
        for what, sign, operation, left, right, const in steps:
            a, b = found[left % len(found)], found[right % len(found)]
            if what == "step":
                found.append(BINARY[operation](a, const or 2))
            elif what == "choice":
                found.append(if_above(a, const, b, abs(a)))
            elif COMPARED[sign](a, const if what == "const" else b):
                found.append(a - b)
            else:
                found.append(larger(b, const))
        return found

    return program


def test_what_guards_say_changes_no_answer():
    """Of programs drawn at random, for all of many values: numbers that guards leave one value or
    that of another number, and questions whose answers others tell."""
    rng = random.Random(2)
    values = [(a, b) for a in range(-4, 7) for b in range(-4, 7)]
    many = []
    for _ in range(60):
        program = drawn_program(rng)
        cases: list[tuple] = []
        evaluate = None
        for pair in rng.sample(values, len(values)):
            found = evaluate(pair) if evaluate else None
            if found is None:
                cases.append(traced(pair, program))
                evaluate = joined(cases)
                assert evaluate is not None
                found = evaluate(pair)
            assert found is not None and found[1] == tuple(program(*pair))
        many.append(len(cases))
        alone = [trace.function(outputs) for trace, outputs, _ in cases]
        for pair in values:
            found = [answer for function in alone if (answer := function(pair)) is not None]
            assert found == [tuple(program(*pair))]
    assert max(many) > 12


def test_what_guards_leave_one_value_is_computed_with_the_function_alone():
    called = []

    def costly(number: int) -> int:
        called.append(number)
        return number * 2

    asked: Any = opaque(costly)
    trace = Trace()
    x, y = trace.symbols([3, 3])
    assert x > 2 and x == y and not y >= 4
    outputs = [asked(x), asked(y) + 1, x * 5, larger(y, 1)]
    evaluate = trace.function(outputs)
    called.clear()
    assert evaluate((3, 3)) == (6, 7, 15, 3) and called == []
    assert [evaluate(values) for values in ((2, 2), (4, 4), (3, 4))] == [None] * 3


@pytest.mark.parametrize("sign", COMPARED)
@pytest.mark.parametrize("value", [3, 4, 5])
def test_a_question_whose_answer_others_tell_is_not_asked_again(sign, value):
    """Of a number between 3 and 5, for all numbers it is compared with, from either side."""
    compute: Any = COMPARED[sign]
    for other in range(1, 8):
        for turned in (False, True):
            trace = Trace()
            (x,) = trace.symbols([value])
            assert x >= 3 and x < 6
            pair = (other, x) if turned else (x, other)
            compute(*pair)
            code = trace.function([x])
            for now in range(10):
                plain = [(other, n) if turned else (n, other) for n in (now, value)]
                alike = 3 <= now <= 5 and compute(*plain[0]) is compute(*plain[1])
                assert code((now,)) == ((now,) if alike else None)
            answers = {compute(*((other, n) if turned else (n, other))) for n in (3, 4, 5)}
            asked = code.__code__.co_code
            before = Trace()
            (z,) = before.symbols([value])
            assert z >= 3 and z < 6
            assert (len(before.function([z]).__code__.co_code) == len(asked)) is (len(answers) == 1)


def test_numbers_are_settled_by_what_was_asked_so_far():
    trace = Trace()
    x, y, z = trace.symbols([1, 7, 7])
    more, twice = x + 1, y * 2
    numbers = [x, y, more, twice, 9, "words"]
    assert x > 0
    assert settled(numbers) == numbers and settled(numbers)[0] is x
    assert x < 2 and y == z
    assert lines(trace)[-1] == (None, "i1 == i2")
    found = settled(numbers)
    assert [type(n) for n in found] == [int, Symbol, int, Symbol, int, str]
    assert found[1] is y and (found[0], found[2]) == (1, 2)
    assert z == 7
    assert settled(numbers) == [1, 7, 2, 14, 9, "words"]
    assert [type(n) for n in settled(numbers)[:4]] == [int] * 4
    assert settled([3, None]) == [3, None]


def test_a_bound_that_is_ruled_out_is_none():
    trace = Trace()
    low, high = trace.symbols([2, 1])
    for number in (low, high):
        assert number > 0 and number < 3
    assert low != 1 and high != 2
    assert [type(n) for n in settled([low, high])] == [int, int]


def test_a_bound_that_equals_a_known_number_is_ruled_out_from_either_side():
    for turned in (False, True):
        trace = Trace()
        one, two, low, high = trace.symbols([1, 2, 2, 1])
        assert one == 1 and two == 2
        for number in (low, high):
            assert number > 0 and number < 3
        pairs = (low, one), (high, two)
        assert all(b != a if turned else a != b for a, b in pairs)
        assert [type(n) for n in settled([low, high])] == [int, int]
        # A number between the bounds rules out none of them.
        trace = Trace()
        two, wide = trace.symbols([2, 3])
        assert two == 2 and wide > 0 and wide < 4
        assert two != wide if turned else wide != two
        assert settled([wide])[0] is wide
        assert trace.function([wide])((2, 1)) == (1,)
