"""Who waits for whom in the Hopper decode: its producer and its consumer as threads, and a row of
one number through all that they do.

The loops, the shares, the rings and their barriers are the kernel's own code. A tile of keys has
one score, a tile of values one number. A product reads shared memory from when it is queued until
it is waited for.
"""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.args.decode import DecodeMerge
from heedful.kernels.hopper.decode import consumer as decode_consumer
from heedful.kernels.hopper.decode import producer as decode_producer
from heedful.kernels.hopper.sm90 import pipeline
from support.hopper.decode_roles import SHARED, Product, Roles
from support.hopper.hosted import Deadlock, Int, Place, Pointer, Row, Turned, barriers
from support.hopper.hosted_floats import Float

ROLES = ("consumer", "producer")
KEYS, WIDTH = 64, 64
NBYTES = KEYS * WIDTH * 2


@dataclass(frozen=True)
class Scores:
    """Those of a tile of keys, with the queries of a segment."""

    rows: tuple
    segment: tuple

    def to(self, dtype):
        return self


@dataclass
class Device(Roles):
    """stages: tiles of each ring. left: keys that a window has, or -1. new: rows that each sequence
    gets. tokens: packed queries of each, of four heads; else each has one. short: those of more are
    another kernel's."""

    lengths: tuple[int, ...]
    programs: int
    seed: int = 0
    splits: int | None = None
    page: int = 0
    stages: int = 1
    left: int = -1
    new: int = 0
    tokens: tuple[int, ...] = ()
    short: int | None = None
    instead: dict = field(default_factory=dict)

    def __post_init__(self):
        self.lay_out(max(1, *map(self.length, range(len(self.lengths)))), 1, KEYS)
        self.params = SimpleNamespace(
            seqs=self.sequences(self.new or None, self.tokens),
            shape=SimpleNamespace(batch=Int(len(self.lengths)), heads_q=Int(4), heads_k=Int(1)),
            mask=self.mask(self.left),
            kv=self.kv(),
            kv_rows=self.kv_rows(),
            work=self.work(DecodeMerge(None, None, None, PARTS=4, STAGES=1, AWAITS_STORES=False)),
            tile=SimpleNamespace(
                BLOCK_M=64,
                BLOCK_N=KEYS,
                BLOCK_D=WIDTH,
                BLOCK_E=WIDTH,
                HEAD_DIM=WIDTH,
                HEAD_DIM_V=WIDTH,
                STAGES=self.stages,
                ROWS=4,
                FEW_ROWS=4,
                MERGE=0,
            ),
            sink=None,
            scale_log2=Float(1.0),
        )
        if self.short is not None:
            self.params.work = self.params.work._replace(short_q=Int(self.short))
        self.append = SimpleNamespace(
            io=SimpleNamespace(cache_seqlens=Pointer(list(self.lengths)) if self.new else None)
        )
        # By sequence and first row: segments with their results. Rows that were appended.
        self.results: dict[tuple[int, int], list] = {}
        self.appended: set[int] = set()
        # By the number that parts are counted under.
        self.units: dict[int, tuple[int, int]] = {}
        self.queues: dict[int, list[Product]] = {}
        self.at_work: dict[int, Scores] = {}
        self.weights: dict[int, Float] = {}

    # What stands in for copies, products and the softmax.

    def load(self, desc, at, bar, box):
        """A box of rows from the place that the map has for these numbers; rows past the end of the
        map are zeros."""
        rows, column = self.rows_at(at)
        assert column == 0
        for at_row in rows:
            if at_row is not None and self.is_new(at_row):
                assert at_row in self.appended, "a new row is loaded before it is written"
        box.store((desc.kind, rows))
        bar.complete(NBYTES * self.height // KEYS)

    def is_new(self, row: int) -> bool:
        b, place = divmod(row, self.stored)
        return self.lengths[b] <= place < self.lengths[b] + self.new

    def append_rows(self, new, segment, params, append):
        for row in range(int(new.first), int(new.stop)):
            self.appended.add(int(segment.b) * self.stored + int(new.start) + row)
        self.machine.until(lambda: True)

    def boxes_of(self, boxes, dtype, shape, layout):
        """Tiles as boxes of fewer rows, which fill them one by one."""
        down = KEYS // self.height

        def part(index):
            tile, i = boxes.index(index // down), index % down

            def store(content):
                if i == 0:
                    tile.parts = {}
                tile.parts[i] = content
                if len(tile.parts) == down:
                    rows = tuple(row for n in range(down) for row in tile.parts[n][1])
                    Place.store(tile, (content[0], rows))

            return SimpleNamespace(store=store)

        return SimpleNamespace(index=lambda n: part(int(n)))

    def mma(self, a, b, acc, use_acc=True, is_async=True):
        queue = self.queues.setdefault(self.machine.now, [])
        queue.append(Product.of(b))
        self.machine.until(lambda: True)
        kind, rows = b.content
        if isinstance(b, Turned):
            assert kind == "k" and not use_acc
            return Scores(rows, a.content)
        assert kind == "v" and rows == a.rows
        first = rows[0]
        value = 0.0 if first is None else self.values[first]
        return Float(acc + self.weights[self.machine.now] * value)

    def mma_wait(self, count, deps):
        self.machine.until(lambda: True)
        queue = self.queues[self.machine.now]
        while len(queue) > count:
            queue.pop(0).check()
        return deps[0]

    def masked(self, s, params, segment, bounds, col):
        self.at_work[self.machine.now] = s
        where = int(segment.b) * self.stored + int(col)
        assert s.rows[0] in (where, None)
        return s

    def softmax(self, s, m, total, scale, limit, may_mask):
        x = -math.inf if s.rows[0] is None else self.scores[s.rows[0]]
        top = m
        if x - m > 32 or m == -math.inf:
            top = Float(max(x, m))
        alpha = 1.0 if m == -math.inf else 2.0 ** (m - top)
        weight = Float(0.0 if s.rows[0] is None else 2.0 ** (x - top))
        self.weights[self.machine.now] = weight
        return s, top, Float(total * alpha), Float(alpha), int(alpha != 1.0)

    def lane_sums(self, p):
        return self.weights[self.machine.now] if isinstance(p, Scores) else Float(p)

    def load_query_rows(self, io, q, params, segment, append):
        assert not self.queues.get(self.machine.now), "queries change under a product"
        assert int(segment.seq.token_q) == sum(self.tokens[: int(segment.b)])
        q.store((int(segment.b), int(segment.start)))

    def finish(self, io, params, segment, acc, m, total, consumer, few):
        place = (int(segment.start), int(segment.stop), int(segment.partials.count))
        made = self.at_work.pop(self.machine.now, None)
        assert made is None or made.segment == (int(segment.b), place[0])
        found = (*place, (float(acc[0]),), float(m), float(total))
        unit = int(segment.b), int(segment.row0)
        self.results.setdefault(unit, []).append(found)
        assert self.units.setdefault(int(segment.partials.tile), unit) == unit

    # Its roles.

    def length(self, b: int) -> int:
        return self.lengths[b] + self.new

    def roles(self, program: int):
        host, p, shape = self.host, self.params, [1, 1, 1, self.height, WIDTH]

        def map_of(kind):
            block = SimpleNamespace(shape=shape, nbytes=NBYTES)
            dtype = SimpleNamespace(primitive_bitwidth=16)
            return SimpleNamespace(kind=kind, block_type=block, dtype=dtype, layout=None)

        def ring():
            boxes = Row(*(Place() for _ in range(self.stages)), shape=[self.stages], dtype=None)
            full, empty = barriers(self.stages, 1), barriers(self.stages, 1)
            return host.turned(pipeline.Pipeline)(boxes, None, full, empty, KEYS, WIDTH)

        io = SimpleNamespace(k=map_of("k"), v=map_of("v"))
        q, k, v, share = Place(), ring(), ring(), self.share(program, self.programs)
        q.__dict__["dtype"] = None
        consumer = host.turned(decode_consumer.decode_consumer)
        producer = host.turned(decode_producer.decode_producer)
        return (
            lambda: consumer(io, q, k, v, share, 0, p, self.append),
            lambda: producer(io, k, v, share, p, self.append),
        )

    def run(self):
        stand_ins = {
            "barrier": SimpleNamespace(wait=self.wait, arrive_after_mma=self.arrive),
            "tma_load": self.load,
            "reinterpret": self.boxes_of,
            "matrix": lambda box, rows, dim: box,
            "warpgroup_mma": self.mma,
            "warpgroup_mma_wait": self.mma_wait,
            "softmax_threshold": self.softmax,
            "masked": self.masked,
            "lane_sums": self.lane_sums,
            "scale_output": lambda acc, alpha: (Float(acc[0] * alpha),),
            "threshold_limit": lambda dtype: None,
            "scores_layout": lambda dtype, columns: None,
            "load_query_rows": self.load_query_rows,
            "clear_queries": lambda q, params: None,
            "append_rows": self.append_rows,
            "store_gaps": lambda io, params: None,
            "finish_segment": self.finish,
        }
        self.run_roles(ROLES, self.roles, stand_ins)
        assert not any(self.queues.values())

    def check(self):
        """The segments of every sequence's tiles of rows are all its visits, once, and their
        results merge to its own."""
        rows = [4 * count for count in self.tokens] or [4] * len(self.lengths)
        if self.short is not None:
            rows = [n if n <= 4 * self.short else 0 for n in rows]
        for b, row0 in ((b, row) for b, end in enumerate(rows) for row in range(0, end, 64)):
            length = self.length(b)
            begin = max(0, length - 1 - self.left) // KEYS if self.left >= 0 else 0
            tiles = [b * self.stored + key for key in range(begin * KEYS, length, KEYS)]
            self.check_segments(self.results.pop((b, row0)), tiles, max(1, len(tiles)))
            new = {b * self.stored + self.lengths[b] + i for i in range(self.new)}
            assert new <= self.appended
        assert not self.results


CASES = {name: Device(**facts) for name, facts in SHARED.items()} | {
    "three tiles": Device((900, 130, 0), 2, stages=3),
    "small pages": Device(**SHARED["small pages"], stages=2),
    "window": Device((1500, 300, 20), 3, left=200),
    "packed": Device((900, 130, 64, 0), 3, tokens=(1, 4, 0, 2)),
    "packed, tiles of rows": Device((500, 900, 1), 4, tokens=(17, 40, 16), page=16),
    "packed, parts": Device((500, 900, 1), 3, tokens=(17, 1, 0), splits=3),
    "beside a prefill": Device((900, 500, 64, 0, 300), 3, tokens=(1, 40, 16, 1, 17), short=16),
    "prefills alone": Device((900, 500), 3, tokens=(40, 17), short=16),
    "new rows": Device((700, 63, 0, 300), 3, new=3),
    "new rows in pages": Device((700, 63, 0, 300), 3, new=70, page=16),
    "new rows behind a window": Device((900, 5), 2, new=100, left=40),
}


@pytest.mark.parametrize("device", CASES.values(), ids=CASES)
def test_results_are_those_of_the_values_whoever_is_slow(device):
    for seed in range(4):
        found = replace(device, seed=seed)
        found.run()
        found.check()


def test_packed_sequences_without_keys_may_have_no_page():
    found = Device((0, 300, 0, 0), 2, page=16, tokens=(1, 2, 1, 40))
    table = found.params.kv.table.memory
    many = len(table) // 4
    table[:many] = table[2 * many :] = [None] * many
    table += [None] * many
    found.run()
    found.check()


def test_keys_that_are_released_early_are_seen():
    """The consumer gives keys back before their product is done."""
    found = replace(CASES["uneven"], seed=1)

    def wait_late(count, deps):
        return deps[0] if isinstance(deps[0], Scores) else found.mma_wait(count, deps)

    found.instead["warpgroup_mma_wait"] = wait_late
    with pytest.raises(AssertionError, match="memory changed"):
        found.run()


def test_values_that_are_never_released_are_a_deadlock():
    found = replace(CASES["one sequence"], programs=1)
    released = []

    def once(bar, count=1):
        released.append(bar)
        if len(released) < 5:
            found.arrive(bar, count)

    found.instead["barrier"] = SimpleNamespace(wait=found.wait, arrive_after_mma=once)
    with pytest.raises(Deadlock):
        found.run()


def test_rows_that_are_appended_late_are_seen():
    found = replace(CASES["new rows"], seed=2)
    found.instead["first_visit"] = lambda new, segment, start, stop, params: stop
    found.instead["append_rows"] = lambda *args: None
    with pytest.raises(AssertionError, match="before it is written"):
        found.run()
