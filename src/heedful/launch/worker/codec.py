"""Kernel calls as JSON, for another process to compile. The form is closed: decoding gives a call
of one of heedful's kernels or raises ValueError, and runs no code."""

import json
import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from heedful.core.base.parsed import parsed
from heedful.kernels import args
from heedful.launch.spec import (
    KernelCall,
    KernelRef,
    Pointer,
    Scalar,
    TensorMap,
    is_group,
)

KERNELS = "heedful.kernels."


@cache
def _groups() -> dict[str, type]:
    """Every group of arguments that kernels declare, by module and name."""
    modules = [
        import_module(f"{args.__name__}.{m.name}") for m in pkgutil.iter_modules(args.__path__)
    ]
    groups = [x for m in modules for x in vars(m).values() if isinstance(x, type)]
    return {_name_of(x): x for x in groups if hasattr(x, "_fields")}


def _name_of(group: type) -> str:
    return f"{group.__module__.removeprefix(f'{args.__name__}.')}.{group.__qualname__}"


def encode(call: KernelCall, arch: str) -> bytes:
    """The facts about a call that the compiler needs for an architecture. Numbers that are given at
    run time are left out, as they may be expressions in lengths.

    Raises TypeError for a constant that is not a plain value.
    """
    parts = {
        "kernel": [call.kernel.module, call.kernel.function, call.kernel.dialect],
        "parameters": [[name, _encoded(value)] for name, value in call.parameters.items()],
        "options": [[name, _encoded(value)] for name, value in call.options.items()],
        "cluster": call.cluster,
        "arch": arch,
    }
    return json.dumps(parts, allow_nan=False).encode()


def _encoded(value: Any) -> Any:
    match value:
        case Pointer():
            return ["pointer", value.buffer, value.dtype, value.aligned]
        case Scalar():
            return ["scalar", value.type, value.divisor]
        case TensorMap():
            facts = (value.buffer, value.dtype, len(value.shape), list(value.block), value.layout)
            return ["map", *facts]
    if is_group(value) and _groups().get(_name_of(type(value))) is type(value):
        return ["group", _name_of(type(value)), [_encoded(item) for item in value]]
    # By hexadecimal digits: JSON has neither infinities nor NaN.
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) in (type(None), bool, int, str):
        return value
    raise TypeError(f"neither an argument nor a constant of a kernel: {value!r}")


def decode(data: bytes) -> tuple[KernelCall, str]:
    """The call, with 0 for its numbers, and the architecture. Raises ValueError for what `encode`
    does not write."""
    try:
        parts = parsed(data)
        module, function, dialect = parts["kernel"]
        if not (module.startswith(KERNELS) and _are(str, function, dialect, parts["arch"])):
            raise ValueError(f"no kernel of heedful: {parts['kernel']}")
        call = KernelCall(
            KernelRef(module, function, dialect),
            (1, 1, 1),
            {_named(name): _decoded(value) for name, value in parts["parameters"]},
            {_named(name): _decoded(value) for name, value in parts["options"]},
            parts["cluster"],
        )
        hash(call.specialization)  # reads the names of types
        return call, parts["arch"]
    except (KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"no kernel call: {error!r}") from None


def _decoded(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case ["pointer", str(buffer), str(dtype), bool(aligned)]:
            return Pointer(buffer, dtype, aligned)
        case ["scalar", str(kind), int(divisor)]:
            return Scalar(0, kind, divisor)
        case ["map", str(buffer), str(dtype), int(rank), list(block), str(layout)] if (
            _are(int, *block) and 0 < rank <= 5
        ):
            zeros = (0,) * rank
            return TensorMap(buffer, dtype, zeros, zeros, tuple(block), layout)
        case ["group", str(name), list(items)]:
            return _groups()[name](*map(_decoded, items))
        case ["float", str(digits)]:
            return float.fromhex(digits)
    raise ValueError(f"nothing that a kernel is given: {value!r}")


def _named(name: str) -> str:
    if type(name) is not str:
        raise ValueError(f"no name: {name!r}")
    return name


def _are(kind: type, *values: object) -> bool:
    return all(type(value) is kind for value in values)
