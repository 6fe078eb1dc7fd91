"""Mutants of a Python source: what can be changed, by a fixed list of operators, and samples."""

import ast
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import islice
from typing import Any

from mutation import semantic

_COMPARISONS = {
    ast.Lt: (("<", "<="), ("<", ">=")),
    ast.LtE: (("<=", "<"), ("<=", ">")),
    ast.Gt: ((">", ">="), (">", "<=")),
    ast.GtE: ((">=", ">"), (">=", "<")),
    ast.Eq: (("==", "!="),),
    ast.NotEq: (("!=", "=="),),
    ast.In: (("in", "not in"),),
    ast.NotIn: (("not in", "in"),),
    ast.Is: (("is", "is not"),),
    ast.IsNot: (("is not", "is"),),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
}
# Calls whose two arguments may change places.
_COMMUTING = ("is_same", "min", "max", "minimum", "maximum", "smaller", "larger", "transpose")
_COMMUTING += ("promote_types", "__eq__", "__ne__")
# What takes a seed: with another one values of the same kind are drawn.
_SEEDED = ("default_rng", "manual_seed", "Random", "PRNGKey", "RandomState")
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# What tells a compiler or a processor something, and changes no result.
_HINTS = ("static_assert", "device_assert", "static_print", "assume", "debug_barrier")
_HINTS += ("multiple_of", "max_contiguous", "gdc_wait", "gdc_launch_dependents")
# Assembly, which the interpreter knows none of.
_ASSEMBLY = ("inline_asm_elementwise", "assembly")
_HINT_ARGUMENTS = ("eviction_policy", "cache_modifier", "num_stages", "input_precision", "volatile")
_HINT_ARGUMENTS += ("sem", "scope", "loop_unroll_factor", "warp_specialize", "num_warps")
_HINT_ARGUMENTS += ("disable_licm", "disallow_acc_multi_buffer", "flatten")


