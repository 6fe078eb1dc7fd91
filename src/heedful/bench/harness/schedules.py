"""Schedules of others over our kernels, beside ours in `heedful.bench.parallel`: written anew from
what their papers and authors say.

"zigzag" is the ring of ring-flash-attention: rank r of n holds chunks r and 2 n - 1 - r of one
document, keys go around, and each step's part is merged in float32. "llama3" is its way for packed
documents, from section 3.3.2 of arXiv 2407.21783: ranks hold equal parts of the batch in order,
gather keys by some heads at a time, and reduce their gradients in the inputs' dtype.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from heedful import attention_backward, flash_attn_func, flash_attn_varlen_func
from heedful.integrations.torch import registry

# KV heads that are gathered at a time by "llama3".
HEADS_AT_ONCE = 2


class Peer:
    """rows: this rank's rows of the batch, in its order. `call(q, k, v)` is causal attention of
    them, differentiable. Raises ValueError for a batch that the schedule does not take."""

    rows: Tensor

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def shard(self, whole: Tensor) -> Tensor:
        return whole.index_select(0, self.rows.to(whole.device))

    def unshard(self, mine: Tensor) -> Tensor:
        """Every rank's rows in the batch's order."""
        ranks = dist.get_world_size()
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine.contiguous())
        held = [torch.empty_like(self.rows, device=mine.device) for _ in range(ranks)]
        dist.all_gather(held, self.rows.to(mine.device))
        return torch.cat(parts).index_select(0, torch.argsort(torch.cat(held)))


class Zigzag(Peer):
    def __init__(self, lengths: Sequence[int], window: int):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if len(lengths) > 1 or window >= 0 or lengths[0] % (2 * ranks):
            raise ValueError(f"zigzag takes one document of 2 x {ranks} equal chunks, no window")
        chunks = torch.arange(lengths[0], device="cpu").chunk(2 * ranks)
        self.rows = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Zigzag.apply(q, k, v)


def _passed_on(sent: Tensor) -> tuple[Tensor, list[Any]]:
    """Begins to send to the next rank, and to receive from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(sent)
    ops = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, got, (rank - 1) % ranks),
    ]
    return got, dist.batch_isend_irecv(ops)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _seen(step: int, rank: int, half: int) -> tuple[slice, slice]:
    """The rows of q that see keys in a step, and these keys."""
    if step == 0:
        return slice(None), slice(None)
    if step <= rank:
        return slice(None), slice(half)
    return slice(half, None), slice(None)


class _Zigzag(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        rank, ranks, half = dist.get_rank(), dist.get_world_size(), len(q) // 2
        out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=torch.float32, device=q.device)
        lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
        keys = torch.stack([k, v])
        for step in range(ranks):
            after, works = _passed_on(keys) if step + 1 < ranks else (keys, [])
            rows, seen = _seen(step, rank, half)
            parts = q[None, rows], keys[0][None, seen], keys[1][None, seen]
            part, part_lse = flash_attn_func(*parts, causal=step == 0, return_lse=True)
            if step == 0:
                out.copy_(part[0])
                lse.copy_(part_lse[0])
            else:
                weight = torch.sigmoid(part_lse[0] - lse[:, rows])
                out[rows] += weight.T[..., None] * (part[0] - out[rows])
                lse[:, rows] = torch.logaddexp(lse[:, rows], part_lse[0])
            _wait(works)
            keys = after
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, half = dist.get_rank(), dist.get_world_size(), len(q) // 2
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        keys = torch.stack([k, v])
        sums, sending = torch.zeros(keys.shape, dtype=torch.float32, device=q.device), []
        for step in range(ranks):
            after, works = _passed_on(keys) if step + 1 < ranks else (keys, [])
            rows, seen = _seen(step, rank, half)
            grad = attention_backward(
                grads[0][None, rows],
                q[None, rows],
                keys[0][None, seen],
                keys[1][None, seen],
                out[None, rows],
                lse[None, :, rows].contiguous(),
                causal=step == 0,
            )
            dq[rows] += grad.dq[0]
            # The sums of these keys came from the rank before.
            _wait(sending)
            sums[0, seen] += grad.dk[0]
            sums[1, seen] += grad.dv[0]
            sums, sending = _passed_on(sums)
            _wait(works)
            keys = after
        _wait(sending)
        return dq.to(q.dtype), *sums.to(k.dtype).unbind()


class Llama3(Peer):
    def __init__(self, lengths: Sequence[int], window: int):
        rank, ranks, total = dist.get_rank(), dist.get_world_size(), sum(lengths)
        if total % ranks:
            raise ValueError(f"llama3 takes a batch of {ranks} equal parts, got {total} tokens")
        begin, end = total * rank // ranks, total * (rank + 1) // ranks
        self.rows = torch.arange(begin, end, device="cpu")
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        spans = [s for s in zip(starts, starts[1:], strict=False) if s[1] > begin and s[0] < end]
        self.keys = slice(spans[0][0], end)
        queries = [0, *(min(stop, end) - begin for _, stop in spans)]
        keys = [0, *(min(stop, end) - spans[0][0] for _, stop in spans)]
        self.ends = torch.tensor([queries, keys], dtype=torch.int32, device="cpu")
        sizes = self.ends.diff()
        self.longest = int(sizes[0].max()), int(sizes[1].max())
        self.window, self._on = window, {}

    def options(self, device: torch.device) -> dict[str, Any]:
        if device not in self._on:
            self._on[device] = self.ends.to(device)
        cu_q, cu_k = self._on[device]
        return {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": self.longest[0],
            "max_seqlen_k": self.longest[1],
            "causal": True,
            "window_size": (self.window, 0),
        }

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Llama3.apply(q, k, v, self)


