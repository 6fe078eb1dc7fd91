"""Programs as calls of compiled kernels in XLA: a custom call for each launch, memory from XLA.

jaxlib passes arrays in the order of a kernel's parameters: first the call's operands, then its
results. An array that is written before the last one that is read must therefore be an operand that
shares memory with a result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
from jax import Array
from jax import numpy as jnp

from heedful.core.base import settings
from heedful.core.base.arrays import ArraySpec
from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Workspace
from heedful.jax.gpu import triton_call
from heedful.jax.gpu.empty import empty
from heedful.launch import foreign
from heedful.launch.foreign import ForeignLaunch, TensorMapParameter
from heedful.launch.program import programs
from heedful.launch.program.buffers import BEGINNINGS
from heedful.launch.program.buffers import results as results_of
from heedful.launch.spec import Pointer, Program


def forward(plan: Plan, x: Operands, origin: Array | None) -> tuple:
    """(out, lse or None, its rest or None, probs, largest scores or None)."""
    problem = plan.problem
    arrays, specs = _operands(problem, x, origin)
    made = results_of(problem)
    for name in BEGINNINGS.keys() & made.keys():
        shape, dtype = _type_of(made[name])
        arrays[name] = jnp.full(shape, BEGINNINGS[name], dtype)
    done = run(_program(plan, "forward", specs | made), plan.device.arch, arrays, made, "forward")
    more = done.get("probs", done.get("max_scores"))
    return done["out"], done.get("lse"), done.get("rest"), more


def step(
    plan: Plan,
    x: Operands,
    new: Mapping[str, Array],
    changed: list[str],
    interleaved: bool,
    position0: int,
) -> list[Array]:
    """The arrays that a call over a cache changes, by these names, and then out and, if it is made,
    lse.

    x: without seqused_k. new, interleaved, position0: as `launch.program.programs.step` has them.
    """
    problem = plan.problem
    arrays, specs = _operands(problem, x, None)
    if "rotary_cos" in new:
        arrays["q_new"], specs["q_new"] = arrays.pop("q"), specs.pop("q")
    arrays |= new
    specs |= {name: _spec(array) for name, array in new.items()}
    made = results_of(problem)
    results = {name: specs[name] for name in changed} | made
    _, steps = programs.runnable(
        plan, "forward", lambda by: programs.step(by, specs | made, interleaved, position0)
    )
    return [*run(steps, plan.device.arch, arrays, results, "step").values()]


def backward(plan: Plan, x: Operands, origin: Array | None, saved: list[Any]) -> Gradients:
    """Gradients of the operands. saved: out, lse, dout, dlse or None."""
    from heedful.jax.gpu import pages

    if plan.problem.page_size:
        return pages.backward(plan, x, saved, lambda p, y, s: _dense_backward(p, y, origin, s))
    return _dense_backward(plan, x, origin, saved)


def _dense_backward(plan: Plan, x: Operands, origin: Array | None, saved: list[Any]) -> Gradients:
    problem = plan.problem
    arrays, specs = _operands(problem, x, origin)
    for name, array in zip(("out", "lse", "dout", "dlse"), saved, strict=True):
        if array is not None:
            arrays[name], specs[name] = array, _spec(array)
    made = {f"d{name}": specs[name] for name in "qkv"}
    if problem.bias_grad:
        made["dbias"] = _spec(x.bias)
    if problem.sink:
        made["dsink"] = specs["sink"]
    if problem.rel_bias_grad:
        made["drel_bias"] = specs["rel_bias"]
    made = {name: ArraySpec.contiguous(spec.shape, spec.dtype) for name, spec in made.items()}
    done = run(_program(plan, "backward", specs | made), plan.device.arch, arrays, made, "backward")
    return Gradients(*(done.get(name) for name in Gradients._fields))


def _program(plan: Plan, direction: str, specs: Mapping[str, ArraySpec]) -> Program:
    """The program of a direction, of this plan or of one without packs."""
    make = partial(programs.program, direction=direction, buffers=specs)
    return programs.runnable(plan, direction, make)[1]


def _operands(problem: AttentionProblem, x: Operands, origin: Array | None):
    """The arrays of a call by name, and their specs for kernels: broadcast dims have their full
    size and a stride of 0."""
    if origin is not None:
        x = x._replace(seed=jnp.concatenate([x.seed, _wide(origin)]))
    arrays = {name: array for name, array in x._asdict().items() if array is not None}
    specs = {name: _spec(array) for name, array in arrays.items()}
    whole = {
        "bias": (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k),
        "alibi_slopes": (problem.batch, problem.heads_q),
        "tree_mask": (problem.batch, problem.seqlen_q, problem.seqlen_q),
    }
    if not problem.varlen_q:
        rows = (problem.batch, problem.heads_q, problem.seqlen_q)
        whole["key_ranges"] = (*rows, 2 * problem.key_ranges)
    for name in ("block_rows", "block_keys"):
        if name in specs:
            whole[name] = (problem.batch, problem.heads_q, *specs[name].shape[2:])
    if not problem.kv_group:
        scales = ("q_descale", "k_descale", "v_descale", "k_shift", "v_shift")
        whole |= {name: (problem.batch, problem.heads_k) for name in scales}
    for name, shape in whole.items():
        if name in specs:
            specs[name] = expanded(specs[name], shape)
    if "seed" in specs:
        specs["seed"] = ArraySpec.contiguous((arrays["seed"].size // 2,), "int64")
    return arrays, specs


def _wide(words: Array) -> Array:
    """uint32 words as int64 has them, low words first."""
    return jnp.stack([words, jnp.zeros_like(words)], -1).reshape(-1)


def expanded(spec: ArraySpec, shape: tuple[int, ...]) -> ArraySpec:
    """The array as kernels see it: its dims of 1 repeat up to a shape, by strides of 0."""
    padded = (1,) * (len(shape) - len(spec.shape)) + spec.shape
    dense = ArraySpec.contiguous(padded, spec.dtype)
    steps = (
        s if n == whole else 0 for s, n, whole in zip(dense.strides, padded, shape, strict=True)
    )
    return ArraySpec(shape, tuple(steps), spec.dtype)


def _spec(array: Array) -> ArraySpec:
    from heedful.jax.base.arrays import array_spec

    return array_spec(array)


def run(
    made: Program,
    arch: str,
    arrays: Mapping[str, Array],
    results: Mapping[str, ArraySpec],
    name: str,
) -> dict[str, Array]:
    """The results of a program, by name. arrays: its inputs, by name; those that it also writes are
    returned as results.

    Raises ValueError for more scratch than HEEDFUL_WORKSPACE_LIMIT_MB allows.
    """
    check_scratch(made.workspaces)
    _load_handlers()
    memory = Memory(dict(arrays), results, made.workspaces)
    for call, launch in zip(made.calls, foreign.describe(made, arch).launches, strict=True):
        if 0 not in launch.grid:
            with jax.named_scope(f"heedful_{name}_{call.kernel.function}"):
                memory.launch(launch, call.kernel.function)
    return {name: memory.array(name) for name in results}


def check_scratch(workspaces: tuple[Workspace, ...]) -> None:
    """ValueError for more scratch than a call may have."""
    limit, size = settings.get("workspace_limit"), sum(w.buffer.nbytes for w in workspaces)
    if limit is not None and size > limit:
        raise ValueError(
            f"HEEDFUL_WORKSPACE_LIMIT_MB allows {limit} bytes of scratch, this call needs {size}"
        )


@lru_cache(1)
def _load_handlers() -> None:
    """Makes jaxlib register its kernel calls for the platforms that have them. A program may be
    built without, to be exported."""
    from jaxlib import gpu_triton  # noqa: F401


@dataclass(frozen=True)
class Slots:
    """How the arrays of a launch become operands and results of a custom call.

    operands: names in order. results: names in order; those of the first `placed` are parameters
    after the operands, the rest share the memory of operands alone. aliases: operand -> result.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    aliases: dict[int, int]