@dataclass(frozen=True)
class Mutant:
    """One change of one source.

    module: path from the repository's root. function: the dotted name of the function or class it
    is in, "" at module level. start, end: bytes of the source that `text` replaces. site: the
    number of the place in the source; several mutants may share one. statement: the first line of
    the statement around it. at_import: whether it runs as the module is imported, as what a class
    holds and defaults of arguments do.
    """

    module: str
    function: str
    line: int
    operator: str
    start: int
    end: int
    text: str
    site: int
    statement: int
    at_import: bool

    def apply(self, source: str) -> str:
        """The source with the change in it."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def lines(self, source: str) -> set[int]:
        """Lines of which one runs where the change does."""
        data = source.encode()
        first = data.count(b"\n", 0, self.start) + 1
        last = data.count(b"\n", 0, self.end) + 1
        return {self.statement, *range(first, last + 1)}

    def diff(self, source: str) -> str:
        """The change as a unified diff."""
        before, after = (s.splitlines(keepends=True) for s in (source, self.apply(source)))
        return "".join(unified_diff(before, after, self.module, self.module, n=2))

    def change(self, source: str) -> tuple[str, str]:
        """The lines that go and those that come instead, stripped: a name for the mutant that
        lasts while its lines do."""
        lines = self.diff(source).splitlines()[2:]
        gone, came = (
            "\n".join(line[1:].strip() for line in lines if line[:1] == sign) for sign in "-+"
        )
        return gone, came


class _Finder(ast.NodeVisitor):
    """Collects the mutants of one source."""

    def __init__(self, module: str, source: str):
        self.module, self.data = module, source.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.scope: list[str] = []
        self.functions: list[str] = []
        # Of device code, what only its compilers read is left alone.
        self.is_device = "/kernels/" in module and "/args/" not in module
        self.declares = "/kernels/args/" in module
        self.found: list[Mutant] = []
        self.sites = self.statement = self.bodies = 0

    # Positions.

    def span(self, node) -> tuple[int, int]:
        """Where a node's text lies."""
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node) -> str:
        begin, end = self.span(node)
        return self.data[begin:end].decode()

    def around(self) -> str:
        """The text of the function that is visited, or of the module."""
        return self.functions[-1] if self.functions else self.data.decode()

    def site(self, node, operator: str, *changes: tuple[int, int, str]) -> None:
        """Adds the mutants of one place: (start, end, text) each."""
        self.sites += 1
        for start, end, text in changes:
            if self.data[start:end].decode() != text:
                where, change = ".".join(self.scope), (operator, start, end, text, self.sites)
                when = (self.statement, self.bodies == 0)
                self.found.append(Mutant(self.module, where, node.lineno, *change, *when))

    def visit(self, node) -> None:
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        for operator, changes in semantic.places(node, self):
            self.site(node, operator, *changes)
        super().visit(node)

    def between(self, left, right, token: str) -> tuple[int, int] | None:
        """Where an operator's token stands between two nodes."""
        begin, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.data[begin:end])
        at = re.search(re.escape(token).encode().replace(rb"\ ", rb"\s+"), gap)
        return None if at is None else (begin + at.start(), begin + at.end())

    # What is left alone: annotations, decorators, docstrings, messages.

    def visit_FunctionDef(self, node: Any) -> None:
        if self.is_device and any(map(_is_assembly, ast.walk(node))):
            return
        self.scope.append(node.name)
        self.visit(node.args)
        self.bodies += 1
        self.functions.append(self.text(node))
        self.body(node)
        self.functions.pop()
        self.bodies -= 1
        self.scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: Any) -> None:
        self.scope.append(node.name)
        self.body(node)
        self.scope.pop()

    def visit_Module(self, node: Any) -> None:
        self.body(node)

    def body(self, node: Any) -> None:
        for statement in node.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            self.visit(statement)

    def visit_arguments(self, node: Any) -> None:
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self.visit(default)

    def visit_AnnAssign(self, node: Any) -> None:
        if self.declares:
            for operator, changes in semantic.declared(node.annotation, self):
                self.site(node, operator, *changes)
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: Any) -> None:
        """Positions within are wrong before Python 3.12."""

    def visit_Raise(self, node: Any) -> None:
        start, end = self.span(node)
        self.site(node, "no raise", (start, end, "pass"))

    # Statements.

    def visit_Expr(self, node: Any) -> None:
        if isinstance(node.value, ast.Call):
            if self.is_log(node.value) or self.is_hint(node.value):
                return
            self.site(node, "no call", (*self.span(node), "pass"))
        self.generic_visit(node)

    def is_log(self, node: ast.Call) -> bool:
        return self.text(node.func).split(".")[0] in ("log", "logging", "warnings")

    def is_hint(self, node: ast.Call) -> bool:
        return self.is_device and self.text(node.func).split(".")[-1] in _HINTS

    def visit_Assign(self, node: Any) -> None:
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.site(node, "no assignment", (*self.span(node), "pass"))
        if any(isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets):
            return
        self.generic_visit(node)

    def visit_AugAssign(self, node: Any) -> None:
        self.site(node, "no assignment", (*self.span(node), "pass"))
        self.visit(node.value)

    def visit_Return(self, node: Any) -> None:
        value = node.value
        if value is not None:
            if not (isinstance(value, ast.Constant) and value.value is None):
                self.site(node, "return nothing", (*self.span(value), "None"))
            self.visit(value)

    def visit_Break(self, node: Any) -> None:
        self.site(node, "loop", (*self.span(node), "continue"))

    def visit_Continue(self, node: Any) -> None:
        self.site(node, "loop", (*self.span(node), "break"))

    # Conditions.

    def condition(self, test: Any) -> None:
        """Its opposite, where no other operator makes that."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return
        ordering = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
        if isinstance(test, ast.Compare) and not isinstance(test.ops[0], ordering):
            return
        self.site(test, "condition", (*self.span(test), f"(not ({self.text(test)}))"))

    def visit_If(self, node: Any) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_While(self, node: Any) -> None:
        self.generic_visit(node)

    def visit_comprehension(self, node: Any) -> None:
        for test in node.ifs:
            self.condition(test)
        self.generic_visit(node)

    def visit_Compare(self, node: Any) -> None:
        sides = [node.left, *node.comparators]
        for left, right, operation in zip(sides, sides[1:], node.ops, strict=False):
            pairs = _COMPARISONS[type(operation)]
            place = self.between(left, right, pairs[0][0])
            if place is not None:
                self.site(node, "comparison", *((*place, new) for _, new in pairs))
        self.generic_visit(node)

    def visit_BoolOp(self, node: Any) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            place = self.between(left, right, old)
            if place is not None:
                self.site(right, "and, or", (*place, new))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: Any) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self.site(node, "sign", (*self.span(node), self.text(node.operand)))
        self.visit(node.operand)

    # Values.

    def visit_BinOp(self, node: Any) -> None:
        old, new = _ARITHMETIC.get(type(node.op), ("", ""))
        place = self.between(node.left, node.right, old) if old else None
        if place is not None:
            self.site(node, "arithmetic", (*place, new))
        self.generic_visit(node)

    def visit_Name(self, node: Any) -> None:
        if node.id in _NAMES and isinstance(node.ctx, ast.Load):
            self.site(node, "name", (*self.span(node), _NAMES[node.id]))

    def visit_Constant(self, node: Any) -> None:
        value, where = node.value, self.span(node)
        if isinstance(value, bool):
            self.site(node, "constant", (*where, str(not value)))
        elif isinstance(value, int):
            less = ((*where, str(value - 1)),) if value > 0 else ()
            self.site(node, "constant", (*where, str(value + 1)), *less)
        elif isinstance(value, float):
            self.site(node, "constant", (*where, repr(value * 2 if value else 1.0)))
        elif isinstance(value, str) and " " not in value:
            self.site(node, "constant", (*where, repr(value + "_")))

    def visit_Slice(self, node: Any) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                self.site(node, "slice", (*self.span(bound), ""))
                self.visit(bound)

    def visit_Call(self, node: Any) -> None:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called == "TypeVar":  # Like an annotation.
            return
        if called in _ASSEMBLY and self.is_device:
            return
        if called in _SEEDED and all(isinstance(given, ast.Constant) for given in node.args):
            self.visit(node.func)
            return
        # An assertion of what holds everywhere: without it nothing is different.
        hints = _HINT_ARGUMENTS if self.is_device else ()
        keywords = [
            word
            for word in node.keywords
            if (called, word.arg) != ("zip", "strict") and word.arg not in hints
        ]
        left_alone = [word for word in node.keywords if word not in keywords]
        pieces = sorted([*node.args, *keywords], key=self.span)
        texts = [self.text(piece) for piece in pieces]
        changes = []
        commutes = called in _COMMUTING
        if pieces and not isinstance(node.args[0] if node.args else None, ast.GeneratorExp):
            whole = self.span(pieces[0])[0], self.span(pieces[-1])[1]
            for index, piece in enumerate(pieces):
                rest = texts[:index] + texts[index + 1 :]
                if isinstance(piece, ast.keyword):
                    if not (self.is_device and _is_zero_for_masked(piece)):
                        changes.append((*whole, ", ".join(rest)))
                elif index and not isinstance(piece, ast.Starred) and not commutes:
                    swapped = [*texts]
                    swapped[index - 1 : index + 1] = texts[index], texts[index - 1]
                    changes.append((*whole, ", ".join(swapped)))
        if changes and not self.is_log(node):
            self.site(node, "argument", *changes)
        for child in ast.iter_child_nodes(node):
            if child not in left_alone:
                self.visit(child)


def _is_zero_for_masked(word: ast.keyword) -> bool:
    """What a load gives where its mask hides: the interpreter gives 0 in any case."""
    value = word.value
    return word.arg == "other" and isinstance(value, ast.Constant) and value.value == 0


def _is_assembly(node: ast.AST) -> bool:
    """Whether it is text of an instruction with operands."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "$0" in node.value


