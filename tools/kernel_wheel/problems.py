"""The problems whose kernels are in the wheel: `entries()`, by groups.

It is a list, not a product: the product of all features is some 37,000 kernels. A group says which
calls it is of, over lengths between which plans change: few rows and many, one sequence and a
batch, short and long, multiples of a tile and not.

    python tools/kernel_wheel/problems.py [GROUP ...]    counts kernels, compiles nothing
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "src")]

from heedful.core.base.device import by_name  # noqa: E402
from heedful.core.call.mask import MaskSpec  # noqa: E402
from heedful.core.call.problem import LATENT_ROWS, AttentionProblem  # noqa: E402
from heedful.launch.program import buffers  # noqa: E402
from heedful.launch.record import Entry  # noqa: E402

BF16 = "bfloat16"
FULL, CAUSAL = MaskSpec(), MaskSpec.of(True)
# (batch, tokens): of training and prefill.
TRAINED = (
    *((4, 1024), (2, 4096), (1, 16384), (3, 1000), (16, 512)),
    *((1, 64), (1, 130), (2, 100), (8, 128)),
)
# As before, and short prompts.
PROMPTS = (*TRAINED, *product((1, 8, 64), (3, 10, 20, 40, 71, 124)))
# (batch, tokens in the cache): of decode.
CACHED = (
    *((1, 1024), (1, 8192), (1, 131072), (8, 4096)),
    *((16, 8192), (64, 8192), (256, 2048), (5, 777)),
)
# (batch, longest of its queries, queries of all, longest keys): of engines.
MIXED = (
    *((128, 1, 128, 8192), (128, 2048, 10176, 4096), (64, 512, 575, 65536)),
    *((2, 2048, 2049, 32768), (8, 2048, 9200, 2048), (1, 300, 300, 300), (10, 50, 59, 4096)),
)
GROUPS = ((32, 32), (32, 8), (64, 8))
Facts = dict[str, Any]
_GEMMA: Facts = {"softcap": 50.0}


def windows(*sizes: int) -> list[MaskSpec]:
    return [MaskSpec(size - 1, 0) for size in sizes]


# Heads, dims of keys and values, masks of layers, and what else a call of the model has.
MODELS: tuple[tuple[tuple[int, int], tuple[int, int], list[MaskSpec], Facts], ...] = (
    ((32, 8), (64, 64), [CAUSAL], {}),  # Llama 3.2
    ((32, 8), (128, 128), [CAUSAL, *windows(4096)], {}),  # Llama, Qwen3, Mistral, Mixtral
    ((64, 8), (128, 128), [CAUSAL], {}),  # Llama 70B, Qwen3 32B
    ((14, 2), (64, 64), [CAUSAL], {}),  # Qwen2
    ((16, 4), (128, 128), [CAUSAL], {}),  # SmolLM3
    ((32, 2), (128, 128), [CAUSAL], {}),  # GLM4
    ((32, 32), (128, 128), [CAUSAL], {}),  # OLMo2, GPT-NeoX
    ((32, 32), (96, 96), [CAUSAL, *windows(2047)], {}),  # Phi3
    ((64, 8), (64, 64), [CAUSAL, *windows(128)], {"sink": True}),  # gpt-oss
    ((16, 8), (256, 256), [CAUSAL, *windows(4096)], _GEMMA),  # Gemma 2, 9B
    ((32, 16), (128, 128), [CAUSAL, *windows(4096)], _GEMMA),  # Gemma 2, 27B
    ((8, 4), (256, 256), [CAUSAL, *windows(1024)], {}),  # Gemma 3
    ((128, 128), (192, 128), [CAUSAL], {}),  # DeepSeek V3
    ((12, 12), (64, 64), [CAUSAL, FULL], {}),  # GPT-2; BERT, ViT, Whisper
    ((12, 12), (64, 64), [MaskSpec(64, 64)], {}),  # ModernBERT
)


def dense(lengths: Iterable[tuple[int, int]], heads: tuple[int, int], **facts) -> Iterator[Facts]:
    for batch, tokens in lengths:
        yield {"batch": batch, "seqlen_q": tokens, "seqlen_k": tokens} | _heads(heads) | facts


def packed(lengths: Iterable[tuple[int, int]], heads: tuple[int, int], **facts) -> Iterator[Facts]:
    for one in dense(lengths, heads, **facts):
        total = one["batch"] * one["seqlen_q"]
        yield one | {"total_q": total, "total_k": total}


def cached(new: Iterable[int], heads: tuple[int, int], page_size: int, **facts) -> Iterator[Facts]:
    """Queries over a cache, whose lengths are on the device."""
    for (batch, keys), tokens in product(CACHED, new):
        sizes = {"batch": batch, "seqlen_q": tokens, "seqlen_k": keys, "used_k": True}
        yield sizes | _heads(heads) | {"page_size": page_size} | facts


def _heads(heads: tuple[int, int]) -> Facts:
    return {"heads_q": heads[0], "heads_k": heads[1]}


def _both(facts: Iterable[Facts]) -> Iterator[Entry]:
    """With a gradient and without."""
    for one in facts:
        yield _entry(one)
        for direction in ("forward", "backward"):
            yield _entry(one | {"needs_grad": True}, direction)


def _entry(facts: Facts, direction: str = "forward") -> Entry:
    return Entry(AttentionProblem.dense(**facts), direction)


def _with_and_without_scales(facts: Facts) -> Iterator[Entry]:
    """A call over e4m3. Its scales are left out where all are 1."""
    entry = _entry(facts)
    kept = {n: spec for n, spec in buffers.forward(entry.problem).items() if "descale" not in n}
    yield from (entry, replace(entry, buffers=kept))


def _step(facts: Facts, **appends) -> Entry:
    return Entry.from_json({"problem": _as_json(facts), "direction": "step", "appends": appends})


def _as_json(facts: Facts) -> Facts:
    mask = facts.get("mask", FULL)
    fields = {name: getattr(mask, name) for name in MaskSpec.__dataclass_fields__}
    return facts | {"mask": fields}


def training() -> Iterator[Entry]:
    """Dense and packed, forward and backward."""
    for dim, heads in product((64, 128), GROUPS):
        for mask in (FULL, CAUSAL, *windows(128, 1024)):
            for make in (dense, packed):
                yield from _both(make(TRAINED, heads, head_dim=dim, mask=mask))
    wide = ((96, 96), (32, 32)), ((256, 256), (16, 8)), ((192, 128), (16, 16)), ((192, 192), (8, 8))
    for dims, heads in wide:
        for mask in (FULL, CAUSAL, *windows(4096)):
            for make in (dense, packed):
                facts: Facts = {"head_dim": dims[0], "head_dim_v": dims[1], "mask": mask}
                yield from _both(make(TRAINED, heads, **facts))


def families() -> Iterator[Entry]:
    """Models as transformers trains them, and as it generates, padded or not."""
    for heads, dims, masks, more in MODELS:
        for mask in masks:
            facts: Facts = {"head_dim": dims[0], "head_dim_v": dims[1], "mask": mask, **more}
            for make in (dense, packed):
                yield from _both(make(PROMPTS, heads, **facts))
            yield from map(_entry, _padded(heads, facts))
            if mask.right == 0:
                yield from map(_entry, _generated(heads, facts))
                yield from map(_entry, _continued(heads, facts))
    yield from _of_t5()


def _of_t5() -> Iterator[Entry]:
    """T5: biases by position, as one array of transformers or by distance. With Whisper: queries
    over an encoder's keys."""
    for heads, mask in product(((12, 12), (16, 16), (8, 8)), (FULL, CAUSAL)):
        for name in ("bias", "rel_bias"):
            facts: Facts = {"head_dim": 64, "mask": mask, name: True}
            for one in dense(TRAINED, heads, **facts):
                yield _entry(one)
                learns = one | {"needs_grad": True, f"{name}_grad": True}
                yield from (_entry(learns, direction) for direction in ("forward", "backward"))
            yield from map(_entry, cached((1,), heads, 0, **facts | {"used_k": False}))
        for one in dense(TRAINED, heads, head_dim=64):
            yield from _both([one | {"seqlen_k": keys} for keys in (1500, one["seqlen_q"] * 2)])


