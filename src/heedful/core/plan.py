"""Which kernels run a problem on a device, and why the others do not.

Pure: it never queries a device, so it is tested for an MI355X on a laptop.
"""

from dataclasses import dataclass, field, replace

from heedful.core import capability, configs
from heedful.core.capability import KernelRow, Toolchain
from heedful.core.configs import ConfigRow, TileConfig
from heedful.core.device import DeviceSpec
from heedful.core.problem import AttentionProblem
from heedful.core.splits import choose_splits


@dataclass(frozen=True, slots=True)
class Rejection:
    """A kernel that was not chosen, with every reason."""

    backend: str
    direction: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The decision for one problem on one device.

    backend, level: of the forward; backward, backward_level: of the backward, None without one.
    configs: kernel name ("portable.forward", ...) -> its tiles; measured: where from.
    num_splits: how many splits of the keys there are, 1 = not split.
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
    num_splits: int = 1
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()


def plan(
    problem: AttentionProblem,
    device: DeviceSpec,
    toolchain: Toolchain | None = None,
    backend: str | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The best kernels for `problem` on `device`.

    backend: use this one; ValueError with every reason if it cannot. A backend that has no
    backward of its own leaves the backward to the next one. Raises ValueError where no kernel can.
    """
    if backend is not None and backend not in capability.backends():
        raise ValueError(
            f"backend must be one of {', '.join(capability.backends())} or None, got {backend!r}"
        )
    problem.validate()
    forward, rejected = _choose("forward", problem, device, toolchain, backend)
    backward = None
    if problem.needs_grad:
        has_own = any(row.backend == backend for row in capability.rows("backward"))
        backward, more = _choose(
            "backward", problem, device, toolchain, backend if has_own else None
        )
        rejected += more
        if problem.page_size and backward.gathers_pages:
            notes += ("the backward copies each sequence's pages into dense keys first",)
    tiles = _configs(problem, device, forward.backend, backward.backend if backward else None)
    return Plan(
        problem,
        device,
        forward.backend,
        forward.level(device) or "",
        backward.backend if backward else None,
        backward.level(device) if backward else None,
        {kernel: row.config for kernel, row in tiles.items()},
        {kernel: row.measured for kernel, row in tiles.items()},
        _splits(forward, tiles, problem, device),
        rejected,
        notes,
    )


def _choose(direction, problem, device, toolchain, backend) -> tuple[KernelRow, tuple]:
    """The first row that can, and the rejections on the way."""
    chosen, rejected, named = None, [], []
    for row in _rows(direction, problem.dtype):
        reasons = row.why_not(problem, device, toolchain)
        if row.backend == backend:
            named += reasons
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
    """One row of each backend: that for this dtype, or where there is none its first, to say so."""
    kept: dict[str, KernelRow] = {}
    for row in capability.rows(direction):
        if row.backend not in kept or (
            dtype in row.dtypes and dtype not in kept[row.backend].dtypes
        ):
            kept[row.backend] = row
    return list(kept.values())


def stored_as(plan: Plan, **facts: bool) -> Plan:
    """The plan for tensors stored otherwise, of which its backward makes no reason against it.

    facts: aligned and even_rows, as in AttentionProblem.
    """
    problem = replace(plan.problem, **facts)
    if problem == plan.problem:
        return plan
    tiles = _configs(problem, plan.device, plan.backend, plan.backward)
    return replace(
        plan, problem=problem, configs={kernel: row.config for kernel, row in tiles.items()}
    )


def _configs(problem, device, forward: str, backward: str | None) -> dict[str, ConfigRow]:
    """The config row of every kernel that takes part."""
    kernels = dict.fromkeys(row.kernel for row in configs.ROWS)
    return {
        kernel: configs.choose(kernel, problem, device)
        for kernel in kernels
        if _takes_part(kernel, problem, forward, backward)
    }


def _takes_part(kernel: str, problem, forward: str, backward: str | None) -> bool:
    """Whether a kernel (backend.name) can be launched by these backends for this problem."""
    backend, name = kernel.split(".")
    if name.startswith("backward"):
        return backend == backward
    if name == "scores":
        # Made anew, from the log-sum-exp, for the tests and for the gradient of the bias.
        return (problem.return_probs and backend == forward) or (
            problem.bias_grad and backend == backward
        )
    return backend == forward


def _splits(row: KernelRow, chosen: dict[str, ConfigRow], problem, device) -> int:
    if "split_kv" not in row.features:
        return 1
    found = chosen.get(f"{row.backend}.forward")
    if found is None:
        # A CPU chooses no splits: its threads share what there is.
        return max(1, problem.num_splits)
    if problem.return_probs:
        return 1
    config = found.config
    return choose_splits(problem, device, config.block_m, config.block_n, config.pack_gqa(problem))


def explain(plan: Plan) -> str:
    """The decision in words, line by line."""
    lines = [
        f"problem   {plan.problem.key()}",
        f"device    {plan.device.name} ({plan.device.arch})",
    ]
    lines.append(f"forward   {plan.backend} [{plan.level}]")
    if plan.backward:
        lines.append(f"backward  {plan.backward} [{plan.backward_level}]")
    if plan.num_splits > 1:
        lines.append(f"splits    {plan.num_splits}")
    for kernel, c in plan.configs.items():
        extra = "".join(f" {name}={value}" for name, value in c.extra)
        lines.append(
            f"tiles     {kernel}: {c.block_m} x {c.block_n}, {c.num_warps} warps,"
            f" {c.num_stages} stages{extra} ({plan.measured[kernel]})"
        )
    lines += [f"note      {note}" for note in plan.notes]
    lines += [f"rejected  {r.backend} {r.direction}: {'; '.join(r.reasons)}" for r in plan.rejected]
    return "\n".join(lines)
