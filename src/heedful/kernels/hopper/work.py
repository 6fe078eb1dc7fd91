"""What a program works on next: a tile of queries, and the key tiles to visit for it.

Keys are visited from the last tile to the first. Visit numbers count from there, over all that the
tile's rows see, so that a sequence is split by its own length alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.schedule import ROWS, KeyRange, decode, key_range
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
