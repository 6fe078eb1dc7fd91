"""Runners of plans: they compute a planned problem on torch tensors. A runner keeps all that one
kind of call needs each time: the plan and, on a GPU, the compiled kernels with their arguments.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from heedful.core.base import settings
from heedful.core.base.arrays import ArraySpec, dense_strides, item_bytes, ordered_strides
from heedful.core.base.device import lent
from heedful.core.base.symbols import value_of
from heedful.core.call.numerics import backend_of, margin_of
from heedful.core.call.operands import Backward, Gradients, Operands, own_shape
from heedful.core.call.problem import AttentionProblem, Lengths
from heedful.core.call.storage import are_mappable, storage
from heedful.core.planning.log import decision
from heedful.core.planning.plan import Plan, plan, stored_as
from heedful.launch.code import packs
from heedful.launch.noted import note
from heedful.launch.program.buffers import results
from heedful.launch.program.programs import program, runnable
from heedful.torch.base.device import device_spec, toolchain
from heedful.torch.base.dispatch import Likeness
from heedful.torch.base.forked import check_device
from heedful.torch.eager.execute import Case, Run, address_of, as_results
from heedful.torch.eager.kinds import Kinds, Sizes, at_lengths, of_call, of_tensor, with_numbers
from heedful.torch.operands.adapt import is_mappable

_named = tuple.__new__


def prepare(
    problem: AttentionProblem,
    x: Operands,
    backend: str | None = None,
    notes: tuple[str, ...] = (),
    numbers: Sequence[Any] | None = None,
) -> Any:
    """The runner of a problem on the device of `x.q`. numbers: the lengths of the problem and the
    sizes of its operands, as `of_call` returns them, if they are symbols; the runner's case is then
    made with them. Raises ValueError, with every reason, if no kernel or not the named one can run
    it, RuntimeError for a GPU in a child of a process that used it.
    """
    device = x.q.device
    check_device(device)
    if device_spec(device).vendor == "cpu":
        chosen = planned(problem, device, backend, notes)
        from heedful.torch.eager.cpu_runner import CpuRunner

        decision(chosen)
        return CpuRunner(chosen)
    present = [index for index, tensor in enumerate(x) if tensor is not None]
    tensors = {Operands._fields[index]: x[index] for index in present}
    kind, values = of_call(problem, tensors)
    arrays, pick = kind[2:], itemgetter(*present)
    read = settings.get_all("backend", "sm_margin")
    key = (kind, device, backend, notes, read, packs.backends())

    def make(numbers) -> PlannedCase:
        traced, specs = with_numbers(problem, arrays, numbers)
        chosen = planned(traced, device, backend, notes)
        case = _forward_case(chosen, specs, device)
        case.kinds, case.pick = arrays, pick
        told = replace(case.plan, problem=problem)
        decision(told)
        note(told, "forward", with_numbers(problem, arrays, values)[1] | results(problem))
        return case

    if numbers is None:
        case, plain = FAMILIES.of(key).find(values, make)
    else:
        case = make(numbers)
        plain = tuple(map(value_of, case.outputs))
    return GpuRunner(case, plain, problem, values[_LENGTHS:])


def planned(
    problem: AttentionProblem,
    device: torch.device,
    backend: str | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a problem on a device. Raises as `prepare`."""
    check_device(device)
    named = backend_of(backend) or settings.get("backend")
    spec = lent(device_spec(device), margin_of(backend))
    return plan(problem, spec, toolchain(device), named, notes)


# How many lengths a problem has.
_LENGTHS = len(Lengths._fields)
FAMILIES = settings.forgotten(Kinds())


class PlannedCase(Case):
    """One direction of the calls of a case: they share plan and program. plan: its lengths may be
    symbols. asked: the plan that the case was made for, which may need a pack. A forward has more
    fields. kinds: the kinds of its operands; pick: picks the operands that are there; backwards:
    kinds of its backward; outs: cases that write into the caller's `out`; latest: by the slot of a
    backward the last one, and the Likeness of its tensors.
    """

    __slots__ = ("asked", "backwards", "kinds", "latest", "outs", "pick", "plan")

    def __init__(self, chosen: Plan, direction: str, inputs: dict, made: dict, device, before=()):
        """given, made, before: as in Case, arrays by name."""
        arrays, self.asked = inputs | made, chosen
        chosen, run = runnable(chosen, direction, lambda by: program(by, direction, arrays))
        super().__init__(run, chosen.device.arch, device, inputs, made, before)
        self.plan = chosen
        self.backwards, self.outs = Kinds(), Kinds()
        self.latest: dict[int, tuple[Likeness, GpuBackward]] = {}


