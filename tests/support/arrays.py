"""The kernels of covering arrays, as launches of this checkout."""

from heedful.core.base.device import DeviceSpec, by_name
from heedful.core.planning.plan import plan
from heedful.launch.bind import portable_cache
from heedful.launch.prebuild import compiling
from heedful.launch.program.programs import program
from heedful.launch.spec import KernelCall
from machine_code.table import DEVICES, Array, Launched


def calls_of(one: Launched, device: DeviceSpec) -> list[KernelCall]:
    """The launches of one row."""
    if one.arrays is not None:
        return list(getattr(portable_cache, one.cache)(one.arrays, **(one.options or {})).calls)
    found: list[KernelCall] = []
    for entry in one.entries:
        chosen = plan(entry.problem, device, compiling(), one.backend)
        found += program(chosen, entry.direction, entry.buffers).calls[-one.last :]
    return found


def variants(array: Array, target: str, rows: list[dict]) -> list[tuple[str, KernelCall]]:
    """The distinct kernels that these rows launch on a target, with readable names."""
    found: dict[tuple, tuple[str, KernelCall]] = {}
    for index, row in enumerate(rows):
        for call in calls_of(array.launched(row, target), by_name(DEVICES[target])):
            found.setdefault(call.specialization, (f"{index}-{call.kernel.function}", call))
    return list(found.values())
