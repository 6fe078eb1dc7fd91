"""The two consumers of the MLA decode over latent vectors of 8 bits. A step has two blocks of 64
keys. Each consumer computes the probabilities of one block, and adds the values of both blocks to
its 256 of the output's 512 columns. So each number is converted once as key and once as value.

    consumer 0   softmax 0   P0 V0 left   S0 of the next step     P1 V1 left
    consumer 1   S1                       P0 V0 right  softmax 1  P1 V1 right

Operands and numbers are those of `converting_consumer`, but for scales of rows of bytes: keys and
values are multiplied by them as they are converted. A key's scales are divided by the exponent of
its largest; its scores get it back.

N keys of a block, M query rows, C pairs of value columns, L lanes (of warps) that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heedful.kernels.common.key_range import key_bounds
from heedful.kernels.hopper.decode.results import finish_segment, merge_share
from heedful.kernels.hopper.decode.share import look
from heedful.kernels.hopper.mla.boxes import KEYS
from heedful.kernels.hopper.mla.conversion import (
    GROUPS,
    as_keys,
    as_values,
    pairs_of,
    scaled_as_keys,
    scaled_as_values,
)
from heedful.kernels.hopper.mla.converting_consumer import (
    largest_exponents,
    output_rows,
    power_of_two,
)
from heedful.kernels.hopper.mla.converting_pair_queries import load_query_half
from heedful.kernels.hopper.mla.converting_pair_shared import (
    BOTH_BARRIER,
    HALF_BOX,
    OPEN,
    PARTS,
    VOTE_BARRIER,
    lanes_apart,
    load_flag,
    store_flag,
)
from heedful.kernels.hopper.mla.shared import BLOCKS
from heedful.kernels.hopper.mla.swap_ab_consumer import (
    lane_sums,
    masked_keys,
    scale_columns,
    scale_sums,
)
from heedful.kernels.hopper.mla.thread_order import (
    OF_ROWS,
    do_all_merge,
    finish_in_thread_order,
    is_in_thread_order,
    merge_share_by_turns,
)
from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.barrier import sync_named
from heedful.kernels.hopper.sm90.compat import inline_asm, opaque, reinterpret
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout
from heedful.kernels.hopper.sm90.pipeline import PipelineState
from heedful.kernels.hopper.sm90.softmax import (
    float_bits,
    shift_of,
    threshold_limit,
    vote_above,
)

PAIRS: gl.constexpr = gl.constexpr(64)  # of columns, in a group
LAYOUT: gl.constexpr = scores_layout(gl.float16, ROWS.value)
COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)  # of rows, which are columns of products
OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)


@gluon.jit
def normal_scales(keys, block):
    """(scales of a block's keys by groups, divided by a power of two that brings the largest near
    1, in float16; the exponents of these powers), of shape (keys, 1)."""
    by_group = ()
    for group in gl.static_range(GROUPS):
        by_group = by_group + (keys.scales.index(block.index).slice(group, 1, dim=1).load(LAYOUT),)
    exponent_N1 = largest_exponents(by_group)
    normal = ()
    for group in gl.static_range(GROUPS):
        normal = normal + ((by_group[group] * power_of_two(-exponent_N1)).to(gl.float16),)
    return normal, exponent_N1


@gluon.jit
def multiply_part(operands, q, box, s_NM):
    """Starts adding the products of both operands of a part of the keys with the queries beside
    them, boxes `box` and `box` + 1 of `q`."""
    s_NM = warpgroup_mma(operands[0], q.index(box).permute((1, 0)), s_NM, is_async=True)
    return warpgroup_mma(operands[1], q.index(box + 1).permute((1, 0)), s_NM, is_async=True)


@gluon.jit
def part_of_keys(keys, block, group, HALF: gl.constexpr, scales, GROUP: gl.constexpr):
    """Left operands from 64 columns of a block's keys, half of a group. GROUP: `group`, if there
    are scales."""
    at = block.index * GROUPS + group
    if HALF == 0:
        barrier.wait(keys.values.full.index(at), block.phase)
    pairs = pairs_of(keys.values.boxes.index(at))
    pairs_NC = pairs.slice(HALF * HALF_BOX, HALF_BOX, dim=1).load(OPERAND)
    if scales is None:
        return as_keys(pairs_NC)
    else:
        return scaled_as_keys(pairs_NC, gl.convert_layout(scales[GROUP], OPERAND))


@gluon.jit
def plain_scores(shared, keys, block):
    """k q^T of a block of keys. While the products of a part run, the next one is converted."""
    # ptxas: no product runs where the loop begins again: otherwise all are serialised. As a loop,
    # because a step's instructions do not fit the cache of instructions otherwise.
    s_NM = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
    barrier.wait(keys.rest.full.index(block.index), block.phase)
    operands = as_keys(pairs_of(keys.rest.boxes.index(block.index)).load(OPERAND))
    s_NM = multiply_part(operands, shared.q, 2 * PARTS + opaque(0), s_NM)
    operands = part_of_keys(keys, block, 0, 0, None, 0)
    s_NM = warpgroup_mma_wait(0, deps=[s_NM])
    barrier.arrive_each_warp(keys.rest.empty.index(block.index))
    for group in range(GROUPS):
        s_NM = multiply_part(operands, shared.q, 4 * group, s_NM)
        second = part_of_keys(keys, block, group, 1, None, 0)
        s_NM = multiply_part(second, shared.q, 4 * group + 2, s_NM)
        s_NM = warpgroup_mma_wait(2, deps=[s_NM])
        # Converted in vain after the last group.
        operands = part_of_keys(keys, block, gl.minimum(group + 1, GROUPS - 1), 0, None, 0)
        s_NM = warpgroup_mma_wait(0, deps=[s_NM])
    return s_NM


@gluon.jit
def block_scores(shared, keys, block):
    """(k q^T of a block of keys, group by group as each is loaded; exponents of keys' scales, if
    there are scales)."""
    if keys.scales is None:
        return plain_scores(shared, keys, block), None
    else:
        zero = opaque(0)
        barrier.wait(keys.rest.full.index(block.index), block.phase)
        q_DM = shared.q_rest.index(zero).permute((1, 0))
        k_ND = keys.rest.boxes.index(block.index)
        s_NM = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
        s_NM = warpgroup_mma(k_ND, q_DM, s_NM, use_acc=False, is_async=True)
        scales, exponent_N1 = normal_scales(keys, block)
        s_NM = warpgroup_mma_wait(0, deps=[s_NM]) * power_of_two(-exponent_N1)
        for part in gl.static_range(PARTS):
            operands = part_of_keys(keys, block, part // 2, part % 2, scales, part // 2)
            s_NM = multiply_part(operands, shared.q, 2 * part + zero, s_NM)
            # The registers of the products before these are free.
            s_NM = warpgroup_mma_wait(2, deps=[s_NM])
        return warpgroup_mma_wait(0, deps=[s_NM]) * power_of_two(exponent_N1), exponent_N1


@gluon.jit
def keep_scales(shared, keys, block, BLOCK: gl.constexpr):
    """Stores the scales of a block's values for both consumers; releases what they come from."""
    scales, _exponent = normal_scales(keys, block)
    for group in gl.static_range(GROUPS):
        shared.scales.index(BLOCK * GROUPS + group).store(scales[group].permute((1, 0)))
    barrier.arrive_each_warp(keys.rest.empty.index(block.index))


