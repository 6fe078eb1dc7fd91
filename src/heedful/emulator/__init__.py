"""Executes the CDNA3/CDNA4 (gfx942, gfx950) assembly that Triton emits, on the CPU, and finds what
silicon hides.

    report = emulate(kernel, grid=(4, 2), args=[q, k, v, out, 1024, 0.125])
    assert report.clean, report.summary()

Besides results it finds registers used before their s_waitcnt, races in LDS (DMA in flight too)
and in global memory, uninitialised LDS and registers, accesses out of bounds, missing wait states,
barriers that only some waves meet, and results that depend on the order of the waves:

    emulate(kernel, grid, args, schedule=["lockstep", "delay:each", "random:0-9"])

How long a launch would take is a prediction, from some of its workgroups:

    prediction, report = predict_time(kernel, grid, args)
    print(prediction.summary())
"""

from heedful.emulator.arguments import At
from heedful.emulator.clock.launch import predict_time
from heedful.emulator.launch import decode, emulate
from heedful.emulator.machine.schedule import Delay, Random, RoundRobin, Schedule
from heedful.emulator.objects.disassembly import load_object
from heedful.emulator.program.asm import AsmError
from heedful.emulator.report import KINDS, Finding, Report
from heedful.emulator.semantics import Unsupported

__all__ = [
    "KINDS",
    "AsmError",
    "At",
    "Delay",
    "Finding",
    "Random",
    "Report",
    "RoundRobin",
    "Schedule",
    "Unsupported",
    "decode",
    "emulate",
    "load_object",
    "predict_time",
]
