"""Compiles kernels with the sources of the checkout that is on the path: run by file, not imported.

Reads {"launches": [{"key", "device", ...}, ...]} and writes a JSON line for each kernel. It knows
of heedful only what both sides of a comparison have.
"""

import base64
import importlib
import json
import sys
import traceback
from typing import Any

# Where the programs of a KV cache are, by checkout.
CACHE_MODULES = ("heedful.launch.bind.portable_cache", "heedful.launch.args.portable_cache")


def calls_of(facts: dict, device: Any) -> list:
    """The kernel calls of one launch."""
    from heedful.core.plan import plan
    from heedful.launch import programs, record

    if facts["cache"]:
        arrays = record.Entry.from_json({"problem": _ANY, "buffers": facts["arrays"]}).buffers
        return list(getattr(_cache_module(), facts["cache"])(arrays, **facts["options"]).calls)
    found = []
    for each in facts["entries"]:
        entry = record.Entry.from_json(each)
        chosen = plan(entry.problem, device, _toolchain(), facts["backend"])
        made = programs.program(chosen, entry.direction, entry.buffers)
        found += made.calls[-facts["last"] :] if facts["last"] else made.calls
    return found


def _toolchain():
    """The compiler at hand, where plans ask for it."""
    from heedful.launch import prebuild

    return prebuild.compiling() if hasattr(prebuild, "compiling") else None


_ANY = {"batch": 1, "seqlen_q": 1, "seqlen_k": 1, "heads_q": 1}


def _cache_module():
    for name in CACHE_MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(f"none of {', '.join(CACHE_MODULES)}")


def compiled(call: Any, arch: str) -> dict:
    from heedful.launch import compiler

    made = compiler.artifact(call, arch)
    return {
        "function": call.kernel.function,
        "code": base64.b64encode(made.code).decode(),
        "text": made.text if arch.startswith("gfx") else "",
        "shared_bytes": made.shared_bytes,
        "parameter_bytes": made.parameter_bytes,
        "toolchain": made.toolchain,
    }


def main() -> None:
    from heedful.core.device import by_name

    for facts in json.load(sys.stdin)["launches"]:
        device = by_name(facts["device"])
        try:
            calls = calls_of(facts, device)
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
