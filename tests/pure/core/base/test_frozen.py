"""Frozen dataclasses are what the standard library's are."""

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, field
from functools import cached_property
from typing import Any

import pytest

from heedful.core.base import evaluated
from heedful.core.base.frozen import dataclass


def declared(make, **options) -> tuple[type, type]:
    """A class and one that inherits from it, of this decorator."""

    class Base:
        """Two fields."""

        first: int
        second: Any = "two"

    decorated: Any = make(frozen=True, **options)(Base)

    class Derived(decorated):
        """Further fields, of all kinds."""

        third: dict = field(default_factory=dict, repr=False)
        unseen: object = field(default=None, compare=False)
        counted: int = field(init=False)

        def __post_init__(self):
            if self.first < 0:
                raise ValueError("first")
            object.__setattr__(self, "counted", len(self.third))

    return decorated, make(frozen=True, **options)(Derived)


@pytest.fixture(params=[False, True], ids=["with a dict", "with slots"])
def pairs(request):
    theirs = declared(dataclasses.dataclass, slots=request.param)
    return zip(declared(dataclass, slots=request.param), theirs, strict=True)


CALLS = [((1,), {}), ((1, 3), {}), ((), {"second": 3, "first": 1}), ((2, [1]), {})]


def test_instances_are_made_shown_and_compared_as_theirs(pairs):
    for ours, theirs in pairs:
        made, wanted = ([cls(*a, **k) for a, k in CALLS] for cls in (ours, theirs))
        assert [repr(one) for one in made] == [repr(one) for one in wanted]
        assert [[a == b for a in made] for b in made] == [[a == b for a in wanted] for b in wanted]
        assert made[0] != wanted[0] and made[0] != 1
        assert dataclasses.asdict(made[1]) == dataclasses.asdict(wanted[1])
        assert dataclasses.replace(made[0], first=7) == ours(7)
        assert ours.__match_args__ == theirs.__match_args__
        assert hasattr(made[0], "__dict__") is hasattr(wanted[0], "__dict__")


def test_equal_ones_have_one_hash_and_fields_that_are_not_compared_do_not_count(pairs):
    (ours, _), (derived, _) = pairs
    assert len({ours(1), ours(1, "two"), ours(1, 2)}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(derived(1))
    assert derived(1, unseen=1) == derived(1, unseen=2) != derived(1, third={1: 2})
    assert ours(1) != derived(1)


class Alike:
    """Says that it equals whatever it is compared with."""

    def __eq__(self, other):
        return True


def test_an_object_of_another_class_is_asked_whether_it_is_equal(pairs):
    for ours, theirs in pairs:
        for made in (ours(1), theirs(1)):
            for other, equal in ((1, False), (Alike(), True)):
                assert (made == other) is (other == made) is equal
                assert (made != other) is not equal


def test_each_instance_has_a_default_of_its_own(pairs):
    _, (derived, _) = pairs
    assert derived(1).third == {} and derived(1).third is not derived(1).third
    assert derived(1, third={1: 1}).counted == 1


def test_nothing_can_be_set_or_deleted(pairs):
    for ours, _ in pairs:
        made = ours(1)
        with pytest.raises(FrozenInstanceError, match="first"):
            made.first = 2
        with pytest.raises(FrozenInstanceError, match="first"):
            del made.first
        assert made.first == 1


@pytest.mark.parametrize("arguments", [(), (1, 2, 3), (1,)])
def test_a_wrong_call_names_the_class(arguments):
    ours, _ = declared(dataclass)
    options = {"moon": 1} if len(arguments) == 1 else {}
    with pytest.raises(TypeError, match=r"Base.__init__\(\)"):
        ours(*arguments, **options)


def test_what_the_class_checks_is_checked(pairs):
    _, (derived, theirs) = pairs
    for cls in (derived, theirs):
        with pytest.raises(ValueError, match="first"):
            cls(-1)


@dataclass(frozen=True, slots=True)
class Slotted:
    """Its module has its name, so that it can be pickled."""

    one: int
    two: tuple = ()


@dataclass(frozen=True)
class Open:
    """With a value that is computed once."""

    one: int

    @cached_property
    def twice(self) -> list[int]:
        return [self.one] * 2


@dataclass(frozen=True, eq=False)
class Itself:
    """Equal to itself alone."""

    one: int


@dataclass(frozen=True)
class Nothing:
    """No field at all."""


@dataclass(frozen=True)
class Named:
    """Methods of its own."""

    one: int

    def __eq__(self, other: object) -> bool:
        return other == self.one

    def __repr__(self) -> str:
        return "me"


def test_copies_and_pickles_are_equal():
    for made in (Slotted(1, (2, [3])), Open(4), Nothing()):
        assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made) == copy.copy(made)


def test_what_is_computed_once_is_kept():
    made = Open(2)
    assert made.twice is made.twice and made.twice == [2, 2]


def test_instances_may_be_compared_by_identity():
    assert Itself(1) != Itself(1) and len({Itself(1), Itself(1)}) == 2
    assert Nothing() == Nothing() and hash(Nothing()) == hash(Nothing())


def test_classes_with_as_many_fields_share_what_is_compiled(monkeypatch):
    """A process makes some forty classes before its first call."""

    def made(*names: str, **defaults: int) -> Any:
        body = {"__annotations__": dict.fromkeys(names, int), **defaults}
        return dataclass(frozen=True)(type("Made", (), body))

    first = made("one", "two")
    monkeypatch.setattr(evaluated, "function", None)
    assert repr(made("three", "four")(four=1, three=2)) == "Made(three=2, four=1)"
    assert repr(made("names", "store", store=5)(7)) == "Made(names=7, store=5)"
    assert repr(first(1, two=2)) == "Made(one=1, two=2)"


def test_a_field_without_a_default_may_not_follow_one_with_a_default():
    body = {"__annotations__": {"one": int, "two": int}, "one": 1}
    for make in (dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError, match="default"):
            make(frozen=True)(type("Made", (), dict(body)))


def test_methods_of_the_class_are_kept():
    assert Named(3) == 3 and repr(Named(3)) == "me"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Named(3))
