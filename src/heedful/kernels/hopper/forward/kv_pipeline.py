"""The rings of keys and values between the producer and the consumers.

Consumers take the keys of one tile together with the values of the tile before. At the first tile
of a work tile there are no values yet. After the last keys, the last values come alone.

Those keys and those values may share a stage and its barriers (KV_SHARE_STAGES). A step then takes
about 20 instructions fewer than with a stage for each, but keys stay as long as values do.
Otherwise each has a ring of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.sm90.compat import aggregate, tma_load
from heedful.kernels.hopper.sm90.pipeline import Pipeline, PipelineState


@aggregate
class KVState:
    """The position of a consumer or the producer in the rings: at the keys of a tile, and at the
    values of the tile before.

    With shared stages `v` is None: those values are in the stage of the keys. IN_STEP: the rings
    have equal lengths, so that a tile's values have the same index as its keys, and `v` is the
    previous `k`.
    """

    k: PipelineState
    v: PipelineState | gl.constexpr = None
    IN_STEP: gl.constexpr = False

    @gluon.jit
    def values(self):
        """The state of the values of the tile before."""
        if self.v is None:
            return self.k
        else:
            return self.v

    @gluon.jit
    def values_of_tile(self):
        """With separate rings: the state of this tile's values, if no keys were taken without their
        values."""
        if self.IN_STEP:
            return self.k
        else:
            return self.v

    @gluon.jit
    def next(self):
        """The state after keys and values."""
        if self.v is None:
            return KVState(self.k.next())
        elif self.IN_STEP:
            return KVState(self.k.next(), self.k, True)
        else:
            return KVState(self.k.next(), self.v.next())

    @gluon.jit
    def after_keys(self):
        """The state after the first keys, which come alone."""
        if self.v is None or self.IN_STEP:
            return self.next()
        else:
            return KVState(self.k.next(), self.v)

    @gluon.jit
    def after_values(self):
        """The state after the last values, which come alone."""
        if self.v is None:
            return self.next()
        elif self.IN_STEP:
            return self
        else:
            return KVState(self.k, self.v.next())


@gluon.jit
def ring_of_keys(io, params, dtype: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring of tiles as wide as those of queries."""
    D: gl.constexpr = io.q.block_type.shape[-1]
    return Pipeline.of_tiles(dtype, params.tile.BLOCK_N, D, STAGES, READERS)


