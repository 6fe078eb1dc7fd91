"""Programs of batches whose sequences have few queries or many: those of many run the Hopper
forward, those of few a decode kernel. Each writes rows of its own sequences alone.

The decode kernel is first: whoever ends early leaves its place to a program of the forward, whose
tiles are drawn. It also has the L2 to itself, without lines that the forward wrote.
"""

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.launch.bind import decode, hopper, hopper_decode, split_kv
from heedful.launch.bind.groups import Buffers, with_scratch
from heedful.launch.spec import Program


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    schedule, long = hopper.forward(problem, plan, buffers).calls
    sizes = plan.sizes()
    buffers = with_scratch(buffers, sizes)
    bind = hopper_decode if plan.variant == "hopper" else decode
    short = bind.decode_call(problem, plan, sizes, buffers)
    calls = (schedule, short, long, *split_kv.clear_calls(problem, buffers))
    return Program(calls, sizes.workspaces)
