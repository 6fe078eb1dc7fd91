"""Applies the descales of fp8 inputs to the softmax scale and to outputs. B batch, G KV head."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.args.shared import Descale


@gluon.jit
def at_head(descale: Descale, tile):
    """The descale of a work tile's KV head."""
    return gl.load(descale.ptr + tile.batch * descale.stride_b + tile.kv_head * descale.stride_h)


@gluon.jit
def score_factors(params, tile):
    """(softcap_scale, scale_log2) of a tile, with descales. With softcap, the first is the factor
    of raw scores and the second that of capped ones; without, the second is the factor of raw
    scores."""
    factor = gl.to_tensor(1.0)
    if params.fp8.descales.q.ptr is not None:
        factor *= at_head(params.fp8.descales.q, tile)
    if params.fp8.descales.k.ptr is not None:
        factor *= at_head(params.fp8.descales.k, tile)
    scale_log2, softcap_scale = params.mods.scale_log2, params.mods.softcap_scale
    if params.mods.HAS_SOFTCAP:
        softcap_scale *= factor
    elif params.fp8.descales.q.ptr is not None or params.fp8.descales.k.ptr is not None:
        scale_log2 *= factor
        # A masked score, an infinity, times 0 would be NaN.
        scale_log2 = gl.where(scale_log2 == 0.0, 1e-30, scale_log2)
    return softcap_scale, scale_log2


@gluon.jit
def value_factor(params, tile):
    """The factor that v's descale gives an output."""
    if params.fp8.descales.v.ptr is None:
        return gl.to_tensor(1.0)
    else:
        return at_head(params.fp8.descales.v, tile)