@gluon.jit
def ring_of_values(io, params, dtype: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring of tiles as wide as those of results."""
    E: gl.constexpr = io.out.block_type.shape[-1]
    return Pipeline.of_tiles(dtype, params.tile.BLOCK_N, E, STAGES, READERS)


@aggregate
class KVPipeline:
    """Both rings. Consumers call all methods; those that do not apply do nothing.

    KEEPS_K: keys are read again after their product. They stay until the next tile's scores show
    that every warp is done with them. With shared stages they stay in any case.
    """

    k: Pipeline
    v: Pipeline
    KV_SHARE_STAGES: gl.constexpr
    KEEPS_K: gl.constexpr

    @gluon.jit
    def allocate(io, params):
        """The rings of a call. With shared stages `v` is a ring beside `k`, see `Pipeline.beside`.
        Speculation reads keys again."""
        CONSUMERS: gl.constexpr = params.tile.CONSUMERS
        SHARES: gl.constexpr = params.stages.KV_SHARE_STAGES
        K_STAGES: gl.constexpr = params.stages.K_STAGES
        V_STAGES: gl.constexpr = params.stages.V_STAGES
        if params.kv.table is None:
            k = Pipeline.allocate(io.k, K_STAGES, CONSUMERS, params.tile.TAIL_D)
            if SHARES:
                gl.static_assert(K_STAGES == V_STAGES and not params.tile.TAIL_E)
                v = Pipeline.beside(io.v, k)
            else:
                v = Pipeline.allocate(io.v, V_STAGES, CONSUMERS, params.tile.TAIL_E)
        else:
            gl.static_assert(not SHARES)
            k = ring_of_keys(io, params, io.k.dtype, K_STAGES, CONSUMERS)
            v = ring_of_values(io, params, io.v.dtype, V_STAGES, CONSUMERS)
        KEEPS_K: gl.constexpr = SHARES or params.tile.RESCALE == "speculative"
        return KVPipeline(k, v, SHARES, KEEPS_K)

    @gluon.jit
    def converted(io, params):
        """Rings that other warps than the producer's fill, see conversion.py."""
        gl.static_assert(not params.stages.KV_SHARE_STAGES)
        CONSUMERS: gl.constexpr = params.tile.CONSUMERS
        k = ring_of_keys(io, params, io.q.dtype, params.stages.K_STAGES, CONSUMERS)
        v = ring_of_values(io, params, gl.float16, params.stages.V_STAGES, CONSUMERS)
        return KVPipeline(k, v, False, params.tile.RESCALE == "speculative")

    @gluon.jit
    def stored(io, params):
        """Rings of tiles as they are stored, which one role reads."""
        STAGES: gl.constexpr = params.stages.STORED_STAGES
        if params.kv.table is None:
            k = Pipeline.allocate(io.k, STAGES, 1)
            v = Pipeline.allocate(io.v, STAGES, 1)
        else:
            k = ring_of_keys(io, params, io.k.dtype, STAGES, 1)
            v = ring_of_values(io, params, io.v.dtype, STAGES, 1)
        return KVPipeline(k, v, False, False)

    @gluon.jit
    def start(self):
        k_state = PipelineState.start(self.k.full.shape[0])
        if self.KV_SHARE_STAGES:
            return KVState(k_state)
        else:
            v_state = PipelineState.start(self.v.full.shape[0])
            return KVState(k_state, v_state, k_state.stages == v_state.stages)

    @gluon.jit
    def load(self, k_desc, k_at, v_desc, v_at, state):
        """Waits for room and starts loading keys and values. Keys or values that come alone are
        loaded by their rings."""
        if self.KV_SHARE_STAGES:
            full = self.k.producer_acquire(state.k, state.k)
            mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma_load(k_desc, k_at, full, self.k.boxes.index(state.k.index))
            tma_load(v_desc, v_at, full, self.v.boxes.index(state.k.index))
        else:
            self.k.load(k_desc, k_at, state.k)
            self.v.load(v_desc, v_at, state.v)

    @gluon.jit
    def consumer_wait(self, state, has_keys=True):
        """Waits for keys, if there are more; with shared stages, for keys, values or both."""
        if self.KV_SHARE_STAGES:
            self.k.consumer_wait(state.k)
        else:
            self.k.consumer_wait(state.k, pred=has_keys)

    @gluon.jit
    def consumer_wait_v(self, state):
        """Waits for values in a ring of their own."""
        if not self.KV_SHARE_STAGES:
            self.v.consumer_wait(state.v)

    @gluon.jit
    def consumer_release_k(self, state):
        """Unless keys are kept, frees keys which only finished matrix products have read."""
        if not self.KEEPS_K:
            self.k.consumer_release_after_mma(state.k)

    @gluon.jit
    def consumer_release_kept_k(self, state):
        """Frees keys that were kept, and the values that share their stage."""
        if self.KEEPS_K:
            self.k.consumer_release_after_mma(state.k)

    @gluon.jit
    def consumer_release_v(self, state):
        """Frees values in a ring of their own, which only finished matrix products have read."""
        if not self.KV_SHARE_STAGES:
            self.v.consumer_release_after_mma(state.v)

    @gluon.jit
    def consumer_release_last_v(self, state):
        """Frees the last values, after which no keys came."""
        self.v.consumer_release_after_mma(state.values())

    @gluon.jit
    def skip(self, state):
        """Passes over a tile that other consumers need and this one does not.

        No product keeps the warps together here, so the release must: a warp that lags would miss a
        phase of the barrier at which it waits.
        """
        self.k.consumer_wait(state.k)
        self.k.consumer_release(state.k)
        if not self.KV_SHARE_STAGES:
            v_state = state.values_of_tile()
            self.v.consumer_wait(v_state)
            self.v.consumer_release(v_state)
        return state.next()

    @gluon.jit
    def skip_last_values(self, state):
        """With shared stages: passes over the last values, after all tiles were skipped."""
        if self.KV_SHARE_STAGES:
            return self.skip(state)
        else:
            return state
