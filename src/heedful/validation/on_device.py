"""The emulator's clock held against a real AMD GPU: micro-kernels and benches beside what was
predicted, with clocks and power while they ran."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np
import torch

from heedful.bench.harness.cases import Case
from heedful.bench.harness.peers import chosen_by
from heedful.bench.harness.run import Outcome
from heedful.core.planning.plan import plan
from heedful.launch.program.bound import ProgramKind, numbers_of
from heedful.launch.spec import KernelCall, Program
from heedful.torch.base.device import device_spec, toolchain
from heedful.validation import micro, sensors
from heedful.validation.predicted import predicted

# Launches of a micro-kernel that are timed together: a tenth of a second, for the clock to settle.
_LAUNCHES = 40
# Workgroups that the emulator runs of a launch whose workgroups are unequal.
_UNEQUAL = 6


def has_clock(device: torch.device) -> bool:
    """Whether there is a clock for this device."""
    return device.type == "cuda" and device_spec(device).arch in micro.ARCHES


def sensor_folder(device: torch.device):
    """Where the device's sensors are, or None."""
    p = torch.cuda.get_device_properties(device)
    address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    return sensors.folder(address)


def facts(device: torch.device) -> dict:
    """ROCm's version, torch's HIP, the power limit, and the clock's numbers with their sources."""
    place = sensor_folder(device)
    return {
        "rocm": sensors.rocm_version(),
        "hip": torch.version.hip,
        "power_cap_w": None if place is None else sensors.cap_w(place),
        "clock": micro.sources(device_spec(device).arch),
    }


def count(device: torch.device) -> int:
    """How many micro-kernels there are for this device."""
    return len(micro.probes(device_spec(device).arch))


def micro_kernels(device: torch.device) -> Iterator[dict]:
    """Every micro-kernel: what was predicted, what was measured, or what it raised."""
    spec = device_spec(device)
    place, launch = sensor_folder(device), launcher(device, spec.arch)
    for probe in micro.probes(spec.arch):
        record = {"name": probe.name, "words": probe.words, "unit": probe.unit}
        try:
            iterations = micro.rounds(probe, spec.arch)
            told = micro.predicted(probe, spec.arch, spec.units, iterations)
            record |= {"rounds": iterations, "predicted": asdict(told)}
            with sensors.sampled(place) as samples:
                seen = micro.measured(probe, spec.units, iterations, launch)
            record |= {"measured": asdict(seen), "samples": sensors.summary(samples)}
        except Exception as error:  # whatever one raises, the others still run
            record["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield record


def launcher(device: torch.device, arch: str) -> Callable[[KernelCall], tuple[float, np.ndarray]]:
    """A function that launches a call with one buffer several times and returns the seconds of one
    launch, and the buffer after the last."""

    def launch(call: KernelCall) -> tuple[float, np.ndarray]:
        count = micro.elements(call)
        out = torch.zeros(count, dtype=torch.int32, device=device)
        numbers = numbers_of(call)
        kind = ProgramKind(Program((call,)), arch, device.index or 0, ["out"], [numbers])
        run = kind.bind(numbers)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            run([out.data_ptr()], stream)
            begin.record()
            for _ in range(_LAUNCHES):
                run([out.data_ptr()], stream)
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3 / _LAUNCHES, out.cpu().numpy()

    return launch


def predictions(outcome: Outcome, device: torch.device) -> Iterator[dict]:
    """By heedful's figure of a bench: the predicted time beside it, or why there is none."""
    for figure in outcome.figures:
        if not figure.peer.startswith("heedful") or figure.time_us is None:
            continue
        measured = figure.time_us.median
        record = {"case": outcome.case.name, "peer": figure.peer, "measured_us": measured}
        try:
            record |= _prediction(outcome.case, figure.peer, device)
        except Exception as error:
            record["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield record


def _prediction(case: Case, peer: str, device: torch.device) -> dict:
    chosen = plan(case.problem, device_spec(device), toolchain(device), chosen_by(peer))
    count = _UNEQUAL if case.problem.mask.bounded else 1
    told = predicted(chosen, case.direction, workgroups=count)
    us = {f"predicted_{name}us": 1e6 * getattr(told, key) for name, key in _BOUNDS.items()}
    return {**us, "launches": [{"kernel": n, **p.facts()} for n, p in told.launches]}


_BOUNDS = {"": "seconds", "low_": "low", "high_": "high"}