def _forward_case(chosen: Plan, inputs: dict, device: torch.device) -> PlannedCase:
    """The case of a plan's forward on these arrays; it makes the results that are not among them.
    Its first numbers are the lengths."""
    made = {name: spec for name, spec in results(chosen.problem).items() if name not in inputs}
    lengths = [0 if length is None else length for length in chosen.problem.lengths]
    return PlannedCase(chosen, "forward", inputs, made, device, lengths)


class GpuRunner:
    """Runs Triton and Gluon programs, for one set of lengths of a kind. Programs are bound on first
    use, one for each layout of the caller's `out`."""

    __slots__ = ("case", "pick", "run", "_into_given", "_is_known", "_like", "_numbers", "_sizes")

    def __init__(
        self, case: PlannedCase, numbers, pattern, sizes: Sequence[int], is_known: bool = False
    ):
        """pattern: a problem that differs from this one in lengths alone. sizes: the operands'
        sizes and strides that lengths change. numbers: the case's numbers for these lengths.
        is_known: whether these lengths came before."""
        self.case, self._numbers, self._like, self._sizes = case, numbers, pattern, sizes
        self.pick = case.pick
        self.run: Run | None = None  # as of a Case, once lengths have come again
        self._into_given: dict[tuple, Run | None] | None = None
        self._is_known = is_known

    def at(self, numbers: Sequence[Any], sizes: Sequence[int], comes_again: bool) -> "GpuRunner":
        """The runner for other lengths of the same case. comes_again: whether they came before."""
        return GpuRunner(self.case, numbers, self._like, sizes, comes_again)

    @property
    def problem(self) -> AttentionProblem:
        # Most calls of new lengths never ask.
        return at_lengths(self._like, self._numbers)

    @property
    def plan(self) -> Plan:
        return replace(self.case.plan, problem=self.problem)

    def forward(self, x: Operands, out: torch.Tensor | None = None):
        """(out, lse or None, probs, largest scores or None). lse: a pair with its rest if that is
        kept."""
        return self.run_on([*map(address_of, self.pick(x))], out)

    def run_on(self, addresses: list[int], out: torch.Tensor | None = None):
        """The same, from the addresses of the operands that are there, in a list that the call may
        change."""
        run = self.run
        if out is not None:
            addresses.append(out.data_ptr())
            run = self._bound_into(out)
        elif run is None:
            # Most lengths come only once, so the first time nothing is kept.
            if not self._is_known:
                self._is_known = True
                return self.once_on(self._numbers, addresses)
            run = self.run = self.case.bind(self._numbers)
        made = run(addresses)
        if out is None and len(made) < 3 and not self._like.keeps_rest:
            return made[0], made[1] if len(made) == 2 else None, None
        return as_results(made, self._like.keeps_rest, out)

    def once_on(self, numbers: Sequence[Any], addresses: list[int]):
        """The forward for other lengths of the same case that likely come only once; nothing is
        kept. numbers: as in `at`. addresses, results: as in `run_on`."""
        return as_results(self.case.once(numbers, addresses), self._like.keeps_rest)

    def turned(self, out: torch.Tensor | None) -> Run:
        """The bound forward, whose output comes with heads before rows. out: a tensor (B, M, H, E)
        of the memory that the caller gives instead."""
        return self.case.bind(self._numbers, 1) if out is None else self.bind(out)

    def bind(self, out: torch.Tensor | None = None) -> Run:
        """The bound forward, compiled and loaded, and kept if it makes its output. out: memory that
        the caller gives instead."""
        if out is not None:
            case, numbers = self._into(out)
            return case.bind(numbers)
        if self.run is None:
            self.run, self._is_known = self.case.bind(self._numbers), True
        return self.run

    def _bound_into(self, out: torch.Tensor) -> Run:
        """The forward into memory with these strides, kept if it comes again."""
        key = (out.stride(), out.data_ptr() % 16)
        if self._into_given is None:
            self._into_given = {}
        run = self._into_given.get(key)
        if run is None:
            case, numbers = self._into(out)
            if key not in self._into_given:
                self._into_given[key] = None
                return partial(case.once, numbers)
            run = self._into_given[key] = case.bind(numbers)
        return run

    def _into(self, out: torch.Tensor) -> tuple[PlannedCase, tuple]:
        """The case of the forward into this memory, and its numbers."""
        kind, sizes = of_tensor("out", out)
        kinds, problem = (*self.case.kinds, kind), self.problem
        values = [*self._numbers[:_LENGTHS], *self._sizes, *sizes]

        def make(numbers) -> PlannedCase:
            note(self.plan, "forward", results(problem) | with_numbers(problem, kinds, values)[1])
            traced, specs = with_numbers(problem, kinds, numbers)
            return _forward_case(replace(self.case.plan, problem=traced), specs, self.case.device)

        return self.case.outs.of(kind).find(values, make)

    def backward_of(self, x: Operands, out, lse, dout, dlse=None, *places: Any) -> Backward:
        """The backward on tensors with the layouts of these, which may differ from the
        forward's. places: laid_out and into, as in a GpuBackward."""
        if self._like.page_size:
            return GatheredBackward(self.plan, self.case)
        return GpuBackward(self.plan, self.case.backwards, x, out, lse, dout, dlse, *places)

    def backward_like(
        self, tensors: Sequence[torch.Tensor], slot: int, once: bool
    ) -> "GpuBackward | None":
        """The backward on tensors that differ from those of the last one in lengths alone; None for
        others. tensors: the operands, with the forward's shapes, then out, lse, dout, and dlse if
        it is there. slot: as in Backwards. once: whether these lengths likely come only once.
        """
        latest, case, numbers = self.case.latest.get(slot), self.case, self._numbers
        if latest is None or latest[0].addresses(tensors) is None:
            return None
        out, lse = tensors[-4:-2] if slot == 1 else tensors[-3:-1]
        shapes = (*out.shape, *lse.shape)
        if shapes != numbers[case.shapes][: len(shapes)]:
            return None
        return latest[1].at(numbers, tensors, once)


