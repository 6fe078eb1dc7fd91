"""Programs of a cluster meet, load tiles for each other, and release them.

A cluster has CLUSTER programs; 1 is a program by itself. An address of shared memory has the
program's place in its cluster in bits 24 and up. Addresses in inline assembly lack it, so `base`, a
program's place times 2^24, is added where an instruction takes a local address.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import inline_asm, tma_load


@gluon.jit
def place_in_cluster(CLUSTER: gl.constexpr):
    """The program's number in its cluster."""
    if CLUSTER == 1:
        return gl.to_tensor(0)
    else:
        return inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True)


@gluon.jit
def has_tile(params, scheduler, index):
    """Whether there is a work tile of this number: packed sequences may have fewer than
    programs."""
    if params.order.varlen_tiles is None:
        return gl.to_tensor(True)
    else:
        return index < scheduler.count


@gluon.jit
def tell_barriers(CLUSTER: gl.constexpr):
    """Makes initialised barriers known to the cluster, before `meet`."""
    if CLUSTER > 1:
        inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}", [])


@gluon.jit
def meet(CLUSTER: gl.constexpr):
    """Waits for all warps of all programs of the cluster."""
    if CLUSTER > 1:
        text: gl.constexpr = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
        inline_asm(text, "~{memory}", [])


@gluon.jit
def wait(bar, parity, base):
    """Waits until `bar` has completed the phase of this parity."""
    inline_asm(
        "{ .reg .pred done; .reg .b32 a; or.b32 a, $0, $2;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [a], $1;\n"
        "@!done bra.uni AGAIN; }",
        "r,r,r,~{memory}",
        [bar, parity, base],
    )


@gluon.jit
def arrive_each_warp(bar, base):
    """One arrival of each warp, after the work of its threads."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 t, a; or.b32 a, $0, $1;\n"
        "mov.u32 t, %laneid; setp.eq.u32 first, t, 0;\n"
        "bar.warp.sync 0xffffffff;\n"
        "@first mbarrier.arrive.shared::cta.b64 _, [a]; }",
        "r,r,~{memory}",
        [bar, base],
    )


@gluon.jit
def arrive_after_mma(bar, base):
    """One arrival of a warpgroup, as `barrier.arrive_after_mma`."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 t, a; or.b32 a, $0, $1;\n"
        "mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 first, t, 0;\n"
        "@first mbarrier.arrive.shared::cta.b64 _, [a]; }",
        "r,r,~{memory}",
        [bar, base],
    )


@gluon.jit
def release_after_mma(bar, base, CLUSTER: gl.constexpr):
    """One arrival of a warpgroup at this barrier of each program of the cluster."""
    if CLUSTER == 1:
        arrive_after_mma(bar, base)
    else:
        inline_asm(
            "{ .reg .pred first; .reg .b32 t, a; mov.u32 t, %tid.x; and.b32 t, t, 127;\n"
            "setp.eq.u32 first, t, 0; and.b32 a, $0, 0xffffff;\n"
            "@first mbarrier.arrive.shared::cluster.b64 _, [a];\n"
            "or.b32 a, a, 0x1000000;\n"
            "@first mbarrier.arrive.shared::cluster.b64 _, [a]; }",
            "r,~{memory}",
            [bar],
        )


@gluon.constexpr_function
def parameters_of(desc):
    """Parameters of the kernel that a tensor map takes: itself, its shape and its strides."""
    return 1 + 2 * len(desc.block_type.shape)


@gluon.constexpr_function
def _multicast(rank, place):
    """Assembly of one lane that loads a box for both programs. rank: dims of the tensor map. place:
    the map's number among the kernel's parameters."""
    # The map's coordinates, the innermost first.
    at = ", ".join(f"${1 + rank - i}" for i in range(rank))
    return (
        "{ .reg .pred first; .reg .b32 t; .reg .b16 both; .reg .b64 map;\n"
        "mov.u32 t, %laneid; setp.eq.u32 first, t, 0; mov.b16 both, 3;\n"
        f"mov.b64 map, forward_wide_param_{place}; cvta.param.u64 map, map;\n"
        f"@first cp.async.bulk.tensor.{rank}d.shared::cluster.global"
        ".mbarrier::complete_tx::bytes.multicast::cluster"
        f" [$0], [map, {{{at}}}], [$1], both; }}"
    )


@gluon.jit
def load_for_all(desc, at, full, memory, CLUSTER: gl.constexpr, NUMBER: gl.constexpr):
    """Starts loading a box to this memory of all programs of the cluster, which counts towards the
    barrier `full` of each. at: coordinates of four or five dims. NUMBER: the map's number among the
    kernel's parameters."""
    if CLUSTER == 1:
        tma_load(desc, at, full, memory)
    else:
        RANK: gl.constexpr = len(desc.block_type.shape)
        text: gl.constexpr = _multicast(RANK, NUMBER)
        kinds: gl.constexpr = "r,r," + "r," * RANK + "~{memory}"
        if RANK == 4:
            inline_asm(text, kinds, [memory, full, at[0], at[1], at[2], at[3]])
        else:
            inline_asm(text, kinds, [memory, full, at[0], at[1], at[2], at[3], at[4]])
