"""Who waits for whom in the Hopper backward: its producer, its consumers, who makes dQ and who adds
it as threads, with work tiles drawn from a counter, dealt out by number, split, and added to dQ in
turns. `support.hopper.backward_roles` says what of it is the kernel's own.
"""

from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.backward import mainloop as mainloop_file
from heedful.kernels.hopper.backward import tile as tile_file
from heedful.kernels.hopper.backward.dq import warpgroup as dq_file
from heedful.kernels.hopper.sm90.pipeline import stage_of
from heedful.kernels.hopper.sm90.tile_scheduler import TileScheduler
from support.hopper.backward_pair_roles import PairDevice
from support.hopper.backward_roles import (
    BLOCK_N,
    CONSUMERS,
    GROUP,
    KEYS,
    SIDE,
    STAGES,
    Device,
    Sizes,
    Tile,
)
from support.hopper.hosted import Deadlock, Host, Int, Machine, Numbers, Row
from support.problems.grids import in_turns

DENSE = [
    Sizes(((200, 500),)),
    Sizes(((200, 500),), right=0),
    Sizes(((500, 200),), right=0),
    Sizes(((130, 130), (130, 130)), right=0, l2_heads=3),
    Sizes(((300, 600),), left=100),
    Sizes(((300, 600),), left=70, right=40, heads_k=1),
    Sizes(((64, 128),), heads_k=1),
    Sizes(((600, 300),), left=0, right=0),
]
PACKED = [
    Sizes(((200, 300), (64, 0), (0, 200), (130, 257)), packed=True),
    Sizes(((300, 200), (100, 400), (1, 1)), packed=True, right=0, l2_heads=2),
]
# Keys that end before their storage does, or begin after it; and packed sequences with gaps.
USED = [
    Sizes(((200, 500), (200, 500)), used=((200, 0, 300), (200, 0, 0)), right=0),
    Sizes(((300, 600), (300, 600)), used=((300, 17, 500), (300, 600, 0)), left=70),
    Sizes(((70, 300), (70, 300)), used=((70, 299, 1), (70, 40, 260))),
    Sizes(((200, 300), (130, 257)), packed=True, used=((65, 0, 129), (130, 0, 257)), right=0),
]
# Documents, windows beside leading keys, and tiles that are visited in vain.
NONE = ((0, 0),)
RUNS = [
    (((0, 100),), ((0, 160),), ((130, 300),), ((300, 600),), NONE),
    (((0, 64), (300, 400)), ((0, 64), (350, 640)), NONE, ((0, 10),), ((100, 200), (500, 640))),
    (((0, 640),), NONE, ((500, 600),), NONE, ((0, 640),)),
]
RANGED = [Sizes(((300, 640),), runs=runs, right=right) for runs in RUNS for right in (None, 0)]
# Tiles that need a mask come first.
LISTS = [
    (((2, 0, 1), 1), ((), 0), ((0,), 0), ((1, 2), 2), ((3, 1, 0, 2), 3)),
    (((), 0), ((0, 1, 2, 3), 0), ((1,), 1), ((), 0), ((2, 3), 0)),
]
LISTED = [Sizes(((500, 640),), listed=lists) for lists in LISTS]
# Of 128 columns, of them with dropout, of 64.
TILES = [Tile(), Tile(k_stages=1), Tile(block_m=128, dim=64)]


