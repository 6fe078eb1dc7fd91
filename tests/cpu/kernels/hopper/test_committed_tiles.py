"""What a producer commits of a work tile is what its consumers take: their tile has the sizes that
the producer found. The functions of both, as Python's."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.sm90 import tile_scheduler
from support.hopper.hosted import Host, Int, Machine, Numbers

SIZES = ("token_q", "len_q", "len_k", "off", "stored_q")


class Ring:
    """A scheduler with one place for a work tile."""

    tile_counter = 0

    def producer_commit(self, words, state, hulls):
        assert hulls == ()
        self.committed = words

    def words(self, first, end, state):
        return self.committed[first:end]

    def consumer_release(self, state):
        pass


@pytest.mark.parametrize(
    "lengths", ["", "cu_k", "used_q", "used_k", "leftpad_k", "varlen_tiles", "offsets"]
)
def test_consumers_have_the_sizes_that_the_producer_found(lengths):
    stored = SimpleNamespace(**dict.fromkeys(("cu_k", "used_q", "used_k", "leftpad_k")))
    stored.seqlen_q, stored.seqlen_k = Int(64), Int(500)
    order = SimpleNamespace(varlen_tiles=1 if lengths == "varlen_tiles" else None)
    if lengths not in ("", "offsets") and not order.varlen_tiles:
        setattr(stored, lengths, 1)
    params = SimpleNamespace(
        seqs=stored,
        order=order,
        gqa=SimpleNamespace(group=Int(2)),
        mask=SimpleNamespace(
            shift=Int(0),
            bottom_right=Int(1),
            offsets=1 if lengths == "offsets" else None,
            RANGES=0,
        ),
    )
    seq = dict(zip(SIZES, map(Int, (0, 64, 500, 436, 64)), strict=True))
    if lengths:
        seq |= {"len_q": Int(50), "len_k": Int(301), "off": Int(251)}
    tile = SimpleNamespace(batch=Int(1), head=Int(3), row=Int(0), seq=SimpleNamespace(**seq))
    numbers = Numbers(Machine(0), lambda _: 0, 1)
    host, ring = Host({"gl": numbers, "tl": numbers}), Ring()
    host.turned(tile_scheduler.commit_work_tile)(params, ring, Int(7), tile, Int(2), None)
    taken, split = host.turned(tile_scheduler.current_work_tile)(params, ring, Int(7), None)
    assert (split, taken.batch, taken.head, taken.row) == (2, 1, 3, 0)
    assert {name: getattr(taken.seq, name) for name in SIZES} == seq


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("lengths", [(100, 1, 513, 0), (2048,), (0, 0), (1, 1025, 1024)])
def test_a_producer_takes_the_parts_that_sequences_have_and_no_others(lengths, programs):
    """Each once, whoever takes it; the first of each sequence, though it be empty."""
    part_keys, tiles = 512, len(lengths)
    splits = -(-max(lengths) // part_keys) + 1
    taken = 0

    def advance(index):
        nonlocal taken
        taken += 1
        return Int(programs + taken - 1)

    def tile_at(params, scheduler, index):
        seq = SimpleNamespace(len_k=Int(lengths[int(index) % tiles]))
        return SimpleNamespace(seq=seq), Int(int(index) // tiles)

    params = SimpleNamespace(
        split=SimpleNamespace(splits=Int(splits), PART_TILES=4),
        tile=SimpleNamespace(BLOCK_N=part_keys // 4),
    )
    scheduler = SimpleNamespace(count=Int(splits * tiles), advance=advance)
    numbers = Numbers(Machine(0), lambda _: 0, 1)
    host = Host({"gl": numbers, "tl": numbers, "work_tile_at": tile_at})
    next_part, found = host.turned(tile_scheduler.next_part), []
    for program in range(programs):
        index = next_part(params, scheduler, Int(program))
        while index < scheduler.count:
            found.append((int(index) % tiles, int(index) // tiles))
            index = next_part(params, scheduler, advance(index))
    has = {(i, p) for i, n in enumerate(lengths) for p in range(max(1, -(-n // part_keys)))}
    assert sorted(found) == sorted(has)
    # Splits of other numerics are taken as they come.
    params.split.PART_TILES = None
    assert next_part(params, scheduler, Int(3)) == 3
