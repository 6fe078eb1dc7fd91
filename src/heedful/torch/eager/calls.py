"""The eager path in three nouns: a call's key finds a bound call, or a kind makes one; then it
runs.

The first call with some metadata and arguments is validated and planned. Every later one costs a
key and a look-up, or a comparison with the last call: see docs/host-path.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch.autograd import Function

from heedful.core.base import settings
from heedful.core.call.arguments import ABSENT, NUMBERS, AttentionCall, Options
from heedful.core.call.describe import describe
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.core.call.storage import casts, copies
from heedful.launch.code import packs
from heedful.torch.base import device as devices
from heedful.torch.base.dispatch import (
    Likeness,
    any_autocast,
    are_bare,
    bare_apply,
    bare_backward,
    check_all_bare,
)
from heedful.torch.base.forked import on_own_thread
from heedful.torch.eager import backends
from heedful.torch.eager.keys import call_key, named_tensors
from heedful.torch.eager.kinds import (
    MOST_KINDS,
    ArrayKind,
    Kind,
    Kinds,
    Sizes,
    of_tensor,
    with_sizes,
)
from heedful.torch.operands.adapt import adapt, adaptations, autocast, bias_gradient, cast_steps
from heedful.torch.operands.checks import (
    Grads,
    attention_call,
    check_constants,
    check_seed,
    gradients_wanted,
    requires_gradients,
    wanting,
)
from heedful.torch.operands.plain import is_same, plain_options, plain_seed
from heedful.torch.operands.values import check_values, indices

_new = tuple.__new__


class LRU:
    """A bounded map that forgets the least recently used entries, at the cost of one look-up.
    Entries are in `young`; once that is full it becomes the old generation. An old entry becomes
    young when it is used; the others are forgotten when `young` is full again. `latest` is for
    callers that recognise their last entry by something cheaper than a key.
    """

    def __init__(self, half: int):
        """half: the most entries of a generation, 1 or more."""
        self._half = half
        self._old: dict = {}
        self.young: dict = {}
        self.latest: dict = {}

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def find(self, key) -> Any:
        """The value of a key that is not in `young`; None if it is not old, either."""
        value = self._old.pop(key, None)
        if value is not None:
            self.put(key, value)
        return value

    def put(self, key, value) -> None:
        if len(self.young) >= self._half:
            self._old, self.young, self.latest = self.young, {}, {}
        self.young[key] = value

    def clear(self) -> None:
        self._old, self.young, self.latest = {}, {}, {}


# A training run has tens of kinds of calls; varlen lengths make it thousands.
CALLS = settings.forgotten(LRU(2048))


class Call:
    """A bound call: all that calls with one key need each time, except the addresses. casts: the
    dtypes to which operands are cast; steps: the other changes of operands. plain: whether the
    caller's tensors go to the kernels unchanged and unchecked. results: 0 for out, 1 with lse, 2
    with probabilities or largest scores, too. apart: checks that the caller's `out` does not
    overlap inputs. run_on: the results of a call that is one program on a GPU, from the addresses
    of the operands that are there; None for others, and where a backward follows. wants_grad:
    whether one does. saved_on: what run_on would be then. recorded: out of a call whose gradients
    torch's autograd makes, from the caller's tensors and seed; None for others. likeness:
    recognises operands of this kind. backwards: the backward of the saved tensors; None if nothing
    wants a gradient. wanting: whether an operand requires a gradient that is not computed.
    """

    __slots__ = (
        *("apart", "backwards", "casts", "checks", "dropout", "forward", "kind", "likeness"),
        *("plain", "recorded", "results", "run_on", "runner", "saved_on", "steps", "wanting"),
        "wants_grad",
    )

    def __init__(
        self,
        x: Operands,
        options: Options,
        grad: Grads,
        out,
        seed=None,
        v_in_k: bool = False,
        keeps_rest: bool = False,
        trace: Callable[[], Sequence[Any]] | None = None,
    ):
        """v_in_k: whether v lies in k, which is part of the call's key. keeps_rest: as in
        AttentionProblem, on a GPU. trace: makes the numbers for `backends.prepare`, after the
        arguments are checked. Raises TypeError or ValueError for wrong arguments.
        """
        described = attention_call(x, options, grad, out, seed)._replace(v_in_k=v_in_k)
        check_all_bare(named_tensors(x, options, out, seed))
        problem = describe(described)
        self.apart: Any = None  # where out is not None
        if keeps_rest:
            problem = replace(problem, keeps_rest=True)
        self.dropout = problem.dropout_p > 0
        own_seed = seed if self.dropout and isinstance(seed, Tensor) else None
        if out is not None:
            from heedful.torch.operands.apart import Apart

            self.apart = Apart(dict(named_tensors(x, options, out, seed)), ("out",))
        self.casts = cast_steps(casts(described.x))
        x = adapt(x._replace(seed=own_seed), self.casts)
        self.steps = adaptations(x, problem)
        operands = adapt(x, self.steps) if self.steps else x
        if self.dropout and x.seed is None:
            operands = operands._replace(seed=x.q.new_empty(1, dtype=torch.int64))
        notes = copies(described.x, options.kind)
        numbers = None if trace is None else trace()
        self.runner: Any = backends.prepare(problem, operands, options.backend, notes, numbers)
        plan = self.runner.plan
        self.wants_grad = grad[0]
        self.likeness: Any = None
        self.kind = options.kind
        forward: Any = self.runner.forward
        self.forward = partial(_dense_forward, forward) if plan.backend == "sdpa" else forward
        on_cpu = plan.device.vendor == "cpu"
        places = indices(x) if on_cpu else (x.block_table, x.block_rows)
        wanted = on_cpu or settings.get("check_pages")
        self.checks = wanted and any(place is not None for place in places)
        self.wanting = bool(wanting(x))
        self.plain = not (self.steps or self.casts or self.dropout or self.checks or self.wanting)
        self.results = results_of(options)
        launched = self.runner.run_on if self.plain and not on_cpu else None
        self.run_on: Any = None if self.wants_grad else launched
        self.saved_on: Any = launched if self.wants_grad else None
        self.backwards: Any = None  # or Backwards
        self.recorded: Any = None
        if problem.needs_grad:
            # Calls without gradients do without.
            from heedful.torch.eager.recorded import recorder
            from heedful.torch.eager.saved import Backwards

            self.recorded = recorder(self, operands) if on_cpu else None
            saved = x if x.seed is not None else x._replace(seed=operands.seed)
            self.backwards = Backwards(self.runner, saved, options)

    @property
    def problem(self) -> AttentionProblem:
        return self.runner.problem

    @property
    def outputs(self) -> list[Any]:
        """The numbers of its case, if it was traced."""
        return self.runner.case.outputs

    def once(self, numbers: Sequence[Any]) -> "Once | None":
        """The call for lengths that likely come only once, if it can be run without being kept.
        numbers: those of its case."""
        if self.run_on is None:
            return None
        return _new(Once, (self.results, partial(self.runner.once_on, numbers)))

    def at(
        self, numbers: Sequence[Any], sizes: Sequence[int], x: Sequence[Any], comes_again: bool
    ) -> "Call":
        """The call for other lengths of its case. numbers: those of the case. sizes: those of the
        operands. x: the caller's tensors. comes_again: whether these lengths came before."""
        runner, call = self.runner.at(numbers, sizes, comes_again), object.__new__(Call)
        # One by one, in a third of the time of a loop.
        call.casts, call.checks, call.dropout = self.casts, self.checks, self.dropout
        call.kind, call.plain, call.results = self.kind, self.plain, self.results
        call.steps, call.wanting, call.wants_grad = self.steps, self.wanting, self.wants_grad
        call.runner, call.forward = runner, runner.forward
        call.run_on = None if self.run_on is None else runner.run_on
        call.saved_on = None if self.saved_on is None else runner.run_on
        call.likeness = call.backwards = call.apart = call.recorded = None
        if self.backwards is not None:
            call.backwards = self.backwards.at(runner, x)
        return call

    def is_aligned(self, x: Sequence[Any]) -> bool:
        """Whether the operands begin at multiples of 16 bytes. Makes `likeness`, which takes too
        long for a call that does not come again."""
        if self.likeness is None:
            self.likeness = Likeness(x)
        return self.likeness.addresses(x) is not None

    def operands(self, x: Operands, seed) -> Operands:
        """The operands of one call, if they are not just the caller's tensors."""
        return self.laid_out(self.seeded(x, seed))

    def seeded(self, x: Operands, seed) -> Operands:
        """The caller's tensors in the operands' dtypes, with the Philox key of one call."""
        x = adapt(x, self.casts) if self.casts else x
        return x._replace(seed=make_seed(seed, x.q.device)) if self.dropout else x

    def laid_out(self, x: Operands) -> Operands:
        """The operands from the caller's tensors, after a check of their values where that is
        possible."""
        if self.wanting and is_grad_enabled():
            check_constants(x)
        x = adapt(x, self.steps) if self.steps else x
        if self.checks:
            check_values(x, self.problem, self.kind)
        return x


