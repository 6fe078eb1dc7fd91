"""Numbers that are traced: what changes nothing is not computed again."""

import pytest

from heedful.core.symbols import Trace


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
    "changed, value",
    [
        (lambda x: 0 - x, -12),
        (lambda x: 1 // x, 0),
        (lambda x: x % 1, 0),
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
