"""Where the Hopper forward writes the log-sum-exp, partial results of splits and float32 results:
its own index arithmetic on NumPy arrays, against a dense (splits, batch, row, head, dim)."""

import types
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from heedful.kernels.args.hopper import Gqa, SplitKV
from heedful.kernels.args.kinds import Rows
from heedful.kernels.args.shared import Sequences
from heedful.kernels.hopper.forward import epilogue
from heedful.kernels.hopper.sm90 import mma

ROWS = mma.ROWS.value
DIM, BATCH, LENGTH, KV_HEADS = 8, 3, 70, 2
TOTAL = BATCH * LENGTH
# Rows in use of each sequence, and where packed ones begin.
LENGTHS, STARTS = (70, 9, 64), (2, 73, 90)


class Tensor(np.ndarray):
    """An array with what device code asks of a tensor."""

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def to(self, dtype) -> "Tensor":
        return self.astype(dtype).view(Tensor)


def tensor(values, dtype: Any = np.int32) -> Tensor:
    return np.asarray(values, dtype).view(Tensor)


class Language:
    """The part of Gluon's language that these functions use. `written`: places, by buffer."""

    int64, constexpr = np.int64, None

    def __init__(self):
        self.written: list[np.ndarray] = []

    def SliceLayout(self, dim, parent):
        return None

    def arange(self, begin, end, layout):
        return tensor(np.arange(begin, end))

    def minimum(self, a, b):
        return tensor(np.minimum(a, b))

    def to_tensor(self, value):
        return tensor(value)

    def store(self, place, value, mask):
        place, mask = np.broadcast_arrays(place, mask)
        assert place.dtype == np.int64
        self.written.append(place[mask])


def hosted(language: Language) -> dict[str, Any]:
    """The epilogue's functions as Python runs them."""
    scope: dict[str, Any] = {"gl": language, "ROWS": ROWS}
    for name, value in vars(epilogue).items():
        if isinstance(value, JITFunction):
            scope[name] = types.FunctionType(value.fn.__code__, scope, name)
    return scope


def params_of(is_packed: bool, group: int, splits: int | None) -> Any:
    """Query heads of a KV head lie beside each other in a tile if `group` is above 1."""
    rows = tensor(TOTAL if is_packed else LENGTH)
    absent: Any = (None,) * len(SplitKV._fields)
    split = SplitKV(*absent)
    if splits is not None:
        batch = None if is_packed else tensor(BATCH)
        split = split._replace(
            partials=tensor(0, np.int64), splits=tensor(splits), batch=batch, dim_v=tensor(DIM)
        )
    cu_q = tensor(0) if is_packed else None
    return types.SimpleNamespace(
        seqs=Sequences(cu_q, None, None, None, None, rows, None, None),
        gqa=Gqa(tensor(KV_HEADS), tensor(1), tensor(group), 1 << (group - 1).bit_length()),
        split=split,
        order=types.SimpleNamespace(entry_rows=None),
    )


def tiles(is_packed: bool, pack: int):
    """Every tile of rows: (batch entry, KV head or head, first of its rows)."""
    for batch, used in enumerate(LENGTHS):
        length = used if is_packed else LENGTH
        for head in range(KV_HEADS):
            for row in range(0, length * pack, ROWS):
                start = STARTS[batch] if is_packed else 0
                yield (
                    types.SimpleNamespace(
                        batch=tensor(batch),
                        head=tensor(head),
                        seq=types.SimpleNamespace(
                            token_q=tensor(start), len_q=tensor(length), stored_q=tensor(length)
                        ),
                    ),
                    tensor(row),
                )


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_row_of_every_split_has_a_place_of_its_own(is_packed, group, splits):
    params = params_of(is_packed, group, splits)
    count, heads = splits or 1, KV_HEADS * group
    lse = np.arange(count * TOTAL * heads).reshape(count, BATCH, heads, LENGTH)
    out = np.arange(count * TOTAL * heads * DIM).reshape(count, BATCH, LENGTH, heads, DIM)
    if is_packed:
        lse, out = lse.reshape(count, 1, heads, TOTAL), out.reshape(count, 1, TOTAL, heads, DIM)
    acc = np.zeros((ROWS, 16), np.float32).view(Tensor)
    none = np.zeros(ROWS, np.float32).view(Tensor)
    for split in range(count):
        for tile, row in tiles(is_packed, params.gqa.PACK_GQA):
            language = Language()
            functions = hosted(language)
            functions["store_lse"](tensor(0, np.int64), none, tile, row, tensor(split), params, 0)
            entry, start = (0, tile.seq.token_q) if is_packed else (tile.batch, 0)
            first = row // params.gqa.PACK_GQA
            last = min((row + ROWS) // params.gqa.PACK_GQA, tile.seq.len_q)
            rows = slice(start + first, start + last)
            own = slice(tile.head * group, (tile.head + 1) * group)
            (found,) = language.written
            assert sorted(found) == sorted(lse[split, entry, own, rows].ravel())
            if splits is not None:
                functions["store_partial"](acc, tile, row, tensor(split), params, 0)
                found = language.written[1]
                assert sorted(found) == sorted(out[split, entry, rows, own].ravel())


def test_every_row_of_a_piece_has_its_place_in_its_batch_entry():
    params = params_of(True, 1, None)
    params.order.entry_rows = tensor(LENGTH)
    lse = np.arange(TOTAL * KV_HEADS).reshape(BATCH, KV_HEADS, LENGTH)
    none = np.zeros(ROWS, np.float32).view(Tensor)
    for entry in range(BATCH):
        for head in range(KV_HEADS):
            for first, last in ((0, 5), (5, LENGTH)):
                seq = types.SimpleNamespace(
                    token_q=tensor(entry * LENGTH + first),
                    len_q=tensor(last - first),
                    stored_q=tensor(last - first),
                )
                tile = types.SimpleNamespace(batch=tensor(9), head=tensor(head), seq=seq)
                language = Language()
                store = hosted(language)["store_lse"]
                store(tensor(0, np.int64), none, tile, tensor(0), tensor(0), params, 0)
                (found,) = language.written
                stop = min(first + ROWS, last)
                assert sorted(found) == sorted(lse[entry, head, first:stop].ravel())


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_row_in_float32_has_its_place_whatever_the_strides(is_packed, group):
    params, heads = params_of(is_packed, group, None), KV_HEADS * group
    # Rows of a wider array, whose heads come in another order than those of a dense one.
    room = np.arange(TOTAL * heads * (DIM + 4)).reshape(BATCH, heads, LENGTH, DIM + 4)
    if is_packed:
        room = room.reshape(1, heads, TOTAL, DIM + 4)
    out = room[..., :DIM].transpose(0, 2, 1, 3)
    b, n, h, _ = (tensor(step // out.itemsize, np.int64) for step in out.strides)
    exact = Rows(tensor(0, np.int64), b, n, h)
    params.split = params.split._replace(exact=exact, dim_v=tensor(DIM))
    acc = np.zeros((ROWS, 16), np.float32).view(Tensor)
    for tile, row in tiles(is_packed, params.gqa.PACK_GQA):
        language = Language()
        hosted(language)["store_exact"](acc, tile, row, params, 0)
        entry, start = (0, tile.seq.token_q) if is_packed else (tile.batch, 0)
        first = row // params.gqa.PACK_GQA
        last = min((row + ROWS) // params.gqa.PACK_GQA, tile.seq.len_q)
        own = slice(tile.head * group, (tile.head + 1) * group)
        (found,) = language.written
        assert sorted(found) == sorted(out[entry, start + first : start + last, own].ravel())
