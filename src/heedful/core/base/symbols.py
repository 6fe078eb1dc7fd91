"""Whole numbers that remember how they were computed.

A call of a kind is planned and bound once with its lengths as symbols. The result is then a
function of the lengths: straight-line code that computes every number. The questions about the
lengths on the way (is there one tile of rows, do the tiles fill the device, is a stride a multiple
of 8) are the function's guards. Lengths with other answers make another case, which is planned and
bound, too. Code after the guards uses their answers: a number with only one possible value becomes
that value, two equal numbers become one, and a question that the guards answer is not asked.

Code that needs a plain number, to hash it or to index with it, pins the symbol: its value becomes a
guard. So a case can be too narrow, which costs more plans, but it is never wrong.
"""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import Any

from heedful.core.base import evaluated


class Symbol:
    """A whole number with the expression that computes it from a trace's inputs. step: the number
    is a multiple of this whatever the inputs."""

    __slots__ = ("code", "step", "trace", "value")

    def __init__(self, trace: "Trace", value: int, code: str, step: int = 1):
        self.trace, self.value, self.code, self.step = trace, value, code, step

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def _pin(self) -> int:
        value = int(self.value)  # an opaque function may have returned True
        self.trace.guard(f"{self.code} == {value}", True)
        return value

    __int__ = __index__ = __trunc__ = _pin

    def __hash__(self) -> int:
        return hash(self._pin())

    def __float__(self) -> float:
        return float(self._pin())

    def __bool__(self) -> bool:
        return self.trace.guard(f"{self.code} != 0", self.value != 0)

    def bit_length(self) -> Any:
        return self.trace.node(self.value.bit_length(), f"{self.code}.bit_length()")

    def __neg__(self) -> Any:
        return self.trace.node(-self.value, f"-{self.code}", self.step)

    def __abs__(self) -> Any:
        # In half the time of a call of abs.
        code = f"{self.code} if {self.code} > 0 else -{self.code}"
        return self.trace.node(abs(self.value), code, self.step)


def _binary(name: str, sign: str):
    compute = getattr(operator, name)

    def forward(self: Symbol, other: Any) -> Any:
        if type(other) not in (int, Symbol):
            return NotImplemented
        return _combined(self.trace, compute, sign, self, other)

    def backward(self: Symbol, other: Any) -> Any:
        if type(other) is not int:
            return NotImplemented
        return _combined(self.trace, compute, sign, other, self)

    return forward, backward


# The operand that does not change a number, on its right and on its left.
_NEUTRAL = {"+": 0, "-": 0, "*": 1, "//": 1, "<<": 0, ">>": 0, "|": 0, "^": 0}
_NEUTRAL_LEFT = {"+": 0, "*": 1, "|": 0, "^": 0}


def _combined(trace: "Trace", compute, sign: str, a, b):
    if type(b) is int and b == _NEUTRAL.get(sign):
        return a
    if type(a) is int and a == _NEUTRAL_LEFT.get(sign):
        return b
    if sign == "%" and type(b) is int and b and _step(a) % b == 0:
        return 0
    (x, left), (y, right) = map(_parts, (a, b))
    return trace.node(compute(x, y), f"{left} {sign} {right}", _combined_step(sign, a, b))


def _step(number: int | Symbol) -> int:
    """The greatest known divisor, 0 for 0."""
    return number.step if isinstance(number, Symbol) else abs(number)


def _combined_step(sign: str, a, b) -> int:
    one, other = _step(a), _step(b)
    if sign in "+-":
        return gcd(one, other)
    if sign == "|":
        return gcd(one & -one, other & -other)
    if sign == "*":
        return one * other
    if sign == "//" and type(b) is int and b > 0 and one % b == 0:
        return one // b
    return 1


def _parts(number) -> tuple[int, str]:
    if isinstance(number, Symbol):
        return number.value, number.code
    return number, repr(number) if number >= 0 else f"({number})"


def _comparison(name: str, sign: str):
    compute = getattr(operator, name)

    def compare(self: Symbol, other: Any) -> Any:
        if type(other) not in (int, Symbol):
            return NotImplemented
        (x, left), (y, right) = map(_parts, (self, other))
        return self.trace.guard(f"{left} {sign} {right}", compute(x, y))

    return compare


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "lshift": "<<"}
_SIGNS |= {"rshift": ">>", "and": "&", "or": "|", "xor": "^"}
for _name, _sign in _SIGNS.items():
    _forward, _backward = _binary(f"__{_name}__", _sign)
    setattr(Symbol, f"__{_name}__", _forward)
    setattr(Symbol, f"__r{_name}__", _backward)
