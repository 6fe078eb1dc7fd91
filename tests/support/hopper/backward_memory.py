"""What the threads of `backward_roles` compute with: boxes of shared memory, accumulators, and the
tensor functions that make them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from support.hopper.hosted import Barrier, Int, Numbers, Place, Row


@dataclass(frozen=True)
class Scores:
    """Probabilities of a visit, or their gradients (kind p, ds): consumer's of this key tile
    (batch, KV head, block) and query tile (head, block). q, k, rows: where the tile of queries, the
    keys, and numbers beside queries come from."""

    kind: str
    key_tile: tuple[int, int, int]
    query_tile: tuple[int, int]
    consumer: int
    q: tuple
    k: tuple
    rows: tuple


class Box(Place):
    """A place that products read in part, too."""

    def __init__(self, shape, dtype):
        super().__init__()
        self.shape, self.dtype = shape, dtype

    def slice(self, start, length, dim):
        return Cut(self, int(start))


@dataclass(frozen=True)
class Cut:
    """Columns, or rows, of a box from `start` on."""

    box: Box
    start: int

    @property
    def dtype(self):
        return self.box.dtype

    def permute(self, order):
        return self

    @property
    def content(self):
        return self.box.content, self.start


@dataclass(frozen=True)
class Span:
    """Boxes under another shape."""

    boxes: tuple[Place, ...]
    shape: Any

    def store(self, content):
        for box in self.boxes:
            box.store(content)

    @property
    def content(self):
        return tuple(box.content for box in self.boxes)


@dataclass
class Reading:
    """Shared memory that is read until who reads it is waited for."""

    boxes: tuple
    is_over: bool = False

    def __post_init__(self):
        self.contents = tuple(box.content for box in self.boxes)

    def end(self):
        now = tuple(box.content for box in self.boxes)
        assert now == self.contents, "memory changed while it was read"
        self.is_over = True


@dataclass(frozen=True)
class Sums:
    """An accumulator, as the operands of all products that were added up in it."""

    shape: Any
    products: tuple = ()
    readings: tuple = ()
    type = SimpleNamespace(layout=None)

    def __mul__(self, scale):
        return self

    def to(self, dtype):
        return self

    def reshape(self, shape):
        return self

    def __add__(self, number):
        """Of zeros, which become the number."""
        assert not self.products
        return number

    @property
    def made(self) -> tuple:
        """Its products, which must have been waited for."""
        assert all(r.is_over for r in self.readings), "a product is used before it is made"
        return self.products


class Tensors(Numbers):
    """Numbers, shared memory, and accumulators."""

    dtype = SimpleNamespace(primitive_bitwidth=16)
    int32 = "int32"
    float16 = None
    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda shape, dtype: None)
    SwizzledSharedLayout = SliceLayout = DotOperandLayout = staticmethod(lambda *a, **named: None)

    def __init__(self, device: Any):
        super().__init__(device.machine, device.program_of, device.programs)

    @staticmethod
    def allocate_shared_memory(dtype, shape, layout):
        if layout is Barrier:
            return Row(*(Barrier(0) for _ in range(shape[0])), shape=shape)
        made = [Box(shape[1:], dtype) for _ in range(shape[0])]
        for box in made if dtype == "int32" else ():
            box.store(Int(0))
        return Row(*made, shape=shape, dtype=dtype)

    @staticmethod
    def zeros(shape, dtype, layout):
        return Sums(shape)

    @staticmethod
    def exp2(x):
        return x

    @staticmethod
    def barrier():
        pass


def is_memory(operand) -> bool:
    return hasattr(operand, "content")
