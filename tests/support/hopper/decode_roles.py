"""What the tests of both Hopper decodes' roles share: lengths of sequences, shares of programs,
barriers, and where TMA reads from."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from heedful.kernels.args.decode import DecodeMerge, DecodeWork
from heedful.kernels.common import sequences
from heedful.kernels.split_kv import walk
from heedful.kernels.split_kv import work as split_kv
from support.hopper.hosted import Barrier, Host, Int, Machine, Pointer, Row
from support.hopper.hosted_floats import Floats

FAR = 1 << 30
# Facts of a device: lengths and programs that both decodes have to share in each way.
SHARED: dict[str, dict[str, Any]] = {
    "one length": {"lengths": (1000, 1000, 1000), "programs": 3},
    "whole sequences": {"lengths": (700, 64, 65, 300), "programs": 2, "splits": 1},
    "parts": {"lengths": (700, 1, 0, 300), "programs": 3, "splits": 3},
    "uneven": {"lengths": (1500, 0, 1, 127, 128, 129, 600), "programs": 4},
    "one sequence": {"lengths": (3000,), "programs": 5},
    "pages": {"lengths": (900, 130, 0), "programs": 3, "page": 64},
    "small pages": {"lengths": (500, 77, 1), "programs": 2, "page": 48},
}


@dataclass(frozen=True)
class Product:
    """One that is queued: what it reads, and what that was."""

    operands: tuple
    contents: tuple

    @classmethod
    def of(cls, *operands: Any) -> "Product":
        return cls(operands, tuple(operand.content for operand in operands))

    def check(self) -> None:
        now = tuple(operand.content for operand in self.operands)
        assert now == self.contents, "memory changed under a product that reads it"


class Roles:
    """lengths: keys of each sequence, of which storage has room for `stored`. splits: parts of
    each, or None. programs: at work at once. seed: of turns and of values. page: keys of one, or 0.
    instead: what a test puts in place of code."""

    lengths: tuple[int, ...]
    programs: int
    seed: int
    splits: int | None
    page: int
    stored: int
    keys: int
    each: int
    instead: dict[str, Any]
    machine: Machine
    host: Host
    params: Any

    def lay_out(self, longest: int, values: int, keys: int) -> None:
        """Draws scores of rows of storage, so far apart that references rise, and so many values of
        each. keys: of a tile."""
        self.machine = Machine(self.seed)
        drawn = random.Random(self.seed)
        unit = self.page or 1
        self.stored = -(-longest // unit) * unit
        rows = len(self.lengths) * self.stored
        self.scores = [drawn.uniform(-100, 100) for _ in range(rows)]
        self.each = values
        self.values = [drawn.uniform(-1, 1) for _ in range(values * rows)]
        self.keys = keys
        self.height = min(keys, self.page & -self.page) if self.page else keys

    def sequences(self, new: int | None = None, tokens: tuple[int, ...] = ()) -> SimpleNamespace:
        """tokens: packed queries of each; else each has one."""
        begins = [sum(tokens[:b]) for b in range(len(tokens) + 1)]
        return SimpleNamespace(
            cu_q=Pointer(begins) if tokens else None,
            cu_k=None,
            used_q=None,
            used_k=Pointer(list(self.lengths)),
            leftpad_k=None,
            new_k=None if new is None else Int(new),
            seqlen_q=Int(sum(tokens) if tokens else 1),
            seqlen_k=Int(self.stored),
        )

    def mask(self, left: int = -1) -> SimpleNamespace:
        """left: keys that a window has, or -1."""
        return SimpleNamespace(
            shift=Int(0),
            bottom_right=Int(1),
            offsets=None,
            HAS_LEFT=left >= 0,
            HAS_RIGHT=False,
            left=Int(left),
            right=Int(0),
            first=Int(0),
        )

    def kv(self) -> SimpleNamespace:
        """Pages lie in the order of sequences: their numbers are their places."""
        many = self.stored // self.page if self.page else 0
        return SimpleNamespace(
            table=Pointer(list(range(many * len(self.lengths)))) if self.page else None,
            stride_tableb=Int(many),
            page_size=Int(self.page or 1),
            batch_idx=None,
            entries=None,
        )

    def kv_rows(self) -> SimpleNamespace:
        rows = Int(self.page or self.stored)
        return SimpleNamespace(IS_RAGGED=True, k_rows=rows, v_rows=rows, NO_PAGE=1 << 20)

    def work(self, merge: DecodeMerge, tiles: int = 1, overhead: int = 0) -> DecodeWork:
        return DecodeWork(
            merge=merge,
            splits=None if self.splits is None else Int(self.splits),
            tiles=Int(tiles),
            least=Int(1 + overhead),
            short_q=None,
            IS_UNIFORM=False,
            SKIPS_EMPTY=False,
            OVERHEAD=overhead,
            FEWEST_SHARES=1,
            LOOKS=32,
        )

    def share(self, number: int, count: int):
        """Share `number` of `count` of a line, as split_kv/work.py has it, of which other
        tests are."""
        p, host = self.params, self.host
        seqlens_of, length_of = map(host.turned, (sequences.seqlens_of, split_kv.sequence_length))
        lengths = []
        for b in range(len(self.lengths)):
            seq = seqlens_of(Int(b), p.seqs, p.mask)
            lengths.append(int(length_of(seq, p)[1]))
        each = max(-(-sum(lengths) // count), int(p.work.least))
        x = min(number * each, sum(lengths))
        base = b = 0
        while b < len(lengths) and base + lengths[b] <= x:
            base, b = base + lengths[b], b + 1
        return walk.Share(*map(Int, (x, min(x + each, sum(lengths)), each, b, base)))

    def wait(self, bar: Barrier, parity, pred=True):
        self.machine.until(lambda: bar.has_completed(int(parity)))

    def arrive(self, bar: Barrier, count=1):
        self.machine.until(lambda: True)
        bar.arrive(count)

    def rows_at(self, at) -> tuple[tuple[int | None, ...], int]:
        """(rows of storage that a box of these coordinates has, None past the end of the map, its
        first column)."""
        far, end, _head, row, column = map(int, at)
        assert far == FAR
        here = end + row - FAR
        rows = (here + i if row + i < FAR else None for i in range(self.height))
        return tuple(rows), column

    def parts_of(self, box, dtype, shape, layout):
        """A box as parts of fewer rows."""
        count = self.keys // self.height
        box.parts = [None] * count

        def adder(i):
            def add(content):
                box.parts[i] = content
                if all(part is not None for part in box.parts):
                    rows = tuple(row for part in box.parts for row in part[0])
                    (column,) = {part[1] for part in box.parts}
                    box.store(("keys", rows, column))

            return SimpleNamespace(add=add)

        box.store(None)
        return Row(*(adder(i) for i in range(count)))

    def check_segments(
        self,
        segments: Iterable[tuple],
        keys: Sequence[int],
        visits: int,
        which: Sequence[int] = (0,),
    ) -> None:
        """Segments, each (start, stop, count, outputs, maximum, sum), are so many visits, once, and
        merge to what rows of storage `keys` have, one of each tile. which: values of a row that the
        outputs are of."""
        segments = sorted(segments)
        assert [segment[0] for segment in segments] == [
            0,
            *(segment[1] for segment in segments[:-1]),
        ]
        assert segments[-1][1] == visits
        assert {segment[2] for segment in segments} == {len(segments)}
        top = max((self.scores[key] for key in keys), default=0.0)
        weights = [2.0 ** (self.scores[key] - top) for key in keys]
        scales = [2.0 ** (segment[4] - top) if segment[5] else 0.0 for segment in segments]
        total = sum(segment[5] * scale for segment, scale in zip(segments, scales, strict=True))
        assert total == pytest.approx(sum(weights))
        for number, column in enumerate(which):
            out = sum(
                segment[3][number] * scale for segment, scale in zip(segments, scales, strict=True)
            )
            values = [self.values[self.each * key + column] for key in keys]
            expected = sum(w * v for w, v in zip(weights, values, strict=True))
            assert out == pytest.approx(expected, abs=1e-12)

    def run_roles(
        self,
        names: tuple[str, ...],
        roles: Callable[[int], tuple[Callable[[], None], ...]],
        stand_ins: dict[str, Any],
    ) -> None:
        """Runs the roles of all programs to their end, with these in place of code."""
        numbers = Floats(self.machine, lambda role: role // len(names), self.programs)
        waits = SimpleNamespace(wait=self.wait, expect=lambda bar, nbytes: bar.arrive(1, nbytes))
        own = {"gl": numbers, "tl": numbers, "mbarrier": waits}
        self.host = Host({**own, **stand_ins, **self.instead})
        started, called = [], []
        for program in range(self.programs):
            for name, role in zip(names, roles(program), strict=True):
                started.append(role)
                called.append(f"{name} of program {program}")
        self.machine.run(started, called)
