"""Pingpong between consumers: one queues its matrix products while another computes its softmax.

Each consumer waits at a named barrier of its own, and the consumer before it arrives there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.barrier import FIRST_NAMED, arrive_named, sync_named

# The barrier of consumer 0; those of the other consumers follow.
TURN_BARRIER: gl.constexpr = FIRST_NAMED


@gluon.jit
def pingpong_sync(params, CONSUMER: gl.constexpr):
    """Waits until the consumer before this one has queued its matrix products."""
    if params.tile.PINGPONG:
        sync_named(TURN_BARRIER + CONSUMER)


@gluon.jit
def pingpong_arrive(params, CONSUMER: gl.constexpr):
    """Lets the next consumer queue its matrix products."""
    if params.tile.PINGPONG:
        arrive_named(TURN_BARRIER + (CONSUMER + 1) % params.tile.CONSUMERS)


@gluon.jit
def skip(kv, kv_state, count, params, CONSUMER: gl.constexpr):
    """Passes over `count` tiles that other consumers of this program need and this one does not."""
    for _ in range(count):
        pingpong_sync(params, CONSUMER)
        pingpong_arrive(params, CONSUMER)
        kv_state = kv.skip(kv_state)
    return kv_state


@gluon.jit
def skip_all(kv, kv_state, count, params, CONSUMER: gl.constexpr):
    """Passes over all tiles that this program visits; there may be none."""
    kv_state = skip(kv, kv_state, count, params, CONSUMER)
    if count > 0:
        kv_state = kv.skip_last_values(kv_state)
    return kv_state
