"""The command line: run a .s file, a code object or a kernel of a Python file on made-up arguments.

    python -m heedful.emulator kernel.s --grid 4,2 --arg bf16:64x128 --arg f32:64=zeros --arg i32=64
    python -m heedful.emulator kernels.py:attention --target gfx950 --constant BLOCK=64 ...
    python -m heedful.emulator --object kernel.co --grid 4 --set Q=bf16:64x128 --set scale=f32=0.125

Beside an .amdgcn file of Triton's cache lies a .json file that knows its LDS and waves.
An array is `type:shape` with what fills it (normal, zeros, ones, nan or arange) or
`type:@FILE.npy`, a scalar `type=value`, a null pointer `null`. Kernels in Python files are
compiled by Triton, which must be installed for that; a code object needs llvm-objdump.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heedful.emulator.clock.grid import Prediction
from heedful.emulator.clock.launch import predict_time
from heedful.emulator.clock.timeline import draw
from heedful.emulator.launch import emulate
from heedful.emulator.objects.disassembly import load_object
from heedful.emulator.program.decoder import Code
from heedful.emulator.report import KINDS, Report
from heedful.emulator.values import Difference, Value, compare, load_function, parse_value


def compile_kernel(path: str, function: str, target: str, types: Sequence[str], options: dict):
    """Compile a Triton or Gluon kernel of a Python file.

    Args:
        types: Triton types of the arguments that are no constants, in order.
        options: constants by name, and compile options such as num_warps.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load_function(path, function)
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
    add("kernel", nargs="?", help="FILE.s, or FILE.py:FUNCTION")
    add("--object", metavar="FILE.co", help="a code object, instead of these")
    add("--objdump", help="the llvm-objdump for it (default: $LLVM_OBJDUMP, then PATH)")
    add("--grid", default="1", help="workgroups, as X,Y,Z")
    add("--arg", action="append", default=[], help="an argument, in order; see above")
    add("--set", action="append", default=[], help="NAME=ARGUMENT, by metadata name or @BYTE")
    add("--reference", metavar="FILE.py:FUNCTION", help="from arguments to outputs, both by name")
    add("--tolerance", type=float, default=1e-2, help="relative rms error that outputs may have")
    add("--save", metavar="FOLDER", help="write the arrays of --set there, as NAME.npy")
    add("--constant", action="append", default=[], help="NAME=VALUE of a Python kernel")
    add("--target", default="gfx950", choices=("gfx942", "gfx950"), help="for Python kernels")
    add("--warps", type=int, help="waves per workgroup")
    add("--lds", type=int, help="bytes of LDS (default: what the kernel asks for)")
    add("--name", help="the kernel's name, where the file has several")
    add(
        "--schedule",
        action="append",
        help="lockstep (the default), round-robin, random:SEED, random:FIRST-LAST, delay:WAVES,\n"
        "delay:each, delay:halves; may be given again: all must give the same bits",
    )
    add("--early-loads", action="store_true", help="loads to LDS land at once, not when waited for")
    add(
        "--time",
        type=int,
        metavar="N",
        help="predict the time of the launch, of which only N workgroups are run; each array is\n"
        "taken to go to or from memory once",
    )
    add(
        "--svg",
        metavar="FILE",
        help="with --time: a picture of what the waves issue (.svg, .png, .pdf; needs matplotlib)",
    )
    add("--window", type=float, default=4000.0, help="clocks that the picture shows")
    add("--check", action="append", choices=sorted(KINDS), help="only these findings")
    add(
        "--strict",
        action="store_true",
        help="a rule that shipped kernels break is an error in a\ncode object too, not advice",
    )
    add("--seed", type=int, default=0, help="of the arguments' values")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def _load(options: argparse.Namespace, types: Sequence[str]) -> Any:
    """The kernel of a file that is no code object."""
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


def to_json(
    report: Report,
    differences: Sequence[Difference] = (),
    prediction: Prediction | None = None,
) -> str:
    """A report as JSON text, with the outputs that were compared and the time predicted."""
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
        "differences": [asdict(d) for d in differences],
        "time": prediction.facts() if prediction else None,
    }
    return json.dumps(facts, indent=2)


