"""Which kernels run a problem on a device, and why the others do not.

Pure: it never queries a device, so it is tested for an MI355X on a laptop.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from heedful.core.base.device import DeviceSpec
from heedful.core.call.problem import AttentionProblem, Lengths
from heedful.core.planning import sizes
from heedful.core.planning.sizes import Scheduler, Sizes
from heedful.core.registry import capability, configs
from heedful.core.registry.by_hand import OPTIONS, with_options
from heedful.core.registry.capability import KernelRow, Toolchain
from heedful.core.registry.configs import ConfigRow
from heedful.core.registry.mixed import SHORT_KERNELS
from heedful.core.registry.tiles import HopperConfig, SharedKeysConfig, TileConfig


@dataclass(frozen=True, slots=True)
class Rejection:
    """A kernel that was not chosen, with every reason."""

    backend: str
    direction: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The decision for one problem on one device: all that the code of its kernels depends on.
    `sizes` gives the rest, which lengths change.

    backend, level: of the forward; backward, backward_level: of the backward, None without one.
    configs: kernel name ("portable.forward", ...) -> its tiles; measured: where from.
    is_split: whether the keys are split in parts that are merged. scheduler: how the programs of a
    Hopper forward get their tiles. short_q: the most queries of a sequence that a decode kernel
    handles, where the Hopper forward handles longer ones; 0 = one kernel handles all. by_hand:
    options that a backend's name carried.
    notes: what a user may want to know (copies made, settings that took part).
    """

    problem: AttentionProblem
    device: DeviceSpec
    backend: str
    level: str
    backward: str | None = None
    backward_level: str | None = None
    configs: dict[str, TileConfig] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)
    is_split: bool = False
    scheduler: Scheduler | None = None
    short_q: int = 0
    by_hand: Mapping[str, int] = field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()

    def row(self, direction: str) -> KernelRow:
        """The registered kernels of a direction."""
        backend = self.backend if direction == "forward" else self.backward
        return capability.row(backend or self.backend, direction, self.problem.dtype)

    def appends_ahead(self, has_new: bool = True, leaves_q: bool = False) -> str:
        """Why new keys and values go into a cache by a launch before attention; empty where the
        forward's kernel appends them.

        has_new: whether there are any. leaves_q: whether rotated queries are a result, too.
        """
        if not self.row("forward").appends:
            return f"{self.backend} does not append"
        if leaves_q:
            return "a shared prefix wants the rotated queries"
        if not has_new:
            return "no new keys come"
        problem = self.problem
        # A kernel without queries would never reach the new keys.
        is_empty = 0 in (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim)
        return "there are no queries" if is_empty else ""

    def sizes(
        self,
        lengths: Lengths | None = None,
        direction: str = "forward",
        stored_k: int | None = None,
    ) -> Sizes:
        """Grids, splits and scratch for these lengths, by default the problem's own.

        Kernels are right for any lengths. The best tiles may depend on lengths, so that new lengths
        may want a plan of their own. stored_k: keys that a sequence has room for, where that is not
        seqlen_k.
        """
        problem = self.problem if lengths is None else self.problem.at(lengths)
        return sizes.of(self, problem, direction, stored_k)

    @property
    def num_splits(self) -> int:
        """How many splits of the problem's own keys there are, 1 = not split."""
        return sizes.splits_of(self, self.problem)


