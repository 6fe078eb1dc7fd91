"""What the Hopper decodes write of the outputs, maxima and sums of their rows: their own functions
on NumPy arrays, against float64."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from heedful.kernels.args.decode import DecodeMerge
from heedful.kernels.common.constants import LOG2E
from heedful.kernels.hopper.decode import results as decode_results
from support.hopper.hosted import Host
from support.hopper.hosted_arrays import Arrays, Memory, Tensor, tensor

KV_HEADS, GROUP, TILE, COLUMNS = 2, 3, 16, 16
HEADS = KV_HEADS * GROUP
# Tokens of sequences, used and stored: of the last, rows of another tile are stored, too.
USED, STORED = (4, 0, 3, 5), (4, 2, 6, 7)
UNTOUCHED = 77.0
# Some fifty roundings of float32, and no more.
CLOSE = 2.0**-18


class Decode:
    """What a decode writes to, and the tiles of its rows. is_packed: whether sequences lie one
    behind the other. consumers: who share the columns, of which the last has fewer."""

    def __init__(
        self,
        is_packed: bool,
        sink: bool = False,
        rest: bool = False,
        count: int = 1,
        consumers: int = 1,
    ):
        self.consumers, self.dim = consumers, consumers * COLUMNS - 4
        self.drawn = np.random.default_rng(count)
        self.is_packed, self.batch = is_packed, len(USED)
        self.starts = np.cumsum([0, *STORED]) if is_packed else np.zeros(len(USED), int)
        rows = (1, sum(STORED)) if is_packed else (self.batch, max(STORED))
        self.out = np.full((*rows, HEADS, self.dim), UNTOUCHED, np.float32)
        self.lse = np.full((rows[0], HEADS, rows[1]), UNTOUCHED, np.float32)
        self.rest = np.full_like(self.lse, UNTOUCHED) if rest else None
        self.sink = self.drawn.normal(0, 300, HEADS).astype(np.float32) if sink else None
        many = count * KV_HEADS * sum(-(-stored * GROUP // TILE) for stored in STORED)
        many *= consumers
        self.slots = np.full((many, TILE, COLUMNS), np.nan, np.float32)
        self.sums = np.full((many, TILE, 2), np.nan, np.float32)
        self.counts = np.zeros(64, np.int32)
        self.merge = DecodeMerge(
            Memory(self.slots), Memory(self.sums), Memory(self.counts), 2, 1, False
        )
        self.params: Any = SimpleNamespace(
            shape=SimpleNamespace(
                heads_q=tensor(HEADS), heads_k=tensor(KV_HEADS), batch=tensor(self.batch)
            ),
            seqs=SimpleNamespace(cu_q=Memory(self.starts) if is_packed else None),
            tile=SimpleNamespace(HEAD_DIM_V=self.dim, BLOCK_E=COLUMNS, ROWS=TILE, MERGE=False),
            sink=None if self.sink is None else Memory(self.sink),
            work=SimpleNamespace(merge=self.merge),
        )
        stride = 0 if is_packed else self.out[0].size
        self.io = SimpleNamespace(
            out=SimpleNamespace(
                ptr=Memory(self.out), stride_b=stride, stride_n=HEADS * self.dim, stride_h=self.dim
            ),
            lse=SimpleNamespace(
                ptr=Memory(self.lse), stride_b=stride // self.dim, stride_h=self.lse.shape[2]
            ),
            rest=None if self.rest is None else Memory(self.rest),
        )

    def sink_of(self, key: tuple) -> float | None:
        """That of a row's head; lanes of heads of the next KV head there are none."""
        return None if self.sink is None else float(self.sink[key[2]])

    def host(self, **more) -> Host:
        language = Arrays(**more)
        return Host({"gl": language, "tl": language, "opaque": lambda number: number})

    def segments(self, count: int = 1):
        """Every tile of rows, as one of so many segments."""
        index = 0
        for b, (used, stored) in enumerate(zip(USED, STORED, strict=True)):
            for g in range(KV_HEADS):
                for row0 in range(0, stored * GROUP, TILE):
                    yield SimpleNamespace(
                        b=tensor(0 if self.is_packed else b),
                        g=tensor(g),
                        row0=tensor(row0),
                        seq=SimpleNamespace(
                            len_q=tensor(used),
                            stored_q=tensor(stored),
                            token_q=tensor(self.starts[b], np.int64),
                        ),
                        partials=SimpleNamespace(count=tensor(count), tile=tensor(index)),
                    )
                    index += 1

    def wanted(self, found: dict, name: str) -> np.ndarray:
        """What a result is to hold where `found` has (out, lse) of a sequence, token and head."""
        of_out = name == "out"
        made = np.full_like(self.out if of_out else self.lse, UNTOUCHED, np.float64)
        for b, (used, stored) in enumerate(zip(USED, STORED, strict=True)):
            entry, start = (0, self.starts[b]) if self.is_packed else (b, 0)
            for token in range(stored):
                for head in range(HEADS):
                    row: Any = found[b, token, head] if token < used else (0.0, -np.inf)
                    out, lse = row
                    out = out[: self.dim] if np.ndim(out) else out
                    if of_out:
                        made[entry, start + token, head] = out
                    else:
                        made[entry, head, start + token] = lse
        return made


