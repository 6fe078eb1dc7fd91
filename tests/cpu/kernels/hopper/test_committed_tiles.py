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

    def producer_commit(self, words, state):
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
