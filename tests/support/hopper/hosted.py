"""Roles of a warp-specialised Gluon kernel as threads of Python: its own loops and index
arithmetic, over barriers that keep to the rules of mbarrier. What computes or copies is a test's to
stand in for.

One role runs at a time. At every wait another may go on, drawn at random; if none can, that is a
deadlock.
"""

import random
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction


class Deadlock(AssertionError):
    """Roles that wait for each other."""


class _Stopped(BaseException):
    pass


class Machine:
    """Takes turns among roles. now: which of them runs."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.now = 0

    def run(self, roles: Sequence[Callable[[], None]], names: Sequence[str]) -> None:
        """Runs them to their end. Raises Deadlock, and what a role raises."""
        self._gates = [threading.Semaphore(0) for _ in roles]
        self._main = threading.Semaphore(0)
        self._waits: list[Callable[[], bool] | None] = [None] * len(roles)
        self._alive = set(range(len(roles)))
        self._error: BaseException | None = None
        self._stopped = False
        threads = [threading.Thread(target=self._thread, args=pair) for pair in enumerate(roles)]
        for thread in threads:
            thread.start()
        while self._alive and self._error is None:
            ready = [i for i in sorted(self._alive) if (w := self._waits[i]) is None or w()]
            if not ready:
                stuck = ", ".join(names[i] for i in sorted(self._alive))
                self._error = Deadlock(f"wait for each other: {stuck}")
                break
            self.now = self._random.choice(ready)
            self._waits[self.now] = None
            self._gates[self.now].release()
            self._main.acquire()
        self._stopped = True
        for i in self._alive:
            self._gates[i].release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _thread(self, index: int, role: Callable[[], None]) -> None:
        self._gates[index].acquire()
        try:
            if not self._stopped:
                role()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        if not self._stopped:
            self._alive.discard(index)
            self._main.release()

    def until(self, condition: Callable[[], bool]) -> None:
        """Called by a role: goes on once this holds."""
        me = self.now
        self._waits[me] = condition
        self._main.release()
        self._gates[me].acquire()
        if self._stopped:
            raise _Stopped


class Barrier:
    """An mbarrier of so many arrivals, whose phase also waits for bytes that are expected. name:
    what a test calls it."""

    name = ""

    def __init__(self, count: int):
        self.count = self.left = count
        self.nbytes = 0
        self.parity = 0

    def arrive(self, count: int = 1, nbytes: int = 0) -> None:
        assert self.left >= count, "more arrivals than a phase has"
        self.left -= count
        self.nbytes += nbytes
        self.complete(0)

    def complete(self, nbytes: int) -> None:
        """Bytes have come."""
        self.nbytes -= nbytes
        if self.left == 0 and self.nbytes == 0:
            self.left = self.count
            self.parity ^= 1

    def has_completed(self, parity: int) -> bool:
        """As mbarrier.try_wait.parity: the phase under way is not of this parity."""
        return self.parity != parity


class Row:
    """Things in shared memory, by index."""

    shape: list[int]

    def __init__(self, *items, **facts):
        self._items = items
        self.__dict__.update(facts)

    def index(self, i):
        # A constexpr gives out as an index what it holds: an Int, which Python wants no longer.
        return self._items[int(i.value if isinstance(i, gl.constexpr) else i)]


def barriers(count: int, arrivals: int) -> Row:
    return Row(*(Barrier(arrivals) for _ in range(count)), shape=[count, 1])


class Place:
    """A box in shared memory, and what lies in it."""

    def __init__(self):
        self.content: Any = None

    def store(self, content) -> None:
        self.content = content

    def load(self, layout):
        return self.content

    def permute(self, order) -> "Turned":
        return Turned(self)


class Turned:
    """A box, seen with other dims innermost."""

    def __init__(self, box: Place):
        self.box = box

    @property
    def content(self) -> Any:
        return self.box.content


class Pointer:
    """An address among numbers of global memory."""

    def __init__(self, memory: list, offset: int = 0):
        self.memory, self.offset = memory, offset

    def __add__(self, count: int) -> "Pointer":
        return Pointer(self.memory, self.offset + int(count))


class Int(int):
    """A number of 32 or 64 bits, divided as C divides."""

    def to(self, dtype) -> "Int":
        return self

    def __floordiv__(self, other):
        quotient = abs(self) // abs(int(other))
        return Int(quotient if (self < 0) == (other < 0) else -quotient)

    def __mod__(self, other):
        return self - self // other * other


def _wrapped(name: str):
    base = getattr(int, name)

    def wrapped(self, other):
        made = base(self, other)
        return made if made is NotImplemented else Int(made)

    return wrapped


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "xor", "rxor", "and", "rand"):
    setattr(Int, f"__{_name}__", _wrapped(f"__{_name}__"))


class Numbers:
    """What of `gl` and `tl` roles use beside what a test stands in for."""

    float32 = int32 = int64 = None
    constexpr = gl.constexpr
    static_range = range

    def __init__(self, machine: Machine, program_of: Callable[[int], int], programs: int):
        self._machine, self._program_of, self._programs = machine, program_of, programs

    def program_id(self, axis):
        return Int(self._program_of(self._machine.now))

    def num_programs(self, axis):
        return Int(self._programs)

    def num_warps(self):
        return 1

    @staticmethod
    def to_tensor(x):
        return Int(x)

    @staticmethod
    def minimum(a, b):
        return Int(min(a, b))

    @staticmethod
    def maximum(a, b):
        return Int(max(a, b))

    @staticmethod
    def cdiv(a, b):
        return Int(a + b - 1) // b

    @staticmethod
    def where(condition, a, b):
        return Int(a if condition else b)

    @staticmethod
    def load(pointer, mask=True, other=0):
        return Int(pointer.memory[pointer.offset] if mask else other)

    def atomic_add(self, pointer, value, sem):
        self._machine.until(lambda: True)
        old = pointer.memory[pointer.offset]
        pointer.memory[pointer.offset] = old + value
        return Int(old)

    @staticmethod
    def full(shape, value, dtype, layout):
        return value

    @staticmethod
    def sum(x, axis):
        return Int(x)

    @staticmethod
    def zeros(shape, dtype, layout):
        return None

    @staticmethod
    def arange(start, stop, layout=None):
        return start

    @staticmethod
    def cast(x, dtype):
        return Int(x)

    @staticmethod
    def BlockedLayout(*args):
        return None


class _Namespace(dict):
    """The globals of a kernel's file, turned as they are asked for."""

    def __init__(self, real: dict, host: "Host"):
        super().__init__(__builtins__=real["__builtins__"], __name__=real["__name__"])
        self._real, self._host = real, host

    def __missing__(self, name):
        if name in self._host.instead:
            made = self._host.instead[name]
        elif name in self._real:
            made = self._host.turned(self._real[name])
        else:
            return self["__builtins__"][name]
        self[name] = made
        return made


