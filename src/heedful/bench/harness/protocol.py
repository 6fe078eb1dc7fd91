"""The one way from a case to its figures, which every table of the bench takes.

A case is drawn, its peers make calls of the tensors, what the calls return is checked, and those
that were right are timed in turns. A table says in a subclass of `Trial` how it does each of these.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from heedful.bench.harness import timing
from heedful.bench.harness.timing import Spread

C = TypeVar("C")
T = TypeVar("T")
# Returns what is timed, usually a callable, or the reason why the peer has none.
Maker = Callable[[], Any]
Times = dict[str, list[float]]


class Row(NamedTuple):
    """A case with its figures: by peer, microseconds of a call, or why there are none."""

    case: Any
    times: dict[str, Spread]
    missing: dict[str, str]


def lines(row: Row, more: Callable[[Spread], str] = lambda time: "") -> Iterator[str]:
    """The figures of a row, each with further words, and the reasons for missing ones."""
    for name, time in row.times.items():
        yield f"  {name}: {time.median:.1f} us ({time.low:.1f} to {time.high:.1f}){more(time)}"
    for name, reason in row.missing.items():
        yield f"  {name}: none ({reason})"


def in_words(error: Exception) -> str:
    """The type of an error and its first line, where a figure would be."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def ready(calls: Mapping[str, Any]) -> dict[str, Maker]:
    """Makers of calls that are there already."""
    return {name: partial(lambda call: call, call) for name, call in calls.items()}


@dataclass
class Trial(Generic[C, T]):
    """The peers of one case. Each is checked before it is timed and after each of its turns, on
    what the timed calls themselves returned; from its first fault on it has no figure.

    tensors: what was drawn. reference: what results are checked against. calls: by peer, what is
    timed. missing: why a peer has no figure. wrong, raised: those among them whose result was
    wrong, and whose code raised.
    """

    case: C
    device: torch.device
    calls: dict[str, Any] = field(default_factory=dict, init=False)
    missing: dict[str, str] = field(default_factory=dict, init=False)
    wrong: set[str] = field(default_factory=set, init=False)
    raised: set[str] = field(default_factory=set, init=False)

    def __post_init__(self):
        self.tensors = self.draw()
        self.reference = self.refer()

    def draw(self) -> T:
        """The case's tensors, on the device."""
        raise NotImplementedError

    def refer(self) -> Any:
        """The case's reference, whose `why_wrong` looks at a result."""
        raise NotImplementedError

    def peers(self) -> Mapping[str, Maker]:
        """The implementations that are timed, in the order of turns."""
        raise NotImplementedError

    def check(self, name: str, returned: Any) -> str | None:
        """A message if the result of a peer's call is wrong, else None."""
        return self.reference.why_wrong(returned)

    def probe(self, name: str, call: Any) -> None:
        """Calls a peer before any is timed."""
        self.inspect(name, call())

    def turns(self, rounds: int) -> Times:
        """Microseconds of `calls`, round by round; `inspect` is given a result of each turn."""
        return timing.interleaved(self.calls, self.device, rounds, self.inspect)

    def enter(self, name: str, make: Maker) -> None:
        """Admits a peer if its results are right, or notes why it has no figure."""
        try:
            call = make()
            if isinstance(call, str):
                self.missing[name] = call
            else:
                self.probe(name, call)
        except Exception as error:  # whatever a peer raises is its reason
            self.missing.setdefault(name, in_words(error))
            self.raised.add(name)
        else:
            if name not in self.missing:
                self.calls[name] = call

    def inspect(self, name: str, returned: Any) -> None:
        """Refuses a peer for a wrong result, by its first fault."""
        if name not in self.missing and (reason := self.check(name, returned)) is not None:
            self.missing[name] = reason
            self.wrong.add(name)

    def enter_all(self) -> None:
        """Admits all peers that it can."""
        for name, make in self.peers().items():
            self.enter(name, make)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def times(self, rounds: int) -> Times:
        """Microseconds of a call, round by round, of every peer that was right to the end."""
        turns = self.turns(rounds)
        return {name: times for name, times in turns.items() if name not in self.missing}

    def measure(self, rounds: int) -> Row:
        """The figures of all peers that were right."""
        self.enter_all()
        spreads = {name: Spread.of(times) for name, times in self.times(rounds).items()}
        return Row(self.case, spreads, self.missing)


class Timed(Trial[C, T]):
    """A case with its own clock."""

    def microseconds(self, name: str, call: Any) -> float:
        """A figure of one turn."""
        raise NotImplementedError

    def order(self, number: int) -> Iterable[str]:
        """The order of the peers in a round."""
        return self.calls

    def turns(self, rounds: int) -> Times:
        times: Times = {name: [] for name in self.calls}
        for number in range(rounds):
            for name in self.order(number):
                times[name].append(self.microseconds(name, self.calls[name]))
        return times


class HostTimed(Timed[C, T]):
    """A case whose results tests check: what is timed is what the host does."""

    def refer(self) -> None:
        return None

    def probe(self, name: str, call: Any) -> None:
        self.microseconds(name, call)

    def wait(self) -> None:
        """Until the device has run what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
