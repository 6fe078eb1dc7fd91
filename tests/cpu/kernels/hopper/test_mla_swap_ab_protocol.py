"""Who waits for whom in the MLA decode of few rows: its producer and its consumer as threads, and a
row of one number through all that they do.

The loops, the shares, the ring of boxes and its barriers are the kernel's own code. A block of keys
has one score, a box of its values one number. A product reads shared memory from when it is queued
until it is waited for.
"""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.args.decode import DecodeMerge
from heedful.kernels.hopper.mla import boxes as mla_boxes
from heedful.kernels.hopper.mla import swap_ab as mla_swap_ab
from heedful.kernels.hopper.mla import swap_ab_consumer as mla_swap_ab_consumer
from heedful.kernels.hopper.sm90 import pipeline
from support.hopper.decode_roles import SHARED, Product, Roles
from support.hopper.hosted import Deadlock, Int, Place, Row, Turned, barriers
from support.hopper.hosted_floats import Float

ROLES = ("consumer", "producer")
KEYS, WIDTH = mla_boxes.KEYS.value, mla_boxes.WIDTH.value
BOXES, VALUE_BOXES = mla_boxes.BOXES.value, mla_boxes.VALUE_BOXES.value


@dataclass(frozen=True)
class Scores:
    """Those of a block, of so many columns so far, with the queries of a segment; then its
    probabilities."""

    rows: tuple
    columns: tuple
    segment: tuple
    weight: float = 0.0

    def to(self, dtype):
        return self