def results_of(options: Options) -> int:
    """How many results a call returns beside out."""
    return 2 if options.return_attn_probs or options.return_max_logits else int(options.return_lse)


def returned(results: int, out: Tensor, lse: Any, probs: Any) -> Any:
    """The results that a public function returns: out and `results` others."""
    if results == 0:
        return out
    if results == 1:
        return out, lse
    return out, lse, out.new_empty(0) if probs is None else probs


def _dense_forward(forward, x: Operands, out: Tensor | None = None):
    """A forward whose output may have any strides, made dense, as flash-attn's are."""
    result, lse, probs = forward(x, out)
    return result if out is not None else on_own_thread(result.contiguous), lse, probs


def make_seed(seed, device: torch.device) -> Tensor:
    """The Philox key on the device: the caller's, or one drawn there from torch's generator, so
    that each replay of a CUDA graph draws another."""
    if isinstance(seed, Tensor):
        return seed
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=device)
    check_seed(seed, device)
    signed = seed - 2**64 if seed >= 2**63 else seed
    return torch.full((1,), signed, dtype=torch.int64, device=device)


class Once(NamedTuple):
    """A bound call that is not kept, with `results` and `run_on` of a Call."""

    results: int
    run_on: Callable[[list[int]], tuple]


# Operands that are expanded to a call's lengths, or that most calls do not have. Shifts come with
# descales.
_ADAPTED = ("bias", "rel_bias", "alibi_slopes", "tree_mask", "key_ranges", "seed")
_ADAPTED += ("block_rows", "q_descale", "k_descale", "v_descale")
_adapted = itemgetter(*(Operands._fields.index(name) for name in _ADAPTED))
_LONGEST = slice(1, 3)  # of Options
KINDS = settings.forgotten(Kinds())
# Options, with the types of their values, that are known to be plain values.
PLAIN = Kinds()
# Maps options without the longest lengths, with the types of their values and of the operands, to
# the kind of the last calls.
LATEST = settings.forgotten(Kinds())


