"""Operators that know what attention code means: bugs that a general list of operators has not.

Positions are one off, axes of one size change places, a factor or a log's base is lost, a head is
taken for a group, a sum becomes the last of its terms, a kernel gets a field's value in another.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

Change = tuple[int, int, str]
# An operator's name, and the changes of one place.
Place = tuple[str, list[Change]]

# Words in the names of what counts or places rows, keys, tiles and the like.
_POSITION = re.compile(
    "rows?|cols?|keys?|query|queries|tokens?|len|lengths?|seqlen|starts?|stop|begin|end|first|last|"
    "left|right|off|offsets?|distance|positions?|places?|index|count|pages?|tiles?|blocks?|visits?|"
    "new|longest|total|stored|room|splits?|dims?|used|pad|leftpad|shift|gaps?|size"
)
# What bounds a position.
_BOUNDS = ("min", "max", "minimum", "maximum", "smaller", "larger", "clip", "clamp", "range")
_BOUNDS += ("fori_loop", "within", "cdiv")
# Last words of names that stand for the same thing of another axis.
_AXES = {"q": "k", "k": "q", "b": "h", "h": "b", "m": "n", "n": "m", "d": "e", "e": "d"}
_AXES |= {"row": "col", "col": "row", "rows": "cols", "cols": "rows"}
_BASES = {"exp": "exp2", "exp2": "exp", "log": "log2", "log2": "log", "LOG2E": "LN2"}
_BASES |= {"LN2": "LOG2E", "log2e": "1.0"}
# Calls that sum into what is there -> those that overwrite it.
_OVERWRITING = {"index_add_": "index_copy_", "scatter_add_": "scatter_", "scatter_add": "scatter"}
_OVERWRITING |= {"atomic_add": "store"}
# What makes an argument of a number, in `launch.bind`.
_NUMBERS = ("Scalar", "number", "stride")
_ACCESS = {"In": "Out", "Out": "In", "InOut": "In"}
_EDGES = {ast.Lt: "- 1", ast.GtE: "- 1", ast.LtE: "+ 1", ast.Gt: "+ 1"}


class Source(Protocol):
    """A source's text. span: bytes of a node; between: of a token that stands between two nodes;
    around: the text of the function around the node that is visited, or of the module."""

    data: bytes

    def span(self, node: Any) -> tuple[int, int]: ...
    def text(self, node: Any) -> str: ...
    def between(self, left: Any, right: Any, token: str) -> tuple[int, int] | None: ...
    def around(self) -> str: ...


def places(node: ast.AST, source: Source) -> Iterator[Place]:
    """Where such a bug can be planted in this node itself, none of its children."""
    for made in _BY_NODE.get(type(node), ()):
        for operator, changes in made(node, source):
            if changes:
                yield operator, changes


def declared(annotation: ast.AST, source: Source) -> Iterator[Place]:
    """Of a field's annotation: what is read is said to be written, and the reverse."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        name = annotation.value
        if name.id in _ACCESS:
            yield "access", [(*source.span(name), _ACCESS[name.id])]


def _compare(node: Any, source: Source) -> Iterator[Place]:
    """A bound that is one off to the side that `<` for `<=` is not."""
    sides = [node.left, *node.comparators]
    for left, right, operation in zip(sides, sides[1:], node.ops, strict=False):
        edge = _EDGES.get(type(operation))
        if edge and (_is_position(left) or _is_position(right)):
            yield "edge", [_off_by(right, edge, source)]


def _call(node: Any, source: Source) -> Iterator[Place]:
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    end = source.span(node.func)[1]
    name = (end - len(called), end)
    # Of arrays, max is of all elements.
    is_reduction = called in ("min", "max") and isinstance(node.func, ast.Attribute)
    if called in _BOUNDS and not is_reduction:
        for piece in node.args:
            if _is_position(piece):
                yield "edge", [_off_by(piece, by, source) for by in ("- 1", "+ 1")]
    if called in _NUMBERS and node.args:
        yield "field", [_off_by(node.args[0], "+ 1", source)]
    if called in _OVERWRITING and not any(word.arg in ("sem", "scope") for word in node.keywords):
        yield "set for add", [(*name, _OVERWRITING[called])]
    if called == "add" and ".at[" in source.text(node.func).replace("\n", ""):
        yield "set for add", [(*name, "set")]
    if called in ("transpose", "permute", "trans") and len(node.args) > 2:
        yield "axes", [_swapped(a, b, source) for a, b in zip(node.args, node.args[1:])]  # noqa: B905
    elif called == "trans" and len(node.args) == 1:
        yield "axes", [(*source.span(node), source.text(node.args[0]))]
    if called[:1].isupper():
        named = [word.value for word in node.keywords if word.arg]
        for a, b in zip(named, named[1:], strict=False):
            yield "field", [_swapped(a, b, source)]


def _dict(node: Any, source: Source) -> Iterator[Place]:
    """The values of two names that follow each other."""
    if all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
        for a, b in zip(node.values, node.values[1:], strict=False):
            yield "field", [_swapped(a, b, source)]


