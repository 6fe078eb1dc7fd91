"""Attention of new tokens over a KV cache, which it can extend first."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled
from torch.compiler import is_compiling

from heedful.core.base.numbers import FAR, LONGEST
from heedful.core.call.arguments import (
    NUMBERS,
    UNBOUNDED,
    CacheUpdate,
    Options,
    argument_name,
    new_operands,
    new_options,
    new_update,
    one_sink,
)
from heedful.core.call.describe_cache import attention_part, check_cache, last_rotated_length
from heedful.core.call.numerics import Documents, with_documents, with_numerics
from heedful.core.call.operands import Operands
from heedful.masks.block_mask import BlockMask, block_operands
from heedful.torch.api.prefix import Prefix, keeps_rest, prefixed
from heedful.torch.base.dispatch import (
    Likeness,
    any_autocast,
    are_bare,
    check_all_bare,
    needs_dispatcher,
)
from heedful.torch.base.forked import on_own_thread
from heedful.torch.eager.cache_step import DeviceStep, named
from heedful.torch.eager.cache_update import update_cache, update_plainly, used_keys, with_used
from heedful.torch.eager.calls import CALLS, Call
from heedful.torch.eager.keys import tensor_keys
from heedful.torch.operands.adapt import adapt, autocast, cast, dense_rows
from heedful.torch.operands.apart import cache_apart, cache_tensors, cache_values, check_cache_apart
from heedful.torch.operands.cache_checks import (
    cache_call,
    check_apart,
    check_int_length,
    check_rotated_length,
    lies_in,
)
from heedful.torch.operands.checks import FLOATS
from heedful.torch.operands.plain import is_same, plain_options, plain_update, plain_window
from heedful.torch.operands.values import check_room, is_readable
from heedful.torch.traced import library

# The arguments that hold tensors: those of most calls, then the others.
_ARGUMENTS = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens")
_ARGUMENTS += ("block_table", "cache_batch_idx", "cache_leftpad", "alibi_slopes", "k_descale")
_ARGUMENTS += ("v_descale", "k_shift", "v_shift", "sink", "tree_mask", "key_ranges", "rel_bias")
_ARGUMENTS += ("shared_prefix", "out")
# The names of the arrays in programs that are not operands.
_NEW = {"k_new": "k", "v_new": "v", "q_new": "q"}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    k_shift: Tensor | None = None,
    v_shift: Tensor | None = None,
    sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_ranges: Tensor | Documents | None = None,
    block_mask: BlockMask | None = None,
    rel_bias: Tensor | None = None,
    shared_prefix: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
    numerics: str | None = None,
    sm_margin: int | None = None,
) -> Any:
    """Attention of the newest tokens over a cache of keys and values, for inference: no gradient is
    recorded. k and v, if passed, are first written into the cache, in place.

    Arguments that are not listed are those of `flash_attn_func`.

    Args:
        q: (batch, q_len, heads_q, head_dim).
        k_cache: (batch_cache, capacity, heads_k, head_dim), or with block_table (num_pages,
            page_size, heads_k, head_dim), any page size. In q's dtype, or quantised: int8, float8,
            or uint8 with two int4 a byte (head_dim / 2 bytes) or rows of pack_latent (656 bytes).
            Last dim contiguous.
        v_cache: as k_cache, with head_dim_v; it may be a view of the first columns of k_cache
            (MLA), which are then read once. Beside rows of pack_latent it is k_cache itself.
        k, v: (batch, new_len, heads_k, head_dim | head_dim_v) in the caches' dtype, written at
            positions cache_seqlens on. For a quantised cache they come in q's dtype and are
            quantised. Scales of heads are used as they are (by default 1). Scales and shifts of
            groups are computed as by quantize_kv, and written into their tensors, too. Or k and v
            come quantised, and the caller writes their scales. Rows of pack_latent get v, and k's
            columns past v's.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype or float32. Keys are rotated
            at positions cache_seqlens, cache_seqlens + 1, ..., queries too if causal or windowed;
            otherwise all queries at position cache_seqlens. They require k and v. They have at
            least as many positions as the cache, and no query may have a position past the last.
        cache_seqlens: int, or int32 or int64 (batch,): tokens in the cache, without the new ones.
            By default the whole cache is used. In a tensor, a negative length marks an entry
            without a sequence (padding): nothing is written or read for it, and its rows of out are
            0.
        cache_batch_idx: int32 or int64 (batch,): which row of the cache belongs to each sequence.
        cache_leftpad: int32 or int64 (batch,): where in its row a sequence begins.
        block_table: int32 or int64 (batch, pages): where the pages of each sequence are.
        rotary_interleaved: rotate dims 0 and 1, 2 and 3, ... (GPT-J), else 0 and rotary_dim / 2,
            1 and rotary_dim / 2 + 1, ... (GPT-NeoX).
        return_softmax_lse: also return the log-sum-exp, float32 (batch, heads_q, q_len).
        k_descale, v_descale, k_shift, v_shift: float32, for quantised caches: value = stored *
            descale + shift, each () or (batch, heads_k), or per group of values as quantize_kv
            makes them, (batch_cache, capacity, heads_k, groups) or (num_pages, page_size, heads_k,
            groups).
        tree_mask: bool (batch or 1, q_len, q_len): query i sees the c-th of the last q_len keys
            only if tree_mask[b, i, c], for speculative decoding.
        key_ranges: int32 (batch or 1, heads_q or 1, q_len, 2 or 4), as of flash_attn_func. Keys of
            a shared_prefix, which every query sees, do not count.
        block_mask: a `heedful.BlockMask` of q_len queries and as many keys as a row of the cache or
            of block_table has room for. Positions count from the first of q, and from a sequence's
            first key in the cache. Keys of a shared_prefix do not count.
        rel_bias: float (heads_q, distances), as of flash_attn_func. Not beside a shared_prefix.
        shared_prefix: (k, v), each (prefix_len, heads_k, head_dim | head_dim_v) or with a leading
            1: keys and values before the cache of every sequence. Rotary positions count them;
            every query sees them all.
        out: (batch, q_len, heads_q, head_dim_v) to write into: as q, or float32.

    Returns:
        out (batch, q_len, heads_q, head_dim_v), or (out, lse).

    Raises:
        TypeError, ValueError: naming the argument, before the cache or out is written. Values on a
        GPU (lengths, indices, page numbers) are not read back. A call with a wrong value reads
        other rows of the cache, never memory outside of it, and writes nothing for it.
        HEEDFUL_CHECK_PAGES=1 checks them in calls with a block_table, which waits for the device.

    Source: signature of flash_attn 2.x; cascade inference of FlashInfer for shared_prefix.
    """
    if s_aux is not None or learnable_sink is not None:
        sink = one_sink(sink, s_aux, learnable_sink)
    dispatched = needs_dispatcher(q, k_cache, v_cache)
    if dispatched or window_size is not UNBOUNDED:
        window_size = plain_window(window_size)
    if numerics is not None or sm_margin is not None:
        backend = with_numerics(backend, numerics, sm_margin)
    if key_ranges is not None:
        backend, key_ranges = with_documents(backend, key_ranges)
    if not dispatched and any_autocast() and is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k_cache, k, v)
    numbers = softmax_scale, causal, softcap, rotary_interleaved, num_splits, return_softmax_lse
    values = numbers, window_size, backend
    tensors = q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, block_table
    if not (
        cache_batch_idx is None
        and cache_leftpad is None
        and alibi_slopes is None
        and k_descale is None
        and v_descale is None
        and k_shift is None
        and v_shift is None
        and sink is None
        and tree_mask is None
        and key_ranges is None
        and rel_bias is None
        and shared_prefix is None
        and out is None
    ):
        tensors += (cache_batch_idx, cache_leftpad, alibi_slopes, k_descale, v_descale)
        tensors += (k_shift, v_shift, sink, tree_mask, key_ranges, rel_bias, shared_prefix, out)
    if dispatched:
        with torch.no_grad():
            x, update = _arrays(tensors, rotary_interleaved, block_mask, Operands, CacheUpdate)
            return _traced(x, _options(values, Options), update, out)
    # A call with a block mask is known by its key alone.
    known_as: Any = None if block_mask is not None else (values, *map(type, numbers + tensors))
    call, addresses = None, None
    try:
        # Tensors like those of the last such call are known without a key.
        call = CALLS.latest.get(known_as)
        if call is not None:
            addresses = call.likeness.addresses(tensors)
            if addresses and (addresses[call.k] == addresses[call.v]) is not call.shares:
                addresses = None
    except (TypeError, RuntimeError):
        # As in `calls.attend`.
        known_as = None
    if call is not None and addresses is not None and call.run_on is not None:
        if call.apart_on is not None:
            call.apart_on.check(addresses)
        made = call.run_on(addresses)
        if out is not None:
            made = [out, *made]
        return (made[0], made[1]) if call.returns_lse else made[0]
    x, update = _arrays(tensors, rotary_interleaved, block_mask, new_operands, new_update)
    if call is not None and addresses is not None:
        return _checked(call, x, update, out)
    return _eager(x, _options(values, new_options), update, out, known_as)


_FIELDS = {argument_name(name, "kvcache"): name for name in Operands._fields}
# The names of operands in the order of `_ARGUMENTS`, "" for what is none.
_OPERANDS = ["" if name in CacheUpdate._fields else _FIELDS.get(name, "") for name in _ARGUMENTS]


def _arrays(tensors: tuple, interleaved, mask, operands, update) -> tuple[Operands, CacheUpdate]:
    """The operands and update of a call, made by these functions. tensors: its arguments that are
    tensors, in the order of `_ARGUMENTS`, the last of which may be missing. mask: block_mask."""
    prefix = tensors[-2] if len(tensors) == len(_ARGUMENTS) else None
    by_name = dict(zip(_OPERANDS, tensors, strict=False))
    del by_name[""]
    x = operands(**by_name)
    if mask is not None:
        x = x._replace(**block_operands(mask, x.q, x.k, is_readable, block_table=x.block_table))
    return x, update(*tensors[3:8], interleaved, prefix)


def _options(values: tuple, options) -> Options:
    """The options of a call, made by this function from its other arguments."""
    (scale, causal, softcap, _, splits, return_lse), window_size, backend = values
    return options(
        kind="kvcache",
        softmax_scale=scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
        num_splits=splits,
        backend=backend,
    )


class CacheCall:
    """A bound call over a cache: all that calls with one key need each time. attention: the
    attention over the cache; prefix: that over the shared prefix, and the merge of both, if there
    is one. new: how many tokens are appended. rotated: `last_rotated_length`, if lengths that leave
    room for the new tokens may exceed it, else None. step: on a GPU, appends and attends; update:
    on a CPU, update(x, update, start) appends. counts: whether the step also counts the keys.
    records: whether autograd would record torch's operations here, which is not wanted. aligned:
    whether all tensors begin at multiples of 16 bytes. run_on(addresses): the results but
    `out` of a call that is one program on a GPU, from the addresses that `likeness` returns; None
    for others. apart, apart_on: check that the call does not write what it reads, by all its
    tensors, and by the addresses of `run_on`. likeness: recognises tensors of this kind; k, v: the
    caches' indices among these; the caches begin at one address if `shares`.
    """

    __slots__ = (
        *("aligned", "apart", "apart_on", "attention", "capacity", "checks", "counts", "k"),
        *("likeness", "new", "prefix", "records", "returns_lse", "rotated", "run_on", "shares"),
        *("step", "update", "v"),
    )

    def __init__(self, x: Operands, options: Options, update: CacheUpdate, out: Tensor | None):
        """Raises TypeError or ValueError for arguments that are wrong."""
        asked, before, tensors = x, update.shared_prefix, cache_tensors(x, update, out)
        check_all_bare(tensors.items())
        problem = check_cache(*cache_call(x, options, update, out))
        if update.cache_seqlens is not None:
            x = x._replace(seqused_k=_length_like(update, x.q))
        self.new = 0 if update.k is None else update.k.shape[1]
        self.capacity = problem.seqlen_k
        last = last_rotated_length(update, problem.seqlen_q, problem.mask.bounded)
        self.rotated = last if last is not None and last < self.capacity - self.new else None
        self.returns_lse = options.return_lse
        self.apart = cache_apart(tensors, self.new > 0)
        self.records = any([t.requires_grad for n, t in tensors.items() if n != "out"])
        unrotated = x
        if update.rotary_cos is not None:
            check_apart(x.k, x.v)
            # Attention gets the rotated q, which is dense.
            x = x._replace(q=x.q.new_empty(x.q.shape))
        part, part_options = attention_part(x, options, update)
        whole_out = out if before is None else None
        facts: dict[str, Any] = {
            "v_in_k": lies_in(x.v, x.k),
            "keeps_rest": before is not None and keeps_rest(x.q),
        }
        self.attention = Call(part, part_options, (False, False, False), whole_out, **facts)
        self.prefix: Prefix | None = None
        if before is not None:
            self.prefix = Prefix(x.q, before, options, problem, asked.sink, out)
        plan = self.attention.runner.plan
        self.checks = plan.device.vendor == "cpu"
        self.update = self.step = None
        if update.k is not None:
            if self.checks:
                self.update = partial(update_plainly, problem.mask.bounded)
            else:
                # A kernel that cannot be compiled must fail before the cache is written.
                steps = *self.attention.casts, *self.attention.steps
                y = adapt(part._replace(q=unrotated.q), steps)
                q_leaves = update.rotary_cos is not None and self.prefix is not None
                planned = replace(self.attention.runner.case.asked, problem=plan.problem)
                self.step = DeviceStep(y, update, planned, whole_out, q_leaves)
            if self.prefix is not None:
                self.prefix.bind()
        self.counts = self.step is not None and self.step.counts
        self.shares = x.k.data_ptr() == x.v.data_ptr()
        self._be_known(asked, update, out)

    def _be_known(self, x: Operands, update: CacheUpdate, out: Tensor | None) -> None:
        """Sets `likeness`, which recognises tensors of this kind. x: without the lengths."""
        arguments, names = _arguments(x, update, out), self._program_names(x, update, out)
        places = None if names is None else [_ARGUMENTS.index(name) for name in names]
        self.likeness = Likeness(arguments, places=places)
        self.aligned = self.likeness.addresses(arguments) is not None
        self.k, self.v, self.run_on, self.apart_on = 1, 2, None, None
        if names is not None:
            self.k, self.v = names.index("k_cache"), names.index("v_cache")
            runner: Any = self.attention.runner  # on a GPU: other calls have no names
            self.run_on = runner.bind(out) if self.step is None else self.step.run
            by_name = cache_tensors(x, update, out)
            self.apart_on = cache_apart({name: by_name[name] for name in names}, self.new > 0)

    def _program_names(self, x: Operands, update: CacheUpdate, out) -> list[str] | None:
        """The arguments whose addresses the call's program takes, in its order; None if the call is
        more than one program, or some arguments are copied."""
        lengths, step = update.cache_seqlens, self.step
        more = self.checks or not self.attention.plain or self.prefix is not None
        if more or isinstance(lengths, int) or x.block_rows is not None:
            return None
        if step is None and x.leftpad_k is not None or step is not None and not step.counts:
            return None
        if lengths is not None and _as_operand(lengths) is not lengths:
            return None
        x = x._replace(seqused_k=lengths)
        tensors = {n: t for n, t in zip(Operands._fields, x, strict=True) if t is not None}
        if step is not None and lengths is not None:
            tensors = named(x, update, lengths, True)
        if out is not None:
            tensors["out"] = out
        names = [_NEW.get(name) or argument_name(name, "kvcache") for name in tensors]
        args: dict[str, Any] = dict(zip(_ARGUMENTS, _arguments(x, update, out), strict=True))
        same = [args[name] is tensor for name, tensor in zip(names, tensors.values(), strict=True)]
        count = sum([isinstance(argument, Tensor) for argument in args.values()])
        return names if all(same) and len(names) == count else None


def _arguments(x: Operands, update: CacheUpdate, out: Tensor | None) -> tuple:
    """The arguments of a call that may be tensors."""
    by_name = {argument_name(n, "kvcache"): t for n, t in zip(Operands._fields, x, strict=True)}
    by_name |= update._asdict()
    return (*[by_name[name] for name in _ARGUMENTS[:-1]], out)


def _length_like(update: CacheUpdate, q: Tensor) -> Tensor:
    lengths = update.cache_seqlens
    if isinstance(lengths, Tensor) and lengths.dtype == torch.int32:
        return lengths
    return q.new_empty(q.shape[0], dtype=torch.int32)


def _eager(x: Operands, options: Options, update: CacheUpdate, out, known_as: Any = None):
    """known_as: the options under which the last such call is kept, whose `likeness` recognises its
    tensors."""
    q, k_cache, prefix = x.q, x.k, update.shared_prefix
    operands, key, call = x + update, None, None
    try:
        facts = (options, update.rotary_interleaved, *map(type, options[NUMBERS] + operands))
        tensors = tensor_keys((*operands, out, *(prefix or ())))
        key = (facts, tensors, k_cache.data_ptr() == x.v.data_ptr())
        call = CALLS.young.get(key)
        if prefix is None and known_as is not None and call is not None and call.aligned:
            CALLS.latest[known_as] = call
    except (TypeError, RuntimeError):
        # As in `calls.attend`.
        key = call = None
    if call is None and key is not None:
        call = CALLS.find(key)
    if call is None:
        plain, own_update = plain_options(options), plain_update(update, q)
        if not is_same(plain, options) or own_update is not update:
            return _eager(x, plain, own_update, out)
        if not are_bare(cache_tensors(x, update, out).items()):
            with torch.no_grad():
                return _traced(x, plain, update, out)
        call = CacheCall(x, plain, update, out)
        if key is not None:
            CALLS.put(key, call)
    return _checked(call, x, update, out)


def _checked(call: CacheCall, x: Operands, update: CacheUpdate, out):
    """Runs a call of a known kind, after a check of its plain lengths."""
    lengths = update.cache_seqlens
    if isinstance(lengths, int):
        check_int_length(lengths, call.new, call.capacity)
        if call.rotated is not None:
            check_rotated_length(lengths, call.rotated, update)
    if call.records and torch.is_grad_enabled():
        with torch.no_grad():
            return _run(call, x, update, out)
    return _run(call, x, update, out)


def _run(call: CacheCall, x: Operands, update: CacheUpdate, out):
    """Runs a call on real tensors: nothing is written before everything is checked."""
    if call.apart is not None:
        values = cache_values(x, update, out)
        call.apart.check([t.data_ptr() for t in values if isinstance(t, Tensor)])
    start, attention, step = None, call.attention, call.step
    if update.cache_seqlens is not None:
        start = _start(update, x)
        if call.checks:
            check_room("cache_seqlens", start, call.capacity - call.new)
        counted_later = call.counts and not attention.checks
        if not (counted_later and attention.plain):
            x = with_used(x, start if counted_later else used_keys(x, start, call.new))
    sink, prefix = x.sink, update.shared_prefix
    if call.prefix is not None:
        x = x._replace(sink=None)
    if not attention.plain:
        x = attention.operands(x, None)
    if call.rotated is not None and attention.checks and start is not None and start.numel():
        check_rotated_length(int(start.max()), call.rotated, update)
    if call.update is not None and start is not None:
        x = call.update(x, update, start)
    into = out if call.prefix is None else None
    if step is not None and start is not None:
        part, lse, q = step(x, update, start, into)
        x = x if q is None else x._replace(q=q)
    else:
        part, lse, _ = attention.forward(x, into)
    if call.prefix is not None:
        part, lse = call.prefix.merged(attention, x, prefix, part, lse, sink, out)
    return (part, lse) if call.returns_lse else part


def _start(update: CacheUpdate, x: Operands) -> Tensor:
    """The row of each sequence's first new token in its storage."""
    start = update.cache_seqlens
    if isinstance(start, Tensor):
        return _as_operand(start)
    return torch.full(x.q.shape[:1], start, dtype=torch.int32, device=x.q.device)


