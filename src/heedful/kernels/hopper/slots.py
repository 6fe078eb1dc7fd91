"""Keys and values side by side: a slot has the keys of one tile and the values of the tile before,
as consumers take them. The first keys of some rows and their last values are alone in theirs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.channel import Channel, allocate_boxes, box_rows
from heedful.kernels.hopper.compat import aggregate, tma_load


@aggregate
class Slots:
    """Rings of keys and of values that one cursor goes around.

    AS_ONE: one barrier tells when both of a slot are there, and one when both are free: some 20
    instructions fewer a step than with two of each. Consumers say what they do as if there were
    either; what does not apply to this one does nothing.
    """

    k: Channel
    v: Channel
    AS_ONE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, AS_ONE):
        self.k = k
        self.v = v
        self.AS_ONE = gl.constexpr(AS_ONE)

    @gluon.jit
    def allocate(k_desc, v_desc, stages: gl.constexpr, readers: gl.constexpr, AS_ONE: gl.constexpr):
        k = Channel.allocate(k_desc, stages, readers)
        if AS_ONE:
            shape: gl.constexpr = v_desc.block_type.shape
            boxes = allocate_boxes(v_desc, stages)
            v = Channel(boxes, None, k.full, k.empty, box_rows(shape), shape[-1])
        else:
            v = Channel.allocate(v_desc, stages, readers)
        return Slots(k, v, AS_ONE)

    @gluon.jit
    def load_keys(self, desc, coordinates, at):
        """Keys alone."""
        self.k.load(desc, coordinates, at)
        if not self.AS_ONE:
            self.v.pass_by(at)

    @gluon.jit
    def load_values(self, desc, coordinates, at):
        """Values alone."""
        self.v.load(desc, coordinates, at)
        if not self.AS_ONE:
            self.k.pass_by(at)

    @gluon.jit
    def load(self, k_desc, k_at, v_desc, v_at, at):
        """Waits until slot `at` is free and starts filling it."""
        if self.AS_ONE:
            full = self.k.full.index(at.slot)
            mbarrier.wait(self.k.empty.index(at.slot), at.parity ^ 1)
            mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma_load(k_desc, k_at, full, self.k.boxes.index(at.slot))
            tma_load(v_desc, v_at, full, self.v.boxes.index(at.slot))
        else:
            self.k.load(k_desc, k_at, at)
            self.v.load(v_desc, v_at, at)

    @gluon.jit
    def wait(self, at):
        """Waits for the keys; as one, for the values too."""
        self.k.wait(at)

    @gluon.jit
    def wait_for_values(self, at):
        """Apart: waits for the values."""
        if not self.AS_ONE:
            self.v.wait(at)

    @gluon.jit
    def release_keys_after_mma(self, at):
        """Apart: frees the keys, read by finished matrix products alone."""
        if not self.AS_ONE:
            self.k.release_after_mma(at)

    @gluon.jit
    def release_values_after_mma(self, at):
        """Apart: frees the values, read by finished matrix products alone."""
        if not self.AS_ONE:
            self.v.release_after_mma(at)

    @gluon.jit
    def release_as_one_after_mma(self, at):
        """As one: frees both, read by finished matrix products alone."""
        if self.AS_ONE:
            self.k.release_after_mma(at)

    @gluon.jit
    def skip(self, at):
        """Waits for both and frees them unused."""
        self.k.wait(at)
        self.k.release(at)
        if not self.AS_ONE:
            self.v.wait(at)
            self.v.release(at)
        return at.next()