# A call, and the addresses of its operands where they are known.
_Found = tuple[Any, list[int] | None]


class LatestKind:
    """The kind of the last calls with the same options, whose tensors are compared without a key,
    and its bound calls by their sizes. Most lengths come once: for these None is kept, so that
    their memory can be used again."""

    __slots__ = ("_calls", "_kind", "_likeness", "_packs", "_sizes")

    def __init__(self, kind: Kind, kinds: Sequence[ArrayKind], values: Sequence[Any]):
        """values: operands of a call. kinds: their kinds."""
        self._kind, self._packs = kind, packs.backends()
        self._likeness = Likeness(values, kinds)
        self._calls: dict[tuple[int, ...], Call | None] = {}
        self._sizes = Sizes(2, self._likeness.pick(values), kinds)

    def find(self, values: Sequence[Any], longest: Sequence[Any], latest_key) -> _Found:
        """The call for operands of this kind, and their addresses; None for other operands, or if
        no case has their lengths. values: Operands, or q, k and v if there are no others. longest:
        the options max_seqlen_q and max_seqlen_k. latest_key: the options under which CALLS keeps
        its latest call."""
        addresses = self._likeness.addresses(values)
        if addresses is None or packs.backends() != self._packs:
            return None, None
        of_queries, of_keys = longest
        sizes = self._sizes.of([of_queries or 0, of_keys or 0], self._likeness.pick(values))
        calls = self._calls
        call = calls.get(sizes)
        if call is not None:
            if call.is_aligned(values):
                CALLS.latest[latest_key] = call
            return call, addresses
        known = self._kind.known(sizes)
        if known is None:
            return None, None
        case, numbers = known
        if sizes in calls:
            call = calls[sizes] = case.at(numbers, sizes[2:], values, comes_again=True)
            return call, addresses
        if len(calls) >= MOST_KINDS:
            calls.clear()
        calls[sizes] = None
        call = case.once(numbers) or case.at(numbers, sizes[2:], values, comes_again=False)
        return call, addresses


