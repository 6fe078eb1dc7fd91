"""Programs that extend a KV cache, and rotate queries, before attention."""

from typing import Any

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.problem import (
    LATENT_ROW_BYTES,
    LATENT_ROW_DIM,
    LATENT_ROW_DIM_V,
    LATENT_ROW_GROUP,
    LATENT_ROWS,
)
from heedful.core.call.quant import QUANT_MAX
from heedful.core.planning.sizes import ceil_div
from heedful.core.registry.tiles import RowsConfig, cache_rows, pow2
from heedful.kernels.args import portable as args
from heedful.kernels.args import shared
from heedful.launch.bind import groups
from heedful.launch.bind.groups import Buffers, scalars, stored_keys
from heedful.launch.bind.portable import kernel_call, shared_divisor
from heedful.launch.spec import Program, Scalar, absent


def append_kv(
    buffers: Buffers, page_size: int = 0, interleaved: bool = True, position0: int = 0
) -> Program:
    """The launch that writes k_new and v_new (B, S, G, dim) into the caches k and v, in place, and
    the number of keys that each sequence then has into seqused (B,). Tokens outside of the caches
    are dropped; a sequence of negative length gets nothing and has no keys.

    buffers: k_new, v_new, k, v, seqused, cache_seqlens (B,): the storage row of each sequence's
    first new token; rotary_cos and rotary_sin (positions, rotary_dim / 2), block_table,
    kv_batch_idx, leftpad_k if the call has them. position0: the rotary position of the cache's
    first token: the length of a shared prefix.
    """
    config, programs, parameters = _appended(buffers, page_size)
    call = kernel_call(
        "cache.update.append_keys",
        (programs, 1, 1),
        config,
        rotary=_rotary(buffers, interleaved, position0),
        **parameters,
    )
    return Program((call,))


def append_slots(buffers: Buffers) -> Program:
    """Writes k_new and v_new (1, S, G, dim) into the pages k and v (pages, page_size, G, dim), in
    place: each token into its slot, page_size * page + row. Tokens of slots that no page has are
    dropped.

    buffers: k_new, v_new, k, v, slots (S,); k_descale and v_descale (1, G) if the call has them.
    """
    config, programs, parameters = _appended(buffers, 0)
    del parameters["capacity"]  # of a sequence
    call = kernel_call(
        "cache.update.append_slots",
        (programs, 1, 1),
        config,
        slots=args.Slots(groups.pointer(buffers, "slots"), Scalar(buffers["k"].shape[1])),
        **parameters,
    )
    return Program((call,))


def update(
    buffers: Buffers,
    page_size: int = 0,
    interleaved: bool = True,
    advance: bool = True,
    position0: int = 0,
) -> Program:
    """The same, and in the same launch rotated = q (B, S, H, D) rotated by positions cache_seqlens
    + position0 (+ row, if advance), if there is such a buffer."""
    if "rotated" not in buffers:
        return append_kv(buffers, page_size, interleaved, position0)
    config, appends, parameters = _appended(buffers, page_size)
    _, rotations, others = _rotated(buffers, advance)
    call = kernel_call(
        "cache.update.append_and_rotate",
        (appends + rotations, 1, 1),
        config,
        rotary=_rotary(buffers, interleaved, position0),
        appends=Scalar(appends),
        **(parameters | others),
    )
    return Program((call,))


def ahead(
    buffers: Buffers, page_size: int, interleaved: bool, advance: bool, position0: int
) -> Program:
    """`update` for the arrays of a call: lengths are written to seqused_k, and q_new, if there is
    one, is rotated into q."""
    arrays, names = {**buffers, "seqused": buffers["seqused_k"]}, {"seqused": "seqused_k"}
    if "q_new" in buffers:
        arrays |= {"q": buffers["q_new"], "rotated": buffers["q"]}
        names |= {"q": "q_new", "rotated": "q"}
    return update(arrays, page_size, interleaved, advance, position0).renamed(names)


def within_decode(
    buffers: Buffers, page_size: int, interleaved: bool, advance: bool, position0: int
) -> args.CacheAppend:
    """The same as a group of arguments of the decode kernel, which writes no lengths."""
    config, _, parameters = _appended(buffers, page_size)
    # Most steps append one row.
    rows = 1 if buffers["k_new"].shape[1] == 1 else config.rows
    return args.CacheAppend(
        rotary=_rotary(buffers, interleaved, position0),
        io=parameters["new"]._replace(leftpad_k=None),
        quantization=parameters["quantization"],
        advance=Scalar(int(advance)),
        tile=parameters["tile"]._replace(BLOCK_N=rows),
    )


