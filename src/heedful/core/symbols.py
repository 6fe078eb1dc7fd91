"""Whole numbers that remember how they were worked out.

A call of a kind is planned and bound once with its lengths as symbols. What came out is then a
function of the lengths: straight-line code that computes every number anew. What was asked about
the lengths on the way (is there one tile of rows, do the tiles fill the device, is a stride a
multiple of 8) are the function's guards: lengths that answer otherwise are another case, which is
planned and bound in turn.

Whatever wants a plain number of a symbol, to hash it or to index with it, pins it: its value
becomes a guard. So a case can be too narrow, which costs plans for more lengths, and never wrong.
"""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import Any


class Symbol:
    """A whole number with the expression that it comes from, in terms of a trace's inputs. step: it
    is a multiple of this whatever the inputs."""

    __slots__ = ("code", "step", "trace", "value")

    def __init__(self, trace: "Trace", value: int, code: str, step: int = 1):
        self.trace, self.value, self.code, self.step = trace, value, code, step

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def _pin(self) -> int:
        self.trace.guard(f"{self.code} == {self.value!r}", True)
        return self.value

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


# What a number is not changed by, on its right and on its left.
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
    """What it is a multiple of, 0 for 0."""
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


for _name, _sign in (
    ("add", "+"),
    ("sub", "-"),
    ("mul", "*"),
    ("floordiv", "//"),
    ("mod", "%"),
    ("lshift", "<<"),
    ("rshift", ">>"),
    ("and", "&"),
    ("or", "|"),
    ("xor", "^"),
):
    _forward, _backward = _binary(f"__{_name}__", _sign)
    setattr(Symbol, f"__{_name}__", _forward)
    setattr(Symbol, f"__r{_name}__", _backward)
for _name, _sign in (
    ("eq", "=="),
    ("ne", "!="),
    ("lt", "<"),
    ("le", "<="),
    ("gt", ">"),
    ("ge", ">="),
):
    setattr(Symbol, f"__{_name}__", _comparison(_name, _sign))


