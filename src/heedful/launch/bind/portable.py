"""Programs of the portable kernels: argument order, grids, scratch.

Buffers are named as Operands' fields, plus out, lse, probs, dout, dlse, dq, dk, dv, dbias, dsink.
Absent ones are missing from the mapping and become a constant None. The kernels of a KV cache and
of a merge have their own few names, each beside its function.
"""

from collections.abc import Iterable

from heedful.core.arrays import ArraySpec
from heedful.core.plan import Plan
from heedful.core.problem import MAX_HEAD_DIM_V, AttentionProblem
from heedful.core.sizes import Sizes, ceil_div
from heedful.core.tiles import (
    CLEAR_UNUSED,
    CLEARING_PROGRAMS,
    SINK_GRADIENTS,
    RowsConfig,
    TileConfig,
    combine_rows,
    pow2,
)
from heedful.kernels.args import ForwardIO, Tile, TileOrder
from heedful.launch.bind import groups
from heedful.launch.bind.groups import (
    FAR,
    WIDE_STRIDE,
    Buffers,
    lse_strides,
    stored_keys,
    token_strides,
    wrapped,
)
from heedful.launch.spec import (
    Argument,
    KernelCall,
    KernelRef,
    Pointer,
    Program,
    Scalar,
)

Arguments = dict[str, Argument]


def shared_divisor(buffers: Buffers, names: Iterable[str]) -> int:
    """What all strides of these tensors are multiples of, so that a kernel has an aligned and an
    unaligned variant and not one per stride; 1 where an address is not aligned."""
    specs = [buffers[name] for name in names if name in buffers]
    strides = [s for spec in specs for s in spec.steps[:-1]]
    if not all(spec.aligned for spec in specs):
        return 1
    return next((d for d in (16, 8) if all(s % d == 0 for s in strides)), 1)


class CallBuilder:
    """Collects one kernel's arguments. `divisor`: what all strides of its tensors share, so that a
    kernel has an aligned and an unaligned variant and not one per stride."""

    def __init__(self, module: str, function: str, buffers: Buffers, tensors: Iterable[str]):
        self.ref = KernelRef(f"heedful.kernels.portable.{module}", function)
        self.buffers = buffers
        self.arguments: Arguments = {}
        self.constants: dict[str, object] = {}
        self.divisor = shared_divisor(buffers, tensors)

    def tensors(self, **names: str) -> None:
        """Parameters that take a tensor's address: parameter = buffer name."""
        for parameter, name in names.items():
            self.arguments[parameter] = Pointer(name, self.buffers[name].dtype, self.divisor > 1)

    def vectors(self, *names: str) -> None:
        """Small operands, read element by element: no promise about their address."""
        for name in names:
            if name in self.buffers:
                self.arguments[name] = Pointer(name, self.buffers[name].dtype, False)
            else:
                self.constants[name] = None

    def strides(self, prefix: str, axes: str, values: Iterable[int], divisor: int = 1) -> None:
        """stride_{prefix}{axis}: 32 bits for rows (m, n), whose offsets within a tile stay 32-bit,
        else 64."""
        for axis, value in zip(axes, values, strict=True):
            narrow = axis in "mn" and abs(value) < WIDE_STRIDE
            kind = "i32" if narrow else "i64"
            self.arguments[f"stride_{prefix}{axis}"] = Scalar(value, kind, divisor)

    def row_strides(self, prefix: str, name: str, row: str) -> None:
        """Batch, row and head strides of a (B, S, H, D) or (T, H, D) tensor."""
        strides = token_strides(self.buffers[name])
        self.strides(prefix, f"b{row}h", strides, self.divisor)

    def ints(self, **values: int) -> None:
        self.arguments.update((name, Scalar(value)) for name, value in values.items())

    def floats(self, **values: float) -> None:
        self.arguments.update((name, Scalar(value, "fp32")) for name, value in values.items())

    def build(
        self, grid: tuple[int, int, int], config: TileConfig | RowsConfig, **constants
    ) -> KernelCall:
        """The call, cut as `config` says."""
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        parameters = {**self.arguments, **self.constants, **constants}
        return KernelCall(self.ref, grid, parameters, options)


def _precision(problem: AttentionProblem) -> str:
    """float32 products are IEEE; narrower inputs are exact in any precision."""
    return "ieee"