def _padded(heads: tuple[int, int], facts: Facts) -> Iterator[Facts]:
    """Rows of padded tokens, or of a static cache, as packed sequences. Padding is one more."""
    for one in dense(TRAINED, heads, **facts, used_q=True, used_k=True):
        batch, tokens = one["batch"], one["seqlen_q"]
        for keys, more in product((tokens, tokens + 128), (0, 1)):
            totals = {"total_q": batch * tokens, "total_k": batch * keys}
            yield one | totals | {"seqlen_k": keys, "batch": batch + more}


def _generated(heads: tuple[int, int], facts: Facts) -> Iterator[Facts]:
    """Prompts and steps: padding on the left is keys that begin later."""
    yield from cached((1,), heads, 0, **facts | {"used_k": False})
    prompts = dense(PROMPTS, heads, **facts, used_k=True)
    for one in (*prompts, *cached((1,), heads, 0, **facts)):
        yield from (one, one | {"leftpad_k": True})


def _continued(heads: tuple[int, int], facts: Facts) -> Iterator[Facts]:
    """Continuous batching whose keys are packed, too, not in pages."""
    chunks = product((1, 2, 16, 64), (1, 4, 8, 24, 106, 239), (25, 300, 4000, 11000))
    even = [(batch, queries, batch * queries, queries + more) for batch, queries, more in chunks]
    for batch, queries, total, keys in (*MIXED, *even):
        totals = {"total_q": total, "total_k": batch * keys}
        yield (
            {"batch": batch, "seqlen_q": queries, "seqlen_k": keys} | totals | _heads(heads) | facts
        )