class Host:
    """Gluon functions and aggregates as Python's. instead: what stands in for names of their
    files."""

    def __init__(self, instead: dict[str, Any]):
        self.instead = instead
        self._files: dict[int, _Namespace] = {}
        self._turned: dict[int, Any] = {}

    def turned(self, thing):
        if isinstance(thing, gl.constexpr):
            return thing.value
        is_aggregate = getattr(thing, "__triton_aggregate__", False) and isinstance(thing, type)
        if not (isinstance(thing, JITFunction) or is_aggregate):
            return thing
        if id(thing) not in self._turned:
            make = self._class if is_aggregate else self._function
            self._turned[id(thing)] = make(thing)
        return self._turned[id(thing)]

    def _function(self, jitted):
        plain = jitted.fn
        names = plain.__globals__
        file = self._files.setdefault(id(names), _Namespace(names, self))
        made = types.FunctionType(plain.__code__, file, plain.__name__, plain.__defaults__)
        made.__kwdefaults__ = plain.__kwdefaults__
        return made

    def _class(self, cls):
        names = tuple(cls.__annotations__)
        defaults = {n: getattr(v, "value", v) for n, v in cls.__aggregate_defaults__.items()}

        def fill(made, *args, **given):
            made.__dict__.update(defaults | dict(zip(names, args, strict=False)) | given)

        methods = {n: self.turned(f) for n, f in vars(cls).items() if isinstance(f, JITFunction)}
        return type(cls.__name__, (), {"__init__": fill, **methods})
