"""Records which problems a run needs, and reads such lists: `heedful prebuild` compiles them.

A list is JSON: {"format": 1, "problems": [{"problem": {...}, "direction": "forward", "buffers":
{...} or null, "device": {...} or null}, ...]}. In a list written by hand "problem" and perhaps
"direction" are enough: missing facts have their defaults, and arrays are contiguous. The direction
"step" is a forward that first extends a cache (`launch.program.programs.step`). By hand it says
what it appends, {"appends": {"tokens": 1, "rotary": "halves" or "pairs", "rotary_dim": 64}}, where
the last two may be missing. A recorded one has "buffers" and "options" instead.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import DeviceSpec
from heedful.core.base.frozen import dataclass
from heedful.core.base.parsed import parsed
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.launch.noted import listening
from heedful.launch.program import buffers as canonical

FORMAT = 1
DIRECTIONS = ("forward", "backward", "step")


@dataclass(frozen=True)
class Entry:
    """One direction of one problem, with the arrays and the device of the recorded call. options:
    the further arguments of a step."""

    problem: AttentionProblem
    direction: str
    buffers: Mapping[str, ArraySpec] | None = None
    device: DeviceSpec | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict:
        facts = {"problem": asdict(self.problem), "direction": self.direction}
        if self.buffers is not None:
            facts["buffers"] = {name: _facts(spec) for name, spec in self.buffers.items()}
        if self.device is not None:
            facts["device"] = asdict(self.device)
        if self.options:
            facts["options"] = dict(self.options)
        return facts

    @classmethod
    def from_json(cls, facts: dict) -> "Entry":
        """Raises ValueError or TypeError for facts that are no entry."""
        fields_of = dict(facts["problem"])
        fields_of["mask"] = MaskSpec(**fields_of.get("mask", {}))
        problem = AttentionProblem.dense(**fields_of)
        direction = facts.get("direction", "forward")
        if direction not in DIRECTIONS:
            raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
        recorded, options = facts.get("buffers"), facts.get("options", {})
        buffers = None if recorded is None else {n: _buffer(b) for n, b in recorded.items()}
        if direction == "step" and not buffers:
            buffers, options = _appending(problem, facts.get("appends"))
        device = facts.get("device")
        made = None if device is None else DeviceSpec(**device)
        return cls(problem, direction, buffers, made, options)


def _appending(
    problem: AttentionProblem, appends: Mapping[str, Any] | None
) -> tuple[dict[str, ArraySpec], dict[str, Any]]:
    """Arrays and options of a step that a list states by what it appends."""
    if not appends:
        raise ValueError('a step must say what it "appends", such as {"tokens": 1}')
    rotary = appends.get("rotary", "")
    if rotary not in ("", "halves", "pairs"):
        raise ValueError(f'rotary must be "halves" or "pairs", got {rotary!r}')
    # Calls without rotary embeddings say pairs, by default.
    options = {"interleaved": rotary != "halves", "position0": 0}
    return canonical.step(problem, **appends), options


def _facts(spec: ArraySpec) -> dict:
    """An array as a list states it, without its device."""
    return {name: getattr(spec, name) for name in ("shape", "strides", "dtype", "aligned")}


def _buffer(facts: dict) -> ArraySpec:
    return ArraySpec(
        tuple(facts["shape"]), tuple(facts["strides"]), facts["dtype"], facts.get("aligned", True)
    )


@contextmanager
def record(path: str | os.PathLike) -> Iterator[None]:
    """Writes the list of problems that the calls inside need, for `heedful prebuild`.

    Calls that this process made before are not recorded: use a fresh process. Calls on a CPU
    compile nothing: if there were no others, the list is empty, and a warning says so.

    Raises:
        OSError: nothing can be written there, before any call is made.
    """
    entries: dict[str, Entry] = {}
    save(path, ())

    def add(plan: Plan, direction: str, buffers: Mapping[str, ArraySpec], **options: Any) -> None:
        entry = Entry(plan.problem, direction, dict(buffers), plan.device, options)
        entries[json.dumps(entry.to_json())] = entry

    try:
        with listening(add):
            yield
    finally:
        save(path, entries.values())
        if not entries:
            words = f"no new call ran a GPU's kernels: the list of problems {path} is empty"
            warnings.warn(words, stacklevel=3)


def save(path: str | os.PathLike, entries) -> None:
    """Writes a list of problems."""
    content = {"format": FORMAT, "problems": [entry.to_json() for entry in entries]}
    Path(path).write_text(json.dumps(content, indent=1))


def load(path: str | os.PathLike) -> list[Entry]:
    """Reads a list of problems. Raises ValueError saying what is wrong with it and where."""
    try:
        content = parsed(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'{path} must be an object with "format": {FORMAT}')
    problems, entries = content.get("problems", []), []
    if not isinstance(problems, list):
        raise ValueError(f'{path} must have a list of "problems", got {problems!r:.50}')
    for position, facts in enumerate(problems):
        try:
            entries.append(Entry.from_json(facts))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, problem {position}: {error}") from None
    return entries