def deterministic() -> Iterator[Entry]:
    for dim, heads, mask in product((64, 128), GROUPS[:2], (FULL, CAUSAL)):
        for make in (dense, packed):
            for one in make(TRAINED, heads, head_dim=dim, mask=mask):
                yield _entry(one | {"needs_grad": True, "deterministic": True}, "backward")


def masks() -> Iterator[Entry]:
    """Masks as data: ranges of keys, one or two."""
    for dim, ranges, mask in product((64, 128), (1, 2), (FULL, CAUSAL)):
        facts = {"head_dim": dim, "mask": mask, "key_ranges": ranges}
        yield from _both(dense(TRAINED, (32, 8), **facts))


def chunks() -> Iterator[Entry]:
    """Few queries over many keys, all of which the call has: a cache that has no more of them."""
    for dim, heads, tokens in product((64, 128, 256), GROUPS, (1, 4, 128, 512)):
        for mask, one in product((FULL, CAUSAL), cached((tokens,), heads, 0, head_dim=dim)):
            yield _entry(one | {"used_k": False, "mask": mask})


def _as_called(facts: Facts) -> Iterator[Facts]:
    """One new token sees all keys, causal or not: a step may be called either way."""
    yield facts
    if facts["seqlen_q"] == 1:
        yield facts | {"mask": FULL}


def decode() -> Iterator[Entry]:
    """Steps over caches; speculative tokens; prefill into pages."""
    for dim, heads, page in product((64, 128, 256), GROUPS, (0, 16, 64, 256)):
        for one in cached((1, 4, 12, 40, 512), heads, page, head_dim=dim, mask=CAUSAL):
            yield from map(_entry, _as_called(one))
    for one in _of_gpt_oss((1, 512)):
        yield _entry(one)


def prefixed() -> Iterator[Entry]:
    """Steps that share their first keys: their own keys, and all rows over the shared ones."""
    for dim, heads in product((64, 128), GROUPS):
        facts: Facts = {"head_dim": dim, "return_lse": True, "keeps_rest": True}
        for page in (0, 16):
            yield from map(_entry, cached((1,), heads, page, **facts))
        for rows, keys in product((8, 64, 256), (512, 16384)):
            sizes = {"batch": 1, "seqlen_q": rows, "seqlen_k": keys}
            yield _entry(sizes | _heads(heads) | facts)


