"""Keys and values on their way from the producer to the consumers, two rings side by side.

Consumers take the keys of one tile with the values of the tile before. At the first tile of some
rows there are no values yet, and behind the last the values are alone.

As one, those keys and those values share a slot and its barriers: some 20 instructions fewer a step
than with two of each, but keys lie as long as values do. Apart, each has a ring of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.channel import Channel, Cursor
from heedful.kernels.hopper.compat import aggregate, optional, tma_load


@aggregate
class Place:
    """Where in the rings a consumer or the producer is: at the keys of a tile, and at the values of
    the tile before.

    As one, `v` is None: those values are where the keys are. IN_STEP, with rings of equal length, a
    tile's values have the number of its keys, so that `v` is where keys were before.
    """

    k: Cursor
    v: Cursor | gl.constexpr
    IN_STEP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v=None, IN_STEP=False):
        self.k = k
        self.v = optional(v)
        self.IN_STEP = gl.constexpr(IN_STEP)

    @gluon.jit
    def values(self):
        """Where the values of the tile before are."""
        if self.v is None:
            return self.k
        else:
            return self.v

    @gluon.jit
    def values_of_tile(self):
        """Apart: where this tile's values are, if no keys were taken without theirs."""
        if self.IN_STEP:
            return self.k
        else:
            return self.v

    @gluon.jit
    def next(self):
        """Behind keys and values."""
        if self.v is None:
            return Place(self.k.next())
        elif self.IN_STEP:
            return Place(self.k.next(), self.k, True)
        else:
            return Place(self.k.next(), self.v.next())

    @gluon.jit
    def after_keys(self):
        """Behind the first keys, which come alone."""
        if self.v is None or self.IN_STEP:
            return self.next()
        else:
            return Place(self.k.next(), self.v)

    @gluon.jit
    def after_values(self):
        """Behind the last values, which come alone."""
        if self.v is None:
            return self.next()
        elif self.IN_STEP:
            return self
        else:
            return Place(self.k, self.v.next())


@aggregate
class Slots:
    """The rings, AS_ONE or apart. KEEPS: whether keys are looked at again after their product, so
    that they stay until the next tile's scores show that every warp is done with them; as one they
    do in any case. Consumers say all they do: what does not apply does nothing.
    """

    k: Channel
    v: Channel
    AS_ONE: gl.constexpr
    KEEPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, AS_ONE, KEEPS):
        self.k = k
        self.v = v
        self.AS_ONE = gl.constexpr(AS_ONE)
        self.KEEPS = gl.constexpr(KEEPS)

    @gluon.jit
    def of(k, v, AS_ONE: gl.constexpr, KEEPS: gl.constexpr):
        """As one, `v` is a ring beside `k`, see channel.py."""
        return Slots(k, v, AS_ONE, AS_ONE or KEEPS)

    @gluon.jit
    def start(self):
        at_k = Cursor.start(self.k.full.shape[0])
        if self.AS_ONE:
            return Place(at_k)
        else:
            at_v = Cursor.start(self.v.full.shape[0])
            return Place(at_k, at_v, at_k.stages == at_v.stages)

    @gluon.jit
    def load(self, k_desc, k_at, v_desc, v_at, at):
        """Waits until there is room and starts filling it with keys and values. Those that come
        alone the rings load by themselves."""
        if self.AS_ONE:
            full = self.k.full.index(at.k.slot)
            mbarrier.wait(self.k.empty.index(at.k.slot), at.k.parity ^ 1)
            mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma_load(k_desc, k_at, full, self.k.boxes.index(at.k.slot))
            tma_load(v_desc, v_at, full, self.v.boxes.index(at.k.slot))
        else:
            self.k.load(k_desc, k_at, at.k)
            self.v.load(v_desc, v_at, at.v)

    @gluon.jit
    def wait(self, at, has_keys=True):
        """Waits for keys, if there are more; as one, for keys, values or both."""
        if self.AS_ONE:
            self.k.wait(at.k)
        else:
            self.k.wait(at.k, pred=has_keys)

    @gluon.jit
    def wait_for_values(self, at):
        """Apart: waits for values."""
        if not self.AS_ONE:
            self.v.wait(at.v)

    @gluon.jit
    def release_keys_after_mma(self, at):
        """Unless they are kept, frees keys that finished matrix products alone have read."""
        if not self.KEEPS:
            self.k.release_after_mma(at.k)

    @gluon.jit
    def release_kept_after_mma(self, at):
        """Frees keys that were kept; as one, the values beside them too."""
        if self.KEEPS:
            self.k.release_after_mma(at.k)

    @gluon.jit
    def release_values_after_mma(self, at):
        """Apart: frees values that finished matrix products alone have read."""
        if not self.AS_ONE:
            self.v.release_after_mma(at.v)

    @gluon.jit
    def release_last_values_after_mma(self, at):
        """Frees values behind which no keys came."""
        self.v.release_after_mma(at.values())

    @gluon.jit
    def skip(self, at):
        """Passes over a tile that other consumers need and this one does not.

        No product holds the warps together here, so that releasing must: a warp that lagged behind
        would miss a phase of the barrier it waits for.
        """
        self.k.wait(at.k)
        self.k.release(at.k)
        if not self.AS_ONE:
            at_v = at.values_of_tile()
            self.v.wait(at_v)
            self.v.release(at_v)
        return at.next()

    @gluon.jit
    def skip_last_values(self, at):
        """As one: passes over the slot of the last values, having skipped all tiles."""
        if self.AS_ONE:
            return self.skip(at)
        else:
            return at