_ORDERS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _sign in _ORDERS.items():
    setattr(Symbol, f"__{_name}__", _comparison(_name, _sign))


class Trace:
    """The operations on the symbols of one case."""

    def __init__(self):
        self._inputs: list[str] = []
        # Numbers by their code, and guards with their answers, in order.
        self._named: dict[str, Symbol] = {}
        self._asked: dict[str, bool] = {}
        self._functions: dict[str, Callable] = {}

    def symbols(self, values: Iterable[int]) -> list[Any]:
        """One more input for each value."""
        made = []
        for value in values:
            name = f"i{len(self._inputs)}"
            self._inputs.append(name)
            made.append(Symbol(self, value, name))
        return made

    def node(self, value: int, code: str, step: int = 1) -> Symbol:
        """The number that `code` computes; the same code is the same number. step: see Symbol."""
        number = self._named.get(code)
        if number is None:
            name = f"t{len(self._named)}"
            number = self._named[code] = Symbol(self, value, name, step)
        return number

    def guard(self, code: str, truth: bool) -> bool:
        """Keeps a question that was asked, and the answer to it in this case."""
        before = self._asked.get(code)
        if before is None:
            self._asked[code] = truth
        elif before is not truth:
            raise AssertionError(f"{code} was {before} before")
        return truth

    def is_asked(self, code: str) -> bool:
        """Whether the answer is the same for all lengths of this case."""
        return code in self._asked

    def call(self, function: Callable[..., int], arguments: Sequence[Any]) -> Symbol:
        """The number that a pure function of whole numbers returns; the trace keeps the call, not
        its steps."""
        name = f"f_{function.__name__}"
        if self._functions.setdefault(name, function) is not function:
            raise AssertionError(f"{name} is two functions")
        values, codes = zip(*map(_parts, arguments), strict=True)
        return self.node(function(*values), f"{name}({', '.join(codes)})")

    def function(self, outputs: Iterable[Any]) -> Callable[[Sequence[int]], tuple | None]:
        """A function from the values of all symbols, in order, to the outputs; it returns None
        where a guard fails."""
        return _made([_Branch(self, "", outputs)], self._functions)

    def settled(self, numbers: Iterable[Any]) -> list[Any]:
        """These numbers; those with only one possible value under the guards so far are plain."""
        branches, path = [_Branch(self, "", ())], _Path(self._functions)
        for asked, truth in branches[0].guards:
            path.learn(path.question(asked, branches), truth)
        return [
            number.value
            if isinstance(number, Symbol) and path.atom(number.code, branches) not in path.written
            else number
            for number in numbers
        ]


# Inputs and named numbers, as a trace calls them.
_NAME = re.compile(r"\b[it]\d+\b")
Answer = Callable[[Sequence[int]], tuple[Any, tuple] | None]


def joined(cases: Sequence[tuple[Trace, Iterable[Any], Any]]) -> Answer | None:
    """One function for several traces of the same inputs. cases: each trace with its outputs and a
    value. The function returns (value, outputs) of the trace whose guards hold, or None if there is
    none. Its code computes once what traces share, and branches where they differ. `joined` returns
    None if traces first differ elsewhere than in the answer to a guard.
    """
    scope: dict[str, Any] = {}
    branches: list[_Branch] = []
    for number, (trace, outputs, what) in enumerate(cases):
        if any(scope.get(name, one) is not one for name, one in trace._functions.items()):
            return None
        scope |= trace._functions | {f"case{number}": what}
        branches.append(_Branch(trace, f"case{number}, ", outputs))
    try:
        return _made(branches, scope)
    except _Unlike:
        return None


class _Unlike(Exception):
    """Traces first differ elsewhere than in the answer to a guard."""


class _Branch:
    """A trace prepared for a function: its steps by name, its questions and answers, and its
    outputs."""

    def __init__(self, trace: Trace, before: str, outputs: Iterable[Any]):
        self.inputs, self.before, self.outputs = trace._inputs, before, outputs
        self.steps = {number.code: code for code, number in trace._named.items()}
        self.guards = [*trace._asked.items()]


