"""One device's attention: the planner's choice of kernels, and their run."""

from typing import Any

from jax import Array
from jax import numpy as jnp

from heedful.core.base import settings
from heedful.core.base.device import lent
from heedful.core.call.numerics import backend_of, margin_of
from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.log import decision
from heedful.core.planning.plan import Plan, plan
from heedful.jax.base import device
from heedful.jax.tiled import scan as tiled


def planned(platform: str, problem: AttentionProblem, backend: str | None) -> Plan:
    """The plan of a problem on the devices of a platform. Raises ValueError with every reason where
    no kernel, or not the named one, can run it."""
    spec = device.device_spec(platform)
    named = backend_of(backend) or settings.get("backend")
    chosen = plan(problem, lent(spec, margin_of(backend)), device.toolchain(spec), named)
    decision(chosen)
    return chosen


def forward(
    platform: str,
    problem: AttentionProblem,
    x: Operands,
    origin: Array | None,
    backend: str | None,
) -> tuple:
    """(out, lse or None, its rest or None, probs, largest scores or None)."""
    chosen = planned(platform, problem, backend)
    if chosen.device.vendor == "cpu":
        out, lse, probs = tiled.forward(problem, x, origin)
        if problem.keeps_rest:
            lse, total = tiled.norms(problem, x, lse, origin)
            return out, lse, jnp.log(total), probs
        return out, lse if problem.makes_lse else None, None, probs
    from heedful.jax.gpu import programs as gpu

    return gpu.forward(chosen, x, origin)


def backward(
    platform: str,
    problem: AttentionProblem,
    x: Operands,
    origin: Array | None,
    saved: list[Any],
    backend: str | None,
) -> Gradients:
    """Gradients of the operands. saved: out, lse, dout, dlse or None."""
    chosen = planned(platform, problem, backend)
    if chosen.device.vendor == "cpu":
        return tiled.backward(problem, x, *saved, origin=origin)
    from heedful.jax.gpu import programs as gpu

    return gpu.backward(chosen, x, origin, saved)
