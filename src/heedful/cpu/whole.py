"""Short sequences: a head's scores as one matrix, without tiles of keys or rescaling. It takes
calls with position masks and dropout, but without score modifiers. The fixed cost of a call is a
few dozen operators, each of which may cost as much as the work on 16 tokens. The backward computes
maximum and sum of a row again, and delta is the sum of p dP, so that dS of a row with one key is
exactly 0. Rows that have more keys elsewhere (lse says so) take delta from out.

B batch rows and G kv heads of an item, R query heads per kv head, M queries, N keys, D qk dim,
E v dim.
"""

from dataclasses import dataclass

import torch

from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.problem import AttentionProblem
from heedful.cpu import blocks, scores
from heedful.cpu.philox import draw_factors, keep_tile
from heedful.cpu.scores import TERMS
from heedful.cpu.workers import for_each
from heedful.reference.philox import keep_scale

# The most rows of a kv head, with those of its group, and the most keys. A sequence's own lengths
# decide, so that no neighbour changes a bit.
MOST = 512
# From this many scores on a call is worth threads of our own: handing work over takes about 50 us.
WORTH_THREADS = 128 * 1024


def takes(problem: AttentionProblem, x: Operands) -> bool:
    """Whether a call is one of these."""
    if problem.group * problem.seqlen_q > MOST or problem.seqlen_k > MOST:
        return False
    plain = problem.softcap == 0 and not problem.return_probs and problem.num_splits <= 1
    floats = problem.dtype in ("float32", "float16", "bfloat16")
    if not plain or not floats or problem.kv_dtype != problem.dtype or blocks.is_scattered(x):
        return False
    others = (x.alibi_slopes, x.bias, x.rel_bias, x.sink, x.tree_mask, x.key_ranges, x.block_rows)
    others += (x.q_descale, x.k_descale, x.v_descale)
    empty = 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k)
    return all(other is None for other in others) and not empty and not scores.low_precision(x)