def mixed() -> Iterator[Entry]:
    """Batches of engines: prompts and steps as packed queries over pages."""
    for dim, heads, page in product((64, 128, 256), GROUPS, (16, 64)):
        for kv in (BF16, "float8_e4m3fn")[: 1 + (dim < 256)]:
            for one in _served(heads, page, head_dim=dim, kv_dtype=kv):
                yield from _with_and_without_scales(one) if kv != BF16 else (_entry(one),)
    for page, mask in product((16, 64), (CAUSAL, *windows(128))):
        facts: Facts = {"head_dim": 64, "mask": mask, "sink": True}
        yield from map(_entry, _served((64, 8), page, **facts))


def _served(heads: tuple[int, int], page: int, **facts) -> Iterator[Facts]:
    for batch, queries, total, keys in MIXED:
        sizes = {"batch": batch, "seqlen_q": queries, "seqlen_k": keys, "total_q": total}
        more = {"used_k": True, "page_size": page}
        yield sizes | more | _heads(heads) | {"mask": CAUSAL} | facts


def invariant() -> Iterator[Entry]:
    """numerics="invariant": training, prompts and steps."""
    for dim, mask in product((64, 128), (FULL, CAUSAL)):
        facts: Facts = {"head_dim": dim, "mask": mask, "invariant": True}
        for make in (dense, packed):
            yield from _both(make(TRAINED, (32, 8), **facts))
        for page in (0, 16, 64):
            yield from map(_entry, cached((1, 512), (32, 8), page, **facts))


def partial() -> Iterator[Entry]:
    """Parts of the keys, whose outputs are float32 and are merged."""
    for dim, mask in product((64, 128), (FULL, CAUSAL)):
        facts: Facts = {"head_dim": dim, "mask": mask, "out_dtype": "float32", "return_lse": True}
        for make in (dense, packed):
            yield from map(_entry, make(TRAINED, (32, 8), **facts))


def appending() -> Iterator[Entry]:
    """Steps that write new keys into the cache first, rotated (by halves or by pairs) or not."""
    for dim, page, tokens in product((64, 128), (0, 16, 64, 256), (1, 512)):
        for one in cached((tokens,), (32, 8), page, head_dim=dim, mask=CAUSAL):
            for called in _as_called(one):
                yield _step(called, tokens=tokens)
                for rotary in ("halves", "pairs"):
                    yield _step(called, tokens=tokens, rotary=rotary)
    for one in _of_gpt_oss((1, 512)):
        yield _step(one, tokens=one["seqlen_q"])


def _of_gpt_oss(new: Iterable[int]) -> Iterator[Facts]:
    for page, mask in product((0, 16, 64), (CAUSAL, *windows(128))):
        yield from cached(new, (64, 8), page, head_dim=64, mask=mask, sink=True)


def quantised() -> Iterator[Entry]:
    for dim, page in product((64, 128), (0, 16, 64)):
        facts: Facts = {"head_dim": dim, "mask": CAUSAL, "kv_dtype": "float8_e4m3fn"}
        for one in cached((1, 4, 512), (32, 8), page, **facts):
            for called in _as_called(one):
                yield from _with_and_without_scales(called)
    for kv, page in product(("int8", "int4", "float8_e4m3fn"), (0, 16)):
        facts = {"head_dim": 128, "mask": CAUSAL, "kv_dtype": kv, "kv_group": 128}
        for one in cached((1,), (32, 8), page, **facts):
            yield from map(_entry, _as_called(one))


def latent() -> Iterator[Entry]:
    """MLA, over latents of 16 bits, e4m3 and FlashMLA's rows."""
    for heads, page, kv in product(
        (16, 32, 64, 128), (0, 64), (BF16, "float8_e4m3fn", LATENT_ROWS)
    ):
        facts: Facts = {"head_dim": 576, "head_dim_v": 512, "v_in_k": True, "kv_dtype": kv}
        for one in cached((1, 2), (heads, 1), page, mask=CAUSAL, **facts):
            yield from map(_entry, _as_called(one))


