"""The Hopper backward whose consumers make dQ, as threads: see backward_roles.py."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from heedful.kernels.hopper.backward import pair as backward_pair
from support.hopper.backward_memory import Reading, Scores, Sums
from support.hopper.backward_roles import BLOCK_N, CONSUMERS, GROUP, KEYS, Device, Tile
from support.hopper.hosted import Int


class Rows(tuple):
    """Numbers of a tile of rows, by where they come from."""

    __slots__ = ()

    def __truediv__(self, scale):
        return self


class Probabilities(Scores):
    """Those of a visit, which dS is made of."""

    def to(self, dtype):
        return self

    def __mul__(self, dp: Sums) -> Scores:
        delta, (v, do) = dp.made
        assert (v, do, delta) == (("v", self.k), ("dout", self.q), ("delta", *self.rows))
        return Scores(
            "ds", self.key_tile, self.query_tile, self.consumer, self.q, self.k, self.rows
        )


@dataclass
class PairDevice(Device):
    """A Device whose program's roles are two consumers and the producer."""

    kernel: Any = backward_pair.backward_pair
    # Whether consumers wait for each other; by role, how often it has.
    meets: bool = True
    met: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        # Consumers add to dQ themselves, in any order.
        self.in_turns = False
        super().__post_init__()
        self.tile = replace(Tile(), k_stages=1)
        self.params.tile.DQ_REGS = None
        self.params.tile.K_STAGES = 1
        self.params.mods = SimpleNamespace(longest_k=None, scale_log2=1.0)
        self.instead = {
            "less_than_rows": lambda x, block_m, layout: Sums((KEYS, block_m), (x,)),
            "hide_queries": self.hidden,
            "hide_by_words": self.hidden_by_words,
            "read_number": lambda memory: memory.content,
            "kept_probabilities": lambda p, params, dtype, layout: p[0],
            "sync_consumers": self.sync_consumers if self.meets else lambda: None,
            "add_dq": self.add_dq,
            **self.instead,
        }

    def load_numbers(self, name, io, params, tile, head, row, other):
        return Rows(super().load_numbers(name, io, params, tile, head, row, other))

    def hidden(self, s: Sums, params, tile, row, consumer) -> Probabilities:
        """Probabilities of what scores were made of."""
        lse, (k, q) = s.made
        name, batch, head, first = lse
        assert (name, batch, first) == ("lse", int(tile.batch), int(row))
        at_q = self.queries_at(tile, head, row)
        at_k = self.keys_at(tile, tile.col + consumer * KEYS)
        assert (k, q) == (("k", at_k), ("q", at_q))
        key_tile = batch, int(tile.kv_head), int(tile.col) // BLOCK_N
        query_tile = head, int(row) // self.tile.block_m
        return Probabilities("p", key_tile, query_tile, consumer, at_q, at_k, lse[1:])

    def hidden_by_words(self, s: Sums, words, params, consumer) -> Probabilities:
        """As `hidden`, of rows with key_ranges of a dense call."""
        batch, head, row, col = words
        nowhere = SimpleNamespace(token_q=0, token_k=0)
        tile = SimpleNamespace(batch=batch, kv_head=head // GROUP, col=Int(col), seq=nowhere)
        made = self.hidden(s, params, tile, Int(row), consumer)
        assert made.rows == (batch, head, row)
        return made

    def sync_consumers(self):
        me = self.machine.now
        self.met[me] = self.met.get(me, 0) + 1
        roles = len(self.made_roles) // self.programs
        both = [me // roles * roles + i for i in range(CONSUMERS)]
        self.machine.until(lambda: all(self.met.get(i, 0) >= self.met[me] for i in both))

    def add_dq(self, io, shared, params, place, state, consumer):
        """A consumer's half of a visit's dQ, of dS and keys of both."""
        boxes = [(shared.consumer_ds(state, i), shared.k.index(i)) for i in range(CONSUMERS)]
        reading = Reading(tuple(box for pair in boxes for box in pair))
        self.machine.until(lambda: True)
        reading.end()
        half = consumer * self.tile.dim // 2
        products = [(ds.content, (k.content, half)) for ds, k in boxes]
        self.added.setdefault(2 * int(place) + consumer, []).append(products)

    def tma_store(self, desc, at, memory):
        key = (desc.name, *map(int, at))
        assert key not in self.stored
        self.stored[key] = self.copy(memory).made
