"""Who waits for whom in the Hopper backward of lists of 64 keys, whose consumers share the keys of
a work tile and take its visits in turn."""

from itertools import pairwise, product

import pytest

pytest.importorskip("triton")

from support.hopper.backward_alternating_roles import AlternatingDevice
from support.hopper.backward_roles import KEYS, SIDE, Sizes, Tile
from support.hopper.hosted import Row
from support.problems.grids import in_turns

# Lists of 128 queries, which are two visits each: of key tiles with many, one, two and none, and
# those that need a mask, which come first.
LISTS = [
    (((2, 0, 1), 1), ((), 0), ((0,), 0), ((1, 2), 2), ((3, 1, 0, 2), 3)),
    (((), 0), ((0, 1, 2, 3), 0), ((1,), 1), ((), 0), ((2, 3), 0)),
]
SIZES = [Sizes(((rows, 320),), listed=lists) for lists in LISTS for rows in (500, 512)]
TILES = [Tile(), Tile(k_stages=1), Tile(dim=64)]


class Checked(AlternatingDevice):
    """Knows what must have come out."""

    def check(self):
        """Gradients of each key tile are stored once, of all visits of its list, which each
        consumer took in order; dQ is made of the same ones."""
        assert not any(self.products.values()) and not any(self.copies.values())
        visits = {
            (b, head, block): self.check_key_tile(b, head, block)
            for b, blocks in enumerate(self.key_blocks)
            for head in range(self.sizes.heads_k)
            for block in range(blocks)
        }
        assert not self.stored and not self.partials
        seen: dict[tuple, list[tuple]] = {}
        for share_of_tile, added in self.added.items():
            tile, share = divmod(share_of_tile, 2)
            for ((ds, (k, begin)),) in added:
                assert (ds.kind, begin) == ("ds", share * self.tile.dim // 2)
                assert k == ("k", ds.k)
                head, block = ds.query_tile
                row = head * self.accum_rows + block * self.tile.block_m
                assert row == tile * self.tile.block_m
                seen.setdefault((*ds.query_tile, share), []).append(ds.key_tile)
        wanted: dict[tuple, list[tuple]] = {}
        for key_tile, of in visits.items():
            for query_tile in of:
                for share in range(2):
                    wanted.setdefault((*query_tile, share), []).append(key_tile)
        assert {at: sorted(tiles) for at, tiles in seen.items()} == {
            at: sorted(tiles) for at, tiles in wanted.items()
        }

    def gradients(self, b, head, block, split):
        """(dK, dV) of a key tile, as they were stored."""
        if self.splits == 1:
            lengths = self.sizes.lengths[b][1]
            at = self.box(b, head, self.starts[1][b], lengths, block * KEYS)
            return [self.stored.pop((name, *at)) for name in ("dk", "dv")]
        row = (split * self.sizes.heads_k + head) * self.partial_rows
        place = (row + self.first_keys[b] + block * KEYS) * 2 * self.tile.dim
        return [self.partials.pop(place + KEYS * self.tile.dim * i) for i in (1, 0)]

    def check_key_tile(self, b, head, block) -> list[tuple[int, int]]:
        """The query tiles of which a key tile's gradients are made."""
        tiles, _ = self.sizes.listed[block]
        steps = SIDE // self.tile.block_m
        of_head = [tile * steps + step for tile in tiles for step in range(steps)]
        order = [(head * 2 + r, m) for r in range(2) for m in of_head]
        found = []
        for split in range(self.splits):
            dk, dv = self.gradients(b, head, block, split)
            for name, made in (("ds", dk), ("p", dv)):
                for scores, operand in made:
                    assert scores.kind == name and scores.key_tile == (b, head, block)
                    assert operand == ("q" if name == "ds" else "dout", scores.q)
                for consumer in range(2):
                    mine = [order.index(x.query_tile) for x, _ in made if x.consumer == consumer]
                    assert all(after == before + 2 for before, after in pairwise(mine))
            assert {x.query_tile for x, _ in dk} == {x.query_tile for x, _ in dv}
            found += [x.query_tile for x, _ in dk]
        assert sorted(found) == sorted(order)
        return found


def device_of(sizes, programs, seed, splits=1, **more) -> Checked:
    made = {"tile": TILES[seed % len(TILES)], **more}
    return Checked(sizes, min(programs, 14), True, False, seed, splits=splits, **made)


WAYS = [(99, 1), (3, 1), (1, 1), (3, 3), (99, 5)]


@pytest.mark.parametrize("case, seed", in_turns(product(SIZES, WAYS), range(3), each=3), ids=str)
def test_both_make_the_gradients_of_a_list_and_nobody_waits_for_ever(case, seed):
    sizes, (programs, splits) = case
    device = device_of(sizes, programs, seed, splits)
    device.run()
    device.check()


def assert_noticed(seeds: int = 8, **fault) -> None:
    for seed in range(seeds):
        # Five splits of four visits leave one consumer, or both, without any.
        for sizes, splits in ((SIZES[0], 1), (SIZES[2], 1), (SIZES[0], 5)):
            device = device_of(sizes, 2, seed, splits, **fault)
            try:
                device.run()
                device.check()
            except (AssertionError, AttributeError):
                # Also numbers that were read before there were any.
                return
    pytest.fail("nothing was wrong")


# What consumers wait for as they pass over a work tile follows from their meeting in the tile
# before, but for a moment.
STEPS = {
    ("backward_producer", "wait"): ("k_empty", "v_empty", "q.empty", "do.empty"),
    ("backward_consumer", "wait"): ("k_full", "v_full", "q.full", "do.full", "ds_empty", "stores"),
    ("backward_consumer", "arrive"): ("k_empty", "v_empty", "q.empty", "do.empty", "ds_full"),
    ("backward_dq", "wait"): ("ds_full", "dq_empty"),
    ("backward_dq", "arrive"): ("k_empty", "ds_empty", "dq_full"),
    ("backward_adder", "wait"): ("dq_full",),
    ("backward_adder", "arrive"): ("dq_empty",),
    ("pass_over", "arrive"): ("k_empty", "v_empty"),
    ("wait_for_own_ds", "wait"): ("ds_empty",),
    ("store_ds", "wait"): ("ds_empty",),
}
EACH = [(*who, what) for who, every in STEPS.items() for what in every]


@pytest.mark.parametrize("step", EACH, ids="-".join)
def test_who_does_not_wait_or_arrive_is_noticed(step):
    assert_noticed(skips=frozenset({step}))


def test_consumers_that_do_not_meet_are_noticed():
    assert_noticed(meets=False)


def counted(ring: str, count: int):
    def bend(shared):
        owner, _, name = ring.rpartition(".")
        bars: Row = getattr(getattr(shared, owner) if owner else shared, name)
        for i in range(bars.shape[0]):
            bars.index(i).__init__(count)

    return bend


@pytest.mark.parametrize(
    "ring, count",
    [("ds_full", 8), ("q.empty", 2), ("do.empty", 2), ("k_empty", 2), ("v_empty", 1)],
)
def test_barriers_that_count_otherwise_are_noticed(ring, count):
    assert_noticed(bends=counted(ring, count))
