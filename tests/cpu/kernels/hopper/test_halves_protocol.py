"""Who waits for whom in the Hopper backward of halves: both programs' consumers and producers as
threads, whose loops are the kernel's own. Products, copies and what is computed stand for
themselves, by where they come from."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from heedful.kernels.hopper.backward_halves import consumer, producer
from support.hopper.hosted import Barrier, Host, Int, Machine, Numbers, Place, Row, barriers

Q_STAGES, DO_STAGES, WARPS, CONSUMERS = 2, 1, 4, 2
FIRST = 3  # a split's first visit
COLUMNS = 512


class Layouts(Numbers):
    """Beside numbers, layouts that nothing depends on."""

    @staticmethod
    def SliceLayout(*args):
        return None

    DotOperandLayout = SliceLayout

    @staticmethod
    def convert_layout(x, layout):
        return x


class Ring:
    """A ring of query tiles or cotangents."""

    def __init__(self, stages: int, device: "Device"):
        self.boxes = Row(*(Place() for _ in range(stages)))
        self.full, self.empty = barriers(stages, 1), barriers(stages, CONSUMERS)
        self.device = device

    def tile(self, state):
        return self.boxes.index(state.index)

    def consumer_release(self, state):
        self.device.arrive(self.empty.index(state.index), 1)


class Product:
    """Places that a product reads until it is waited for, and what it is of."""

    def __init__(self, *places: Place):
        self.places = places
        self.made = tuple(place.content for place in places)
        self.parts: frozenset = frozenset()

    def end(self) -> "Product":
        assert self.made == tuple(place.content for place in self.places), "written while read"
        return self


class Device:
    """Both programs of a cluster. skips: a (role, "wait" or "arrive", name of a barrier) that is
    left out."""

    def __init__(self, visits: int, seed: int, skips: tuple[str, str, str] | None = None):
        self.visits, self.skips, self.taken = visits, skips, set()
        self.machine = Machine(seed)
        self.drawn = random.Random(seed)
        self.programs = [self.shared() for _ in range(2)]
        self.loads, self.ended, self.made = [], 0, {}
        # A role that takes long to read what the other program has sent.
        self.slow = self.drawn.randrange(6)
        self.host = Host(self.instead())
        self.names = [
            f"{role}{place}"
            for place in range(2)
            for role in ("value_gradients", "key_gradients", "load_tile")
        ]

    def shared(self) -> SimpleNamespace:
        def inbox():
            return SimpleNamespace(
                memory=Place(), full=barriers(1, 1), free=barriers(1, WARPS), of=None
            )

        made = SimpleNamespace(
            k=Row(Place()),
            v=Row(Place()),
            q=Ring(Q_STAGES, self),
            do=Ring(DO_STAGES, self),
            lse=Row(*(Place() for _ in range(Q_STAGES))),
            delta=Row(*(Place() for _ in range(DO_STAGES + 1))),
            p=Place(),
            ds=Place(),
            s_parts=inbox(),
            dp_parts=inbox(),
            p_full=barriers(1, WARPS),
            ds_full=barriers(1, WARPS),
            k_full=barriers(1, 1),
            v_full=barriers(1, 1),
        )
        made.k.dtype = made.q.boxes.dtype = None
        rings = {"q": made.q, "do": made.do, "s": made.s_parts, "dp": made.dp_parts}
        for name, ring in rings.items():
            for kind in ("full", "empty", "free"):
                self.name(getattr(ring, kind, None), f"{name}.{kind}")
        for name in ("p_full", "ds_full", "k_full", "v_full"):
            self.name(getattr(made, name), name)
        return made

    def name(self, row: Row | None, name: str) -> None:
        if row is not None:
            for i in range(row.shape[0]):
                row.index(i).name = name

    def role(self) -> str:
        return self.names[self.machine.now][:-1]

    def place(self) -> int:
        return int(self.names[self.machine.now][-1])

    def has(self, step: str, bar: Barrier) -> bool:
        taken = (self.role(), step, bar.name)
        self.taken.add(taken)
        return taken != self.skips

    def wait(self, bar: Barrier, parity, base=0):
        if self.has("wait", bar):
            self.machine.until(lambda: bar.has_completed(int(parity)))

    def arrive(self, bar: Barrier, count: int, nbytes: int = 0):
        self.machine.until(lambda: True)
        if self.has("arrive", bar):
            bar.arrive(count, nbytes)

    def other(self, inbox):
        """The inbox of the same product in the other program."""
        mine, theirs = self.programs[self.place()], self.programs[1 - self.place()]
        return theirs.s_parts if inbox is mine.s_parts else theirs.dp_parts

    def send(self, inbox, x: Product, visit, base):
        self.wait(inbox.free.index(0), (visit & 1) ^ 1)
        self.machine.until(lambda: True)
        other = self.other(inbox)
        assert other.memory.content is None, "a part that nobody has read is written over"
        other.memory.content = x.made
        other.full.index(0).complete(1)

    def receive(self, inbox, x: Product, visit, base) -> Product:
        full = inbox.full.index(0)
        self.arrive(full, 1, 1)
        self.wait(full, visit & 1)
        if self.machine.now == self.slow:
            for _ in range(100):
                self.machine.until(lambda: True)
        x.parts = frozenset((x.made, inbox.memory.content))
        inbox.memory.content = None
        self.arrive(self.other(inbox).free.index(0), WARPS)
        return x

    def scores(self, x: Product, rows, blocks, params, tile, number, *others):
        """Probabilities of a visit: both programs' halves of its products, and its numbers."""
        number = int(number)
        halves = {(("k", half), ("q", number, half)) for half in (0, COLUMNS // 2)}
        assert x.parts == halves and rows == (("lse", number),)
        return ("p", number)

    def score_gradients(self, p, dp: Product, delta, *others):
        kind, number = p
        halves = {(("v", half), ("do", number, half)) for half in (0, COLUMNS // 2)}
        assert (kind, dp.parts, delta) == ("p", halves, ("delta", number))
        return ("ds", number)

    def gradients(self, left, place: Place, x, columns):
        assert place.content[1:] == (left[1], self.place() * COLUMNS // 2)
        self.made.setdefault((self.role(), self.place()), []).append(left)
        return (Product(place),)

    def add_dq(self, io, shared, params, tile, blocks, number, place, which):
        read = Product(shared.ds, shared.k.index(0))
        self.machine.until(lambda: True)
        read.end()
        assert read.made == (("ds", int(number)), ("k", self.place() * COLUMNS // 2))
        self.made.setdefault(("dq", int(place), which), []).append(int(number))

    def load(self, desc, at, full, memory):
        memory.content = "being loaded"
        self.loads.append((full, memory, (desc.name, *at)))

    def bring(self):
        """What copies to shared memory."""
        roles = len(self.names) - 1
        while True:
            self.machine.until(lambda: bool(self.loads) or self.ended == roles)
            if not self.loads:
                break
            full, memory, content = self.loads.pop(self.drawn.randrange(len(self.loads)))
            memory.content = content
            full.complete(1)

    def instead(self) -> dict:
        gl = Layouts(self.machine, lambda now: 0, 1)
        layout = SimpleNamespace(type=SimpleNamespace(layout=None))
        return {
            "gl": gl,
            "wait": self.wait,
            "send": self.send,
            "receive": self.receive,
            "arrive_each_warp": lambda bar, base: self.arrive(bar, WARPS),
            "mbarrier": SimpleNamespace(expect=lambda bar, nbytes: self.arrive(bar, 1, 1)),
            "tma_load": self.load,
            "box": lambda packed, *at: [0],
            "rows_at": lambda params, tile, head, row, column: [int(row), int(column)],
            "load_keys": self.load_keys,
            "queries_of": self.queries_of,
            "any_far": lambda lse: False,
            "key_box": lambda boxes, index: boxes.index(index),
            "queue_transposed": lambda keys, rows, columns, m: Product(keys, rows),
            "warpgroup_mma_wait": self.finish,
            "row_numbers": lambda shared, params, stage, *_: (shared.lse.index(stage).content,),
            "queued_probabilities": self.scores,
            "crossing_probabilities": lambda queued, *_: queued,
            "kept_probabilities": lambda queued, *_: queued,
            "crossed_gradients": self.score_gradients,
            "no_gradients": lambda columns, dtype: (layout,),
            "queue_gradients": self.gradients,
            "wait_for_gradients": lambda x: (self.finish(0, [x[0]]),),
            "add_dq": self.add_dq,
            "fence_async_shared": lambda: None,
            "scores_layout": lambda *x: None,
        }

    def finish(self, under_way, deps):
        self.machine.until(lambda: True)
        return deps[0].end()

    def load_keys(self, desc, memory, full, rows_each, params, tile, column):
        self.arrive(full, 1, 1)
        self.load(desc, [int(column)], full, memory)

    def queries_of(self, io, params, tile, blocks, visit, is_first):
        visit = int(visit)
        return Int(0), Int(visit), ("lse", visit), ("delta", visit), ()

    def run(self):
        block = SimpleNamespace(nbytes=1)
        io = SimpleNamespace(
            **{n: SimpleNamespace(name=n, block_type=block) for n in ("q", "k", "v")},
            dout=SimpleNamespace(name="do", block_type=block),
            **dict.fromkeys(("k_rows", "v_rows")),
        )
        tile = SimpleNamespace(D=COLUMNS, E=COLUMNS, Q_STAGES=Q_STAGES, DO_STAGES=DO_STAGES)
        params = SimpleNamespace(tile=tile)
        first, end = Int(FIRST), Int(FIRST + self.visits)

        def gradients_by(function, place):
            def role():
                shared = self.programs[place]
                self.wait(shared.k_full.index(0), 0)
                self.wait(shared.v_full.index(0), 0)
                self.host.turned(function)(io, shared, None, params, None, first, end, Int(place))
                self.ended += 1

            return role

        def loads(place):
            def role():
                load = self.host.turned(producer.load_tile)
                load(io, self.programs[place], params, None, None, first, end, Int(place))
                self.ended += 1

            return role

        roles = []
        for place in range(2):
            roles.append(gradients_by(consumer.value_gradients, place))
            roles.append(gradients_by(consumer.key_gradients, place))
            roles.append(loads(place))
        self.names.append("loads0")
        self.machine.run([*roles, self.bring], self.names)
        numbers = range(FIRST, FIRST + self.visits)
        for place in range(2):
            assert self.made["value_gradients", place] == [("p", n) for n in numbers]
            assert self.made["key_gradients", place] == [("ds", n) for n in numbers]
            for which in range(CONSUMERS):
                assert self.made["dq", place, which] == list(numbers)


VISITS = (1, 2, 3, 8)


@pytest.mark.parametrize("visits", VISITS)
@pytest.mark.parametrize("seed", range(12))
def test_every_visit_is_made_of_both_halves_and_nobody_waits_for_ever(visits, seed):
    Device(visits, seed).run()


WAITS = {
    "value_gradients": ("k_full", "q.full", "s.free", "s.full", "do.full", "ds_full"),
    "key_gradients": ("v_full", "do.full", "dp.free", "dp.full", "p_full"),
    "load_tile": ("q.empty", "do.empty"),
}
ARRIVALS = {
    "value_gradients": ("s.full", "q.empty", "s.free", "p_full", "do.empty"),
    "key_gradients": ("dp.full", "do.empty", "dp.free", "ds_full", "q.empty"),
    "load_tile": ("k_full", "v_full", "q.full", "do.full"),
}
STEPS = [
    (role, step, name)
    for step, steps in (("wait", WAITS), ("arrive", ARRIVALS))
    for role, names in steps.items()
    for name in names
]
# What follows from other waits: queries are there once probabilities are. Both consumers wait for
# keys and for values.
IMPLIED = {
    ("key_gradients", "wait", "q.full"),
    ("value_gradients", "wait", "v_full"),
    ("key_gradients", "wait", "k_full"),
}


def test_every_wait_and_arrival_is_among_those_that_are_left_out_here():
    device = Device(8, 0)
    device.run()
    assert device.taken == set(STEPS) | IMPLIED


@pytest.mark.parametrize("step", STEPS, ids="-".join)
def test_who_does_not_wait_or_arrive_is_noticed(step):
    for seed in range(20):
        try:
            Device(8, seed, skips=step).run()
        except (AssertionError, TypeError):
            return
    pytest.fail("nothing was wrong")
