"""Programs of the decode kernel."""

from collections.abc import Mapping

from heedful.core.call.problem import (
    ITEM_BITS,
    LATENT_ROW_GROUP,
    LATENT_ROWS,
    AttentionProblem,
)
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.core.registry.tiles import MERGE_ROWS, DecodeConfig, pow2
from heedful.kernels.args.decode import DecodeParams, DecodeTile, DecodeWork
from heedful.kernels.args.portable import CacheAppend
from heedful.kernels.args.shared import ForwardIO, KVLayout
from heedful.launch.bind import groups, split_kv
from heedful.launch.bind.groups import Buffers
from heedful.launch.bind.portable import (
    clear_outside_call,
    kernel_call,
    shared_divisor,
)
from heedful.launch.spec import KernelCall, Program, absent

# One query with four heads per KV head, the most common step.
FEWEST_ROWS = 4
KERNEL = "decode.forward"


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse if there is such a buffer."""
    if problem.varlen_q and not problem.batch:
        return Program((clear_outside_call(problem, buffers),), plan.sizes().workspaces)
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
    launch, config = sizes.launches[KERNEL], plan.configs[KERNEL]
    assert isinstance(config, DecodeConfig)
    divisor = shared_divisor(buffers, ("q", "k", "v", "out"))
    call = kernel_call(
        "decode.kernel.decode",
        launch.grid,
        config,
        io=groups.arrays(ForwardIO, buffers, divisor),
        params=DecodeParams(
            seqs=groups.sequences(
                problem, buffers, None if append is None else buffers["k_new"].shape[1]
            ),
            shape=groups.shape(problem),
            mask=groups.mask(problem, buffers),
            mods=groups.score_mods(problem, buffers),
            cache=_cache(problem, buffers, append is not None),
            descales=groups.descales(problem, buffers)._replace(KV_GROUP=group_of(problem)),
            work=_work(problem, plan, config, buffers, launch.numbers),
            append=append or absent(CacheAppend),
            tile=_tile(problem, config),
            FETCH_AHEAD=config.fetch_ahead,
        ),
    )
    registers = config.registers if plan.device.vendor == "nvidia" else 0
    return split_kv.within_registers(call, registers)


def _cache(problem: AttentionProblem, buffers: Buffers, is_written: bool) -> KVLayout:
    """The cache's group. Page sizes that are powers of two are constants, which saves a division
    for each key."""
    cache = groups.kv_layout(problem.page_size, buffers, is_written)
    size = problem.page_size
    return cache._replace(page_size=size) if size and size & (size - 1) == 0 else cache


def _work(
    problem: AttentionProblem,
    plan: Plan,
    config: DecodeConfig,
    buffers: Buffers,
    numbers: Mapping[str, int],
) -> DecodeWork:
    words = _words(problem, problem.head_dim_v, slices(problem, problem.head_dim_v))
    at_once = min(_rows(problem, config), MERGE_ROWS) * words
    return split_kv.work(
        problem,
        config,
        buffers,
        numbers,
        at_once,
        merge_stages=config.merge_stages,
        awaits_stores=plan.device.arch.startswith("gfx9"),  # CDNA
    )


def _tile(problem: AttentionProblem, config: DecodeConfig) -> DecodeTile:
    slices_d, slices_e = (slices(problem, d) for d in (problem.head_dim, problem.head_dim_v))
    once = loads_once(problem)
    words_e = _words(problem, problem.head_dim_v, slices_e)
    return groups.constants(
        DecodeTile,
        problem,
        config,
        BLOCK_D=words_e if once else _words(problem, problem.head_dim, slices_d),
        BLOCK_E=words_e,
        SLICES_D=slices_d,
        SLICES_E=slices_e,
        VALUES=values(problem),
        ROWS=_rows(problem, config),
        V_IN_K=once,
    )


def loads_once(problem: AttentionProblem) -> bool:
    """Whether values are read as a part of keys: they lie there, have a power of two columns, and
    no scales of groups."""
    dim = problem.head_dim_v
    return problem.v_in_k and not problem.kv_group and dim >= 64 and not dim & (dim - 1)


def _rows(problem: AttentionProblem, config: DecodeConfig) -> int:
    """Rows of a tile: one of the few numbers that have separate kernels, or the config's."""
    return FEWEST_ROWS if problem.seqlen_q * problem.group <= FEWEST_ROWS else config.block_m


def values(problem: AttentionProblem) -> int:
    """How many stored values a word has."""
    return 16 // ITEM_BITS[problem.kv_dtype]


def _words(problem: AttentionProblem, dim: int, slices: int) -> int:
    return pow2(-(-dim // (slices * values(problem))))


def group_of(problem: AttentionProblem) -> int:
    """How many values of a key share a scale; 0 if all do. Rows of latent vectors have scales of
    their own."""
    return LATENT_ROW_GROUP if problem.kv_dtype == LATENT_ROWS else problem.kv_group


def slices(problem: AttentionProblem, dim: int) -> int:
    """How many products a row of keys or values takes: one for each scale, if its group fills 16
    words."""
    group, each = group_of(problem), values(problem)
    words = group // each
    if not group or group >= dim or group % each or words < 16 or words & (words - 1):
        return 1
    return dim // group