@dataclass
class Device(Roles):
    """stages: blocks of the ring."""

    lengths: tuple[int, ...]
    programs: int
    seed: int = 0
    splits: int | None = None
    page: int = 0
    stages: int = 2
    instead: dict = field(default_factory=dict)

    def __post_init__(self):
        self.lay_out(max(1, *self.lengths), VALUE_BOXES, KEYS)
        self.params = SimpleNamespace(
            seqs=self.sequences(),
            shape=SimpleNamespace(batch=Int(len(self.lengths)), heads_q=Int(16), heads_k=Int(1)),
            mask=self.mask(),
            kv=self.kv(),
            kv_rows=self.kv_rows(),
            work=self.work(DecodeMerge(None, None, None, PARTS=4, STAGES=1, AWAITS_STORES=False)),
            tile=SimpleNamespace(
                BLOCK_M=16,
                BLOCK_N=KEYS,
                HEAD_DIM=WIDTH * BOXES,
                HEAD_DIM_V=WIDTH * VALUE_BOXES,
                BLOCK_E=WIDTH * VALUE_BOXES,
                STAGES=self.stages,
                ROWS=16,
                MERGE=0,
            ),
            sink=None,
            scale_log2=Float(1.0),
        )
        # By sequence: segments with their results.
        self.results: dict[int, list] = {}
        self.queues: dict[int, list[Product]] = {}
        self.at_work: dict[int, Scores] = {}

    # What stands in for copies, products and the softmax.

    def load(self, desc, at, bar, part):
        part.add(self.rows_at(at))
        bar.complete(KEYS * WIDTH * 2 // (KEYS // self.height))

    def mma(self, a, b, acc, use_acc=True, is_async=True):
        """Queues a product. Of scores acc counts what was read, of the output it adds up."""
        queue = self.queues.setdefault(self.machine.now, [])
        queue.append(Product.of(a, b))
        self.machine.until(lambda: True)
        kind, rows, column = a.content
        assert kind == "keys"
        if not isinstance(a, Turned):
            of, segment = b.content
            assert of == column, "a box of keys meets other columns of queries"
            seen = acc if use_acc else Scores(rows, (), segment)
            assert (seen.rows, seen.segment) == (rows, segment)
            return Scores(rows, (*seen.columns, column), segment)
        p = b.content
        assert p.rows == rows
        first = rows[0]
        value = 0.0 if first is None else self.values[VALUE_BOXES * first + column // WIDTH]
        return Float(acc + p.weight * value)

    def mma_wait(self, count, deps):
        self.machine.until(lambda: True)
        queue = self.queues[self.machine.now]
        while len(queue) > count:
            queue.pop(0).check()
        (dep,) = deps
        if isinstance(dep, Scores):
            assert dep.columns == tuple(range(0, WIDTH * BOXES, WIDTH))
        return dep

    def masked(self, s, params, segment, bounds, col):
        where = int(segment.b) * self.stored + int(col)
        assert s.rows[0] in (where, None)
        assert (col + KEYS > bounds.stop_first) == (s.rows[-1] is None)
        return s

    def softmax(self, s, m, total, scale):
        self.at_work[self.machine.now] = s
        x = -math.inf if s.rows[0] is None else self.scores[s.rows[0]]
        top = Float(max(x, m))
        alpha = 1.0 if m == -math.inf else 2.0 ** (m - top)
        weight = 0.0 if s.rows[0] is None else 2.0 ** (x - top)
        return replace(s, weight=weight), top, Float(total * alpha + weight), Float(alpha)

    def load_few_queries(self, io, shared, params, segment):
        assert not self.queues.get(self.machine.now), "queries change under a product"
        for column, box in enumerate(shared.boxes):
            box.store((WIDTH * column, (int(segment.b), int(segment.start))))

    def finish(self, io, params, segment, acc, m, total, consumer):
        place = (int(segment.start), int(segment.stop), int(segment.partials.count))
        assert self.at_work.pop(self.machine.now).segment == (int(segment.b), place[0])
        found = (*place, tuple(map(float, acc)), float(m), float(total))
        self.results.setdefault(int(segment.b), []).append(found)

    # Its roles.

    def roles(self, program: int):
        host, p = self.host, self.params
        block = SimpleNamespace(shape=[1, 1, 1, self.height, WIDTH])
        io = SimpleNamespace(k=SimpleNamespace(block_type=block, dtype=None, layout=None))
        boxes, count = [Place() for _ in range(BOXES)], BOXES * self.stages
        shared = SimpleNamespace(
            boxes=boxes,
            q=SimpleNamespace(dtype=None),
            p=Row(Place()),
        )
        ring = Row(*(Place() for _ in range(count)), shape=[count], dtype=None)
        full, empty = barriers(count, 1), barriers(count, 1)
        keys = host.turned(pipeline.Pipeline)(ring, None, full, empty, KEYS, WIDTH)
        share = self.share(program, self.programs)
        consumer = host.turned(mla_swap_ab_consumer.swap_ab_consumer)
        producer = host.turned(mla_swap_ab.swap_ab_producer)
        return (
            lambda: consumer(io, shared, keys, share, p),
            lambda: producer(io, keys, share, p),
        )

    def run(self):
        stand_ins = {
            "barrier": SimpleNamespace(wait=self.wait, arrive_after_mma=self.arrive),
            "tma_load": self.load,
            "reinterpret": self.parts_of,
            "warpgroup_mma": self.mma,
            "warpgroup_mma_wait": self.mma_wait,
            "softmax_columns": self.softmax,
            "masked_keys": self.masked,
            "scale_columns": lambda acc, alpha: tuple(Float(x * alpha) for x in acc),
            "rows_first": lambda acc: acc,
            "lane_sums": lambda p: p,
            "all_sums": lambda total: total,
            "scores_layout": lambda dtype, columns: None,
            "fence_async_shared": lambda: None,
            "load_few_queries": self.load_few_queries,
            "query_box": lambda shared, box: shared.boxes[int(box)],
            "finish_segment": self.finish,
        }
        self.run_roles(ROLES, self.roles, stand_ins)
        assert not any(self.queues.values())

    def check(self):
        """Every sequence's segments are its blocks, once, and their results merge to its own."""
        for b, length in enumerate(self.lengths):
            blocks = [b * self.stored + key for key in range(0, length, KEYS)]
            segments, visits = self.results.pop(b), max(1, len(blocks))
            self.check_segments(segments, blocks, visits, range(VALUE_BOXES))
        assert not self.results


CASES = {name: Device(**facts) for name, facts in SHARED.items()} | {
    "one block": Device((900, 130, 0), 2, stages=1),
    "three blocks": Device((900, 130, 0), 2, stages=3),
}


@pytest.mark.parametrize("device", CASES.values(), ids=CASES)
def test_results_are_those_of_the_values_whoever_is_slow(device):
    for seed in range(4):
        found = replace(device, seed=seed)
        found.run()
        found.check()


def test_a_block_that_is_released_before_its_values_are_read_is_seen():
    found = replace(CASES["uneven"], seed=1)

    def wait_late(count, deps):
        return found.mma_wait(count, deps) if isinstance(deps[0], Scores) else deps[0]

    found.instead["warpgroup_mma_wait"] = wait_late
    with pytest.raises(AssertionError, match="memory changed"):
        found.run()


def test_a_box_that_is_never_released_is_a_deadlock():
    found = replace(CASES["one sequence"], programs=1)
    released = []

    def all_but_one(bar, count=1):
        released.append(bar)
        if len(released) != BOXES:
            found.arrive(bar, count)

    found.instead["barrier"] = SimpleNamespace(wait=found.wait, arrive_after_mma=all_but_one)
    with pytest.raises(Deadlock):
        found.run()
