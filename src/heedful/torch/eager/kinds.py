"""The plans and bound calls of kinds of calls, whose lengths are values.

A kind is all of a call but its lengths, and the sizes and strides that follow from them. A kind has
cases, one for each set of answers to the questions about the lengths: see core/base/symbols.py. New
lengths cost the evaluation of a case, but neither a plan nor a program.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.core.base.arrays import ArraySpec, dense_strides
from heedful.core.base.symbols import Answer, Trace, joined
from heedful.core.call.problem import AttentionProblem, Lengths
from heedful.torch.base.arrays import dtype_name

_new = tuple.__new__
# How many cases of one kind, and how many kinds, are kept. A kind has few cases.
_MOST_CASES, MOST_KINDS = 64, 256
# How many cases share a function, which is made again with each of them.
_MOST_JOINED = 16
# Rows of heads and head dims, which are no lengths.
_ROWS = frozenset(("q", "k", "v", "out", "dout", "dq", "dk", "dv"))

_lengths = attrgetter(*Lengths._fields)
_rest = attrgetter(*(f.name for f in fields(AttentionProblem) if f.name not in Lengths._fields))


class ArrayKind(NamedTuple):
    """All facts of an operand that lengths do not change. kept: the last sizes, which they do not
    change. last: the last stride, if there is one. dense: whether strides follow from sizes.
    moving: how many sizes come before `kept`.
    """

    name: str
    dtype: torch.dtype
    aligned: bool
    kept: tuple[int, ...]
    last: tuple[int, ...]
    dense: bool
    moving: int


# A trace, its outputs, and its case.
_Made = tuple[Trace, Sequence[Any], Any]


class Kind:
    """The cases of one kind. `find` makes a missing one. The first few share a function, which
    finds the right one by a few questions; most kinds have no more. Later ones are tried one after
    the other.
    """

    __slots__ = ("_found", "_joined")

    def __init__(self):
        # Functions of values, and the traces of the first.
        self._found: tuple[Answer, ...] = ()
        self._joined: tuple[_Made, ...] = ()

    def known(self, values: Sequence[int]) -> tuple[Any, Any] | None:
        """The case of these values, and its numbers for them, if there is one."""
        for evaluate in self._found:
            answer = evaluate(values)
            if answer is not None:
                return answer
        return None

    def find(self, values: Sequence[int], make: Callable[[list], Any]) -> tuple[Any, Any]:
        """The case of these values, and its numbers for them. make(symbols): makes a new case,
        whose `outputs` are the numbers.
        """
        known = self.known(values)
        if known is not None:
            return known
        trace = Trace()
        case = make(trace.symbols(values))
        self._add((trace, case.outputs, case))
        answer = self.known(values)
        assert answer is not None
        return answer

    def _add(self, made: _Made) -> None:
        if len(self._joined) < _MOST_JOINED:
            cases = (*self._joined, made)
            answer = joined(cases)
            if answer is not None:
                self._found, self._joined = (answer, *self._found[1:]), cases
                return
        alone = joined([made])
        assert alone is not None
        kept = _MOST_CASES - len(self._joined)
        self._found = (self._found[0], alone, *self._found[1:kept])


class Kinds(dict):
    """Kinds, or values that belong to kinds, by key; emptied when there are too many."""

    def of(self, key: tuple, make: Callable[[], Any] = Kind) -> Any:
        """The value of this kind, made if it is missing."""
        value = self.get(key)
        if value is None:
            if len(self) >= MOST_KINDS:
                self.clear()
            value = self[key] = make()
        return value


def of_tensor(name: str, tensor: Tensor) -> tuple[ArrayKind, tuple[int, ...]]:
    """The facts of an operand that belong to its kind, and the sizes and strides that lengths may
    change."""
    shape, strides = tensor.shape, tensor.stride()
    moving = len(shape) - 2 if name in _ROWS else len(shape)
    dense = strides == dense_strides(shape)
    aligned = tensor.data_ptr() % 16 == 0
    kind = ArrayKind(name, tensor.dtype, aligned, shape[moving:], strides[-1:], dense, moving)
    sizes = tuple(shape[:moving])
    return kind, sizes if dense else (*sizes, *strides[:-1])


class Sizes:
    """Reads the sizes and strides that lengths may change from several tensors of known kinds, in
    half the time of `of_tensor` for each."""

    __slots__ = ("_pick", "_strided")

    def __init__(self, before: int, tensors: Sequence[Tensor], kinds: Sequence[ArrayKind]):
        """before: how many other numbers precede them. tensors: some of these kinds."""
        places, end = [*range(before)], before
        strided = [not kind.dense for kind in kinds]
        self._strided = strided if any(strided) else None
        for rank, kind in zip(map(Tensor.dim, tensors), kinds, strict=True):
            places += range(end, end + kind.moving)
            end += rank
            if not kind.dense:
                places += range(end, end + rank - 1)
                end += rank
        self._pick = itemgetter(*places)

    def of(self, numbers: list[int], tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The numbers (two or more) followed by the tensors' sizes and strides that lengths may
        change."""
        if self._strided is None:
            for tensor in tensors:
                numbers += tensor.shape
            return self._pick(numbers)
        for tensor, strided in zip(tensors, self._strided, strict=True):
            numbers += tensor.shape
            if strided:
                numbers += tensor.stride()
        return self._pick(numbers)


def of_call(problem: AttentionProblem, tensors: Mapping[str, Tensor]) -> tuple[tuple, list[int]]:
    """The facts of a problem on these tensors that belong to its kind, and those that lengths may
    change."""
    lengths = _lengths(problem)
    values = [length or 0 for length in lengths]
    kinds = []
    for name, tensor in tensors.items():
        array, sizes = of_tensor(name, tensor)
        kinds.append(array)
        values += sizes
    totals = lengths[3] is not None, lengths[4] is not None
    return (totals, _rest(problem), *kinds), values


def with_numbers(
    problem: AttentionProblem, kinds: Iterable[ArrayKind], numbers: Iterable[Any]
) -> tuple[AttentionProblem, dict[str, ArraySpec]]:
    """The problem and the arrays of these kinds at other lengths. numbers: as from `of_call`."""
    rest = iter(numbers)
    problem = at_lengths(problem, [next(rest) for _ in Lengths._fields])
    return problem, {kind.name: with_sizes(kind, rest) for kind in kinds}


def at_lengths(problem: AttentionProblem, numbers: Sequence[Any]) -> AttentionProblem:
    """The problem at other lengths, the first of the numbers; lengths that the problem does not
    have are ignored."""
    pairs = zip(problem.lengths, numbers, strict=False)
    return problem.at(Lengths._make([None if old is None else new for old, new in pairs]))


def with_sizes(kind: ArrayKind, numbers: Iterator[Any]) -> ArraySpec:
    """The array of this kind with the next of the numbers as sizes and strides."""
    shape = (*(next(numbers) for _ in range(kind.moving)), *kind.kept)
    strides = (
        dense_strides(shape) if kind.dense else (*(next(numbers) for _ in shape[1:]), *kind.last)
    )
    # Symbols need no check that they are whole numbers.
    return _new(ArraySpec, (shape, strides, dtype_name(kind.dtype), kind.aligned, None))
