"""Arguments as text, as the command line takes them, and outputs held against a reference."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heedful.emulator.floats import FP8, bf16_bits, bf16_values, fp8_bits

# Our name: (NumPy type of the storage, Triton's name)
_TYPES = {
    "f32": (np.float32, "fp32"),
    "f16": (np.float16, "fp16"),
    "bf16": (np.uint16, "bf16"),
    "f64": (np.float64, "fp64"),
    "i64": (np.int64, "i64"),
    "i32": (np.int32, "i32"),
    "i16": (np.int16, "i16"),
    "i8": (np.int8, "i8"),
    "u8": (np.uint8, "u8"),
    "u32": (np.uint32, "u32"),
    "fp8": (np.uint8, "fp8"),
    "bf8": (np.uint8, "bf8"),
}
_FILLS = ("normal", "zeros", "ones", "nan", "arange")


@dataclass(frozen=True)
class Value:
    """One argument: what `emulate` takes, and the type that its bits have."""

    data: Any
    kind: str
    arch: str = "gfx950"

    @property
    def triton_type(self) -> str:
        """Triton's name of the type."""
        name = _TYPES[self.kind][1] if self.kind != "null" else "i64"
        return "*" + name if isinstance(self.data, np.ndarray) else name

    def decoded(self) -> Any:
        """A copy in which bfloat16 and 8-bit floats are float32."""
        if not isinstance(self.data, np.ndarray):
            return self.data
        if self.kind == "bf16":
            return bf16_values(self.data)
        if self.kind in ("fp8", "bf8"):
            return FP8[self.arch][self.kind][self.data]
        return self.data.copy()


def parse_value(text: str, rng: np.random.Generator, arch: str = "gfx950") -> Value:
    """The value of an --arg, or of a --set behind its name.

    Args:
        text: `type:shape[=fill]`, `type:@FILE.npy`, `type=number` or `null`.
        arch: the chip, whose 8-bit floats differ.

    Raises:
        ValueError: it is none of these.
    """
    if text == "null":
        return Value(None, "null", arch)
    head, _, tail = text.partition("=")
    name, _, shape = head.partition(":")
    if name not in _TYPES:
        known = ", ".join(_TYPES)
        raise ValueError(f"argument {text}: unknown type {name!r}; known are {known}")
    storage = _TYPES[name][0]
    if not shape:
        number = float(tail) if name in ("f32", "f16", "f64") else int(tail, 0)
        return Value(storage(number), name, arch)
    if shape.startswith("@"):
        return Value(_stored(name, np.load(shape[1:]), arch), name, arch)
    fill = tail or "normal"
    if fill not in _FILLS:
        known = ", ".join(_FILLS)
        raise ValueError(f"argument {text}: unknown fill {fill!r}; known are {known}")
    size = tuple(int(n) for n in shape.split("x"))
    values = {
        "normal": lambda: rng.standard_normal(size),
        "zeros": lambda: np.zeros(size),
        "ones": lambda: np.ones(size),
        "nan": lambda: np.full(size, np.nan),
        "arange": lambda: np.arange(np.prod(size)).reshape(size),
    }[fill]()
    return Value(_stored(name, values, arch), name, arch)


def _stored(name: str, values: np.ndarray, arch: str) -> np.ndarray:
    """Numbers in the type `name`; an array that has its storage type already holds its bits."""
    storage = _TYPES[name][0]
    if values.dtype == storage:
        return np.ascontiguousarray(values)
    if name == "bf16":
        return bf16_bits(values.astype(np.float32)).astype(np.uint16)
    if name in ("fp8", "bf8"):
        return fp8_bits(values.astype(np.float32), FP8[arch][name]).astype(np.uint8)
    return (np.nan_to_num(values) if name[0] in "iu" else values).astype(storage)


@dataclass(frozen=True)
class Difference:
    """How far an output is from its reference."""

    name: str
    relative_rms: float
    largest: float
    missing: int

    def within(self, tolerance: float) -> bool:
        """No value is missing, and the relative rms is small enough."""
        return not self.missing and self.relative_rms <= tolerance

    def __str__(self) -> str:
        return (
            f"{self.name}: relative rms error {self.relative_rms:.2e}, largest {self.largest:.2e}"
            + (f", {self.missing} not a number" if self.missing else "")
        )


def difference(name: str, got: Any, wanted: Any) -> Difference:
    """Compare an output with a reference of the same shape.

    Raises:
        ValueError: they have different shapes.
    """
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if got.shape != wanted.shape:
        raise ValueError(f"reference of {name}: has shape {wanted.shape}, expected {got.shape}")
    missing = ~np.isfinite(got) & (got != wanted)
    known = ~missing & np.isfinite(wanted)
    error = np.where(known, got - wanted, 0.0)
    scale = np.sqrt(np.mean(np.where(known, wanted, 0.0) ** 2)) or 1.0
    rms = float(np.sqrt(np.mean(error**2)) / scale)
    return Difference(name, rms, float(np.abs(error).max(initial=0.0)), int(missing.sum()))


def compare(
    reference: Callable[[dict[str, Any]], Mapping[str, Any]],
    before: Mapping[str, Any],
    values: Mapping[str, Value],
) -> list[Difference]:
    """The outputs that a reference gives, each beside what the kernel wrote.

    Args:
        reference: from arguments by name to outputs by name, in float32 or float64.
        before: the arguments as they were, decoded. values: as they are now.
    """
    wanted = reference(dict(before))
    if unknown := set(wanted) - set(values):
        raise ValueError(f"the reference gives {sorted(unknown)}, which no --set names")
    return [difference(name, values[name].decoded(), want) for name, want in wanted.items()]


def load_function(path: str, name: str) -> Any:
    """A function of a Python file.

    Raises:
        ValueError: it is no such file, or has no such name.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{path}: has no {name!r}")
    return getattr(module, name)
