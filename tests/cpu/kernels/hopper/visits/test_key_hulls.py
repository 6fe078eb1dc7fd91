"""The keys that 64 rows see by their key_ranges, as the kernel before a Hopper forward stores them,
and which query tiles see a key tile, as the kernel before a backward stores it: run by Triton's
interpreter.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful import masks
from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.launch.program import buffers, programs
from heedful.launch.spec import Program
from heedful.reference import oracle
from heedful.reference.convert import operands_as_numpy
from heedful.reference.sequences import sequences
from heedful.torch.base.arrays import array_spec
from support.problems.cases import Case, build
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

BASE = Case(
    dtype="float16",
    seqlen_q=600,
    seqlen_k=300,
    heads_q=2,
    head_dim=64,
    key_ranges=1,
    backward=False,
)
CASES = [
    BASE,
    replace(BASE, key_ranges=2, ranges_of="bh", causal=True),
    replace(BASE, ranges_of="h", window=(50, 20), used="qk"),
    replace(BASE, varlen="qk", batch=3, causal=True, key_ranges=2),
]


def seen_of(built, seq, h: int):
    """Which keys each row of a sequence's head sees, (rows, keys), and what shows the window."""
    x = operands_as_numpy(built.x)
    ranges = oracle.in_ranges(x, seq)
    return oracle.visible(built.problem, x, seq) & ranges[h if len(ranges) > 1 else 0]


def first_entries(case: Case, built, heads: int, rows: int, of_keys: bool = False):
    """(first entry of a sequence, entries of a head) of arrays that have one for so many rows."""
    longest = case.seqlen_k if of_keys else case.seqlen_q
    total = built.problem.total_k if of_keys else built.problem.total_q
    blocks = -(-longest // rows)
    entries = case.batch * blocks if total is None else total // rows + case.batch

    def first(seq):
        if total is None:
            return seq.batch * blocks
        token = int(built.x.cu_seqlens_k[seq.batch]) if of_keys else seq.q_token
        return token // rows + seq.batch

    return first, entries if heads > 1 else 0


def interpreted_calls(case: Case, direction: str, *functions: str, lengths: tuple[int, ...] = ()):
    """(what case was built, its plan, what the kernels of these names store in arrays of theirs).
    lengths: of documents in each row of the batch, whose ranges replace the drawn ones."""
    built = build(case)
    if lengths:
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        built.x.key_ranges[:, :1].copy_(masks.documents(ids.expand(case.batch, -1)).ranges)
    x = {name: t for name, t in built.x._asdict().items() if t is not None}
    backend = forced("hopper+hides_rows=1") if lengths else "hopper"
    chosen = plan(built.problem, by_name("H200"), backend=backend)
    arrays = buffers.backward(built.problem) if direction == "backward" else {}
    out = torch.empty(built.problem.out_shape, dtype=torch.float16)
    lse = torch.empty(built.problem.lse_shape)
    arrays |= {name: array_spec(t) for name, t in (x | {"out": out, "lse": lse}).items()}
    whole = programs.program(chosen, direction, arrays)
    calls = [c for c in whole.calls if c.kernel.function in functions]
    shapes = {w.name: w.buffer.shape for w in whole.workspaces if w.name in functions}
    made = {name: torch.full(shape, -7, dtype=torch.int32) for name, shape in shapes.items()}
    interpret(Program(tuple(calls), ()), x | made)
    return built, chosen, made


def tiles_of(entries, rows: int):
    """Of entries of 64 rows those of tiles of so many rows."""
    return [part.tolist() for part in entries.split(rows // 64)]


def visited(tile) -> list[tuple[int, int]]:
    """The two runs of keys that a tile of entries visits."""
    runs = [(min(e[i] for e in tile), max(e[i + 1] for e in tile)) for i in (0, 4)]
    return [(begin, end) for begin, end in runs if begin < end]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hulls_hold_what_rows_see_and_whole_keys_are_seen_by_all(case):
    built, _, made = interpreted_calls(case, "forward", "key_hulls")
    own_heads = case.heads_q if not case.varlen and "h" in case.ranges_of else 1
    first, entries = first_entries(case, built, own_heads, 64)
    for seq in sequences(built.problem, built.x):
        for h in range(case.heads_q):
            seen = seen_of(built, seq, h)
            for row in range(0, seq.len_q, 64):
                at = made["key_hulls"][first(seq) + row // 64 + h * entries].tolist()
                shown = seen[row : row + 64]
                keys = {k for run in visited([at]) for k in range(*run)}
                any_sees = shown.any(0).nonzero()[0].tolist()
                assert keys >= set(any_sees)
                if case.window == (-1, -1) and any_sees:
                    assert (min(keys), max(keys)) == (any_sees[0], any_sees[-1])
                assert shown[:, at[2] : at[3]].all()


GRADIENTS = [
    replace(case, backward=True, used="", heads_q=4, heads_k=2, seqlen_k=420) for case in CASES
]


# Documents, behind each of which the last tile of queries has rows of another.
DOCUMENTS = replace(
    GRADIENTS[0], seqlen_q=900, seqlen_k=900, causal=True, ranges_of="b", head_dim=128
)


@interpreted
@pytest.mark.parametrize(
    "case, lengths", [*((case, ()) for case in GRADIENTS), (DOCUMENTS, (431, 20, 449))], ids=str
)
def test_query_tiles_that_see_a_key_tile_are_visited_and_whole_ones_see_all_of_it(case, lengths):
    """And so are those whose own runs of keys hold it: in a fixed order they count its turn. Rows
    of some of the whole ones see all of it or nothing, by hand. lengths: of documents."""
    built, chosen, made = interpreted_calls(
        case, "backward", "key_hulls", "query_hulls", lengths=lengths
    )
    by_rows = 0
    config = chosen.configs[chosen.variant_of("backward").configs[0]]
    own_heads = case.heads_q if not case.varlen and "h" in case.ranges_of else 1
    first_row, row_entries = first_entries(case, built, own_heads, 64)
    first, entries = first_entries(case, built, own_heads, config.block_n, of_keys=True)
    for seq in sequences(built.problem, built.x):
        for g in range(case.heads_k):
            group = range(g * 2, g * 2 + 2)
            seen = [seen_of(built, seq, h) for h in group]
            for col in range(0, seq.len_k, config.block_n):
                at = first(seq) + col // config.block_n + g * entries
                begin, full_begin, full_end, end, *more = made["query_hulls"][at].tolist()
                (whole_end,) = more or [full_end]
                assert begin <= full_begin <= whole_end <= full_end <= end
                stop = col + config.block_n
                for h, of_head in zip(group, seen, strict=True):
                    count = -(-seq.len_q // 64)
                    at = first_row(seq) + h * row_entries
                    tiles = tiles_of(made["key_hulls"][at : at + count], config.block_m)
                    for m, tile in enumerate(tiles):
                        shown = of_head[m * config.block_m : (m + 1) * config.block_m, col:stop]
                        runs = any(a < stop and b > col for a, b in visited(tile))
                        assert begin <= m < end or not (runs or shown.any())
                        if full_begin <= m < whole_end:
                            assert shown.all()
                        if full_begin <= m < full_end:
                            assert (shown.all(1) | ~shown.any(1)).all()
                            assert shown.shape[1] == config.block_n
                            by_rows += m >= whole_end
    assert by_rows or not lengths


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
