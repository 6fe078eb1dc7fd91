"""What a problem would launch, by planning alone: tests draw problems that share few kernels, which
compile for longer than they run."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from heedful.core.base.device import DeviceSpec, by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.capability import Toolchain
from heedful.launch.code.identity import kernel_key
from heedful.launch.program.programs import program
from heedful.torch.base.device import device_spec, toolchain
from support.problems.cases import FRESH, Case, build

# How many cases say which kernels most have, and how many kernels may be more than a case has.
_ASKED, _MOST = 24, 4
KernelsOf = Callable[[AttentionProblem], frozenset[str]]


def machine() -> tuple[DeviceSpec, Toolchain]:
    """The GPU here and its tools, or one that is known and the newest ones."""
    if not torch.cuda.is_available():
        return by_name("H200"), Toolchain()
    device = torch.device("cuda")
    return device_spec(device), toolchain(device)


def kernels_by(backend: str) -> KernelsOf:
    """By a backend that is asked for: the keys of the kernels of a problem, of both directions if
    it has gradients."""
    device, tools = machine()

    def kernels(problem: AttentionProblem) -> frozenset[str]:
        # The budget reads the log-sum-exp of every case.
        chosen = plan(replace(problem, return_lse=True), device, tools, backend)
        directions = ("forward", "backward")[: 1 + problem.needs_grad]
        calls = [call for name in directions for call in program(chosen, name).calls]
        return frozenset(kernel_key(call, device.arch) for call in calls)

    return kernels


def commonest(
    problems: Iterable[AttentionProblem], kernels: KernelsOf, most: int = 0
) -> frozenset[str]:
    """The kernels that most of the problems have, of equally many the first; and those that the
    next most have, as long as there are no more than `most`."""
    own, *others = (some for some, _ in Counter(map(kernels, problems)).most_common())
    for some in others:
        own |= some if len(own | some) <= most else own
    return own


def sharing(draw: Callable[[random.Random], Case], backend: str, seed: str) -> Iterator[Case]:
    """Cases without end that launch no kernel but the few that most of the first ones have."""
    rng, kernels = random.Random(f"{seed}{FRESH}"), kernels_by(backend)
    own = commonest((build(draw(rng)).problem for _ in range(_ASKED)), kernels, _MOST)
    while True:
        case = draw(rng)
        if kernels(build(case).problem) <= own:
            yield case
