"""The arrays of a problem as ArraySpecs: contiguous, aligned, with the right shapes. Compilation
ahead of time, inspection, and front ends without tensors use them.
"""

from collections.abc import Container, Mapping

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.problem import LATENT_ROW_BYTES, LATENT_ROWS, AttentionProblem

Buffers = dict[str, ArraySpec]
# Numbers in results before kernels run, which write rows of sequences alone.
BEGINNINGS = {"probs": 0.0, "max_scores": float("-inf")}


def inputs(problem: AttentionProblem) -> Buffers:
    """Every operand of the problem, by Operands' names."""
    p, make = problem, ArraySpec.contiguous
    tokens_q = (p.total_q,) if p.total_q is not None else (p.batch, p.seqlen_q)
    buffers = {"q": make((*tokens_q, p.heads_q, p.head_dim), p.dtype)}
    storage = _kv_storage(p)
    halves = 2 if p.kv_dtype == "int4" else 1
    for name, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
        if p.kv_dtype == LATENT_ROWS:
            buffers[name] = make((*storage, p.heads_k, LATENT_ROW_BYTES), "uint8")
            continue
        buffers[name] = make((*storage, p.heads_k, dim // halves), p.kv_dtype)
        if p.kv_group:
            groups = (*storage, p.heads_k, dim // p.kv_group)
            buffers[f"{name}_descale"] = make(groups, "float32")
            if p.kv_shift:
                buffers[f"{name}_shift"] = make(groups, "float32")
        elif p.quantized_kv:
            buffers[f"{name}_descale"] = make((p.batch, p.heads_k), "float32")
    if p.bias:
        buffers["bias"] = make((p.batch, p.heads_q, p.seqlen_q, p.seqlen_k), p.dtype)
    if p.rel_bias:
        # An entry for every distance.
        buffers["rel_bias"] = make((p.heads_q, p.seqlen_q + p.seqlen_k + 1), p.dtype)
    if p.alibi:
        buffers["alibi_slopes"] = make((p.batch, p.heads_q), "float32")
    if p.sink:
        buffers["sink"] = make((p.heads_q,), "float32")
    if p.tree_mask:
        buffers["tree_mask"] = make((p.batch, p.seqlen_q, p.seqlen_q), "bool")
    if p.key_ranges:
        buffers["key_ranges"] = _ranges(p)
    if p.block_mask:
        # Lists of every tile, and one tile's bits.
        tiles_q, tiles_k = (-(-n // p.block_mask) for n in (p.seqlen_q, p.seqlen_k))
        heads = (p.batch, p.heads_q)
        buffers["block_rows"] = make((*heads, tiles_q, 2 + 2 * max(1, tiles_k)), "int32")
        buffers["block_keys"] = make((*heads, tiles_k, 2 + 2 * max(1, tiles_q)), "int32")
        buffers["block_bits"] = make((1, p.block_mask, p.block_mask // 32), "int32")
    if p.dropout_p > 0:
        buffers["seed"] = make((1,), "int64")
    if p.origins:
        buffers["origins"] = make((p.batch, 4), "int32")
    present = {
        "cu_seqlens_q": (p.varlen_q, p.batch + 1),
        "cu_seqlens_k": (p.varlen_k, p.batch + 1),
        "seqused_q": (p.used_q, p.batch),
        "seqused_k": (p.used_k, p.batch),
        "kv_batch_idx": (p.kv_batch_idx, p.batch),
        "leftpad_k": (p.leftpad_k, p.batch),
        "q_offsets": (p.q_offsets, p.batch),
    }
    buffers |= {name: make((n,), "int32") for name, (there, n) in present.items() if there}
    if p.page_size:
        buffers["block_table"] = make((p.batch, _pages(p)), "int32")
    return buffers


def _ranges(p: AttentionProblem) -> ArraySpec:
    """The key_ranges, which have a stride of 0 where heads share them."""
    pairs, make = 2 * p.key_ranges, ArraySpec.contiguous
    if p.total_q is not None:
        return make((p.total_q, pairs), "int32")
    shape = (p.batch, p.heads_q, p.seqlen_q, pairs)
    if p.own_ranges:
        return make(shape, "int32")
    return ArraySpec(shape, (p.seqlen_q * pairs, 0, pairs, 1), "int32")


def results(problem: AttentionProblem) -> Buffers:
    """The results of the forward."""
    made = {"out": ArraySpec.contiguous(problem.out_shape, problem.out_dtype)}
    if problem.makes_lse:
        made["lse"] = ArraySpec.contiguous(problem.lse_shape, "float32")
    if problem.keeps_rest:
        made["rest"] = made["lse"]
    if problem.max_scores:
        made["max_scores"] = made["lse"]
    if problem.return_probs:
        made["probs"] = ArraySpec.contiguous(problem.probs_shape, problem.out_dtype)
    return made


def beginning(names: Container[str]) -> float | None:
    """The number in the last result before a forward that has these arrays, None if it matters
    not: kernels store largest scores of all rows of dense calls."""
    if "probs" in names:
        return BEGINNINGS["probs"]
    is_packed = "max_scores" in names and "cu_seqlens_q" in names
    return BEGINNINGS["max_scores"] if is_packed else None


def forward(problem: AttentionProblem) -> Buffers:
    """Inputs and outputs of the forward."""
    return inputs(problem) | results(problem)


def backward(problem: AttentionProblem) -> Buffers:
    """Inputs and outputs of the backward, without a gradient of the log-sum-exp."""
    buffers = forward(problem)
    for name in ("probs", "max_scores"):
        buffers.pop(name, None)
    buffers["lse"] = ArraySpec.contiguous(problem.lse_shape, "float32")
    buffers["dout"] = buffers["out"]
    for name in ("q", "k", "v"):
        buffers[f"d{name}"] = buffers[name]
    if problem.bias_grad:
        buffers["dbias"] = buffers["bias"]
    if problem.sink:
        buffers["dsink"] = buffers["sink"]
    if problem.rel_bias_grad:
        buffers["drel_bias"] = buffers["rel_bias"]
    return buffers


def step(problem: AttentionProblem, tokens: int, rotary: str = "", rotary_dim: int = 0) -> Buffers:
    """Inputs and outputs of a forward that first extends a cache, whose program counts the keys.

    tokens: new keys of each sequence. rotary: "halves" or "pairs" are the rotated dims of which
    queries and new keys have rotary_dim, all by default; "" is none.
    """
    buffers, make = forward(problem), ArraySpec.contiguous
    buffers.pop("seqused_k", None)
    for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v)):
        buffers[f"{name}_new"] = make((problem.batch, tokens, problem.heads_k, dim), problem.dtype)
    buffers["cache_seqlens"] = make((problem.batch,), "int32")
    if rotary:
        buffers["q_new"] = buffers.pop("q")
        angles = (rotary_dim or problem.head_dim) // 2
        for name in ("rotary_cos", "rotary_sin"):
            buffers[name] = make((problem.seqlen_k, angles), problem.dtype)
    return buffers


def _kv_storage(problem: AttentionProblem) -> tuple[int, ...]:
    if problem.page_size:
        return problem.batch * _pages(problem), problem.page_size
    if problem.total_k is not None:
        return (problem.total_k,)
    return problem.batch, problem.seqlen_k


def _pages(problem: AttentionProblem) -> int:
    """How many pages the longest sequence needs."""
    return -(-problem.seqlen_k // problem.page_size)


def check(problem: AttentionProblem, buffers: Mapping[str, ArraySpec]) -> None:
    """Raises ValueError for arrays that no kernel of this problem can be given."""
    if "probs" in buffers and "lse" not in buffers:
        raise ValueError("probs need lse: the probabilities are made from it")
    if problem.page_size and "cu_seqlens_k" in buffers:
        raise ValueError("cu_seqlens_k beside block_table must come as seqused_k")
    for name in ("k", "v"):
        descale, shift = (buffers.get(f"{name}_{what}") for what in ("descale", "shift"))
        if descale is not None and shift is not None and shift.steps != descale.steps:
            raise ValueError(f"{name}_shift must have the strides of {name}_descale")
