"""Programs of batches whose sequences have few queries or many: those of many run the Hopper
forward, those of few a decode kernel. Each writes rows of its own sequences alone."""

from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.core.tiles import DecodeConfig
from heedful.launch.bind import decode, hopper, hopper_decode
from heedful.launch.bind.groups import Buffers
from heedful.launch.spec import Program


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    long = hopper.forward(problem, plan, buffers)
    sizes = plan.sizes()
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    if hopper_decode.KERNEL in plan.configs:
        short = hopper_decode.decode_call(problem, plan, sizes, buffers)
    else:
        config = plan.configs["decode.forward"]
        assert isinstance(config, DecodeConfig)
        short = decode.decode_call(problem, plan, config, sizes, buffers)
    calls = (*long.calls, short, *decode.clear_calls(problem, buffers))
    return Program(calls, sizes.workspaces)