class Checked(Device):
    """Knows what must have come out."""

    def check(self):
        """Gradients of every key tile are stored once, made of the query tiles that see it, and
        dQ is made of the same ones."""
        assert not any(self.products.values()) and not any(self.copies.values())
        visits = {key_tile: self.check_key_tile(*key_tile) for key_tile in self.key_tiles()}
        assert not self.stored and not self.partials
        for b in range(len(self.sizes.lengths)):
            rows, _, keys = self.sizes.in_use(b)
            for head in range(self.sizes.heads_k * GROUP):
                for block in range(self.q_blocks[b]):
                    seen = self.check_query_tile(b, head, block)
                    made = {tile for tile, of in visits.items() if (head, block) in of}
                    assert set(seen) == {(b, *rest) for a, *rest in made if a == b}
                    self.check_seen(b, head // GROUP, block, rows, keys, seen)
        assert not self.added

    def key_tiles(self) -> Iterator[tuple[int, int, int]]:
        for b, blocks in enumerate(self.key_blocks):
            for head in range(self.sizes.heads_k):
                for block in range(blocks):
                    yield b, head, block

    def slot(self, key_tile: tuple[int, int, int]) -> int:
        """Which of the split tiles it is, where only the last ones are; -1: a whole one."""
        first = self.tiles - self.tail
        order, swizzle = self.params.order, self.host.turned(tile_file.l2_swizzle)
        heads = self.tiles // self.key_blocks[0]
        numbers = order.key_blocks, Int(heads), order.l2_heads, order.l2_groups
        tail = [swizzle(Int(i), *numbers) for i in range(first, self.tiles)]
        b, head, block = key_tile
        wanted = (b * self.sizes.heads_k + head, block)
        return tail.index(wanted) if wanted in tail else -1

    def splits_of(self, key_tile: tuple[int, int, int]) -> int:
        return 1 if self.tail and self.slot(key_tile) < 0 else self.splits

    def gradients(self, key_tile: tuple[int, int, int], split: int, consumer: int) -> list:
        """dK and dV of a consumer's keys, as they were stored."""
        b, head, block = key_tile
        col = block * BLOCK_N + consumer * KEYS
        if self.splits_of(key_tile) == 1:
            # Gradients of all keys in storage but padding are stored.
            col += self.sizes.in_use(b)[1]
            at = self.box(b, head, self.starts[1][b], self.sizes.lengths[b][1], col)
            stored = [(name, *at) for name in ("dk", "dv")]
            assert self.stored.keys() >= set(stored)
            return [self.stored.pop(key) for key in stored]
        row = (split * self.sizes.heads_k + head) * self.partial_rows + self.first_keys[b] + col
        if self.tail:
            slot = self.slot(key_tile)
            row = split * self.partial_rows + slot * BLOCK_N + consumer * KEYS
        dim = self.tile.dim
        return [self.partials.pop(row * 2 * dim + KEYS * dim * i) for i in (1, 0)]

    def check_key_tile(self, b, head, block) -> list[tuple[int, int]]:
        """The query tiles of which a key tile's gradients are made, each once and in order."""
        visits = []
        for split in range(self.splits_of((b, head, block))):
            of_split = []
            for consumer in range(CONSUMERS):
                dk, dv = self.gradients((b, head, block), split, consumer)
                for (ds, q), (p, do) in zip(dk, dv, strict=True):
                    assert (ds.kind, p.kind) == ("ds", "p")
                    assert (ds.key_tile, ds.consumer) == ((b, head, block), consumer)
                    assert (q, do) == (("q", ds.q), ("dout", p.q))
                    assert (p.key_tile, p.query_tile, p.consumer, p.k) == (
                        *(ds.key_tile, ds.query_tile, ds.consumer, ds.k),
                    )
                of_split.append([ds.query_tile for ds, _ in dk])
            assert of_split[0] == of_split[1]
            visits += of_split[0]
        assert len(visits) == len(set(visits))
        if self.sizes.listed:
            steps = SIDE // self.tile.block_m
            tiles, _ = self.sizes.listed[block]
            of_head = [tile * steps + step for tile in tiles for step in range(steps)]
            assert visits == [(head * GROUP + r, m) for r in range(GROUP) for m in of_head]
        elif self.tile.heads_innermost:
            assert visits == self.by_rows(b, head, block, {m for _, m in visits})
        elif self.tile.rotates:
            seen = sorted({m for _, m in visits})
            first = block * len(seen) // self.key_blocks[b]
            first *= self.begins_elsewhere(b, block)
            heads = range(head * GROUP, head * GROUP + GROUP)
            assert visits == [(h, m) for h in heads for m in seen[first:] + seen[:first]]
        else:
            assert visits == sorted(visits)
        return visits

    def begins_elsewhere(self, b: int, block: int) -> bool:
        """Whether a key tile's visits may: all of a call without a mask, else those without one."""
        rows, keys = self.sizes.lengths[b]
        if self.sizes.right is None:
            return True
        end = (block + 1) * BLOCK_N
        return end <= keys and end - 1 <= keys - rows + self.sizes.right

    def by_rows(self, b, head, block, rows: set[int]) -> list[tuple[int, int]]:
        """Visits of all heads of one of these query tiles after the other: from the last where the
        key tile is of the first half."""
        order = sorted(rows, reverse=block < self.key_blocks[b] // 2)
        turns = (divmod(turn, GROUP) for turn in range(GROUP * len(order)))
        return [(head * GROUP + (GROUP * i + r + block) % GROUP, order[i]) for i, r in turns]

    def check_query_tile(self, b, head, block) -> list[tuple[int, int, int]]:
        """The key tiles that were added to a query tile, in order."""
        row = head * self.accum_rows + self.first_rows[b] + block * self.tile.block_m
        first, second = (
            [
                self.check_dq(products, (head, block), share)
                for products in self.added.pop(2 * row // self.tile.block_m + share, [])
            ]
            for share in range(2)
        )
        assert len(set(first)) == len(first) and sorted(first) == sorted(second)
        if self.in_turns:
            turns, others = (
                [tile for tile in share if self.has_turn(block, tile[-1])]
                for share in (first, second)
            )
            assert turns == others
            assert self.turns[row // self.tile.block_m] == len(turns)
        return first

    def check_dq(self, products, query_tile, share) -> tuple[int, int, int]:
        """The key tile of which a share of dQ is made: of both consumers' dS and keys, of half of
        128 queries or of the columns of 64."""
        of_rows = self.tile.block_m > KEYS
        key_tiles = set()
        for consumer, (ds, k) in enumerate(products):
            if of_rows:
                ds, begin = ds
            else:
                k, begin = k
            assert begin == share * (KEYS if of_rows else self.tile.dim // 2)
            assert (ds.kind, ds.consumer, ds.query_tile) == ("ds", consumer, query_tile)
            assert k == ("k", ds.k)
            key_tiles.add(ds.key_tile)
        assert len(products) == CONSUMERS
        (key_tile,) = key_tiles
        return key_tile

    def has_turn(self, block: int, key_block: int) -> bool:
        """Whether a key tile that has visited a query tile is not there in vain."""
        return not self.sizes.runs or key_block in self.runs_of(block)

    def check_seen(self, b, kv_head, block, rows, keys, seen):
        s = self.sizes
        block_m = self.tile.block_m
        wanted = set()
        for row in range(block * block_m, min(block * block_m + block_m, rows)):
            low = 0 if s.left is None else max(0, row + keys - rows - s.left)
            high = keys - 1 if s.right is None else min(keys - 1, row + keys - rows + s.right)
            wanted |= {(b, kv_head, tile) for tile in range(low // BLOCK_N, high // BLOCK_N + 1)}
        if s.listed:
            return
        if s.runs:
            wanted = {(b, kv_head, tile) for tile in self.runs_of(block)}
        assert wanted <= set(seen)
        if self.in_turns:
            order = [tile for *_, tile in seen if self.has_turn(block, tile)]
            assert order == sorted(order, reverse=s.right is not None)


# (programs, whether they draw their tiles, whether dQ is added in turns, splits of visits).
WAYS = {
    "one-each": (99, False, False, 1),
    "drawn": (3, True, False, 1),
    "in-turns": (3, True, True, 1),
    "more-programs-than-tiles": (99, True, True, 1),
    "split": (3, True, False, 3),
    "split-in-turns": (5, True, True, 2),
    "split-more-than-visits": (99, True, True, 5),
}


@pytest.mark.parametrize(
    "case, seed",
    in_turns(product(DENSE + PACKED + RANGED + USED, WAYS), range(3), each=6),
    ids=str,
)
def test_every_tile_is_made_once_and_nobody_waits_for_ever(case, seed):
    sizes, way = case
    programs, draws, turns, splits = WAYS[way]
    device = Checked(sizes, min(programs, 14), draws, turns, seed, splits=splits, tile=TILES[seed])
    device.run()
    device.check()


@pytest.mark.parametrize(
    "case, block_m, seed",
    in_turns(product(DENSE[1:4], [(99, 1), (3, 1), (3, 3), (99, 5)]), (64, 128), range(2)),
    ids=str,
)
def test_all_heads_visit_with_one_query_tile_after_the_other(case, block_m, seed):
    sizes, (programs, splits) = case
    tile = Tile(block_m, 192 - block_m, heads_innermost=True)
    device = Checked(sizes, min(programs, 14), True, False, seed, splits=splits, tile=tile)
    device.run()
    device.check()


@pytest.mark.parametrize("group", (2, 3, 8))
@pytest.mark.parametrize("col", (0, 3 * BLOCK_N))
def test_runs_of_whole_visits_end_where_a_query_tile_needs_a_mask(group, col):
    """Heads innermost, walking down (col 0) and up."""
    host = Host({"gl": Numbers(Machine(0), lambda now: 0, 1)})
    file = {name: host.turned(getattr(tile_file, name)) for name in ("query_tile", "is_masked")}
    full_run = host.turned(mainloop_file.full_run)
    params = SimpleNamespace(
        tile=SimpleNamespace(BLOCK_N=BLOCK_N),
        ways=SimpleNamespace(HEADS_INNERMOST=True),
        sizes=SimpleNamespace(group=Int(group)),
        order=SimpleNamespace(key_blocks=Int(4)),
        mask=SimpleNamespace(blocks=SimpleNamespace(SIDE=None)),
    )
    tile = SimpleNamespace(col=Int(col), kv_head=Int(1))
    for bounds in combinations_with_replacement(range(5), 4):
        names = ("begin", "full_begin", "full_end", "end")
        blocks = SimpleNamespace(**dict(zip(names, map(Int, bounds), strict=True)))
        count = (bounds[3] - bounds[0]) * group
        seen = [file["query_tile"](params, tile, blocks, Int(n)) for n in range(count)]
        heads, rows = range(group, 2 * group), range(bounds[0], bounds[3])
        assert sorted(seen) == sorted(product(heads, rows))
        masked = [bool(file["is_masked"](blocks, block)) for _, block in seen]
        for number in range(count):
            run = int(full_run(params, tile, blocks, Int(number), Int(count - 1)))
            assert (
                masked[number:].index(True) == run
                if True in masked[number:]
                else (run == count - number)
            )


@pytest.mark.parametrize(
    "case, seed",
    in_turns(product(LISTED, [(99, 1), (3, 1), (3, 3), (99, 5)]), range(6), each=3),
    ids=str,
)
def test_a_key_tile_is_made_of_the_query_tiles_of_its_list(case, seed):
    sizes, (programs, splits) = case
    tile = TILES[seed % len(TILES)]
    device = Checked(sizes, min(programs, 14), True, False, seed, splits=splits, tile=tile)
    device.run()
    device.check()


@pytest.mark.parametrize(
    "case, seed",
    in_turns(product((DENSE[0], DENSE[1], DENSE[5], PACKED[0]), ("backward", "pair")), range(3)),
    ids=str,
)
def test_cotangents_of_far_rows_are_scaled_before_anybody_reads_them(case, seed):
    sizes, made = case
    if made == "pair":
        device = PairChecked(sizes, 3, True, False, seed, far=True)
    else:
        device = Checked(sizes, 3, True, False, seed, tile=TILES[seed], far=True)
    device.run()
    device.check()


# Work tiles of many visits, of two, of one that is half of these; tiles without any.
PROBLEMS = [
    (DENSE[1], False, 1),
    (Sizes(((64, 900),)), False, 1),
    (Sizes(((64, 900),)), True, 2),
    (Sizes(((64, 1500),), left=0, right=0), False, 1),
]


def assert_noticed(made=Checked, seeds: int = 6, **fault) -> None:
    """Whatever the order of roles, of one of the problems at least."""
    for seed in range(seeds):
        for sizes, turns, splits in PROBLEMS:
            device = made(sizes, 2, True, turns, seed, splits=splits, **fault)
            try:
                device.run()
                device.check()
            except AssertionError:
                return
    pytest.fail("nothing was wrong")


# Who waits and arrives where.
STEPS = {
    ("backward_producer", "wait"): ("k_empty", "v_empty", "q.empty", "tile.empty"),
    ("backward_producer", "arrive"): ("tile.full",),
    ("backward_consumer", "wait"): (
        *("k_full", "v_full", "q.full", "do.full", "ds_empty", "stores", "tile.full"),
    ),
    ("backward_consumer", "arrive"): (
        *("k_empty", "v_empty", "q.empty", "do.empty", "ds_full", "tile.empty"),
    ),
    ("backward_dq", "wait"): ("ds_full", "dq_empty", "tile.full"),
    ("backward_dq", "arrive"): ("k_empty", "ds_empty", "dq_full", "tile.empty"),
    ("backward_adder", "wait"): ("dq_full", "tile.full"),
    ("backward_adder", "arrive"): ("dq_empty", "tile.empty"),
}
# What a consumer waits for twice: each must be noticed by itself.
PARTS = [
    ("backward_mainloop", "wait", "stores"),
    ("store_ds", "wait", "ds_empty"),
    ("store_gradients", "wait", "ds_empty"),
    ("store_gradients", "wait", "stores"),
]
# What follows from another wait: keys are there once dS is made of them, and a stage of cotangents
# is free if that of its queries is, as long as both have as many.
IMPLIED = {("backward_dq", "wait", "k_full"), ("backward_producer", "wait", "do.empty")}
EACH = [(*who, what) for who, every in STEPS.items() for what in every]


@pytest.mark.parametrize("step", EACH + PARTS, ids="-".join)
def test_who_does_not_wait_or_arrive_is_noticed(step):
    assert_noticed(skips=frozenset({step}))


def test_every_wait_and_arrival_is_among_those_that_are_left_out_here():
    taken = set()
    for sizes, turns, splits in PROBLEMS:
        device = Checked(sizes, 2, True, turns, 0, splits=splits)
        device.run()
        device.check()
        taken |= device.taken
    roles = {role for role, _ in STEPS}
    assert {step for step in taken if step[0] in roles} == set(EACH) | IMPLIED
    assert taken >= set(PARTS)


def counted(ring: str, count: int):
    """Shared memory with that many arrivals at each barrier of a ring."""

    def bend(shared):
        bars = getattr(shared, ring)
        for i in range(bars.shape[0]):
            bars.index(i).__init__(count)

    return bend


def of_one_stage(*rings: str):
    """Shared memory whose stages share a barrier."""

    def bend(shared):
        for ring in rings:
            bar = getattr(shared, ring).index(0)
            setattr(shared, ring, Row(bar, bar, shape=[2, 1]))

    return bend


@pytest.mark.parametrize(
    "bend",
    [
        of_one_stage("k_full"),
        of_one_stage("k_empty"),
        of_one_stage("k_full", "k_empty"),
        of_one_stage("ds_full", "ds_empty"),
        counted("k_empty", 2),
        counted("k_empty", 4),
        counted("v_empty", 1),
        counted("ds_full", 4),
        counted("ds_empty", 2),
    ],
    ids=[
        "k-full-of-one-stage",
        "k-empty-of-one-stage",
        "keys-of-one-stage",
        "ds-of-one-stage",
        "keys-of-consumers-alone",
        "keys-of-one-more",
        "values-of-one-consumer",
        "ds-of-one-consumer",
        "ds-freed-twice",
    ],
)
def test_barriers_that_are_too_few_or_count_otherwise_are_noticed(bend):
    assert_noticed(bends=bend)


def test_keys_that_nobody_holds_for_dq_are_noticed():
    """Consumers are done with a work tile's keys before dQ is."""
    skips = frozenset({("backward_dq", "arrive", "k_empty")})
    assert_noticed(skips=skips, bends=counted("k_empty", CONSUMERS))


def test_dq_of_keys_of_the_other_stage_is_noticed():
    class OtherKeys(Checked):
        def __post_init__(self):
            super().__post_init__()
            self.instead = {"make_dq": self.make_dq}

        def make_dq(self, shared, ds_state, k_stage, params, share):
            return self.host.turned(dq_file.make_dq)(shared, ds_state, 1 - k_stage, params, share)

    assert_noticed(OtherKeys)


def test_ds_that_is_given_back_before_the_second_share_is_made_is_noticed():
    class Early(Checked):
        def __post_init__(self):
            super().__post_init__()
            self.instead = {"visit_dq": self.visit_dq}

        def visit_dq(self, shared, visit, k_stage, params):
            make_dq, send_dq = map(self.host.turned, (dq_file.make_dq, dq_file.send_dq))
            state = self.host.turned(stage_of)(visit, STAGES)
            self.wait(shared.ds_full.index(state.index), state.phase)
            for share in range(2):
                dq = make_dq(shared, state, k_stage, params, share)
                if share == 0:
                    self.arrive(shared.ds_empty.index(state.index))
                send_dq(shared, dq, visit, params, share)

    assert_noticed(Early)


def test_a_counter_that_passes_over_the_first_programs_is_noticed():
    """What is drawn counts from the first tile on: not, as the forward's counter, from the tiles
    that programs begin with."""

    class Late(Checked):
        def warp_specialize(self, roles, warps, registers):
            made = self.host.turned(TileScheduler)
            if not hasattr(made, "drawn"):
                made.drawn = made.fetch_next_work

                def late(scheduler, index):
                    first = index < 0
                    return made.drawn(scheduler, index) + (0 if first else self.programs)

                made.fetch_next_work = late
            super().warp_specialize(roles, warps, registers)

    sizes = DENSE[1]
    with pytest.raises(AssertionError):
        device = Late(sizes, 3, True, False, 0)
        device.run()
        device.check()
    with pytest.raises(Deadlock):
        Late(sizes, 3, True, True, 0).run()


class PairChecked(PairDevice, Checked):
    """Consumers that make dQ."""


PAIR_STEPS = {
    ("backward_producer", "wait"): ("v_empty", "q.empty"),
    ("backward_producer", "arrive"): ("tile.full",),
    ("pair_consumer", "wait"): ("k_full", "v_full", "q.full", "do.full", "ds_full", "stores")
    + ("tile.full",),
    ("pair_consumer", "arrive"): ("k_empty", "v_empty", "q.empty", "do.empty", "ds_full")
    + ("tile.empty",),
}
# Keys are given back with values, for which the producer waits first; and of one stage of these
# nobody is two work tiles behind.
IMPLIED_OF_PAIR = {
    ("backward_producer", "wait", what) for what in ("k_empty", "do.empty", "tile.empty")
}
EACH_OF_PAIR = [(*who, what) for who, every in PAIR_STEPS.items() for what in every]


# Programs, whether they draw tiles, and splits.
WAYS_OF_PAIR = [(99, False, 1), (3, True, 1), (3, True, 3)]


@pytest.mark.parametrize(
    "case, seed",
    in_turns(product(DENSE + PACKED + RANGED[:3] + USED, WAYS_OF_PAIR), range(2), each=2),
    ids=str,
)
def test_a_pair_makes_every_tile_once_and_nobody_waits_for_ever(case, seed):
    sizes, (programs, draws, splits) = case
    device = PairChecked(sizes, min(programs, 14), draws, False, seed, splits=splits)
    device.run()
    device.check()


@pytest.mark.parametrize("step", EACH_OF_PAIR, ids="-".join)
def test_who_of_a_pair_does_not_wait_or_arrive_is_noticed(step):
    assert_noticed(PairChecked, skips=frozenset({step}))


def test_every_wait_and_arrival_of_a_pair_is_among_those_that_are_left_out_here():
    taken = set()
    for sizes, _, splits in PROBLEMS:
        device = PairChecked(sizes, 2, True, False, 0, splits=splits)
        device.run()
        device.check()
        taken |= device.taken
    roles = {role for role, _ in PAIR_STEPS}
    assert {step for step in taken if step[0] in roles} == set(EACH_OF_PAIR) | IMPLIED_OF_PAIR


@pytest.mark.parametrize(
    "bend",
    [counted("k_empty", 1), counted("v_empty", 1), counted("ds_full", 4)],
    ids=["keys-of-one-consumer", "values-of-one-consumer", "ds-of-one-consumer"],
)
def test_barriers_of_a_pair_that_count_otherwise_are_noticed(bend):
    assert_noticed(PairChecked, bends=bend)


def test_a_pair_that_sends_gradients_before_both_have_read_keys_is_noticed():
    assert_noticed(PairChecked, meets=False)
