"""Which kernels run a problem on a device, and why the others do not.

Pure: it never queries a device, so it is tested for an MI355X on a laptop.
"""

from collections.abc import Mapping
from dataclasses import field, replace

from heedful.core.base.device import DeviceSpec
from heedful.core.base.frozen import dataclass
from heedful.core.call.problem import ITEM_BITS, AttentionProblem, Lengths
from heedful.core.planning import sizes
from heedful.core.planning.sizes import Scheduler, Sizes
from heedful.core.registry import capability, configs
from heedful.core.registry.by_hand import OPTIONS, Overrides, asked, with_options
from heedful.core.registry.capability import KernelRow, Toolchain, Variant
from heedful.core.registry.configs import ConfigRow
from heedful.core.registry.mixed import SHORT_KERNELS
from heedful.core.registry.tiles import (
    HopperBackwardConfig,
    HopperConfig,
    HopperForwardConfig,
    PortablePartsConfig,
    SharedKeysConfig,
    TileConfig,
)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A kernel that was not chosen, with every reason; or a backend, with the reasons that all of
    its variants share."""

    backend: str
    direction: str
    reasons: tuple[str, ...]
    variant: str = ""

    @property
    def label(self) -> str:
        return capability.label(self.backend, self.variant)


@dataclass(frozen=True)
class Plan:
    """The decision for one problem on one device: all that the code of its kernels depends on.
    `sizes` gives the rest, which lengths change.

    backend, level, variant: of the forward; variant is "" if the backend has one kernel. backward,
    backward_level, backward_variant: of the backward, None without one. configs: kernel name
    ("portable.forward", ...) -> its tiles; measured: kernel name -> where they were measured.
    is_split: whether the keys are split and results merged. in_turn: whether programs of the Hopper
    forward take several parts of their keys in turn and merge them. scheduler: how its programs
    get their work tiles. short_q: the most queries of a sequence that a decode kernel
    handles, where the Hopper forward handles longer ones; 0 = one kernel handles all. by_hand:
    options of `Overrides`. notes: what a user may want to know (copies made, settings that took
    part). toolchains: by direction, what its kernels are planned for; named: the backend that
    `plan` was called with.
    """

    problem: AttentionProblem
    device: DeviceSpec
    backend: str
    level: str
    backward: str | None = None
    backward_level: str | None = None
    variant: str = ""
    backward_variant: str | None = None
    configs: dict[str, TileConfig] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)
    is_split: bool = False
    in_turn: bool = False
    scheduler: Scheduler | None = None
    short_q: int = 0
    by_hand: Mapping[str, int] = field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()
    toolchains: Mapping[str, Toolchain] = field(default_factory=dict, compare=False, repr=False)
    named: str | None = field(default=None, compare=False, repr=False)

    def variant_of(self, direction: str) -> Variant:
        """The registered kernel of a direction."""
        if direction == "forward":
            return capability.variant(self.backend, direction, self.variant)
        return capability.variant(self.backward or "", direction, self.backward_variant or "")

    @property
    def forward_config(self) -> TileConfig | None:
        """The tiles of the forward, None on a CPU."""
        return next((self.configs[k] for k in self.variant_of("forward").configs), None)

    def appends_ahead(self, has_new: bool = True, leaves_q: bool = False) -> str:
        """Why a launch before attention writes new keys and values into the cache; empty if the
        forward's kernel does.

        has_new: whether there are any. leaves_q: whether rotated queries are a result, too.
        """
        kernel = self.variant_of("forward")
        if not kernel.appends:
            return f"{kernel.label} does not append"
        if leaves_q:
            return "a shared prefix wants the rotated queries"
        if not has_new:
            return "no new keys come"
        problem = self.problem
        # Without queries a kernel visits no keys, and would not write the new ones.
        is_empty = 0 in (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim)
        return "there are no queries" if is_empty else ""

    def sizes(
        self,
        lengths: Lengths | None = None,
        direction: str = "forward",
        stored_k: int | None = None,
    ) -> Sizes:
        """Grids, splits and scratch for these lengths, by default the problem's. Kernels are
        correct for any lengths. The best tiles may depend on lengths, so that another plan may be
        faster for others. stored_k: keys that a sequence has room for, if not seqlen_k.
        """
        problem = self.problem if lengths is None else self.problem.at(lengths)
        return sizes.of(self, problem, direction, stored_k)

    @property
    def num_splits(self) -> int:
        """How many splits the problem's keys have, 1 = not split."""
        return sizes.splits_of(self, self.problem)


