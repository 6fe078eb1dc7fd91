"""Test cases: a few words of features and a seed become a problem, its tensors and gradients.

Neutral to backend and device: CPU, Triton interpreter, emulator and GPU tests draw from here.
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Operands
from heedful.core.call.problem import ITEM_BITS, LATENT_ROWS, AttentionProblem
from heedful.core.call.storage import have_own_ranges, storage
from heedful.masks import BlockMask
from heedful.reference.sequences import sequences
from heedful.torch.base.arrays import array_spec
from heedful.torch.operands.quant import pack_latent

# Another number, another draw of every case (`make test-random`).
FRESH = int(os.environ.get("TEST_SEED", "0"))
LAYOUTS = ("contiguous", "heads_first", "packed", "offset")


@dataclass(frozen=True)
class Case:
    """What a test asks for, by few words; what is left out is off.

    window: as flash-attn's window_size, a third element is `first`. alibi: "", "h" or "bh".
    bias: the dims that it really has, of "bhqk" ("" = no bias, "k" = a key bias); bias_dtype: its
    own, such as "bool"; others' is that of q. rel_bias: its distances, 0 without one.
    sink_dtype, index_dtype: of the sink and of lengths and tables, where they are not float32 and
    int32. varlen: "", "q", "k" or "qk"; used: the same for seqused. layout: one of LAYOUTS, how q,
    k and v lie in memory. key_ranges: of a row, bad ones among them; block_mask: side of
    its tiles; ranges_of: the dims that both really have, of "bh". v_in_k: v is the first columns of
    k. kv_dtype: of a quantised cache, with kv_group values a scale.
    lens_q, lens_k: the lengths used; drawn from the seed, zero among them, when not given.
    """

    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 53
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 32
    head_dim_v: int = 0
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int, ...] = (-1, -1)
    bottom_right: bool = True
    shift: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_origin: tuple[int, int, int, int] = (0, 0, 0, 0)
    origins: int = 0
    alibi: str = ""
    bias: str = ""
    bias_dtype: str = ""
    rel_bias: int = 0
    sink: bool = False
    sink_dtype: str = ""
    index_dtype: str = ""
    tree_mask: bool = False
    key_ranges: int = 0
    block_mask: int = 0
    ranges_of: str = "b"
    varlen: str = ""
    used: str = ""
    page_size: int = 0
    kv_batch_idx: bool = False
    leftpad_k: bool = False
    q_offsets: bool = False
    kv_dtype: str = ""
    kv_group: int = 0
    kv_shift: bool = False
    v_in_k: bool = False
    layout: str = "contiguous"
    backward: bool = True
    lse_grad: bool = True
    return_probs: bool = False
    deterministic: bool = False
    num_splits: int = 0
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        words = [
            f"{name}={value}".replace(" ", "")
            for name, value in vars(self).items()
            if value != getattr(default, name)
        ]
        return "-".join(words) or "plain"


@dataclass(frozen=True)
class Built:
    """A case made real: dlse is None without lse_grad, dout None without backward."""

    case: Case
    problem: AttentionProblem
    x: Operands
    dout: torch.Tensor | None
    dlse: torch.Tensor | None


# Other values of a case's tensors, on the CPU, by the case, its tensors and a generator.
Edit = Callable[
    [Case, Operands, torch.Tensor | None, torch.Tensor | None, torch.Generator],
    tuple[Operands, torch.Tensor | None, torch.Tensor | None],
]


def build(
    case: Case, device: torch.device | str = "cpu", draw: int = 0, edit: Edit | None = None
) -> Built:
    """Tensors of the case; another `draw` changes values only, never lengths or positions.

    edit: gives operands, dout and dlse other values, of the same shapes and dtypes (a bias may have
    another dtype).

    Every token of q, k, v, dout that no sequence uses (past seqused, before leftpad, in unused
    pages) is NaN, so that a backend that reads one shows it.
    """
    shape_rng = np.random.default_rng([case.seed, FRESH])
    values = torch.Generator().manual_seed(FRESH * 10007 + case.seed * 1009 + draw)
    x = Operands(None, None, None, **_lengths(case, shape_rng))
    if case.index_dtype:
        own = _torch_dtype(case.index_dtype)
        cast = (t.to(own) if t is not None and t.dtype == torch.int32 else t for t in x)
        x = Operands._make(cast)
    x = x._replace(**_arrays(case, x, values))
    problem = _problem(case, x)
    total_q = x.q.shape[:-1]
    dout = dlse = None
    if case.backward:
        dout = _randn(values, (*total_q, problem.head_dim_v), case.dtype)
        dout = _laid_out(dout, case.layout)
        dlse = torch.randn(problem.lse_shape, generator=values) if case.lse_grad else None
    if edit is not None:
        x, dout, dlse = edit(case, x, dout, dlse, values)
    _poison(problem, x, dout, dlse)
    moved = (None if t is None else _to(t, device) for t in x)
    dout, dlse = (None if t is None else _to(t, device) for t in (dout, dlse))
    x = Operands(*moved)
    if case.v_in_k:
        x = x._replace(v=x.k[..., : x.v.shape[-1]])
    return Built(case, problem, x, dout, dlse)


def _to(tensor: torch.Tensor, device) -> torch.Tensor:
    """The tensor on `device` with its strides and storage offset kept."""
    if torch.device(device).type == "cpu" or not tensor.numel():
        return tensor.to(device)
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _torch_dtype(name: str) -> torch.dtype:
    return torch.uint8 if name in ("int4", LATENT_ROWS) else getattr(torch, name)


def _randn(values: torch.Generator, shape, dtype: str) -> torch.Tensor:
    return torch.randn(shape, generator=values).to(_torch_dtype(dtype))


def _some_lengths(rng, batch: int, longest: int) -> list[int]:
    """Lengths up to `longest`, which one reaches; where there are two or more, one may be 0."""
    lengths = rng.integers(0, longest + 1, batch)
    if batch:
        lengths[rng.integers(batch)] = longest
    return lengths.tolist()


def _lengths(case: Case, rng) -> dict:
    """The integer operands: where each sequence lies, and how much of it is used."""
    made: dict = {}
    pages = -(-case.seqlen_k // case.page_size) if case.page_size else 0
    for side, longest in (("q", case.seqlen_q), ("k", case.seqlen_k)):
        given = case.lens_q if side == "q" else case.lens_k
        lengths = list(given) or _some_lengths(rng, case.batch, longest)
        pad = [0] * case.batch
        if side == "k" and case.leftpad_k:
            pad = [int(rng.integers(0, longest - n + 1)) for n in lengths]
            made["leftpad_k"] = torch.tensor(pad, dtype=torch.int32)
        if side in case.varlen:
            spare = rng.integers(0, 4, case.batch) if side in case.used else [0] * case.batch
            rooms = [p + n + int(s) for p, n, s in zip(pad, lengths, spare, strict=True)]
            cumulated = np.concatenate([[0], np.cumsum(rooms)]).astype(np.int32)
            made[f"cu_seqlens_{side}"] = torch.from_numpy(cumulated)
        # A paged cache says how much of it is used, unless cu_seqlens_k does.
        if side in case.used or (side == "k" and case.page_size and "k" not in case.varlen):
            made[f"seqused_{side}"] = torch.tensor(lengths, dtype=torch.int32)
    if case.page_size:
        order = rng.permutation(case.batch * pages + 2)[: case.batch * pages]
        made["block_table"] = torch.from_numpy(order.reshape(case.batch, pages).astype(np.int32))
    if case.kv_batch_idx:
        rows = rng.permutation(case.batch + 1)[: case.batch]
        made["kv_batch_idx"] = torch.from_numpy(rows.astype(np.int32))
    if case.q_offsets:
        offsets = rng.integers(-case.seqlen_q // 2, case.seqlen_k + 1, case.batch)
        made["q_offsets"] = torch.from_numpy(offsets.astype(np.int32))
    if case.origins:
        origins = rng.integers(0, 2**31, (case.batch, 4))
        made["origins"] = torch.from_numpy(origins.astype(np.int32))
    if case.tree_mask:
        seen = rng.random((case.batch, case.seqlen_q, case.seqlen_q)) < 0.6
        made["tree_mask"] = torch.from_numpy(seen)
    if case.key_ranges:
        made["key_ranges"] = torch.from_numpy(_ranges(case, rng, made.get("cu_seqlens_q")))
    if case.block_mask:
        mask = BlockMask.of(torch.from_numpy(_shown(case, rng)), side=case.block_mask)
        made |= {f"block_{name}": getattr(mask, name) for name in ("rows", "keys", "bits")}
    return made


def _rows_of(case: Case) -> tuple[int, int]:
    """Batch and heads that a mask really has."""
    own = case.ranges_of
    return case.batch if "b" in own else 1, case.heads_q if "h" in own else 1


def _shown(case: Case, rng) -> np.ndarray:
    """A mask whose tiles are seen whole, not at all, or in part: some of them alike."""
    lengths, side = (case.seqlen_q, case.seqlen_k), case.block_mask
    tiles = [-(-length // side) for length in lengths]
    kind = rng.integers(0, 5, (*_rows_of(case), *tiles))
    kind = kind.repeat(side, -2).repeat(side, -1)[..., : lengths[0], : lengths[1]]
    i, j = (np.arange(length) % side for length in lengths)
    alike = (i[:, None] >= j) | (j % 7 == 0)
    return np.select(
        [kind == 0, kind == 1, kind < 4], [False, True, alike], rng.random(kind.shape) < 0.3
    )


def _ranges(case: Case, rng, cu_seqlens_q: torch.Tensor | None) -> np.ndarray:
    """Key ranges of every row: a quarter each of any, all keys, none, and those of the row before,
    as documents have them; as far beyond the keys as int32 reaches."""
    rows = (*_rows_of(case), case.seqlen_q) if cu_seqlens_q is None else (int(cu_seqlens_q[-1]),)
    begin = rng.integers(-3, case.seqlen_k + 2, (*rows, case.key_ranges))
    end = begin + rng.integers(-2, max(3, case.seqlen_k // 2), begin.shape)
    ranges = np.stack([begin, end], -1).reshape(*rows, 2 * case.key_ranges)
    kind = rng.integers(0, 4, rows)
    ranges[kind == 1] = [-(2**31), 2**31 - 1] * case.key_ranges
    ranges[kind == 2] = [2**31 - 1, -(2**31)] * case.key_ranges
    for row in range(1, rows[-1]):
        as_before = kind[..., row] == 3
        ranges[..., row, :][as_before] = ranges[..., row - 1, :][as_before]
    return ranges.astype(np.int32)


def _arrays(case: Case, x: Operands, values: torch.Generator) -> dict:
    """q, k, v and the arrays that modify scores."""
    dim_v = case.head_dim_v or case.head_dim
    q_shape = (case.batch, case.seqlen_q)
    if x.cu_seqlens_q is not None:
        q_shape = (int(x.cu_seqlens_q[-1]),)
    if case.page_size:
        pages = case.batch * x.block_table.shape[1] + 2
        k_shape = (pages, case.page_size)
    elif x.cu_seqlens_k is not None:
        k_shape = (int(x.cu_seqlens_k[-1]),)
    else:
        k_shape = (case.batch + case.kv_batch_idx, case.seqlen_k)
    made: dict = {"q": _randn(values, (*q_shape, case.heads_q, case.head_dim), case.dtype)}
    for name, dim in (("k", case.head_dim), ("v", dim_v)):
        if case.kv_dtype:
            made |= _quantized(case, name, (*k_shape, case.heads_k), dim, values)
        else:
            made[name] = _randn(values, (*k_shape, case.heads_k, dim), case.dtype)
    if ITEM_BITS[case.dtype] == 8:
        for name in ("q", "k", "v"):
            scales = torch.rand((case.batch, case.heads_k), generator=values) + 0.5
            made[f"{name}_descale"] = scales
    made |= {name: _laid_out(made[name], case.layout) for name in ("q", "k", "v")}
    if case.v_in_k:
        made["v"] = made["k"] if case.kv_dtype == LATENT_ROWS else made["k"][..., :dim_v]
    made |= _score_arrays(case, values)
    if x.key_ranges is not None and x.cu_seqlens_q is None:
        rows = case.batch, case.heads_q, case.seqlen_q
        made["key_ranges"] = x.key_ranges.expand(*rows, -1)
    if x.block_rows is not None:
        for name in ("block_rows", "block_keys"):
            made[name] = getattr(x, name).expand(case.batch, case.heads_q, -1, -1)
    return made


def _score_arrays(case: Case, values: torch.Generator) -> dict:
    made: dict = {}
    if case.alibi:
        shape = (case.batch if "b" in case.alibi else 1, case.heads_q)
        slopes = torch.rand(shape, generator=values) * 0.3
        made["alibi_slopes"] = slopes.expand(case.batch, case.heads_q)
    if case.bias:
        full = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
        own = [n if name in case.bias else 1 for n, name in zip(full, "bhqk", strict=True)]
        dtype = "bfloat16" if ITEM_BITS[case.dtype] == 8 else case.dtype
        if case.bias_dtype == "bool":
            made["bias"] = (torch.randn(own, generator=values) < 0.5).expand(full)
        else:
            made["bias"] = _randn(values, own, case.bias_dtype or dtype).expand(full)
    if case.sink:
        sink = torch.randn(case.heads_q, generator=values)
        made["sink"] = sink.to(_torch_dtype(case.sink_dtype or "float32"))
    if case.rel_bias:
        dtype = "bfloat16" if ITEM_BITS[case.dtype] == 8 else case.dtype
        made["rel_bias"] = _randn(values, (case.heads_q, case.rel_bias), dtype)
    if case.dropout_p:
        made["seed"] = torch.tensor([case.seed * 0x9E3779B97F4A7C15 % 2**63], dtype=torch.int64)
    return made


def _quantized(case: Case, name: str, tokens: tuple[int, ...], dim: int, values) -> dict:
    """A quantised cache whose real values are about standard normal."""
    made: dict = {}
    if case.kv_dtype == LATENT_ROWS:
        x = torch.randn((*tokens, case.head_dim), generator=values)
        return {name: pack_latent(x * torch.rand((*tokens, 1), generator=values) * 1.7)}
    top = {"int8": 127, "int4": 7}.get(case.kv_dtype, 0)
    if top:
        stored = torch.randint(-top, top + 1, (*tokens, dim), generator=values)
        if case.kv_dtype == "int4":
            stored = (stored[..., 0::2] & 0xF) | ((stored[..., 1::2] & 0xF) << 4)
    else:
        stored = torch.randn((*tokens, dim), generator=values)
    made[name] = stored.to(_torch_dtype(case.kv_dtype))
    shape = (case.batch, case.heads_k)
    if case.kv_group:
        shape = (*tokens, dim // case.kv_group)
    made[f"{name}_descale"] = (torch.rand(shape, generator=values) + 0.5) * (
        1.7 / top if top else 1
    )
    if case.kv_shift:
        made[f"{name}_shift"] = torch.randn(shape, generator=values) * 0.3
    return made


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout; the last dim keeps stride 1."""
    if layout == "heads_first":
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "packed":
        return torch.stack([tensor, tensor, tensor], dim=-3).select(-3, 1)
    if layout == "offset":
        *outer, heads, dim = tensor.shape
        padded = tensor.new_empty((*outer, heads + 1, dim + 3))
        view = padded[..., 1:, 1 : dim + 1]
        view.copy_(tensor)
        return view
    return tensor


