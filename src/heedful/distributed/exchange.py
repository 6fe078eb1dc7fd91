"""Moves rows between the ranks of a group. Counts are known beforehand, so that no rank waits for a
size."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Most exchanges of a slice between each two ranks that replace one of packed rows.
ROUNDS = 2
# Cycles by which a transfer's kernel is ahead of one of attention: 8 microseconds.
HEAD_START = 15_000


class Transfer:
    """Rows that are being received. rows: the tensor into which they arrive; call `wait` before
    reading it."""

    def __init__(self, rows: Tensor, work: Any, kept: Tensor):
        self.rows, self._work, self._kept = rows, work, kept

    def wait(self) -> Tensor:
        """The rows, after they have arrived: on a GPU the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.rows


def swap(
    group: dist.ProcessGroup | None,
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    into: Tensor | None = None,
) -> Transfer:
    """Begins to send the first sent[0] rows to rank 0, the next sent[1] to rank 1 and so on, and to
    receive as many as `received` says. into: a contiguous tensor that receives them."""
    if into is None:
        into = rows.new_empty((sum(received), *rows.shape[1:]))
    if dist.get_world_size(group) == 1:
        into.copy_(rows)
        return Transfer(into, None, rows)
    # Bytes: not every backend knows every dtype.
    work = dist.all_to_all_single(
        _bytes(into), _bytes(rows), list(received), list(sent), group=group, async_op=True
    )
    return Transfer(into, work, rows)


def takes_lists(group: dist.ProcessGroup | None) -> bool:
    """Whether the group's backend has an all-to-all of separate tensors."""
    return dist.get_backend(group) == "nccl"


class Exchange:
    """Slices of rows that are on their way between all ranks. sent[r], into[r]: contiguous tensors
    that rank r gets, or fills, of one dtype and of equal shapes but for dim 0, in the same order on
    both. rounds: the most that one rank sends to another. like: a tensor of such rows. Call `wait`
    before reading `into` or writing `sent`."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sent: Sequence[Sequence[Tensor]],
        into: Sequence[Sequence[Tensor]],
        rounds: int,
        like: Tensor,
    ):
        self._sent, self._into, self._transfer, self._works = sent, into, None, []
        if rounds <= ROUNDS and takes_lists(group):
            # Straight from and to where the rows belong.
            none = like[:0]
            for index in range(rounds):
                outs, ins = (
                    [theirs[index] if index < len(theirs) else none for theirs in parts]
                    for parts in (into, sent)
                )
                self._works.append(dist.all_to_all(outs, ins, group=group, async_op=True))
        else:
            flat = [_bits(like[:0]), *(_bits(rows) for theirs in sent for rows in theirs)]
            gone, come = ([sum(map(len, theirs)) for theirs in parts] for parts in (sent, into))
            self._transfer = swap(group, torch.cat(flat), gone, come)

    def wait(self) -> None:
        """On a GPU the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        if self._transfer is not None:
            into = [_bits(rows) for theirs in self._into for rows in theirs]
            if into:
                each = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
                each(into, self._transfer.wait().split(list(map(len, into))))
        self._works, self._transfer = [], None


def head_start(device: torch.device) -> None:
    """Lets a transfer that was asked for begin before the kernel that comes next: it takes few SMs,
    and would wait for that kernel's last work tile."""
    if device.type == "cuda":
        torch.cuda._sleep(HEAD_START)


# Integers by their size, in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """x as integers of its size. A copy of several tensors of 16-bit floats at once goes through
    float32 on a GPU, where all NaNs become one; rows may hold other bits, as of log-sum-exps."""
    return x.view(_INTEGERS[x.itemsize])


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def agree(group: dist.ProcessGroup | None, facts: dict[str, int], device: torch.device) -> None:
    """Raises ValueError on every rank unless all ranks have the same facts: 63-bit numbers, by what
    they are called. One collective."""
    mine = torch.tensor(list(facts.values()), dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    table = torch.stack(every).tolist()
    for index, name in enumerate(facts):
        values = [row[index] for row in table]
        if len(set(values)) > 1:
            most = max(set(values), key=values.count)
            odd = [rank for rank, value in enumerate(values) if value != most]
            raise ValueError(
                f"plan must get the same {name} on every rank; ranks {odd} have another than the"
                f" other {len(table) - len(odd)}"
            )


def side_by_side(parts: list[Tensor], out: Tensor) -> None:
    """Copies what two tensors have for each row and head into one of `out`, in wide words, as which
    `out` may come."""
    words = [words_of(x) for x in (*parts, out)]
    if len({x.dtype for x in words}) > 1:
        words = [*parts, out.view(parts[0].dtype)]
    torch.cat(words[:-1], dim=-1, out=words[-1])


def copy(into: Tensor, rows: Tensor) -> None:
    """into.copy_(rows), in wide words."""
    words = words_of(into), words_of(rows)
    same = words[0].dtype == words[1].dtype
    words[0].copy_(words[1]) if same else into.copy_(rows)


def words_of(x: Tensor) -> Tensor:
    """x as words of 8 bytes, if it can be: copies of rows with gaps take an element at a time."""
    if x.dtype == torch.int64:
        return x
    ratio = 8 // x.itemsize
    steps = *x.stride()[:-1], x.shape[-1], x.storage_offset()
    fits = x.stride(-1) == 1 and not any(step % ratio for step in steps)
    return x.view(torch.int64) if fits else x
