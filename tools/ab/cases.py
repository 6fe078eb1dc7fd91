"""What is timed: the tables of heedful.bench, and cells with modified scores, as plain data."""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

Spec = dict[str, Any]
# Of sequences whose lengths nobody has seen: bounds, and what the rest of a call has.
NEW_LEAST, NEW_MOST = 512, 4096


@dataclass(frozen=True)
class Cell:
    """One call.

    call: dense, packed or cache. shape: batch, queries, keys, query heads, KV heads, head dim; of
    packed calls and caches `lengths` are the keys of each sequence. grad: inputs want gradients.
    clock: "device", "host" (known calls), or "new" (calls of lengths never seen). page: keys of a
    page. stored: the dtype of a quantised cache, with a scale a row, or `by_head`. prefix: keys
    before those of every sequence. padded: sequences of no keys after those. queries: of each
    packed sequence over a cache. new: tokens that a step appends. bias, alibi, sink: operands that
    it has. options: what the function takes beside.
    """

    table: str
    name: str
    call: str
    shape: tuple[int, ...]
    dim_v: int = 0
    dtype: str = "bfloat16"
    direction: str = "forward"
    clock: str = "device"
    framework: str = "torch"
    grad: bool = False
    lengths: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    page: int = 0
    stored: str = ""
    by_head: bool = False
    prefix: int = 0
    padded: int = 0
    new: int = 0
    rotary: bool = False
    bias: bool = False
    alibi: bool = False
    sink: bool = False
    options: dict[str, Any] | None = None

    def spec(self) -> Spec:
        return asdict(self)


def _group(group: str) -> Iterator[Cell]:
    """A group of bench/harness/cases.py."""
    from heedful.bench.harness import cases

    for case in cases.cases(group):
        p, mask = case.problem, case.problem.mask
        options: dict[str, Any] = {}
        if case.is_windowed:
            options["window_size"] = (mask.left, mask.right)
        elif mask.causal:
            options["causal"] = True
        kind = "packed" if case.lengths else "cache" if group == "decode" else "dense"
        yield Cell(
            group,
            case.name,
            kind,
            (p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_k, p.head_dim),
            p.head_dim_v,
            p.dtype,
            case.direction,
            grad=case.direction == "backward",
            lengths=case.lengths,
            options=options,
        )


# Features of a causal call of 4 x 4096, and of a backward; what no Hopper kernel takes runs on the
# portable one.
_MODIFIED: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("bias", {"bias": True}, {}),
    ("ALiBi", {"alibi": True}, {}),
    ("softcap", {}, {"softcap": 30.0}),
    ("sink", {"sink": True}, {}),
    ("dropout", {}, {"dropout_p": 0.1, "dropout_seed": 7}),
    ("window 1024", {}, {"causal": False, "window_size": (1023, 0)}),
)


def _modified() -> Iterator[Cell]:
    for dim, heads in ((64, 32), (128, 16)):
        for direction, (batch, tokens) in (("forward", (4, 4096)), ("backward", (2, 2048))):
            for name, has, options in _MODIFIED:
                yield Cell(
                    "modified",
                    f"{direction} {batch}x{tokens} h{heads} d{dim} causal {name}",
                    "dense",
                    (batch, tokens, tokens, heads, heads, dim),
                    dim,
                    direction=direction,
                    grad=direction == "backward",
                    options={"causal": True, **options},
                    **has,
                )


def _steps() -> Iterator[Cell]:
    """The decode steps of bench/steps.py, and its mixed batches."""
    from heedful.bench.mixed import BATCHES
    from heedful.bench.steps import STEPS

    for step in STEPS:
        (heads, heads_k), (dim, dim_v) = step.heads, step.dims
        options = {"window_size": (step.window - 1, 0)} if step.window else {}
        yield Cell(
            "steps",
            step.name,
            "cache",
            (len(step.lengths), 1, max(step.lengths), heads, heads_k, dim),
            dim_v,
            lengths=step.lengths,
            page=step.page,
            stored=step.stored,
            by_head=step.by_head,
            prefix=step.prefix,
            padded=step.padded,
            options=options,
        )
    for batch in BATCHES:
        queries, keys = zip(*batch.sequences, strict=True)
        yield Cell(
            "steps",
            batch.name,
            "cache",
            (len(queries), max(queries), max(keys), *batch.heads, batch.dim),
            batch.dim,
            lengths=keys,
            queries=queries,
            page=batch.page,
            options={"causal": True},
        )


def _host() -> Iterator[Cell]:
    """Known calls of small tensors, as bench/host.py has them."""
    dense = Cell("host", "forward", "dense", (1, 128, 128, 8, 8, 64), 64, clock="host", options={})
    yield dense
    yield replace(dense, name="forward, with gradients", grad=True)
    yield replace(dense, name="backward", direction="backward", grad=True)
    lengths = (200, 100, 17, 250)
    packed = replace(dense, call="packed", shape=(4, 250, 250, 8, 8, 64), lengths=lengths)
    yield replace(packed, name="packed")
    step = replace(packed, call="cache", shape=(4, 1, 256, 8, 8, 64), page=16)
    step = replace(step, name="decode over pages", options={"causal": True})
    yield step
    yield replace(step, name="decode, appended", new=1)
    yield replace(step, name="decode, appended with rotary", new=1, rotary=True)


def _lengths() -> Iterator[Cell]:
    """Calls whose lengths alone are new, as bench/lengths.py has them."""
    for call in ("dense", "packed"):
        for grad in (False, True):
            yield Cell(
                "lengths",
                f"new lengths, {call}, forward{' and backward' * grad}",
                call,
                (1, 0, 0, 8, 8, 64),
                64,
                clock="new",
                grad=grad,
                options={"causal": True},
            )


def _jax() -> Iterator[Cell]:
    for group in ("forward", "backward"):
        for cell in _group(group):
            yield replace(cell, table="jax", framework="jax")
    for name, direction in (("forward", "forward"), ("forward and backward", "backward")):
        cell = Cell("jax", f"host, {name}", "dense", (1, 128, 128, 8, 8, 64), 64, clock="host")
        yield replace(cell, framework="jax", direction=direction, options={})


_GROUPS = ("forward", "backward", "kv_heads", "splits", "shapes", "decode", "cpu")
TABLES: dict[str, Callable[[], Iterator[Cell]]] = {
    **{group: (lambda group=group: _group(group)) for group in _GROUPS},
    "modified": _modified,
    "steps": _steps,
    "host": _host,
    "lengths": _lengths,
    "jax": _jax,
}


def cells(tables: list[str], match: str = "") -> list[Cell]:
    """The cells of tables whose names have these words.

    Raises ValueError for an unknown table, or if there are none.
    """
    for table in tables:
        if table not in TABLES:
            raise ValueError(f"tables must be among {', '.join(TABLES)}, got {table!r}")
    found = [cell for table in tables for cell in TABLES[table]() if match in cell.name]
    if not found:
        raise ValueError(f"no case of {', '.join(tables)} has {match!r} in its name")
    return found


def new_lengths(seed: int) -> list[int]:
    """All lengths that are drawn, in an order of the seed's."""
    return random.Random(seed).sample(range(NEW_LEAST, NEW_MOST), NEW_MOST - NEW_LEAST)