def plan(
    problem: AttentionProblem,
    device: DeviceSpec,
    toolchain: Toolchain | None = None,
    backend: str | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The best kernels for `problem` on `device`.

    backend: use this one; ValueError with every reason if it cannot. If its backward cannot, the
    next backend takes the backward. Raises ValueError where no kernel can. Options of
    its kernels, for measurements, follow its name: "hopper+draws=1+last_waves=2".
    """
    backend, by_hand = _named(backend)
    problem.validate()
    forward, rejected = _choose("forward", problem, device, toolchain, backend)
    backward = None
    if problem.needs_grad:
        own = any(
            row.backend == backend and not row.why_not(problem, device, toolchain)
            for row in capability.rows("backward")
        )
        backward, more = _choose("backward", problem, device, toolchain, backend if own else None)
        rejected += more
        if problem.page_size and backward.gathers_pages:
            notes += ("the backward copies each sequence's pages into dense keys first",)
    tiles = _configs(problem, device, toolchain, forward, backward, by_hand)
    for option in by_hand:
        if not any(option in OPTIONS.get(kernel, ()) for kernel in tiles):
            raise ValueError(f"backend: no kernel of this call has the option {option!r}")
    return Plan(
        problem,
        device,
        forward.backend,
        forward.level(device) or "",
        backward.backend if backward else None,
        backward.level(device) if backward else None,
        {kernel: config for kernel, (config, _) in tiles.items()},
        {kernel: row.measured for kernel, (_, row) in tiles.items()},
        **_dealt_out(forward, tiles, problem, device),
        by_hand=by_hand,
        rejected=rejected,
        notes=notes,
    )


def _named(backend: str | None) -> tuple[str | None, dict[str, int]]:
    """A backend's name, and the options after it."""
    if backend is None:
        return None, {}
    name, *given = backend.split("+")
    if name not in capability.backends():
        raise ValueError(
            f"backend must be one of {', '.join(capability.backends())} or None, got {backend!r}"
        )
    known = [o for kernel, own in OPTIONS.items() if kernel.partition(".")[0] == name for o in own]
    options: dict[str, int] = {}
    for text in given:
        option, _, value = text.partition("=")
        if option not in known or option in options or not value.isdecimal():
            words = ", ".join(f"{o}=NUMBER" for o in known) or "none"
            raise ValueError(f"backend {name!r} has the options {words}, got {backend!r}")
        options[option] = int(value)
    return name, options


def _left_to_others(row: KernelRow, direction, problem, device, toolchain) -> list[str]:
    """Why a row whose backend is not named leaves a problem to rows of other backends that take
    it."""
    found = [other for wish in row.unasked if (other := wish(problem, device))]
    return [
        f"{other.backend} is preferred {other.why}"
        for other in found
        if any(
            own.backend == other.backend and not own.why_not(problem, device, toolchain)
            for own in _rows(direction, problem.dtype)
        )
    ]


def _choose(direction, problem, device, toolchain, backend) -> tuple[KernelRow, tuple]:
    """The first row that can, and the rejections on the way."""
    chosen, rejected, named = None, [], []
    for row in _rows(direction, problem.dtype):
        # This is asked first: another kernel takes most problems, and the rest need no check.
        reasons = []
        if backend is None:
            reasons = _left_to_others(row, direction, problem, device, toolchain)
        reasons = reasons or row.why_not(problem, device, toolchain)
        if row.backend == backend:
            named += reasons
        elif not row.serves((toolchain or Toolchain()).framework):
            continue
        if not reasons and backend is not None and row.backend != backend:
            reasons = [f"backend={backend!r} was asked for"]
        unasked = row.by_default or (toolchain is not None and row.backend in toolchain.validated)
        if not reasons and not unasked and backend is None:
            reasons = ["runs only when asked for by name"]
        if not reasons and chosen is not None:
            reasons = [f"{chosen.backend} is preferred"]
        if reasons:
            rejected.append(Rejection(row.backend, direction, tuple(reasons)))
        else:
            chosen = row
    if chosen is None and named:
        raise ValueError(
            f"backend={backend!r} cannot run the {direction} of [{problem.key()}] on"
            f" {device.name}: {'; '.join(named)}"
        )
    if chosen is None:
        why = "; ".join(f"{r.backend}: {', '.join(r.reasons)}" for r in rejected)
        raise ValueError(
            f"no kernel can run the {direction} of [{problem.key()}] on {device.name}: {why}"
        )
    return chosen, tuple(rejected)


def _rows(direction: str, dtype: str) -> list[KernelRow]:
    """One row of each backend: the one for this dtype. Without one it is the first, which gives the
    dtype as a reason."""
    kept: dict[str, KernelRow] = {}
    for row in capability.rows(direction):
        if row.backend not in kept or (
            dtype in row.dtypes and dtype not in kept[row.backend].dtypes
        ):
            kept[row.backend] = row
    return list(kept.values())


def stored_as(plan: Plan, **facts: bool) -> Plan:
    """The plan for tensors stored otherwise. Its backward takes these, too.

    facts: those of `core.call.storage`, as in AttentionProblem.
    """
    problem = replace(plan.problem, **facts)
    if problem == plan.problem:
        return plan
    tiles = _configs(problem, plan.device, None, plan.row("backward"), None, plan.by_hand)
    own = {kernel: config for kernel, (config, _) in tiles.items()}
    return replace(plan, problem=problem, configs=plan.configs | own)


def _configs(
    problem: AttentionProblem,
    device: DeviceSpec,
    toolchain: Toolchain | None,
    forward: KernelRow,
    backward: KernelRow | None,
    by_hand: Mapping[str, int],
) -> dict[str, tuple[TileConfig, ConfigRow]]:
    """The config of every kernel that takes part, fitted to the problem, and where it is from."""
    tools = toolchain or Toolchain()
    # Maps each kernel to the Triton that it is planned for.
    kernels = {
        kernel: next(iter(tools.tritons_of(row.backend)), None)
        for row in (forward, backward)
        if row is not None
        for kernel in row.configs
    }
    # This kernel makes probabilities anew from the log-sum-exp, for tests and for the gradient of
    # the bias.
    if "portable.scores" in kernels:
        triton = kernels.pop("portable.scores")
        if problem.return_probs or problem.bias_grad:
            kernels["portable.scores"] = triton
    rows = {
        kernel: configs.choose(kernel, _as_seen(kernel, problem, forward), device)
        for kernel in kernels
    }
    if by_hand:
        rows = {k: with_options(row, by_hand, problem) for k, row in rows.items()}
    return {k: (row.config.fitted(problem, kernels[k]), row) for k, row in rows.items()}


def _as_seen(kernel: str, problem: AttentionProblem, forward: KernelRow) -> AttentionProblem:
    """The problem for which a kernel's tiles are chosen: short sequences of a mixed batch mostly
    have one new token."""
    if forward.short_queries and kernel in SHORT_KERNELS:
        return problem.at(problem.lengths._replace(seqlen_q=1))
    return problem


def _dealt_out(row: KernelRow, tiles, problem: AttentionProblem, device: DeviceSpec) -> dict:
    """Whether the keys are split, and which scheduler deals out the tiles."""
    forward = next((tiles[kernel][0] for kernel in row.configs if kernel in tiles), None)
    splits = 1
    if "split_kv" in row.features:
        # A CPU chooses no splits: its threads share what there is.
        splits = max(1, problem.num_splits)
        if forward is not None:
            splits = 1 if problem.return_probs else sizes.best_splits(forward, problem, device)
    if isinstance(forward, SharedKeysConfig):
        # Its programs share the keys by themselves.
        return {}
    facts: dict = {"is_split": splits > 1}
    if row.short_queries:
        facts["short_q"] = row.short_queries(problem)
    if isinstance(forward, HopperConfig):
        facts["scheduler"] = sizes.scheduler_of(forward, problem, device, splits)
    return facts


def explain(plan: Plan, update: str | None = None) -> str:
    """The decision in words, line by line. update: the result of `Plan.appends_ahead` for a call
    that appends to a cache."""
    lines = [
        f"problem   {plan.problem.key()}",
        f"device    {plan.device.name} ({plan.device.arch})",
    ]
    lines.append(f"forward   {plan.backend} [{plan.level}]")
    if update is not None and plan.row("forward").program:
        where = f"a launch ahead: {update}" if update else f"within the {plan.backend} kernel"
        lines.append(f"update    {where}")
    if plan.backward:
        lines.append(f"backward  {plan.backward} [{plan.backward_level}]")
    found = plan.sizes()
    if found.num_splits > 1:
        lines.append(f"splits    {found.num_splits}")
    for kernel, c in plan.configs.items():
        lines.append(
            f"tiles     {kernel}: {c.block_m} x {c.block_n}, {c.num_warps} warps,"
            f" {c.num_stages} stages {c.words()}".rstrip()
            + f" ({plan.measured[kernel]})"
        )
    if plan.scheduler:
        lines.append(f"scheduler {plan.scheduler}")
    if plan.short_q:
        lines.append(f"sequences {words_of_sequences(plan)}")
    lines += _words_of(found)
    if plan.backward:
        lines += _words_of(plan.sizes(direction="backward"))
    lines += [f"note      {note}" for note in plan.notes]
    lines += [f"rejected  {r.backend} {r.direction}: {'; '.join(r.reasons)}" for r in plan.rejected]
    return "\n".join(lines)


def words_of_sequences(plan: Plan) -> str:
    """Which kernel handles which sequences of a mixed batch."""
    short = next(kernel for kernel in plan.configs if kernel in SHORT_KERNELS)
    return f"up to {plan.short_q} queries: {short}; longer ones: hopper.forward"


def _words_of(found: Sizes) -> list[str]:
    """Grids and scratch, line by line."""
    lines = []
    for kernel, launch in found.launches.items():
        grid = " x ".join(str(size) for size in launch.grid if size != 1) or "1"
        numbers = "".join(f", {name}={value}" for name, value in launch.numbers.items())
        lines.append(f"grid      {kernel}: {grid} programs{numbers}")
    if found.workspaces:
        words = ", ".join(f"{w.name} {w.buffer.nbytes}" for w in found.workspaces)
        lines.append(f"scratch   {words} bytes")
    return lines
