"""Who waits for whom in the Hopper backward: its producers, consumers and adders as threads, with
work tiles drawn from a counter, dealt out by number, split, and added to dQ in turns.

The loops, the index arithmetic, the rings and the tile scheduler are the kernels' own code. Of the
main loop, which products fill, there are the waits and arrivals.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from heedful.kernels.hopper import backward_consumer as consumer_file
from heedful.kernels.hopper import backward_mainloop as mainloop_file
from heedful.kernels.hopper import backward_producer as producer_file
from heedful.kernels.hopper import backward_tile as tile_file
from heedful.kernels.hopper import sequences
from heedful.kernels.hopper.pipeline import Pipeline
from heedful.kernels.hopper.tile_scheduler import TileScheduler
from support.hosted import (
    Barrier,
    Deadlock,
    Host,
    Int,
    Machine,
    Numbers,
    Place,
    Pointer,
    Row,
    barriers,
)

BLOCK_M, BLOCK_N, GROUP, DIM = 64, 128, 2, 128
STAGES = 2
ROLES = ("consumer 0", "consumer 1", "producer", "adder 0", "adder 1")


@dataclass(frozen=True)
class Sizes:
    """lengths: queries and keys of each sequence."""

    lengths: tuple[tuple[int, int], ...]
    heads_k: int = 2
    left: int | None = None
    right: int | None = None
    packed: bool = False
    l2_heads: int = 1


@dataclass
class Device:
    """programs: that are at work at once. draws, in_turns, splits: as the kernel's variants."""

    sizes: Sizes
    programs: int
    draws: bool
    in_turns: bool
    seed: int
    instead: dict = field(default_factory=dict)
    splits: int = 1

    def __post_init__(self):
        s = self.sizes
        self.adders = 2 if self.in_turns else 1
        self.names = ROLES[: 3 + self.adders]
        self.machine = Machine(self.seed)
        self.key_blocks = [-(-keys // BLOCK_N) for _, keys in s.lengths]
        self.q_blocks = [-(-rows // BLOCK_M) for rows, _ in s.lengths]
        batch = len(s.lengths)
        tiles = sum(self.key_blocks) * s.heads_k
        if not self.draws:
            self.programs = min(self.programs, tiles * self.splits)
        self.starts = [[0], [0]]
        for pair in s.lengths:
            for starts, n in zip(self.starts, pair, strict=True):
                starts.append(starts[-1] + n)
        if s.packed:
            first, entries = 0, []
            for b, blocks in enumerate(self.key_blocks):
                entries += [b, first] * blocks
                first += blocks
            varlen = Pointer([sum(self.key_blocks), *entries])
            first_rows = [(self.starts[0][b] // BLOCK_M + b) * BLOCK_M for b in range(batch)]
            rows = (self.starts[0][-1] // BLOCK_M + batch) * BLOCK_M
        else:
            varlen = None
            first_rows = [b * self.q_blocks[0] * BLOCK_M for b in range(batch)]
            rows = sum(self.q_blocks) * BLOCK_M
        self.first_rows, self.accum_rows = first_rows, rows
        heads = s.heads_k * (1 if s.packed else batch)
        self.turns = [0] * (s.heads_k * GROUP * rows // BLOCK_M)
        self.params = SimpleNamespace(
            sizes=SimpleNamespace(heads_k=Int(s.heads_k), group=Int(GROUP), accum_rows=Int(rows)),
            seqs=SimpleNamespace(
                cu_q=Pointer(self.starts[0]) if s.packed else None,
                cu_k=Pointer(self.starts[1]) if s.packed else None,
                used_q=None,
                used_k=None,
                seqlen_q=Int(self.starts[0][-1] if s.packed else s.lengths[0][0]),
                seqlen_k=Int(self.starts[1][-1] if s.packed else s.lengths[0][1]),
            ),
            mods=SimpleNamespace(longest_k=None),
            mask=SimpleNamespace(
                shift=Int(0),
                bottom_right=Int(1),
                HAS_LEFT=s.left is not None,
                HAS_RIGHT=s.right is not None,
                left=Int(s.left or 0),
                right=Int(s.right or 0),
            ),
            order=SimpleNamespace(
                tiles=Int(tiles),
                key_blocks=Int(self.key_blocks[0]),
                l2_heads=Int(s.l2_heads),
                l2_groups=Int((heads - 1) // s.l2_heads),
                varlen_tiles=varlen,
                tile_counter=Pointer([0]) if self.draws else None,
                turns=Pointer(self.turns) if self.in_turns else None,
                partials=Pointer([]) if self.splits > 1 else None,
                splits=Int(self.splits),
            ),
            tile=SimpleNamespace(
                BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, Q_STAGES=STAGES, DO_STAGES=STAGES
            ),
        )
        # Of each share of each query tile, the key tiles that were added to it, in order.
        self.added: dict[int, list] = {}
        self.stored: list = []

    # What stands in for copies and products.

    def wait(self, bar: Barrier, parity, pred=True):
        self.machine.until(lambda: bar.has_completed(int(parity)))

    def arrive(self, bar: Barrier, count=1):
        self.machine.until(lambda: True)
        bar.arrive(count)

    def load(self, desc, at, bar, box):
        box.store((desc.name, tuple(map(int, at))))
        bar.complete(desc.block_type.nbytes)

    def add_block(self, address, place, numbers):
        self.machine.until(lambda: True)
        self.added.setdefault(address.offset // numbers, []).append(place.content)

    def wait_for_turn(self, turn, number):
        self.machine.until(lambda: turn.memory[turn.offset] >= number)

    def end_turn(self, turn):
        turn.memory[turn.offset] += 1

    def mainloop(self, shared, visit, blocks, params, tile, CONSUMER):
        host = self.host
        stage_of, query_tile = map(host.turned, (mainloop_file.stage_of, tile_file.query_tile))
        box = host.turned(sequences.box)
        first, end = map(int, host.turned(tile_file.visit_range)(params, tile, blocks))
        for number in range(first, end):
            state = stage_of(visit, STAGES)
            head, block = query_tile(params, tile, blocks, Int(number))
            packed = params.seqs.cu_q is not None
            row = block * BLOCK_M
            at = tuple(box(packed, tile.batch, head, tile.start_q, tile.stored_q, row))
            for name, ring in (("q", shared.q), ("dout", shared.do)):
                ring.consumer_wait(state)
                assert ring.boxes.index(state.index).content == (name, at)
            if number == end - 1:
                self.arrive(shared.v_empty.index(0))
            shared.do.consumer_release_after_mma(state)
            shared.q.consumer_release_after_mma(state)
            self.wait(shared.dq_empty.index(CONSUMER), (visit & 1) ^ 1)
            key_tile = (int(tile.batch), int(tile.kv_head), int(tile.col) // BLOCK_N)
            self.content(shared, CONSUMER).store((key_tile, int(head), int(block), CONSUMER))
            self.arrive(shared.dq_full.index(int(visit) % self.adders * 2 + CONSUMER), 4)
            visit += 1
        return None, None, visit

    def content(self, shared, consumer):
        return shared.dq.index(consumer)

    def finish(self, io, shared, dk, dv, params, tile, visit, CONSUMER):
        if params.order.partials is None:
            self.wait(shared.dq_empty.index(CONSUMER), (visit & 1) ^ 1)
        key_tile = (int(tile.batch), int(tile.kv_head), int(tile.col) // BLOCK_N)
        self.stored.append((*key_tile, CONSUMER, int(tile.split)))

    def run(self):
        barrier = SimpleNamespace(
            wait=self.wait, arrive_after_mma=self.arrive, arrive_lane=self.arrive
        )
        mbarrier = SimpleNamespace(
            wait=self.wait,
            arrive=self.arrive,
            expect=lambda bar, nbytes: bar.arrive(1, nbytes),
            init=lambda bar, count: bar.__init__(count),
            MBarrierLayout=lambda: None,
        )
        numbers = Numbers(self.machine, lambda role: role // len(self.names), self.programs)
        self.host = Host(
            {
                "gl": numbers,
                "barrier": barrier,
                "mbarrier": mbarrier,
                "tma_load": self.load,
                "load_numbers": lambda *args: None,
                "base_2": lambda x, dtype: x,
                "add_block": self.add_block,
                "wait_until_read": lambda: None,
                "wait_for_turn": self.wait_for_turn,
                "end_turn": self.end_turn,
                "backward_mainloop": self.mainloop,
                "finish": self.finish,
                "scores_layout": lambda dtype, columns: None,
                **self.instead,
            }
        )
        roles, names = [], []
        for program in range(self.programs):
            for name, role in zip(self.names, self.roles(), strict=True):
                roles.append(role)
                names.append(f"{name} of program {program}")
        self.machine.run(roles, names)

    def roles(self):
        host, p = self.host, self.params
        make_ring, scheduler_of = host.turned(Pipeline), host.turned(TileScheduler)
        io = SimpleNamespace(
            **{
                name: SimpleNamespace(
                    name=name, block_type=SimpleNamespace(shape=[BLOCK_M, DIM], nbytes=1), dtype=0
                )
                for name in ("q", "k", "v", "dout", "dk", "dv")
            },
            lse=SimpleNamespace(ptr=None),
            delta=None,
            dq_accum=Pointer([]),
        )

        def ring():
            boxes = Row(*(Place() for _ in range(STAGES)))
            full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
            return make_ring(boxes, None, full, empty, BLOCK_M, DIM)

        shared = SimpleNamespace(
            k=Row(Place(), Place(), shape=[2, DIM]),
            v=Row(Place(), Place(), shape=[2, DIM]),
            q=ring(),
            do=ring(),
            lse=Row(*(Place() for _ in range(STAGES))),
            delta=Row(*(Place() for _ in range(STAGES))),
            dq=Row(Place(), Place()),
            k_full=barriers(1, 1),
            v_full=barriers(1, 1),
            k_empty=barriers(1, 2),
            v_empty=barriers(1, 2),
            dq_full=barriers(2 * self.adders, 4),
            dq_empty=barriers(2, 1),
        )
        tiles = host.turned(tile_file.work_tiles)(p)
        if p.order.tile_counter is None:
            scheduler = scheduler_of(tiles, tiles)
        else:
            words = Row(*(Place() for _ in range(2 * 12)))
            full, empty = barriers(2, 1), barriers(2, len(self.names) - 1)
            scheduler = scheduler_of(tiles, tiles, p.order.tile_counter, words, full, empty)
        consumer = host.turned(consumer_file.backward_consumer)
        producer = host.turned(producer_file.backward_producer)
        adder = host.turned(producer_file.backward_adder)
        return (
            lambda: consumer(io, shared, scheduler, p, 0),
            lambda: consumer(io, shared, scheduler, p, 1),
            lambda: producer(io, shared, scheduler, p),
            *(
                lambda which=which: adder(io, shared, scheduler, p, which)
                for which in range(self.adders)
            ),
        )

    def check(self):
        """Every split of a key tile is stored once by each consumer, and key tiles are added to the
        query tiles that see them."""
        s = self.sizes
        tiles = {
            (b, head, block, consumer, split)
            for b, blocks in enumerate(self.key_blocks)
            for head in range(s.heads_k)
            for block in range(blocks)
            for consumer in (0, 1)
            for split in range(self.splits)
        }
        assert sorted(self.stored) == sorted(tiles)
        for b, (rows, keys) in enumerate(s.lengths):
            for head in range(s.heads_k * GROUP):
                for block in range(self.q_blocks[b]):
                    row = head * self.accum_rows + self.first_rows[b] + block * BLOCK_M
                    for share in (0, 1):
                        got = self.added.pop(2 * row // BLOCK_M + share, [])
                        assert {entry[1:] for entry in got} <= {(head, block, share)}
                        seen = [key_tile for key_tile, *_ in got]
                        assert len(set(seen)) == len(seen)
                        self.check_seen(b, head // GROUP, block, rows, keys, seen)
                    if self.in_turns:
                        assert self.turns[row // BLOCK_M] == len(seen)
        assert not self.added

    def check_seen(self, b, kv_head, block, rows, keys, seen):
        s = self.sizes
        wanted = set()
        for row in range(block * BLOCK_M, min(block * BLOCK_M + BLOCK_M, rows)):
            low = 0 if s.left is None else max(0, row + keys - rows - s.left)
            high = keys - 1 if s.right is None else min(keys - 1, row + keys - rows + s.right)
            wanted |= {(b, kv_head, tile) for tile in range(low // BLOCK_N, high // BLOCK_N + 1)}
            if high < low:
                continue
        assert wanted <= set(seen)
        if self.in_turns:
            order = [tile for *_, tile in seen]
            assert order == sorted(order, reverse=s.right is not None)


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


@pytest.mark.parametrize("sizes", DENSE + PACKED, ids=str)
@pytest.mark.parametrize(
    "programs, draws, in_turns, splits",
    [
        (99, False, False, 1),
        (3, True, False, 1),
        (3, True, True, 1),
        (99, True, True, 1),
        (3, True, False, 3),
        (5, True, True, 2),
        (99, True, True, 5),
    ],
    ids=[
        "one-each",
        "drawn",
        "in-turns",
        "more-programs-than-tiles",
        "split",
        "split-in-turns",
        "split-more-than-visits",
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_tile_is_made_once_and_nobody_waits_for_ever(
    sizes, programs, draws, in_turns, splits, seed
):
    device = Device(sizes, min(programs, 14), draws, in_turns, seed, splits=splits)
    if not draws:
        device.programs = sum(device.key_blocks) * sizes.heads_k
    device.run()
    device.check()


def test_a_counter_that_passes_over_the_first_programs_is_noticed():
    """What is drawn counts from the first tile on: not, as the forward's counter, from the tiles
    that programs begin with."""

    class Late(Device):
        def roles(self):
            made = self.host.turned(TileScheduler)
            if not hasattr(made, "drawn"):
                made.drawn = made.draw

                def draw(scheduler, index):
                    first = index < 0
                    return made.drawn(scheduler, index) + (0 if first else self.programs)

                made.draw = draw
            return super().roles()

    sizes = DENSE[1]
    with pytest.raises(AssertionError):
        device = Late(sizes, 3, True, False, 0)
        device.run()
        device.check()
    with pytest.raises(Deadlock):
        Late(sizes, 3, True, True, 0).run()
