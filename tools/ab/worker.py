"""One side: keeps a cell's calls and times bursts of them, when it is told to.

Reads a JSON line a request and answers each by one: {"do": "hello", "begin", "count", "time" or
"end"}.
What a library prints goes to stderr.
"""

import gc
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import torch

from ab import clocks, operands
from ab.cases import Spec

# How long a burst may take, and how many calls of it are made.
BURST_SECONDS = 0.02
LEAST_CALLS, MOST_CALLS = 3, 50
NEW_CALLS = 40
WARM_UP = 2


class Bursts:
    """A cell's calls. equal: sums of the bits of the first one's result, "" if not known."""

    def __init__(self, spec: Spec, device: torch.device):
        self._clock = clocks.of(spec["clock"], spec["framework"], device)
        self._device = device
        self._new: Iterator[Callable[[], Any]] | None = None
        self.equal = ""
        if spec["clock"] == "new":
            self._new = operands.new_calls(spec, device)
            for _ in range(operands.NEW_WARM_UP):
                next(self._new)()
            return
        sets = operands.HOST_SETS[device.type] if spec["clock"] == "host" else 1
        if spec["framework"] == "jax":
            from ab import in_jax

            self._calls = in_jax.calls(spec, device, sets)
        else:
            self._calls = operands.calls(spec, device, sets)
            self.equal = _bits(self._calls[0]())
        for _ in range(WARM_UP):
            for call in self._calls:
                call()
        clocks.synchronize(device)
        self._is_host = spec["clock"] == "host"

    def count(self) -> int:
        """How many calls make a burst. The other side is to be idle."""
        if self._new is not None:
            return NEW_CALLS
        if self._is_host:
            return len(self._calls)
        us = statistics.median(self._clock(self._calls * LEAST_CALLS))
        return max(LEAST_CALLS, min(MOST_CALLS, round(BURST_SECONDS * 1e6 / max(us, 1e-3))))

    def time(self, count: int) -> float:
        """The median of so many calls, in microseconds."""
        if self._new is not None:
            calls = [next(self._new) for _ in range(count)]
        else:
            calls = [self._calls[number % len(self._calls)] for number in range(count)]
        return statistics.median(self._clock(calls))


def _bits(result: Any) -> str:
    """Sums of a result's bits: equal if the results are. Raises ValueError for NaN and infinity."""
    sums = []
    for tensor in result if isinstance(result, tuple | list) else (result,):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            whole = tensor.detach().contiguous()
            if not bool(whole.isfinite().all()):
                raise ValueError("the result is not finite")
            sums.append(str(int(whole.view(torch.int16).sum(dtype=torch.int64))))
    return " ".join(sums)


def answer(request: dict, kept: dict[str, Any], device: torch.device) -> dict:
    match request["do"]:
        case "hello":
            return _hello(device)
        case "begin":
            kept.clear()
            kept["bursts"] = bursts = Bursts(request["cell"], device)
            return {"equal": bursts.equal}
        case "count":
            return {"count": kept["bursts"].count()}
        case "time":
            return {"us": kept["bursts"].time(request["count"])}
        case "end":
            kept.clear()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return {}
    raise ValueError(f"do must be hello, begin, count, time or end, got {request['do']!r}")


def _hello(device: torch.device) -> dict:
    import heedful

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = {"heedful": heedful.__file__, "device": name, "torch": torch.__version__}
    return {**facts, "triton": _version("triton")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def serve(requests: TextIO, answers: TextIO, device: torch.device) -> None:
    kept: dict[str, Any] = {}
    for line in requests:
        try:
            said = answer(json.loads(line), kept, device)
        except Exception as error:  # the other side goes on
            kept.clear()
            sys.stderr.write(traceback.format_exc())
            words = (str(error).splitlines() or [""])[0]
            said = {"error": f"{type(error).__name__}: {words}"}
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, own, torch.device(sys.argv[1]))
