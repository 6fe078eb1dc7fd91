"""`heedful doctor`: what this machine has, and what runs here at which support level."""

import platform
from pathlib import Path

from rich.markup import escape
from rich.table import Table

import heedful
from heedful.bench.harness import machine
from heedful.cli import matrix
from heedful.cli.console import level_text, out
from heedful.core.base import settings
from heedful.core.base.device import MIB, DeviceSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.capability import LEVELS, ROWS, KernelRow, Toolchain
from heedful.launch.code.folder import Folder

_PACKAGES = ("torch", "triton", "jax", "jaxlib", "numpy")


def doctor() -> None:
    """Devices, versions, cache, and which kernels run here at which support level."""
    devices, tools = machine.devices(), machine.toolchain()
    out.print(_versions())
    out.print(_devices(devices))
    for device in _distinct(devices):
        out.print(_kernels(device, tools))
    shown = {row.level(device) for row in ROWS for device in devices}
    for name, words in LEVELS.items():
        if name in shown:
            out.print(f"  {level_text(name)}: {words}")
    for advice in _advice(devices, tools):
        out.print(f"[bold yellow]![/] {escape(advice)}", soft_wrap=True)


def _versions() -> Table:
    table = Table(title="Versions", title_justify="left", title_style="bold", show_header=False)
    table.add_row("heedful", f"{heedful.__version__} ({Path(heedful.__file__).parent})")
    system = f"{platform.system()} {platform.machine()}"
    table.add_row("python", f"{platform.python_version()}, {system}")
    for name in _PACKAGES:
        table.add_row(name, machine.version(name) or "not installed")
    table.add_row("GPU driver", machine.driver() or "none found")
    cache = settings.get("cache_dir")
    table.add_row("kernel cache", _cache_words(cache))
    for name, setting in settings.TABLE.items():
        if name != "cache_dir" and settings.is_set(name):
            table.add_row(setting.variable, str(settings.get(name)))
    return table


def _cache_words(folder: Path | None) -> str:
    if folder is None:
        return "none: there is no home folder, and HEEDFUL_CACHE_DIR is not set"
    try:
        with Folder(folder / "kernels") as kernels:
            sizes = [kernels.stat(name).st_size for name in kernels.names()]
    except FileNotFoundError:
        return f"{folder} (empty)"
    except OSError as error:
        return f"{folder} (not used: {error})"
    return f"{folder} ({len(sizes)} files, {sum(sizes) / MIB:.1f} MiB)"


def _devices(devices: list[DeviceSpec]) -> Table:
    table = Table(title="Devices", title_justify="left", title_style="bold")
    for name in ("device", "arch", "units", "shared memory a block", "L2"):
        table.add_column(name)
    for device in devices:
        gpu = device.vendor != "cpu"
        shared = f"{device.shared_bytes // 1024} KiB" if gpu else "-"
        l2 = f"{device.l2_bytes // MIB} MiB" if gpu else "-"
        table.add_row(device.name, device.arch, str(device.units), shared, l2)
    return table


def _distinct(devices: list[DeviceSpec]) -> list[DeviceSpec]:
    return list({(device.name, device.arch): device for device in devices}.values())


def _kernels(device: DeviceSpec, tools: Toolchain) -> Table:
    table = Table(title=f"On {device.name}", title_justify="left", title_style="bold")
    for name in ("kernel", "level", "dtypes", "head dims", "features"):
        table.add_column(name)
    for row in ROWS:
        level = row.level(device)
        if level is None:
            continue
        missing = _missing(row, device, tools)
        table.add_row(
            f"{row.backend} {row.direction}",
            f"[red]cannot run:[/] {escape('; '.join(missing))}" if missing else level_text(level),
            matrix.dtype_words(row),
            matrix.dim_words(row),
            matrix.feature_words(row),
        )
    return table


def _missing(row: KernelRow, device: DeviceSpec, tools: Toolchain) -> list[str]:
    """The tools that a kernel lacks here: reasons that vanish once every tool is the newest."""
    problem = AttentionProblem.dense(1, 128, 128, 1, head_dim=64, dtype=row.dtypes[0])
    anyway = row.why_not(problem, device, Toolchain())
    return [reason for reason in row.why_not(problem, device, tools) if reason not in anyway]


def _advice(devices: list[DeviceSpec], tools: Toolchain) -> list[str]:
    if tools.torch is None:
        return ['torch is not installed: pip install "heedful[cpu]", or [cuda] with an NVIDIA GPU']
    if all(device.vendor == "cpu" for device in devices) and machine.driver():
        return ["there is a GPU driver, but torch sees no GPU: is this torch's CPU build?"]
    return []
