"""Programs that change a KV cache, and queries with it, before attention."""

from collections.abc import Sequence
from typing import Any

from heedful.core.arrays import ArraySpec
from heedful.core.sizes import Workspace, ceil_div
from heedful.core.tiles import cache_rows, pow2
from heedful.kernels.args.portable import AppendIO, RotateIO, RowTiles
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
    programs, parameters = _appended(buffers, page_size)
    turning = groups.rotary(buffers, interleaved, position0)
    return _launched("append_keys", buffers["k_new"], programs, rotary=turning, **parameters)


def rotary(
    buffers: Buffers, interleaved: bool = True, advance: bool = True, position0: int = 0
) -> Program:
    """rotated = q (B, S, H, D) at positions cache_seqlens + position0 (+ row, if advance).

    buffers: q, rotated, cache_seqlens (B,), rotary_cos, rotary_sin.
    """
    programs, parameters = _rotated(buffers, advance)
    turning = groups.rotary(buffers, interleaved, position0)
    return _launched("rotate_queries", buffers["q"], programs, rotary=turning, **parameters)


def update(
    buffers: Buffers,
    page_size: int = 0,
    interleaved: bool = True,
    advance: bool = True,
    position0: int = 0,
) -> Program:
    """Both in one launch; the former alone without `rotated`."""
    if "rotated" not in buffers:
        return append_kv(buffers, page_size, interleaved, position0)
    appends, parameters = _appended(buffers, page_size)
    rotations, others = _rotated(buffers, advance)
    return _launched(
        "append_and_rotate",
        buffers["k_new"],
        appends + rotations,
        rotary=groups.rotary(buffers, interleaved, position0),
        appends=Scalar(appends),
        **(parameters | others),
    )


def step(buffers: Buffers, attention: Program, scratch: Sequence[Workspace], **how: Any) -> Program:
    """What changes the cache, then attention over it.

    buffers: of both, by the names of attention; the lengths that are counted are seqused_k. The new
    keys are k_new and v_new; q_new, if the call has it, is rotated into q. attention: its program.
    scratch: which of the buffers are the program's own. how: see `update`.
    """
    given, names = {**buffers, "seqused": buffers["seqused_k"]}, {"seqused": "seqused_k"}
    if "q_new" in buffers:
        given |= {"q": buffers["q_new"], "rotated": buffers["q"]}
        names |= {"q": "q_new", "rotated": "q"}
    first = update(given, **how).renamed(names)
    return Program(first.calls + attention.calls, (*attention.workspaces, *scratch))


def _launched(kernel: str, rows: ArraySpec, programs: int, **parameters: Any) -> Program:
    """One kernel, on rows like these."""
    config = cache_rows(rows.shape[-1])
    return Program((kernel_call(f"kvcache.{kernel}", (programs, 1, 1), config, **parameters),))


def _appended(buffers: Buffers, page_size: int) -> tuple[int, dict[str, Any]]:
    """Tiles of new keys, and what is said of them."""
    dim, dim_v = (buffers[name].shape[-1] for name in ("k_new", "v_new"))
    block = cache_rows(dim, dim_v).rows
    tensors = ("k_new", "v_new", "k", "v")
    divisor = shared_divisor(buffers, tensors)
    programs, tiles = _tiles(buffers["k_new"], block)
    cache = groups.kv_layout(page_size, buffers)
    return programs, {
        "new": AppendIO(
            cache_seqlens=pointer(buffers, "cache_seqlens"),
            leftpad_k=pointer(buffers, "leftpad_k"),
            seqused=pointer(buffers, "seqused"),
            **{name: groups.rows(buffers, name, divisor) for name in tensors},
        ),
        "new_tiles": tiles,
        # Nothing is written to batch entries that the cache lacks, whatever names them.
        "cache": cache._replace(entries=Scalar(buffers["k"].shape[0])),
        "capacity": Scalar(stored_keys(buffers, page_size)),
        "HEAD_DIM": dim,
        "HEAD_DIM_V": dim_v,
        "BLOCK_N": block,
        "BLOCK_D": pow2(dim),
        "BLOCK_E": pow2(dim_v),
    }


def _rotated(buffers: Buffers, advance: bool) -> tuple[int, dict[str, Any]]:
    """Tiles of queries, and what is said of them."""
    dim = buffers["q"].shape[-1]
    block = cache_rows(dim).rows
    divisor = shared_divisor(buffers, ("q", "rotated"))
    programs, tiles = _tiles(buffers["q"], block)
    return programs, {
        "queries": RotateIO(
            q=groups.rows(buffers, "q", divisor),
            cache_seqlens=pointer(buffers, "cache_seqlens"),
            rotated=groups.rows(buffers, "rotated", divisor),
        ),
        "query_tiles": tiles,
        "advance": Scalar(int(advance)),
        "HEAD_DIM": dim,
        "BLOCK_M": block,
        "BLOCK_D": pow2(dim),
    }


def _tiles(array: ArraySpec, block: int) -> tuple[int, RowTiles]:
    """How many tiles of so many rows an array has, and where they are."""
    batch, seqlen, heads, _ = array.shape
    tiles = ceil_div(seqlen, block)
    return tiles * batch * heads, RowTiles(**scalars(seqlen=seqlen, heads=heads, tiles=tiles))
