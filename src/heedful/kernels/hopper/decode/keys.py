"""Where the keys of a segment lie, for the warp that loads them by TMA."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.sequences import within


class SegmentKeys(NamedTuple):
    """Where a segment's keys lie. It has the fields of a `WorkTile` that loads read
    (sm90/sequences.py)."""

    batch: Any
    kv_batch: Any
    kv_head: Any
    seq: Any


@gluon.jit
def keys_of_segment(params, segment):
    """The `SegmentKeys` of a segment's sequence."""
    entry = segment.b
    if params.kv.batch_idx is not None:
        entry = within(gl.load(params.kv.batch_idx + entry), 0, params.kv.entries - 1)
    return SegmentKeys(segment.b, entry, segment.g, segment.seq)
