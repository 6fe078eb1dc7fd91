"""How the keys of a decode are dealt out: which key tiles a tile of queries visits, how long its
sequence is on the line, and which part of the line a program has. In Triton's interpreter; in a
process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.kernels.args.decode import DecodeTile
from heedful.kernels.args.shared import Mask
from heedful.kernels.common.sequences import Seqlens
from heedful.kernels.split_kv.append import rows_of
from heedful.kernels.split_kv.walk import Line, Segment, Share, share_of
from heedful.kernels.split_kv.work import (
    SplitKVParams,
    block_of,
    segment_of,
    span_of,
    visit_of,
)
from heedful.launch.bind import decode
from heedful.launch.program import buffers as canonical
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar
from support.runs.decode_programs import TILES, UNITS
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import run_call

N, MOST = TILES.block_n, 14
LONGEST = 200
BOUNDS = [(-1, -1), (-1, 0), (-1, 21), (0, 0), (31, 0), (15, 16), (32, -1), (9, 5, 17), (60, 0, 1)]
MASKS = [
    replace(MaskSpec(*bounds), bottom_right=bottom_right, shift=shift)
    for bounds, (bottom_right, shift) in product(BOUNDS, [(True, 0), (False, 0), (True, -19)])
]


def seen_keys(mask: MaskSpec, len_q: int, len_k: int, room: int) -> torch.Tensor:
    """Which of `room` keys any of the queries sees by position, bool."""
    rows, cols = torch.arange(len_q)[:, None], torch.arange(room)
    distance = cols - rows - mask.offset(len_q, len_k)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.right >= 0:
        seen &= distance <= mask.right
    if mask.left >= 0:
        seen &= (distance >= -mask.left) | (cols < mask.first)
    return seen.any(0) & (cols < len_k)


def seen_tiles(mask: MaskSpec, len_q: int, len_k: int) -> list[int]:
    """The key tiles that hold a key which any of the queries sees."""
    return seen_keys(mask, len_q, len_k, MOST * N).view(MOST, N).any(1).nonzero().flatten().tolist()


class Visitor(NamedTuple):
    """What of `SplitKVParams` a span depends on."""

    mask: Mask
    tile: DecodeTile


@triton.jit
def visit(blocks, firsts, len_q, len_k, off, mask: Mask, tile, MOST: tl.constexpr):
    seq = Seqlens(
        token_q=0, len_q=len_q, stored_q=len_q, token_k=0, len_k=len_k, stored_k=len_k, off=off
    )
    span = span_of(0, len_q - 1, seq, Visitor(mask, tile))
    for index in range(0, span.visits):
        tl.store(blocks + index, block_of(index, span, mask))
    for block in range(0, MOST):
        tl.store(firsts + block, visit_of(block, span))


def call_of(problem: AttentionProblem, overhead: int = 0) -> KernelCall:
    """The launch of the decode. overhead: of a part, in key tiles."""
    plan = Plan(
        problem,
        replace(by_name("MI300X"), units=UNITS),
        "decode",
        "run",
        variant="portable",
        configs={"decode.forward": replace(TILES, overhead=overhead)},
    )
    (call,) = decode.forward(problem, plan, canonical.forward(problem)).calls
    return call


def without_arrays(work):
    """Work that leaves no partial results."""
    merge = work.merge
    absent = {name: None for name, x in merge._asdict().items() if isinstance(x, Pointer)}
    return work._replace(merge=merge._replace(**absent))


def problem_of(mask: MaskSpec, len_q: int, batch: int = 1, num_splits: int = 0):
    facts = {"dtype": "float16", "used_k": True, "num_splits": num_splits, "mask": mask}
    return AttentionProblem.dense(batch, len_q, LONGEST, 2, **facts)


@interpreted
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_decode_visits_each_key_tile_that_is_seen_once_and_leading_ones_first(mask):
    for len_q, len_k in ((1, 200), (4, 97), (5, 64), (9, 3), (7, 7), (1, 1), (3, 0)):
        call = call_of(problem_of(mask, len_q))
        parameters = {
            "blocks": Pointer("blocks", "int32"),
            "firsts": Pointer("firsts", "int32"),
            "len_q": Scalar(len_q),
            "len_k": Scalar(len_k),
            "off": Scalar(mask.offset(len_q, len_k)),
            "mask": call.parameters["params"].mask,
            "tile": call.parameters["params"].tile,
            "MOST": MOST,
        }
        blocks, firsts = (torch.full((2 * MOST,), -1, dtype=torch.int32) for _ in range(2))
        asked = KernelCall(KernelRef(__name__, "visit"), (1, 1, 1), parameters)
        run_call(asked, {"blocks": blocks, "firsts": firsts})
        visited = [block for block in blocks.tolist() if block >= 0]
        wanted = seen_tiles(mask, len_q, len_k)
        # A unit has a visit at least, and leading keys are looked for whatever else hides them.
        assert visited == sorted(set(visited)), (len_q, len_k)
        assert set(wanted) <= set(visited)
        needless = [block for block in visited if block not in wanted and block * N >= mask.first]
        assert not needless or (visited == needless and len(needless) == 1)
        behind = [[i for i, block in enumerate(visited) if block >= b] for b in range(MOST)]
        for b in range(MOST):
            assert not behind[b] or firsts[b] == behind[b][0], (len_q, len_k, b)


@triton.jit
def share(out, seqs, shape, mask, work, tile):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    looks = tl.arange(0, work.LOOKS)
    params = SplitKVParams(seqs, shape, mask, work, tile)
    found, empty = share_of(pid, programs, tl.arange(0, 1), looks, params)
    tl.store(out + 6 * pid, found.x)
    tl.store(out + 6 * pid + 1, found.end)
    tl.store(out + 6 * pid + 2, found.each)
    tl.store(out + 6 * pid + 3, found.b)
    tl.store(out + 6 * pid + 4, found.base)
    tl.store(out + 6 * pid + 5, empty)


@interpreted
@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("lengths", [(200,), (0,), (33, 0, 200, 16, 97, 1), (0, 0, 150)], ids=str)
@pytest.mark.parametrize("mask", MASKS[::2], ids=str)
def test_shares_follow_each_other_on_a_line_of_what_sequences_visit(mask, lengths, num_splits):
    len_q, programs = 4, 7
    call = call_of(problem_of(mask, len_q, len(lengths), num_splits), overhead=len(lengths) % 3)
    names = ("seqs", "shape", "mask", "work", "tile")
    parameters = {name: getattr(call.parameters["params"], name) for name in names}
    work = parameters["work"]
    merge = work.merge._replace(partial_out=None, partial_sums=None, counts=None)
    parameters["work"] = work._replace(merge=merge)
    out = torch.full((programs, 6), -1, dtype=torch.int32)
    asked = KernelCall(
        KernelRef(__name__, "share"),
        (programs, 1, 1),
        {"out": Pointer("out", "int32"), **parameters},
    )
    run_call(asked, {"out": out, "seqused_k": torch.tensor(lengths, dtype=torch.int32)})

    visits = [max(1, len(seen_tiles(mask, len_q, n))) for n in lengths]
    parts = [-(-v // -(-v // num_splits)) if num_splits else 1 for v in visits]
    each = [v + work.OVERHEAD * p for v, p in zip(visits, parts, strict=True)]
    line = [0 if not n and work.SKIPS_EMPTY else e for n, e in zip(lengths, each, strict=True)]
    total = sum(line)
    size = max(-(-total // programs), work.least.value)
    bounds = [min(size * i, total) for i in range(programs + 1)]
    starts = [sum(line[:b]) for b in range(len(line) + 1)]
    for pid, (begin, end, long, b, base, empty) in enumerate(out.tolist()):
        assert (begin, end, long) == (bounds[pid], bounds[pid + 1], size)
        assert empty == (line.count(0) if work.SKIPS_EMPTY else 0)
        if begin < end and len(lengths) > 1:
            assert starts[b] == base and starts[b] <= begin < starts[b + 1]


@triton.jit
def cut(out, starts, visits, total, each, work, line, lines, MOST: tl.constexpr):
    """The pieces of each share of a line of units, by unit and how often there was one."""
    own = tl.program_id(0)
    end = tl.minimum((own + 1) * each, total)
    x = own * each
    unit = 0
    count = 0
    while x < end:
        if x >= tl.load(starts + unit + 1):
            unit += 1
        else:
            begin, count_k = tl.load(starts + unit), tl.load(visits + unit)
            share = Share(x, end, each, 0, 0)
            start, stop, partials, behind = segment_of(
                share, own, Line(line, lines, 0), begin, unit, count_k, work
            )
            at = out + (own * MOST + count) * 9
            tl.store(at, unit)
            tl.store(at + 1, start)
            tl.store(at + 2, stop)
            tl.store(at + 3, partials.tile)
            tl.store(at + 4, partials.count)
            tl.store(at + 5, partials.slot)
            tl.store(at + 6, partials.first)
            tl.store(at + 7, partials.rest)
            tl.store(at + 8, partials.step)
            count += 1
            x = behind


@interpreted
@pytest.mark.parametrize("num_splits", [0, 2, 5])
@pytest.mark.parametrize("shares", [1, 4, 7])
@pytest.mark.parametrize("overhead", [0, 1, 3])
@pytest.mark.parametrize("visits", [(13,), (1, 1, 1, 1, 1, 1, 1), (5, 1, 8, 2, 6), (2, 17, 3)])
def test_pieces_of_all_shares_are_every_visit_of_a_unit_once(visits, overhead, shares, num_splits):
    """Wherever a share ends, within what a unit costs beside its keys too; each part leaves its
    results where the one that merges looks for them."""
    call = call_of(problem_of(MaskSpec(), 1, 2, num_splits), overhead)
    work = without_arrays(call.parameters["params"].work)
    per_part = [-(-v // num_splits) if num_splits else v for v in visits]
    parts = [-(-v // n) for v, n in zip(visits, per_part, strict=True)]
    lengths = [v + work.OVERHEAD * p for v, p in zip(visits, parts, strict=True)]
    starts = [sum(lengths[:i]) for i in range(len(visits) + 1)]
    line, lines, most = 2, 3, 32
    parameters = {
        **{name: Pointer(name, "int32") for name in ("out", "starts", "visits")},
        "total": Scalar(starts[-1]),
        "each": Scalar(-(-starts[-1] // shares)),
        "work": work,
        "line": Scalar(line),
        "lines": Scalar(lines),
        "MOST": most,
    }
    out = torch.full((shares, most, 9), -1, dtype=torch.int32)
    arrays = {"out": out, "starts": torch.tensor(starts), "visits": torch.tensor(visits)}
    asked = KernelCall(KernelRef(__name__, "cut"), (shares, 1, 1), parameters)
    run_call(asked, {name: array.int() for name, array in arrays.items()} | {"out": out})

    found = [piece for piece in out.flatten(0, 1).tolist() if 0 <= piece[1] < piece[2]]
    # A unit that is whole leaves nothing.
    slots = [piece[5] for piece in found if piece[4] > 1]
    assert len(set(slots)) == len(slots)
    for unit, count in enumerate(visits):
        own = [piece for piece in found if piece[0] == unit]
        assert [v for piece in own for v in range(piece[1], piece[2])] == list(range(count))
        for i, (_, _, _, index, parts, slot, first, rest, step) in enumerate(own):
            assert (index, parts) == (unit, len(own))
            assert slot == (rest + step * i if i else first)


@triton.jit
def own_rows(out, len_q, len_k, stored_k, off, parts, mask: Mask, tile):
    """The rows that each of some even pieces of a unit appends."""
    seq = Seqlens(
        token_q=0, len_q=len_q, stored_q=len_q, token_k=0, len_k=len_k, stored_k=stored_k, off=off
    )
    span = span_of(0, len_q - 1, seq, Visitor(mask, tile))
    each = tl.cdiv(span.visits, parts)
    for part in range(0, tl.cdiv(span.visits, each)):
        start, stop = part * each, tl.minimum((part + 1) * each, span.visits)
        segment = Segment(start, stop, 0, 0, 0, seq, None, span)
        low, high = rows_of(segment, tile.BLOCK_N)
        tl.store(out + 2 * part, low)
        tl.store(out + 2 * part + 1, high)


@interpreted
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_each_row_of_storage_is_one_pieces_to_append(mask):
    """Also rows that no query sees."""
    for len_k, parts in ((200, 3), (97, 2), (64, 1), (64, 9), (3, 2), (180, 5)):
        len_q, stored_k = 2, LONGEST
        call = call_of(problem_of(mask, len_q))
        numbers = {"len_q": len_q, "len_k": len_k, "stored_k": stored_k, "parts": parts}
        numbers["off"] = mask.offset(len_q, len_k)
        parameters = {"out": Pointer("out", "int32")}
        parameters |= {name: Scalar(number) for name, number in numbers.items()}
        parameters |= {name: getattr(call.parameters["params"], name) for name in ("mask", "tile")}
        out = torch.full((MOST, 2), -1, dtype=torch.int32)
        run_call(KernelCall(KernelRef(__name__, "own_rows"), (1, 1, 1), parameters), {"out": out})
        rows = [row for low, high in out.tolist() for row in range(low, high) if low >= 0]
        assert rows == list(range(stored_k)), (len_k, parts, out.tolist())


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
