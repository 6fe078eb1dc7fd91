"""V turned by warps that the attention kernel has to spare, while its consumers are at work.

The registers of a warpgroup are given out together, so that beside the producer's warp three more
cost nothing. Two of them draw pieces of V from a counter, in the order in which the attention wants
them, turn them as `fp8_values.py` does, and count what is ready; the producer waits for that count.
A piece that was drawn is always being worked on, and turning waits for nothing but its own loads,
so that programs which have not begun yet hold up no other.

N keys, E v dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.channel import Cursor
from heedful.kernels.hopper.compat import aggregate, inline_asm
from heedful.kernels.hopper.schedule import in_sections

# A piece is this many keys times this many dims; keys [CHUNK_N n, CHUNK_N (n + 1)) of a head are
# counted together.
PIECE_N: gl.constexpr = gl.constexpr(128)
PIECE_E: gl.constexpr = gl.constexpr(64)
CHUNK_N: gl.constexpr = gl.constexpr(1024)
# Pieces as they lie: one that is turned, and the next.
RAW_SLOTS: gl.constexpr = gl.constexpr(2)
TURN_WARPS: gl.constexpr = gl.constexpr(2)


@aggregate
class Turning:
    """What there is to turn: (B, G, N, E) into `turned`, (B, G, dim_v, padded_k).

    counts: how many pieces were drawn, then how many of each head's chunks are ready; all begin
    at 0. section, sections: KV heads that the attention works on side by side, see `in_sections`.
    """

    turned: gl.tensor
    counts: gl.tensor
    heads_k: gl.tensor
    section: gl.tensor
    sections: gl.tensor
    dim_v: gl.tensor
    padded_k: gl.tensor
    pieces: gl.tensor
    E: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, turned, counts, heads_k, section, sections, dim_v, padded_k, pieces, E):
        self.turned = turned
        self.counts = counts
        self.heads_k = heads_k
        self.section = section
        self.sections = sections
        self.dim_v = dim_v
        self.padded_k = padded_k
        self.pieces = pieces
        self.E = gl.constexpr(E)

    @gluon.jit
    def draw(self):
        return gl.atomic_add(self.counts, 1, sem="relaxed")

    @gluon.jit
    def chunk(self, head, key):
        """The count of what is ready of the chunk with this key."""
        chunks = gl.cdiv(self.padded_k, CHUNK_N)
        return self.counts + 1 + head * chunks + key // CHUNK_N

    @gluon.jit
    def wait(self, head, key):
        """Returns once the chunk with this key may be loaded."""
        begin = key // CHUNK_N * CHUNK_N
        keys = gl.minimum(self.padded_k - begin, CHUNK_N)
        expected = keys // PIECE_N * (self.E // PIECE_E)
        inline_asm(
            "{ .reg .pred early; .reg .b32 n;\n"
            "AGAIN: ld.acquire.gpu.global.b32 n, [$0]; setp.lt.s32 early, n, $1;\n"
            "@early bra AGAIN; fence.proxy.async.global; }",
            "l,r,~{memory}",
            [self.chunk(head, key), expected],
        )

    @gluon.jit
    def place(self, index):
        """Head, first key and first dim of a piece: the pieces of a block of keys are neighbours,
        the heads of a section take turns, and blocks go from the last to the first."""
        PIECES: gl.constexpr = self.E // PIECE_E
        blocks = self.padded_k // PIECE_N
        dim = index % PIECES * PIECE_E
        heads = self.pieces // (blocks * PIECES)
        head, step = in_sections(index // PIECES, blocks, heads, self.section, self.sections)
        return head, (blocks - 1 - step) * PIECE_N, dim


@gluon.constexpr_function
def _turn_piece(_, inputs):
    """Assembly, and not tensors: index arithmetic that LLVM finds in several roles it moves ahead
    of them all, where it takes registers from each.

    `ldmatrix` hands lane 4q + w a word of four dims from each of the keys 16a + 8h + 2t + b, where
    q is 4a + t: what position q of turned words wants. Each of the two
    warps takes every other 16 dims.
    """
    ((box,), (out,), (padded_k,), (dims,)) = inputs
    lines = [
        ".reg .b32 lane, x, strip, from, r<4>, low<2>, high<2>, column;",
        ".reg .b64 to, at, pitch, offset; .reg .pred inside, more;",
        "mov.u32 lane, %laneid;",
        # Where the lane's row begins: lane 16h + 8b + 4a + t; 64 bytes a key, 16-byte groups of
        # which are swapped by t.
        f"and.b32 x, lane, 3; mad.lo.u32 from, x, 144, {box};",
        "bfe.u32 x, lane, 2, 1; mad.lo.u32 from, x, 1024, from;",
        "bfe.u32 x, lane, 3, 1; mad.lo.u32 from, x, 64, from;",
        "bfe.u32 x, lane, 4, 1; mad.lo.u32 from, x, 512, from;",
        # This warp's first 16 dims.
        "mov.u32 x, %tid.x; bfe.u32 x, x, 5, 1; shl.b32 x, x, 4; xor.b32 from, from, x;",
        # Lane 4q + w: its words are at dims 4w to 4w + 3 of these, and at position q.
        "and.b32 r0, lane, 3; mad.lo.u32 x, r0, 4, x;",
        f"cvt.u64.u32 pitch, {padded_k}; mul.wide.u32 offset, x, {padded_k};",
        f"add.u64 to, {out}, offset; and.b32 r0, lane, 28; cvt.u64.u32 offset, r0;",
        "add.u64 to, to, offset;",
    ]
    strips = PIECE_N.value // 32
    for half in range(2):
        if half:
            lines += [
                f"sub.u32 from, from, {PIECE_N.value * PIECE_E.value}; xor.b32 from, from, 32;",
                "shl.b64 offset, pitch, 5; add.u64 to, to, offset;",
                f"sub.u64 to, to, {PIECE_N.value}; add.u32 x, x, 32;",
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
            f"add.u32 from, from, {32 * PIECE_E.value}; add.u64 to, to, 32;",
            f"add.u32 strip, strip, 1; setp.lt.u32 more, strip, {strips}; @more bra STRIP{half};",
        ]
    return "{ " + "\n".join(lines) + " }"


@gluon.jit
def turn_piece(turning, box, head, key, dim):
    """Writes a piece, which lies in shared memory (PIECE_N, PIECE_E), with its keys innermost."""
    out = turning.turned + (head.to(gl.int64) * turning.dim_v + dim) * turning.padded_k + key
    kinds: gl.constexpr = "r,l,r,r,~{memory}"
    inline_asm(_turn_piece, kinds, [box, out, turning.padded_k, turning.dim_v - dim])


@gluon.jit
def report(counter):
    """Counts a piece, once every thread's part of it can be loaded by TMA anywhere."""
    inline_asm("fence.proxy.async.global;", "~{memory}")
    gl.barrier()
    inline_asm(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 63;\n"
        "setp.eq.u32 first, t, 0; @first red.release.gpu.global.add.s32 [$0], 1; }",
        "l,~{memory}",
        [counter],
    )


