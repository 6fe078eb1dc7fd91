"""The arrays of one attention call, by name, in whatever framework they live."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Operands(NamedTuple):
    """Inputs of one call after validation, as kernels get them; None is absent. B batch, S seqlen,
    T packed tokens, H query heads, G kv heads, D qk dim, E v dim.

    q: (B, Sq, H, D), or (Tq, H, D) where cu_seqlens_q is given.
    k, v: (B, Sk, G, D | E), or (Tk, G, D | E) with cu_seqlens_k, or pages
        (num_pages, page_size, G, D | E) with block_table. The last dim has stride 1.
    bias: (B, H, Sq, Sk), with strides of 0 where it is broadcast. The caller's may be bool, True
    where a query sees a key; kernels get numbers. alibi_slopes: float32 (B, H), a
        stride of 0 where it is broadcast. sink: float32 (H,).
    rel_bias: (H, R): entry i + off - j + R // 2, or the nearest that there is, is added to the
        score of query i and key j, where off is the diagonal's offset. Any float dtype.
    cu_seqlens_q, cu_seqlens_k: int32 (B + 1,). seqused_q, seqused_k: int32 (B,), the lengths used
        of each sequence's storage (k: counted from leftpad_k on).
    block_table: int32 (B, pages per sequence). kv_batch_idx: int32 (B,), which row of k and v a
        sequence uses. leftpad_k: int32 (B,), where in its storage a sequence begins.
    q_offsets: int32 (B,), the offset of each sequence's diagonal, clamped to less than FAR.
    origins: int32 (B, 4), where the first score of each sequence lies in the mask of dropout:
        (batch, head, row, column), in place of the sequence's number and a dropout_origin.
    tree_mask: bool (B, Sq, Sq), expanded; rows see key len_k - Sq + c iff tree_mask[b, row, c].
    key_ranges: int32 (B, H, Sq, 2 | 4), a stride of 0 where it is repeated, or (Tq, 2 | 4) beside
        cu_seqlens_q: a row sees keys [a, b) of its sequence, or those of two ranges.
    block_rows: int32 (B, H, tiles of queries, 2 + 2 W), a stride of 0 where it is repeated: the
        tiles of keys that each tile of queries sees. How many it sees whole, how many in part, and
        (tile, index into block_bits) of each, those seen whole first, with an index of -1.
        block_keys: the same by tiles of keys. block_bits: int32 (P, side, side / 32): bit j % 32 of
        [p, i, j // 32] says whether query i of a tile sees key j. Tiles have `side` rows and keys.
    seed: int64 (1,), on the device: the Philox key; or (5,), with the dropout origin after it.
    q_descale, k_descale, v_descale: float32 (B, G), expanded; for quantised caches
        k_descale, v_descale, k_shift, v_shift: (cache storage dims..., G, groups).
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    rel_bias: Any = None
    alibi_slopes: Any = None
    sink: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    block_table: Any = None
    kv_batch_idx: Any = None
    leftpad_k: Any = None
    q_offsets: Any = None
    origins: Any = None
    tree_mask: Any = None
    key_ranges: Any = None
    block_rows: Any = None
    block_keys: Any = None
    block_bits: Any = None
    seed: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    k_shift: Any = None
    v_shift: Any = None


# The operands that say where sequences and their diagonals lie, beside the pages of a cache; and
# those of quantised values.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "kv_batch_idx", "leftpad_k")
LENGTHS += ("q_offsets",)
SCALES = ("q_descale", "k_descale", "v_descale", "k_shift", "v_shift")


class Gradients(NamedTuple):
    """The results of a backward. From kernels dbias has size 1 where the bias is broadcast, and
    dsink, (H,), is float32; callers get both in the shapes and dtypes of bias and sink. drel_bias
    is as rel_bias."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None
    drel_bias: Any = None


# (x, out, lse, dout, dlse=None, kv_grad=True) -> gradients of the inputs, for one layout of all
# these. kv_grad: whether those of k and v are wanted; if not, they may be None.
Backward = Callable[..., Gradients]


def own_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without broadcast dims: a dim of stride 0 has size 1. An empty array keeps its
    shape, since its strides mean nothing."""
    if 0 in shape:
        return tuple(shape)
    return tuple(1 if step == 0 else size for size, step in zip(shape, strides, strict=True))
