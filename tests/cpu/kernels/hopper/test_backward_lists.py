"""A block mask in the Hopper backward: the lists of visits that the kernel before it stores, run by
Triton's interpreter in a process of its own; which query tile a visit is, and the words of bits by
which a thread hides probabilities, both run as Python."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.kernels.hopper.backward import mask as words
from heedful.kernels.hopper.backward import tile as tile_file
from heedful.launch.program import buffers, programs
from heedful.launch.spec import Program
from heedful.reference import oracle
from heedful.reference.convert import operands_as_numpy
from heedful.reference.sequences import sequences
from heedful.torch.base.arrays import array_spec
from support.hopper.assembly import executed
from support.hopper.hosted import Host, Int, Machine, Numbers, Pointer
from support.problems.cases import Case, build
from support.problems.grids import in_turns, slow_but
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

KEYS = 128
BASE = Case(
    dtype="float16", seqlen_q=900, seqlen_k=700, heads_q=4, heads_k=2, head_dim=128, block_mask=128
)
CASES = [
    BASE,
    replace(BASE, block_mask=64, ranges_of="bh", causal=True),
    replace(BASE, head_dim=64, ranges_of="h", window=(200, 60)),
    replace(BASE, seqlen_k=64, block_mask=64, ranges_of=""),
    replace(BASE, seqlen_q=2400, seqlen_k=130, block_mask=64, ranges_of="h"),
    replace(BASE, seqlen_q=600, varlen="qk", batch=4, block_mask=64, ranges_of="", causal=True),
    replace(BASE, varlen="qk", batch=3, ranges_of="bh"),
    replace(BASE, seqlen_q=300, seqlen_k=129, ranges_of="bh"),
    replace(BASE, head_dim=256, ranges_of="h", causal=True),
    replace(BASE, head_dim=192, head_dim_v=128, block_mask=64, ranges_of="bh"),
]


def bits_in(pool: np.ndarray, index: int) -> np.ndarray:
    """bool (side, side): what a tile of bits shows, all or nothing without bits."""
    side = pool.shape[1]
    if index < 0:
        return np.full((side, side), index == -1)
    shown = pool[index][..., None] >> np.arange(32) & 1
    return shown.reshape(side, side) != 0


def stored_visits(built, backend: str = "hopper") -> tuple[np.ndarray, int]:
    """(batch, KV heads, key tiles, numbers) as list_visits stores them, and queries of a visit."""
    problem = built.problem
    chosen = plan(problem, by_name("H200"), backend=forced(backend))
    arrays = buffers.backward(problem)
    x = {name: t for name, t in built.x._asdict().items() if t is not None}
    out = torch.empty(problem.out_shape, dtype=torch.float16)
    arrays |= {name: array_spec(t) for name, t in (x | {"out": out}).items()}
    whole = programs.program(chosen, "backward", arrays)
    (call,) = (c for c in whole.calls if c.kernel.function == "list_visits")
    (shape,) = (w.buffer.shape for w in whole.workspaces if w.name == "visits")
    made = {"visits": torch.full(shape, -77, dtype=torch.int32)}
    interpret(Program((call,), ()), x | made)
    step: Any = call.constants["BLOCK_M"]
    return made["visits"].numpy(), step


@interpreted
@pytest.mark.parametrize(
    "case, backend",
    slow_but(
        [*((case, "hopper") for case in CASES[::2]), (CASES[1], "hopper+block_n=64")],
        [(case, "hopper") for case in CASES] + [(case, "hopper+block_n=64") for case in CASES[:3]],
    ),
    ids=str,
)
def test_visits_show_what_the_mask_shows_and_those_without_a_mask_all(case, backend):
    built = build(case)
    x = operands_as_numpy(built.x)
    visits, step = stored_visits(built, backend)
    pool, side = np.asarray(x.block_bits), case.block_mask
    keys = 64 if case.head_dim > 128 or "64" in backend else KEYS
    boxes = max(1, keys // side)
    own = 2 if "h" in case.ranges_of else 1
    for seq in sequences(built.problem, built.x):
        by_place = oracle.visible(built.problem, x, seq)
        seen = by_place & oracle.in_blocks(x, seq)
        assert visits.shape[1] == (2 if own == 2 else 1)
        for h in range(case.heads_q):
            shown = np.zeros_like(seen[h])
            of_head = visits[min(seq.batch, len(visits) - 1)][min(h // 2, visits.shape[1] - 1)]
            for block, (count, masked, *numbers) in enumerate(of_head.tolist()):
                assert masked <= count
                entries = np.reshape(numbers[: count * (1 + boxes)], (count, 1 + boxes))
                for place, (entry, *bits) in enumerate(entries.tolist()):
                    if entry % own != h % own:
                        continue
                    row = entry // own * step
                    # Sums of dQ end with the tile of the last query.
                    assert row < seq.len_q
                    rows, first = slice(row, row + step), block * keys % side
                    found = np.concatenate([bits_in(pool, i) for i in bits], 1)
                    found = found[row % side : row % side + step, first:]
                    cols = slice(block * keys, (block + 1) * keys)
                    part = shown[rows, cols]
                    found = found[: part.shape[0], : part.shape[1]]
                    assert not (part & found).any(), "a score of two visits"
                    part |= found
                    if place >= masked:
                        assert seen[h][rows, cols].all() and part.shape[1] == keys
            np.testing.assert_array_equal(shown & by_place, seen[h])


@interpreted
@pytest.mark.parametrize("side", [64, 128])
def test_numbers_that_are_no_list_stay_within_the_queries_the_pool_and_the_room(side):
    case = replace(BASE, block_mask=side, ranges_of="bh")
    rng = np.random.default_rng(side)
    for _ in range(3):
        built = build(case)
        keys = built.x.block_keys
        odd = rng.choice([-(2**31), 2**31 - 1, -1, 0, 1, 2, 40], tuple(keys.shape))
        keys.copy_(torch.from_numpy(odd.astype(np.int32)))
        visits, step = stored_visits(built)
        boxes = KEYS // side
        for count, masked, *numbers in visits.reshape(-1, visits.shape[-1]).tolist():
            assert 0 <= masked <= count and count * (1 + boxes) <= len(numbers)
            for i in range(count):
                entry, *bits = numbers[i * (1 + boxes) :][: 1 + boxes]
                assert 0 <= entry // 2 * step < case.seqlen_q
                assert all(-2 <= index < len(built.x.block_bits) for index in bits)


@starts_interpreter
def test_visits_are_listed_and_bounded():
    pass_in_the_interpreter(__file__)


@pytest.mark.parametrize("side, own", [(128, 2), (128, 1), (64, 2)])
def test_a_number_is_the_visit_of_a_list_and_of_each_head_that_has_it(side, own):
    group, boxes = 4, KEYS // side
    entries = [(5, 0), (2, 1), (7, 0)]
    numbers = [len(entries), 1]
    for tile, r in entries:
        numbers += [tile * own + r % own, *(-1 for _ in range(boxes))]
    lists = SimpleNamespace(
        visits=Pointer([9] * 1000 + [*map(Int, numbers)]),
        stride_b=Int(500),
        stride_h=Int(0),
        stride_n=Int(250),
        blocks=Int(3),
        list_heads=Int(own),
        shared=Int(group // own),
    )
    params = SimpleNamespace(
        mask=SimpleNamespace(blocks=SimpleNamespace(SIDE=side)),
        tile=SimpleNamespace(BLOCK_N=KEYS),
        sizes=SimpleNamespace(group=Int(group)),
        order=SimpleNamespace(lists=lists, parts=SimpleNamespace(partials=None)),
    )
    tile = SimpleNamespace(batch=Int(1), kv_head=Int(3), col=Int(2 * KEYS))
    machine = Numbers(Machine(0), lambda _: 0, 1)
    host = Host({"gl": machine, "tl": machine})
    call = {name: host.turned(getattr(tile_file, name)) for name in ("m_block_range", "query_tile")}
    blocks = call["m_block_range"](params, tile)
    assert (blocks.begin, blocks.full_begin, blocks.full_end) == (0, 1, 3)
    _, end = host.turned(tile_file.visit_range)(params, tile, blocks)
    found = [call["query_tile"](params, tile, blocks, Int(number)) for number in range(end)]
    assert found == [
        (3 * group + ahead + r % own, t) for ahead in range(group // own) for t, r in entries
    ]


class Index(int):
    def to(self, dtype):
        return self


def larger(a, b):
    return Index(max(a, b)) if isinstance(a, int) else np.maximum(a, b)


class Arrays:
    """What `list_words` needs of gl, of NumPy's."""

    minimum, maximum, where = staticmethod(np.minimum), staticmethod(larger), np.where
    constexpr = None
    int64 = np.int64

    @staticmethod
    def load(pointer, mask, other):
        return np.where(mask, pointer.memory[pointer.offset], other)


