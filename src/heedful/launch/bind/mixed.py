"""Programs of batches whose sequences have few queries or many: those of many run the Hopper
forward, those of few the decode kernel. Each writes rows of its own sequences alone."""

from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.core.tiles import DecodeConfig
from heedful.launch.bind import decode, hopper
from heedful.launch.bind.groups import Buffers
from heedful.launch.spec import Program


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    long = hopper.forward(problem, plan, buffers)
    sizes, config = plan.sizes(), plan.configs["decode.forward"]
    assert isinstance(config, DecodeConfig)
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    short = decode.decode_call(problem, plan, config, sizes, buffers)
    calls = (*long.calls, short, *decode.clear_calls(problem, buffers))
    return Program(calls, sizes.workspaces)
