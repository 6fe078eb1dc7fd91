"""The command line: run a .s file, or a kernel of a Python file, on made-up arguments.

    python -m heedful.emulator kernel.s --grid 4,2 --arg bf16:64x128 --arg f32:64=zeros --arg i32=64
    python -m heedful.emulator kernels.py:attention --target gfx950 --constant BLOCK=64 ...

Beside an .amdgcn file of Triton's cache lies a .json file that knows its LDS and waves.
An array is `type:shape` with what fills it (normal, zeros, ones, nan or arange), a scalar is
`type=value`. Kernels in Python files are compiled by Triton, which must be installed for that.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from heedful.emulator.floats import bf16_bits
from heedful.emulator.launch import emulate
from heedful.emulator.report import KINDS, Report

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
}
_FILLS = ("normal", "zeros", "ones", "nan", "arange")


def parse_argument(text: str, rng: np.random.Generator) -> tuple[Any, str]:
    """The value of an --arg and its Triton type.

    Raises:
        ValueError: the text is neither `type:shape[=fill]` nor `type=value`.
    """
    head, _, tail = text.partition("=")
    name, _, shape = head.partition(":")
    if name not in _TYPES:
        raise ValueError(f"--arg {text}: unknown type {name!r}; known are {', '.join(_TYPES)}")
    storage, triton_type = _TYPES[name]
    if not shape:
        number = float(tail) if name in ("f32", "f16", "f64") else int(tail, 0)
        return storage(number), triton_type
    fill = tail or "normal"
    if fill not in _FILLS:
        raise ValueError(f"--arg {text}: unknown fill {fill!r}; known are {', '.join(_FILLS)}")
    size = tuple(int(n) for n in shape.split("x"))
    values = {
        "normal": lambda: rng.standard_normal(size),
        "zeros": lambda: np.zeros(size),
        "ones": lambda: np.ones(size),
        "nan": lambda: np.full(size, np.nan),
        "arange": lambda: np.arange(np.prod(size)).reshape(size),
    }[fill]()
    if name == "bf16":
        return bf16_bits(values.astype(np.float32)).astype(np.uint16), "*bf16"
    return np.nan_to_num(values).astype(storage) if name[0] in "iu" else values.astype(
        storage
    ), f"*{triton_type}"


def compile_kernel(path: str, function: str, target: str, types: Sequence[str], options: dict):
    """Compile a Triton or Gluon kernel of a Python file.

    Args:
        types: Triton types of the arguments that are no constants, in order.
        options: constants by name, and compile options such as num_warps.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    kernel = getattr(module, function)
    names = list(kernel.arg_names)
    constants = {name: options.pop(name) for name in names if name in options}
    given = [name for name in names if name not in constants]
    if len(given) != len(types):
        raise ValueError(f"{function} takes {given} beside its constants, got {len(types)} --arg")
    signature = dict(zip(given, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in zip(given, types, strict=True)
        if kind.startswith("*")
    }
    source: Any = ASTSource
    if type(kernel).__name__ == "GluonJITFunction":
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    ordered = {name: signature[name] for name in names}
    made = source(fn=kernel, signature=ordered, constexprs=places, attrs=aligned)
    options = {"enable_fp_fusion": True, **options}  # the default changes between versions
    return triton.compile(made, target=GPUTarget("hip", target, 64), options=options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="heedful emulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("kernel", help="FILE.s, or FILE.py:FUNCTION")
    add("--grid", default="1", help="workgroups, as X,Y,Z")
    add("--arg", action="append", default=[], help="an argument, in order; see above")
    add("--constant", action="append", default=[], help="NAME=VALUE of a Python kernel")
    add("--target", default="gfx950", choices=("gfx942", "gfx950"), help="for Python kernels")
    add("--warps", type=int, help="waves per workgroup")
    add("--lds", type=int, help="bytes of LDS (default: what the kernel asks for)")
    add("--name", help="the kernel's name, where the .s file has several")
    add(
        "--schedule",
        action="append",
        help="lockstep (the default), round-robin, random:SEED, random:FIRST-LAST, delay:WAVES,\n"
        "delay:each, delay:halves; may be given again: all must give the same bits",
    )
    add("--check", action="append", choices=sorted(KINDS), help="only these findings")
    add("--seed", type=int, default=0, help="of the arguments' values")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def _load(options: argparse.Namespace, types: Sequence[str]) -> Any:
    path, _, function = options.kernel.partition(":")
    if not path.endswith(".py"):
        facts = Path(path).with_suffix(".json")
        if path.endswith(".amdgcn") and facts.exists():
            known = json.loads(facts.read_text())
            options.lds = known["shared"] if options.lds is None else options.lds
            options.warps = options.warps or known["num_warps"]
        return Path(path).read_text()
    if not function:
        raise ValueError(f"{path}: name the kernel, as {path}:FUNCTION")
    settings = dict(text.split("=", 1) for text in options.constant)
    values = {name: ast.literal_eval(value) for name, value in settings.items()}
    if options.warps:
        values["num_warps"] = options.warps
    return compile_kernel(path, function, options.target, types, values)


def to_json(report: Report) -> str:
    """A report as JSON text."""
    code = report.program.code
    facts = {
        "kernel": report.program.name,
        "target": report.program.arch,
        "schedule": report.schedule,
        "instructions": report.instructions,
        "seconds": report.seconds,
        "barriers": report.barriers,
        "findings": [asdict(f) for f in report.findings],
        "bank_conflicts": {code[pc].where(): n for pc, n in report.bank_conflicts.items()},
    }
    return json.dumps(facts, indent=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 without findings, 1 with, 2 for bad arguments."""
    options = _parser().parse_args(argv)
    rng = np.random.default_rng(options.seed)
    try:
        pairs = [parse_argument(text, rng) for text in options.arg]
        kernel = _load(options, [kind for _, kind in pairs])
        report = emulate(
            kernel,
            [int(n) for n in options.grid.split(",")],
            [value for value, _ in pairs],
            lds_bytes=options.lds,
            threads=64 * options.warps if options.warps else None,
            kernel=options.name,
            checks=options.check,
            schedule=options.schedule or "lockstep",
        )
    except (ValueError, OSError, NotImplementedError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write((to_json(report) if options.json else report.summary()) + "\n")
    return 0 if report.clean else 1
