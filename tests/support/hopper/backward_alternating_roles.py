"""The Hopper backward whose consumers have one list of 64 keys and take its visits in turn, as
threads: see backward_roles.py."""

from dataclasses import dataclass, field, replace

from support.hopper.backward_memory import Sums
from support.hopper.backward_roles import CONSUMERS, KEYS, STAGES, Device


@dataclass
class AlternatingDevice(Device):
    """A Device with a box of keys for both consumers."""

    # Whether consumers wait for each other; by role, how often it has.
    meets: bool = True
    met: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.tile = replace(self.tile, block_m=64, block_n=KEYS)
        super().__post_init__()
        self.params.tile.Q_STAGES = 2 * STAGES
        self.instead = {
            "sync_consumers": self.sync_consumers if self.meets else lambda: None,
            "put_turn": lambda memory, x, columns, turn: memory.store((x, turn)),
            "plus_turn": self.plus,
            **self.instead,
        }

    def sync_consumers(self):
        me = self.machine.now
        self.met[me] = self.met.get(me, 0) + 1
        roles = len(self.made_roles) // self.programs
        both = [me // roles * roles + i for i in range(CONSUMERS)]
        self.machine.until(lambda: all(self.met.get(i, 0) >= self.met[me] for i in both))

    def plus(self, memory, x: Sums, columns, turn) -> Sums:
        """The numbers of all turns are added at the first one."""
        content, *others = memory.content
        assert all(box is content for box in others)
        assert isinstance(content, tuple), "what the other has not stored"
        other, its_turn = content
        assert isinstance(other, Sums) and its_turn == turn
        if turn:
            assert x.products[-len(other.products) or len(x.products) :] == other.products
            return x
        return Sums(x.shape, (*x.products, *other.products), (*x.readings, *other.readings))