def _subscript(node: Any, source: Source) -> Iterator[Place]:
    """x[:, None] for x[None, :]."""
    if not isinstance(node.slice, ast.Tuple):
        return
    pairs = zip(node.slice.elts, node.slice.elts[1:], strict=False)
    swaps = [_swapped(a, b, source) for a, b in pairs if _is_new(a) != _is_new(b)]
    if any(_is_new(piece) for piece in node.slice.elts):
        yield "axes", swaps


def _constant(node: Any, source: Source) -> Iterator[Place]:
    """The last two axes of a sum over products, swapped in the result."""
    if isinstance(node.value, str) and re.fullmatch(r"[a-z,]+->[a-z]{2,}", node.value):
        at = source.span(node)[1] - 1
        yield "axes", [(at - 2, at, node.value[:-3:-1])]


def _attribute(node: Any, source: Source) -> Iterator[Place]:
    end = source.span(node)[1]
    if isinstance(node.ctx, ast.Load):
        if node.attr == "T":
            yield "axes", [(*source.span(node), source.text(node.value))]
        yield from _other_name(node.attr, (end - len(node.attr), end), source, source.data.decode())


def _name(node: Any, source: Source) -> Iterator[Place]:
    if isinstance(node.ctx, ast.Load):
        yield from _other_name(node.id, source.span(node), source, source.around())


def _other_name(name: str, where: tuple[int, int], source: Source, known: str) -> Iterator[Place]:
    """The same of another axis, and another base; of names that are known there."""
    parts = name.split("_")
    other = _AXES.get(parts[-1].lower(), "") if len(parts) > 1 else ""
    if other:
        parts[-1] = other.upper() if parts[-1].isupper() else other
        partner = "_".join(parts)
        if re.search(rf"\b{partner}\b", known):
            yield "other axis", [(*where, partner)]
    for one, two in (("HEAD_DIM", "HEAD_DIM_V"), ("head_dim", "head_dim_v")):
        if name in (one, two) and re.search(rf"\b{one}\b", known):
            yield "other axis", [(*where, two if name == one else one)]
    # `log` by itself is a logger.
    if name in _BASES and (source.data[where[0] - 1 : where[0]] == b"." or not name.isalpha()):
        base = _BASES[name]
        is_function = name.islower() and base.islower()
        is_known = is_function or re.search(rf"\b{re.escape(base)}\b", source.data.decode())
        yield "base", [(*where, base if is_known else "1.0")]


def _binary(node: Any, source: Source) -> Iterator[Place]:
    whole = source.span(node)
    left, right = ((*whole, _whole(side, source)) for side in (node.left, node.right))
    if isinstance(node.op, ast.Mult):
        yield "factor", [left, right]
    elif isinstance(node.op, ast.Div):
        yield "factor", [left]
    elif isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        old, new = ("//", "%") if isinstance(node.op, ast.FloorDiv) else ("%", "//")
        place = source.between(node.left, node.right, old)
        # Of % the general operators have //.
        changes = [] if place is None or old == "%" else [(*place, new)]
        yield "index", [*changes, left]


def _in_place(node: Any, source: Source) -> Iterator[Place]:
    if isinstance(node.op, ast.Add):
        place = source.between(node.target, node.value, "+=")
        yield "set for add", [] if place is None else [(*place, "=")]


_Maker = Callable[[Any, Source], Iterator[Place]]
_BY_NODE: dict[type, tuple[_Maker, ...]] = {
    ast.Compare: (_compare,),
    ast.Call: (_call,),
    ast.Dict: (_dict,),
    ast.Subscript: (_subscript,),
    ast.Constant: (_constant,),
    ast.Attribute: (_attribute,),
    ast.Name: (_name,),
    ast.BinOp: (_binary,),
    ast.AugAssign: (_in_place,),
}


def _is_position(node: ast.AST) -> bool:
    """Whether a name in it says so."""
    names = (getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node))
    words = {re.sub(r"\d+$", "", word) for name in names for word in name.lower().split("_")}
    return any(map(_POSITION.fullmatch, words))


def _is_new(node: ast.AST) -> bool:
    """None as an index."""
    return isinstance(node, ast.Constant) and node.value is None


def _whole(node: ast.AST, source: Source) -> str:
    """Its text as an operand of anything."""
    text = source.text(node)
    atoms = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
    return text if isinstance(node, atoms) else f"({text})"


def _off_by(node: ast.AST, by: str, source: Source) -> Change:
    return (*source.span(node), f"{_whole(node, source)} {by}")


def _swapped(a: ast.AST, b: ast.AST, source: Source) -> Change:
    """Two nodes that follow each other, and what stands between them."""
    (begin, end), (begin_b, end_b) = source.span(a), source.span(b)
    gap = source.data[end:begin_b].decode()
    return begin, end_b, source.text(b) + gap + source.text(a)
