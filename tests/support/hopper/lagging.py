"""As alone.py, on kernels that have a warp that lags.

In program i, warp i mod 16 sleeps before it waits at a barrier, for longer than memory takes to
refill a stage: what the others may not do without it, they do here. Over caches, warp i mod 4 of
each warpgroup also sleeps before it writes its rows of a segment: who merges may not be there
before.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.backward_halves import consumer as halves_consumer
from heedful.kernels.hopper.backward_halves import exchange
from heedful.kernels.hopper.backward_halves import producer as halves_producer
from heedful.kernels.hopper.decode import results as decode_results
from heedful.kernels.hopper.forward_wide import cluster, producer, scores, values
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.portable.decode import results as portable_results
from support.hopper import alone

_wait = barrier.wait
_wait_in_cluster = cluster.wait
_store_partial = portable_results.store_partial
_store_columns_partial = decode_results.store_partial


@triton.constexpr_function
def lag(warps, then=""):
    """PTX by which every warp sleeps whose number is the program's, mod `warps`."""
    return (
        "{ .reg .pred lags; .reg .b32 warp, which;\n"
        f"mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; rem.u32 warp, warp, {warps};\n"
        f"mov.u32 which, %ctaid.x; rem.u32 which, which, {warps};\n"
        "setp.eq.u32 lags, warp, which; @lags nanosleep.u32 20000; }" + then
    )


@gluon.jit
def _lag_and_wait(bar, parity, pred=True):
    gl.inline_asm(lag(16), "r,~{memory}", [bar])
    _wait(bar, parity, pred)


@gluon.jit
def _lag_and_wait_in_cluster(bar, parity, base):
    gl.inline_asm(lag(16), "r,~{memory}", [bar])
    _wait_in_cluster(bar, parity, base)


@triton.jit
def _lag_and_store(m_M, l_M, acc, slot, params):
    # It is to have a result.
    tl.inline_asm_elementwise(
        lag(4, " mov.b32 $0, 0;"),
        "=r,r,~{memory}",
        [tl.program_id(0)],
        tl.int32,
        is_pure=False,
        pack=1,
    )
    _store_partial(m_M, l_M, acc, slot, params)


@gluon.jit
def _lag_and_store_columns(params, segment, acc, m_M, l_M, CONSUMER: gl.constexpr):
    gl.inline_asm(lag(4), "r,~{memory}", [gl.program_id(0)])
    _store_columns_partial(params, segment, acc, m_M, l_M, CONSUMER)


def apply() -> None:
    """Has all kernels that are compiled from now on lag."""
    barrier.wait = _lag_and_wait
    for module in (halves_consumer, halves_producer, exchange, producer, scores, values):
        setattr(module, "wait", _lag_and_wait_in_cluster)  # noqa: B010  (a module has no such type)
    portable_results.store_partial = _lag_and_store
    decode_results.store_partial = _lag_and_store_columns


if __name__ == "__main__":
    apply()
    alone.main()