_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_INFINITE = float("inf")
_NUMBER = re.compile(r"\(?(-?\d+)\)?")
_CHOICE = re.compile(r"(.+) if (.+) else (.+)")
# The questions about two numbers: left, sign, right.
_Question = tuple[str, str, str]


class _Path:
    """The state of a function that is being written, and the answers of its guards so far. A step
    is written when something uses it. It is not written if it has only one possible value, or
    equals another number.
    """

    def __init__(self, scope: dict[str, Any], other: "_Path | None" = None):
        """other: the path whose lines precede this one's."""
        self.lines: list[str] = []
        self.scope = dict(scope)
        # Names of the function; computed code and its name; names that stand for others; the least
        # and the greatest possible value of a number.
        self.written: set[str] = set(other.written) if other else set()
        self._computed: dict[str, str] = dict(other._computed) if other else {}
        self._equals: dict[str, str] = dict(other._equals) if other else {}
        self._ranges: dict[str, tuple[float, float]] = dict(other._ranges) if other else {}

    def atom(self, name: str, branches: Sequence[_Branch]) -> str:
        """The stand-in for a number: its name or that of its equal, or its value. Raises _Unlike
        where traces compute it differently."""
        if name in self._equals:
            return self._standing(name)
        if name in self.written:
            return name
        if name in branches[0].inputs:
            self.written.add(name)
            return name
        code = branches[0].steps[name]
        if any([branch.steps.get(name) != code for branch in branches]):
            raise _Unlike
        text = self._simple(code, branches)
        known = self._standing(self._computed.get(text, text))
        if _NAME.fullmatch(known) or _NUMBER.fullmatch(known):
            self._equals[name] = known
            return known
        self._computed[text] = name
        self.written.add(name)
        self.lines.append(f"{name} = {text}")
        return name

    def _standing(self, name: str) -> str:
        while name in self._equals:
            name = self._equals[name]
        return name

    def _simple(self, code: str, branches: Sequence[_Branch]) -> str:
        """A step in atoms, simplified by the answers so far."""
        if choice := _CHOICE.fullmatch(code):
            yes, asked, no = choice.groups()
            truth = self.told(self.question(asked, branches))
            if truth is not None:
                return self._simple(yes if truth else no, branches)
        code = _NAME.sub(lambda match_: self.atom(match_[0], branches), code)
        if not _NAME.search(code):
            return _literal(int(evaluated.value(code, self.scope)))
        match code.split(" "):
            case [a, sign, b] if b == str(_NEUTRAL.get(sign)):
                return a
            case [a, sign, b] if a == str(_NEUTRAL_LEFT.get(sign)):
                return b
        return code

    def question(self, code: str, branches: Sequence[_Branch]) -> _Question:
        """The question that the code asks, in atoms."""
        left, sign, right = code.split(" ")
        left, right = (
            self.atom(x, branches) if _NAME.fullmatch(x) else _literal(_number(x))
            for x in (left, right)
        )
        return left, sign, right

    def told(self, question: _Question) -> bool | None:
        """The answer to it, if earlier answers imply it."""
        left, sign, right = question
        (low, high), (least, most) = self._range(left), self._range(right)
        match sign:
            case "==" if left == right or low == high == least == most:
                return True
            case "==" if high < least or most < low:
                return False
            case ">" if low > most:
                return True
            case ">" if left == right or high <= least:
                return False
            case "<":
                return self.told((right, ">", left))
            case "!=" | "<=" | ">=":
                opposite = self.told((left, _OPPOSITE[sign], right))
                return None if opposite is None else not opposite
        return None

    def _range(self, atom: str) -> tuple[float, float]:
        if atom in self.written:
            return self._ranges.get(atom, (-_INFINITE, _INFINITE))
        return _number(atom), _number(atom)

    def learn(self, question: _Question, truth: bool) -> None:
        """The answer to it, for the rest of the path."""
        left, sign, right = question
        if not truth:
            sign = _OPPOSITE[sign]
        (low, high), (least, most) = self._range(left), self._range(right)
        match sign:
            case ">":
                self._bound(left, least + 1, _INFINITE)
                self._bound(right, -_INFINITE, high - 1)
            case "<=":
                self._bound(left, -_INFINITE, most)
                self._bound(right, low, _INFINITE)
            case "<" | ">=":
                self.learn((right, ">" if sign == "<" else "<=", left), True)
            case "==" if left != right:
                self._bound(right, low, high)
                self._bound(left, least, most)
                one, other = self._standing(left), self._standing(right)
                if one != other:
                    name, atom = (one, other) if one in self.written else (other, one)
                    self._equals[name] = atom
            case "!=":
                self._bound(left, low + (low == least == most), high - (high == least == most))
                self._bound(right, least + (least == low == high), most - (most == low == high))

    def _bound(self, atom: str, low: float, high: float) -> None:
        """It is no less than `low`, and no more than `high`."""
        if atom not in self.written:
            return
        least, most = self._range(atom)
        self._ranges[atom] = low, high = max(least, low), min(most, high)
        if low == high:
            self._equals[atom] = _literal(int(low))


