"""Who waits for whom in the MLA decode: its producer and its consumers as threads, and a row of one
number through all that they do with references, probabilities and halves of the output.

The loops, the shares, the boxes and their barriers, what a consumer does in a step and how one
follows the other's references are the kernel's own code. A block of keys has one score, a half of
its values one number. A product reads shared memory from when it is queued until it is waited for.
"""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.args.decode import DecodeMerge
from heedful.kernels.hopper.mla import boxes as mla_boxes
from heedful.kernels.hopper.mla import consumer as consumer_file
from heedful.kernels.hopper.mla import producer as producer_file
from heedful.kernels.hopper.mla import shared as shared_file
from support.hopper.decode_roles import SHARED, Product, Roles
from support.hopper.hosted import (
    Deadlock,
    Int,
    Place,
    Pointer,
    Row,
    Turned,
    barriers,
)
from support.hopper.hosted_floats import Float
from support.problems.grids import in_turns

KEYS = mla_boxes.KEYS.value
BOXES = mla_boxes.BOXES.value
STEP = 2 * KEYS
ROLES = ("consumer 0", "consumer 1", "producer")
FAR = 1 << 30


class Part:
    """Boxes beside each other."""

    def __init__(self, *boxes: Place):
        self.boxes = boxes

    def store(self, content):
        for box in self.boxes:
            box.store(content)

    @property
    def content(self):
        return tuple(box.content for box in self.boxes)


@dataclass(frozen=True)
class Scores:
    """Those of a block, of so many columns so far, with the queries of a segment."""

    rows: tuple
    columns: tuple
    segment: tuple