def draw(decode: Decode, far: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs before they are divided, maxima in base 2 and sums of rows; the first saw no key."""
    rng, rows = decode.drawn, TILE
    top = rng.normal(0, 5, rows).astype(np.float32) * np.float32(2.0**14 if far else 1)
    total = rng.uniform(1, 40, rows).astype(np.float32)
    out = (rng.normal(0, 1, (rows, decode.consumers * COLUMNS)) * total[:, None]).astype(np.float32)
    top[0], total[0], out[0] = -np.inf, 0.0, 0.0
    return out.view(Tensor), top.view(Tensor), total.view(Tensor)


def merged(partials, sink: float | None = None) -> tuple[Any, float]:
    """Output and log-sum-exp of a row of these (output, maximum, sum), with a sink."""
    weights = [
        (np.float64(out), float(top) / float(np.float32(LOG2E.value)), float(total))
        for out, top, total in partials
    ]
    tops = [top for _, top, _ in weights] + ([] if sink is None else [float(sink)])
    reference = max(tops)
    if reference == -np.inf:
        return 0.0, -np.inf
    outs = sum(out * np.exp(top - reference) for out, top, _ in weights)
    total = sum(total * np.exp(top - reference) for _, top, total in weights)
    if sink is not None:
        total += np.exp(float(sink) - reference)
    return outs / total, reference + np.log(total)


def rows_of(segment, b: int):
    """(row of the tile, what it is): sequence, token and query head."""
    for row in range(TILE):
        token, lane = divmod(int(segment.row0) + row, GROUP)
        yield row, (b, token, int(segment.g) * GROUP + lane)


def tiles_by_sequence(decode: Decode, count: int = 1):
    """Pieces with the number of their sequence."""
    counts = [KV_HEADS * -(-stored * GROUP // TILE) for stored in STORED]
    numbers = [b for b, count in enumerate(counts) for _ in range(count)]
    return zip(numbers, decode.segments(count), strict=True)


def halves(out: Tensor, consumer: int = 0) -> tuple[Tensor, ...]:
    """A consumer's columns as the parts of its accumulator have them."""
    own = out[:, consumer * COLUMNS : (consumer + 1) * COLUMNS]
    return tuple(half.view(Tensor) for half in np.split(own, 2, 1))


@pytest.fixture(autouse=True)
def of_rows_without_keys():
    """0 / 0 and -inf - -inf are made, as on the device, and not taken."""
    with np.errstate(divide="ignore", invalid="ignore"):
        yield


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("rest", [False, True], ids=["", "rest"])
def test_whole_rows_are_divided_and_their_log_sum_exp_is_natural(rest, is_packed, sink):
    decode = Decode(is_packed, sink, rest)
    store = decode.host().turned(decode_results.store_columns)
    found = {}
    for b, segment in tiles_by_sequence(decode):
        out, top, total = draw(decode, far=rest)
        for row, key in rows_of(segment, b):
            found[key] = merged([(out[row], top[row], total[row])], decode.sink_of(key))
        store(decode.io, decode.params, segment, segment.row0, halves(out), top, total, 0)
    np.testing.assert_allclose(decode.out, decode.wanted(found, "out"), CLOSE, CLOSE)
    lse = decode.wanted(found, "lse")
    np.testing.assert_allclose(decode.lse, lse, CLOSE, CLOSE)
    if decode.rest is not None:
        written = lse != UNTOUCHED
        assert (decode.rest[~written] == UNTOUCHED).all()
        assert not decode.rest[written & np.isinf(lse)].any()
        # Whatever a float32 of such scores has lost, the rest has.
        both = np.float64(decode.lse) + decode.rest
        np.testing.assert_allclose(both[written], lse[written], 2.0**-45, CLOSE)
        seen = written & np.isfinite(lse)
        assert (np.abs(decode.lse - lse)[seen] > 2 * CLOSE).any()


def segment_of(segment, number: int, count: int, tiles: int):
    """The segment as one of its tile: slots of the first segments lie ahead of all others."""
    index = int(segment.partials.tile)
    first, rest = index, tiles + index * (count - 1) - 1
    slot = rest + number if number else first
    partials = {
        "first": first,
        "rest": rest,
        "step": 1,
        "slot": slot,
        "count": count,
        "tile": index,
    }
    partials = SimpleNamespace(**{name: tensor(value) for name, value in partials.items()})
    return SimpleNamespace(**{**vars(segment), "partials": partials})


def results_in_segments(decode: Decode, count: int):
    """(tile, its segments with their draws) and what they merge to."""
    tiles = list(tiles_by_sequence(decode, count))
    found, drawn = {}, []
    for b, segment in tiles:
        draws = [draw(decode) for _ in range(count)]
        for row, key in rows_of(segment, b):
            of_row = [(out[row], top[row], total[row]) for out, top, total in draws]
            found[key] = merged(of_row, decode.sink_of(key))
        segments = [segment_of(segment, number, count, len(tiles)) for number in range(count)]
        drawn.append(list(zip(segments, draws, strict=True)))
    return drawn, found


def in_any_order(decode: Decode, things: list) -> list:
    return [things[index] for index in decode.drawn.permutation(len(things))]


def check_scratch(decode: Decode, tiles: list) -> None:
    """Segments are in slots of their own, and of packed sequences no more rows than these have."""
    used = np.zeros(decode.sums.shape[:2], bool)
    for tile in tiles:
        for segment, _ in tile if len(tile) > 1 else []:
            rows = (
                int(segment.seq.stored_q) * GROUP - int(segment.row0) if decode.is_packed else TILE
            )
            for own in range(decode.consumers):
                slot = int(segment.partials.slot) * decode.consumers + own
                assert not used[slot].any()
                used[slot, :rows] = True
    for array in (decode.slots[..., 0], decode.sums[..., 0], decode.sums[..., 1]):
        assert (np.isnan(array) == ~used).all()


def check_merged(decode: Decode, found: dict) -> None:
    np.testing.assert_allclose(decode.out, decode.wanted(found, "out"), CLOSE, CLOSE)
    np.testing.assert_allclose(decode.lse, decode.wanted(found, "lse"), CLOSE, CLOSE)
    assert not decode.counts.any()


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("few", [4, 16])
@pytest.mark.parametrize("count, sink", [(1, False), (2, True), (5, False)])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_whoever_is_last_merges_all_segments(is_packed, count, sink, few, consumers):
    decode = Decode(is_packed, sink, count=count, consumers=consumers)
    finish = decode.host().turned(decode_results.finish_segment)
    tiles, found = results_in_segments(decode, count)
    for tile in in_any_order(decode, tiles):
        for segment, (out, top, total) in in_any_order(decode, tile):
            for own in range(consumers):
                finish(decode.io, decode.params, segment, halves(out, own), top, total, own, few)
    check_merged(decode, found)
    check_scratch(decode, tiles)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_segments_that_merge_some_rows_each_merge_them_all(is_packed, count):
    decode = Decode(is_packed, count=count)
    decode.params.tile.MERGE = True
    host = decode.host()
    finish, merge = map(host.turned, (decode_results.finish_segment, decode_results.merge_rows))
    tiles, found = results_in_segments(decode, count)
    for tile in tiles:
        for segment, (out, top, total) in tile:
            finish(decode.io, decode.params, segment, halves(out), top, total, 0)
    assert (decode.counts[: len(tiles)] == count).all()
    decode.counts[:] = 0
    for tile in in_any_order(decode, tiles):
        for segment, _ in tile:
            merge(decode.io, decode.params, segment, 2, 2, 0)
    check_merged(decode, found)


@pytest.mark.parametrize("each", [1, 2], ids=["a program a head", "two programs a head"])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("rest", [False, True], ids=["", "rest"])
def test_sequences_without_keys_are_cleared_and_no_others(sink, rest, each):
    decode = Decode(False, sink, rest)
    decode.params.seqs = SimpleNamespace(
        cu_q=None,
        cu_k=None,
        used_q=Memory(np.array(USED, np.int32)),
        used_k=Memory(np.array([0, 1, -1, 0], np.int32)),
        leftpad_k=None,
        new_k=None,
        seqlen_q=tensor(max(STORED)),
        seqlen_k=tensor(9),
    )
    decode.params.mask = SimpleNamespace(bottom_right=tensor(1), shift=tensor(0), offsets=None)
    programs = each * KV_HEADS
    for number in range(programs):
        host = decode.host(program=number, programs=programs)
        host.turned(decode_results.store_empty)(decode.io, decode.params)
    for b, keys in enumerate((0, 1, -1, 0)):
        if keys > 0:
            for array in (decode.out, decode.lse, decode.rest):
                assert array is None or (array[b] == UNTOUCHED).all()
            continue
        want = np.full((HEADS, max(STORED)), -np.inf)
        if decode.sink is not None:
            want[:, : USED[b]] = decode.sink[:, None]
        assert not decode.out[b].any() and (decode.lse[b] == want).all()
        assert decode.rest is None or not decode.rest[b].any()
