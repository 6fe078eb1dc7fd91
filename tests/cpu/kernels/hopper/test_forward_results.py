"""What the Hopper forward makes of the outputs, maxima and sums of a consumer's rows: its own
functions on NumPy arrays, against float64. test_split_results.py has where it goes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from heedful.core.registry.tiles import HELD_NUMBERS
from heedful.kernels.common import parts as common
from heedful.kernels.hopper.forward import epilogue
from heedful.kernels.hopper.sm90 import mma
from support.hopper.hosted import Host
from support.hopper.hosted_arrays import Arrays, Memory, Tensor, tensor

ROWS = mma.ROWS.value
HEADS, DIM, LENGTH, USED = 6, 8, 70, 41
# Of the tile, in the call.
BATCH, ENTRY, KV_HEAD, SPLITS = 2, 1, 1, 3
UNTOUCHED = 77.0
# Some fifty roundings of float32, and no more.
CLOSE = 2.0**-18
KEEP, V_FACTOR = 1.25, 0.5
LOG2E = float(np.float32(epilogue.LOG2E.value))


@pytest.fixture(autouse=True)
def of_rows_without_keys():
    """0 / 0 and -inf - -inf are made, as on the device, and not taken."""
    with np.errstate(divide="ignore", invalid="ignore"):
        yield


class Forward:
    """A tile of rows, and what its results go to. pack: query heads of a row, 1 or a power of two
    that three lie within. split: which of SPLITS, or None. exact: results are float32."""

    def __init__(
        self,
        *,
        natural=False,
        sink=False,
        rest=False,
        pack=1,
        split: int | None = None,
        fp8=False,
        in_parts=False,
        exact=False,
        held: np.ndarray | None = None,
    ):
        self.drawn: Any = np.random.default_rng(7)
        self.natural, self.split, self.pack, self.fp8 = natural, split, pack, fp8
        entries = BATCH * (SPLITS if split is not None else 1)
        self.lse = np.full((entries, HEADS, LENGTH), UNTOUCHED, np.float32)
        self.rest = np.full_like(self.lse, UNTOUCHED) if rest else None
        self.partials = np.full((entries, LENGTH, HEADS, DIM), UNTOUCHED, np.float32)
        self.exact = np.full((BATCH, LENGTH, HEADS, DIM), UNTOUCHED, np.float32) if exact else None
        strides = [tensor(HEADS * DIM * n) for n in (LENGTH, 1)] + [tensor(DIM)]
        place = SimpleNamespace(ptr=None if self.exact is None else Memory(self.exact))
        place.stride_b, place.stride_n, place.stride_h = strides
        self.sink = self.drawn.normal(0, 300, HEADS).astype(np.float32) if sink else None
        self.written: tuple | None = None
        parts = SimpleNamespace(
            partials=None if split is None else Memory(self.partials),
            rest=None if self.rest is None else Memory(self.rest),
            max_scores=None,
            batch=tensor(BATCH),
            dim_v=tensor(DIM),
            PART_TILES=64 if in_parts else None,
            held=None if held is None else Memory(held),
            exact=place,
        )
        group = 3 if pack > 1 else 1
        self.params: Any = SimpleNamespace(
            seqs=SimpleNamespace(cu_q=None, used_q=0, seqlen_q=tensor(LENGTH)),
            gqa=SimpleNamespace(
                heads=tensor(HEADS // group), PACK_GQA=pack, packed_heads=tensor(group)
            ),
            mods=SimpleNamespace(
                bias=SimpleNamespace(ptr=0 if natural else None),
                unit=1.0 if natural else None,
                sink=None if self.sink is None else Memory(self.sink),
            ),
            tile=SimpleNamespace(V_TRANSPOSED=fp8, CONSUMERS=1),
            fp8=SimpleNamespace() if fp8 else None,
            dropout=SimpleNamespace(IS_ON=not fp8, inverse_keep=np.float32(KEEP)),
            split=parts,
            order=SimpleNamespace(entry_rows=None),
        )
        self.outputs = SimpleNamespace(lse=Memory(self.lse))
        self.tile = SimpleNamespace(
            batch=tensor(ENTRY),
            head=tensor(KV_HEAD),
            row=tensor(0),
            seq=SimpleNamespace(len_q=tensor(USED), stored_q=tensor(LENGTH)),
        )
        language = Arrays()
        self.host = Host(
            {
                "gl": language,
                "tl": language,
                "write_rows": self._write,
                "barrier": lambda: None,
                "queries_at": lambda *_: None,
            }
        )

    def _write(self, outputs, out, at, place) -> None:
        self.written = out

    def run(self, function, *arrays, turn: Any = None) -> None:
        split = tensor(self.split or 0) if turn is None else turn.part
        args = self.outputs, *arrays, self.tile, tensor(0), split, self.params, 0
        self.host.turned(function)(*args, np.float32(V_FACTOR), turn, 0)

    def rows(self):
        """(row of the tile, token, head) of rows that exist."""
        for row in range(ROWS):
            token, lane = divmod(row, self.pack)
            if token < LENGTH and lane < (3 if self.pack > 1 else 1):
                yield row, token, KV_HEAD * (3 if self.pack > 1 else 1) + lane

    def check(self, out: Any, top: Any, total: Any) -> None:
        """Results are those of rows with these outputs, maxima in natural units and sums."""
        entry = ENTRY if self.split is None else self.split * BATCH + ENTRY
        lse, part = (np.full(x.shape, UNTOUCHED) for x in (self.lse, self.partials))
        written, exists = np.zeros(out.shape), np.zeros(ROWS, bool)
        for row, token, head in self.rows():
            want, of_row = self._row(out[row], top[row], total[row], head)
            is_used = token < USED
            lse[entry, head, token] = of_row if is_used else -np.inf
            written[row] = want if is_used else 0.0
            exists[row] = True
            if is_used:
                part[entry, token, head] = want
        if self.exact is not None:
            assert self.written is None
            places = np.full(self.exact.shape, UNTOUCHED)
            for row, token, head in self.rows():
                places[ENTRY, token, head] = written[row]
            np.testing.assert_allclose(self.exact, places, CLOSE, CLOSE)
        elif self.split is None:
            assert self.written is not None
            np.testing.assert_allclose(self.written[0][exists], written[exists], CLOSE, CLOSE)
        else:
            assert self.written is None
            np.testing.assert_allclose(self.partials, part, CLOSE, CLOSE)
        np.testing.assert_allclose(self.lse, lse, CLOSE, CLOSE)
        if self.rest is not None:
            own = lse != UNTOUCHED
            assert (self.rest[~own] == UNTOUCHED).all()
            assert not self.rest[own & np.isinf(lse)].any()
            both = np.float64(self.lse) + self.rest
            np.testing.assert_allclose(both[own], lse[own], 2.0**-45, CLOSE)

    def _row(self, out, top, total, head) -> tuple[Any, float]:
        sink = None if self.sink is None or self.split else float(self.sink[head])
        reference = max(top, -np.inf if sink is None else sink)
        if reference == -np.inf:
            return np.zeros(DIM), -np.inf
        weight = np.exp(top - reference)
        sums = total * weight + (0.0 if sink is None else np.exp(sink - reference))
        if sums == 0:
            return np.zeros(DIM), -np.inf
        factor = V_FACTOR if self.fp8 else KEEP
        return out * weight / sums * factor, reference + np.log(sums)


def draw(forward: Forward, far: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, maxima as the mainloop has them, and sums; every ninth row saw no key."""
    top = forward.drawn.normal(0, 2.0**14 if far else 5, ROWS).astype(np.float32)
    total = forward.drawn.uniform(1, 40, ROWS).astype(np.float32)
    out = (forward.drawn.normal(0, 1, (ROWS, DIM)) * total[:, None]).astype(np.float32)
    top[::9], total[::9], out[::9] = -np.inf, 0.0, 0.0
    return out.view(Tensor), top.view(Tensor), total.view(Tensor)


