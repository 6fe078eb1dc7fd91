"""When a new batch dim, as from vmap, may be merged into the call's batch."""

import math
from collections.abc import Sequence

from heedful.core.call.arguments import Options
from heedful.core.call.operands import Operands


def joins(shapes: Operands, mapped: Sequence[bool], options: Options) -> bool:
    """Whether the mapped dim may be merged into the batch: no result depends on an entry's place in
    it. shapes: those of the operands, without the mapped dim; None is absent. mapped: which
    operands have this dim.
    """
    if options.kind != "dense" or options.dropout_p > 0 or any(mapped[3:]):
        return False
    if shapes.bias is not None and len(shapes.bias) == 4 and shapes.bias[0] > 1:
        return False
    for shape in (shapes.key_ranges, shapes.block_rows, shapes.block_keys):
        if shape is not None and shape[0] > 1:
            return False
    if shapes.alibi_slopes is not None and len(shapes.alibi_slopes) > 1:
        return False
    if not shapes.seqused_q is shapes.seqused_k is shapes.leftpad_k is shapes.q_offsets is None:
        return False
    if shapes.origins is not None:
        return False
    scales = (shapes.q_descale, shapes.k_descale, shapes.v_descale)
    return all(scale is None or math.prod(scale) == 1 for scale in scales)
