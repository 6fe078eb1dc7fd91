"""`heedful doctor`: what this machine has, and what runs here at which support level."""

import dataclasses
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

import heedful
from heedful import integrations
from heedful.bench.harness import machine
from heedful.cli import matrix
from heedful.cli.console import ROCM_HELPS, TOOLCHAIN_HELPS, TRITON_HELPS, fail, level_text, out
from heedful.core.base import settings
from heedful.core.base.device import KNOWN, MIB, NO_GPU_ON_WINDOWS, DeviceSpec
from heedful.core.base.installed import TESTED, numbers
from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.capability import LEVELS, VARIANTS, Toolchain, Variant
from heedful.launch.code import wheels
from heedful.launch.code.folder import Folder
from heedful.validation import sensors

_PACKAGES = ("torch", "triton", "jax", "jaxlib", "numpy")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Devices, versions, cache, and which kernels run here at which support level."""
    try:
        devices, versions, tools = machine.devices(), _versions(), machine.toolchain()
    except ValueError as error:
        fail(escape(str(error)))
    if versions["jax"] is not None:
        tools = dataclasses.replace(tools, jax=numbers(versions["jax"]))
    distinct = list({(device.name, device.arch): device for device in devices}.values())
    rows = {device.name: list(_kernels(device, tools)) for device in distinct}
    frameworks = list(_frameworks())
    advice = [*_amd_advice(devices, tools), *_advice(devices, tools), *_untested(versions)]
    advice += _untested_frameworks(frameworks)
    if as_json:
        facts = {
            "versions": versions,
            "devices": [dataclasses.asdict(device) for device in devices],
            "kernels": rows,
            "frameworks": frameworks,
            "advice": advice,
        }
        out.print_json(json.dumps(facts))
        return
    out.print(_version_table(versions))
    if frameworks:
        out.print(_framework_table(frameworks))
    out.print(_device_table(devices))
    for name, of_kind in rows.items():
        out.print(_kernel_table(name, of_kind))
    shown = {row["level"] for of_kind in rows.values() for row in of_kind}
    for level, words in LEVELS.items():
        if level in shown:
            out.print(f"  {level_text(level)}: {words}")
    for line in advice:
        out.print(f"[bold yellow]![/] {escape(line)}", soft_wrap=True)


def _versions() -> dict[str, str | None]:
    """By name; None is not installed."""
    versions: dict[str, str | None] = {
        "heedful": f"{heedful.__version__} ({Path(heedful.__file__).parent})",
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
    }
    versions |= {name: machine.version(name) for name in _PACKAGES}
    versions["compiler"] = machine.compiler()
    versions["GPU driver"] = machine.driver()
    versions["kernel wheel"] = _wheel_words()
    versions["kernel cache"] = _cache_words(settings.get("cache_dir"))
    for name in settings.TABLE:
        if name != "cache_dir" and settings.is_set(name):
            versions[settings.variable(name)] = str(settings.get(name))
    return versions


def _wheel_words() -> str | None:
    wheel = wheels.current()
    if wheel is None:
        return None
    count, facts = len(wheel.manifest.digests), wheel.facts
    return f"{wheel.name} {facts.heedful}: {count} kernels for {facts.arch}, CUDA {facts.cuda}"


def _version_table(versions: dict[str, str | None]) -> Table:
    table = Table(title="Versions", title_justify="left", title_style="bold", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in versions.items():
        missing = "none found" if name == "GPU driver" else "not installed"
        table.add_row(name, escape(words or missing))
    return table


def _frameworks() -> Iterator[dict]:
    """Each framework that is found, and who registers heedful with it: entry points of this
    installation, or a call that a program makes, and whether this process has made it."""
    try:
        points = [*metadata.distribution("heedful").entry_points]
    except metadata.PackageNotFoundError:
        points = []
    for framework in integrations.installed():
        if framework.version is not None:
            module, (call, _) = (
                f"heedful.integrations.{framework.name}",
                integrations.CALLS[framework.name],
            )
            entries = [p.value for p in points if p.group.partition(".")[0] == framework.name]
            yield {
                "name": framework.name,
                "version": framework.version,
                "tested": [framework.first, framework.last],
                "is_tested": framework.is_tested,
                "registered": entries,
                "active": framework.registered,
                "register": f"{module}.{call}()" if find_spec(module) else None,
            }


def _framework_table(frameworks: list[dict]) -> Table:
    table = Table(title="Frameworks", title_justify="left", title_style="bold")
    for name in ("framework", "version", "tested with", "heedful.integrations"):
        table.add_column(name, overflow="fold")
    for row in frameworks:
        call = (row["register"] or "").removeprefix("heedful.integrations.")
        asked = "yes" if row["active"] else f"after {call}" if call else "no"
        registered = ", ".join(row["registered"]) or asked
        table.add_row(row["name"], row["version"], " to ".join(row["tested"]), registered)
    return table


def _untested_frameworks(frameworks: list[dict]) -> Iterator[str]:
    for row in frameworks:
        if not row["is_tested"] and row["name"] not in TESTED:
            yield _outside(row["name"], row["version"], " to ".join(row["tested"]))


def _outside(name: str, version: str | None, tested: str) -> str:
    return f"{name} {version} is outside of what heedful was tested with, {tested}"


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


def _device_table(devices: list[DeviceSpec]) -> Table:
    table = Table(title="Devices", title_justify="left", title_style="bold")
    for name in ("device", "arch", "units", "shared memory a block", "L2"):
        table.add_column(name)
    for device in devices:
        gpu = device.vendor != "cpu"
        shared = f"{device.shared_bytes // 1024} KiB" if gpu else "-"
        l2 = f"{device.l2_bytes // MIB} MiB" if gpu else "-"
        table.add_row(device.name, device.arch, str(device.units), shared, l2)
    return table


def _kernels(device: DeviceSpec, tools: Toolchain) -> Iterator[dict]:
    """The state of each kernel that there is for a device; missing: tools that it lacks."""
    for row in VARIANTS:
        level = row.level(device)
        if level is not None:
            yield {
                "kernel": f"{row.label} {row.direction}",
                "level": level,
                "missing": _missing(row, device, tools),
                "dtypes": matrix.dtype_words(row),
                "head_dims": matrix.dim_words(row),
                "features": matrix.feature_words(row),
            }


def _kernel_table(name: str, rows: list[dict]) -> Table:
    """Two columns, since lists of features are long and screens may be narrow."""
    table = Table(title=f"On {name}", title_justify="left", title_style="bold", show_lines=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column("level; dtypes; head dims; features")
    for row in rows:
        missing = escape("; ".join(row["missing"]))
        level = f"[red]cannot run:[/] {missing}" if missing else level_text(row["level"])
        takes = f"{row['dtypes']}; head dims {row['head_dims']}"
        table.add_row(row["kernel"], f"{level}\n{takes}\n{row['features']}")
    return table


def _missing(row: Variant, device: DeviceSpec, tools: Toolchain) -> list[str]:
    """The tools that a kernel lacks here: reasons that vanish once every tool is the newest."""
    problem = AttentionProblem.dense(1, 128, 128, 1, head_dim=64, dtype=row.dtypes[0])
    anyway = row.why_not(problem, device, Toolchain())
    return [reason for reason in row.why_not(problem, device, tools) if reason not in anyway]


def _amd_advice(devices: list[DeviceSpec], tools: Toolchain) -> Iterator[str]:
    """AMD GPUs: a torch that cannot use them; kernels that wait for a Triton or a validation."""
    there, seen = _amd_gpus(), [d for d in devices if d.vendor == "amd"]
    if there and not seen:
        build = "torch is not installed"
        if tools.torch is not None:
            build = f"torch {machine.version('torch')} cannot use it"
        yield f"there is an AMD GPU ({', '.join(there)}), and {build}: {ROCM_HELPS}"
    for device in {d.arch: d for d in seen}.values():
        rows = [v for v in VARIANTS if v.level(device) == "emulated" and not v.by_default]
        waiting = {v.backend for v in rows} - tools.validated
        if waiting and any(_missing(v, device, tools) for v in rows):
            yield (
                f"the {', '.join(sorted(waiting))} kernels of {device.name} need Triton 3.9:"
                " `heedful toolchain install` brings one beside this environment's"
            )
        elif waiting:
            yield (
                f"the {', '.join(sorted(waiting))} kernels of {device.name} run only if they are"
                " named until `heedful validate` has passed here"
            )


def _amd_gpus() -> list[str]:
    """Architectures of this machine's AMD GPUs that heedful has kernels for, whatever torch is."""
    known = {device.arch for device in KNOWN.values()}
    return [arch for arch in dict.fromkeys(sensors.gpus()) if arch in known]


def _advice(devices: list[DeviceSpec], tools: Toolchain) -> Iterator[str]:
    gpus = [device for device in devices if device.vendor != "cpu"]
    if not gpus and _amd_gpus():
        return  # said of AMD GPUs
    if tools.torch is None:
        yield 'torch is not installed: pip install "heedful[cpu]", or [cuda] with an NVIDIA GPU'
    elif not gpus and machine.driver():
        if platform.system() == "Windows":
            yield NO_GPU_ON_WINDOWS
        else:
            yield "there is a GPU driver, but torch sees no GPU: is this torch's CPU build?"
    elif gpus and tools.triton is None:
        yield TRITON_HELPS
    elif any(gpu.arch == "sm_90" for gpu in gpus) and (tools.triton or ()) < (3, 9):
        yield TOOLCHAIN_HELPS


def _untested(versions: dict[str, str | None]) -> Iterator[str]:
    """The message about versions outside of those that heedful was tested with."""
    for name, (oldest, newest) in TESTED.items():
        installed = numbers(versions[name] or "")[: len(newest)]
        if installed and not oldest <= installed <= newest:
            words = " to ".join(".".join(map(str, version)) for version in (oldest, newest))
            yield _outside(name, versions[name], words)