@gluon.jit
def fetch(turning, desc, raw, index, at):
    """Starts loading a piece, if there is one of this number, and says where it is."""
    head, key, dim = turning.place(index)
    if index < turning.pieces:
        batch = head // turning.heads_k
        raw.load(desc, [batch, head - batch * turning.heads_k, key, dim], at)
    return head, key, dim


@gluon.jit
def turner(desc, turning, raw):
    """Turns pieces until all are drawn. The next is loaded meanwhile."""
    at = Cursor.start(RAW_SLOTS)
    index = turning.draw()
    head, key, dim = fetch(turning, desc, raw, index, at)
    while index < turning.pieces:
        at_now, head_now, key_now, dim_now = at, head, key, dim
        at = at.next()
        index = turning.draw()
        head, key, dim = fetch(turning, desc, raw, index, at)
        raw.wait(at_now)
        turn_piece(turning, raw.boxes.index(at_now.slot), head_now, key_now, dim_now)
        raw.release(at_now)
        report(turning.chunk(head_now, key_now))


@gluon.jit
def wait_for_turner(turning, tile, col, is_first, BLOCK_N: gl.constexpr):
    """Where the attention kernel turns V itself: waits until the values from key `col` on are
    ready. Of values that are loaded in order, the first ones and those of another chunk than the
    ones before them have anything to wait for."""
    if turning is not None:  # noqa: SIM102  (known when compiling, and `and` is not)
        if is_first | ((col + BLOCK_N) % CHUNK_N == 0):
            turning.wait(tile.batch * turning.heads_k + tile.kv_head, col)
