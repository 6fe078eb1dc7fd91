"""Products over tiles whose width is not a power of two: 192 columns are 128 and 64.

pipeline.py says how such a tile lies in memory. An output is a tuple with one tensor for each part.

M query rows, N keys, D qk columns of one part, E value columns of one part.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.softmax import scale_rows

ROWS: gl.constexpr = gl.constexpr(64)  # one WGMMA takes 64 query rows, those of one consumer


@gluon.constexpr_function
def scores_layout(dtype, keys, warps=4):
    """The register layout of a product of queries and `keys` keys of this dtype. With eight warps,
    both warpgroups have all of it, as far as the compiler knows."""
    return gl.NVMMADistributedLayout(
        [3, 0], [warps, 1], [16, keys, 256 // dtype.primitive_bitwidth]
    )


@gluon.constexpr_function
def _in_place(numbers):
    """Constraints: a thread's numbers stay in their registers."""
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)])


def started(x, _semantic=None):
    """The registers of a product that may still run."""
    return gl.tensor(x.handle, getattr(x.type, "tensor_type", x.type))


started.__triton_builtin__ = True


@gluon.jit
def wait_products(x, under_way: gl.constexpr = 0):
    """A product, once at most `under_way` queued later still run. Unlike Triton's wait, this does
    not make one warpgroup of eight warps wait for the other."""
    if gl.num_warps() == 4:
        return warpgroup_mma_wait(under_way, deps=[x])
    else:
        x = started(x)
        text: gl.constexpr = f"wgmma.wait_group.sync.aligned {under_way};"
        operands: gl.constexpr = _in_place(x.shape[0] * x.shape[1] // 128)
        return inline_asm(text, operands, [x], x.type)


@gluon.jit
def queue_scores(q, k, q_state, k_state, BLOCK_N: gl.constexpr):
    """Starts q k^T of one tile of keys."""
    layout: gl.constexpr = scores_layout(q.boxes.dtype, BLOCK_N)
    s_MN = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    k_DN = k.tile(k_state).permute((1, 0))
    s_MN = warpgroup_mma(q.tile(q_state), k_DN, s_MN, use_acc=False, is_async=True)
    if k.tails is not None:
        k_DN = k.tail(k_state).permute((1, 0))
        s_MN = warpgroup_mma(q.tail(q_state), k_DN, s_MN, is_async=True)
    return s_MN


@gluon.jit
def no_output(v, params):
    """An output of zeros, with as many parts as a tile of values has."""
    E: gl.constexpr = v.rows if params.tile.V_TRANSPOSED else v.dim
    layout: gl.constexpr = scores_layout(v.boxes.dtype, E)
    acc = (gl.zeros([ROWS, E], gl.float32, layout),)
    if v.tails is not None:
        E1: gl.constexpr = v.dim // 2
        layout_1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E1, 16])
        acc = acc + (gl.zeros([ROWS, E1], gl.float32, layout_1),)
    return acc


@gluon.jit
def queue_output(p_MN, v, v_state, acc):
    """Starts adding p times one tile of values to each part of the output."""
    out = (warpgroup_mma(p_MN, v.tile(v_state), acc[0], is_async=True),)
    if v.tails is not None:
        p_MN = gl.convert_layout(p_MN, gl.DotOperandLayout(0, acc[1].type.layout, 2))
        out = out + (warpgroup_mma(p_MN, v.tail(v_state), acc[1], is_async=True),)
    return out


@gluon.jit
def finish_output(acc):
    """The output, after all queued products are done."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(0, deps=[acc[0]]),)
    else:
        return warpgroup_mma_wait(0, deps=[acc[0], acc[1]])


@gluon.jit
def scale_output(acc, alpha_M):
    """Multiplies row m of each part by alpha_M[m]."""
    out = ()
    for part in gl.static_range(len(acc)):
        out = out + (scale_rows(acc[part], alpha_M),)
    return out
