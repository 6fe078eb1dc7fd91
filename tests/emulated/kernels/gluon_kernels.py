"""A phase-shifted Gluon kernel for CDNA4: two wave groups, one a stage behind the other.

It sums tiles that reach LDS by direct DMA into two buffers. IS_SAFE says where a wave retires its
DMA: at the end of the turn, two barriers before the other group reads the tile, or just before its
own read, when the other group may already be reading.
"""

# Device code is a dialect: a type checker reads its tensors as plain functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

copy = gl.amd.cdna4.async_copy


@gluon.jit
def sum_tiles(x_ptr, out_ptr, tiles, ROWS: gl.constexpr, COLS: gl.constexpr, IS_SAFE: gl.constexpr):
    """out (ROWS, COLS) = the sum of `tiles` tiles of x (tiles, ROWS, COLS)."""
    WARPS: gl.constexpr = gl.num_warps()
    across: gl.constexpr = COLS // 8
    fetch: gl.constexpr = gl.BlockedLayout([1, 8], [64 // across, across], [WARPS, 1], [1, 0])
    # Reading by columns of waves: every wave needs what the others have fetched.
    read: gl.constexpr = gl.BlockedLayout([1, 4], [16, 4], [1, WARPS], [1, 0])
    smem: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[512, 16]], [ROWS, COLS], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, fetch))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, fetch))
    offsets = rows[:, None] * COLS + cols[None, :]
    tiles_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, ROWS, COLS], smem)
    total = gl.zeros([ROWS, COLS], gl.float32, read)
    copy.buffer_load_to_shared(tiles_smem.index(0), x_ptr, offsets)
    copy.commit_group()
    if IS_SAFE:
        copy.wait_group(0)
        gl.barrier()
    for i in range(0, tiles):
        now = i % 2
        with gl.amd.warp_pipeline_stage("fetch", priority=0):
            later = (i + 1) % tiles * ROWS * COLS
            copy.buffer_load_to_shared(tiles_smem.index(1 - now), x_ptr, offsets + later)
            copy.commit_group()
        if not IS_SAFE:
            copy.wait_group(1)
        with gl.amd.warp_pipeline_stage("read", priority=0):
            tile = copy.load_shared_relaxed(tiles_smem.index(now), read)
        with gl.amd.warp_pipeline_stage("add", priority=1):
            total = total + tile.to(gl.float32)
        if IS_SAFE:
            copy.wait_group(0)
    out_rows = gl.arange(0, ROWS, gl.SliceLayout(1, read))
    out_cols = gl.arange(0, COLS, gl.SliceLayout(0, read))
    out_offsets = out_rows[:, None] * COLS + out_cols[None, :]
    gl.amd.cdna3.buffer_store(total, out_ptr, out_offsets)