def slots(order: tuple[str, ...], writes: frozenset[str], live: frozenset[str]) -> Slots:
    """The operands and results for arrays in the order of their parameters.

    writes: those that the kernel writes. live: those that have contents already.

    Raises RuntimeError for an array that is written and comes in ways that cannot be expressed.
    """
    end = len(order)
    while end and order[end - 1] in writes and order[end - 1] not in order[end:]:
        name = order[end - 1]
        before = order[: end - 1].count(name)
        if before > 1 or (not before and name in live):
            break
        end -= 1
    operands = order[:end]
    rest = tuple(dict.fromkeys(name for name in operands if name in writes))
    results = (*order[end:], *(name for name in rest if name not in order[end:]))
    aliases = {}
    for index, name in enumerate(operands):
        if name in writes:
            if operands.count(name) > 1:
                raise RuntimeError(f"{name} is written, and more than one operand of a launch")
            aliases[index] = results.index(name)
    return Slots(operands, results, aliases)


class Memory:
    """The arrays of a running program by name: each written one is another value afterwards."""

    def __init__(
        self,
        arrays: dict[str, Array],
        results: Mapping[str, ArraySpec],
        workspaces: tuple[Workspace, ...],
    ):
        self._arrays = arrays
        self._specs = dict(results) | {w.name: w.buffer for w in workspaces}
        self._zeroed = {w.name: w.buffer.nbytes for w in workspaces if w.zeroed}

    def array(self, name: str) -> Array:
        """The array, zeros where nothing wrote it."""
        if name not in self._arrays:
            shape, dtype = _type_of(self._specs[name])
            self._arrays[name] = jnp.zeros(shape, dtype)
        return self._arrays[name]

    def launch(self, launch: ForeignLaunch, name: str) -> None:
        """Appends a launch to the program."""
        places = [
            (index, p.buffer)
            for index, p in enumerate(launch.parameters)
            if isinstance(p, (Pointer, TensorMapParameter))
        ]
        order = tuple(buffer for _, buffer in places)
        slot_order = slots(order, launch.writes, frozenset(self._arrays))
        zeroed = {}
        for index, buffer in places:
            # Before the first launch that has it.
            if buffer in self._zeroed and isinstance(launch.parameters[index], Pointer):
                zeroed[index] = self._zeroed.pop(buffer)
        operands = [self._operand(buffer) for buffer in slot_order.operands]
        types = [jax.ShapeDtypeStruct(*self._type(buffer)) for buffer in slot_order.results]
        call = jax.ffi.ffi_call(
            triton_call.TARGET, types, input_output_aliases=slot_order.aliases, vmap_method=None
        )
        made = call(*operands, opaque=triton_call.opaque(launch, name, zeroed))
        self._arrays.update(zip(slot_order.results, made, strict=True))

    def _operand(self, name: str) -> Array:
        if name in self._arrays:
            return self._arrays[name]
        shape, dtype = _type_of(self._specs[name])
        return empty(shape, dtype, name)

    def _type(self, name: str) -> tuple[tuple[int, ...], Any]:
        if name in self._arrays:
            array = self._arrays[name]
            return array.shape, array.dtype
        return _type_of(self._specs[name])


def _type_of(spec: ArraySpec) -> tuple[tuple[int, ...], Any]:
    return tuple(spec.shape), jnp.dtype(spec.dtype)