def attend(q, k, v, x: Any, options: Options, out, seed, otherwise: Callable[..., Any]):
    """Runs one call on tensors of a real device: finds the bound call, makes it if there is none,
    and runs it. x: the caller's tensors, None if they are q, k and v alone. seed: the caller's
    dropout_seed. otherwise: a function of the other arguments, which runs the call if a tensor is
    not bare. Returns what the public functions return.
    """
    if any_autocast() and is_autocast_enabled(q.device.type):
        q, k, v, bias = autocast((q, k, v, x and x.bias), q.device.type)
        x = x and x._replace(q=q, k=k, v=v, bias=bias)
    (call, addresses), key = find(q, k, v, x, options, out, seed)
    if addresses is not None and call.run_on is not None:
        if out is None:
            out, lse, probs = call.run_on(addresses)
        else:
            call.apart.check(addresses)
            out, lse, probs = call.run_on(addresses[:-1], out)
        return out if call.results == 0 else returned(call.results, out, lse, probs)
    if addresses is not None and out is None and call.saved_on is not None:
        if x is None:
            return _apply(call, None, None, addresses, q, k, v)
        return _apply(call, x, None, addresses, q, k, v, x.bias, x.sink, x.rel_bias)
    if call is None:
        is_known = key is not None and seed is None and key[0][0] in PLAIN
        plain = options if is_known else plain_options(options)
        own_seed = seed if is_known else plain_seed(seed, q.device)
        if not is_same(plain, options) or own_seed is not seed:
            return attend(q, k, v, x, plain, out, own_seed, otherwise)
        x = x or Operands(q, k, v)
        if not are_bare(named_tensors(x, options, out, seed)):
            return otherwise(*x[:3], x, options, out, seed)
        base = None if key is None else key[0][0]
        if base is not None:
            PLAIN.of(base)
        call = make(key, x, options, gradients_wanted(x), out, seed, base)
        if key is None and call.wants_grad:
            return Attention.apply(call, x, seed, None, q, k, v, x.bias, x.sink, x.rel_bias)
    # It is run.
    if x is None:
        x = _new(Operands, (q, k, v, *ABSENT))
    if call.wants_grad:
        if call.recorded is not None and (made := call.recorded(x, seed)) is not None:
            return made
        return _apply(call, x, seed, None, q, k, v, x.bias, x.sink, x.rel_bias)
    if out is not None:
        call.apart.check([t.data_ptr() for _, t in named_tensors(x, options, out, seed)])
    x = x if call.plain else call.operands(x, seed)
    out, lse, probs = call.forward(x) if out is None else call.forward(x, out)
    return out if call.results == 0 else returned(call.results, out, lse, probs)


def find(q, k, v, x: Operands | None, options: Options, out, seed) -> tuple[_Found, Any]:
    """((call, addresses), key): the bound call for such tensors and options, None if there is none;
    and the key for a new call, None if an argument cannot be part of a key, or no key was needed.
    addresses: those of the operands, then of `out`, for a call without seed."""
    try:
        # Aligned tensors like those of the last such call are recognised without a key.
        of_q, of_k, of_v = addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
        bases = (of_q | of_k | of_v) & 15 or not (of_q and of_k and of_v)
        records, longest, usual = is_grad_enabled(), options[_LONGEST], out is None and seed is None
        types = map(type, options[NUMBERS] if x is None else options[NUMBERS] + x)
        base = (records, options[0], options[3:], *types)
        latest_key: Any = (base, longest) + (() if usual else (type(out), type(seed), q.shape))
        if not bases:
            call = CALLS.latest.get(latest_key)
            if call is not None and usual and x is None:
                if call.likeness.alike(q, k, v):
                    return (call, addresses), None
            elif call is not None:
                operands = x or (q, k, v, *ABSENT)
                places = call.likeness.addresses(operands if usual else (*operands, out, seed))
                if places is not None:
                    return (call, places if seed is None else None), None
            if usual and (kind := LATEST.get(base)) is not None:
                latest = kind.find((q, k, v) if x is None else x, longest, latest_key)
                if latest[0] is not None:
                    return latest, None
        operands = x or (q, k, v, *ABSENT)
        requires_grad = requires_gradients(_new(Operands, operands))
        key = (latest_key, requires_grad, call_key(q, k, v, x, out, seed, bases))
        call = CALLS.young.get(key) or CALLS.find(key)
        if call and not bases and call.is_aligned(operands if usual else (*operands, out, seed)):
            CALLS.latest[latest_key] = call
        return (call, None), key
    except (TypeError, RuntimeError):
        # No call takes an argument that cannot be hashed, or a tensor without plain memory (sparse,
        # ...): the checks will name it.
        return (None, None), None


