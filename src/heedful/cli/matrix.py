"""The support matrix, read off the capability rows: for the screen and for the documentation."""

from heedful.core.base.device import KNOWN
from heedful.core.call.problem import FEATURES, MAX_HEAD_DIM_V
from heedful.core.registry.capability import LEVELS, VARIANTS, Variant, words_of
from heedful.core.registry.gates import wider_keys_than_values

_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "e4m3fn",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2": "e5m2",
}

_INTRODUCTION = """\
# Support matrix

Made from `heedful.core.registry.capability` by `make docs`; a test keeps it in step.
"""
_RANKS = (
    "Ranks of [context parallelism](context-parallel.md) run the same kernels. It has run on two"
    " and on four H200s of one host, and on CPUs; never over several hosts, nor on other GPUs."
)


def architectures() -> dict[str, list[str]]:
    """Every known architecture with the devices that have it."""
    known: dict[str, list[str]] = {}
    for spec in KNOWN.values():
        known.setdefault(spec.arch, []).append(spec.name)
    return known


def level_on(row: Variant, arch: str) -> str | None:
    """The support level of a kernel on an architecture."""
    spec = next(spec for spec in KNOWN.values() if spec.arch == arch)
    return row.level(spec)


def dtype_words(row: Variant) -> str:
    queries, kv = (
        ", ".join(_SHORT.get(name, name) for name in names) for names in (row.dtypes, row.kv_dtypes)
    )
    return queries + (f"; KV {'' if row.converts else 'also '}{kv}" if kv else "")


def dim_words(row: Variant) -> str:
    multiple = f", multiples of {row.dim_multiple}" if row.dim_multiple > 1 else ""
    if row.max_dim <= MAX_HEAD_DIM_V:
        return f"1 to {row.max_dim}{multiple}"
    narrow = " of 16 bits" if wider_keys_than_values in row.gates else ""
    return f"1 to {MAX_HEAD_DIM_V}, Q and K{narrow} to {row.max_dim}{multiple}"


def least_words(row: Variant) -> str:
    return ", ".join(f"{tool} {'.'.join(map(str, version))}" for tool, version in row.least)


def feature_words(row: Variant) -> str:
    """The features that a kernel takes or the features that it lacks, by whichever list is
    shorter."""
    beyond = {name: words for name, words in FEATURES.items() if name not in _SPOKEN_OF}
    has = [words for name, words in beyond.items() if name in row.features]
    lacks = [words for name, words in beyond.items() if name not in row.features]
    unrun = words_of(row.unrun)
    more = f"; compile-only so far with {', '.join(unrun)}" if unrun else ""
    if not lacks:
        return "every feature" + more
    if len(has) <= len(lacks):
        return (f"only {', '.join(has)}" if has else "plain attention only") + more
    return f"all but {', '.join(lacks)}{more}"


# A row's dtypes and direction say these already.
_SPOKEN_OF = {"fp8", "quantized_kv", "backward"}


def markdown() -> str:
    """docs/support-matrix.md."""
    archs = architectures()
    levels = [f"- **{name}**: {words}." for name, words in LEVELS.items()]
    heads = [f"{arch}<br>{', '.join(names)}" for arch, names in archs.items()]
    where = _table(
        ["kernel", *heads],
        ([_name(row), *(level_on(row, arch) or "-" for arch in archs)] for row in VARIANTS),
    )
    what = _table(
        ["kernel", "dtypes", "head dims", "features", "needs at least"],
        (
            [_name(r), dtype_words(r), dim_words(r), feature_words(r), least_words(r) or "-"]
            for r in VARIANTS
        ),
    )
    wildcards = [
        f"- {_name(row)} on {arch.split(':')[0]} parts not listed: {level}."
        for row in VARIANTS
        for arch, level in row.levels.items()
        if arch.endswith(":*")
    ]
    blocks = [_INTRODUCTION, "Levels:", "", *levels, "", "## Where a kernel runs", "", *where, ""]
    blocks += [*wildcards, "", _RANKS, "", "## What it takes", "", *what]
    return "\n".join(blocks) + "\n"


def _name(row: Variant) -> str:
    return f"{row.label} {row.direction}"


def _table(heads: list[str], rows) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