@dataclass
class Device(Roles):
    """lengths: keys of each sequence. splits: parts of each, or None. programs: at work at once.
    seed: of turns and of values."""

    lengths: tuple[int, ...]
    programs: int
    seed: int
    splits: int | None = None
    heads: int = 16
    overhead: int = 0
    page: int = 0
    query_boxes: int = 0
    query_map: int = 0
    ahead: int = 0
    in_order: int = 0
    merge: int = 0
    thread_order: int = 0
    instead: dict = field(default_factory=dict)

    def __post_init__(self):
        self.lay_out(max(1, *self.lengths), 2, KEYS)
        self.tiles = -(-self.heads // 64)
        merge = DecodeMerge(
            partial_out=None if self.splits == 1 else 0,
            partial_sums=None,
            counts=Pointer([0] * (2 * self.tiles * len(self.lengths))),
            PARTS=4,
            STAGES=1,
            AWAITS_STORES=False,
        )
        self.params = SimpleNamespace(
            seqs=self.sequences(),
            shape=SimpleNamespace(
                batch=Int(len(self.lengths)), heads_q=Int(self.heads), heads_k=Int(1)
            ),
            mask=self.mask(),
            kv=self.kv(),
            kv_rows=self.kv_rows(),
            work=self.work(merge, self.tiles, self.overhead),
            tile=SimpleNamespace(
                BLOCK_M=64,
                BLOCK_N=STEP,
                HEAD_DIM=64 * BOXES,
                HEAD_DIM_V=512,
                BLOCK_E=256,
                QUERY_BOXES=self.query_boxes,
                ROWS=64,
                AHEAD=self.ahead,
                IN_ORDER=self.in_order,
                MERGE=self.merge + 2 * self.thread_order,
            ),
            scale_log2=Float(1.0),
        )
        # By (sequence, row tile, half): segments with their results.
        self.results: dict[tuple, list] = {}
        self.arrived: set[tuple] = set()
        self.queues: dict[int, list[Product]] = {}
        self.at_work: dict[int, Scores] = {}
        # By (sequence, row tile, half): rows that were merged, of how many parts.
        self.merges: dict[tuple, list] = {}

    # What stands in for copies, products and the softmax.

    def load(self, desc, at, bar, part):
        """A box, or a part of one, of rows from the place that the map has for these numbers. Rows
        past the end of the map are zeros."""
        part.add(self.rows_at(at))
        bar.complete(KEYS * 64 * 2 // (KEYS // self.height))

    def mma(self, a, b, acc, use_acc=True, is_async=True):
        """Queues a product. Of scores acc counts what was read, of the output it adds up."""
        queue = self.queues.setdefault(self.machine.now, [])
        operands = tuple(x for x in (a, b) if not isinstance(x, Float | Held))
        queue.append(Product.of(*operands))
        self.machine.until(lambda: True)
        if isinstance(b, Turned):
            return self.add_scores(a, b, acc, use_acc)
        kinds = [box[0] for box in b.content]
        assert kinds == ["keys"] * 4
        rows = {box[1] for box in b.content}
        columns = [box[2] for box in b.content]
        assert len(rows) == 1 and columns[0] % 256 == 0
        assert columns == [columns[0] + 64 * i for i in range(len(columns))]
        (rows,) = rows
        p = a
        if not isinstance(a, Float):
            kind, of, p = a.content
            assert (kind, of) == ("p", rows)
        return Float(acc + p * self.value(rows, columns[0] // 256))

    def add_scores(self, q, k, acc, use_acc):
        kind, rows, column = k.content
        assert kind == "keys" and q.content[:2] == ("q", column)
        seen = acc if use_acc else Scores(rows, (), q.content[2])
        assert seen.rows == rows and seen.segment == q.content[2]
        return Scores(rows, (*seen.columns, column), seen.segment)

    def mma_wait(self, count, deps):
        queue = self.queues.setdefault(self.machine.now, [])
        self.machine.until(lambda: True)
        while len(queue) > count:
            queue.pop(0).check()
        (dep,) = deps
        if isinstance(dep, Scores):
            assert sorted(dep.columns) == [64 * i for i in range(BOXES)]
        return dep

    def key_of(self, rows):
        """What a block's score and values are those of: its first key, or None."""
        return rows[0]

    def value(self, rows, half):
        row = self.key_of(rows)
        return 0.0 if row is None else self.values[2 * row + half]

    def masked(self, s, params, segment, bounds, col):
        assert (col + KEYS > bounds.stop_first) == (s.rows[-1] is None)
        return s

    def softmax(self, s, m, total, scale, limit, may_mask):
        self.at_work[self.machine.now] = s
        row = self.key_of(s.rows)
        x = -math.inf if row is None else self.scores[row]
        top = m
        if x - m > 32 or m == -math.inf:
            top = Float(max(x, m))
        alpha = 1.0 if m == -math.inf else 2.0 ** (m - top)
        p = Float(0.0 if row is None else 2.0 ** (x - top))
        return p, top, Float(total * alpha), Float(alpha), int(alpha != 1.0)

    def publish(self, shared, p, m, BLOCK):
        shared.probabilities(BLOCK).store(("p", self.at_work[self.machine.now].rows, Float(p)))
        shared.top.index(BLOCK).store(m)
        self.arrive(shared.p_full.index(BLOCK), 4)

    def at_barrier(self, does, barrier):
        place = self.machine.now // len(ROLES), int(barrier)
        if does == "bar.arrive":
            assert place not in self.arrived, "arrives before the other has gone on"
            self.arrived.add(place)
        else:
            self.machine.until(lambda: place in self.arrived)
            self.arrived.remove(place)

    def fetch_box(self, io, memory, full, params, segment, box):
        assert full.count == 2
        memory.store(self.load_columns(io, params, segment, 64 * box, 64))
        full.complete(64 * 64 * 2)

    def load_columns(self, io, params, segment, first, columns):
        made = Float(first)
        made.segment = (int(segment.b), int(segment.row0), int(segment.start))
        return made

    def finish(self, io, params, segment, acc, m, sums, CONSUMER, SWAPPED=False):
        key = (int(segment.b), int(segment.row0), CONSUMER)
        assert self.at_work[self.machine.now].segment == (*key[:2], int(segment.start))
        place = (int(segment.start), int(segment.stop), int(segment.partials.count))
        (out,) = map(float, acc)
        self.results.setdefault(key, []).append((*place, (out,), float(m), float(sums)))
        if place[2] > 1:
            count = params.work.merge.counts + 2 * segment.partials.tile + CONSUMER
            count.memory[count.offset] += 1

    def wait_for_partials(self, count, parts):
        self.machine.until(lambda: count.memory[count.offset] >= parts)

    def count_to_zero(self, count, last):
        """An atomic of the device's, after which others may go on."""
        found = count.memory[count.offset]
        count.memory[count.offset] = 0 if found >= last else found + 1
        self.machine.until(lambda: True)

    def merged(self, params, segment, row, M, P, CONSUMER):
        key = (int(segment.b), int(segment.row0), CONSUMER)
        assert len(self.results[key]) == segment.partials.count, "merges parts that are not there"
        self.merges.setdefault(key, []).extend(range(row, row + M))
        return None, None, None

    def merge_turns(self, io, params, segment, turn, W, P, CONSUMER, SWAPPED, scale):
        """Rows of a turn are eight apart."""
        for number in range(turn, turn + W):
            row = number // 8 * 16 + number % 8
            self.merged(params, segment, row, 1, P, CONSUMER)
            self.merged(params, segment, row + 8, 1, P, CONSUMER)

    def run(self):
        stand_ins = {
            "barrier": SimpleNamespace(
                wait=self.wait, arrive_after_mma=self.arrive, arrive_each_warp=self.arrive_4
            ),
            "tma_load": self.load,
            "reinterpret": self.parts_of,
            "boxes_of": lambda tiles: tiles.boxes,
            "warpgroup_mma": self.mma,
            "warpgroup_mma_wait": self.mma_wait,
            "softmax_threshold": self.softmax,
            "masked": self.masked,
            "publish": self.publish,
            "lane_sums": lambda p: Float(p),
            "scale_rows": lambda x, alpha: Float(x * alpha),
            "vote_above": lambda x, limit: int(x != 0.0),
            "threshold_limit": lambda dtype: None,
            "scores_layout": lambda dtype, columns: None,
            "fence_async_shared": lambda: None,
            "opaque": Int,
            "load_columns": self.load_columns,
            "fetch_box": self.fetch_box,
            "finish_segment": self.finish,
            "wait_for_partials": self.wait_for_partials,
            "count_to_zero": self.count_to_zero,
            "merged": self.merged,
            "finish_in_thread_order": self.finish,
            "merge_turns": self.merge_turns,
            "store_whole": lambda *args: None,
            "_named": self.at_barrier,
        }
        self.run_roles(ROLES, self.roles, stand_ins)
        assert not any(self.queues.values()) and not self.arrived
        counts = self.params.work.merge.counts.memory
        assert not (self.merge and any(counts)), "the next launch finds counts"

    def arrive_4(self, bar):
        self.arrive(bar, 4)

    def roles(self, program):
        host, p = self.host, self.params
        io = SimpleNamespace(
            k=SimpleNamespace(
                block_type=SimpleNamespace(shape=[1, 1, 1, self.height, 64]),
                dtype=None,
                layout=None,
            ),
            q_map=self.query_map or None,
        )
        q = [Query(64 * i) for i in range(BOXES)]
        boxes = [Place() for _ in range(16)]
        halves = [Part(*boxes[i : i + 4]) for i in range(0, 16, 4)]
        values = Row(*halves, boxes=Row(*boxes))
        queries = Row(Queries(q[:4]), Queries(q[4:8]), boxes=Row(*q), dtype=None)
        rest = Row(Place(), Place())
        made = host.turned(shared_file.MlaShared)(
            queries,
            Row(q[8]),
            values,
            rest,
            Row(Place()),
            Row(Place(), Place()),
            Row(Place(), Place()),
            barriers(2 * BOXES, 1),
            barriers(4, 1),
            barriers(1, 1),
            barriers(2, 4),
            barriers(1, 2 if self.query_map else 8),
            barriers(1, 2),
            barriers(1, 8),
        )
        consumer = host.turned(consumer_file.mla_consumer)
        producer = host.turned(producer_file.mla_producer)
        share = self.share(program // self.tiles, self.programs // self.tiles)
        return (
            lambda: consumer(io, made, share, p, 0),
            lambda: consumer(io, made, share, p, 1),
            lambda: producer(io, made, share, p),
        )

    def check(self):
        """Every sequence's segments are all its steps, once, and their results merge to its own."""
        for b, length in enumerate(self.lengths):
            steps = max(1, -(-length // STEP))
            keys = [b * self.stored + key for key in range(0, length, KEYS)]
            for tile in range(self.tiles):
                for half in (0, 1):
                    key = (b, 64 * tile, half)
                    segments = self.results.pop(key)
                    # Each row once.
                    rows = range(64) if self.merge and len(segments) > 1 else ()
                    assert sorted(self.merges.pop(key, ())) == list(rows)
                    self.check_segments(segments, keys, steps, (half,))
        assert not self.results and not self.merges


class Query(Place):
    def __init__(self, column: int):
        super().__init__()
        self.column = column

    def store(self, content):
        self.content = ("q", self.column, content.segment)

    def load(self, layout):
        return Held(self.content)


@dataclass(frozen=True)
class Held:
    """What registers hold, whatever becomes of memory."""

    content: tuple


class Queries:
    def __init__(self, boxes):
        self.boxes = boxes

    def store(self, content):
        for box in self.boxes:
            box.store(content)


CASES = {name: Device(**facts, seed=0) for name, facts in SHARED.items()} | {
    "tiles of rows": Device((900, 130), 4, 0, heads=128),
    "a part costs": Device((1500, 300, 20), 3, 0, overhead=2),
    "ahead": Device((900, 300, 1, 0), 3, 0, ahead=1),
    "three ahead": Device((900, 130), 4, 0, heads=128, ahead=3),
    "in order": Device((900, 300), 2, 0, in_order=1),
    "ahead in order": Device((900, 300, 0, 129), 3, 0, ahead=1, in_order=1),
    "queries in registers": Device((900, 300, 0, 129), 3, 0, query_boxes=2),
    "queries by a map": Device((900, 300, 0, 129), 3, 0, query_boxes=2, query_map=1),
    "all at once": Device((900, 130), 4, 0, heads=128, query_boxes=2, ahead=1, in_order=1),
    "merged by all": Device((1500, 0, 1, 127, 128, 129, 600), 4, 0, merge=1),
    "many parts merged by all": Device((3000,), 12, 0, merge=1),
    "given parts merged by all": Device((700, 1, 0, 900), 3, 0, splits=3, merge=1),
    "merged by all by turns": Device((1500, 0, 129, 600), 4, 0, merge=1, thread_order=1),
    "many parts merged by turns": Device((3000,), 12, 0, merge=1, thread_order=1),
    "tiles merged by all": Device((900, 130), 4, 0, heads=128, merge=1),
}


@pytest.mark.parametrize("device", in_turns(CASES.values(), each=3), ids=CASES)
def test_both_halves_of_all_results_are_those_of_the_values_whoever_is_slow(device):
    for seed in range(4):
        found = replace(device, seed=seed)
        found.run()
        found.check()


@pytest.mark.parametrize("ahead", (0, 1))
def test_a_box_that_is_released_early_is_seen(ahead):
    """The first consumer gives its half of a block back before its product is done."""

    def wait_late(device):
        def wait(count, deps):
            made = deps[0]
            if isinstance(made, Scores):
                return device.mma_wait(count, deps)
            return made

        return wait

    def try_seed(seed):
        device = Device((1500, 1500), 2, seed, ahead=ahead)
        device.instead = {"warpgroup_mma_wait": wait_late(device)}
        device.run()

    with pytest.raises(AssertionError, match="memory changed"):
        for seed in range(20):
            try_seed(seed)


def test_a_box_of_scores_that_is_released_early_is_seen():
    """The first block's rest is loaded again, or the second's probabilities lie there, while
    products still read it."""

    def wait_late(device):
        def wait(count, deps):
            made = deps[0]
            return made if isinstance(made, Scores) else device.mma_wait(count, deps)

        return wait

    def try_seed(seed):
        device = Device((1500, 1500), 2, seed)
        device.instead = {"warpgroup_mma_wait": wait_late(device)}
        device.run()

    with pytest.raises(AssertionError, match="memory changed"):
        for seed in range(20):
            try_seed(seed)


def test_a_product_that_is_waited_for_too_late_in_its_queue_is_seen():
    """What is queued behind the values is not counted when their boxes are given back."""

    def wait_less(device):
        def wait(count, deps):
            is_behind = count >= 1 and not isinstance(deps[0], Scores)
            return device.mma_wait(count + is_behind, deps)

        return wait

    def try_seed(seed):
        device = Device((1500, 1500), 2, seed, ahead=1)
        device.instead = {"warpgroup_mma_wait": wait_less(device)}
        device.run()

    with pytest.raises(AssertionError, match="memory changed"):
        for seed in range(20):
            try_seed(seed)


def test_who_merges_before_all_parts_are_there_is_seen():
    def try_seed(seed):
        device = Device((1500, 600), 4, seed, merge=1)
        device.instead = {"wait_for_partials": lambda count, parts: None}
        device.run()

    with pytest.raises(AssertionError, match="parts that are not there"):
        for seed in range(20):
            try_seed(seed)


def test_who_takes_a_count_back_before_all_have_seen_it_is_seen():
    def take_back(count, last):
        count.memory[count.offset] = 0

    with pytest.raises(Deadlock):
        for seed in range(20):
            device = Device((1500, 600), 4, seed, merge=1)
            device.instead = {"count_to_zero": take_back}
            device.run()


class Keeping(Device):
    """Whose consumers release nothing."""

    def arrive(self, bar, count=1):
        if count > 1:
            super().arrive(bar, count)


def test_a_consumer_that_releases_nothing_is_a_deadlock():
    with pytest.raises(Deadlock):
        Keeping((1500,), 1, 0).run()
