"""The Hopper backward as threads: the kernel's own roles, main loop, rings, barriers and tile
scheduler, whose numbers are the names of what they are made of.

What stands in for instructions: a product reads its operands in shared memory from when it is
queued until it is waited for, a copy from shared memory likewise. Memory that changes meanwhile is
an error. A copy to shared memory spoils it when it is queued, and arrives in any order.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from heedful.kernels.hopper.backward import consumer as consumer_file
from heedful.kernels.hopper.backward import kernel as kernel_file
from heedful.kernels.hopper.backward import mainloop as mainloop_file
from heedful.kernels.hopper.backward import pair as pair_file
from heedful.kernels.hopper.backward import producer as producer_file
from heedful.kernels.hopper.backward import tile as tile_file
from heedful.kernels.hopper.backward.dq import warpgroup as dq_file
from heedful.kernels.hopper.sm90 import sequences
from heedful.kernels.hopper.sm90.roles import arranged
from support.hopper.backward_memory import Reading, Scores, Span, Sums, Tensors, is_memory
from support.hopper.backward_sizes import BLOCK_N, Sizes, Tile
from support.hopper.hosted import Barrier, Host, Int, Machine, Pointer, Row

GROUP, CONSUMERS, KEYS = 2, 2, 64
# Queries and keys of a tile of a block mask.
SIDE = 128
STAGES = 2
# Functions that a test may have leave out a step: see `Device.skips`.
PLACES = {
    function.fn.__name__: function
    for function in (
        consumer_file.backward_consumer,
        dq_file.backward_dq,
        producer_file.backward_producer,
        producer_file.backward_adder,
        mainloop_file.backward_mainloop,
        consumer_file.store_gradients,
        mainloop_file.store_ds,
        mainloop_file.pass_over,
        consumer_file.wait_for_own_ds,
        pair_file.pair_consumer,
        pair_file.pair_step,
    )
}


class Words(tuple):
    """The words of rows at a key tile, by where they come from."""

    __slots__ = ()

    def to(self, dtype, bitcast):
        return self


@dataclass
class Device:
    """programs: that are at work at once. draws, in_turns, splits: as the kernel's variants.
    kernel: backward.backward, or another that has its parameters.

    skips: (function, step, of what) that are left out, such as ("backward_dq", "arrive",
    "k_empty"): of the calls that this function makes, and those that it calls. bends: changes a
    program's shared memory. instead: what stands in for names of the kernels' files. far: whether
    all rows are far from 0, whose cotangents the producer scales. tail: how many work tiles, the
    last ones, are split while others are not; 0: all are.
    """

    sizes: Sizes
    programs: int
    draws: bool
    in_turns: bool
    seed: int
    splits: int = 1
    tile: Tile = Tile()
    kernel: Any = kernel_file.backward
    skips: frozenset[tuple[str, str, str]] = frozenset()
    bends: Callable[[Any], None] = lambda shared: None
    instead: dict = field(default_factory=dict)
    far: bool = False
    tail: int = 0

    def __post_init__(self):
        s = self.sizes
        block_m = self.tile.block_m
        self.machine = Machine(self.seed)
        self.key_blocks = [-(-keys // self.tile.block_n) for _, keys in s.lengths]
        self.q_blocks = [-(-rows // block_m) for rows, _ in s.lengths]
        batch = len(s.lengths)
        self.tiles = sum(self.key_blocks) * s.heads_k
        if not self.draws:
            self.programs = self.tiles * self.splits
        self.starts = [[0], [0]]
        for pair in s.lengths:
            for starts, n in zip(self.starts, pair, strict=True):
                starts.append(starts[-1] + n)
        self.first_rows, self.accum_rows = self.rows_of(0, block_m)
        self.first_keys, self.partial_rows = self.rows_of(1, self.tile.block_n)
        if self.tail:
            self.partial_rows = self.tail * self.tile.block_n
        heads = s.heads_k * (1 if s.packed else batch)
        self.turns = [0] * (s.heads_k * GROUP * self.accum_rows // block_m)
        self.params = self.make_params(heads)
        # Of each share of each query tile what was added to it, in order; gradients by where they
        # went in tensor maps, and by their address among those of splits.
        self.added: dict[int, list] = {}
        self.stored: dict[tuple, tuple] = {}
        self.partials: dict[int, tuple] = {}
        # By role: products and copies under way, and functions that it is in. What waits and
        # arrivals there were.
        self.products: dict[int, list[Reading]] = {}
        self.copies: dict[int, list[Reading]] = {}
        self.within: dict[int, list[str]] = {}
        self.taken: set[tuple[str, str, str]] = set()
        self.loads: list[tuple] = []
        self.made_roles: list = []
        self.prologue_ended = False
        self.ended = 0

    def rows_of(self, which: int, block: int) -> tuple[list[int], int]:
        """First rows of each sequence, whose rows are rounded up to tiles, and how many all have:
        of queries (0) or keys."""
        lengths = [pair[which] for pair in self.sizes.lengths]
        if not self.sizes.packed:
            padded = -(-lengths[0] // block) * block
            return [b * padded for b in range(len(lengths))], padded * len(lengths)
        first = [(start // block + b) * block for b, start in enumerate(self.starts[which])]
        return first[:-1], first[-1]

    def make_params(self, heads: int):
        s = self.sizes
        varlen = None
        if s.packed:
            first, entries = 0, []
            for b, blocks in enumerate(self.key_blocks):
                entries += [b, first] * blocks
                first += blocks
            varlen = Pointer([sum(self.key_blocks), *entries])
        return SimpleNamespace(
            sizes=SimpleNamespace(
                heads_k=Int(s.heads_k),
                group=Int(GROUP),
                accum_rows=Int(self.accum_rows),
                scale=1.0,
            ),
            seqs=SimpleNamespace(
                cu_q=Pointer(self.starts[0]) if s.packed else None,
                cu_k=Pointer(self.starts[1]) if s.packed else None,
                **self.lengths_in_use(),
                seqlen_q=Int(self.starts[0][-1] if s.packed else s.lengths[0][0]),
                seqlen_k=Int(self.starts[1][-1] if s.packed else s.lengths[0][1]),
            ),
            mods=SimpleNamespace(longest_k=None),
            dropout=SimpleNamespace(IS_ON=False),
            mask=SimpleNamespace(
                shift=Int(0),
                bottom_right=Int(1),
                offsets=None,
                HAS_LEFT=s.left is not None,
                HAS_RIGHT=s.right is not None,
                RANGES=max(map(len, s.runs)) if s.runs else None,
                blocks=SimpleNamespace(SIDE=SIDE if s.listed else None),
                left=Int(s.left or 0),
                right=Int(s.right or 0),
            ),
            order=SimpleNamespace(
                tiles=Int(self.tiles),
                key_blocks=Int(self.key_blocks[0]),
                l2_heads=Int(s.l2_heads),
                l2_groups=Int((heads - 1) // s.l2_heads),
                varlen_tiles=varlen,
                tile_counter=Pointer([0]) if self.draws else None,
                turns=Pointer(self.turns) if self.in_turns else None,
                parts=SimpleNamespace(
                    partials=Pointer([]) if self.splits > 1 else None,
                    rows=Int(self.partial_rows),
                    splits=Int(self.splits),
                    whole=Int(self.tiles - self.tail) if self.tail else None,
                ),
                hulls=self.hulls(),
                lists=self.lists(),
            ),
            tile=SimpleNamespace(
                BLOCK_M=self.tile.block_m,
                BLOCK_N=self.tile.block_n,
                D=self.tile.dim,
                E=self.tile.dim,
                Q_STAGES=STAGES,
                DO_STAGES=STAGES,
                DS_STAGES=STAGES,
                K_STAGES=self.tile.k_stages,
                CONSUMER_REGS=0,
                DQ_REGS=0,
                PRODUCER_REGS=0,
            ),
            ways=SimpleNamespace(
                HEADS_INNERMOST=self.tile.heads_innermost,
                DK_IN_KEYS=self.tile.dk_in_keys,
                ROTATES=self.tile.rotates,
            ),
        )

    def lengths_in_use(self):
        """The arrays of `Sizes.used`, those that say more than lengths do."""
        if not self.sizes.used:
            return dict.fromkeys(("used_q", "leftpad_k", "used_k"))
        queries, pads, keys = zip(*self.sizes.used, strict=True)
        # No dense call of this kernel has lengths of queries.
        told = {"used_q": queries if self.sizes.packed else None, "used_k": keys}
        told["leftpad_k"] = pads if any(pads) else None
        return {name: n and Pointer([*map(Int, n)]) for name, n in told.items()}

    def hulls(self):
        """Entries as the kernels ahead of this one store them. Nobody sees a whole key tile."""
        nothing = (1 << 30, 0)
        keys, queries = [], []
        for runs in self.sizes.runs:
            first, second, *_ = (*runs, nothing, nothing)
            keys += [*first, 0, 0, *second, 0, 0]
        for block in range(self.key_blocks[0]):
            seeing = [m for m in range(self.q_blocks[0]) if block in self.runs_of(m)]
            begin, end = (seeing[0], seeing[-1] + 1) if seeing else (0, 0)
            queries += [begin, begin, begin, end]
        of_keys = SimpleNamespace(key_hulls=Pointer(keys), entries=None, blocks=Int(0))
        return SimpleNamespace(
            of_keys=of_keys,
            query_hulls=Pointer([*map(Int, queries)]),
            entries=None,
            HIDES_ROWS=False,
        )

    def lists(self):
        """The lists of visits as the kernel ahead of this one stores them, which heads share."""
        each, steps = 2 + 2 * SIDE, SIDE // self.tile.block_m
        numbers = []
        for tiles, masked in self.sizes.listed:
            blocks = [tile * steps + step for tile in tiles for step in range(steps)]
            entries = [n for block in blocks for n in (block, 0)]
            rest = (0 for _ in range(each - 2 - len(entries)))
            numbers += [len(blocks), masked * steps, *entries, *rest]
        return SimpleNamespace(
            visits=Pointer([*map(Int, numbers)]),
            stride_b=Int(0),
            stride_h=Int(0),
            stride_n=Int(each),
            blocks=Int(len(self.sizes.listed)),
            list_heads=Int(1),
            shared=Int(GROUP),
        )

    def runs_of(self, block: int) -> list[int]:
        """The key tiles that a query tile sees by key_ranges."""
        rows = self.tile.block_m // 64
        seen = set()
        for which in range(2):
            runs = [r[which] for r in self.sizes.runs[block * rows :][:rows] if len(r) > which]
            if runs:
                begin, end = min(r[0] for r in runs), max(r[1] for r in runs)
                seen |= set(range(begin // BLOCK_N, -(-end // BLOCK_N)))
        return sorted(seen)

    # What a test has left out.

    def has(self, step: str, what: str) -> bool:
        """Whether the role that runs takes this step."""
        steps = {(place, step, what) for place in self.within.get(self.machine.now, ())}
        self.taken |= steps
        return not steps & self.skips

    def counted(self, place: str) -> Callable:
        """A function that says it is what a role is in."""

        def call(*args):
            within = self.within.setdefault(self.machine.now, [])
            within.append(place)
            made = self.host.turned(PLACES[place])(*args)
            within.pop()
            return made

        call.__name__ = place
        return call

    # What stands in for barriers, copies and products.

    def wait(self, bar: Barrier, parity, pred=True):
        if self.has("wait", bar.name):
            self.machine.until(lambda: bar.has_completed(int(parity)))

    def arrive(self, bar: Barrier, count=1):
        self.machine.until(lambda: True)
        if self.has("arrive", bar.name):
            bar.arrive(count)

    def load(self, desc, at, bar, box):
        box.store("being loaded")
        content = desc.name, tuple(map(int, at))
        self.loads.append((bar, desc.block_type.nbytes, box, content))

    def bring_loads(self):
        """What copies to shared memory, as a role of its own until others have ended."""
        drawn = random.Random(self.seed)
        while True:
            self.machine.until(lambda: bool(self.loads) or self.ended == len(self.made_roles))
            if not self.loads:
                break
            bar, nbytes, box, content = self.loads.pop(drawn.randrange(len(self.loads)))
            box.store(content)
            bar.complete(nbytes)

    def load_numbers(self, name, io, params, tile, head, row, other):
        return name, int(tile.batch), int(head), int(row)

    def load_bounds(self, params, tile, head, row, are_needed):
        return (int(tile.batch), int(head), int(row)) if are_needed else ()

    def list_words(self, index, rows, col, params, tile):
        """Those of 32 keys, by whose tile they are."""
        return Words((int(tile.batch), int(rows), int(tile.col)))

    def check_words(self, words, tile, rows):
        """Those of a mask belong to the rows and keys that they mask."""
        if self.sizes.listed:
            assert words == (rows[0], rows[2], int(tile.col))
        else:
            assert words == (*rows, int(tile.col)) or not self.sizes.runs

    def mma(self, left, right, sums, use_acc=True, is_async=False):
        assert is_async
        operands = left, right
        reading = Reading(tuple(x for x in operands if is_memory(x)))
        self.products.setdefault(self.machine.now, []).append(reading)
        product = tuple(x.content if is_memory(x) else x for x in operands)
        before = sums if use_acc else Sums(sums.shape)
        return Sums(sums.shape, (*before.products, product), (*before.readings, reading))

    def end(self, readings: list[Reading], left: int = 0):
        """Ends all but the last ones, which other roles have been free to overwrite."""
        self.machine.until(lambda: True)
        while len(readings) > left:
            readings.pop(0).end()

    def mma_wait(self, count, deps):
        self.end(self.products.setdefault(self.machine.now, []), count)
        (made,) = deps
        return made

    def copies_read(self):
        self.end(self.copies.setdefault(self.machine.now, []))

    def store_wait(self, count):
        if self.has("wait", "stores"):
            self.copies_read()

    def copy(self, place) -> Any:
        reading = Reading((place,))
        self.copies.setdefault(self.machine.now, []).append(reading)
        return reading.contents[0]

    def add_block(self, address, place, numbers):
        self.machine.until(lambda: True)
        self.added.setdefault(address.offset // numbers, []).append(self.copy(place))

    def tma_store(self, desc, at, memory):
        key = (desc.name, *map(int, at))
        assert key not in self.stored
        contents = self.copy(memory)
        # Of one box, or of several that hold one gradient.
        contents = (contents,) if isinstance(contents, Sums) else contents
        assert all(isinstance(content, Sums) for content in contents)
        (self.stored[key],) = {sums.made for sums in contents}

    def store_registers(self, address, sums):
        assert address.offset not in self.partials
        self.partials[address.offset] = sums.made

    def put_dq(self, sums, place):
        place.store(sums.made)

    def reinterpret(self, memory, dtype, shape, layout):
        """As so many pieces, each in a box or in several."""
        boxes = memory.shape[0]
        return Row(
            *(
                Span(
                    tuple(
                        memory.index(j)
                        for j in range(i * boxes // shape[0], -(-(i + 1) * boxes // shape[0]))
                    ),
                    shape[1:],
                )
                for i in range(shape[0])
            )
        )

    def wait_for_turn(self, turn, number):
        self.machine.until(lambda: turn.memory[turn.offset] >= number)

    def end_turn(self, turn):
        self.copies_read()
        turn.memory[turn.offset] += 1

    # What stands in for exponentials and gradients of scores.

    def box(self, batch, head, start, stored, row) -> tuple:
        """Where rows are in a tensor map."""
        at = self.host.turned(sequences.box)
        return tuple(map(int, at(self.sizes.packed, batch, head, start, stored, row)))

    def queries_at(self, tile, head, row) -> tuple:
        """Where rows of queries are in a tensor map."""
        used, _, _ = self.sizes.in_use(int(tile.batch))
        return self.box(tile.batch, head, tile.seq.token_q, used, row)

    def keys_at(self, tile, col) -> tuple:
        """Where keys are in a tensor map, which ends where those in use do."""
        b, s = int(tile.batch), self.sizes
        _, pad, used = s.in_use(b)
        if s.packed or not s.used:
            return self.box(b, tile.kv_head, tile.seq.token_k, used, col)
        end = b * s.lengths[b][1] + pad + used
        return 1 << 30, end, int(tile.kv_head), (1 << 30) - used + int(col), 0

    def probabilities(self, s, numbers, blocks, params, tile, number, dtype, consumer, masked):
        ((k, q),) = s.made
        head, block = self.host.turned(tile_file.query_tile)(params, tile, blocks, Int(number))
        place = block
        if self.sizes.listed:
            place = Int(number) % blocks.end
        assert masked or blocks.full_begin <= place < blocks.full_end
        batch, row = int(tile.batch), int(block) * self.tile.block_m
        at_q = self.queries_at(tile, head, row)
        at_k = self.keys_at(tile, tile.col + consumer * KEYS % self.tile.block_n)
        rows = batch, int(head), row
        lse, *words = numbers
        for of_rows in words:
            self.check_words(of_rows, tile, rows)
        assert len(words) == bool(masked and (self.sizes.runs or self.sizes.listed))
        assert (k, q, lse) == (("k", at_k), ("q", at_q), ("lse", *rows))
        key_tile = batch, int(tile.kv_head), int(tile.col) // self.tile.block_n
        return Scores("p", key_tile, (int(head), int(block)), consumer, at_q, at_k, rows)

    def score_gradients(self, p, dp, delta, params, dtype):
        ((v, do),) = dp.made
        assert (v, do, delta) == (("v", p.k), ("dout", p.q), ("delta", *p.rows))
        return Scores("ds", p.key_tile, p.query_tile, p.consumer, p.q, p.k, p.rows)

    # The kernel.

    def program_of(self, role: int) -> int:
        return role // (len(self.made_roles) // self.programs)

    def wait_for_prologue(self):
        self.prologue_ended = True

    def start_roles(self, consumers, roles):
        roles, warps, registers = arranged(consumers, roles)
        known = [(role, [getattr(x, "value", x) for x in args]) for role, args in roles]
        self.warp_specialize(known, warps, registers)

    def warp_specialize(self, roles, warps, registers):
        assert self.prologue_ended, "roles read what the prologue writes"
        self.prologue_ended = False
        assert len(warps) == len(registers) == len(roles) - 1
        _, shared, scheduler, *_ = roles[0][1]
        for owner, prefix in ((shared, ""), (shared.q, "q."), (shared.do, "do.")):
            name_barriers(owner, prefix)
        name_barriers(scheduler, "tile.")
        self.bends(shared)
        self.made_roles += roles

    def bound(self, function, args):
        def role():
            function(*args)
            self.ended += 1

        return role

    def run(self):
        barrier = SimpleNamespace(
            wait=self.wait,
            arrive_after_mma=self.arrive,
            arrive_each_warp=lambda bar: self.arrive(bar, 4),
            arrive_lane=self.arrive,
        )
        mbarrier = SimpleNamespace(
            wait=self.wait,
            arrive=self.arrive,
            expect=lambda bar, nbytes: bar.arrive(1, nbytes),
            init=lambda bar, count: bar.__init__(count),
            MBarrierLayout=lambda: Barrier,
        )
        numbers = Tensors(self)
        self.host = Host(
            {
                "gl": numbers,
                "tl": numbers,
                "barrier": barrier,
                "mbarrier": mbarrier,
                "tma": SimpleNamespace(store_wait=self.store_wait),
                "tma_load": self.load,
                "tma_store": self.tma_store,
                "load_numbers": self.load_numbers,
                "load_bounds": self.load_bounds,
                "range_words": lambda bounds, rows, params, tile: Words((*bounds, int(tile.col))),
                "list_words": self.list_words,
                "inline_asm": lambda *args: Int(self.machine.now % 2),
                "any_far": lambda x: self.far,
                "dout_scale": lambda *rows: 1,
                "scale_rows": lambda box, scale: None,
                "start_roles": self.start_roles,
                "add_block": self.add_block,
                "wait_until_read": self.copies_read,
                "wait_for_turn": self.wait_for_turn,
                "end_turn": self.end_turn,
                "store_registers": self.store_registers,
                "put_dq": self.put_dq,
                "queued_probabilities": self.probabilities,
                "kept_probabilities": lambda p, params, dtype, layout: p,
                "score_gradients": self.score_gradients,
                "to_pairs": lambda x, dtype: x,
                "from_pairs": lambda x, dtype, layout: x,
                "store_pairs": lambda memory, x, lane: memory.store(x),
                "lane_place": lambda: None,
                "opaque": lambda x: x,
                "matrix": lambda box, rows, dim: box,
                "with_zeros": lambda x, row, params, tile: x,
                "reinterpret": self.reinterpret,
                "p_descale": lambda dtype: 1.0,
                "scores_layout": lambda dtype, columns, warps=4: None,
                "fence_async_shared": lambda: None,
                "cuda": SimpleNamespace(gdc_wait=self.wait_for_prologue),
                "warpgroup_mma": self.mma,
                "warpgroup_mma_wait": self.mma_wait,
                "wait_products": lambda x, under_way=0: self.mma_wait(under_way, [x]),
                **{place: self.counted(place) for place in PLACES},
                **self.instead,
            }
        )
        names = []
        for program in range(self.programs):
            before = len(self.made_roles)
            self.host.turned(self.kernel)(self.operands(), self.params)
            added = self.made_roles[before:]
            names += [
                f"{role.__name__} {i} of program {program}" for i, (role, _) in enumerate(added)
            ]
        roles = [self.bound(*role) for role in self.made_roles]
        self.machine.run([*roles, self.bring_loads], [*names, "copies"])

    def rows_between(self):
        """Keys from one batch entry to the next, of a map that ends with those in use."""
        is_dense = self.sizes.used and not self.sizes.packed
        return Int(self.sizes.lengths[0][1]) if is_dense else None

    def operands(self):
        dim = self.tile.dim
        rows = {"q": self.tile.block_m, "dout": self.tile.block_m}

        def desc(name):
            shape = [rows.get(name, KEYS), dim]
            block = SimpleNamespace(shape=shape, nbytes=shape[0] * dim * 2)
            return SimpleNamespace(name=name, block_type=block, dtype=Tensors.dtype, layout=None)

        return SimpleNamespace(
            **{name: desc(name) for name in ("q", "k", "v", "dout", "dk", "dv")},
            **dict.fromkeys(("k_rows", "v_rows"), self.rows_between()),
            lse_log2=SimpleNamespace(ptr="lse"),
            delta="delta",
            dout_scale="dout_scale",
            dq_accum=Pointer([]),
        )


def name_barriers(owner, prefix: str) -> None:
    """Tells barriers what ring they are of."""
    for name, row in vars(owner).items():
        if isinstance(row, Row):
            for i in range(row.shape[0]):
                row.index(i).name = prefix + name