def mutants(module: str, source: str) -> list[Mutant]:
    """Every mutant of a source; some are no Python any more (see `parses`)."""
    finder = _Finder(module, source)
    finder.visit(ast.parse(source))
    return finder.found


def parses(source: str) -> bool:
    """Whether a source is Python."""
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def sample(sources: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of these sources, by module: of each in proportion to its places, one at
    least where there is room; of each place one."""
    rng = random.Random(seed)
    found = {module: _places(mutants(module, source)) for module, source in sources.items()}
    found = {module: places for module, places in found.items() if places}
    shares = _shares([len(places) for places in found.values()], count)
    chosen = []
    for (module, places), share in zip(found.items(), shares, strict=True):
        drawn = (rng.choice(place) for place in rng.sample(places, len(places)))
        sound = (mutant for mutant in drawn if parses(mutant.apply(sources[module])))
        chosen += islice(sound, share)
    rng.shuffle(chosen)
    return chosen


def _places(found: Sequence[Mutant]) -> list[list[Mutant]]:
    by_site: dict[int, list[Mutant]] = {}
    for mutant in found:
        by_site.setdefault(mutant.site, []).append(mutant)
    return list(by_site.values())


def _shares(sizes: list[int], count: int) -> list[int]:
    """`count` dealt out in proportion to the sizes, by largest remainders; one each first, where
    that is possible."""
    if not sizes:
        return []
    base = 1 if count >= len(sizes) else 0
    left, total = count - base * len(sizes), sum(sizes)
    exact = [left * size / total for size in sizes]
    shares = [base + int(part) for part in exact]
    order = sorted(range(len(sizes)), key=lambda i: int(exact[i]) - exact[i])
    for index in order[: count - sum(shares)]:
        shares[index] += 1
    return shares