def fp8() -> Iterator[Entry]:
    for dim, mask, heads in product((64, 128), (FULL, CAUSAL), GROUPS[:2]):
        for one in dense(TRAINED, heads, head_dim=dim, mask=mask, dtype="float8_e4m3fn"):
            yield from _with_and_without_scales(one)


def widest() -> Iterator[Entry]:
    """Head dim 512: training, prompts and steps."""
    for heads, mask in product(((8, 8), (16, 8), (16, 1)), (FULL, CAUSAL)):
        for make in (dense, packed):
            yield from _both(make(TRAINED, heads, head_dim=512, mask=mask))
    for page in (0, 16, 64):
        for one in cached((1, 512), (16, 8), page, head_dim=512, mask=CAUSAL):
            yield from map(_entry, _as_called(one))


def largest() -> Iterator[Entry]:
    """Training that reads the largest score of each head or row, such as QK-clip's."""
    for dims, heads in (((64, 64), (32, 8)), ((128, 128), (32, 8)), ((192, 128), (128, 128))):
        for mask, make in product((FULL, CAUSAL), (dense, packed)):
            facts: Facts = {"head_dim": dims[0], "head_dim_v": dims[1], "mask": mask}
            yield from _both(make(TRAINED, heads, **facts, max_scores=True))


def half() -> Iterator[Entry]:
    """float16: training and decode."""
    dtypes = dict.fromkeys(("dtype", "kv_dtype", "out_dtype"), "float16")
    for entry in (*training(), *decode()):
        yield replace(entry, problem=replace(entry.problem, **dtypes))


ALL = (
    training,
    families,
    deterministic,
    masks,
    chunks,
    decode,
    prefixed,
    mixed,
    invariant,
    partial,
    appending,
    quantised,
    latent,
    fp8,
    widest,
    largest,
    half,
)

# Whose kernels are in no group.
UNLISTED = [
    AttentionProblem.dense(**facts)
    for facts in (
        *dense([(2, 1000)], (8, 8), head_dim=128, alibi=True, needs_grad=True),
        *dense([(2, 1000)], (8, 8), head_dim=64, dropout_p=0.1, needs_grad=True),
        *dense([(2, 1000)], (8, 2), head_dim=128, block_mask=128, needs_grad=True),
        *dense([(1, 300)], (4, 4), head_dim=40, mask=CAUSAL, needs_grad=True),
        *dense([(2, 1000)], (8, 8), head_dim=96, bias=True, bias_grad=True, needs_grad=True),
        *packed([(2, 1000)], (8, 8), head_dim=80, softcap=30.0, needs_grad=True),
        *cached((1, 3), (8, 2), 1, head_dim=128, mask=CAUSAL),
        *cached((5,), (8, 2), 16, head_dim=64, tree_mask=True),
    )
]


def entries(names: Iterable[str] | None = None) -> list[Entry]:
    """The problems of some groups, of all by default. Raises ValueError for an unknown one."""
    groups = {group.__name__: group for group in ALL}
    chosen = [*names] if names else [*groups]
    unknown = sorted(set(chosen) - set(groups))
    if unknown:
        raise ValueError(f"no groups {', '.join(unknown)}: there are {', '.join(groups)}")
    return [entry for name in chosen for entry in groups[name]()]


def count(names: Iterable[str] | None = None) -> None:
    """Prints how many kernels each group has, and how many that no group before has."""
    from heedful.launch.prebuild import kernels

    seen: set[str] = set()
    for group in ALL:
        if names and group.__name__ not in names:
            continue
        keys, _ = kernels(group(), [by_name("H200"), by_name("H100")])
        sys.stdout.write(f"{group.__name__:14} {len(keys):5} {len(keys.keys() - seen):5} new\n")
        sys.stdout.flush()
        seen |= keys.keys()
    sys.stdout.write(f"{'all':14} {len(seen):5}\n")


if __name__ == "__main__":
    count(sys.argv[1:] or None)