class GatheredBackward:
    """The backward of a plan whose keys lie in pages, on dense copies of them."""

    def __init__(self, plan: Plan, case: PlannedCase):
        self._plan, self._kinds = replace(plan, problem=plan.problem.gathered()), case.backwards
        self._dense: GpuBackward | None = None

    def __call__(self, x, out, lse, dout, dlse=None, kv_grad=True) -> Gradients:
        """Gradients of the inputs, those of k and v in their pages, or None without kv_grad."""
        from heedful.torch.eager.pages import backward_of_pages

        cotangents = (out, lse, dout, dlse)
        return backward_of_pages(self._run, x, self._plan.problem.seqlen_k, kv_grad, *cotangents)

    def _run(self, rows: Operands, *cotangents) -> Gradients:
        """The backward on gathered rows, which have the same layout each time."""
        if self._dense is None:
            self._dense = GpuBackward(self._plan, self._kinds, rows, *cotangents)
        return self._dense(rows, *cotangents)


class GpuBackward:
    """The backward of a plan on tensors with the layouts of those that it is made with. kinds: the
    kind of each tensor; empty if operands are copied, do not begin at multiples of 16 bytes, or
    have gradients besides dq, dk and dv. copied: names of the copied ones.
    """

    __slots__ = ("copied", "kinds", "_bind", "_cases", "_others", "_pick", "_run", "_sizes")

    def __init__(self, plan: Plan, kinds: Kinds, x, out, lse, dout, dlse, laid_out=False, into=()):
        """kinds: the forward's `backwards`. laid_out: a gradient is dense, with its dims in the
        order in which those of its operand lie in memory; else it is contiguous. into: the caller's
        dq, dk and dv, which `run_on` writes: their addresses follow the others, and it returns
        other gradients alone."""
        device = x.q.device
        features = plan.variant_of("backward").features
        mapped = () if "unaligned" in features else ("q", "k", "v", "dout")
        rows = {"q": x.q, "k": x.k, "v": x.v, "dout": dout}
        self.copied = tuple(name for name in mapped if not is_mappable(rows[name]))
        x, dout = self._mappable(x, dout)
        inputs = {name: t for name, t in zip(Operands._fields, x, strict=True) if t is not None}
        self._pick = itemgetter(*(Operands._fields.index(name) for name in inputs))
        tensors = {**inputs, "out": out, "lse": lse, "dout": dout}
        if dlse is not None:
            tensors["dlse"] = dlse
        tensors |= zip(Gradients._fields, into, strict=False)
        self._others = x.sink is not None, plan.problem.rel_bias_grad, [None] * len(into)
        names = ["dq", "dk", "dv"] * (not into) + ["dbias"] * plan.problem.bias_grad
        names += ["dsink"] * self._others[0] + ["drel_bias"] * self._others[1]
        kind, values = of_call(plan.problem, tensors)

        def described(numbers) -> tuple[Plan, dict[str, ArraySpec], dict[str, ArraySpec]]:
            problem, specs = with_numbers(plan.problem, kind[2:], numbers)
            for name in mapped:
                shape, strides, dtype, *_ = specs[name]
                assert are_mappable(shape, strides, item_bytes(dtype)), name
            by_ranges = plan.problem.key_ranges > 0
            facts = storage(specs["q"], specs["k"], specs["v"], specs["out"], by_ranges)
            made = {name: specs[name[1:]] for name in names}
            if "dbias" in made:
                shape, strides, *_ = bias = made["dbias"]
                made["dbias"] = bias._replace(shape=own_shape(shape, strides))
            for name, (shape, strides, dtype, *_) in made.items():
                dense = ordered_strides(shape, strides) if laid_out else dense_strides(shape)
                made[name] = ArraySpec(shape, dense, dtype)
            chosen = stored_as(replace(plan, problem=problem), **facts)
            return chosen, specs, made

        def make(numbers) -> PlannedCase:
            chosen, specs, made = described(values)
            note(chosen, "backward", specs | made)
            chosen, specs, made = described(numbers)
            return PlannedCase(chosen, "backward", specs, made, device)

        self._cases = kinds.of((laid_out, kind))
        case, numbers = self._cases.find(values, make)
        self._bind = partial(case.bind, numbers)
        self._run: Run = self._bind()
        aligned = all([array.aligned for array in kind[2:]])
        is_simple = aligned and not self.copied and len(names) == 3 and not into
        self.kinds = kind[2:] if is_simple else ()
        self._sizes = Sizes(_LENGTHS, [*tensors.values()], kind[2:])

    def at(
        self, lengths: Sequence[int], tensors: Sequence[torch.Tensor], once: bool
    ) -> "GpuBackward | None":
        """The backward for other lengths, the first of which are the problem's, on such tensors;
        None if no case has them. once: see `backward_like`."""
        values = self._sizes.of([*lengths[:_LENGTHS]], tensors)
        known = self._cases.known(values)
        if known is None:
            return None
        case, numbers = known
        made = object.__new__(GpuBackward)
        made._cases, made._sizes, made.kinds = self._cases, self._sizes, self.kinds
        made.copied, made._pick, made._others = self.copied, self._pick, self._others
        made._bind = partial(case.bind, numbers)
        made._run = partial(case.once, numbers) if once else made._bind()
        return made

    def __call__(self, x, out, lse, dout, dlse=None, kv_grad=True) -> Gradients:
        """Gradients of the inputs from those of out and lse (None is zero), always with those of k
        and v."""
        if self.copied:
            x, dout = self._mappable(x, dout)
        tensors = [*self._pick(x), out, lse, dout, *([] if dlse is None else [dlse])]
        return self.run_on([*map(address_of, tensors)])

    def run_on(self, addresses: list[int]) -> Gradients:
        """The same, from the addresses of those of x, out, lse, dout and dlse that are there, in
        this order, if nothing is copied."""
        gradients = self._run(addresses)
        if len(gradients) == 3 and not self._others[2]:
            return _named(Gradients, (*gradients, None, None, None))
        dq, dk, dv, *more = self._others[2] + gradients
        drel_bias = more.pop() if self._others[1] else None
        dsink = more.pop() if self._others[0] else None
        return Gradients(dq, dk, dv, more.pop() if more else None, dsink, drel_bias)

    def turned(self) -> Run:
        """As `run_on` of a backward that makes dq, dk and dv alone, which come in a list, with
        heads before rows."""
        return self._bind(3)

    def _mappable(self, x: Operands, dout: torch.Tensor) -> tuple[Operands, torch.Tensor]:
        """These tensors, with copies of those for which there can be no tensor map."""
        by_name, dense = {**x._asdict(), "dout": dout}, torch.contiguous_format
        copies = {name: torch.clone(by_name[name], memory_format=dense) for name in self.copied}
        dout = copies.pop("dout", dout)
        return x._replace(**copies), dout
