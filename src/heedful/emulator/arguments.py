"""The argument segment of a launch: values by position or name, pointers, the runtime's own."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from heedful.emulator.machine.memory import GlobalMemory
from heedful.emulator.program.asm import Argument, Program

# Hosts may pass more bytes than the metadata lists; no kernel takes more than these.
_LARGEST = 4096


@dataclass(frozen=True)
class At:
    """A pointer argument into an array: the address of its byte `offset`."""

    array: np.ndarray
    offset: int = 0


def bind(
    program: Program,
    memory: GlobalMemory,
    args: Sequence[Any] | Mapping[str, Any],
    shape: Sequence[int],
    threads: int,
) -> int:
    """Build the argument segment; returns its device address."""
    given = _named(program, args) if isinstance(args, Mapping) else _ordered(program, args)
    given = list(given)
    size = max([program.kernarg_bytes, 8, *(a.offset + a.size for a, _, _ in given)])
    segment = np.zeros(size + 64, np.uint8)
    address = memory.add(segment, "the argument segment")
    for argument, label, value in given:
        _write(segment, argument, _encode(value, argument, memory, label))
    for argument in program.arguments:
        value = _hidden(argument.kind, shape, threads)
        if value is not None:
            _write(segment, argument, value.to_bytes(argument.size, "little"))
    return address


def _write(segment: np.ndarray, argument: Argument, data: bytes):
    segment[argument.offset : argument.offset + len(data)] = np.frombuffer(data, np.uint8)


def _visible(program: Program) -> list[Argument]:
    return [a for a in program.arguments if not a.kind.startswith("hidden_")]


def _ordered(program: Program, args: Sequence[Any]) -> Iterator[tuple[Argument, str, Any]]:
    """Each argument with its label and value, given in the kernel's order."""
    visible = _visible(program)
    if len(args) > len(visible):
        raise ValueError(f"args has {len(args)} values, kernel {program.name} takes {len(visible)}")
    for i, argument in enumerate(visible):
        value = args[i] if i < len(args) else None
        label = f"argument {i}" + (f" ({argument.name})" if argument.name else "")
        if value is None and i >= len(args) and argument.kind == "by_value":
            raise ValueError(f"args lacks a value for {label} of kernel {program.name}")
        yield argument, label, value


def _is_fill(argument: Argument) -> bool:
    return argument.name.startswith("pad") or not argument.name


def _named(program: Program, args: Mapping[str, Any]) -> Iterator[tuple[Argument, str, Any]]:
    """Each argument with its label and value, given by name or offset.

    The metadata of hand-written kernels may call a pointer or a float an i32. So a value decides
    about its own type, and may run over the fill that follows its slot.
    """
    wanted = [a for a in _visible(program) if not _is_fill(a)]
    left = {a.offset: a for a in wanted}
    for name, value in args.items():
        argument = _find(program, wanted, name)
        if left.pop(argument.offset, None) is None and not _is_fill(argument):
            raise ValueError(f"args names the argument at byte {argument.offset} twice ({name!r})")
        if argument.kind == "by_value":
            argument = _as_given(program, wanted, argument, value, name)
        yield argument, f"argument {name}", value
    if left:
        names = [a.name for a in left.values()]
        raise ValueError(f"args lacks a value for {names} of kernel {program.name}")


def _find(program: Program, wanted: Sequence[Argument], name: str) -> Argument:
    if match := re.fullmatch(r"@(\d+)", name):
        offset = int(match[1])
        if offset >= _LARGEST:
            raise ValueError(
                f"args: {name} lies behind the {_LARGEST} bytes that arguments may have"
            )
        at = [a for a in _visible(program) if a.offset == offset]
        return at[0] if at else Argument(offset, 4, "by_value", "pad")
    found = [a for a in wanted if a.name == name]
    if len(found) != 1:
        several = f"; {name!r} is at bytes {[a.offset for a in found]}, name it so: @BYTE"
        known = ", ".join(a.name for a in wanted)
        raise ValueError(
            f"args: kernel {program.name} has {len(found)} arguments called {name!r}"
            + (several if found else f"; it has {known}")
        )
    return found[0]


def _as_given(
    program: Program, wanted: Sequence[Argument], argument: Argument, value: Any, name: str
) -> Argument:
    """A by-value argument with the size and kind that its value has."""
    kind, size = argument.kind, argument.size
    if value is None or isinstance(value, np.ndarray | At):
        kind, size = "global_buffer", 8
    elif isinstance(value, np.generic):
        size = value.nbytes
    elif isinstance(value, float) and size not in (2, 4, 8):
        size = 4
    later = [a.offset for a in wanted if a.offset > argument.offset]
    room = min([_LARGEST, *later]) - argument.offset
    if size > room:
        raise ValueError(f"argument {name}: has room for {room} bytes, got {size} ({value!r})")
    return replace(argument, kind=kind, size=size)


def _encode(value: Any, argument: Argument, memory: GlobalMemory, label: str) -> bytes:
    """The bytes of one argument."""
    if argument.kind == "global_buffer":
        if value is None:
            return bytes(argument.size)
        spot = value if isinstance(value, At) else At(value)
        if not isinstance(spot.array, np.ndarray) or not spot.array.flags.c_contiguous:
            raise ValueError(f"{label}: expected a C-contiguous array or None, got {type(value)}")
        return (memory.add(spot.array, label) + spot.offset).to_bytes(8, "little")
    if isinstance(value, np.generic):
        data = value.tobytes()
    elif isinstance(value, float):
        data = struct.pack({2: "<e", 4: "<f", 8: "<d"}[argument.size], value)
    elif isinstance(value, int):
        data = (value & ((1 << 8 * argument.size) - 1)).to_bytes(argument.size, "little")
    else:
        raise ValueError(f"{label}: expected a number of {argument.size} bytes, got {value!r}")
    if len(data) != argument.size:
        raise ValueError(f"{label}: has {argument.size} bytes, got {len(data)} ({value!r})")
    return data


def _hidden(kind: str, shape: Sequence[int], threads: int) -> int | None:
    """The value of an argument that the runtime fills in, or None."""
    axis = "xyz".find(kind[-1])
    if kind.startswith("hidden_block_count_"):
        return shape[axis]
    if kind.startswith("hidden_group_size_"):
        return threads if axis == 0 else 1
    if kind == "hidden_grid_dims":
        return 3
    return None
