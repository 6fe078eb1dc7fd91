"""The public call: how long a launch would take, from a few of its workgroups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from heedful.emulator import launch
from heedful.emulator.clock.grid import Prediction, predict
from heedful.emulator.clock.trace import Recorder
from heedful.emulator.report import Report


def predict_time(
    asm: Any,
    grid: Sequence[int],
    args: Sequence[Any] | Mapping[str, Any],
    *,
    workgroups: int = 1,
    memory_bytes: float = 0.0,
    window: float = 0.0,
    **options: Any,
) -> tuple[Prediction, Report]:
    """Run some workgroups of a launch, replay them on a compute unit, and schedule the rest.

    Args:
        asm, grid, args: as for `emulate`. Arrays are written by those that run, so use copies.
        workgroups: how many run, spread evenly over the grid. One that does not takes as long as
            the nearest that does.
        memory_bytes: that the launch must move to or from memory once, whatever the caches do.
        window: clocks for which `timing.events` keeps what every wave issued.
        options: further ones of `emulate`; the schedule is lockstep.

    Returns:
        the prediction, and what the emulator found on the way.

    Raises:
        ValueError: as `emulate`; workgroups is not from 1 to the size of the grid; a schedule.
    """
    shape = (*grid, 1, 1)[:3]
    total = math.prod(shape)
    if not 1 <= workgroups <= total:
        raise ValueError(f"workgroups must be from 1 to {total}, the grid's size, got {workgroups}")
    if options.get("schedule", "lockstep") not in ("lockstep", ["lockstep"]):
        raise ValueError(f"times are of lockstep, got schedule={options['schedule']!r}")
    numbers = [total * (2 * i + 1) // (2 * workgroups) for i in range(workgroups)]
    chosen = [(n % shape[0], n // shape[0] % shape[1], n // shape[0] // shape[1]) for n in numbers]
    recorder = Recorder(chosen)
    report = launch.emulate(asm, grid, args, recorder=recorder, **options)
    trace = recorder.trace(report)
    return predict(trace, grid, memory_bytes=memory_bytes, window=window), report
