"""Programs of mixed batches: the Hopper forward handles sequences of many queries, a decode kernel
those of few. Each writes rows of its sequences alone. The decode kernel runs first: when one of its
programs ends, one of the forward takes its place and draws tiles. The decode also has an L2 without
lines that the forward wrote.
"""

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.launch.bind import decode, hopper, hopper_decode, split_kv
from heedful.launch.bind.groups import Buffers, with_scratch
from heedful.launch.spec import Program


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse if there is such a buffer."""
    schedule, long = hopper.forward(problem, plan, buffers).calls
    sizes = plan.sizes()
    buffers = with_scratch(buffers, sizes)
    bind = hopper_decode if plan.variant == "hopper" else decode
    short = bind.decode_call(problem, plan, sizes, buffers)
    calls = (schedule, short, long, *split_kv.clear_calls(problem, buffers))
    return Program(calls, sizes.workspaces)
