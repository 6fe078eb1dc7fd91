"""What a program works on next: a tile of queries, and the key tiles to visit for it.

Keys are visited from the last tile to the first. Visit numbers count from there, over all that the
tile's rows see, so that a sequence is split by its own length alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.schedule import ROWS, KeyRange, Tile, decode, key_range
from heedful.kernels.hopper.sequences import position, trim


@gluon.jit
def count(shape):
    """How many pieces of work there are."""
    if shape.splits is None:
        return shape.tiles
    else:
        return shape.tiles * shape.splits


@gluon.jit
def take(shape, index):
    """The tile of piece `index`, and which split of its keys it is. Tiles of one split are
    neighbours, so that those of a head share its keys."""
    if shape.splits is None:
        return trim(shape, decode(shape, index)), gl.to_tensor(0)
    else:
        split = index // shape.tiles
        return trim(shape, decode(shape, index - split * shape.tiles)), split


@gluon.jit
def tell(shape, deal, index, tile, split, at):
    """What `hear` needs to know of the producer's piece `index`. Sizes of dense sequences are the
    same in all."""
    if shape.order is None:
        deal.tell((index, split, tile.batch, tile.head, tile.row), at)
    else:
        sizes = (tile.start_q, tile.len_q, tile.len_k, tile.off, tile.stored_q)
        deal.tell((index, split, tile.batch, tile.head, tile.row) + sizes, at)


@gluon.jit
def hear(shape, deal, index, at):
    """A consumer's piece `index`, as `take` gives it but for where keys lie."""
    if deal.drawn is None:
        return take(shape, index)
    else:
        split = deal.word(1, at)
        batch = deal.word(2, at)
        head = deal.word(3, at)
        row = deal.word(4, at)
        kv_head = head // shape.group
        start_q = gl.to_tensor(0)
        len_q = shape.seqlen_q
        len_k = shape.seqlen_k
        off = shape.shift + shape.align * (len_k - len_q)
        stored_q = len_q
        if shape.order is not None:
            start_q = deal.word(5, at)
            len_q = deal.word(6, at)
            len_k = deal.word(7, at)
            off = deal.word(8, at)
            stored_q = deal.word(9, at)
        deal.heard(at)
        unknown = gl.to_tensor(0)
        tile = Tile(batch, head, kv_head, row, start_q, unknown, len_q, len_k, off, stored_q, batch)
        return tile, split


@gluon.jit
def hear_next(shape, deal, index, at):
    """The number of a consumer's next piece after `index`, and its tile; behind the last piece a
    tile that means nothing."""
    index = deal.follow(index, at)
    tile, _ = hear(shape, deal, gl.minimum(index, deal.count - 1), at)
    return index, tile


@gluon.jit
def steps_of(shape, keys):
    """How many key tiles are visited."""
    if shape.first is None:
        return keys.end - keys.begin
    else:
        return keys.visits


@gluon.jit
def key_tile(shape, keys, step):
    """The key tile visited in this step."""
    if shape.first is None:
        return keys.end - 1 - step
    else:
        visit = keys.skipped + step
        before = keys.end - keys.begin
        later = keys.first_end - 1 - (visit - before)
        return gl.where(visit < before, keys.end - 1 - visit, later)


@gluon.jit
def program_keys(shape, tile, split):
    """The key tiles that all consumers of a program visit together."""
    ROWS_OF_ALL: gl.constexpr = shape.CONSUMERS * ROWS // shape.PACK
    place = position(shape, tile.row)
    keys = key_range(shape, tile, place, ROWS_OF_ALL)
    visits = keys.end - keys.begin
    first_end = gl.to_tensor(0)
    if shape.first is not None:
        seen = gl.minimum(shape.first, tile.len_k)
        if shape.IS_RIGHT:
            last = gl.minimum(place + ROWS_OF_ALL, tile.len_q) - 1
            seen = gl.minimum(seen, gl.maximum(last + tile.off + shape.right + 1, 0))
        first_end = gl.minimum(gl.cdiv(seen, shape.BLOCK_N), keys.begin)
        visits += first_end
    skipped = gl.to_tensor(0)
    if shape.splits is not None:
        each = gl.cdiv(visits, shape.splits)
        skipped = gl.minimum(split * each, visits)
        visits = gl.minimum(skipped + each, visits) - skipped
    if shape.first is not None:
        return KeyRange(
            keys.begin, keys.full_begin, keys.full_end, keys.end, first_end, skipped, visits
        )
    elif shape.splits is not None:
        end = keys.end - skipped
        return KeyRange(end - visits, keys.full_begin, keys.full_end, end)
    else:
        return keys


@gluon.jit
def consumer_keys(shape, tile, row, whole):
    """Of a program's key tiles, those that one consumer's rows from `row` on see."""
    if shape.first is not None:
        # They see leading and later keys, with others between: too much to keep apart.
        return whole
    else:
        keys = key_range(shape, tile, position(shape, row), ROWS // shape.PACK)
        if shape.splits is not None:
            end = gl.maximum(gl.minimum(keys.end, whole.end), whole.begin)
            begin = gl.minimum(gl.maximum(keys.begin, whole.begin), end)
            keys = KeyRange(begin, keys.full_begin, keys.full_end, end)
        return keys
