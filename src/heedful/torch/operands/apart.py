"""Checks that the memory that a call writes does not overlap the memory that it reads. Addresses
differ from call to call, so that known calls are checked, too.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter

from torch import Tensor

from heedful.core.call.arguments import CacheUpdate, argument_name
from heedful.core.call.operands import SCALES, Operands
from heedful.core.call.storage import extent, may_share
from heedful.torch.base.arrays import array_spec
from heedful.torch.base.dispatch import are_bare

_KV_SCALES = SCALES[1:]
_PREFIX = ("shared_prefix[0]", "shared_prefix[1]")
_NAMES = (*(argument_name(name, "kvcache") for name in Operands._fields), *CacheUpdate._fields[:5])
_NAMES += (*_PREFIX, "out")
# A model has a cache for each layer.
_MOST_SEEN = 256


class Apart:
    """Raises if a call of one kind would write memory that it also reads."""

    __slots__ = ("_groups", "_names", "_seen", "_specs", "_where")

    def __init__(
        self, tensors: Mapping[str, Tensor], written: Sequence[str], together: Sequence[str] = ()
    ):
        """tensors: all that is read and written, in the order of the addresses of `check`.
        written: those that are. together: those that may share memory with each other."""
        self._names = [*tensors]
        self._specs = [array_spec(tensor) for tensor in tensors.values()]
        kept = [name for name in written if name in together]
        groups = [self._group(kept, [name for name in tensors if name not in together])]
        for each in written:
            if each not in together:
                groups.append(self._group([each], [name for name in tensors if name != each]))
        self._groups = [group for group in groups if group is not None]
        # Addresses of arrays that do not overlap, by that of a written array.
        self._seen: dict[int, Sequence[int]] = {}
        self._where = self._groups[0][-1][0][0] if self._groups else 0

    def _group(self, written: Sequence[str], read: Sequence[str]):
        """The arrays of a call that must not overlap: the indices of those that are read; a
        function that picks their addresses; how many bytes before its start an array may reach; and
        the index and the size in bytes of each that is written."""
        lengths = {n: extent(s) for n, s in zip(self._names, self._specs, strict=True)}
        others = [self._names.index(name) for name in read if lengths[name]]
        spans = [(self._names.index(name), lengths[name]) for name in written if lengths[name]]
        if not (others and spans):
            return None
        # One more: of one place, itemgetter would give no tuple.
        pick = itemgetter(*others, others[0])
        return others, pick, max([lengths[name] for name in read]), spans

    def check(self, addresses: Sequence[int]) -> None:
        """Raises ValueError naming both."""
        seen, where = self._seen, addresses[self._where]
        if seen.get(where) == addresses:
            return
        if len(seen) >= _MOST_SEEN:
            seen.clear()
        for others, pick, before, spans in self._groups:
            read = pick(addresses)
            for index, length in spans:
                begin = addresses[index]
                low, high = begin - before, begin + length
                for address in read:
                    if low < address < high:
                        self._look(index, others, addresses)
                        break
        seen[where] = [*addresses]

    def _look(self, written: int, others: Sequence[int], addresses: Sequence[int]) -> None:
        for read in others:
            specs = self._specs[written], self._specs[read]
            if may_share(*specs, addresses[read] - addresses[written]):
                raise ValueError(
                    f"{self._names[written]} must have memory of its own, as it is written, got"
                    f" some of that of {self._names[read]}"
                )


def cache_values(x: Operands, update: CacheUpdate, out) -> tuple:
    """The arguments of a call that may be tensors, with K and V of a prefix as two."""
    prefix = update.shared_prefix
    pair = isinstance(prefix, (list, tuple)) and len(prefix) == 2
    return (*x, *update[:5], *(prefix if pair else (None, None)), out)


def cache_tensors(x: Operands, update: CacheUpdate, out) -> dict[str, Tensor]:
    """The tensors among them, by name."""
    named = zip(_NAMES, cache_values(x, update, out), strict=True)
    return {name: value for name, value in named if isinstance(value, Tensor)}


def cache_apart(tensors: dict[str, Tensor], appends: bool) -> Apart | None:
    """A function that checks whether a call writes what it reads, by the tensors' addresses; None
    where it writes nothing of the caller's. appends: whether it writes into the cache."""
    # A prefix may be other rows of the cache, and groups of values have scales of their own.
    caches = [n for n in ("k_cache", "v_cache", *_KV_SCALES, *_PREFIX) if n in tensors]
    written = [name for name in caches if name not in _PREFIX] if appends else []
    written = [n for n in written if n not in _KV_SCALES or tensors[n].dim() > 2]
    written += ["out"] if "out" in tensors else []
    return Apart(tensors, written, caches) if written else None


def check_cache_apart(x: Operands, update: CacheUpdate, appends: bool) -> None:
    """ValueError where a call that somebody looks on writes into a cache what it reads; nothing is
    said of tensors without addresses. `out` is written once all is read."""
    tensors = cache_tensors(x, update, None)
    if appends and are_bare(tensors.items()):
        apart = cache_apart(tensors, True)
        if apart is not None:
            apart.check([*map(Tensor.data_ptr, tensors.values())])
