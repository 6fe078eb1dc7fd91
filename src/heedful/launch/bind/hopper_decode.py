"""Programs of the Hopper decode."""

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import LEAST_COLUMNS, Sizes
from heedful.core.registry.tiles import (
    HopperDecodeConfig,
    pow2,
)
from heedful.kernels.args import hopper_decode as args
from heedful.kernels.args.portable import CacheAppend
from heedful.launch.bind import groups, split_kv
from heedful.launch.bind.groups import Buffers
from heedful.launch.bind.hopper import key_map
from heedful.launch.bind.hopper_groups import kv_rows
from heedful.launch.bind.portable import shared_divisor
from heedful.launch.spec import KernelCall, KernelRef, Program, absent

# By kernel of the plan.
_REFS = {
    "hopper_decode.forward": KernelRef("heedful.kernels.hopper.decode.kernel", "decode", "gluon"),
    "hopper_decode.wide_forward": KernelRef(
        "heedful.kernels.hopper.decode_wide.kernel", "decode_wide", "gluon"
    ),
}


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse if there is such a buffer."""
    return split_kv.forward(problem, plan, buffers, decode_call)


def step(plan: Plan, buffers: Buffers, interleaved: bool, position0: int) -> Program:
    """The forward, whose kernel appends and rotates first: see `launch.program.programs.step`."""
    return split_kv.step(plan, buffers, interleaved, position0, decode_call)


def decode_call(
    problem: AttentionProblem,
    plan: Plan,
    sizes: Sizes,
    buffers: Buffers,
    append: CacheAppend | None = None,
) -> KernelCall:
    """The kernel's launch, for all sequences or for the short ones, as the plan says. append: the
    group of new keys and values, if it writes them into the cache first."""
    kernel = next(name for name in plan.configs if name in _REFS)
    launch, config = sizes.launches[kernel], plan.configs[kernel]
    assert isinstance(config, HopperDecodeConfig)
    divisor = shared_divisor(buffers, ("q", "out"))
    dims = {"k": _columns(problem.head_dim), "v": _columns(problem.head_dim_v)}
    found = {n: key_map(problem, buffers, n, config.block_n, dim) for n, dim in dims.items()}
    io = groups.arrays(args.HopperDecodeIO, buffers, divisor, **found)
    tile = groups.constants(
        args.HopperDecodeTile,
        problem,
        config,
        BLOCK_D=dims["k"],
        BLOCK_E=dims["v"],
        STAGES=config.num_stages,
        ROWS=config.kept_rows(problem),
        FEW_ROWS=config.fewest_rows(problem),
    )
    new, appended = None, absent(args.HopperDecodeAppend)
    if append is not None:
        new = buffers["k_new"].shape[1]
        appended = args.HopperDecodeAppend(append.rotary, append.io, append.advance)
    call = split_kv.hopper_call(
        _REFS[kernel],
        problem,
        config,
        launch,
        buffers,
        io,
        kv_rows(problem, buffers),
        tile,
        new,
        clears_empty=True,
        append=appended,
    )
    return split_kv.within_registers(call, config.registers)


def _columns(dim: int) -> int:
    """The columns of a tile, a power of two; those past the head dim are zeros."""
    return pow2(dim, LEAST_COLUMNS)
