"""Compiling lists of problems into packs, in parallel, for any targets, with no GPU."""

import math
import multiprocessing
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from heedful.core.base import installed
from heedful.core.base.device import DeviceSpec
from heedful.core.planning.plan import Plan, plan
from heedful.core.registry.capability import Toolchain
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.identity import kernel_key
from heedful.launch.code.manifest import WheelFacts
from heedful.launch.code.packs import write_pack
from heedful.launch.driver.cuda import cuda_of
from heedful.launch.program.programs import program, step
from heedful.launch.record import Entry
from heedful.launch.spec import KernelCall, Program
from heedful.launch.worker.pool import at_once


def compiling() -> Toolchain:
    """The newest versions of everything but Triton, whose version is the one that compiles here."""
    compiler = installed.compiler()
    return Toolchain(triton=compiler.numbers) if compiler else Toolchain()


def kernels(
    entries: Iterable[Entry], devices: Iterable[DeviceSpec], backend: str | None = None
) -> tuple[dict[str, tuple[KernelCall, str]], set[str]]:
    """Kernel key -> (call, arch) of every distinct kernel that the entries need on the devices,
    and `Variant.packed_as` of what they belong to.

    An entry that was recorded on a device of the same architecture is planned for that device.
    Raises ValueError where no kernel can run an entry.
    """
    wanted, packed = {}, set()
    for device in devices:
        for entry in entries:
            seen = entry.device
            exact = seen if seen is not None and seen.arch == device.arch else device
            needs_grad = entry.problem.needs_grad or entry.direction == "backward"
            chosen = plan(
                replace(entry.problem, needs_grad=needs_grad), exact, compiling(), backend
            )
            direction = "backward" if entry.direction == "backward" else "forward"
            kernel = chosen.variant_of(direction)
            if not kernel.program:
                raise ValueError(
                    f"[{entry.problem.key()}] runs on {kernel.backend!r} on {device.name}:"
                    " nothing to compile"
                )
            packed.add(kernel.packed_as)
            for call in program_of(chosen, entry).calls:
                wanted[kernel_key(call, device.arch)] = (call, device.arch)
    return wanted, packed


def program_of(chosen: Plan, entry: Entry) -> Program:
    """The calls of a planned entry."""
    if entry.direction != "step":
        return program(chosen, entry.direction, entry.buffers)
    assert entry.buffers is not None
    return step(chosen, entry.buffers, **entry.options)


def compile_all(
    calls: list[tuple[KernelCall, str]],
    jobs: int,
    seconds: float = math.inf,
    done: Callable[[KernelCall, str, Artifact], None] = lambda call, arch, artifact: None,
) -> int:
    """Compiles kernels into this user's cache, so many at once; returns how many are done. Those
    that are there already are not compiled again, so that a build goes on where one has ended.

    seconds: after which none is begun. done is called with each kernel. Raises what the compiler
    raises.
    """
    until, count = time.monotonic() + seconds, 0
    with closing(_compiled(dict(enumerate(calls)), jobs)) as compiled:
        for number, artifact in compiled:
            call, arch = calls[number]
            done(call, arch, artifact)
            count += 1
            if time.monotonic() > until:
                break
    return count


def prebuild(
    entries: list[Entry],
    devices: list[DeviceSpec],
    folder: Path,
    jobs: int,
    backend: str | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
    wheel: WheelFacts | None = None,
) -> int:
    """Compiles all kernels of the entries for the devices into a pack; returns how many.

    progress is called with (kernels done, kernels in all, the last one's name). wheel: if the pack
    is that of a wheel, which holds machine code alone. Raises what the compiler raises, ValueError
    for a kernel that needs a newer CUDA than the wheel says, and writes no manifest then.
    """
    wanted, backends = kernels(entries, devices, backend)
    made: dict[str, Artifact] = {}
    for key, artifact in _compiled(wanted, jobs):
        made[key] = artifact if wheel is None else _for_wheel(artifact, wheel)
        progress(len(made), len(wanted), wanted[key][0].kernel.function)
    compiler = installed.compiler()
    versions = dict.fromkeys(backends, compiler.version if compiler else "")
    write_pack(folder, made, versions, wheel)
    return len(made)


def _for_wheel(artifact: Artifact, wheel: WheelFacts) -> Artifact:
    """Without its text. Raises ValueError if the wheel's drivers do not load it."""
    needed = cuda_of(artifact.code)
    if needed is None or needed > wheel.cuda:
        raise ValueError(
            f"{artifact.symbol}, made by {artifact.toolchain}, needs a driver of CUDA {needed},"
            f" the wheel is for CUDA {wheel.cuda}"
        )
    return replace(artifact, text="")


def _compiled(
    wanted: Mapping[Any, tuple[KernelCall, str]], jobs: int
) -> Generator[tuple[Any, Artifact]]:
    """Kernels by their keys, as they are done."""
    chosen, count = installed.compiler(), max(1, min(jobs, len(wanted)))
    with ExitStack() as stack:
        if chosen is not None and chosen.apart:
            # Threads that wait for workers.
            stack.enter_context(at_once(count))
            pool = stack.enter_context(ThreadPoolExecutor(count))
        else:
            # spawn: a forked copy of a process with threads or a GPU context is not safe to
            # compile in.
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(count, mp_context=context))
        waiting = {pool.submit(_compile, *item): key for key, item in wanted.items()}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            # After an error, or where nobody waits any more: the pool waits for what has begun.
            for future in waiting:
                future.cancel()


def _compile(call: KernelCall, arch: str) -> Artifact:
    from heedful.launch.compiler import artifact

    return artifact(call, arch)
