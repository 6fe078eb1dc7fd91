"""The portable kernels, as compiled for CDNA3 and CDNA4, compute attention within the error budget
and without a finding. Every feature of them: test_portable_grid."""

import time
from dataclasses import replace

import pytest

from emulated.helpers.backend import TARGETS, Emulated
from emulated.helpers.compiled import Launch, names
from heedful.emulator import decode
from support.problems.budget import run
from support.problems.cases import Case
from support.problems.grids import in_turns

# Longer than one tile of queries and two of keys, and a multiple of nothing.
BASE = Case(
    batch=1,
    seqlen_q=75,
    seqlen_k=147,
    heads_q=2,
    heads_k=1,
    head_dim=64,
    dtype="bfloat16",
    backward=False,
)
COMBINED = [
    replace(BASE, varlen="qk", used="qk", batch=3, causal=True),
    replace(BASE, page_size=16, tree_mask=True, seqlen_q=9),
    replace(BASE, kv_batch_idx=True, leftpad_k=True, batch=2),
]
TRAINING = replace(BASE, backward=True, head_dim=32, causal=True)
SCHEDULES = ("lockstep", "round-robin", "delay:each", "delay:halves", "random:0-9")


FORWARDS = [BASE, replace(BASE, causal=True, dtype="float16"), *COMBINED]


@pytest.mark.parametrize("case, arch", in_turns(FORWARDS, TARGETS, each=2), ids=str)
def test_forward_is_within_budget(arch, case):
    run(Emulated(arch), case)


# The grid of portable cases has a backward of each target by default.
@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.slow)])
def test_backward_is_within_budget(arch):
    run(Emulated(arch), TRAINING)


@pytest.mark.parametrize("name", names())
def test_every_schedule_gives_the_same_bits_without_a_finding(name):
    launch = Launch(name)
    code = decode(launch.artifact.text)
    outcome = launch.run(code, SCHEDULES)
    assert outcome.report.clean, outcome.report.summary()


@pytest.mark.parametrize("name", names()[:2])
def test_the_emulator_does_300_000_wave_instructions_a_second(name):
    """On an attention launch, every check on; processor time, best of three."""
    launch = Launch(name, seqlen_q=256, seqlen_k=512, heads_q=4, heads_k=4)
    code = decode(launch.artifact.text)
    launch.run(code)
    rates = []
    for _ in range(3):
        start = time.process_time()
        report = launch.run(code).report
        rates.append(report.instructions / (time.process_time() - start))
    assert max(rates) > 300_000