def _gathered(k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Any]:
    heads = slice(first, first + HEADS_AT_ONCE)
    mine = torch.stack([k[:, heads], v[:, heads]], 1)
    every = mine.new_empty((len(mine) * dist.get_world_size(), *mine.shape[1:]))
    return every, dist.all_gather_into_tensor(every, mine, async_op=True)


def _by_group(k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The first KV head of each group and its keys and values of all ranks. Those of the next group
    are under way meanwhile."""
    after = _gathered(k, v, 0)
    for first in range(0, k.shape[1], HEADS_AT_ONCE):
        keys, work = after
        work.wait()
        if first + HEADS_AT_ONCE < k.shape[1]:
            after = _gathered(k, v, first + HEADS_AT_ONCE)
        yield first, keys


class _Llama3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, made):
        options, group = made.options(q.device), q.shape[1] // k.shape[1]
        out, lses = q.new_empty((*q.shape[:2], v.shape[-1])), []
        for first, keys in _by_group(k, v):
            heads = slice(first * group, (first + HEADS_AT_ONCE) * group)
            k_part, v_part = keys[made.keys].unbind(1)
            result = flash_attn_varlen_func(
                q[:, heads], k_part, v_part, **options, out=out[:, heads], return_lse=True
            )
            lses.append(result[1])
        ctx.made = made
        ctx.save_for_backward(q, k, v, out, *lses)
        return out

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, out, *lses = ctx.saved_tensors
        made = ctx.made
        options, group = made.options(q.device), q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        reducing = []
        for index, (first, keys) in enumerate(_by_group(k, v)):
            heads = slice(first * group, (first + HEADS_AT_ONCE) * group)
            k_part, v_part = keys[made.keys].unbind(1)
            parts = grads[0][:, heads], q[:, heads], k_part, v_part, out[:, heads], lses[index]
            grad = attention_backward(*parts, **options)
            dq[:, heads] = grad.dq
            sums = torch.zeros_like(keys)
            sums[made.keys, 0], sums[made.keys, 1] = grad.dk, grad.dv
            mine = keys.new_empty((len(k), *keys.shape[1:]))
            work = dist.reduce_scatter_tensor(mine, sums, async_op=True)
            reducing.append((slice(first, first + HEADS_AT_ONCE), mine, work))
        for heads, mine, work in reducing:
            work.wait()
            dk[:, heads], dv[:, heads] = mine.unbind(1)
        return dq, dk, dv, None


class Torch(Zigzag):
    """torch's context parallelism, a ring of its own, over kernels of `integrations.torch`, which
    stays active. It takes as many KV heads as query heads: they are copied before."""

    def __init__(self, lengths: Sequence[int], window: int):
        super().__init__(lengths, window)
        if not hasattr(torchs, "_enable_context_parallel_dispatcher_impl"):
            raise ValueError(f"torch {torch.__version__} has another context parallelism")
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._mesh = init_device_mesh(kind, (dist.get_world_size(),))
        torchs._cp_options.enable_load_balance = True
        torchs._enable_context_parallel_dispatcher_impl(2, self._mesh)
        if registry._active is None:
            registry._activate(kind.upper())

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        heads_first = (x.transpose(0, 1)[None] for x in (q, *_copied(k, v, group)))
        spread = [DTensor.from_local(x, self._mesh, [Shard(2)]) for x in heads_first]
        operator: Any = torch.ops.aten._scaled_dot_product_flash_attention
        return operator(*spread, 0.0, True)[0].to_local()[0].transpose(0, 1)


def _copied(k: Tensor, v: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


class TransformerEngine(Zigzag):
    """TransformerEngine's context parallelism by its own kernels, its way "p2p"."""

    def __init__(self, lengths: Sequence[int], window: int):
        super().__init__(lengths, window)
        if find_spec("transformer_engine") is None:
            raise ValueError("transformer_engine is not installed")
        self._made: Any = None

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._made is None:
            pytorch = import_module("transformer_engine.pytorch")
            self._made = pytorch.DotProductAttention(
                q.shape[1], q.shape[2], num_gqa_groups=k.shape[1], attn_mask_type="causal"
            )
            every = [*range(dist.get_world_size())]
            stream = torch.cuda.Stream()
            self._made.set_context_parallel_group(dist.group.WORLD, every, stream, "p2p")
        # (batch, tokens, heads, dim) in, (batch, tokens, heads * dim) out.
        out = self._made(q[None], k[None], v[None], qkv_format="bshd")
        return out[0].unflatten(-1, (q.shape[1], -1))


PEERS = {"zigzag": Zigzag, "llama3": Llama3, "torch": Torch, "te": TransformerEngine}