def _appended(buffers: Buffers, page_size: int) -> tuple[RowsConfig, int, dict[str, Any]]:
    """The tile of new keys, how many tiles there are, and parameters of kernels that append
    them."""
    dim, dim_v = (buffers[name].shape[-1] for name in ("k_new", "v_new"))
    # Rows of latent vectors get their last columns from keys, the others from values.
    stored = LATENT_ROW_DIM - LATENT_ROW_DIM_V if _are_latent(buffers) else dim
    config = cache_rows(stored, dim_v)
    divisor = shared_divisor(buffers, ("k_new", "v_new", "k", "v"))
    programs, tiles = _tiles(buffers["k_new"], config)
    heads, quantization = _quantization(buffers)
    parameters = {
        "new": groups.arrays(
            args.AppendIO, buffers, divisor, k_descale=heads["k"], v_descale=heads["v"]
        ),
        "new_tiles": tiles,
        "cache": groups.kv_layout(page_size, buffers, is_written=True),
        "quantization": quantization,
        "capacity": Scalar(stored_keys(buffers, page_size)),
        "tile": args.CacheTile(
            dim, dim_v, cache_rows(dim).rows, config.rows, pow2(stored), pow2(dim_v)
        ),
    }
    return config, programs, parameters


def _are_latent(buffers: Buffers) -> bool:
    """Whether new keys and values become rows of latent vectors."""
    cache, new = buffers["k"], buffers["k_new"]
    return cache.dtype == "uint8" != new.dtype and cache.shape[-1] == LATENT_ROW_BYTES


def _quantization(buffers: Buffers) -> tuple[dict[str, shared.Descale], args.Quantization]:
    """The group that says how new keys and values are quantised; absent if they come as the cache
    stores them."""
    stored, none = buffers["k"].dtype, absent(shared.Descale)
    if buffers["k_new"].dtype == stored:
        return {"k": none, "v": none}, absent(args.Quantization)
    storage = "int4" if stored == "uint8" else stored
    if _are_latent(buffers):
        return {"k": none, "v": none}, args.Quantization(
            **dict.fromkeys(("k_groups", "v_groups"), absent(args.GroupScale)),
            GROUP=LATENT_ROW_GROUP,
            STORAGE=LATENT_ROWS,
            LIMIT=float(QUANT_MAX["float8_e4m3fn"]),
        )
    scale = buffers.get("k_descale")
    size = 0
    if scale is not None and len(scale.shape) > 2:
        size = buffers["k_new"].shape[-1] // scale.shape[-1]
    scales = {name: groups.descale(buffers, name, size) for name in "kv"}
    heads = {name: none if size else scale for name, scale in scales.items()}
    written = {name: args.GroupScale(*(scale if size else none)) for name, scale in scales.items()}
    return heads, args.Quantization(
        k_groups=written["k"],
        v_groups=written["v"],
        GROUP=size,
        STORAGE=storage,
        LIMIT=float(QUANT_MAX[storage]),
    )


def _rotated(buffers: Buffers, advance: bool) -> tuple[RowsConfig, int, dict[str, Any]]:
    """The same for queries, and for kernels that rotate them."""
    config = cache_rows(buffers["q"].shape[-1])
    divisor = shared_divisor(buffers, ("q", "rotated"))
    programs, tiles = _tiles(buffers["q"], config)
    parameters = {
        "queries": groups.arrays(args.RotateIO, buffers, divisor),
        "query_tiles": tiles,
        "advance": Scalar(int(advance)),
    }
    return config, programs, parameters


def _tiles(array: ArraySpec, config: RowsConfig) -> tuple[int, args.RowTiles]:
    """How many tiles an array has, and how they are numbered."""
    batch, seqlen, heads, _ = array.shape
    tiles = ceil_div(seqlen, config.rows)
    return tiles * batch * heads, args.RowTiles(**scalars(seqlen=seqlen, heads=heads, tiles=tiles))


def _rotary(buffers: Buffers, interleaved: bool, position0: int) -> args.Rotary:
    """The group of rotary tables."""
    cos = buffers.get("rotary_cos")
    if cos is None:
        return args.Rotary(None, None, None, None, None, None, interleaved)
    positions, half = cos.shape
    return args.Rotary(
        cos=groups.pointer(buffers, "rotary_cos"),
        sin=groups.pointer(buffers, "rotary_sin"),
        stride_n=groups.row_stride(cos.strides[0]),
        half=Scalar(half),
        positions=Scalar(positions),
        position0=Scalar(position0),
        IS_INTERLEAVED=interleaved,
    )
