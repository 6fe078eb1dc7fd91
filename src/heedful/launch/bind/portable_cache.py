"""Programs that change a KV cache, and queries with it, before attention."""

from heedful.core.sizes import ceil_div
from heedful.core.tiles import cache_rows, pow2
from heedful.launch.bind.portable import Buffers, CallBuilder, stored_keys
from heedful.launch.spec import KernelCall, Program


def append_kv(
    buffers: Buffers, page_size: int = 0, interleaved: bool = True, position0: int = 0
) -> Program:
    """Writes k_new and v_new (B, S, G, dim) into the caches k and v, in place, and the number of
    keys that each sequence has then into seqused (B,). What lies outside of the caches is dropped;
    a sequence of negative length gets nothing and has no keys.

    buffers: k_new, v_new, k, v, seqused, cache_seqlens (B,): the storage row of each sequence's
    first new token; rotary_cos and rotary_sin (positions, rotary_dim / 2), block_table,
    kv_batch_idx, leftpad_k if the call has them. position0: what rotary positions count before
    the cache (a shared prefix).
    """
    batch, seqlen, heads, dim = buffers["k_new"].shape
    dim_v = buffers["v_new"].shape[-1]
    call = CallBuilder("kvcache", "append_keys", buffers, ("k_new", "v_new", "k", "v"))
    call.tensors(k_new="k_new", v_new="v_new", k="k", v="v")
    call.vectors("cache_seqlens", "block_table", "kv_batch_idx", "leftpad_k", "seqused")
    call.row_strides("kn", "k_new", "n")
    call.row_strides("vn", "v_new", "n")
    call.row_strides("k", "k", "n")
    call.row_strides("v", "v", "n")
    table = buffers.get("block_table")
    call.strides("table", "b", [table.strides[0] if table else 0])
    _rotary_arguments(call, buffers, position0)
    config = cache_rows(dim, dim_v)
    tiles = ceil_div(seqlen, config.rows)
    call.ints(
        seqlen=seqlen,
        heads=heads,
        tiles=tiles,
        capacity=stored_keys(buffers, page_size),
        entries=buffers["k"].shape[0],
        page_size=page_size,
    )
    built = call.build(
        (tiles * batch * heads, 1, 1),
        config,
        HEAD_DIM=dim,
        HEAD_DIM_V=dim_v,
        BLOCK_N=config.rows,
        BLOCK_D=pow2(dim),
        BLOCK_E=pow2(dim_v),
        IS_INTERLEAVED=interleaved,
    )
    return Program((built,))


def rotary(
    buffers: Buffers, interleaved: bool = True, advance: bool = True, position0: int = 0
) -> Program:
    """rotated = q (B, S, H, D) at positions cache_seqlens + position0 (+ row, if advance).

    buffers: q, rotated, cache_seqlens (B,), rotary_cos, rotary_sin.
    """
    batch, seqlen, heads, dim = buffers["q"].shape
    call = CallBuilder("kvcache", "rotate_queries", buffers, ("q", "rotated"))
    call.tensors(q="q", rotated="rotated")
    call.vectors("cache_seqlens")
    call.row_strides("q", "q", "m")
    call.row_strides("r", "rotated", "m")
    _rotary_arguments(call, buffers, position0)
    config = cache_rows(dim)
    tiles = ceil_div(seqlen, config.rows)
    call.ints(seqlen=seqlen, heads=heads, tiles=tiles, advance=int(advance))
    built: KernelCall = call.build(
        (tiles * batch * heads, 1, 1),
        config,
        HEAD_DIM=dim,
        BLOCK_M=config.rows,
        BLOCK_D=pow2(dim),
        IS_INTERLEAVED=interleaved,
    )
    return Program((built,))


def _rotary_arguments(call: CallBuilder, buffers: Buffers, position0: int) -> None:
    call.vectors("rotary_cos", "rotary_sin")
    cos = buffers.get("rotary_cos")
    if cos is not None and buffers["rotary_sin"].strides != cos.strides:
        raise ValueError("rotary_sin must have the strides of rotary_cos")
    call.strides("pos", "n", [cos.strides[0] if cos else 0])
    call.ints(
        half=cos.shape[1] if cos else 0,
        positions=cos.shape[0] if cos else 0,
        position0=position0,
    )