def make(key, x: Operands, options: Options, grad: Grads, out=None, seed=None, base=None) -> Call:
    """Checks, plans and binds a call, and keeps it if it has a key. base: the key in `LATEST`; None
    if such calls have none."""
    is_common = key is not None and out is None and seed is None and not options.dropout_p
    call = (is_common and _of_kind(x, options, grad, base)) or Call(x, options, grad, out, seed)
    if key is not None:
        CALLS.put(key, call)
    return call


def _of_kind(x: Operands, options: Options, grad: Grads, base=None) -> Call | None:
    """The call, if it belongs to a kind whose calls differ in lengths alone, and which may be
    checked and planned already. None if it does not: on a CPU, and with adapted operands. base: the
    key in `LATEST`."""
    is_adapted = any([operand is not None for operand in _adapted(x)])
    if is_adapted or devices.device_spec(x.q.device).vendor == "cpu":
        return None
    kinds, facts, sizes = [], [], []
    for name, tensor in zip(Operands._fields, x, strict=True):
        if tensor is not None:
            if not isinstance(tensor, Tensor) or tensor.stride()[-1:] != (1,):
                return None
            kind, moving = of_tensor(name, tensor)
            if tensor.dtype == torch.int64 and not kind.dense:
                # Its cast has other strides.
                return None
            kinds.append(kind)
            facts += (kind, tensor.device, tensor.requires_grad)
            sizes += moving
    if x.block_table is not None and x.cu_seqlens_q is not None:
        return None
    read = settings.get_all("backend", "numerics", "check_pages", "sm_margin")
    without_longest = options._replace(max_seqlen_q=None, max_seqlen_k=None)
    known = KINDS.of((without_longest, grad, read, packs.backends(), *facts))

    def make(numbers) -> Call:
        def trace() -> list[Any]:
            """Checks the call with symbols for its lengths."""
            rest = iter(numbers)
            symbolic = options._replace(max_seqlen_q=next(rest), max_seqlen_k=next(rest))
            specs = {kind.name: with_sizes(kind, rest) for kind in kinds}
            described = AttentionCall(Operands(**specs), symbolic, *grad)
            return [*describe(described).lengths, *numbers[2:]]

        return Call(x, options, grad, None, trace=trace)

    call, numbers = known.find([value or 0 for value in options[_LONGEST]] + sizes, make)
    if base is not None and all([kind.aligned for kind in kinds]):
        LATEST.of(base, lambda: None)
        LATEST[base] = LatestKind(known, kinds, x)
    return call.at(numbers, sizes, x, comes_again=False)


class Attention(Function):
    """Attention under eager autograd."""

    @staticmethod
    def forward(ctx, call: Call, x: Operands | None, seed, addresses, q, k, v, bias=None, *_):
        """q, k, v, bias, and sink and rel_bias, which follow, are those of x: autograd sees only
        arguments. x: None if there are no others. addresses: of the operands, if the call takes
        them as they are."""
        ctx.set_materialize_grads(False)
        ctx.backwards = backwards = call.backwards
        # The caller's tensors are saved: a hook should not store what a stride of 0 repeats.
        if addresses is not None:
            saved = (q, k, v) if x is None else backwards.pick(x)
            out, lse, probs = call.saved_on(addresses)
        else:
            operands = x or Operands(q, k, v)
            if not call.plain:
                operands = call.seeded(operands, seed)
            saved = backwards.pick(operands)
            out, lse, probs = call.forward(operands if call.plain else call.laid_out(operands))
        if bias is not None:
            ctx.bias = bias.shape
        ctx.save_for_backward(*saved, out, lse)
        if call.results == 0:
            return out
        results = returned(call.results, out, lse, probs)
        ctx.mark_non_differentiable(*results[2:])
        return results

    @staticmethod
    def backward(ctx, dout, dlse=None, dprobs=None):
        if is_grad_enabled():
            from heedful.torch.base.once import once

            return once(Attention.backward)(ctx, dout, dlse)
        saved, backwards = ctx.saved_tensors, ctx.backwards
        gradients = None
        if dlse is None and dout is not None:
            gradients = backwards.like_latest((*saved, dout))
        if gradients is None:
            needed = ctx.needs_input_grad
            gradients = backwards(saved, dout, dlse, needed[5] or needed[6])
        dq, dk, dv, dbias, dsink, drel_bias = gradients
        if dbias is not None:
            dbias = on_own_thread(bias_gradient, dbias, ctx.bias)
        # There may be more than arguments: torch lets the last ones be None.
        return None, None, None, None, dq, dk, dv, dbias, dsink, drel_bias


_apply = bare_apply(Attention)
bare_backward(Attention)
