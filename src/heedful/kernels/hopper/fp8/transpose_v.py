"""Transposes V in spare warps of the attention kernel, while its consumers are at work.

Registers are allocated by warpgroups, so three more warps beside the producer's warp cost nothing.
Two of them take tiles of V from a counter, in the order in which the attention needs them. They
transpose them as `transpose_v_kernel.py` does, and count the tiles that are ready. The producer
waits for that count. A tile that was taken is always in work, and transposing waits for nothing but
its own loads. So programs that have not begun yet hold up no other.

N keys, E v dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.args.hopper import TransposeV
from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.tile_scheduler import l2_swizzle

# A tile is V_TILE_N keys times V_TILE_E dims. Keys [CHUNK_N n, CHUNK_N (n + 1)) of a head have one
# count.
V_TILE_N: gl.constexpr = gl.constexpr(128)
V_TILE_E: gl.constexpr = gl.constexpr(64)
CHUNK_N: gl.constexpr = gl.constexpr(1024)
# Stages of tiles as they are stored: one that is being transposed, and the next.
RAW_STAGES: gl.constexpr = gl.constexpr(2)
TRANSPOSE_WARPS: gl.constexpr = gl.constexpr(2)


@gluon.jit
def take(transpose):
    """The number of the next tile."""
    return gl.atomic_add(transpose.counts, 1, sem="relaxed")


@gluon.jit
def chunk(transpose, head, key):
    """Address of the count of ready tiles in the chunk with this key."""
    chunks = gl.cdiv(transpose.padded_k, CHUNK_N)
    return transpose.counts + 1 + head * chunks + key // CHUNK_N


@gluon.jit
def wait_for_chunk(transpose, head, key):
    """Returns once the chunk with this key may be loaded."""
    begin = key // CHUNK_N * CHUNK_N
    keys = gl.minimum(transpose.padded_k - begin, CHUNK_N)
    expected = keys // V_TILE_N * (transpose.E // V_TILE_E)
    inline_asm(
        "{ .reg .pred early; .reg .b32 n;\n"
        "AGAIN: ld.acquire.gpu.global.b32 n, [$0]; setp.lt.s32 early, n, $1;\n"
        "@early bra AGAIN; fence.proxy.async.global; }",
        "l,r,~{memory}",
        [chunk(transpose, head, key), expected],
    )


@gluon.jit
def place(transpose, index):
    """(head, first key, first dim) of a tile. The tiles of a block of keys are neighbours, the
    heads of a group alternate, and blocks go from the last to the first."""
    V_TILES: gl.constexpr = transpose.E // V_TILE_E
    blocks = transpose.padded_k // V_TILE_N
    dim = index % V_TILES * V_TILE_E
    heads = transpose.tiles // (blocks * V_TILES)
    head, step = l2_swizzle(
        index // V_TILES, blocks, heads, transpose.l2_heads, transpose.l2_groups
    )
    return head, (blocks - 1 - step) * V_TILE_N, dim


@gluon.constexpr_function
def _transpose_tile(_, inputs):
    """Assembly that transposes a tile. `ldmatrix` gives lane 4q + w a word of four dims of each of
    the keys 16a + 8h + 2t + b, where q is 4a + t: these are the keys of position q in transposed
    words. Each of the two warps takes every other 16 dims."""
    # ptxas: LLVM would move the index arithmetic of tensors before all roles, and use their
    # registers.
    box, out, padded_k, dims = (operand[0] for operand in inputs)
    lines = [
        ".reg .b32 lane, x, strip, from, r<4>, low<2>, high<2>, column;",
        ".reg .b64 to, at, pitch, offset; .reg .pred inside, more;",
        "mov.u32 lane, %laneid;",
        # Where the lane's row begins: lane 16h + 8b + 4a + t. A key has 64 bytes, whose 16-byte
        # groups are swapped by t.
        f"and.b32 x, lane, 3; mad.lo.u32 from, x, 144, {box};",
        "bfe.u32 x, lane, 2, 1; mad.lo.u32 from, x, 1024, from;",
        "bfe.u32 x, lane, 3, 1; mad.lo.u32 from, x, 64, from;",
        "bfe.u32 x, lane, 4, 1; mad.lo.u32 from, x, 512, from;",
        # This warp's first 16 dims.
        "mov.u32 x, %tid.x; bfe.u32 x, x, 5, 1; shl.b32 x, x, 4; xor.b32 from, from, x;",
        # Lane 4q + w has words of dims 4w to 4w + 3 of these, at position q.
        "and.b32 r0, lane, 3; mad.lo.u32 x, r0, 4, x;",
        f"cvt.u64.u32 pitch, {padded_k}; mul.wide.u32 offset, x, {padded_k};",
        f"add.u64 to, {out}, offset; and.b32 r0, lane, 28; cvt.u64.u32 offset, r0;",
        "add.u64 to, to, offset;",
    ]
    strips = V_TILE_N.value // 32
    for half in range(2):
        if half:
            lines += [
                f"sub.u32 from, from, {V_TILE_N.value * V_TILE_E.value}; xor.b32 from, from, 32;",
                "shl.b64 offset, pitch, 5; add.u64 to, to, offset;",
                f"sub.u64 to, to, {V_TILE_N.value}; add.u32 x, x, 32;",
            ]
        lines += [
            f"setp.lt.s32 inside, x, {dims}; mov.b32 strip, 0;",
            f'STRIP{half}: .pragma "nounroll";',
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r0, r1, r2, r3}, [from];",
            "prmt.b32 low0, r0, r1, 0x5140; prmt.b32 high0, r0, r1, 0x7362;",
            "prmt.b32 low1, r2, r3, 0x5140; prmt.b32 high1, r2, r3, 0x7362;",
            "mov.b64 at, to;",
        ]
        for pair, choice in (("low", "5410"), ("low", "7632"), ("high", "5410"), ("high", "7632")):
            lines += [
                f"prmt.b32 column, {pair}0, {pair}1, 0x{choice};",
                "@inside st.global.b32 [at], column; add.u64 at, at, pitch;",
            ]
        lines += [
            f"add.u32 from, from, {32 * V_TILE_E.value}; add.u64 to, to, 32;",
            f"add.u32 strip, strip, 1; setp.lt.u32 more, strip, {strips}; @more bra STRIP{half};",
        ]
    return "{ " + "\n".join(lines) + " }"


@gluon.jit
def transpose_tile(transpose, box, head, key, dim):
    """Stores a tile, which is in shared memory as (V_TILE_N, V_TILE_E), with its keys innermost."""
    out = transpose.v_t + (head.to(gl.int64) * transpose.dim_v + dim) * transpose.padded_k + key
    kinds: gl.constexpr = "r,l,r,r,~{memory}"
    inline_asm(_transpose_tile, kinds, [box, out, transpose.padded_k, transpose.dim_v - dim])


@gluon.jit
def count_ready(counter):
    """Counts a tile as ready, once the part of every thread can be loaded by TMA from anywhere."""
    inline_asm("fence.proxy.async.global;", "~{memory}")
    gl.barrier()
    inline_asm(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 63;\n"
        "setp.eq.u32 first, t, 0; @first red.release.gpu.global.add.s32 [$0], 1; }",
        "l,~{memory}",
        [counter],
    )


@gluon.jit
def load_v_tile(transpose, raw, index, state):
    """Starts loading a tile, if a tile of this number exists, and returns its place."""
    head, key, dim = place(transpose, index)
    if index < transpose.tiles:
        batch = head // transpose.heads_k
        raw.load(transpose.v, [batch, head - batch * transpose.heads_k, key, dim], state)
    return head, key, dim


@gluon.jit
def transpose_v(transpose: TransposeV, raw):
    """Transposes tiles until all are taken. Meanwhile the next one is loaded."""
    state = PipelineState.start(RAW_STAGES)
    index = take(transpose)
    head, key, dim = load_v_tile(transpose, raw, index, state)
    while index < transpose.tiles:
        state_now, head_now, key_now, dim_now = state, head, key, dim
        state = state.next()
        index = take(transpose)
        head, key, dim = load_v_tile(transpose, raw, index, state)
        raw.consumer_wait(state_now)
        transpose_tile(transpose, raw.boxes.index(state_now.index), head_now, key_now, dim_now)
        raw.consumer_release(state_now)
        count_ready(chunk(transpose, head_now, key_now))


@gluon.jit
def wait_for_v_t(transpose, params, tile, blocks, step, col):
    """If the attention kernel transposes V itself: waits until the values from key `col` on, which
    are loaded with this step's keys, are ready. Values are loaded in order, so only the first ones,
    and those that begin another chunk, can make it wait."""
    if transpose is not None:
        is_first = step == 1
        if blocks.swaps is not None:
            is_first = is_first | (blocks.swaps & (step == 2))
        if is_first | ((col + params.tile.BLOCK_N) % CHUNK_N == 0):
            wait_for_chunk(transpose, tile.batch * transpose.heads_k + tile.kv_head, col)
