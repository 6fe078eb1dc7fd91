"""What runs in a process that has the installed wheels and no checkout: inside.py keys|models ...

`tries.py` starts it. It has no checkout on its path, so heedful is the wheel's.
"""

import importlib
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# As `build.py` plans the kernels.
DEVICES = ("H200", "H100")
# Differences that are told.
TOLD = 10


def say(words: str) -> None:
    sys.stdout.write(f"kernels: {words}\n")
    sys.stdout.flush()


@dataclass
class Found:
    """What planning here and planning for the wheel's Triton gave. absent: kernels that the wheel
    lacks."""

    told: Counter[str] = field(default_factory=Counter)
    absent: set[str] = field(default_factory=set)

    @property
    def good(self) -> bool:
        return self.told["equal"] == self.told["problems"] > 0 and not self.absent

    def add(self, entry: Any, device: Any, here: Any) -> None:
        """Plans an entry for the Triton here and the wheel, and for the wheel's Triton alone."""
        from heedful.core.planning.plan import plan
        from heedful.core.registry.capability import Toolchain
        from heedful.launch import prebuild
        from heedful.launch.code import packs
        from heedful.launch.code.identity import kernel_key
        from heedful.launch.program.programs import runnable

        backward = entry.direction == "backward"
        problem = replace(entry.problem, needs_grad=entry.problem.needs_grad or backward)
        direction = "backward" if backward else "forward"

        def made(chosen: Any) -> Any:
            return prebuild.program_of(chosen, entry)

        wanted = plan(problem, device, Toolchain())
        variant = wanted.variant_of(direction)
        keys = [kernel_key(call, device.arch) for call in made(wanted).calls]
        self.absent |= {key for key in keys if not packs.has(key)}
        try:
            chosen, program = runnable(plan(problem, device, here), direction, made)
        except ValueError as error:
            equal, words = False, str(error)
        else:
            equal = keys == [kernel_key(call, device.arch) for call in program.calls]
            equal &= chosen.variant_of(direction) == variant
            words = chosen.variant_of(direction).label
        self.told["problems"] += 1
        self.told["equal"] += equal
        if not equal and self.told["problems"] - self.told["equal"] < TOLD:
            say(f"{entry.direction} {problem.key()}: {variant.label} is {words}")


def toolchain() -> tuple[Any, str]:
    """The Triton here with the wheel, and words for it. Raises RuntimeError where heedful is not
    an installed one, or there is no wheel of kernels."""
    import heedful
    from heedful.core.base import installed
    from heedful.core.registry.capability import Toolchain
    from heedful.launch.code import packs, wheels

    if ROOT in Path(heedful.__file__).parents:
        raise RuntimeError(f"heedful is the checkout's: {heedful.__file__}")
    compiler, wheel = installed.compiler(), wheels.current()
    if wheel is None:
        raise RuntimeError("no wheel of kernels is found")
    words = compiler.words() if compiler else "no Triton"
    here = Toolchain(compiler.numbers if compiler else (), packs=packs.backends("sm_90"))
    return here, f"{len(wheel.manifest.digests)} kernels; {words}"


def keys() -> bool:
    """If every listed problem is planned as the wheel's compiler plans it, and every other as the
    Triton here does without the wheel."""
    from heedful.core.base.device import by_name

    here, words = toolchain()
    # It puts the checkout first, and heedful's other modules are to be the wheel's.
    problems = importlib.import_module("problems")
    entries, found = problems.entries(), Found()
    for name in DEVICES:
        for entry in entries:
            found.add(entry, by_name(name), here)
    say(f"{dict(found.told)} of {words}; {len(found.absent)} not in the wheel")
    count, wrong = unlisted(problems.UNLISTED, here) if here.triton else (0, 0)
    say(f"{count} directions of other problems, {wrong} not as without the wheel")
    return found.good and not wrong


def unlisted(problems: list[Any], here: Any) -> tuple[int, int]:
    """How many directions of problems whose kernels the wheel lacks were planned, and how many are
    not what the Triton here plans without the wheel."""
    from heedful.core.base.device import by_name
    from heedful.core.planning.plan import plan
    from heedful.launch.program.programs import program, runnable

    count = wrong = 0
    alone = replace(here, packs=frozenset())
    for problem in problems:
        for direction in ("forward", "backward")[: 1 + problem.needs_grad]:

            def made(chosen: Any, direction: str = direction) -> Any:
                return program(chosen, direction)

            device = by_name(DEVICES[0])
            wanted = plan(problem, device, alone)
            chosen, _ = runnable(plan(problem, device, here), direction, made)
            count += 1
            if chosen.variant_of(direction) != wanted.variant_of(direction):
                wrong += 1
                say(f"{direction} {problem.key()} is {chosen.variant_of(direction).label}")
    return count, wrong


def models(*words: str) -> bool:
    """A GPU: models as Llama and gpt-oss have them train, prefill and generate by transformers. If
    nothing is compiled, all is planned as the wheel's compiler plans it, and results are right.
    words: only jobs whose line has one of them; all jobs without."""
    import heedful
    from heedful.bench import in_transformers as bench
    from heedful.integrations.transformers import register
    from heedful.launch import record

    here, told = toolchain()
    register(continuous=True)
    found, wrong = Found(), 0
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with heedful.record(file.name):
            for name, model, theirs, jobs in bench.jobs():
                if name == "gpt-oss":
                    jobs += [bench.generation(model, 4, 1000, 8, None)]
                for job in jobs:
                    if words and not any(word in f"{name} {job.name}" for word in words):
                        continue
                    apart = bench.compare(model, theirs, job.run)
                    wrong += apart > bench.MOST_APART and not job.name.startswith("generate")
                    say(f"{name} {job.name}: {apart:.0e} apart, {dict(heedful.counters)}")
        for entry in record.load(file.name):
            found.add(entry, entry.device, here)
    say(f"{dict(found.told)} of {told}; {len(found.absent)} not in the wheel")
    return found.good and not wrong and not heedful.counters.get("compiles", 0)


if __name__ == "__main__":
    sys.exit(not {"keys": keys, "models": models}[sys.argv[1]](*sys.argv[2:]))