class Words:
    """An address of words, or several."""

    def __init__(self, memory: np.ndarray, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, count):
        return Words(self.memory, self.offset + count)


@pytest.mark.parametrize(
    "window, queries, side",
    in_turns([{}, {"right": 0}, {"left": 90, "right": 30}], [64, 128], [64, 128]),
    ids=str,
)
def test_a_thread_hides_what_bits_and_positions_hide(queries, side, window):
    if queries > side:
        pytest.skip("a visit is of one tile of queries")
    rng = np.random.default_rng(queries + side)
    pool = rng.integers(-(2**31), 2**31, (3, side, side // 32)).astype(np.int32)
    left, right, off, len_k = window.get("left"), window.get("right"), 100, 310
    blocks = SimpleNamespace(SIDE=side, bits=Words(pool.reshape(-1)))
    shows = {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None}
    given = SimpleNamespace(blocks=blocks, left=left, right=right, **shows)
    row0 = 128 + side - queries
    rows, keys = row0 + np.arange(queries), np.arange(KEYS)
    host = Host({"gl": Arrays})
    for col in (0, 128, 256):
        tile = SimpleNamespace(col=col, seq=SimpleNamespace(off=off, len_k=len_k))
        params = SimpleNamespace(mask=given)
        indices = rng.integers(-2, 3, KEYS // side)
        shown = [bits_in(pool, i)[rows % side] for i in indices]
        seen = np.concatenate(shown, 1) & (col + keys < len_k)
        distance = col + keys - (rows[:, None] + off)
        seen &= distance <= (FAR if right is None else right)
        seen &= distance >= -(FAR if left is None else left)
        made = [
            host.turned(words.list_words)(
                Index(indices[i * 32 // side]), rows, col + i * 32, params, tile
            )
            for i in range(KEYS // 32)
        ]
        for warp in range(8):
            for lane in range(32):
                for (query, key), is_hidden in hidden(made[warp // 2], queries, warp, lane).items():
                    assert is_hidden != seen[query, key]


FAR = 1 << 30


def hidden(of_rows, queries: int, warp: int, lane: int) -> dict[tuple[int, int], bool]:
    """By (query, key): whether this thread of a warp of eight hides the probability. Registers are
    those of an accumulator of keys by queries."""
    count = queries // 2
    mine = [i // 4 * 8 + lane % 4 * 2 + i % 2 for i in range(count)]
    keys = [warp * 16 + lane // 4 + 8 * (i // 2 % 2) for i in range(count)]
    columns = [8 * (i // 2) + lane % 4 * 2 + i % 2 for i in range(count // 2)]
    registers = list(range(1, count + 1)) * 2
    registers += [int(of_rows[query]) & 0xFFFFFFFF for query in columns]
    registers += [1 << keys[0] % 32, 1 << keys[2] % 32]
    after = executed(words._hidden_by_bits(queries), registers)
    return {(mine[i], keys[i]): after[i] == 0 for i in range(count)}
