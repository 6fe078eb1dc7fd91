"""The kinds of fields of groups, and the groups that each stand for one array."""

from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeVar

T = TypeVar("T")


class Kind(Enum):
    """Whether a field is a number, a constant, or memory that is read or written."""

    NUMBER = "number"
    CONSTANT = "constant"
    READ = "read"
    WRITTEN = "written"
    READ_AND_WRITTEN = "read and written"


Num = Annotated[Any, Kind.NUMBER]
Const = Annotated[Any, Kind.CONSTANT]
Ptr = Any
In = Annotated[T, Kind.READ]
Out = Annotated[T, Kind.WRITTEN]
InOut = Annotated[T, Kind.READ_AND_WRITTEN]


class Rows(NamedTuple):
    """A (batch, row, head, dim) tensor whose dims are contiguous. If rows are packed, stride_b is
    0."""

    ptr: Ptr
    stride_b: Num
    stride_n: Num
    stride_h: Num


class SplitRows(NamedTuple):
    """`Rows` with the stride from one split to the next."""

    ptr: Ptr
    stride_s: Num
    stride_b: Num
    stride_n: Num
    stride_h: Num


class RowVector(NamedTuple):
    """A (batch, head, row) array whose rows are contiguous. If rows are packed, stride_b is 0."""

    ptr: Ptr
    stride_b: Num
    stride_h: Num


class SplitRowVector(NamedTuple):
    """A `RowVector` with the stride from one split to the next."""

    ptr: Ptr
    stride_s: Num
    stride_b: Num
    stride_h: Num


class ScoreArray(NamedTuple):
    """A (batch, head, query row, key row) array."""

    ptr: Ptr
    stride_b: Num
    stride_h: Num
    stride_m: Num
    stride_n: Num


class RelativeBias(NamedTuple):
    """A (head, distance) array whose last stride is 1. last: the index of its last entry."""

    ptr: Ptr
    stride_h: Num
    last: Num


class RowArray(NamedTuple):
    """A (batch, head, row) array with any strides."""

    ptr: Ptr
    stride_b: Num
    stride_h: Num
    stride_m: Num
