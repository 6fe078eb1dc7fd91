"""Rows of no sequence are cleared, each of them, and no other. In Triton's interpreter; in a
process of their own: see `support.runs.interpreted`.
"""

from typing import NamedTuple

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.kernels.args.kinds import InOut, Rows, SplitRows, SplitRowVector
from heedful.kernels.args.portable import ClearOutsideIO, ClearUnusedIO
from heedful.kernels.common.gaps import clear_gaps
from heedful.kernels.portable.shared.unused import fill_rows
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar, absent
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import run_call

# Dims of the two arrays, none a power of two, and the rows that a program clears at a time.
DIM, DIM_Y, BLOCK_N, HEADS = 5, 3, 4, 2
# What is not cleared keeps this.
KEPT = 7.0
# What lies before and behind the array in memory: so many rows.
GUARD = 3


class Gaps(NamedTuple):
    out: InOut[SplitRows]
    lse: InOut[SplitRowVector]


@triton.jit
def fill(x, stride, begin, end, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    fill_rows(x, stride, begin, end, DIM, ROWS, BLOCK, tl.constexpr(2.0))


@triton.jit
def clear(io: Gaps, cu, split, total, batch, heads, DIM: tl.constexpr, BLOCK: tl.constexpr):
    share, shares = tl.program_id(0), tl.num_programs(0)
    clear_gaps(io.out, io.lse, split, cu, total, batch, heads, share, shares, DIM, BLOCK)


@interpreted
@pytest.mark.parametrize("begin, end", [(0, 0), (2, 2), (3, 1), (0, 4), (1, 4), (1, 6), (0, 14)])
def test_rows_from_a_first_to_a_last_are_filled_and_no_others(begin, end):
    x = torch.full((16, 8), KEPT)
    want = x.clone()
    want[begin:end, :DIM] = 2.0
    numbers = {"stride": Scalar(8), "begin": Scalar(begin), "end": Scalar(end)}
    sizes = {"DIM": DIM, "ROWS": BLOCK_N, "BLOCK": 8}
    call = KernelCall(
        KernelRef(__name__, "fill"), (1, 1, 1), {"x": Pointer("x", "float32"), **numbers, **sizes}
    )
    run_call(call, {"x": x})
    assert x.equal(want)


def guarded(batch: int, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, the array (batch, rows, HEADS, dim) within it)."""
    memory = torch.full((batch * rows + 2 * GUARD, HEADS, dim), KEPT)
    inner = memory[GUARD : GUARD + batch * rows]
    return memory, inner.view(batch, rows, HEADS, dim)


def cleared(
    batch: int,
    seqlen: int,
    cu: list[int] | None,
    used: list[int] | None,
    pad: list[int] | None,
    has_y: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of x and of y, guards included, after `clear_unused`."""
    stored = 1 if cu else batch
    (memory, x), (memory_y, y) = (guarded(stored, seqlen, dim) for dim in (DIM, DIM_Y))

    def rows(name: str, t: torch.Tensor) -> Rows:
        stride = Scalar(0 if cu else t.stride(0))
        return Rows(Pointer(name, "float32"), stride, Scalar(t.stride(1)), Scalar(t.stride(2)))

    arrays = {"x": x, "y": y}
    for name, numbers in (("cu", cu), ("used", used), ("pad", pad)):
        if numbers is not None:
            arrays[name] = torch.tensor(numbers, dtype=torch.int32)
    bounds, lengths, padding = (
        Pointer(name, "int32") if name in arrays else None for name in ("cu", "used", "pad")
    )
    parameters = {
        "io": ClearUnusedIO(
            bounds, lengths, padding, rows("x", x), rows("y", y) if has_y else absent(Rows)
        ),
        **{name: Scalar(n) for name, n in (("seqlen", seqlen), ("batch", batch), ("heads", HEADS))},
        "DIM_X": DIM,
        "DIM_Y": DIM_Y,
        "BLOCK_N": BLOCK_N,
        "BLOCK_X": 8,
        "BLOCK_Y": 4,
        "FILL_Y": float("-inf"),
    }
    ref = KernelRef("heedful.kernels.portable.shared.unused", "clear_unused")
    run_call(KernelCall(ref, (batch * HEADS, 1, 1), parameters), arrays)
    return memory, memory_y


# Packed: bounds of sequences, rows that each uses, padding before each.
PACKED = [
    ([0, 5, 12, 20], None, None),
    ([2, 5, 12, 17], None, None),
    ([0, 5, 5, 20], [1, 0, 15], None),
    ([3, 9, 12, 18], [6, 1, 4], None),
    ([3, 9, 12, 18], [6, 1, 4], [1, 3, 2]),
    ([0, 9, 12, 20], None, [9, 0, 2]),
    # Bounds that no storage has are the nearest that it has.
    ([-4, 5, 12, 20], None, None),
    ([0, 20, 25, 31], None, None),
    ([-6, -2, 12, 25], None, None),
]


def unused(cu, used, pad, total: int) -> list[bool]:
    """Which packed tokens no sequence uses."""
    free = [True] * total
    for b in range(len(cu) - 1):
        begin = min(max(cu[b], 0), total)
        stored = min(max(cu[b + 1], begin), total) - begin
        count = stored if used is None else min(max(used[b], 0), stored)
        before = min(max(pad[b], 0), stored) if pad else 0
        count = min(count, stored - before)
        free[begin + before : begin + before + count] = [False] * count
    return free


@interpreted
@pytest.mark.parametrize("cu, used, pad", PACKED, ids=str)
def test_packed_tokens_that_no_sequence_uses_are_cleared_and_nothing_beside_them(cu, used, pad):
    total = 20
    x, y = cleared(3, total, cu, used, pad, True)
    free = [False] * GUARD + unused(cu, used, pad, total) + [False] * GUARD
    assert (x == 0).all((1, 2)).tolist() == free
    assert (x == KEPT).all((1, 2)).tolist() == [not f for f in free]
    assert (y == -torch.inf).all((1, 2)).tolist() == free
    assert (y == KEPT).all((1, 2)).tolist() == [not f for f in free]


@interpreted
@pytest.mark.parametrize("has_y", [False, True])
@pytest.mark.parametrize(
    "used, pad",
    [([9, 0, 4], None), ([3, 11, -2], None), (None, [0, 9, 3]), ([5, 2, 9], [2, -1, 7])],
    ids=str,
)
def test_rows_of_a_batch_that_are_not_in_use_are_cleared_and_nothing_beside_them(used, pad, has_y):
    rows = 9
    x, y = cleared(3, rows, None, used, pad, has_y)
    free = [False] * GUARD
    for b in range(3):
        before = min(max(pad[b], 0), rows) if pad else 0
        count = min(rows if used is None else min(max(used[b], 0), rows), rows - before)
        free += [not before <= i < before + count for i in range(rows)]
    free += [False] * GUARD
    assert (x == 0).all((1, 2)).tolist() == free
    assert (x == KEPT).all((1, 2)).tolist() == [not f for f in free]
    if has_y:
        assert (y == -torch.inf).all((1, 2)).tolist() == free
    assert (y == KEPT).all((1, 2)).tolist() == ([not f for f in free] if has_y else [True] * len(y))


@interpreted
@pytest.mark.parametrize("split, arrays", [(1, "both"), (1, "out"), (1, "lse"), (0, "both")])
@pytest.mark.parametrize("programs", [1, 3, 64])
@pytest.mark.parametrize(
    "cu", [[0, 9, 45], [1, 9, 44], [17, 20, 20], [-3, 9, 50], [45, 45, 45], [30, 20, 10]], ids=str
)
def test_tokens_before_the_first_sequence_and_behind_the_last_are_cleared(
    cu, programs, split, arrays
):
    """In one split of the results alone, however many programs divide them; in the first by the
    kernel of calls whose attention does not clear."""
    total, splits = 45, 3
    # Beside each head, and each token, something else lies.
    out = torch.full((splits, total, HEADS, 8), KEPT)
    lse = torch.full((splits, HEADS, total + 2), KEPT)
    want, want_lse = out.clone(), lse.clone()
    before = min(max(cu[0], 0), total)
    behind = min(max(cu[-1], before), total)
    for tokens in (slice(0, before), slice(behind, total)):
        if arrays != "lse":
            want[split, tokens, :, :DIM] = 0
        if arrays != "out":
            want_lse[split, :, tokens] = -torch.inf
    strides = (out.stride(0), 0, out.stride(1), out.stride(2))
    strides_lse = (lse.stride(0), 0, lse.stride(1))
    of_out = SplitRows(Pointer("out", "float32"), *map(Scalar, strides))
    of_lse = SplitRowVector(Pointer("lse", "float32"), *map(Scalar, strides_lse))
    io = Gaps(
        of_out if arrays != "lse" else absent(SplitRows),
        of_lse if arrays != "out" else absent(SplitRowVector),
    )
    numbers = {name: Scalar(n) for name, n in (("total", total), ("batch", 2), ("heads", HEADS))}
    pointer, sizes = Pointer("cu", "int32"), {"DIM": DIM, "BLOCK": 8}
    if split:
        ref = KernelRef(__name__, "clear")
        parameters = {"io": io, "cu": pointer, "split": Scalar(split), **numbers, **sizes}
    else:
        ref = KernelRef("heedful.kernels.portable.shared.unused", "clear_outside")
        parameters = {"io": ClearOutsideIO(pointer, *io), **numbers, **sizes}
    bounds = torch.tensor(cu, dtype=torch.int32)
    call = KernelCall(ref, (programs, 1, 1), parameters)
    run_call(call, {"out": out, "lse": lse, "cu": bounds})
    assert out.equal(want)
    assert lse[..., :total].equal(want_lse[..., :total])
    assert lse[..., total:].eq(KEPT).all()


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
