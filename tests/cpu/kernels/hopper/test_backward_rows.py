"""What comes ahead of the Hopper backward and behind it, run by Triton's interpreter: delta, what
is cleared, and dQ, dK and dV out of sums that lie in the order of registers.

They run in a process of their own: see `support.runs.interpreted`.
"""

import struct
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.kernels.common.constants import LOG2E
from heedful.kernels.hopper.backward.far_rows import FAR_LOG2, FAR_LOG2_BITS
from heedful.launch.program import buffers, programs
from heedful.launch.spec import Program
from support.fenced import Fenced, walled
from support.problems.grids import in_turns
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

HEADS = 4
SCALE = 0.25
UNTOUCHED = 7


def whole(
    head_dim: int,
    lengths: list[int],
    packed: bool,
    deterministic: bool = False,
    splits: int = 1,
    sink: bool = False,
    dlse: bool = False,
    keys: list[int] | None = None,
    scale: float = SCALE,
    dtype: str = "float16",
):
    """A problem, its plan and its backward, whose key tiles are split in so many parts. dlse:
    whether the log-sum-exp has a cotangent. keys: lengths of keys, by default those of queries."""
    keys = lengths if keys is None else keys
    problem = AttentionProblem.dense(
        *(len(lengths), max(lengths), max(keys), HEADS, 2, head_dim),
        dtype=dtype,
        needs_grad=True,
        total_q=sum(lengths) if packed else None,
        total_k=sum(keys) if packed else None,
        deterministic=deterministic,
        sink=sink,
    )
    problem = replace(problem, scale=scale)
    chosen = plan(problem, by_name("H200"), backend=forced(f"hopper+splits={splits}"))
    assert chosen.backward == "hopper"
    arrays = buffers.backward(problem)
    if dlse:
        arrays["dlse"] = arrays["lse"]
    made = programs.program(chosen, "backward", arrays)
    return problem, chosen.configs[chosen.variant_of("backward").configs[0]], made


def rounded(number: float) -> float:
    """To float32."""
    return torch.tensor(number, dtype=torch.float32).item()


def call_of(made: Program, function: str) -> Program:
    """That of a kernel alone."""
    (call,) = (c for c in made.calls if c.kernel.function == function)
    return Program((call,), ())


def in_registers(product: torch.Tensor) -> torch.Tensor:
    """64 rows as a warpgroup's threads store them: each thread in turn four of its numbers of a
    product, thread after thread."""
    thread = torch.arange(128)[:, None]
    rows = thread // 32 * 16 + thread % 32 // 4 + torch.tensor([0, 0, 8, 8])
    columns = torch.arange(0, product.shape[1], 8)[:, None, None] + thread % 4 * 2
    return product[rows, columns + torch.tensor([0, 1, 0, 1])].flatten()


