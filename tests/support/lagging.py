"""As alone.py, on kernels whose consumers have a warp that lags.

In program i, warp i mod 16 sleeps before it waits at a barrier, for longer than memory takes to
refill a stage: what the others may not do without it, they do here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper import barrier
from support import alone

_wait = barrier.wait


@gluon.jit
def _lag_and_wait(bar, parity, pred=True):
    gl.inline_asm(
        "{ .reg .pred lags; .reg .b32 warp, which;\n"
        "mov.u32 warp, %tid.x; shr.u32 warp, warp, 5;\n"
        "mov.u32 which, %ctaid.x; rem.u32 which, which, 16;\n"
        "setp.eq.u32 lags, warp, which; @lags nanosleep.u32 20000; }",
        "r,~{memory}",
        [bar],
    )
    _wait(bar, parity, pred)


if __name__ == "__main__":
    barrier.wait = _lag_and_wait
    alone.main()
