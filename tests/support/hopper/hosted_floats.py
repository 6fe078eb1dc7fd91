"""Numbers that stand for tensors of one element in a hosted kernel (hosted.py)."""

from types import SimpleNamespace

from support.hopper.hosted import Int, Numbers


class Float(float):
    """A number in place of a tensor."""

    type = SimpleNamespace(layout=None)
    shape = (1, 1)
    segment: tuple = ()

    def to(self, dtype):
        return self


def _of(name: str):
    base = getattr(float, name)
    return lambda self, other: Float(base(self, float(other)))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul"):
    setattr(Float, f"__{_name}__", _of(f"__{_name}__"))


class Floats(Numbers):
    """Numbers, and tensors of one."""

    SliceLayout = DotOperandLayout = staticmethod(lambda *args: None)

    @staticmethod
    def barrier():
        """A role is one thread here."""

    @staticmethod
    def zeros(shape, dtype, layout):
        return Float(0.0)

    @staticmethod
    def full(shape, value, dtype, layout):
        return Float(value)

    @staticmethod
    def sum(x, axis):
        return Float(x)

    @staticmethod
    def convert_layout(x, layout):
        return x

    @staticmethod
    def exp2(x):
        return Float(2.0**x)

    @staticmethod
    def cast(x, dtype):
        return Int(x)

    @staticmethod
    def where(condition, a, b):
        made = a if condition else b
        return made if isinstance(made, Float) else (Int if isinstance(made, int) else Float)(made)
