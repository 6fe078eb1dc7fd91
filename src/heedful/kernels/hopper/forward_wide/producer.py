"""The producer warps of the forward of wide heads. Programs of a cluster have neighbouring rows and
the same keys and values: each loads one box of every part, for both."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.forward_wide.cluster import (
    has_tile,
    load_for_all,
    meet,
    parameters_of,
    place_in_cluster,
    wait,
)
from heedful.kernels.hopper.forward_wide.shared import BOXES, KEYS, PART, PARTS, WIDTH, boxes_of
from heedful.kernels.hopper.sm90.block_range import (
    first_key,
    n_block_at,
    n_block_count,
    program_n_block_range,
)
from heedful.kernels.hopper.sm90.compat import tma_load
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.sequences import (
    keys_at,
    page_at,
    page_numbers,
    queries_at,
)
from heedful.kernels.hopper.sm90.tile_scheduler import work_tile_at

PART_BYTES: gl.constexpr = gl.constexpr(KEYS.value * PART.value * 2)


@gluon.constexpr_function
def part_in_turn(turn):
    """The parts of values in the order in which they are loaded."""
    return turn % 2 * 2 + turn // 2


@gluon.jit
def places_of(desc, params, tile, rows_each, col):
    """Coordinates of 64 keys or values from `col` on, for each box of the map's rows. rows_each: as
    of `keys_at`."""
    if params.kv.table is None:
        return (keys_at(params, tile, rows_each, col),)
    else:
        HEIGHT: gl.constexpr = desc.block_type.shape[-2]
        DOWN: gl.constexpr = KEYS // HEIGHT
        table = params.kv.table + tile.batch.to(gl.int64) * params.kv.stride_tableb
        pages = page_numbers(table, params, tile.seq.len_k, col, HEIGHT, DOWN)
        places = ()
        for i in gl.static_range(DOWN):
            places = places + (page_at(params, tile, pages[i], rows_each, col + i * HEIGHT),)
        return places


@gluon.jit
def load_part(
    desc, parts, stage, full, places, place, CLUSTER: gl.constexpr, NUMBER: gl.constexpr, which
):
    """Loads part `which` of a tile: all of its columns, or this program's. places: from
    `places_of`."""
    DOWN: gl.constexpr = len(places)
    mbarrier.expect(full, PART_BYTES)
    boxes = boxes_of(parts, desc)
    for i in gl.static_range(BOXES // CLUSTER):
        box = i + place
        column = which * PART + box * WIDTH
        for down in gl.static_range(DOWN):
            to = boxes.index((stage * BOXES + box) * DOWN + down)
            load_for_all(desc, places[down][:-1] + [column], full, to, CLUSTER, NUMBER)


@gluon.jit
def load_keys(io, shared, params, tile, col, k_state, place, base, CLUSTER: gl.constexpr):
    """Loads the parts of a tile of keys, each once its stage is empty."""
    NUMBER: gl.constexpr = parameters_of(io.q)
    places = places_of(io.k, params, tile, params.kv_rows.k_rows, col)
    for part in gl.static_range(PARTS):
        wait(shared.k_empty.index(k_state.index), k_state.phase ^ 1, base)
        full = shared.k_full.index(k_state.index)
        load_part(io.k, shared.k, k_state.index, full, places, place, CLUSTER, NUMBER, part)
        k_state = k_state.next()
    return k_state


@gluon.jit
def load_values(io, shared, params, tile, col, phase, place, base, CLUSTER: gl.constexpr):
    """Loads the parts of a tile of values. The consumers' first parts come first."""
    NUMBER: gl.constexpr = parameters_of(io.q) + parameters_of(io.k)
    places = places_of(io.v, params, tile, params.kv_rows.v_rows, col)
    for turn in gl.static_range(PARTS):
        part = part_in_turn(turn)
        wait(shared.v_empty.index(part), phase ^ 1, base)
        full = shared.v_full.index(part)
        load_part(io.v, shared.v, part, full, places, place, CLUSTER, NUMBER, part)


@gluon.jit
def load_queries(io, shared, params, tile, row):
    """Loads this program's queries."""
    full = shared.q_full.index(0)
    mbarrier.expect(full, PARTS * PART_BYTES)
    boxes = boxes_of(shared.q, io.q)
    at = queries_at(params, tile, row)
    for box in gl.static_range(PARTS * BOXES):
        tma_load(io.q, at[:-1] + [box * WIDTH], full, boxes.index(box))


@gluon.jit
def key_producer(io, shared, scheduler, params, CLUSTER: gl.constexpr):
    """Loads a work tile's queries, and its keys in the order of visits."""
    meet(CLUSTER)
    place = place_in_cluster(CLUSTER)
    base = place << 24
    index = gl.program_id(0) // CLUSTER
    if has_tile(params, scheduler, index):
        tile, split = work_tile_at(params, scheduler, index)
        blocks = program_n_block_range(params, tile, split, ())
        k_state = PipelineState.start(shared.k.shape[0])
        for step in range(n_block_count(params, blocks)):
            if step == 0:
                load_queries(io, shared, params, tile, tile.row + place * ROWS)
            col = first_key(params, tile, blocks, n_block_at(params, blocks, step))
            k_state = load_keys(io, shared, params, tile, col, k_state, place, base, CLUSTER)
    meet(CLUSTER)


@gluon.jit
def value_producer(io, shared, scheduler, params, CLUSTER: gl.constexpr):
    """Loads a work tile's values in the order of visits. It is a warp of its own, so that neither
    keys nor values wait for room for the others."""
    meet(CLUSTER)
    place = place_in_cluster(CLUSTER)
    base = place << 24
    index = gl.program_id(0) // CLUSTER
    if has_tile(params, scheduler, index):
        tile, split = work_tile_at(params, scheduler, index)
        blocks = program_n_block_range(params, tile, split, ())
        for step in range(n_block_count(params, blocks)):
            col = first_key(params, tile, blocks, n_block_at(params, blocks, step))
            load_values(io, shared, params, tile, col, step & 1, place, base, CLUSTER)
    meet(CLUSTER)


@gluon.jit
def bystander(CLUSTER: gl.constexpr):
    """Warps that only meet: the barrier of a cluster counts those that fill a warpgroup, too."""
    meet(CLUSTER)
    meet(CLUSTER)