def _problem(case: Case, x: Operands) -> AttentionProblem:
    itemsize = x.q.element_size()
    problem = AttentionProblem(
        batch=case.batch,
        heads_q=case.heads_q,
        heads_k=case.heads_k,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v or case.head_dim,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype or case.dtype,
        out_dtype="bfloat16" if itemsize == 1 else case.dtype,
        scale=case.scale or 1 / math.sqrt(case.head_dim),
        mask=MaskSpec.of(
            case.causal,
            case.window,
            bottom_right=case.bottom_right and not case.q_offsets,
            shift=0 if case.q_offsets else case.shift,
        ),
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        total_q=len(x.q) if x.cu_seqlens_q is not None else None,
        total_k=len(x.k) if x.cu_seqlens_k is not None and not case.page_size else None,
        used_q=x.seqused_q is not None,
        used_k=x.seqused_k is not None,
        page_size=case.page_size,
        alibi=x.alibi_slopes is not None,
        bias=x.bias is not None,
        rel_bias=x.rel_bias is not None,
        sink=x.sink is not None,
        tree_mask=x.tree_mask is not None,
        kv_batch_idx=x.kv_batch_idx is not None,
        leftpad_k=x.leftpad_k is not None,
        q_offsets=x.q_offsets is not None,
        key_ranges=case.key_ranges,
        own_ranges=x.key_ranges is not None and have_own_ranges(array_spec(x.key_ranges)),
        block_mask=case.block_mask,
        # Both are right for any lists.
        scattered=case.block_mask > 0 and case.seed % 2 == 1,
        kv_group=case.kv_group,
        kv_shift=case.kv_shift,
        needs_grad=case.backward,
        bias_grad=case.backward and x.bias is not None and x.bias.is_floating_point(),
        rel_bias_grad=case.backward and x.rel_bias is not None,
        return_probs=case.return_probs,
        deterministic=case.deterministic,
        num_splits=case.num_splits,
        v_in_k=case.v_in_k,
        **storage(array_spec(x.q), array_spec(x.k), array_spec(x.v), None, case.key_ranges > 0),
        dropout_origin=case.dropout_origin if not case.origins else (0, 0, 0, 0),
        origins=case.origins if case.dropout_p else 0,
    )
    problem.validate()
    return problem