@pytest.mark.parametrize("pack", [1, 4], ids=["", "packed heads"])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("natural", [False, True], ids=["base 2", "natural"])
@pytest.mark.parametrize(
    "split, rest", [(None, False), (None, True), (0, False), (0, True), (2, True)]
)
def test_rows_are_divided_and_their_log_sum_exp_is_natural(split, rest, natural, sink, pack):
    forward = Forward(natural=natural, sink=sink, rest=rest, pack=pack, split=split)
    out, top, total = draw(forward, far=rest)
    forward.run(epilogue.store_rows, (out,), top, total)
    unit = 1.0 if natural else 1 / LOG2E
    forward.check(np.float64(out), np.float64(top) * unit, np.float64(total))


@pytest.mark.parametrize("pack", [1, 4], ids=["", "packed heads"])
def test_rows_in_float32_are_stored_as_they_are_and_those_that_are_not_used_are_zeros(pack):
    forward = Forward(pack=pack, exact=True, sink=True)
    out, top, total = draw(forward)
    forward.run(epilogue.store_rows, (out,), top, total)
    forward.check(np.float64(out), np.float64(top) / LOG2E, np.float64(total))


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("split, rest", [(None, False), (None, True), (0, True), (2, True)])
def test_the_log_sum_exp_of_a_part_is_what_a_merge_of_it_alone_gives(split, rest, sink):
    forward = Forward(sink=sink, rest=rest, split=split, in_parts=True)
    out, top, total = draw(forward, far=True)
    forward.run(epilogue.store_rows, (out,), top, total)
    forward.check(np.float64(out), np.float64(top) / LOG2E, np.float64(total))
    if forward.rest is not None:
        assert (forward.lse + forward.rest)[forward.rest != UNTOUCHED].tolist() == (
            forward.lse[forward.rest != UNTOUCHED].tolist()
        )
    alone = Forward(sink=sink, split=split, in_parts=True)
    alone.run(epilogue.store_rows, (out,), top, total)
    assert np.array_equal(alone.lse, forward.lse)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_in_turn_have_the_bits_of_parts_that_are_stored_and_merged_last_first(count, sink):
    held = np.full(ROWS * (DIM + HELD_NUMBERS), UNTOUCHED, np.float32)
    one = Forward(sink=sink, in_parts=True, held=held)
    parts = [draw(one) for _ in range(count)]
    host = Host({"gl": Arrays(), "tl": Arrays()})
    merged: Any = None
    weights, plus, ends = (
        host.turned(f) for f in (common.part_weights, common.plus_part, common.all_parts)
    )
    for number, (out, top, total) in enumerate(parts):
        part = count - 1 - number
        turn = SimpleNamespace(part=tensor(part), number=tensor(number), is_last=part == 0)
        if number:
            # Where a row saw no key in this part, what its output holds does not matter.
            out[9], total[9], top[9] = 5.0, 0.0, -np.inf
        one.run(epilogue.store_rows, (out,), top, total, turn=turn)
        assert (one.written is None) == (part > 0)
        split = Forward(sink=sink, rest=True, split=part, in_parts=True)
        split.run(epilogue.store_rows, (out,), top, total)
        # Rows that are not in use have no partial output.
        at = part * BATCH + ENTRY
        assert split.rest is not None
        own = [x[at, KV_HEAD, :USED].view(Tensor) for x in (split.lse, split.rest)]
        values = split.partials[at, :USED, KV_HEAD].view(Tensor)
        if merged is None:
            nothing = np.zeros(USED, np.float32).view(Tensor)
            merged = nothing - np.inf, nothing, nothing, np.zeros_like(values)
        lse, rest, old, new = weights(*merged[:2], *own)
        sums = np.asarray(Arrays().fma(merged[2], old, new)).view(Tensor)
        merged = lse, rest, sums, plus(merged[3], old[:, None], values, new[:, None])
    lse, rest, sums = ends(*merged[:3])
    assert one.written is not None
    assert np.array_equal(one.written[0][:USED], merged[3] * (np.float32(1.0) / sums)[:, None])
    assert np.array_equal(one.lse[ENTRY, KV_HEAD, :USED], lse)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_values_of_8_bits_are_scaled(sink):
    forward = Forward(sink=sink, fp8=True)
    out, top, total = draw(forward)
    # Rows without keys whose sums are of what else lay there, keys of no weight, and a NaN.
    total[0], out[0] = 3.0, 5.0
    total[10], out[10] = 0.0, 0.0
    total[11], out[11] = np.nan, np.nan
    forward.run(epilogue.store_rows, (out,), top, total)
    forward.check(np.float64(out), np.float64(top) / LOG2E, np.float64(total))


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("split, rest", [(None, False), (None, True), (0, True), (1, True)])
def test_rows_without_keys_have_zeros_and_the_sink(split, rest, sink):
    forward = Forward(sink=sink, rest=rest, split=split)
    zeros = np.zeros((ROWS, DIM), np.float32).view(Tensor)
    forward.run(epilogue.store_empty, (zeros,))
    if split is not None and not sink:
        # No weight: nothing is written of the output.
        assert (forward.partials == UNTOUCHED).all()
        own = forward.lse[split * BATCH + ENTRY, KV_HEAD, :ROWS]
        assert (own == -np.inf).all() and (forward.lse != UNTOUCHED).sum() == own.size
        assert forward.rest is not None
        assert not forward.rest[forward.lse != UNTOUCHED].any()
        return
    forward.check(np.float64(zeros), np.full(ROWS, -np.inf), np.zeros(ROWS))
