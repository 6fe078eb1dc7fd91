"""Training with heedful beside training with the kernels of PyTorch's SDPA.

    python -m heedful.bench.training [STEPS [SEED ...]]

A GPT of 12 layers learns the text of `heedful demo` from the same weights with each attention, one
step each in turn. Times are those of whole steps, with the host's part, all layers and the
optimizer. The distance between the losses of SDPA's FlashAttention-2 and of its cuDNN measures the
noise. It differs from seed to seed: several seeds are trained one after the other, and their
results combined.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from heedful.bench.harness import script
from heedful.demo import attention, text, training
from heedful.demo.agreement import Distance, differences
from heedful.demo.model import ModelSize
from heedful.demo.training import Recipe, Run

RECIPE = Recipe(ModelSize(12, 8, 128, 8192, heads_k=2), 1, 300, 6e-4, torch.bfloat16, None)
ROUNDS = 10
# The first steps compile.
WARM_UP = 5
OURS, CUDNN, FLASH = "heedful", "cudnn", "flash"


class Ratio(NamedTuple):
    """The ratio of the median steps of two runs: over all rounds, and of the round where it is
    least."""

    median: float
    least: float


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> Ratio:
    """The speed of `ours` over that of `theirs`, from seconds of steps taken in turn. Raises
    ValueError where there are fewer steps than rounds."""
    least, counts = WARM_UP + ROUNDS, (len(theirs), len(ours))
    if min(counts) < least or len(set(counts)) > 1:
        raise ValueError(f"want as many steps of both, at least {least}; got {counts}")
    steps = len(ours) - WARM_UP
    edges = [WARM_UP + steps * i // ROUNDS for i in range(ROUNDS + 1)]
    rounds = [
        statistics.median(theirs[a:b]) / statistics.median(ours[a:b])
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return Ratio(statistics.median(rounds), min(rounds))


def strayed(one: Run, other: Run) -> Distance:
    """How far the losses of two runs are apart."""
    return Distance.over(differences(one.losses, other.losses))


def main(words: Sequence[str] = ()) -> None:
    """words: STEPS and seeds, as on the command line."""
    (steps,) = script.numbers(words[:1], "STEPS") or [RECIPE.steps]
    seeds = script.numbers(words[1:], "SEED", least=0)
    source, apart = text.load(), []
    for seed in seeds or [RECIPE.seed]:
        recipe = replace(RECIPE, steps=steps, seed=seed)
        runs = trained(recipe, source)
        report(recipe, runs)
        apart.append({name: strayed(run, runs[CUDNN]) for name, run in runs.items()})
    if len(apart) > 1:
        report_together(apart)


def trained(recipe: Recipe, source: text.Text) -> dict[str, Run]:
    """A run of each attention, after all steps."""
    device = script.current_gpu()
    attentions = {
        OURS: attention.with_heedful(recipe.backend),
        CUDNN: attention.with_backend(SDPBackend.CUDNN_ATTENTION),
        FLASH: attention.with_backend(SDPBackend.FLASH_ATTENTION),
    }
    runs = training.start(recipe, len(source.vocabulary), attentions, {}, device)
    for _ in training.train(recipe, source, runs, device):
        pass
    return runs


def report(recipe: Recipe, runs: dict[str, Run]) -> None:
    """Prints the speed of each run, and how far its losses are from those with cuDNN."""
    for name, run in runs.items():
        faster = ratio(run.seconds, runs[OURS].seconds)
        apart = strayed(run, runs[CUDNN])
        ended = run.losses[-1] if math.isfinite(run.losses[-1]) else math.nan
        script.say(
            f"{name}: {run.tokens_per_s(recipe):,.0f} tokens/s,"
            f" heedful {faster.median:.3f} times as fast (least round {faster.least:.3f});"
            f" loss {ended:.4f}, from cuDNN's at most {apart.largest:.2e}, RMS {apart.rms:.2e}"
        )


def report_together(apart: Sequence[dict[str, Distance]]) -> None:
    """Prints how far the losses of each run are from cuDNN's over all seeds."""
    for name in (OURS, FLASH):
        of_seeds = [distances[name] for distances in apart]
        largest = max(distance.largest for distance in of_seeds)
        rms = math.sqrt(statistics.fmean(distance.rms**2 for distance in of_seeds))
        seeds = f"{name}, {len(of_seeds)} seeds"
        script.say(f"{seeds}: from cuDNN's loss at most {largest:.2e}, RMS {rms:.2e}")


if __name__ == "__main__":
    script.run(lambda: main(sys.argv[1:]), __doc__)
