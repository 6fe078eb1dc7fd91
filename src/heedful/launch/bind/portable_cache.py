"""Programs that change a KV cache, and queries with it, before attention."""

from collections.abc import Sequence

from heedful.core.sizes import Workspace, ceil_div
from heedful.core.tiles import cache_rows, pow2
from heedful.kernels.args.portable import AppendIO, RotateIO
from heedful.launch.bind import groups
from heedful.launch.bind.groups import Buffers, pointer, scalars, stored_keys
from heedful.launch.bind.portable import kernel_call, shared_divisor
from heedful.launch.spec import Program, Scalar


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
    tensors = ("k_new", "v_new", "k", "v")
    divisor = shared_divisor(buffers, tensors)
    config = cache_rows(dim, dim_v)
    tiles = ceil_div(seqlen, config.rows)
    cache = groups.kv_layout(page_size, buffers)
    call = kernel_call(
        "kvcache.append_keys",
        (tiles * batch * heads, 1, 1),
        config,
        io=AppendIO(
            cache_seqlens=pointer(buffers, "cache_seqlens"),
            leftpad_k=pointer(buffers, "leftpad_k"),
            seqused=pointer(buffers, "seqused"),
            **{name: groups.rows(buffers, name, divisor) for name in tensors},
        ),
        # Nothing is written to batch entries that the cache lacks, whatever names them.
        cache=cache._replace(entries=Scalar(buffers["k"].shape[0])),
        rotary=groups.rotary(buffers, interleaved, position0),
        **scalars(seqlen=seqlen, heads=heads, tiles=tiles),
        capacity=Scalar(stored_keys(buffers, page_size)),
        HEAD_DIM=dim,
        HEAD_DIM_V=dim_v,
        BLOCK_N=config.rows,
        BLOCK_D=pow2(dim),
        BLOCK_E=pow2(dim_v),
    )
    return Program((call,))


def rotary(
    buffers: Buffers, interleaved: bool = True, advance: bool = True, position0: int = 0
) -> Program:
    """rotated = q (B, S, H, D) at positions cache_seqlens + position0 (+ row, if advance).

    buffers: q, rotated, cache_seqlens (B,), rotary_cos, rotary_sin.
    """
    batch, seqlen, heads, dim = buffers["q"].shape
    divisor = shared_divisor(buffers, ("q", "rotated"))
    config = cache_rows(dim)
    tiles = ceil_div(seqlen, config.rows)
    call = kernel_call(
        "kvcache.rotate_queries",
        (tiles * batch * heads, 1, 1),
        config,
        io=RotateIO(
            q=groups.rows(buffers, "q", divisor),
            cache_seqlens=pointer(buffers, "cache_seqlens"),
            rotated=groups.rows(buffers, "rotated", divisor),
        ),
        rotary=groups.rotary(buffers, interleaved, position0),
        **scalars(seqlen=seqlen, heads=heads, tiles=tiles, advance=int(advance)),
        HEAD_DIM=dim,
        BLOCK_M=config.rows,
        BLOCK_D=pow2(dim),
    )
    return Program((call,))


def step(
    buffers: Buffers,
    attention: Program,
    scratch: Sequence[Workspace],
    page_size: int = 0,
    interleaved: bool = True,
    advance: bool = True,
    position0: int = 0,
) -> Program:
    """What changes the cache, then attention over it.

    buffers: of both, by the names of attention, where the lengths that are counted are seqused_k.
    The new keys are k_new and v_new; q_new, if the call has it, is rotated into q. attention: its
    program. scratch: which of the buffers are no one's but the program's.
    """
    turns = "q_new" in buffers
    given = {**buffers, "seqused": buffers["seqused_k"]}
    calls = append_kv(given, page_size, interleaved, position0).calls
    if turns:
        given |= {"q": buffers["q_new"], "rotated": buffers["q"]}
        calls += rotary(given, interleaved, advance, position0).calls
    names = {"seqused": "seqused_k", **({"q": "q_new", "rotated": "q"} if turns else {})}
    update = Program(calls).renamed(names)
    return Program(update.calls + attention.calls, (*attention.workspaces, *scratch))
