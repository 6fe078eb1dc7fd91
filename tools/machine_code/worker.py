"""Compiles kernels with the sources of the checkout that is on the path: run by file, not imported.

Reads {"launches": [{"key", "device", ...}, ...], "defaults": {...}} and writes a JSON line for each
kernel. It knows of heedful only what both sides of a comparison have: names of functions, and the
folder that each is in, at any depth. Modules may be moved and renamed between two checkouts.
"""

import base64
import importlib
import importlib.util
import json
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any


@cache
def named(name: str, folder: str) -> Any:
    """A function or class of this checkout that one module in a folder of the package defines.

    Raises ModuleNotFoundError if none does, or several.
    """
    spec = importlib.util.find_spec("heedful")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    defined = re.compile(rf"^(?:def|class) {name}\b", re.MULTILINE)
    files = sorted((root / folder).rglob("*.py"))
    found = [path for path in files if defined.search(path.read_text(encoding="utf-8"))]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(root)) for path in found) or "no module"
        raise ModuleNotFoundError(f"{name} must be defined once in heedful/{folder}, got {places}")
    parts = found[0].relative_to(root.parent).with_suffix("").parts
    return getattr(importlib.import_module(".".join(parts).removesuffix(".__init__")), name)


def calls_of(facts: dict, device: Any, defaults: dict) -> list:
    """The kernel calls of one launch."""
    from_json = named("Entry", "launch").from_json
    if facts["cache"]:
        arrays = from_json({"problem": _ANY, "buffers": facts["arrays"]}).buffers
        return list(named(facts["cache"], "launch/bind")(arrays, **facts["options"]).calls)
    found = []
    for each in facts["entries"]:
        entry = from_json(_known(each, defaults))
        backend = _backend(facts["backend"])
        chosen = named("plan", "core")(entry.problem, device, _toolchain(), backend)
        program = named("program", "launch")
        if entry.direction == "step":
            step = sys.modules[program.__module__].step
            made = step(chosen, entry.buffers, **entry.options)
        else:
            made = program(chosen, entry.direction, entry.buffers)
        found += made.calls[-facts["last"] :] if facts["last"] else made.calls
    return found


def _known(entry: dict, defaults: dict) -> dict:
    """An entry without facts that this checkout does not know and that are as by default."""
    fields = named("AttentionProblem", "core").__dataclass_fields__
    return {
        **entry,
        "problem": {
            name: value
            for name, value in entry["problem"].items()
            if name in fields or value != defaults[name]
        },
    }


def _toolchain() -> Any:
    """The compiler at hand, where plans ask for it."""
    try:
        return named("compiling", "launch")()
    except ModuleNotFoundError:
        return None


def _backend(name: str | None) -> str | None:
    """What asks for the kernel that was a backend of this name, where backends have variants."""
    try:
        forced = named("forced", "core")
    except ModuleNotFoundError:
        return name
    return forced(f"{name}/portable") if name in ("decode", "mixed") else name


_ANY = {"batch": 1, "seqlen_q": 1, "seqlen_k": 1, "heads_q": 1}


def compiled(call: Any, arch: str) -> dict:
    made = named("artifact", "launch")(call, arch)
    return {
        "function": call.kernel.function,
        "code": base64.b64encode(made.code).decode(),
        "text": made.text if arch.startswith("gfx") else "",
        "shared_bytes": made.shared_bytes,
        "parameter_bytes": made.parameter_bytes,
        "toolchain": made.toolchain,
    }


def main() -> None:
    given = json.load(sys.stdin)
    for facts in given["launches"]:
        device = named("by_name", "core")(facts["device"])
        try:
            calls = calls_of(facts, device, given["defaults"])
        except Exception:
            calls = []
            _say({"key": facts["key"], "arch": device.arch, "error": traceback.format_exc()})
        for place, call in enumerate(calls):
            said = {"key": f"{facts['key']}.{place}", "arch": device.arch}
            try:
                said |= compiled(call, device.arch)
            except Exception:
                said |= {"function": call.kernel.function, "error": traceback.format_exc()}
            _say(said)


def _say(facts: dict) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