def _values(options: argparse.Namespace, arch: str) -> tuple[list[Value], dict[str, Value]]:
    """The arguments by position and by name."""
    rng = np.random.default_rng(options.seed)
    if options.arg and options.set:
        raise ValueError("--arg and --set cannot be mixed: give all by position or all by name")
    ordered = [parse_value(text, rng, arch) for text in options.arg]
    named = {}
    for text in options.set:
        name, given, value = text.partition("=")
        if not given:
            raise ValueError(f"--set {text}: expected NAME=ARGUMENT, as Q=bf16:64x128")
        named[name] = parse_value(value, rng, arch)
    return ordered, named


def _save(folder: str, values: Mapping[str, Value]):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        if isinstance(value.data, np.ndarray):
            np.save(Path(folder) / f"{name}.npy", value.decoded())


@dataclass
class _Outcome:
    """The findings of a command: its report, outputs compared, a prediction."""

    report: Report
    differences: Sequence[Difference] = ()
    prediction: Prediction | None = None

    def json(self) -> str:
        """For machines."""
        return to_json(self.report, self.differences, self.prediction)

    def text(self) -> str:
        """For people."""
        parts = [self.report.summary(), *map(str, self.differences)]
        return "\n".join([*parts, self.prediction.summary()] if self.prediction else parts)


def _run(options: argparse.Namespace) -> _Outcome:
    """Load, execute, compare and save, as the options say."""
    if bool(options.kernel) == bool(options.object):
        raise ValueError("name one kernel: FILE.s, FILE.py:FUNCTION or --object FILE.co")
    if options.reference and not options.set:
        raise ValueError("--reference takes arguments by name: give them with --set")
    if options.time is not None and (options.reference or options.save):
        raise ValueError("--time runs a part of the launch: outputs cannot be compared or saved")
    if options.svg and options.time is None:
        raise ValueError("--svg is a picture of what --time replays")
    if options.window <= 0:
        raise ValueError(f"--window must be above 0 clocks, got {options.window}")
    kernel: Code | Any = None
    if options.object:
        kernel = load_object(options.object, options.name, objdump=options.objdump)
    ordered, named = _values(options, kernel.program.arch if kernel else options.target)
    before = {name: value.decoded() for name, value in named.items()}
    loaded = kernel or _load(options, [value.triton_type for value in ordered])
    grid = [int(n) for n in options.grid.split(",")]
    args = {name: v.data for name, v in named.items()} if named else [v.data for v in ordered]
    keywords = {
        "lds_bytes": options.lds,
        "threads": 64 * options.warps if options.warps else None,
        "kernel": options.name,
        "checks": options.check,
        "schedule": options.schedule or "lockstep",
        "early_loads": options.early_loads,
        "strict": options.strict or not options.object,
    }
    if options.time is not None:
        return _time(options, loaded, grid, args, keywords)
    report = emulate(loaded, grid, args, **keywords)
    if options.save:
        _save(options.save, named)
    if not options.reference:
        return _Outcome(report)
    path, _, function = options.reference.rpartition(":")
    return _Outcome(report, compare(load_function(path, function), before, named))


def _time(options: argparse.Namespace, kernel: Any, grid: list[int], args: Any, keywords: dict):
    """Predict instead of running the whole launch."""
    window = options.window if options.svg else 0.0
    keywords |= {"workgroups": options.time, "window": window}
    values = args.values() if isinstance(args, dict) else args
    keywords["memory_bytes"] = sum(x.nbytes for x in values if isinstance(x, np.ndarray))
    prediction, report = predict_time(kernel, grid, args, **keywords)
    if options.svg:
        draw(prediction.timing, (0.0, window), options.svg, report.program.name)
    return _Outcome(report, prediction=prediction)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 without findings, 1 with them or with wrong outputs, 2 for bad
    arguments."""
    options = _parser().parse_args(argv)
    try:
        outcome = _run(options)
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    right = all(d.within(options.tolerance) for d in outcome.differences)
    sys.stdout.write((outcome.json() if options.json else outcome.text()) + "\n")
    return 0 if outcome.report.clean and right else 1
