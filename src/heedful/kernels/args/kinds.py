"""What fields of groups hold, and the groups that stand for one array each."""

from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeVar

T = TypeVar("T")


class Kind(Enum):
    """What a field holds."""

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
    """A (batch, row, head, dim) tensor whose dims lie side by side; of packed rows stride_b is
    0."""

    ptr: Ptr
    stride_b: Num
    stride_n: Num
    stride_h: Num


class SplitRows(NamedTuple):
    """Rows, and the stride from one split's to the next."""

    ptr: Ptr
    stride_s: Num
    stride_b: Num
    stride_n: Num
    stride_h: Num


class RowVector(NamedTuple):
    """A (batch, head, row) array whose rows lie side by side; of packed rows stride_b is 0."""

    ptr: Ptr
    stride_b: Num
    stride_h: Num


class SplitRowVector(NamedTuple):
    """A row vector, and the stride from one split's to the next."""

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


class RowArray(NamedTuple):
    """A (batch, head, row) array with any strides."""

    ptr: Ptr
    stride_b: Num
    stride_h: Num
    stride_m: Num
