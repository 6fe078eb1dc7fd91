"""The plan of a batch: made once on the host, used by all layers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from heedful.core.base.entered import PLANS
from heedful.core.base.numbers import LONGEST, ints, whole, wrong_type
from heedful.core.call.mask import MaskSpec
from heedful.core.call.spread import Mask, spread_heads
from heedful.distributed import cost
from heedful.distributed.exchange import agree, swap
from heedful.distributed.grids import Grid, grid, split, width_of
from heedful.distributed.layouts import LAYOUTS, Layout
from heedful.distributed.peers import SharedRows, peers_of
from heedful.distributed.rings import Part, Step, ring_steps
from heedful.distributed.schedules import Schedule, crossing, gathered, places_of, rows_of
from heedful.distributed.traced import number_of
from heedful.torch.base.once import once
from heedful.torch.operands.checks import check_dtype, check_tensor

STRATEGIES = ("gather", "heads", "ring", "heads x ring")
TRANSPORTS = ("auto", "send", "copy")
# Dtypes that q, k and v may have.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class OnDevice:
    """A schedule, and the cu_seqlens of its calls on a device. one_by_one: of `gathered`. kept:
    what steps keep for the next."""

    schedule: Schedule
    one_by_one: bool
    cu_q: tuple[Tensor, ...]
    cu_k: tuple[Tensor, ...]
    kept: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepsOnDevice:
    """Steps of the strategy "ring", and by step the cu_seqlens of queries and keys of its parts."""

    steps: tuple[Step, ...]
    cumulative: tuple[tuple[tuple[Tensor, Tensor], ...], ...]

    @classmethod
    def of(cls, layout: Layout, mask: Mask, rank: int, one_by_one: bool, device) -> "StepsOnDevice":
        """The arguments of `rings.ring_steps`, and a device."""
        steps = ring_steps(layout, mask, rank, one_by_one)

        def both(part: Part) -> tuple[Tensor, Tensor]:
            return _cumulative(part.lengths_q, device), _cumulative(part.lengths_k, device)

        return cls(steps, tuple(tuple(map(both, step.parts)) for step in steps))


class ContextPlan:
    """Which tokens of a batch this rank holds, and how `attention` moves keys between ranks.

    Made by `plan`. A CUDA graph that was captured with a plan is good for that plan alone.

    Attributes:
        group: the process group; None is the default one.
        rank, ranks: of this process, and how many there are.
        layout: the pieces of documents that each rank holds (`layouts.Layout`).
        strategy: "gather", "heads", "ring" or "heads x ring".
        tokens: rows of q, k and v on this rank.
        total_tokens: rows of the whole batch.
        number: of this plan in this process, int64 () on the CPU.
        peers: memory of all ranks that "gather" copies rows from, None where it sends them.
        grid: in which the ranks of "heads x ring" stand (`grids.Grid`), else None.
        reasons: why layout and strategy were chosen, one line each.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        layout: Layout,
        strategy: str,
        heads: tuple[int, int],
        mask: Mask,
        reasons: Sequence[str],
        peers: Any = None,
        grid: Grid | None = None,
    ):
        self.group, self.layout, self.strategy, self.heads = group, layout, strategy, heads
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.mask, self.reasons, self.peers = mask, tuple(reasons), peers
        self.grid, self.number = grid, number_of(self)
        # Forwards that come again, by what they depend on.
        self.recent: dict[Any, Any] = {}
        self.tokens = layout.tokens(self.rank)
        self.total_tokens = layout.starts[-1]
        # By rank, where its rows lie in the batch; the most slices that a rank has.
        self.places = tuple(places_of(layout, rank) for rank in range(self.ranks))
        self.rounds = max(map(len, self.places))
        self._schedule = lru_cache(maxsize=16)(self._make)
        self._steps = lru_cache(maxsize=16)(StepsOnDevice.of)
        self._rows = cache(self._rows_on)
        self._orders = cache(self._make_orders)

    def __enter__(self) -> "ContextPlan":
        """Layers of `integrations.transformers` spread over this plan's ranks until the end of the
        block, on all threads of the process."""
        PLANS.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        PLANS.remove(self)

    # Tokens

    def shard(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's rows of a tensor that has a row for each token of the batch along `dim`, its
        documents one after the other. Every rank has the whole tensor; nothing is sent."""
        if whole.shape[dim] != self.total_tokens:
            raise ValueError(
                f"whole must have {self.total_tokens} rows along dim {dim}, one for each token of"
                f" the batch, got {whole.shape[dim]}"
            )
        return whole.index_select(dim, self._rows(whole.device, self.rank))

    def unshard(self, shard: Tensor, dim: int = 0) -> Tensor:
        """The whole tensor on every rank, from each rank's rows. Has no gradient: `gather` has."""
        return _unsharded(shard.detach(), self, dim)

    def gather(self, shard: Tensor, dim: int = 0) -> Tensor:
        """`unshard` with a gradient, once: that of a row is the sum over all ranks."""
        return _Gather.apply(shard, self, dim)

    def scatter(self, whole: Tensor, dim: int = 0) -> Tensor:
        """`shard` with a gradient, once, which is gathered from all ranks' rows."""
        return _Scatter.apply(whole, self, dim)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 (tokens,): each row's position within its document."""
        shard = self.layout.shards[self.rank]
        spans = [torch.arange(p.begin, p.end, device="cpu") for p in shard]
        return torch.cat([*spans, torch.arange(0, device="cpu")]).to(device)

    def shift_labels(self, tokens: Tensor, ignore_index: int = -100) -> Tensor:
        """The label of each of this rank's rows: the next token of its document, whatever rank has
        it; `ignore_index` at a document's end.

        Args:
            tokens: integer (total_tokens,), the token ids of the whole batch.
        """
        if tokens.shape != (self.total_tokens,):
            wanted = (self.total_tokens,)
            raise ValueError(f"tokens must have shape {wanted}, got {tuple(tokens.shape)}")
        # Others would wrap ignore_index around, to a token's number.
        check_dtype("tokens", tokens, "int8", "int16", "int32", "int64")
        labels = torch.roll(tokens, -1)
        starts, lengths = self.layout.starts[1:], self.layout.lengths
        ends = [start - 1 for start, n in zip(starts, lengths, strict=True) if n]
        labels[torch.tensor(ends, device=tokens.device)] = ignore_index
        return self.shard(labels)

    @property
    def loss_scale(self) -> float:
        """The factor of a rank's mean loss over its labelled rows (`shift_labels`), where gradients
        are averaged over these ranks: their average is then the gradient of the mean over the whole
        batch."""
        ends = {d: n for d, n in enumerate(self.layout.lengths) if n}
        held = sum(p.end == ends[p.document] for p in self.layout.shards[self.rank])
        labels = self.total_tokens - len(ends)
        return (self.tokens - held) * self.ranks / labels if labels else 0.0

    # Rows that are sent

    def schedule(self, mask: Mask, one_by_one: bool, device: torch.device) -> OnDevice:
        """This rank's schedule for a mask, made at its first use and kept."""
        return self._schedule(mask, one_by_one, device)

    def _make(self, mask: Mask, one_by_one: bool, device: torch.device) -> OnDevice:
        made = gathered(self.layout, mask, self.rank, one_by_one)

        return OnDevice(
            made,
            one_by_one,
            tuple(_cumulative(call.lengths_q, device) for call in made.calls),
            tuple(_cumulative(call.lengths_k, device) for call in made.calls),
        )

    def steps(self, mask: Mask, one_by_one: bool, device: torch.device) -> StepsOnDevice:
        """This rank's steps of a ring for a mask, made at their first use and kept."""
        grid = self.grid
        whose = (self.layout, self.rank) if grid is None else (grid.shards, grid.column.rank)
        return self._steps(whose[0], mask, whose[1], one_by_one, device)

    @torch.inference_mode(False)  # Gradients need them later.
    def _rows_on(self, device: torch.device, rank: int) -> Tensor:
        return torch.from_numpy(rows_of(self.layout, rank)).to(device)

    def order(self, device: torch.device) -> Tensor:
        """For each row of the batch, its index among the rows of all ranks, ordered by rank."""
        return self._orders(device)[0]

    def whole(self, device: torch.device) -> tuple[Tensor, int]:
        """cu_seqlens of the whole batch, and its longest document."""
        return self._orders(device)[1], max(self.layout.lengths)

    def _make_orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        held = torch.cat([self._rows(device, rank) for rank in range(self.ranks)])
        starts = torch.tensor(self.layout.starts, dtype=torch.int32, device=device)
        return torch.argsort(held), starts

    def explain(self) -> str:
        """Layout, strategy and why; each rank's tokens and tiles; what is sent."""
        lines = [*self.reasons, f"balance {self.layout.balance(self.mask):.3f}"]
        tiles = self.layout.tiles(self.mask)
        for rank in range(self.ranks):
            received = gathered(self.layout, self.mask, rank).rows_received
            lines.append(
                f"rank {rank}: {self.layout.tokens(rank)} tokens, {tiles[rank]} tiles of 128 x 128,"
                f" gather receives {received} rows of k and v"
            )
        return "\n".join(lines)


def plan(
    group: Any = None,
    lengths: Sequence[int] | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    heads_q: int,
    heads_k: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    layout: str = "auto",
    strategy: str = "auto",
    transport: str = "auto",
    heads_ranks: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> ContextPlan:
    """Decides which tokens of a batch each rank of a group holds, and how keys are exchanged.

    A collective: every rank of the group calls it with the same arguments, and each raises if they
    differ. Nothing else compares ranks.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for the default group.
        lengths: tokens of each document of the batch, from 0.
        cu_seqlens: int32 or int64 (documents + 1,), in place of lengths; one on a GPU is copied to
            the host here.
        heads_q, heads_k, head_dim, head_dim_v, dtype: of the q, k and v that `attention` will get.
        causal, window_size: as most layers have them; work is balanced for these. `attention` takes
            others, too.
        layout: "zigzag", "contiguous", "documents", or "auto": contiguous under a window, else
            zigzag for one document and documents for several.
        strategy: "gather" (keys and values that are seen travel), "heads" (ranks exchange tokens
            for heads), "ring" (keys of one rank at a time, least memory), "heads x ring" (both), or
            "auto": that of the first two whose forward and backward take less, by `cost`.
        transport: for "gather": "copy", GPUs of one host copy rows out of each other's memory,
            beside kernels that hold all SMs; "send", by the group's backend; or "auto", which
            copies where it can. The memory is the group's, and stays.
        heads_ranks: how many ranks, neighbours in the group, exchange tokens for heads under "heads
            x ring": a divisor of the ranks and of heads_k. By default the largest.
        options: anything else that ranks should agree on, compared by its repr.

    Returns:
        The plan of this rank.

    Raises:
        ValueError: naming what differs between ranks, or a wrong argument.
        TypeError: naming the argument.
    """
    group = _group(group)
    counts = _lengths(lengths, cu_seqlens)
    heads, dims = _sizes(heads_q, heads_k, head_dim, head_dim_v)
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    if options is not None and not isinstance(options, Mapping):
        wrong_type("options", "a mapping or None", options)
    mask = mask_of(causal, window_size)
    for name, told, known in (("layout", layout, LAYOUTS), ("strategy", strategy, STRATEGIES)):
        if told not in ("auto", *known):
            raise ValueError(f"{name} must be one of {('auto', *known)}, got {told!r}")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {transport!r}")
    if transport == "copy" and strategy not in ("auto", "gather"):
        raise ValueError(f"transport must be 'send' under strategy {strategy!r}, got 'copy'")
    facts = {
        "lengths": counts,
        "heads": heads,
        "head dims": dims,
        "dtype": str(dtype),
        "mask": (mask.left, mask.right, mask.first),
        "layout": layout,
        "strategy": strategy,
        "transport": transport,
        "heads_ranks": heads_ranks,
        "options": sorted((options or {}).items(), key=repr),
    }
    agree(group, {name: _digest(fact) for name, fact in facts.items()}, _device(group))
    ranks = dist.get_world_size(group)
    width = 0
    if strategy == "heads x ring":
        width = width_of(ranks, heads[1], heads_ranks)
    elif heads_ranks is not None:
        raise ValueError(f"heads_ranks must be None under strategy {strategy!r}")
    name, why = cost.layout_for(counts, mask) if layout == "auto" else (layout, "as asked")
    made = LAYOUTS[name](counts, ranks // max(1, width), mask)
    where = grid(group, made, width, heads) if width else None
    made = split(made, width) if width else made
    reasons = [f"layout {name}: {why}"]
    strategy = "gather" if transport == "copy" else strategy
    copies = transport != "send" and dist.get_backend(group) == "nccl"
    chosen, why = _strategy(strategy, made, mask, heads, dims, dtype, copies)
    reasons.append(f"strategy {chosen}: {why}")
    row = sum(dims) * dtype.itemsize * heads[1]
    received = crossing(made, mask).most_received * row / 2**20
    reasons.append(f"gather: a rank receives at most {received:.1f} MiB of keys and values")
    peers = None
    if chosen == "gather" and transport != "send":
        rows = gathered(made, mask, dist.get_rank(group))
        needed = SharedRows.bytes_of(rows, heads[1], sum(dims), dtype.itemsize)
        peers, why = peers_of(group, needed)
        if transport == "copy" and why:
            raise ValueError(f"transport must be 'send' where {why}, got 'copy'")
        words = f"rows are sent: {why}" if why else "rows are copied between GPUs of a host"
        reasons.append(words if needed else "no rank needs rows of another")
    return ContextPlan(group, made, chosen, heads, mask, reasons, peers, where)


def mask_of(causal: Any, window_size: Any) -> Mask:
    """The mask of these arguments of `flash_attn_func`."""
    is_plain = type(causal) is bool and type(window_size) is tuple
    if is_plain and all([type(bound) is int for bound in window_size]):
        return _mask_of(causal, window_size)
    return _mask_of.__wrapped__(causal, window_size)


@lru_cache(maxsize=64)
def _mask_of(causal: Any, window_size: Any) -> Mask:
    spec = MaskSpec.of(causal, window_size)
    bounds = (None if bound < 0 else bound for bound in (spec.left, spec.right))
    return Mask(*bounds, first=spec.first)


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.from_numpy(np.cumsum((0, *lengths), dtype=np.int32)).to(device)


def _group(group: Any) -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("plan needs torch.distributed: call init_process_group before")
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"group must be a mesh of one dim, got {group.ndim} dims")
        return group.get_group()
    raise TypeError(f"group must be a ProcessGroup or DeviceMesh, got {type(group).__name__}")


def _sizes(
    heads_q: Any, heads_k: Any, head_dim: Any, head_dim_v: Any
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads of queries and of keys, and both head dims. Raises TypeError or ValueError."""
    heads = whole("heads_q", heads_q), whole("heads_k", heads_k)
    if min(heads) < 1 or heads[0] % heads[1]:
        raise ValueError(f"heads_k must divide heads_q, got {heads[0]} and {heads[1]}")
    dim_v = head_dim if head_dim_v is None else head_dim_v
    dims = whole("head_dim", head_dim), whole("head_dim_v", dim_v)
    for name, dim in zip(("head_dim", "head_dim_v"), dims, strict=True):
        if dim < 1:
            raise ValueError(f"{name} must be >= 1, got {dim}")
    return heads, dims


def _lengths(lengths: Any, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    if (lengths is None) == (cu_seqlens is None):
        raise ValueError("plan takes lengths or cu_seqlens, one of them")
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens)
        check_dtype("cu_seqlens", cu_seqlens, "int32", "int64")
        ends = cu_seqlens.tolist()
        if not ends or ends[0] != 0:
            raise ValueError(f"cu_seqlens must begin with 0, got {ends[:1]}")
        lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    counts = ints("lengths", lengths, "a sequence of ints")
    if not counts or min(counts) < 0 or sum(counts) > LONGEST:
        raise ValueError(
            f"lengths must be one or more counts of tokens from 0, together at most {LONGEST}"
        )
    return tuple(counts)


def _strategy(
    name: str,
    layout: Layout,
    mask: Mask,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    copies: bool,
) -> tuple[str, str]:
    ranks = len(layout.shards)
    if name == "heads":
        spread_heads(*heads, ranks)
    if name != "auto":
        return name, "as asked"
    waits = cost.times(layout, mask, heads, dims, dtype.itemsize, copies)
    if "heads" not in waits:
        return "gather", "heads do not spread evenly over the ranks"
    chosen = min(("gather", "heads"), key=lambda which: waits[which].both)
    told = ", ".join(f"{which} {wait.both * 1e3:.3f} ms" for which, wait in waits.items())
    return chosen, f"predicted time of forward and backward: {told}"


def _digest(fact: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(fact).encode()).digest()[:7], "big")


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group's backend takes tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _unsharded(shard: Tensor, made: ContextPlan, dim: int) -> Tensor:
    rows = shard.movedim(dim, 0).contiguous()
    if rows.shape[0] != made.tokens:
        raise ValueError(
            f"shard must have this rank's {made.tokens} rows along dim {dim}, got {rows.shape[0]}"
        )
    counts = [made.layout.tokens(rank) for rank in range(made.ranks)]
    sent = rows.repeat(made.ranks, *[1] * (rows.ndim - 1))
    every = swap(made.group, sent, [made.tokens] * made.ranks, counts).wait()
    return every.index_select(0, made.order(rows.device)).movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, made, dim):
        ctx.made, ctx.dim = made, dim
        return _unsharded(shard, made, dim)

    @staticmethod
    @once
    def backward(ctx, *grads):
        made, dim = ctx.made, ctx.dim
        grad = grads[0].movedim(dim, 0)
        rows = [grad.index_select(0, made._rows(grad.device, r)) for r in range(made.ranks)]
        counts = [len(part) for part in rows]
        got = swap(made.group, torch.cat(rows), counts, [made.tokens] * made.ranks).wait()
        total = got.view(made.ranks, made.tokens, *got.shape[1:]).sum(0)
        return total.movedim(0, dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole, made, dim):
        ctx.made, ctx.dim = made, dim
        return made.shard(whole, dim)

    @staticmethod
    @once
    def backward(ctx, *grads):
        return _unsharded(grads[0], ctx.made, ctx.dim), None, None