def forward(problem: AttentionProblem, x: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes out and lse of a call that `takes` allows, as `heedful.cpu.forward` returns them."""
    seed = _seed(problem, x)

    def work(scratch: blocks.Scratch, item: "_Item") -> None:
        q, k, v = item.queries(x.q), item.keys(x.k), item.keys(x.v)
        s = _scores(problem, scratch, q * problem.scale, k)
        lse_own = lse[item.batches, item.query_heads]
        torch.logsumexp(s.view(lse_own.shape + s.shape[2:]), -1, out=lse_own)
        p = _softmax(problem, scratch, s)
        if problem.dropout_p > 0:
            p.mul_(item.factors(seed))
        item.store_queries(out, torch.bmm(p, v))

    for_each(_items(problem), work, scores.ThreadScratch, _is_parallel(problem))


def backward(
    problem: AttentionProblem, x: Operands, out, lse, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Gradients of a call that `takes` allows, with the bits that autograd gives to `recorded`."""
    seed = _seed(problem, x)
    dq, dk, dv = (torch.empty(a.shape, dtype=a.dtype, device="cpu") for a in x[:3])

    def work(scratch: blocks.Scratch, item: "_Item") -> None:
        q, k, v, do = item.queries(x.q), item.keys(x.k), item.keys(x.v), item.queries(dout)
        scaled = q * problem.scale
        s = _scores(problem, scratch, scaled, k)
        lse_here = torch.logsumexp(s, -1, keepdim=True)
        weights = p = _softmax(problem, scratch, s)
        lse_rows = lse[item.batches, item.query_heads].reshape(lse_here.shape)
        is_all = torch.equal(lse_here, lse_rows)
        if not is_all:
            p.mul_(torch.exp(lse_here - lse_rows).masked_fill_(lse_here == -torch.inf, 0.0))
        dp = scratch.take("dp", *p.shape)
        torch.bmm(do, v.mT, out=dp)
        if problem.dropout_p > 0:
            factors = item.factors(seed)
            dp.mul_(factors)
            weights = torch.mul(p, factors, out=scratch.take("weights", *p.shape))
        item.store_keys(dv, torch.bmm(weights.mT, do))
        ds = scratch.take("s", *p.shape)
        if is_all:
            # p (dP - sum of p dP)
            torch.ops.aten._softmax_backward_data.out(dp, p, -1, torch.float32, grad_input=ds)
        else:
            delta = (do * item.queries(out)).sum(-1, keepdim=True)
            is_whole = (lse_here - lse_rows).abs() <= scores.slack(lse_rows)
            torch.mul(
                dp.sub_(torch.where(is_whole, (p * dp).sum(-1, keepdim=True), delta)), p, out=ds
            )
        if dlse is not None:
            ds.addcmul_(p, dlse[item.batches, item.query_heads].reshape(*p.shape[:2], 1))
        item.store_queries(dq, torch.bmm(ds, k).mul_(problem.scale))
        item.store_keys(dk, torch.bmm(scaled.mT, ds).mT)

    for_each(_items(problem), work, scores.ThreadScratch, _is_parallel(problem))
    return Gradients(dq, dk, dv)


def records(problem: AttentionProblem, x: Operands) -> bool:
    """Whether `recorded` takes a call: one on the caller's thread, all of whose rows see a key."""
    mask, same = problem.mask, problem.out_dtype == problem.dtype
    sees = mask.offset(problem.seqlen_q, problem.seqlen_k) + mask.right >= 0
    is_seen = not mask.bounded or (mask.left < 0 and sees)
    return same and is_seen and takes(problem, x) and len(_items(problem)) == 1


def recorded(problem: AttentionProblem, x: Operands) -> torch.Tensor:
    """out of one call, with the bits of `forward`, by operators that torch's autograd records. It
    takes no slices: each costs autograd a copy."""
    rows = problem.group * problem.seqlen_q
    # Even a cast that changes nothing takes a microsecond or two.
    casts = problem.dtype != "float32"
    # A product's bits depend on strides.
    q, k, v = (a if a.stride(-1) == 1 else a.contiguous() for a in x[:3])
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    if casts:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if problem.group > 1:
        q = q.reshape(-1, rows, q.shape[2])
    q = q * problem.scale
    if q.shape[2] <= TERMS:
        s = torch.bmm(q, k.mT)
    else:
        (of_q, of_k), *more = zip(q.split(TERMS, 2), k.split(TERMS, 2), strict=True)
        s = torch.bmm(of_q, of_k.mT)
        for of_q, of_k in more:
            s = torch.baddbmm(s, of_q, of_k.mT)
    if problem.mask.bounded:
        heads = s.view(-1, problem.seqlen_q, problem.seqlen_k)
        s = heads.masked_fill(_hidden(problem), -torch.inf).view(s.shape)
    p = torch.softmax(s, -1)
    if problem.dropout_p > 0:
        p = p * _factors(problem, _seed(problem, x), p.shape)
    made = torch.bmm(p, v)
    shape = problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim_v
    out = made.view(shape).transpose(1, 2).contiguous()
    return out.to(x.q.dtype) if casts else out


def _factors(problem: AttentionProblem, seed: int, shape: torch.Size) -> torch.Tensor:
    """By what dropout multiplies the probabilities of a call, in the shape that they have."""
    return draw_factors(
        shape,
        seed,
        problem.dropout_p,
        range(problem.batch),
        range(problem.heads_q),
        range(problem.seqlen_q),
        range(problem.seqlen_k),
        problem.dropout_origin,
    )


def _seed(problem: AttentionProblem, x: Operands) -> int:
    return x.seed.tolist()[0] if problem.dropout_p > 0 else 0


def _is_parallel(problem: AttentionProblem) -> bool:
    pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return pairs > WORTH_THREADS


def _items(problem: AttentionProblem) -> list[list["_Item"]]:
    """The call in pieces of at most about a tile's scores, with several for each thread."""
    pairs = problem.group * problem.seqlen_q * problem.seqlen_k
    most = blocks.SCORES_PER_TILE
    if _is_parallel(problem):
        share = problem.batch * problem.heads_k * pairs // (2 * torch.get_num_threads())
        most = min(most, share)
    matrices = max(1, most // pairs)
    return [
        [_Item(problem, slice(b.start, b.stop), g)]
        for b in blocks.parts(problem.batch, max(1, matrices // problem.heads_k))
        for g in blocks.parts(problem.heads_k, matrices)
    ]


@dataclass(frozen=True)
class _Item:
    """Some kv heads of some batch rows."""

    problem: AttentionProblem
    batches: slice
    kv_heads: range

    @property
    def query_heads(self) -> slice:
        group = self.problem.group
        return slice(self.kv_heads.start * group, self.kv_heads.stop * group)

    def _by_head(self, tensor: torch.Tensor, heads: slice) -> torch.Tensor:
        """Heads of a tensor (batch, tokens, heads, dim), as a view (B, heads, tokens, dim)."""
        return tensor[self.batches, :, heads].transpose(1, 2)

    def _matrices(self, tensor: torch.Tensor, heads: slice) -> torch.Tensor:
        """Heads as real values, (B G, tokens of all of a kv head's, dim)."""
        part = self._by_head(tensor, heads).float().flatten(0, 1)
        group = part.shape[0] // ((self.batches.stop - self.batches.start) * len(self.kv_heads))
        return part if group == 1 else part.reshape(-1, group * part.shape[1], part.shape[2])

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B G, R M, dim) of a tensor laid out as q."""
        return self._matrices(tensor, self.query_heads)

    def keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B G, N, dim) of a tensor laid out as k."""
        return self._matrices(tensor, slice(self.kv_heads.start, self.kv_heads.stop))

    def store_queries(self, whole: torch.Tensor, made: torch.Tensor) -> None:
        """The reverse of `queries`."""
        part = self._by_head(whole, self.query_heads)
        part.copy_(made.view(part.shape))

    def store_keys(self, whole: torch.Tensor, made: torch.Tensor) -> None:
        """The reverse of `keys`."""
        part = self._by_head(whole, slice(self.kv_heads.start, self.kv_heads.stop))
        part.copy_(made.view(part.shape))

    def factors(self, seed: int) -> torch.Tensor:
        """By what dropout multiplies probabilities, (B G, R M, N)."""
        problem, heads = self.problem, self.query_heads
        keep = keep_tile(
            seed,
            problem.dropout_p,
            range(self.batches.start, self.batches.stop),
            range(heads.start, heads.stop),
            range(problem.seqlen_q),
            range(problem.seqlen_k),
            problem.dropout_origin,
        )
        keep = keep.reshape(-1, problem.group * problem.seqlen_q, problem.seqlen_k)
        return keep * keep_scale(problem.dropout_p)


def _scores(problem: AttentionProblem, scratch: blocks.Scratch, q, k) -> torch.Tensor:
    """(B G, R M, N), -inf where hidden. q: scaled."""
    s = scratch.take("s", q.shape[0], q.shape[1], k.shape[1])
    for begin in range(0, q.shape[2], TERMS):
        part, beta = slice(begin, begin + TERMS), float(begin > 0)
        torch.baddbmm(s, q[..., part], k[..., part].mT, beta=beta, out=s)
    if problem.mask.bounded:
        _hide(problem, s.view(-1, problem.seqlen_q, problem.seqlen_k))
    return s


def _softmax(problem: AttentionProblem, scratch: blocks.Scratch, s) -> torch.Tensor:
    """Probabilities of scores; rows without keys have 0."""
    p = torch.softmax(s, -1, out=scratch.take("p", *s.shape))
    if problem.mask.bounded:
        # A row without keys is NaN here, and so is a row with a NaN among its scores.
        p.masked_fill_(s.amax(-1, keepdim=True) == -torch.inf, 0.0)
    return p


def _hide(problem: AttentionProblem, heads: torch.Tensor) -> None:
    """-inf where the causal mask or window hides, in scores (heads, M, N)."""
    heads.masked_fill_(_hidden(problem), -torch.inf)


def _hidden(problem: AttentionProblem) -> torch.Tensor:
    """Where the causal mask or window hides, bool (M, N)."""
    mask, len_q, len_k = problem.mask, problem.seqlen_q, problem.seqlen_k
    i = torch.arange(len_q, device="cpu")[:, None] + mask.offset(len_q, len_k)
    j = torch.arange(len_k, device="cpu")
    hidden = j > i + mask.right if mask.right >= 0 else (j < 0).expand(len_q, len_k)
    if mask.left >= 0:
        hidden = hidden | ((j < i - mask.left) & (j >= mask.first))
    return hidden
