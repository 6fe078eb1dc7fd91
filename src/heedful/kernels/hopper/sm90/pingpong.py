"""Ping-pong between consumers: one queues its matrix products while another is in its softmax.

Named barriers from 8 on, one a consumer: it waits at its own, and the one before it arrives there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _at_barrier(DOES: gl.constexpr, barrier):
    """DOES: what two consumers do there, in PTX."""
    WORDS: gl.constexpr = f"{DOES} $1, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(WORDS, "=r,r", [gl.to_tensor(barrier)], gl.int32, False, 1)


@gluon.jit
def pingpong_sync(params, CONSUMER: gl.constexpr):
    """Waits until the consumer before this one has queued its matrix products."""
    if params.tile.PINGPONG:
        _at_barrier("bar.sync", 8 + CONSUMER)


@gluon.jit
def pingpong_arrive(params, CONSUMER: gl.constexpr):
    """Lets the next consumer queue its matrix products."""
    if params.tile.PINGPONG:
        _at_barrier("bar.arrive", 8 + (CONSUMER + 1) % params.tile.CONSUMERS)


@gluon.jit
def skip(kv, kv_state, count, params, CONSUMER: gl.constexpr):
    """Passes over tiles that other consumers of this program need and this one does not."""
    for _ in range(count):
        pingpong_sync(params, CONSUMER)
        pingpong_arrive(params, CONSUMER)
        kv_state = kv.skip(kv_state)
    return kv_state


@gluon.jit
def skip_all(kv, kv_state, count, params, CONSUMER: gl.constexpr):
    """Passes over all tiles that this program works on: there may be none."""
    kv_state = skip(kv, kv_state, count, params, CONSUMER)
    if count > 0:
        kv_state = kv.skip_last_values(kv_state)
    return kv_state
