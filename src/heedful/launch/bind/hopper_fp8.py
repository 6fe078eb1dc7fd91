"""Programs of the Hopper fp8 forward: V is transposed into scratch, then attention runs over it."""

from heedful.core.base.symbols import larger
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import LaunchSizes
from heedful.core.registry.tiles import (
    CONSUMER_ROWS,
    TRANSPOSE_SEQUENCES,
    V_T_DIMS,
    V_T_KEYS,
    HopperFp8Config,
    tile_dim,
)
from heedful.kernels.args.hopper import TransposeIO, TransposeSizes, TransposeV
from heedful.kernels.args.kinds import Rows
from heedful.launch.bind import groups, hopper_groups
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.groups import Buffers, pointer, stride, with_scratch
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Program, Scalar, TensorMap


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse if there is such a buffer."""
    sizes, config = plan.sizes(), plan.configs["hopper.fp8_forward"]
    assert isinstance(config, HopperFp8Config)
    buffers = with_scratch(buffers, sizes)
    results = {"out": "out", "lse": "lse"}
    calls: list[KernelCall] = []
    if problem.varlen_q:
        calls.append(hopper_groups.varlen_call(problem, config, sizes, buffers, results))
    if not config.transposes_v:
        calls.append(_transpose_call(problem, sizes.launches["hopper.transpose_v"], buffers))
    launch = sizes.launches["hopper.fp8_forward"]
    transpose = _transpose(problem, launch, buffers) if config.transposes_v else None
    tensor_maps = _maps(problem, config, buffers)
    call = hopper_groups.forward_call(
        problem, config, launch, buffers, tensor_maps, transpose=transpose
    )
    calls.append(call)
    return Program(tuple(calls), sizes.workspaces)


def _transpose_call(problem: AttentionProblem, launch: LaunchSizes, buffers: Buffers) -> KernelCall:
    v = buffers["v"]
    batch = 0 if problem.varlen_k else v.strides[0]
    strides = (stride(s, 16) for s in (batch, v.strides[-3], v.strides[-2]))
    parameters = {
        "io": groups.arrays(
            TransposeIO,
            buffers,
            v=Rows(Pointer("v", "uint8"), *strides),
            v_t=Pointer("v_t", "uint8"),
            cu_k=pointer(buffers, "cu_seqlens_k"),
        ),
        "sizes": TransposeSizes(
            heads_k=Scalar(problem.heads_k),
            seqlen_k=Scalar(groups.stored_keys(buffers, 0)),
            blocks=Scalar(launch.numbers["blocks"]),
            batch=Scalar(problem.batch),
            dim_v=Scalar(problem.head_dim_v, divisor=16),
            padded_k=_padded_k(buffers),
        ),
        "BLOCK_N": V_T_KEYS,
        "BLOCK_E": tile_dim(problem.head_dim_v),
        "BLOCK_B": TRANSPOSE_SEQUENCES,
    }
    ref = KernelRef("heedful.kernels.hopper.fp8.transpose_v_kernel", "transpose_v")
    return KernelCall(ref, launch.grid, parameters, {"num_warps": 4})


def _padded_k(buffers: Buffers) -> Scalar:
    return Scalar(buffers["v_t"].shape[-1], divisor=V_T_KEYS)


def _maps(
    problem: AttentionProblem, config: HopperFp8Config, buffers: Buffers
) -> dict[str, TensorMap]:
    q_dim, v_dim = tile_dim(problem.head_dim), tile_dim(problem.head_dim_v)
    map_q = maps.packed_map if problem.varlen_q else maps.dense_map
    map_k = maps.packed_map if problem.varlen_k else maps.dense_map
    v_t, box = buffers["v_t"], (1, 1, v_dim, config.block_n)
    layout = maps.layout(v_t, 4, config.block_n)
    return {
        "q": map_q("q", buffers["q"], CONSUMER_ROWS, q_dim),
        "k": map_k("k", buffers["k"], config.block_n, q_dim),
        "v": TensorMap("v_t", v_t.dtype, v_t.shape, v_t.strides, box, layout),
        "out": map_q("out", buffers["out"], CONSUMER_ROWS, v_dim),
    }


def _transpose(problem: AttentionProblem, launch: LaunchSizes, buffers: Buffers) -> TransposeV:
    """The arguments of the attention kernel's warps that transpose V, in tiles of V_T_KEYS x
    V_T_DIMS."""
    dim = tile_dim(problem.head_dim_v)
    tiles = buffers["v_t"].shape[-1] // V_T_KEYS * (dim // V_T_DIMS)
    l2_heads, l2_groups = launch.numbers["l2_heads"], launch.numbers["l2_groups"]
    heads = larger(1, l2_heads // problem.group)
    return TransposeV(
        v=maps.dense_map("v", buffers["v"], V_T_KEYS, V_T_DIMS),
        v_t=Pointer("v_t", "uint8"),
        counts=Pointer("v_t_counts", "int32"),
        heads_k=Scalar(problem.heads_k),
        dim_v=Scalar(problem.head_dim_v),
        padded_k=_padded_k(buffers),
        tiles=Scalar(problem.batch * problem.heads_k * tiles),
        l2_heads=Scalar(heads),
        l2_groups=Scalar(l2_heads * l2_groups // problem.group // heads),
        E=dim,
    )
