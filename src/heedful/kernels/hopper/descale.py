"""What descales make of the softmax scale and of an output. B batch, G kv head."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate, optional


@aggregate
class Scales:
    """Factors of raw scores, and of the output's rows: descales are float32 (B, G), or None."""

    scale_log2: gl.tensor
    softcap_scale: gl.tensor
    q_descale: gl.tensor | gl.constexpr
    k_descale: gl.tensor | gl.constexpr
    v_descale: gl.tensor | gl.constexpr
    stride_qdb: gl.tensor
    stride_qdh: gl.tensor
    stride_kdb: gl.tensor
    stride_kdh: gl.tensor
    stride_vdb: gl.tensor
    stride_vdh: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        scale_log2,
        softcap_scale,
        q_descale,
        k_descale,
        v_descale,
        stride_qdb,
        stride_qdh,
        stride_kdb,
        stride_kdh,
        stride_vdb,
        stride_vdh,
    ):
        self.scale_log2 = scale_log2
        self.softcap_scale = softcap_scale
        self.q_descale = optional(q_descale)
        self.k_descale = optional(k_descale)
        self.v_descale = optional(v_descale)
        self.stride_qdb = stride_qdb
        self.stride_qdh = stride_qdh
        self.stride_kdb = stride_kdb
        self.stride_kdh = stride_kdh
        self.stride_vdb = stride_vdb
        self.stride_vdh = stride_vdh

    @gluon.jit
    def of_scores(self, tile, HAS_SOFTCAP: gl.constexpr):
        """(softcap_scale, scale_log2) of a tile, descales included: factors of its raw scores under
        softcap, and of what comes out of it, or of raw scores if there is none."""
        factor = gl.to_tensor(1.0)
        if self.q_descale is not None:
            at = tile.batch * self.stride_qdb + tile.kv_head * self.stride_qdh
            factor *= gl.load(self.q_descale + at)
        if self.k_descale is not None:
            at = tile.batch * self.stride_kdb + tile.kv_head * self.stride_kdh
            factor *= gl.load(self.k_descale + at)
        scale_log2, softcap_scale = self.scale_log2, self.softcap_scale
        if HAS_SOFTCAP:
            softcap_scale *= factor
        elif self.q_descale is not None or self.k_descale is not None:
            scale_log2 *= factor
            # A hidden score, an infinity, times 0 would be NaN.
            scale_log2 = gl.where(scale_log2 == 0.0, 1e-30, scale_log2)
        return softcap_scale, scale_log2

    @gluon.jit
    def of_values(self, tile):
        """What v_descale makes of an output."""
        if self.v_descale is None:
            return gl.to_tensor(1.0)
        else:
            at = tile.batch * self.stride_vdb + tile.kv_head * self.stride_vdh
            return gl.load(self.v_descale + at)