def _literal(number: int) -> str:
    return repr(number) if number >= 0 else f"({number})"


def _number(literal: str) -> int:
    match = _NUMBER.fullmatch(literal)
    assert match is not None, literal
    return int(match[1])


def _write(branches: Sequence[_Branch], number: int, path: _Path) -> None:
    """Writes branches that gave the same answers to the guards before this one. It leaves out
    guards whose answers earlier ones imply, and steps that no guard and no output uses."""
    while any([number < len(branch.guards) for branch in branches]):
        asked = [(*branch.guards[number : number + 1], ("", True))[0] for branch in branches]
        number += 1
        code, truth = asked[0]
        if any([other != code for other, _ in asked]):
            raise _Unlike
        question = path.question(code, branches)
        if path.told(question) is not None:
            continue
        left, sign, right = question
        if all([other is truth for _, other in asked]):
            unlike = _OPPOSITE[sign] if truth else sign
            path.lines.append(f"if {left} {unlike} {right}: return None")
        else:
            each = list(zip(branches, asked, strict=True))
            branches, truth = [branch for branch, (_, answer) in each if not answer], False
            within = _Path(path.scope, path)
            within.learn(question, True)
            _write([branch for branch, (_, answer) in each if answer], number, within)
            path.lines.append(f"if {left} {sign} {right}:")
            path.lines += ["    " + line for line in within.lines]
        path.learn(question, truth)
    if len(branches) > 1:
        raise _Unlike
    (branch,) = branches
    atoms = [
        path.atom(output.code, branches) if isinstance(output, Symbol) else repr(output)
        for output in branch.outputs
    ]
    path.lines.append(f"return {branch.before}({''.join([atom + ', ' for atom in atoms])})")


def _made(branches: Sequence[_Branch], scope: dict[str, Any]) -> Any:
    inputs, path = branches[0].inputs, _Path(scope)
    _write(branches, 0, path)
    lines = [f"{', '.join(inputs)}, = values", *path.lines] if inputs else path.lines
    return evaluated.function("values", lines, path.scope)


def settled(numbers: Sequence[Any]) -> list[Any]:
    """Numbers of one case; those with only one possible value under the answers so far are
    plain."""
    for number in numbers:
        if isinstance(number, Symbol):
            return number.trace.settled(numbers)
    return [*numbers]


def value_of(number: Any) -> Any:
    """The plain number behind a symbol, without a guard: for messages alone."""
    return number.value if isinstance(number, Symbol) else number


def opaque(function: Callable[..., int]) -> Callable[..., int]:
    """A pure function of whole numbers that a trace of symbols keeps as one step."""

    def called(*arguments: int) -> int:
        for argument in arguments:
            if isinstance(argument, Symbol):
                return argument.trace.call(function, arguments)  # pyright: ignore
        return function(*arguments)

    return called


def if_above(a: int, b: int, then: int, otherwise: int) -> int:
    """`then` where a > b, else `otherwise`. Python's `if` would make two cases; this makes none,
    since the function contains both."""
    chosen = then if value_of(a) > value_of(b) else otherwise
    symbols = [number for number in (a, b) if isinstance(number, Symbol)]
    if not symbols:
        return chosen
    (_, left), (_, right), (_, yes), (_, no) = map(_parts, (a, b, then, otherwise))
    question = f"{left} > {right}"
    if symbols[0].trace.is_asked(question):
        return chosen
    code = f"{yes} if {question} else {no}"
    step = gcd(_step(then), _step(otherwise))
    return symbols[0].trace.node(value_of(chosen), code, step)  # pyright: ignore[reportReturnType]


def larger(a: int, b: int) -> int:
    """max, without a case for each answer."""
    return if_above(a, b, a, b)


def smaller(a: int, b: int) -> int:
    """min, of which no case comes."""
    return if_above(a, b, b, a)