def _as_operand(lengths: Tensor) -> Tensor:
    """Lengths as kernels take them: contiguous, of int32."""
    if lengths.dtype != torch.int32:
        return on_own_thread(cast, lengths, torch.int32)
    return dense_rows(lengths)


def _autocast(q: Tensor, k_cache: Tensor, k, v) -> tuple:
    """Under autocast q, k and v take the cache's dtype, which stays as it is, or autocast's own
    where the cache is quantised."""
    if k_cache.dtype not in FLOATS:
        return autocast((q, k, v), q.device.type)
    if q.dtype in FLOATS:
        q = q.to(k_cache.dtype)
    k, v = (
        t.to(k_cache.dtype) if isinstance(t, Tensor) and t.dtype in FLOATS else t for t in (k, v)
    )
    return q, k, v


def _traced(x: Operands, options: Options, update: CacheUpdate, out):
    """As `_eager`, by operations that torch.compile and functorch see."""
    q, k_cache = x.q, x.k
    real = isinstance(q, Tensor) and isinstance(k_cache, Tensor) and q.device.type != "meta"
    if real and is_autocast_enabled(q.device.type):
        q, *new = _autocast(q, k_cache, *update[:2])
        update = update._replace(k=new[0], v=new[1])
        # Their dtypes are checked now, before operators would cast them.
        with torch.autocast(q.device.type, enabled=False):
            return _traced(x._replace(q=q), options, update, out)
    update, plain = plain_update(update, q), plain_options(options)
    lengths = update.cache_seqlens
    new = 0 if update.k is None else update.k.shape[1]
    if not is_compiling():
        check_cache(*cache_call(x, plain, update, out))
        check_cache_apart(x, update, new > 0)
    if isinstance(lengths, Tensor) and lengths.dtype == torch.int64:
        lengths = lengths.clamp(-LONGEST, LONGEST).to(torch.int32)
        update = update._replace(cache_seqlens=lengths)
    advance = plain.causal or any(-1 < side < FAR for side in plain.window_size[:2])
    if update.cache_seqlens is not None:
        if not isinstance(update.cache_seqlens, Tensor):
            pages = 1 if x.block_table is None else x.block_table.shape[1]
            check_int_length(update.cache_seqlens, new, pages * x.k.shape[1])
            last = last_rotated_length(update, q.shape[1], advance)
            if last is not None:
                check_rotated_length(update.cache_seqlens, last, update)
        start = _start(update, x)
        x = x._replace(seqused_k=used_keys(x, start, new))
        if update.k is not None:
            x = update_cache(x, update, start, advance)
    if update.shared_prefix is None:
        return library.attend(*x[:3], x, options, out)
    whole, lse = prefixed(x, plain, update.shared_prefix)
    whole = whole if out is None else out.copy_(whole)
    return (whole, lse) if plain.return_lse else whole