def plan(
    problem: AttentionProblem,
    device: DeviceSpec,
    toolchain: Toolchain | None = None,
    backend: str | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The best kernels for `problem` on `device`.

    backend: use this one, or the choice of `by_hand.named`; ValueError with every reason if it
    cannot. If its backward cannot take the problem, the next backend takes the backward. Raises
    ValueError where no kernel can.
    """
    named = asked(backend)
    by_hand = {} if named is None else named.options
    problem.validate()
    forward, rejected = _choose("forward", problem, device, toolchain, named, backend)
    backward = None
    if problem.needs_grad:
        has_backward = named is not None and any(
            v.direction == "backward" and not v.why_not(problem, device, toolchain)
            for v in named.kernels()
        )
        backward, more = _choose(
            "backward", problem, device, toolchain, named if has_backward else None, backend
        )
        rejected += more
        if problem.page_size and backward.gathers_pages:
            notes += ("the backward copies each sequence's pages into dense keys first",)
    tiles = _configs(problem, device, toolchain, forward, backward, by_hand)
    for option in by_hand:
        if not any(option in OPTIONS.get(kernel, ()) for kernel in tiles):
            raise ValueError(f"backend: no kernel of this call has the option {option!r}")
    framework = toolchain.framework if toolchain else "torch"
    return Plan(
        problem,
        device,
        forward.backend,
        forward.level(device, problem, framework) or "",
        backward.backend if backward else None,
        backward.level(device, problem, framework) if backward else None,
        forward.name,
        backward.name if backward else None,
        {kernel: config for kernel, (config, _) in tiles.items()},
        {kernel: row.measured for kernel, (_, row) in tiles.items()},
        **_dealt_out(forward, tiles, problem, device),
        by_hand=by_hand,
        rejected=rejected,
        notes=notes,
        toolchains=dict.fromkeys(("forward", "backward"), toolchain or Toolchain()),
        named=backend,
    )


def needs_pack(chosen: Plan, direction: str) -> bool:
    """Whether loaded packs alone may have the kernels of a direction: they are planned for a Triton
    that is not the one which compiles here."""
    tools = chosen.toolchains.get(direction)
    if tools is None or tools.triton is None or not tools.packs:
        return False
    planned = chosen.variant_of(direction).triton_of(tools, chosen.problem, chosen.device)
    return planned != tools.triton


def without_packs(chosen: Plan, direction: str) -> Plan:
    """The plan with this direction planned for the installed Triton alone. Raises as `plan`."""
    tools = replace(chosen.toolchains[direction], packs=frozenset())
    more = f"the {direction} is planned without packs: none has all of its kernels"
    made = plan(chosen.problem, chosen.device, tools, chosen.named, chosen.notes)
    first, second = (made, chosen) if direction == "forward" else (chosen, made)
    kept = second.variant_of("backward").configs if second.backward else ()
    backward = {kernel: second.configs[kernel] for kernel in kept if kernel in second.configs}
    return replace(
        first,
        backward=second.backward,
        backward_level=second.backward_level,
        backward_variant=second.backward_variant,
        configs=first.configs | backward,
        measured=first.measured | {kernel: second.measured[kernel] for kernel in backward},
        notes=(*chosen.notes, more),
        toolchains={**chosen.toolchains, direction: tools},
    )


def _left_to_others(v: Variant, problem, device, toolchain, named: Overrides | None) -> list[str]:
    """Why a variant that is not named leaves a problem to others that take it: to any, or to those
    of the named backend. None is preferred with what it has not run with."""
    preferences = [] if named and named.variant else v.preferences
    framework = toolchain.framework if toolchain else "torch"
    preferred = [other for prefers in preferences if (other := prefers(problem, device))]
    return [
        f"{capability.label(other.backend, other.variant)} is preferred {other.why}"
        for other in preferred
        if (named is None or named.backend == other.backend)
        and any(
            not (
                kernel.unrun_with(problem, framework)
                or kernel.why_not(other.asks or problem, device, toolchain)
            )
            for kernel in Overrides(other.backend, other.variant).kernels()
            if kernel.direction == v.direction
        )
    ]


def _left_to_what_has_run(v: Variant, problem, device, tools: Toolchain) -> list[str]:
    """Why a variant leaves a problem, with something of which it has not run on hardware, to one
    that has run with it."""
    if not v.unrun_with(problem, tools.framework) or v.level(device) != "run":
        return []
    others = [
        other
        for row in capability.rows(v.direction)
        for other in row.taking(problem)
        if other.serves(tools.framework)
        and other.by_default
        and other.level(device, problem, tools.framework) == "run"
        and not _left_to_others(other, problem, device, tools, None)
        and not other.why_not(problem, device, tools)
    ]
    unrun = ", ".join(capability.words_of(v.unrun_with(problem, tools.framework)))
    return [f"has not run with {unrun}: {other.label} has" for other in others[:1]]


def _choose(
    direction, problem, device, toolchain, named: Overrides | None, backend: str | None
) -> tuple[Variant, tuple[Rejection, ...]]:
    """The first kernel that can take the problem, and the rejections before it. named: the kernels
    that `backend` names, None for any."""
    chosen, rejected, refused = None, [], []
    tools = toolchain or Toolchain()
    allowed = named.kernels() if named else []
    for row in capability.rows(direction):
        told = []
        for v in row.taking(problem, allowed if named and named.variant else ()):
            if v not in allowed and not v.serves(tools.framework):
                continue
            # This is asked first: it rules out this kernel for most problems, and saves the other
            # checks.
            reasons = []
            if named is None or v in allowed:
                reasons = _left_to_others(v, problem, device, toolchain, named)
            reasons = reasons or v.why_not(problem, device, toolchain)
            if not reasons and named is None:
                reasons = _left_to_what_has_run(v, problem, device, tools)
            is_free = v.by_default or v.backend in tools.validated
            if not reasons and named and v not in allowed:
                reasons = [f"backend={backend!r} was asked for"]
            elif not reasons and not named and not is_free:
                reasons = ["runs only when asked for by name"]
            elif not reasons and chosen is not None:
                reasons = [f"{chosen.label} is preferred"]
            if reasons:
                told.append((v, reasons))
            else:
                chosen = v
        rejected += _rejections(row, told, chosen)
        refused += _rejections(row, [one for one in told if one[0] in allowed], None)
    if chosen is None:
        who = f"backend={backend!r} cannot run" if named else "no kernel can run"
        why = "; ".join(f"{r.label}: {', '.join(r.reasons)}" for r in rejected)
        if named and len(refused) == 1:
            why = "; ".join(refused[0].reasons)
        elif named:
            why = "; ".join(f"{r.variant}: {', '.join(r.reasons)}" for r in refused)
        raise ValueError(f"{who} the {direction} of [{problem.key()}] on {device.name}: {why}")
    return chosen, tuple(rejected)


def _rejections(row: KernelRow, told: list, chosen: Variant | None) -> list[Rejection]:
    """One rejection of the backend, with the reasons that its variants share, if they share some;
    else one for each variant."""
    first = told[0][1] if told else []
    shared = [reason for reason in first if all(reason in reasons for _, reasons in told)]
    if shared and (chosen is None or chosen not in row.variants):
        return [Rejection(row.backend, row.direction, tuple(shared))]
    return [Rejection(v.backend, v.direction, tuple(reasons), v.name) for v, reasons in told]


def stored_as(plan: Plan, **facts: bool) -> Plan:
    """The same plan for tensors with other strides, which its backward takes, too. facts: those of
    `core.call.storage`, as in AttentionProblem.
    """
    problem = replace(plan.problem, **facts)
    if problem == plan.problem:
        return plan
    kernel, tools = plan.variant_of("backward"), plan.toolchains.get("backward")
    tiles = _configs(problem, plan.device, tools, kernel, None, plan.by_hand)
    adapted = {kernel: config for kernel, (config, _) in tiles.items()}
    return replace(plan, problem=problem, configs=plan.configs | adapted)


def _configs(
    problem: AttentionProblem,
    device: DeviceSpec,
    toolchain: Toolchain | None,
    forward: Variant,
    backward: Variant | None,
    by_hand: Mapping[str, int],
) -> dict[str, tuple[TileConfig, ConfigRow]]:
    """The config of every kernel that takes part, adapted to the problem, and where it was
    measured."""
    tools = toolchain or Toolchain()
    # Maps each kernel to the Triton that it is planned for.
    kernels = {
        kernel: row.triton_of(tools, problem, device)
        for row in (forward, backward)
        if row is not None
        for kernel in row.configs
    }
    # These tiles are of probabilities from the log-sum-exp, for tests and for gradients of biases.
    if "portable.scores" in kernels:
        triton = kernels.pop("portable.scores")
        if problem.return_probs or problem.bias_grad or problem.rel_bias_grad:
            kernels["portable.scores"] = triton
    rows = {
        kernel: configs.choose(kernel, _as_seen(kernel, problem, forward), device)
        for kernel in kernels
    }
    if problem.documents or problem.scattered:
        from heedful.core.registry.masks_said import with_options_of_mask

        rows = {k: with_options_of_mask(r, problem, tools.framework) for k, r in rows.items()}
    if by_hand:
        rows = {k: with_options(row, by_hand, problem) for k, row in rows.items()}
    return {k: (row.config.fitted(problem, kernels[k]), row) for k, row in rows.items()}


def _as_seen(kernel: str, problem: AttentionProblem, forward: Variant) -> AttentionProblem:
    """The problem for which a kernel's tiles are chosen. For the short sequences of a mixed batch
    it has one query, as most of them have."""
    if forward.short_queries and kernel in SHORT_KERNELS:
        return problem.at(problem.lengths._replace(seqlen_q=1))
    return problem


def _dealt_out(row: Variant, tiles, problem: AttentionProblem, device: DeviceSpec) -> dict:
    """Whether the keys are split, and which scheduler gives out the work tiles."""
    forward = next((tiles[kernel][0] for kernel in row.configs if kernel in tiles), None)
    splits = 1
    if "split_kv" in row.features:
        # On a CPU keys are not split by default: its threads share the tiles.
        splits = max(1, problem.num_splits)
        if forward is not None:
            is_whole = problem.return_probs or problem.max_scores
            splits = 1 if is_whole else sizes.best_splits(forward, problem, device)
    if isinstance(forward, SharedKeysConfig):
        # Its programs share the keys by themselves.
        return {}
    facts: dict = {"is_split": splits > 1}
    if row.short_queries:
        facts["short_q"] = row.short_queries(problem)
    if isinstance(forward, HopperConfig):
        facts["in_turn"] = splits == 1 and bool(forward.parts(problem) > 1)
        facts["scheduler"] = sizes.scheduler_of(forward, problem, device, splits)
    return facts


def explain(plan: Plan, update: str | None = None) -> str:
    """The decision in words, line by line. update: the result of `Plan.appends_ahead` for a call
    that appends to a cache."""
    from heedful.core.planning import cuts

    forward = plan.variant_of("forward")
    lines = [
        f"problem   {plan.problem.key()}",
        f"device    {plan.device.name} ({plan.device.arch})" + _words_of_margin(plan.device),
        f"forward   {forward.label} [{plan.level}]",
    ]
    if update is not None and forward.program:
        where = f"a launch ahead: {update}" if update else f"within the {forward.label} kernel"
        lines.append(f"update    {where}")
    if plan.backward:
        lines.append(f"backward  {plan.variant_of('backward').label} [{plan.backward_level}]")
    planned = {direction: plan.sizes(direction=direction) for direction in _directions(plan)}
    if planned["forward"].num_splits > 1:
        lines.append(f"splits    {planned['forward'].num_splits}")
    cut = {direction: cuts.sizes_of(plan, direction) for direction in planned}
    for kernel, c in shown_configs(plan).items():
        lines.append(
            f"tiles     {kernel}: {c.block_m} x {c.block_n}, {c.num_warps} warps,"
            f" {c.num_stages} stages {c.words()}".rstrip()
            + f" ({plan.measured[kernel]})"
        )
    if plan.problem.invariant:
        lines += words_of_numerics(plan)
    if plan.scheduler:
        lines.append(f"scheduler {plan.scheduler}")
    if plan.short_q:
        lines.append(f"sequences {words_of_sequences(plan)}")
    if any(cut.values()):
        where = " and ".join(direction for direction, sizes in cut.items() if sizes)
        lines.append(f"rows      {where}: cut into packed sequences where they part")
    for direction, sizes_of_it in planned.items():
        lines += _words_of(cut[direction] or sizes_of_it)
    lines += [f"note      {note}" for note in plan.notes]
    lines += [
        f"rejected  {', '.join(names)} {direction}: {'; '.join(reasons)}"
        for (direction, reasons), names in rejected_together(plan).items()
    ]
    return "\n".join(lines)


def _directions(plan: Plan) -> tuple[str, ...]:
    return ("forward", "backward") if plan.backward else ("forward",)


def shown_configs(plan: Plan) -> dict[str, TileConfig]:
    """The tiles by kernel, without `cuts_rows` where keys or visits of a call are split: then rows
    are not cut."""
    from heedful.core.planning import cuts

    shown = dict(plan.configs)
    for direction in _directions(plan):
        is_cut = cuts.sizes_of(plan, direction) is not None
        for kernel in plan.variant_of(direction).configs:
            config = shown.get(kernel)
            if isinstance(config, (HopperForwardConfig, HopperBackwardConfig)) and not is_cut:
                shown[kernel] = replace(config, cuts_rows=False)
    return shown


def _words_of_margin(device: DeviceSpec) -> str:
    """How many SMs are left to others, if any are."""
    return f", on {device.units} SMs: {device.left} are left to others" if device.left else ""


def rejected_together(plan: Plan) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """(direction, reasons) -> the kernels that were rejected for these."""
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for r in plan.rejected:
        together.setdefault((r.direction, r.reasons), []).append(r.label)
    return together


def words_of_numerics(plan: Plan) -> list[str]:
    """The numbers that decide a row's bits, and where other bits may come."""
    config = plan.forward_config
    assert isinstance(config, (PortablePartsConfig, HopperForwardConfig))
    return [
        f"numerics  invariant: tiles of {config.block_n} keys and parts of {config.part_keys} keys,"
        " in the order of positions",
        "numerics  the same bits on one architecture, by one version and one compiler or pack,"
        " where stored keys and values are finite",
    ]


def words_of_seen(
    plan: Plan, tile: tuple[int, int], whole: int, part: int, hidden: int, pairs: int, scores: int
) -> list[str]:
    """How many tiles of all heads and sequences are seen whole, in part and not at all, and what
    follows. pairs: that are seen. scores: of tiles that are seen: all of these are computed."""
    problem, share = plan.problem, pairs / max(1, scores)
    rows, keys = tile
    flops = 2 * pairs * (problem.head_dim + problem.head_dim_v)
    lines = [
        f"mask      tiles of {rows} x {keys}: {whole} seen whole, {part} in part, {hidden} left"
        " out",
        f"mask      {pairs} pairs are seen, {share:.1%} of the scores of these tiles: the forward"
        f" has {flops / 1e12:.3g} TFLOP",
    ]
    if plan.device.bf16_flops and ITEM_BITS[problem.dtype] == 16:
        most = plan.device.bf16_flops / 1e12
        lines.append(f"mask      at most {share * most:.0f} of {most:.0f} TFLOP/s follow")
    return lines


def words_of_sequences(plan: Plan) -> str:
    """Which kernel handles which sequences of a mixed batch."""
    short = next(kernel for kernel in plan.configs if kernel in SHORT_KERNELS)
    return f"up to {plan.short_q} queries: {short}; longer ones: hopper.forward"


def _words_of(planned: Sizes) -> list[str]:
    """Grids and scratch, line by line."""
    lines = []
    for kernel, launch in planned.launches.items():
        grid = " x ".join(str(size) for size in launch.grid if size != 1) or "1"
        numbers = "".join(f", {name}={value}" for name, value in launch.numbers.items())
        lines.append(f"grid      {kernel}: {grid} programs{numbers}")
    if planned.workspaces:
        words = ", ".join(f"{w.name} {w.buffer.nbytes}" for w in planned.workspaces)
        lines.append(f"scratch   {words} bytes")
    return lines
