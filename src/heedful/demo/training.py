"""Several models trained side by side: from the same weights, on the same batches, one step each in
turn, so that nothing but their attention differs and their times are taken interleaved."""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from heedful.demo.model import GPT, Attend, ModelSize
from heedful.demo.text import Text, batch


@dataclass(frozen=True)
class Recipe:
    """The model that is trained, and how. dtype: what the model computes in; its weights are
    float32. seed: of the first weights, the batches and what is sampled."""

    size: ModelSize
    batch: int
    steps: int
    peak_rate: float
    dtype: torch.dtype
    backend: str | None
    seed: int = 1

    @property
    def tokens_a_step(self) -> int:
        return self.batch * self.size.context

    def rate(self, step: int) -> float:
        """Learning rate: linear up over a tenth of the steps, then a half cosine down to 0."""
        up = max(1, self.steps // 10)
        if step < up:
            return self.peak_rate * (step + 1) / up
        return self.peak_rate * 0.5 * (1 + math.cos(math.pi * (step - up) / (self.steps - up)))


# heedful's own tiled kernels do a CPU's attention, also where the planner would choose SDPA.
ON_CPU = Recipe(ModelSize(3, 4, 32, 128), 8, 400, 2e-3, torch.float32, "cpu")
ON_GPU = Recipe(ModelSize(8, 8, 64, 1024), 16, 400, 1e-3, torch.bfloat16, None)


@dataclass
class Run:
    """One model in training. losses: nats a character, by step; seconds: of each step.
    control: after each step its weights are rounded once more, up or down by chance."""

    name: str
    model: GPT
    attend: Attend
    optimizer: torch.optim.Optimizer
    control: bool = False
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def tokens_per_s(self, recipe: Recipe) -> float:
        """By the median step: the first ones compile, and neighbours come and go."""
        return recipe.tokens_a_step / sorted(self.seconds)[len(self.seconds) // 2]


def start(
    recipe: Recipe,
    vocabulary: int,
    attentions: dict[str, Attend],
    controls: dict[str, Attend],
    device: torch.device,
) -> dict[str, Run]:
    """A run for each attention, all from the same weights; those of the controls are off by one
    rounding of the dtype."""
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.size, vocabulary).to(device)
    runs = {}
    for name, attend in {**attentions, **controls}.items():
        copied = copy.deepcopy(model)
        if name in controls:
            _off_by_a_rounding(copied, recipe.dtype)
        runs[name] = Run(name, copied, attend, _optimizer(copied), name in controls)
    return runs


def _optimizer(model: GPT) -> torch.optim.Optimizer:
    # A larger eps than usual: a weight whose gradient is nothing but rounding must not be moved a
    # whole step by its sign, or runs drift apart that differ in a last bit.
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)


@torch.no_grad()
def _off_by_a_rounding(model: GPT, dtype: torch.dtype) -> None:
    """Moves every weight by what one rounding to `dtype` may cost, up or down by chance; at least
    to the next float32."""
    half_eps = torch.finfo(dtype).eps / 2
    for weight in model.parameters():
        up = 2.0 * torch.randint_like(weight, 2) - 1
        neighbour = torch.nextafter(weight, up * math.inf)
        weight.copy_(neighbour if dtype == torch.float32 else weight * (1 + half_eps * up))


def train(recipe: Recipe, text: Text, runs: dict[str, Run], device: torch.device) -> Iterator[int]:
    """Trains all runs, yielding the number of steps done after each."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.steps):
        tokens, targets = batch(text.train, recipe.batch, recipe.size.context, generator)
        tokens, targets = tokens.to(device), targets.to(device)
        for run in runs.values():
            _step(recipe, run, step, tokens, targets, device)
        yield step + 1


def _step(recipe: Recipe, run: Run, step: int, tokens, targets, device: torch.device) -> None:
    _synchronize(device)
    begin = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    with torch.autocast(device.type, recipe.dtype, enabled=recipe.dtype != torch.float32):
        losses = run.model.losses(tokens, targets, run.attend)
    losses.mean().backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    _synchronize(device)
    run.seconds.append(time.perf_counter() - begin)
    run.losses.append(_mean(losses))
    if run.control:
        _off_by_a_rounding(run.model, torch.float32)


@torch.no_grad()
def held_out_loss(recipe: Recipe, text: Text, run: Run, device: torch.device) -> float:
    """Nats a character on text that was not trained on, over eight batches."""
    generator = torch.Generator().manual_seed(recipe.seed)
    losses = []
    for _ in range(8):
        tokens, targets = batch(text.held_out, recipe.batch, recipe.size.context, generator)
        with torch.autocast(device.type, recipe.dtype, enabled=recipe.dtype != torch.float32):
            of_batch = run.model.losses(tokens.to(device), targets.to(device), run.attend)
        losses.append(_mean(of_batch))
    return sum(losses) / len(losses)


def _mean(losses: torch.Tensor) -> float:
    """In float64: rounding the mean to float32 would hide how far apart two runs are."""
    return losses.detach().double().mean().item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