class Trace:
    """What happened to the symbols of one case."""

    def __init__(self):
        self._inputs: list[str] = []
        self._named: dict[str, Symbol] = {}
        # Lines in order: (name, code) gives a number its name, (None, code) is a guard.
        self._lines: list[Line] = []
        self._asked: dict[str, bool] = {}
        self._functions: dict[str, Callable] = {}

    def symbols(self, values: Iterable[int]) -> list[Any]:
        """One more input for each value."""
        found = []
        for value in values:
            name = f"i{len(self._inputs)}"
            self._inputs.append(name)
            found.append(Symbol(self, value, name))
        return found

    def node(self, value: int, code: str, step: int = 1) -> Symbol:
        """The number that `code` gives; the same code is the same number. step: see Symbol."""
        found = self._named.get(code)
        if found is None:
            name = f"t{len(self._named)}"
            found = self._named[code] = Symbol(self, value, name, step)
            self._lines.append((name, code))
        return found

    def guard(self, code: str, truth: bool) -> bool:
        """What was asked, and the answer that this case is for."""
        before = self._asked.get(code)
        if before is None:
            self._asked[code] = truth
            self._lines.append((None, code if truth else f"not {code}"))
        elif before is not truth:
            raise AssertionError(f"{code} was {before} before")
        return truth

    def call(self, function: Callable[..., int], arguments: Sequence[Any]) -> Symbol:
        """The number that a pure function of whole numbers gives, which is not looked into."""
        name = f"f_{function.__name__}"
        self._use(name, function)
        values, codes = zip(*map(_parts, arguments), strict=True)
        return self.node(function(*values), f"{name}({', '.join(codes)})")

    def _use(self, name: str, function: Callable) -> None:
        if self._functions.setdefault(name, function) is not function:
            raise AssertionError(f"{name} is two functions")

    def inline(self, other: "Trace", inputs: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
        """Outputs of another trace whose inputs are these numbers: its lines become this one's, so
        that one function has both. The other's case must be the one of the numbers' values."""
        numbers = dict(zip(other._inputs, inputs, strict=True))
        scope = dict(other._functions)
        for name, function in other._functions.items():
            self._use(name, function)
        for name, code in other._lines:
            own = _NAME.sub(lambda found: _parts(numbers[found[0]])[1], code)
            if name is not None:
                values = {known: value_of(number) for known, number in numbers.items()}
                numbers[name] = self.node(eval(code, scope, values), own)
            elif _NAME.search(own):
                self.guard(own.removeprefix("not "), not own.startswith("not "))
        return [numbers[out.code] if isinstance(out, Symbol) else out for out in outputs]

    def function(self, outputs: Iterable[Any]) -> Callable[[Sequence[int]], tuple | None]:
        """The outputs of all symbols' values, in order; None where a guard fails."""
        code, _ = _code_of([(self._lines, _tuple_of(outputs))], 0, "    ")
        return _made(self._inputs, code, self._functions)


# Inputs and named numbers, as a trace calls them.
_NAME = re.compile(r"\b[it]\d+\b")
# What it names, None for a guard; code.
Line = tuple[str | None, str]
Answer = Callable[[Sequence[int]], tuple[Any, tuple] | None]


def joined(cases: Sequence[tuple[Trace, Iterable[Any], Any]]) -> Answer | None:
    """One function for traces of the same inputs, each with its outputs and what it stands for:
    (what the one whose guards hold stands for, its outputs), or None where there is none.

    What traces share is computed once, and where they part there is a branch. Gives None where they
    part elsewhere than at a guard, which each of them answers otherwise.
    """
    scope: dict[str, Any] = {}
    branches: list[_Branch] = []
    for number, (trace, outputs, what) in enumerate(cases):
        if any(scope.get(name, own) is not own for name, own in trace._functions.items()):
            return None
        scope |= trace._functions | {f"case{number}": what}
        branches.append((trace._lines, f"case{number}, {_tuple_of(outputs)}"))
    try:
        code, _ = _code_of(branches, 0, "    ")
    except _Unlike:
        return None
    return _made(cases[0][0]._inputs, code, scope)


class _Unlike(Exception):
    """Traces part elsewhere than at a guard."""


# The lines of a trace, and what is returned behind them.
_Branch = tuple[list[Line], str]


def _code_of(branches: Sequence[_Branch], begin: int, indent: str) -> tuple[list[str], set[str]]:
    """Code from a line on up to which all branches have the same, and the names that it draws on.
    Lines that no guard and no output draws on are left out."""
    (lines, returned), end = branches[0], begin
    shared = min([len(own) for own, _ in branches])
    while end < shared and all([own[end] == lines[end] for own, _ in branches]):
        end += 1
    if len(branches) == 1:
        code, wanted = [f"{indent}return {returned}"], _names(returned)
    else:
        question, yes, no = _parted(branches, end)
        code, wanted = _code_of(yes, end + 1, indent + "    ")
        others, more = _code_of(no, end + 1, indent)
        code = [f"{indent}if {question}:", *code, *others]
        wanted |= more | _names(question)
    for name, text in reversed(lines[begin:end]):
        if name is None or name in wanted:
            line = f"{name} = {text}" if name else f"if not ({text}): return None"
            code.insert(0, indent + line)
            wanted |= _names(text)
    return code, wanted


def _parted(branches: Sequence[_Branch], at: int) -> tuple[str, list[_Branch], list[_Branch]]:
    """The question that branches answer unlike at this line, those that say yes and those that say
    no. Raises _Unlike where there is none."""
    told: dict[str, list[_Branch]] = {}
    for branch in branches:
        name, code = branch[0][at] if len(branch[0]) > at else ("", "")
        if name is not None:
            raise _Unlike
        told.setdefault(code, []).append(branch)
    question, *others = sorted(told, key=len)
    if others != [f"not {question}"]:
        raise _Unlike
    return question, told[question], told[others[0]]


def _tuple_of(outputs: Iterable[Any]) -> str:
    return f"({''.join([_code(output) + ', ' for output in outputs])})"


def _made(inputs: list[str], code: list[str], scope: dict[str, Any]) -> Any:
    taken = [f"    {', '.join(inputs)}, = values"] if inputs else []
    scope = dict(scope)
    exec("def evaluate(values):\n" + "\n".join(taken + code), scope)
    return scope["evaluate"]


def _code(output: Any) -> str:
    return output.code if isinstance(output, Symbol) else repr(output)


def _names(code: str) -> set[str]:
    return set(re.findall(r"\w+", code))


def value_of(number: Any) -> Any:
    """The plain number behind a symbol, unguarded: for words alone."""
    return number.value if isinstance(number, Symbol) else number


def opaque(function: Callable[..., int]) -> Callable[..., int]:
    """A pure function of whole numbers that symbols go through as one step."""

    def called(*arguments: int) -> int:
        for argument in arguments:
            if isinstance(argument, Symbol):
                return argument.trace.call(function, arguments)  # pyright: ignore
        return function(*arguments)

    return called


def if_above(a: int, b: int, then: int, otherwise: int) -> int:
    """`then` where a > b, else `otherwise`. No case comes of it, as one would of Python's own `if`:
    both stay in the function."""
    chosen = then if value_of(a) > value_of(b) else otherwise
    symbols = [number for number in (a, b) if isinstance(number, Symbol)]
    if not symbols:
        return chosen
    (_, left), (_, right), (_, yes), (_, no) = map(_parts, (a, b, then, otherwise))
    code = f"{yes} if {left} > {right} else {no}"
    step = gcd(_step(then), _step(otherwise))
    return symbols[0].trace.node(value_of(chosen), code, step)  # pyright: ignore[reportReturnType]


def larger(a: int, b: int) -> int:
    """max, of which no case comes."""
    return if_above(a, b, a, b)


def smaller(a: int, b: int) -> int:
    """min, of which no case comes."""
    return if_above(a, b, b, a)
