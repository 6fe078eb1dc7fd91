"""Models of transformers with heedful beside the same models with transformers' own attention.

    python -m heedful.bench.in_transformers [WORDS]

Random weights, bfloat16, on a GPU; needs no network. A model of 1B as Llama has it trains, prefills
and generates with `sdpa` and with `heedful` in turn; one as gpt-oss has it, with sinks and windows,
with `eager`, the only one of transformers' own that knows sinks. WORDS: only jobs whose line has
them. Each result is compared first: a job that is wrong has no figure.

A ratio is the time of transformers' own attention over that with heedful.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from heedful.bench.harness import script
from heedful.integrations.transformers import paths, register, reset_paths

ROUNDS = 5
OURS = "heedful"
DEVICE = "cuda"
# How far results of two attentions in bfloat16 may be apart, over their size.
MOST_APART = 0.05
VOCABULARY = 32000
# By line of the table the least ratio that is asked for on an H200.
BARS = {
    "D64 32/8 train 1 x 8192": 1.075,
    "D64 32/8 prefill 1 x 32768": 1.139,
    "D64 32/8 padded prefill 8 x 2048": 1.24,
    "D64 32/8 generate 16 x (4096 + 32)": 1.0,
    "D64 32/8 generate, static cache": 1.1,
    "D128 16/4 train 1 x 8192": 1.063,
    "D128 16/4 prefill 1 x 32768": 1.076,
    "D128 16/4 padded prefill 8 x 2048": 1.20,
    "D128 16/4 generate 16 x (4096 + 32)": 1.0,
    "D128 16/4 generate, static cache": 1.1,
    "gpt-oss train 1 x 4096": 1.3,
    "gpt-oss prefill 1 x 4096": 1.3,
}


class Job(NamedTuple):
    """A kind of work. run: does it once and returns what can be compared, float of any shape."""

    name: str
    run: Callable[[], Tensor]


def llama(heads: int, heads_k: int, head_dim: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=heads,
        num_key_value_heads=heads_k,
        head_dim=head_dim,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    )
    return on_gpu(transformers.LlamaForCausalLM(config))


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = on_gpu(transformers.GptOssForCausalLM(config))
    for name, parameter in model.named_parameters():
        if "sinks" in name or "experts" in name:
            torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.02)
    return model


def on_gpu(model: Any) -> Any:
    return model.to(DEVICE, torch.bfloat16).eval()


def tokens(*shape: int) -> Tensor:
    drawn = torch.Generator(DEVICE).manual_seed(1)
    return torch.randint(1, VOCABULARY, shape, generator=drawn, device=DEVICE)


def training(model: Any, length: int) -> Job:
    ids = tokens(1, length)

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return torch.stack([loss.detach().float(), model.model.embed_tokens.weight.grad.norm()])

    return Job(f"train 1 x {length}", run)


@torch.no_grad()
def prefill(model: Any, length: int) -> Job:
    ids = tokens(1, length)

    @torch.no_grad()
    def run() -> Tensor:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float()

    return Job(f"prefill 1 x {length}", run)


def padded_prefill(model: Any, batch: int, length: int) -> Job:
    ids = tokens(batch, length)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : length * row // (batch + 2)] = 0

    @torch.no_grad()
    def run() -> Tensor:
        out = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
        return out.logits.float()

    return Job(f"padded prefill {batch} x {length}", run)


def generation(model: Any, batch: int, length: int, new: int, cache: str | None) -> Job:
    ids = tokens(batch, length)
    mask = torch.ones_like(ids)
    options = {"cache_implementation": cache, "disable_compile": True} if cache else {}

    def run() -> Tensor:
        arguments = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **options}
        out = model.generate(ids, attention_mask=mask, pad_token_id=0, **arguments)
        # Later tokens follow from the first ones: one that rounding changed would change all.
        return out[:, length : length + 1].float()

    name = f"generate, {cache} cache" if cache else f"generate {batch} x ({length} + {new})"
    return Job(name, run)


def continuous(model: Any, batch: int, length: int, new: int) -> Job:
    """Continuous batching, over pages where the attention serves them."""
    prompts = tokens(batch, length).tolist()

    def run() -> Tensor:
        config = transformers.GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers = model.generate_batch(prompts, generation_config=config).values()
        first = {tuple(each.prompt_ids): each.generated_tokens[:1] for each in answers}
        return torch.tensor([first[tuple(prompt)] for prompt in prompts], device=DEVICE).float()

    return Job("generate, continuous batching", run)


def jobs() -> Iterator[tuple[str, Any, str, list[Job]]]:
    """By model its name, itself, transformers' own attention beside ours, and what it does."""
    for name, shape in (("D64 32/8", (32, 8, 64)), ("D128 16/4", (16, 4, 128))):
        model = llama(*shape)
        yield (
            name,
            model,
            "sdpa",
            [
                training(model, 8192),
                prefill(model, 32768),
                padded_prefill(model, 8, 2048),
                generation(model, 16, 4096, 32, None),
                generation(model, 16, 4096, 32, "static"),
                continuous(model, 16, 4096, 32),
            ],
        )
    model = gpt_oss()
    yield "gpt-oss", model, "eager", [training(model, 4096), prefill(model, 4096)]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], Tensor]) -> float:
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - begin


def compare(model: Any, theirs: str, run: Callable[[], Tensor]) -> float:
    """How far the results of two attentions are apart, over the size of one of them."""
    results = []
    for name in (theirs, OURS):
        model.set_attn_implementation(name)
        results.append(run())
    return float((results[0] - results[1]).norm() / results[0].norm())


def measure(model: Any, theirs: str, job: Job) -> dict[str, list[float]]:
    """Seconds of each attention, one round after the other."""
    taken: dict[str, list[float]] = {theirs: [], OURS: []}
    for round_ in range(ROUNDS + 1):
        for name in taken:
            model.set_attn_implementation(name)
            spent = seconds(job.run)
            if round_:  # The first compiles.
                taken[name].append(spent)
    return taken


def line(model_name: str, model: Any, theirs: str, job: Job) -> str:
    """A row of the table, or why there is none."""
    full = f"{model_name} {job.name}"
    reset_paths()
    try:
        apart = compare(model, theirs, job.run)
        taken = measure(model, theirs, job)
    except Exception as error:
        return f"{full:40}  {type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    if apart > MOST_APART and not job.name.startswith("generate"):
        return f"{full:40}  wrong: {apart:.1e} apart"
    medians = {name: statistics.median(times) for name, times in taken.items()}
    ratios = [a / b for a, b in zip(taken[theirs], taken[OURS], strict=True)]
    ratio, bar = medians[theirs] / medians[OURS], BARS.get(full)
    cells = [
        f"{full:40}",
        *(f"{name} {median * 1e3:8.1f} ms" for name, median in medians.items()),
        f"{ratio:.3f} x ({min(ratios):.3f} to {max(ratios):.3f})",
        "" if bar is None else f"bar {bar:.3f} {'met' if ratio >= bar else 'MISSED'}",
        f"apart {apart:.0e}",
        ", ".join(f"{way} {n}" for way, n in sorted(paths().items())),
    ]
    return "  ".join(cell for cell in cells if cell)


def main() -> None:
    words = " ".join(sys.argv[1:])
    device = script.current_gpu()
    register(continuous=True)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    script.say(f"{torch.cuda.get_device_name(device)}, {versions}")
    for name, model, theirs, all_jobs in jobs():
        for job in all_jobs:
            if words in f"{name} {job.name}":
                script.say(line(name, model, theirs, job))
        del model, all_jobs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    script.run(main, __doc__)