@gluon.jit
def pairs_of_values(keys, block, PART: gl.constexpr, CONSUMER: gl.constexpr):
    """Pairs of columns of 32 keys, a quarter of a consumer's half of a block's values, in the
    layout of a left operand. Releases the values with the second part of a group."""
    at = block.index * GROUPS + CONSUMER * (GROUPS // 2) + PART // 2
    if PART % 2 == 0:
        barrier.wait(keys.values.full.index(at), block.phase)
    pairs = pairs_of(keys.values.boxes.index(at)).slice(PART % 2 * 32, 32, dim=0)
    pairs_CN = pairs.permute((1, 0)).load(OPERAND)
    if PART % 2 == 1:
        barrier.arrive_each_warp(keys.values.empty.index(at))
    return pairs_CN


@gluon.jit
def first_values(keys, block, CONSUMER: gl.constexpr):
    """The operands of the first part of `add_values`, and pairs of columns of the second, which a
    wait for probabilities hides; nothing with scales."""
    if keys.scales is None:
        pairs_CN = pairs_of_values(keys, block, 0, CONSUMER)
        next_CN = pairs_of_values(keys, block, 1, CONSUMER)
        even, odd = as_values(pairs_CN)
        return even, odd, next_CN
    else:
        return ()


@gluon.jit
def operands_of_values(
    shared, pairs_CN, PART: gl.constexpr, BLOCK: gl.constexpr, CONSUMER: gl.constexpr
):
    """Left operands of a part of a block's values: even and odd columns."""
    if shared.scales is None:
        return as_values(pairs_CN)
    else:
        scales = shared.scales.index(BLOCK * GROUPS + CONSUMER * (GROUPS // 2) + PART // 2)
        return scaled_as_values(pairs_CN, scales.slice(PART % 2 * 32, 32, dim=1).load(OPERAND))


@gluon.jit
def add_values(shared, keys, block, acc, BLOCK: gl.constexpr, CONSUMER: gl.constexpr, begun=()):
    """O^T += V^T P^T for a consumer's half of a block's values; releases them. Without scales each
    part is loaded before the one before is converted: with them more would be spilled. begun: what
    `first_values` returned."""
    zero = opaque(0)
    AHEAD: gl.constexpr = keys.scales is None
    if len(begun) == 0:
        pairs_CN = pairs_of_values(keys, block, 0, CONSUMER)
    else:
        pairs_CN = begun[2]
    for part in gl.static_range(GROUPS):
        next_CN = pairs_CN
        if AHEAD and part + 1 < GROUPS and (part > 0 or len(begun) == 0):
            next_CN = pairs_of_values(keys, block, part + 1, CONSUMER)
        if part == 0 and len(begun) > 0:
            even, odd = begun[0], begun[1]
        else:
            even, odd = operands_of_values(shared, pairs_CN, part, BLOCK, CONSUMER)
        p_NM = shared.p.index(BLOCK + zero).slice(part % 2 * 32, 32, dim=0)
        even = warpgroup_mma(even, p_NM, acc[part // 2 * 2], is_async=True)
        odd = warpgroup_mma(odd, p_NM, acc[part // 2 * 2 + 1], is_async=True)
        # The registers of the products before these are free.
        out = warpgroup_mma_wait(2, deps=[even, odd])
        acc = acc[: part // 2 * 2] + out + acc[part // 2 * 2 + 2 :]
        if not AHEAD and part + 1 < GROUPS:
            next_CN = pairs_of_values(keys, block, part + 1, CONSUMER)
        pairs_CN = next_CN
    return warpgroup_mma_wait(0, deps=[acc[0], acc[1], acc[2], acc[3]])


@gluon.jit
def any_warp(flag, CONSUMER: gl.constexpr):
    """Whether the flag of any warp of a consumer is set; its warps wait for each other."""
    WORDS: gl.constexpr = (
        "{ .reg .pred one, all; setp.ne.s32 one, $1, 0;\n"
        f"bar.red.or.pred all, {VOTE_BARRIER + CONSUMER}, 128, one; selp.b32 $0, 1, 0, all; }}"
    )
    return inline_asm(WORDS, "=r,r,~{memory}", [flag], gl.int32)


@gluon.jit
def no_sums():
    """Sums of lanes of no keys."""
    return lane_sums(gl.zeros([KEYS, ROWS], gl.float32, LAYOUT))


@gluon.jit
def add_sums(shared, l_LM, p_NM):
    """Sums of lanes, and those of a block's probabilities."""
    new_LM = lane_sums(p_NM)
    if len(l_LM) == 0:
        kept = shared.lanes.index(0)
        kept.store(kept.load(new_LM.type.layout) + new_LM)
        return l_LM
    else:
        return (l_LM[0] + new_LM,)


@gluon.jit
def rescaled(shared, acc, l_LM, old_M, new_M):
    """(outputs, sums of lanes) of a consumer, after references of rows have changed."""
    # A row without a reference has nothing to be scaled.
    alpha_M = gl.where(old_M == float("-inf"), 1.0, gl.exp2(old_M - new_M))
    if len(l_LM) == 0:
        kept = shared.lanes.index(0)
        kept.store(scale_sums(kept.load(no_sums().type.layout), alpha_M))
    else:
        l_LM = (scale_sums(l_LM[0], alpha_M),)
    return scale_columns(acc, alpha_M), l_LM


@gluon.jit
def raise_references(shared, t_NM, acc, l_LM):
    """(scores over references, outputs, sums of lanes) after references have become the greatest
    scores so far. t_NM: scores over the references before."""
    s_NM = t_NM + shared.shift.index(0).load(COLUMNS)[None, :]
    old_M = shared.top.index(0).load(COLUMNS)
    new_M = gl.maximum(old_M, gl.max(s_NM, 0))
    shift_M = shift_of(new_M)
    shared.before.index(0).store(old_M)
    shared.top.index(0).store(new_M)
    shared.shift.index(0).store(shift_M)
    store_flag(shared.flags.index(OPEN), vote_above(0.0 - new_M, float_bits(3e38)))
    acc, l_LM = rescaled(shared, acc, l_LM, old_M, new_M)
    return s_NM - shift_M[None, :], acc, l_LM


@gluon.jit
def block_softmax(shared, keys, block, s_NM, exponent_N1, acc, l_LM, phase, BLOCK: gl.constexpr):
    """(outputs, sums of lanes) after a block's probabilities were stored. References change only
    where a score exceeds one by so much that its power is too large for float16. exponent_N1: as in
    `converting_consumer.softmax_columns`."""
    scale_M = shared.scale.index(0).load(COLUMNS)
    t_NM = s_NM * scale_M[None, :] - shared.shift.index(0).load(COLUMNS)[None, :]
    if exponent_N1 is not None:
        t_NM += exponent_N1.to(gl.float32)
    exceeds = vote_above(t_NM, float_bits(threshold_limit(gl.float16)))
    is_open = load_flag(shared.flags.index(OPEN))
    changes = any_warp(exceeds | is_open, BLOCK)
    if changes != 0:
        t_NM, acc, l_LM = raise_references(shared, t_NM, acc, l_LM)
    store_flag(shared.flags.index(BLOCK), changes)
    p_NM = gl.exp2(t_NM)
    shared.p.index(BLOCK).store(p_NM.to(gl.float16))
    if exponent_N1 is not None:
        keep_scales(shared, keys, block, BLOCK)
    fence_async_shared()
    barrier.arrive_each_warp(shared.p_full.index(BLOCK))
    if exponent_N1 is not None:
        p_NM *= power_of_two(-exponent_N1)
    l_LM = add_sums(shared, l_LM, p_NM)
    barrier.wait(shared.p_full.index(BLOCK), phase)
    return acc, l_LM


@gluon.jit
def follow(shared, acc, l_LM, phase, BLOCK: gl.constexpr):
    """(outputs, sums of lanes) of the other consumer, once a block's probabilities are there."""
    barrier.wait(shared.p_full.index(BLOCK), phase)
    if load_flag(shared.flags.index(BLOCK)) != 0:
        old_M = shared.before.index(0).load(COLUMNS)
        acc, l_LM = rescaled(shared, acc, l_LM, old_M, shared.top.index(0).load(COLUMNS))
    return acc, l_LM


@gluon.jit
def own_scores(shared, keys, params, segment, bounds, block, col):
    """Masked scores of a block from key `col` on, and exponents as from `block_scores`."""
    s_NM, exponent_N1 = block_scores(shared, keys, block)
    return masked_keys(s_NM, params, segment, bounds, col), exponent_N1


@gluon.jit
def first_steps(shared, keys, params, segment, bounds, block, phase, acc, l_LM):
    """A segment of consumer 0. Without scales each step computes the scores of the next one before
    it waits for the other consumer's probabilities."""
    # ptxas: with scales more is spilled then, and 128 heads over 16 x 8192 keys take 1.12 times as
    # long (H200, 2026-11-27).
    AHEAD: gl.constexpr = keys.scales is None
    col = segment.start * params.tile.BLOCK_N
    if AHEAD:
        s_NM, exponent_N1 = own_scores(shared, keys, params, segment, bounds, block, col)
        shared.scores.index(0).store(s_NM)
    for number in range(segment.start, segment.stop):
        if AHEAD:
            s_NM, exponent_N1 = shared.scores.index(0).load(LAYOUT), None
        else:
            col = number * params.tile.BLOCK_N
            s_NM, exponent_N1 = own_scores(shared, keys, params, segment, bounds, block, col)
        acc, l_LM = block_softmax(shared, keys, block, s_NM, exponent_N1, acc, l_LM, phase, 0)
        acc = add_values(shared, keys, block, acc, 0, 0)
        second = block.ahead(1)
        block = block.ahead(2)
        if AHEAD:  # noqa: SIM102  (known when compiling, and `and` is not)
            if number + 1 < segment.stop:
                col = (number + 1) * params.tile.BLOCK_N
                s_NM, exponent_N1 = own_scores(shared, keys, params, segment, bounds, block, col)
                shared.scores.index(0).store(s_NM)
        begun = first_values(keys, second, 0)
        acc, l_LM = follow(shared, acc, l_LM, phase, 1)
        acc = add_values(shared, keys, second, acc, 1, 0, begun)
        phase ^= 1
    return block, phase, acc, l_LM


@gluon.jit
def second_steps(shared, keys, params, segment, bounds, block, phase, acc, l_LM):
    """A segment of consumer 1."""
    for number in range(segment.start, segment.stop):
        col = number * params.tile.BLOCK_N + KEYS
        second = block.ahead(1)
        s_NM, exponent_N1 = own_scores(shared, keys, params, segment, bounds, second, col)
        begun = first_values(keys, block, 1)
        acc, l_LM = follow(shared, acc, l_LM, phase, 0)
        acc = add_values(shared, keys, block, acc, 0, 1, begun)
        acc, l_LM = block_softmax(shared, keys, second, s_NM, exponent_N1, acc, l_LM, phase, 1)
        acc = add_values(shared, keys, second, acc, 1, 1)
        block = block.ahead(2)
        phase ^= 1
    return block, phase, acc, l_LM


@gluon.jit
def sums_of_both(shared, l_LM, layout: gl.constexpr, CONSUMER: gl.constexpr):
    """Sums of rows over the blocks of both consumers, whose references are equal by now. They meet
    where probabilities were."""
    # Both consumers' products have read the probabilities.
    sync_named(BOTH_BARRIER)
    if len(l_LM) == 0:
        l_LM = (shared.lanes.index(0).load(no_sums().type.layout),)
    lanes = reinterpret(shared.p, gl.float32, [BLOCKS, 32, ROWS], lanes_apart(2))
    lanes.index(CONSUMER).store(l_LM[0].reshape([32, ROWS]))
    sync_named(BOTH_BARRIER)
    # Each thread adds half of a row's.
    halves: gl.constexpr = gl.BlockedLayout([32, 1], [1, 32], [2, 2], [1, 0])
    lanes = reinterpret(shared.p, gl.float32, [1, BLOCKS * 32, ROWS], lanes_apart(2)).index(0)
    return gl.convert_layout(gl.sum(lanes.load(halves), 0), layout)


@gluon.jit
def converting_pair_consumer(io, shared, keys, share, params, CONSUMER: gl.constexpr):
    """Computes columns [256 CONSUMER, 256 CONSUMER + 256) of all segments of this program."""
    block = PipelineState.start(params.tile.STAGES)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    whole = share
    while share.x < share.end:
        segment, share = look(share, params)
        if segment.start < segment.stop:
            load_query_half(io, shared, params, segment, turn, CONSUMER)
            turn ^= 1
            group = params.shape.heads_q // params.shape.heads_k
            row = segment.row0 // group
            bounds = key_bounds(row, row, segment.seq.off, segment.seq.len_k, params.mask)
            acc = ()
            for _ in gl.static_range(GROUPS):
                acc = acc + (gl.zeros([PAIRS, ROWS], gl.float32, LAYOUT),)
            l_LM = (no_sums(),)
            if CONSUMER == 0:
                if shared.lanes is not None:
                    shared.lanes.index(0).store(l_LM[0])
                    l_LM = ()
                block, phase, acc, l_LM = first_steps(
                    shared, keys, params, segment, bounds, block, phase, acc, l_LM
                )
            else:
                block, phase, acc, l_LM = second_steps(
                    shared, keys, params, segment, bounds, block, phase, acc, l_LM
                )
            descale = io.v_descale
            if is_in_thread_order(params.tile.MERGE):
                l_M = sums_of_both(shared, l_LM, OF_ROWS, CONSUMER)
                m_M = shared.top.index(0).load(OF_ROWS)
                finish_in_thread_order(io, params, segment, acc, m_M, l_M, CONSUMER, True, descale)
            else:
                out = output_rows(acc)
                rows: gl.constexpr = gl.SliceLayout(1, out[0].type.layout)
                l_M = sums_of_both(shared, l_LM, rows, CONSUMER)
                m_M = shared.top.index(0).load(rows)
                finish_segment(io, params, segment, out, m_M, l_M, CONSUMER, descale=descale)
    if do_all_merge(params.tile.MERGE) and params.work.merge.partial_out is not None:
        if is_in_thread_order(params.tile.MERGE):
            merge_share_by_turns(io, params, whole, CONSUMER, True, io.v_descale)
        else:
            merge_share(io, params, whole, CONSUMER, io.v_descale)
