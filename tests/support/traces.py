"""Traces of functions of whole numbers, for the tests of core/base/symbols.py."""

import operator

from heedful.core.base.symbols import Trace

# Every operator of whole numbers, both ways round, with what it is written as.
BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}
COMPARED = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def traced(values: tuple[int, ...], compute) -> tuple:
    """A trace of a function of symbols, its outputs, and a name."""
    trace = Trace()
    return trace, compute(*trace.symbols(values)), str(values)


def lines(trace: Trace) -> list[tuple[str | None, str]]:
    """The numbers that a trace has named, then its guards."""
    guards = [(None, code if truth else f"not {code}") for code, truth in trace._asked.items()]
    return [*((number.code, code) for code, number in trace._named.items()), *guards]