def _scores(call: CallBuilder, problem: AttentionProblem) -> dict[str, object]:
    """Arguments that decide the scores, in every kernel that makes them; returns its constants."""
    mask = problem.mask
    bounds = {name: min(getattr(mask, name), FAR) for name in ("left", "right", "first")}
    call.ints(**bounds, bottom_right=int(mask.bottom_right), shift=max(-FAR, min(mask.shift, FAR)))
    call.vectors("alibi_slopes", "tree_mask", "seed", "bias")
    keep = 1.0 - problem.dropout_p
    # A probability that rounds to certainty drops nothing; its threshold 2^32 has no 32-bit word.
    threshold = min(int(keep * 2.0**32), 2**32 - 1)
    call.floats(scale=problem.scale, softcap=problem.softcap)
    call.ints(drop_threshold=wrapped(threshold))
    b, h, m, n = (wrapped(o) for o in problem.dropout_origin)
    call.ints(origin_b=b, origin_h=h, origin_m=m, origin_n=n)
    bias = call.buffers.get("bias")
    call.strides("bias", "bhmn", bias.steps if bias else (0, 0, 0, 0))
    alibi = call.buffers.get("alibi_slopes")
    call.strides("alibi", "b", [alibi.strides[0] if alibi else 0])
    tree = call.buffers.get("tree_mask")
    # One tree for all sequences comes with a batch of 1.
    batch_stride = tree.strides[0] if tree and tree.shape[0] > 1 else 0
    call.strides("tree", "bm", [batch_stride, tree.strides[1] if tree else 0])
    return {
        "HAS_LEFT": mask.left >= 0,
        "HAS_RIGHT": mask.right >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
        "HAS_DROPOUT": keep * 2.0**32 < 2.0**32,
        "IS_QUAD": problem.dropout_origin[3] % 4 == 0,
        # The maximum commutes with a positive scale alone; float32 has the digits that folding the
        # scale into the exponent loses.
        "IS_ADJUSTED": bool(
            problem.softcap > 0
            or problem.alibi
            or problem.bias
            or problem.scale <= 0
            or problem.dtype == "float32"
        ),
        "PRECISION": _precision(problem),
    }


def _drop_scale(problem: AttentionProblem) -> float:
    """What kept probabilities are multiplied by; at p = 1 none is kept."""
    return 1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1 else 0.0


def _lengths(call: CallBuilder, problem: AttentionProblem, buffers: Buffers) -> None:
    """Arguments that say where sequences lie, and how far any can reach."""
    call.vectors("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")
    call.ints(
        seqlen_q=buffers["q"].shape[0] if problem.varlen_q else problem.seqlen_q,
        seqlen_k=stored_keys(buffers, problem.page_size),
        batch=problem.batch,
        heads_q=problem.heads_q,
        heads_k=problem.heads_k,
        longest_q=problem.seqlen_q,
        longest_k=problem.seqlen_k,
    )


# Triton 3.6 miscompiles WGMMA over a 32-wide 16-bit tile that was loaded element by element (keys
# from the 16th on are wrong; H200, 2026-11-20; right with 3.9): unaligned tiles are at least this.
_UNALIGNED_WIDTH = 64


def _dims(call: CallBuilder, problem: AttentionProblem) -> dict[str, object]:
    least = 16 if call.divisor > 1 else _UNALIGNED_WIDTH
    return {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": min(pow2(problem.head_dim, least), MAX_HEAD_DIM_V),
        "BLOCK_E": pow2(problem.head_dim_v, least),
    }