def _poison(problem: AttentionProblem, x: Operands, dout, dlse) -> None:
    """NaN into every token that no sequence uses (the largest value where there is no NaN)."""
    used_q, used_k = _used_tokens(problem, x)
    tensors = [(x.q, used_q), (x.k, used_k), (x.v, used_k)]
    tensors += [(dout, used_q)] if dout is not None else []
    if problem.kv_group:
        scales = (x.k_descale, x.v_descale, x.k_shift, x.v_shift)
        tensors += [(scale, used_k) for scale in scales if scale is not None]
    for tensor, used in tensors:
        unused = ~used.view(tensor.shape[:-2])
        if not unused.any():
            continue
        poison = torch.full((), 127 if tensor.dtype in (torch.int8, torch.uint8) else math.nan)
        if problem.kv_dtype == LATENT_ROWS and tensor.dtype == torch.uint8:
            poison = torch.full((), 255)
        bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        bits[unused] = poison.to(tensor.dtype).view(bits.dtype)
    if dlse is not None:
        unused = ~used_q.view(problem.lse_shape[-1:] if problem.varlen_q else x.q.shape[:2])
        (dlse if problem.varlen_q else dlse.transpose(0, 1))[:, unused] = math.nan


def _used_tokens(problem: AttentionProblem, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    used_q = torch.zeros(x.q.shape[:-2], dtype=torch.bool).flatten()
    used_k = torch.zeros(x.k.shape[:-2], dtype=torch.bool).flatten()
    for seq in sequences(problem, x):
        used_q[seq.q_token : seq.q_token + seq.len_q] = True
        for token, count in seq.k_spans:
            used_k[token : token + count] = True
    return used_q, used_k


def variants(base: Case, **choices) -> list[Case]:
    """One case per given value, each differing from `base` in that one feature."""
    return [replace(base, **{name: value}) for name, values in choices.items() for value in values]


# A mixed batch: long sequences first, between and last; of no queries, of no keys, at the bound of
# short ones and above.
MIXED = Case(
    dtype="bfloat16",
    backward=False,
    batch=11,
    heads_q=8,
    heads_k=2,
    head_dim=128,
    causal=True,
    varlen="q",
    page_size=16,
    seqlen_q=700,
    seqlen_k=2500,
    lens_q=(300, 1, 0, 17, 3, 16, 2, 1, 700, 1, 40),
    lens_k=(900, 2500, 50, 17, 0, 16, 77, 1, 700, 0, 1500),
)


def twins(cases: Iterable[Case], *dtypes: str) -> list[Case]:
    """Every case, and those in bfloat16 in these dtypes too: its budget is so wide that a scale off
    by 0.8 % or two keys lost of 300 pass."""
    found: dict[Case, None] = {}
    for case in cases:
        more = dtypes if case.dtype == "bfloat16" else ()
        found |= dict.fromkeys((case, *(replace(case, dtype=dtype) for dtype in more)))
    return list(found)


def damages(built: Built) -> dict[str, Built]:
    """The problem of a dense, causal case as a kernel sees it that has an edge, the diagonal or the
    scale wrong: each must be out of budget in float16 and float32."""
    x, problem = built.x, built.problem
    keys = problem.seqlen_k

    def fewer(rows: slice, kept_shift: int) -> Built:
        cut = x._replace(k=x.k[:, rows], v=x.v[:, rows])
        # The diagonal stays where it was: keys are counted from the first that is left.
        mask = replace(problem.mask, shift=problem.mask.shift + kept_shift)
        changed = replace(problem, seqlen_k=cut.k.shape[1], mask=mask)
        return replace(built, problem=changed, x=cut)

    def given(**facts) -> Built:
        return replace(built, problem=replace(problem, **facts))

    return {
        "last key lost": fewer(slice(keys - 1), 1),
        "last two keys lost": fewer(slice(keys - 2), 2),
        "first key lost": fewer(slice(1, None), 0),
        "diagonal one key to the right": given(mask=replace(problem.mask, shift=1)),
        "diagonal one key to the left": given(mask=replace(problem.mask, shift=-1)),
        "scale 0.8 % too large": given(scale=problem.scale * 1.008),
        "scale 0.8 % too small": given(scale=problem.scale * 0.992),
    }