def shares(rows: torch.Tensor, block_m: int) -> torch.Tensor:
    """A query tile's sums as two shares are stored: halves of 128 rows, or of the columns of
    64."""
    halves = rows.split(64, 0) if block_m == 128 else rows.split(rows.shape[1] // 2, 1)
    return torch.cat([in_registers(half) for half in halves])


LENGTHS = [([200, 200], False), ([130, 1, 0, 257], True)]


@interpreted
@pytest.mark.parametrize("lengths, packed", LENGTHS, ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 136, 192, 200, 256])
def test_dq_is_put_in_order_scaled_and_rounded(head_dim, lengths, packed):
    torch.manual_seed(head_dim)
    problem, config, made = whole(head_dim, lengths, packed)
    (accum,) = (w.buffer.shape for w in made.workspaces if w.name == "dq_accum")
    sums = torch.full(accum, torch.nan)
    want = torch.randn(sum(lengths), HEADS, head_dim)
    start, first = 0, 0
    for b, length in enumerate(lengths):
        if packed:
            first = (start // config.block_m + b) * config.block_m
        blocks = -(-length // config.block_m)
        rows = torch.zeros(HEADS, blocks * config.block_m, accum[-1])
        rows[:, :length, :head_dim] = want[start : start + length].transpose(0, 1)
        for head in range(HEADS):
            for block in range(blocks):
                at = first + block * config.block_m
                tile = rows[head, block * config.block_m : (block + 1) * config.block_m]
                place = sums[head, at : at + config.block_m]
                place.copy_(shares(tile, config.block_m).view_as(place))
        start += length
        first += blocks * config.block_m
    arrays = {"dq_accum": sums, "dq": torch.full((sum(lengths), HEADS, head_dim), torch.nan).half()}
    if packed:
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        arrays |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    else:
        arrays["dq"] = arrays["dq"].view(*problem.out_shape)
    interpret(call_of(made, "backward_epilogue"), arrays)
    assert torch.equal(arrays["dq"].view(want.shape), (want * SCALE).half())


@interpreted
@pytest.mark.parametrize("lengths, packed", LENGTHS, ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim, splits", [(40, 3), (128, 2), (200, 2)])
def test_splits_of_dk_and_dv_are_added_and_rounded(head_dim, splits, lengths, packed):
    torch.manual_seed(head_dim)
    problem, config, made = whole(head_dim, lengths, packed, splits=splits)
    shapes = {w.name: w.buffer.shape for w in made.workspaces}
    partials = torch.full(shapes["partials"], torch.nan)
    columns = partials.shape[-1] // 2
    # dV, dK of each split.
    wanted = torch.randn(2, splits, sum(lengths), 2, head_dim)
    start, first = 0, 0
    for b, length in enumerate(lengths):
        if packed:
            first = (start // config.block_n + b) * config.block_n
        padded = -(-length // config.block_n) * config.block_n
        rows = torch.zeros(2, splits, 2, padded, columns)
        own = wanted[:, :, start : start + length].transpose(2, 3)
        rows[:, :, :, :length, :head_dim] = own
        for split in range(splits):
            for head in range(2):
                for at in range(0, padded, 64):
                    products = [in_registers(x[split, head, at : at + 64]) for x in rows]
                    place = partials[split, head, first + at : first + at + 64]
                    place.copy_(torch.cat(products).view_as(place))
        start += length
        first += padded
    shape = (sum(lengths), 2, head_dim) if packed else (len(lengths), max(lengths), 2, head_dim)
    arrays = {
        "dq_accum": torch.zeros(shapes["dq_accum"]),
        "dq": torch.empty(problem.out_shape).half(),
        "partials": partials,
        "dk": torch.full(shape, torch.nan).half(),
        "dv": torch.full(shape, torch.nan).half(),
    }
    if packed:
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        arrays |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    interpret(call_of(made, "backward_epilogue"), arrays)
    for name, of_splits in zip(("dv", "dk"), wanted, strict=True):
        sums = of_splits[0]
        for more in of_splits[1:]:
            sums = sums + more
        assert torch.equal(arrays[name].view(sums.shape), sums.half())


@interpreted
@pytest.mark.parametrize("lengths, packed", LENGTHS, ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim, deterministic", [(64, True), (128, True), (200, False)])
def test_delta_is_made_and_sums_turns_and_counter_are_cleared(
    head_dim, deterministic, lengths, packed
):
    torch.manual_seed(head_dim)
    problem, config, made = whole(head_dim, lengths, packed, deterministic)
    shapes = {w.name: w.buffer for w in made.workspaces}
    arrays = {
        name: torch.full(shapes[name].shape, UNTOUCHED, dtype=getattr(torch, shapes[name].dtype))
        for name in ("delta", "dq_accum", "turns", "tile_counter")
        if name in shapes
    }
    assert ("turns" in arrays, "tile_counter" in arrays) == (deterministic, deterministic)
    arrays["out"] = torch.randn(problem.out_shape).half()
    arrays["dout"] = torch.randn(problem.out_shape).half()
    arrays["lse"] = torch.randn(problem.lse_shape)
    for name in ("lse_log2", "dout_scale"):
        of = shapes[name]
        arrays[name] = torch.full(of.shape, UNTOUCHED, dtype=getattr(torch, of.dtype))
    arrays["q"], arrays["k"] = torch.randn(2, *problem.out_shape).half()
    arrays["k"] = arrays["k"][..., :2, :]
    if packed:
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        arrays |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    interpret(call_of(made, "backward_prologue"), arrays)
    want = (arrays["out"].float() * arrays["dout"].float()).sum(-1).movedim(-1, -2)
    torch.testing.assert_close(arrays["delta"], want)
    log2e = torch.tensor(LOG2E.value, dtype=torch.float32).double()
    assert torch.equal(arrays["lse_log2"], (arrays["lse"].double() * log2e).float())
    assert (arrays["dout_scale"] == UNTOUCHED).all()
    used = torch.zeros(shapes["dq_accum"].shape[1] // config.block_m, dtype=torch.bool)
    start = first = 0
    for b, length in enumerate(lengths):
        first = start // config.block_m + b if packed else first
        used[first : first - (-length // config.block_m)] = True
        start += length
        first -= -length // config.block_m
    cleared = arrays["dq_accum"].view(HEADS, len(used), -1)
    assert not cleared[:, used].any() and (cleared[:, ~used] == UNTOUCHED).all()
    if deterministic:
        assert arrays["tile_counter"].item() == 0
        turns = arrays["turns"].view(HEADS, len(used))
        assert not turns[:, used].any() and (turns[:, ~used] == UNTOUCHED).all()


def test_the_producer_votes_by_the_bits_of_what_is_far():
    assert struct.pack(">f", FAR_LOG2.value) == FAR_LOG2_BITS.value.to_bytes(4, "big")


FAR = in_turns(
    [0, 1, 2, 3, 4, 5], LENGTHS, [True, False], [SCALE, 0.3, 2.0**9], ["float16", "bfloat16"]
)


@interpreted
@pytest.mark.parametrize("seed, given, sink, scale, dtype", FAR)
def test_probabilities_of_rows_far_from_0_add_up_to_1(seed, given, sink, scale, dtype):
    """Raw scores are integers times 2^12, which float32 holds. Consumers multiply them by their own
    factor to base 2, a float32."""
    lengths, packed = given
    torch.manual_seed(seed)
    problem, config, made = whole(64, lengths, packed, sink=sink, scale=scale, dtype=dtype)
    shapes = {w.name: w.buffer for w in made.workspaces}
    arrays = {
        name: torch.full(of.shape, UNTOUCHED, dtype=getattr(torch, of.dtype))
        for name, of in shapes.items()
    }
    # The interpreter has no product of bfloat16; the scale of probabilities follows dout's dtype.
    arrays["q"] = torch.randint(-2, 3, problem.out_shape).half() * 64
    arrays["q"] *= torch.rand(*problem.out_shape[:-1], 1) < 0.5
    arrays["k"] = torch.randint(-1, 2, problem.out_shape).half()[..., :2, :] * 64
    arrays["out"] = arrays["dout"] = torch.zeros(problem.out_shape, dtype=getattr(torch, dtype))
    if sink:
        arrays["sink"] = torch.tensor([0.0, 1024.0, 2.0**20, -torch.inf])
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    if packed:
        arrays |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    (main,) = call_of(made, "backward").calls
    base_2 = rounded(main.parameters["params"].mods.scale_log2.value)
    rows = [(arrays[name] if packed else arrays[name].flatten(0, 1)).float() for name in ("q", "k")]
    want, logits = [], []
    for start, stop in zip(starts, starts[1:], strict=False):
        q, k = (x[start:stop].transpose(0, 1) for x in rows)
        raw = q @ k.repeat_interleave(HEADS // 2, 0).mT
        s, logit = (raw * rounded(scale)).double(), raw.double() * base_2
        if sink:
            more = arrays["sink"].double().view(-1, 1, 1).expand(-1, s.shape[1], 1)
            s, logit = torch.cat((s, more), 2), torch.cat((logit, more * rounded(LOG2E.value)), 2)
        top = s.max(2).values if stop > start else s.sum(2)
        want.append((top, (s - top[..., None]).exp().sum(2), s.logsumexp(2)))
        logits.append(logit)
    top, total, lse = (
        torch.cat(x, 1) if packed else torch.stack(x) for x in zip(*want, strict=True)
    )
    arrays["lse"] = lse.float()
    interpret(call_of(made, "backward_prologue"), arrays)
    far = arrays["dout_scale"] != UNTOUCHED
    more = 15.0 if dtype == "bfloat16" else 0.0
    size = (arrays["lse"] * LOG2E.value - more).abs()
    assert torch.equal(far, size >= FAR_LOG2.value) and far.any() and not far.all()
    for b, logit in enumerate(logits):
        at = (slice(None), slice(starts[b], starts[b + 1])) if packed else b
        # Consumers make 2^(raw c - L), and their cotangents are scaled.
        less, factor = (arrays[name][at].double() for name in ("lse_log2", "dout_scale"))
        sums = torch.exp2(logit - less[..., None]).sum(2) * factor
        of_far = sums[far[at]]
        wanted = torch.full_like(of_far, 2.0**more)
        torch.testing.assert_close(of_far, wanted, rtol=2**-20, atol=0)
    if dtype == "float16":
        # Cotangents keep their digits: a factor undoes roundings of the log-sum-exp, its product
        # and c, half a spacing each, and no more.
        less = arrays["lse_log2"][far].abs()
        spacing = less.nextafter(torch.tensor(torch.inf)) - less
        assert (arrays["dout_scale"][far].log2().abs() <= 2 * spacing).all()
    if sink:
        assert torch.equal(arrays["reference"].double(), torch.where(far, top, lse.float()))
        factor = torch.where(far, 1 / total, 1.0)
        torch.testing.assert_close(arrays["factor"].double(), factor, rtol=2**-20, atol=0)


def edges(block: int, packed: bool) -> list[int]:
    """Lengths of sequences that end beside the edges of tiles of so many rows."""
    return [block - 1, 0, block, block + 1, 1] if packed else [block + 1, block + 1]


def bounds(lengths: list[int], keys: list[int], packed: bool) -> dict[str, torch.Tensor]:
    """cu_seqlens, if there are any."""
    if not packed:
        return {}
    sides = {"cu_seqlens_q": lengths, "cu_seqlens_k": keys}
    return {n: walled(torch.tensor([0, *x]).cumsum(0).to(torch.int32)) for n, x in sides.items()}


def fenced(shapes: dict, names: tuple[str, ...]) -> dict[str, Fenced]:
    """Scratch that nothing is written beside of."""
    made = {}
    for name in names:
        of = shapes[name]
        untouched = torch.full(of.shape, UNTOUCHED, dtype=getattr(torch, of.dtype))
        made[name] = Fenced.like(untouched)
    return made


def first_rows(lengths: list[int], block: int, packed: bool) -> list[int]:
    """Where sequences begin in sums of which each has whole tiles."""
    starts = [sum(lengths[:b]) for b in range(len(lengths))]
    if packed:
        return [(start // block + b) * block for b, start in enumerate(starts)]
    return [b * -(-lengths[0] // block) * block for b in range(len(lengths))]


@interpreted
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [40, 64, 96])
def test_rows_at_the_edges_of_tiles_have_their_delta_and_nothing_else_is_touched(head_dim, packed):
    torch.manual_seed(head_dim)
    block = whole(head_dim, [1], True)[1].block_m
    lengths = edges(block, packed)
    problem, config, made = whole(head_dim, lengths, packed, True, sink=True, dlse=True)
    assert config.block_m == block
    shapes = {w.name: w.buffer for w in made.workspaces}
    of_rows = ("delta", "lse_log2", "dout_scale", "reference", "factor")
    scratch = fenced(shapes, (*of_rows, "dq_accum", "turns", "tile_counter"))
    q, out, dout = torch.randn(3, *problem.out_shape).half()
    lse, dlse = torch.randn(2, *problem.lse_shape)
    # Rows that saw nothing, at ends of sequences and of tiles; what they hold is of no account.
    ends = torch.tensor(lengths).cumsum(0) - 1 if packed else torch.tensor([0, block - 1, block])
    unseen = torch.zeros_like(lse, dtype=torch.bool)
    unseen[..., ends] = torch.rand(unseen[..., ends].shape) < 0.5
    lse[unseen] = -torch.inf
    arrays = {"q": q, "k": q[..., :2, :], "out": out, "dout": dout, "lse": lse, "dlse": dlse}
    arrays["sink"] = torch.randn(HEADS)
    arrays = {name: walled(tensor.contiguous()) for name, tensor in arrays.items()}
    arrays |= {name: fence.inside for name, fence in scratch.items()} | bounds(
        lengths, lengths, packed
    )
    interpret(call_of(made, "backward_prologue"), arrays)
    want = (out.float() * dout.float()).sum(-1).movedim(-1, -2) - dlse
    torch.testing.assert_close(arrays["delta"], torch.where(unseen, 0.0, want))
    assert torch.equal(arrays["lse_log2"] == torch.inf, unseen)
    assert torch.equal(arrays["reference"], lse) and (arrays["factor"] == 1).all()
    # None is far from 0.
    assert (arrays["dout_scale"] == UNTOUCHED).all()
    tiles = torch.zeros(shapes["dq_accum"].shape[1] // block, dtype=torch.bool)
    for first, length in zip(first_rows(lengths, block, packed), lengths, strict=True):
        tiles[first // block : (first + length + block - 1) // block] = True
    for name, each in (("dq_accum", -1), ("turns", 1)):
        cleared = arrays[name].view(HEADS, len(tiles), each)
        assert not cleared[:, tiles].any() and (cleared[:, ~tiles] == UNTOUCHED).all()
    assert arrays["tile_counter"].item() == 0
    for fence in scratch.values():
        fence.assert_whole()


@interpreted
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_gradients_end_where_their_rows_and_columns_do(head_dim, packed):
    """dq, and dk and dv of two splits; sums behind rows and columns in use may be anything."""
    torch.manual_seed(head_dim)
    _, config, _ = whole(head_dim, [1], True, splits=2)
    block_m, block_n = config.block_m, config.block_n
    lengths, keys = edges(block_m, packed), edges(block_n, packed)[::-1]
    keys[-1] += 70
    keys = keys if packed else keys[-1:] * 2
    problem, config, made = whole(head_dim, lengths, packed, splits=2, keys=keys)
    assert (config.block_m, config.block_n) == (block_m, block_n)
    shapes = {w.name: w.buffer.shape for w in made.workspaces}
    sums = walled(torch.full(shapes["dq_accum"], torch.nan))
    partials = walled(torch.full(shapes["partials"], torch.nan))
    rows = [torch.randn(HEADS, sum(lengths), head_dim)]
    rows += [torch.randn(2, sum(keys), head_dim) for _ in "kv"]
    columns = sums.shape[-1], partials.shape[-1] // 2
    start = 0
    for first, length in zip(first_rows(lengths, block_m, packed), lengths, strict=True):
        for head in range(HEADS):
            for at in range(0, length, block_m):
                tile = torch.randn(block_m, columns[0])
                own = rows[0][head, start + at : start + min(length, at + block_m)]
                tile[: len(own), :head_dim] = own
                place = sums[head, first + at : first + at + block_m]
                place.copy_(shares(tile, block_m).view_as(place))
        start += length
    start = 0
    for first, length in zip(first_rows(keys, block_n, packed), keys, strict=True):
        for head, split in ((h, s) for h in range(2) for s in range(2)):
            for at in range(0, length, 64):
                tiles = torch.randn(2, 64, columns[1])
                # dV, then dK: half of each in a split.
                for tile, of in zip(tiles, (rows[2], rows[1]), strict=True):
                    own = of[head, start + at : start + min(length, at + 64)]
                    tile[: len(own), :head_dim] = own / 2
                place = partials[split, head, first + at : first + at + 64]
                place.copy_(torch.cat([in_registers(t) for t in tiles]).view_as(place))
        start += length
    kv_shape = (sum(keys), 2, head_dim) if packed else (len(keys), keys[0], 2, head_dim)
    results = {
        name: Fenced.like(torch.full(shape, torch.nan).half())
        for name, shape in (("dq", problem.out_shape), ("dk", kv_shape), ("dv", kv_shape))
    }
    arrays = {name: fence.inside for name, fence in results.items()} | bounds(lengths, keys, packed)
    arrays |= {"dq_accum": sums, "partials": partials}
    interpret(call_of(made, "backward_epilogue"), arrays)
    for (name, fence), want, scale in zip(results.items(), rows, (SCALE, 1, 1), strict=True):
        got = fence.inside.view(-1, *fence.inside.shape[-2:])
        assert torch.equal(got, (want * scale).half().transpose(0, 1)), name
        fence.assert_whole()


@pytest.mark.slow
@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