def tile(problem: AttentionProblem, config: TileConfig, divisor: int) -> Tile:
    """Block sizes. BLOCK_R: 576 would fill little more than half of the next power of two."""
    least = 16 if divisor > 1 else _UNALIGNED_WIDTH
    rest = problem.head_dim - MAX_HEAD_DIM_V
    return Tile(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=min(pow2(problem.head_dim, least), MAX_HEAD_DIM_V),
        BLOCK_E=pow2(problem.head_dim_v, least),
        BLOCK_R=pow2(rest, least) if rest > 0 else 0,
        PRECISION=_precision(problem),
    )


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, lse (if there is such a buffer) and probs (likewise)."""
    sizes, calls = plan.sizes(), []
    if not plan.is_split:
        calls.append(_forward_call(problem, plan, sizes, buffers, "out", "lse"))
    else:
        buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
        call = _forward_call(problem, plan, sizes, buffers, "partial_out", "partial_lse")
        calls.append(call)
        calls.append(_combine_call(buffers, "partial_out", "partial_lse", sink=None))
    if problem.varlen_q and not problem.batch:
        # Without sequences there are no tiles, and all tokens are nobody's.
        calls.append(clear_outside_call(problem, buffers))
    elif problem.varlen_q and problem.used_q:
        # Rows past a used length may lie beyond the longest sequence, where tiles end.
        calls.append(clear_call(problem, buffers, "q", "out", "lse"))
    if "probs" in buffers:
        calls.append(_probs_call(problem, plan, sizes, buffers))
    return Program(tuple(calls), sizes.workspaces)


def _forward_call(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers, out: str, lse: str
) -> KernelCall:
    config, launch = plan.configs["portable.forward"], sizes.launches["portable.forward"]
    divisor = shared_divisor(buffers, ("q", "k", "v", out))
    numbers = (launch.numbers["tiles"], launch.numbers["l2_heads"], sizes.num_splits)
    parameters = {
        "io": ForwardIO(
            *(groups.rows(buffers, name, divisor) for name in "qkv"),
            out=groups.split_rows(buffers, out, plan.is_split, divisor),
            lse=groups.split_row_vector(buffers, lse, plan.is_split),
        ),
        "sequences": groups.sequences(problem, buffers),
        "shape": groups.shape(problem),
        "mask": groups.mask(problem, buffers),
        "mods": groups.score_mods(problem, buffers),
        "dropout": groups.dropout(problem, buffers),
        "cache": groups.kv_layout(problem, buffers),
        "descales": groups.descales(problem, buffers),
        "order": TileOrder(*map(Scalar, numbers)),
        "tile": tile(problem, config, divisor),
    }
    ref = KernelRef("heedful.kernels.portable.forward", "attention_forward")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return KernelCall(ref, launch.grid, parameters, options)


def clear_outside_call(problem: AttentionProblem, buffers: Buffers) -> KernelCall:
    """Zeros in out, and -inf in lse, for packed tokens before the first sequence and behind the
    last, beside attention kernels that write rows of sequences alone."""
    call = CallBuilder("unused", "clear_outside", buffers, ("out",))
    call.tensors(out="out")
    call.arguments["cu_seqlens"] = Pointer("cu_seqlens_q", "int32", False)
    call.vectors("lse")
    total, heads, dim = buffers["out"].shape
    _, row, head = token_strides(buffers["out"])
    call.strides("o", "mh", (row, head), call.divisor)
    call.strides("l", "h", [lse_strides(problem.lse_shape)[1]])
    call.ints(total=total, batch=problem.batch, heads=heads)
    return call.build((CLEARING_PROGRAMS, 1, 1), CLEAR_UNUSED, DIM=dim, BLOCK=pow2(dim))


def clear_call(
    problem: AttentionProblem, buffers: Buffers, side: str, x: str, y: str | None
) -> KernelCall:
    """Clears what no sequence uses of outputs that lie as q or k do; an lse there becomes -inf."""
    call = CallBuilder("unused", "clear_unused", buffers, (x,))
    call.tensors(x=x)
    lengths = {"cu_seqlens": f"cu_seqlens_{side}", "seqused": f"seqused_{side}"}
    lengths["leftpad"] = "leftpad_k" if side == "k" else ""
    for parameter, name in {**lengths, "y": y or ""}.items():
        if name in buffers:
            call.arguments[parameter] = Pointer(name, buffers[name].dtype, False)
        else:
            call.constants[parameter] = None
    *_, heads, dim = buffers[x].shape
    call.row_strides("x", x, "n")
    dim_y, strides_y = 1, (0, 0, 0)
    if y == "lse" and y in buffers:
        batch, head = lse_strides(problem.lse_shape)
        strides_y = (batch, 1, head)
    elif y is not None and y in buffers:
        dim_y, strides_y = buffers[y].shape[-1], token_strides(buffers[y])
    call.strides("y", "bnh", strides_y)
    packed = problem.varlen_q if side == "q" else problem.varlen_k
    call.ints(seqlen=buffers[x].shape[0 if packed else 1], batch=problem.batch, heads=heads)
    return call.build(
        (problem.batch * heads, 1, 1),
        CLEAR_UNUSED,
        DIM_X=dim,
        DIM_Y=dim_y,
        BLOCK_N=CLEAR_UNUSED.rows,
        BLOCK_X=pow2(dim),
        BLOCK_Y=pow2(dim_y, 1),
        FILL_Y=float("-inf") if y == "lse" else 0.0,
    )


def _descale_strides(call: CallBuilder, problem: AttentionProblem, tensors: str) -> None:
    """Descales are (B, G), or lie beside the keys as (.., rows, G, groups)."""
    q = call.buffers.get("q_descale")
    call.strides("qd", "bh", q.strides if q else (0, 0))
    for name in tensors:
        descale, strides = call.buffers.get(f"{name}_descale"), (0, 0, 0)
        if descale is not None and problem.kv_group:
            strides = token_strides(descale)
        elif descale is not None:
            strides = (descale.strides[0], 0, descale.strides[1])
        call.strides(f"{name}d", "bnh", strides)


def combine(buffers: Buffers) -> Program:
    """Merges partial_out (S, B, M, H, E) or (S, T, H, E) and partial_lse (S, B, H, M) or (S, H, T)
    into out and, if there is such a buffer, lse; `sink` enters once."""
    return Program((_combine_call(buffers, "partial_out", "partial_lse", sink="sink"),))


def _combine_call(buffers: Buffers, part: str, part_lse: str, sink: str | None) -> KernelCall:
    spec, lse = buffers[part], buffers[part_lse]
    splits, *_, heads, dim = spec.shape
    packed = len(spec.shape) == 4
    batch, rows = (1, spec.shape[1]) if packed else spec.shape[1:3]
    call = CallBuilder("combine", "combine_splits", buffers, (part, "out"))
    call.tensors(partial_out=part, out="out")
    call.arguments["partial_lse"] = Pointer(part_lse, lse.dtype, False)
    if sink is None:
        call.constants["sink"] = None
    else:
        call.vectors("sink")
    call.vectors("lse")
    one = ArraySpec(spec.shape[1:], spec.strides[1:], spec.dtype)
    call.strides("p", "s", [spec.strides[0]], call.divisor)
    call.strides("p", "bmh", token_strides(one), call.divisor)
    call.row_strides("o", "out", "m")
    call.strides("pl", "sbh", (lse.strides[0], 0 if packed else lse.strides[1], lse.strides[-2]))
    call.strides("l", "bh", lse_strides(lse.shape[1:]))
    config = combine_rows(dim)
    tiles = ceil_div(rows, config.rows)
    call.ints(rows=rows, heads=heads, splits=splits, tiles=tiles)
    # One axis: the others end at 65,535, which sequences times heads can pass.
    grid = (tiles * batch * heads, 1, 1)
    return call.build(grid, config, HEAD_DIM_V=dim, BLOCK_M=config.rows, BLOCK_E=pow2(dim))


def _probs_call(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers
) -> KernelCall:
    config, launch = plan.configs["portable.scores"], sizes.launches["portable.scores"]
    call = CallBuilder("probabilities", "signed_probabilities", buffers, ("q", "k"))
    call.tensors(q="q", k="k")
    call.vectors("block_table", "kv_batch_idx", "q_descale", "k_descale", "k_shift")
    call.vectors("lse", "probs")
    constants = _scores(call, problem)
    _lengths(call, problem, buffers)
    call.row_strides("q", "q", "m")
    call.row_strides("k", "k", "n")
    _descale_strides(call, problem, "k")
    table = buffers.get("block_table")
    call.strides("table", "b", [table.strides[0] if table else 0])
    call.strides("l", "bh", lse_strides(problem.lse_shape))
    call.strides("p", "bhm", buffers["probs"].strides[:3])
    call.ints(entries=buffers["k"].shape[0], page_size=problem.page_size, **launch.numbers)
    dims = {
        name: value
        for name, value in _dims(call, problem).items()
        if name in ("HEAD_DIM", "BLOCK_D")
    }
    return call.build(
        launch.grid,
        config,
        **constants,
        **dims,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        KV_GROUP=problem.kv_group,
        IS_INT4=problem.kv_dtype == "int4",
    )


def backward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """dq, dk, dv, and dbias and dsink where there are such buffers."""
    stored_k = None if problem.varlen_k else buffers["k"].shape[1]
    sizes = plan.sizes(direction="backward", stored_k=stored_k)
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    calls = [
        # First, since it also makes delta.
        _query_gradients_call(problem, plan, sizes, buffers),
        _key_gradients_call(problem, plan, sizes, buffers),
    ]
    if problem.varlen_q:
        calls.append(clear_call(problem, buffers, "q", "dq", None))
    if problem.varlen_k or problem.leftpad_k:
        calls.append(clear_call(problem, buffers, "k", "dk", "dv"))
    if "dbias" in buffers:
        calls.append(_bias_gradients_call(problem, plan, buffers))
    if "dsink" in buffers:
        calls.append(_sink_gradients_call(buffers))
    return Program(tuple(calls), sizes.workspaces)


def _flat_rows(spec: ArraySpec) -> tuple[int, int]:
    """(batch, rows) of an lse; packed sequences are one."""
    return (1, spec.shape[1]) if len(spec.shape) == 2 else (spec.shape[0], spec.shape[2])


def _sink_gradients_call(buffers: Buffers) -> KernelCall:
    lse = buffers["lse"]
    batch, rows = _flat_rows(lse)
    call = CallBuilder("backward_rows", "sink_gradients", buffers, ())
    call.vectors("sink", "lse", "delta", "dsink")
    call.strides("l", "bh", lse_strides(lse.shape))
    call.ints(rows=rows, batch=batch)
    grid = (buffers["sink"].shape[0], 1, 1)
    return call.build(grid, SINK_GRADIENTS, BLOCK_M=SINK_GRADIENTS.rows)


def _gradient_call(
    problem: AttentionProblem,
    buffers: Buffers,
    function: tuple[str, str],
    more: dict[str, str],
) -> tuple[CallBuilder, dict[str, object]]:
    """What the three gradient kernels that make scores again share.

    more: further tensors of rows, each with its row axis.
    """
    tensors = ("q", "k", "v", "dout", *more)
    call = CallBuilder(*function, buffers, tensors)
    call.tensors(**{name: name for name in tensors})
    call.vectors("lse", "delta")
    constants = _scores(call, problem)
    call.floats(drop_scale=_drop_scale(problem))
    _lengths(call, problem, buffers)
    for prefix, name, row in (
        ("q", "q", "m"),
        ("k", "k", "n"),
        ("v", "v", "n"),
        ("do", "dout", "m"),
    ):
        call.row_strides(prefix, name, row)
    for name, row in more.items():
        call.row_strides("o" if name == "out" else name, name, row)
    call.strides("l", "bh", lse_strides(problem.lse_shape))
    return call, {**constants, **_dims(call, problem)}


def _key_gradients_call(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers
) -> KernelCall:
    kernel = "portable.backward_keys"
    config, launch = plan.configs[kernel], sizes.launches[kernel]
    outputs = {"dk": "n", "dv": "n"}
    call, constants = _gradient_call(problem, buffers, ("backward_keys", "key_gradients"), outputs)
    call.ints(**launch.numbers)
    constants |= {"IS_GQA": problem.group > 1}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    return call.build(launch.grid, config, **constants)


def _query_gradients_call(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers
) -> KernelCall:
    kernel = "portable.backward_queries"
    config, launch = plan.configs[kernel], sizes.launches[kernel]
    tensors = {"out": "m", "dq": "m"}
    function = ("backward_queries", "query_gradients")
    call, constants = _gradient_call(problem, buffers, function, tensors)
    call.vectors("dlse")
    dlse = buffers.get("dlse")
    strides = (0, 0, 0)
    if dlse is not None:
        strides = dlse.strides if len(dlse.strides) == 3 else (0, *dlse.strides)
    # (batch, head, row): any strides, as autograd hands them out.
    call.strides("dl", "bhm", strides)
    call.ints(**launch.numbers)
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    return call.build(launch.grid, config, **constants)


def _bias_gradients_call(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> KernelCall:
    config = plan.configs["portable.scores"]
    call, constants = _gradient_call(problem, buffers, ("backward_bias", "bias_gradients"), {})
    call.vectors("dbias")
    dbias = buffers["dbias"]
    call.strides("db", "bhmn", dbias.strides)
    b, h, m, n = dbias.shape
    call.ints(own_b=b, own_h=h, own_m=m, own_n=n)
    tiles_m, tiles_n = ceil_div(m, config.block_m), ceil_div(n, config.block_n)
    grid = (tiles_m * tiles_n * b * h, 1, 1)
    return call.build(grid, config, **constants, BLOCK_M=config.block_m, BLOCK_N=config.block_n)
