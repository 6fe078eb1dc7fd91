"""A built case through the public PyTorch functions, as a user would call them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import heedful.torch as heedful
from heedful.core.call.operands import Operands, own_shape
from heedful.core.call.problem import AttentionProblem
from heedful.masks import BlockMask
from heedful.masks.arrays import namespace
from heedful.reference import eager, oracle
from heedful.reference.convert import as_numpy, operands_as_numpy
from support.problems.budget import DRAWS, Error, Results, assert_sound, over_budget
from support.problems.cases import Built

# The lengths that dense calls take.
LENGTHS = ("seqused_q", "seqused_k", "leftpad_k")


def dense() -> Any:
    """Small q, k and v with two query heads a KV head, and values of another head dim."""
    torch.manual_seed(0)
    return torch.randn(2, 9, 4, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 8)


def compiled(function) -> Callable[..., Any]:
    """The function as one graph of torch.compile, for any sizes."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")


def results(built: Built, **more) -> Results:
    """What the public function returns for a case, and its gradients if the case has cotangents.

    more: further keyword arguments of the call.
    """
    leaves = _leaves(built)
    returned = call(built, leaves, **more)
    out, lse, *probs = returned
    if not built.problem.return_probs:
        probs = []
    grads = _gradients(built, leaves, out, lse) if built.dout is not None else {}
    found = {"out": out, "lse": lse, "probs": probs[0] if probs else None} | grads
    return Results(**{name: as_numpy(value) for name, value in found.items()})


def call(built: Built, leaves: dict[str, Tensor], **more) -> Any:
    """(out, lse[, probs]) of the function that takes this kind of case."""
    x, case, problem = built.x, built.case, built.problem
    keywords = {
        "softmax_scale": case.scale or None,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "num_splits": case.num_splits,
        "sink": leaves.get("sink"),
        "alibi_slopes": _slopes(built),
        "key_ranges": x.key_ranges,
        "rel_bias": leaves.get("rel_bias"),
        "block_mask": block_mask(built, x._asdict()),
    }
    if is_cache_call(built):
        lengths = x.seqused_k
        if lengths is not None and x.leftpad_k is not None:
            lengths = lengths + x.leftpad_k
        return heedful.flash_attn_with_kvcache(
            x.q,
            x.k,
            x.v,
            cache_seqlens=lengths,
            cache_batch_idx=x.kv_batch_idx,
            cache_leftpad=x.leftpad_k,
            block_table=x.block_table,
            return_softmax_lse=True,
            k_descale=x.k_descale,
            v_descale=x.v_descale,
            k_shift=x.k_shift,
            v_shift=x.v_shift,
            tree_mask=x.tree_mask,
            **keywords,
            **more,
        )
    keywords |= {
        "dropout_p": case.dropout_p,
        "dropout_origin": origin_of(built, x.origins),
        "q_offset": offset_of(built, x.q_offsets),
        "deterministic": case.deterministic,
        "bias": leaves.get("bias"),
        "dropout_seed": x.seed,
        "return_lse": True,
        "return_attn_probs": case.return_probs,
        "q_descale": x.q_descale,
        "k_descale": x.k_descale,
        "v_descale": x.v_descale,
    }
    q, k, v = (leaves[name] for name in "qkv")
    if not problem.varlen_q:
        keywords |= {name: getattr(x, name) for name in LENGTHS}
        return heedful.flash_attn_func(q, k, v, **(keywords | more))
    keywords |= {name: getattr(x, name) for name in ("block_table", "seqused_q", "seqused_k")}
    bounds = (x.cu_seqlens_q, x.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k)
    return heedful.flash_attn_varlen_func(q, k, v, *bounds, **(keywords | more))


def offset_of(built: Built, of_each: Any) -> Any:
    """q_offset of a case. of_each: the array where each sequence has its own."""
    case = built.case
    return of_each if case.q_offsets else None if case.bottom_right else case.shift


def origin_of(built: Built, of_each: Any) -> Any:
    """dropout_origin of a case. of_each: the array where each sequence has its own."""
    if of_each is None:
        return built.case.dropout_origin
    return heedful.Quads(of_each) if built.case.origins == 4 else of_each


def block_mask(built: Built, x: dict[str, Any]) -> BlockMask | None:
    """That of a case, for as many keys as its cache has room for. x: its arrays."""
    if not built.case.block_mask:
        return None
    problem, keys = built.problem, built.problem.seqlen_k
    arrays = {name: x[f"block_{name}"] for name in ("rows", "keys", "bits")}
    if is_cache_call(built) and problem.page_size:
        keys = problem.page_size * x["block_table"].shape[1]
        of_keys, xp = arrays["keys"], namespace("block_mask", arrays["keys"])
        more = -(-keys // arrays["bits"].shape[1]) - of_keys.shape[2]
        unseen = [xp.zeros_like(of_keys[:, :, :1])] * more
        arrays["keys"] = xp.concatenate([of_keys, *unseen], 2)
    return BlockMask(**arrays, seqlen_q=problem.seqlen_q, seqlen_k=keys)


def is_cache_call(built: Built) -> bool:
    """Whether the case is one for flash_attn_with_kvcache."""
    x, case, problem = built.x, built.case, built.problem
    if x.kv_batch_idx is not None or x.tree_mask is not None:
        return True
    if problem.varlen_q or problem.page_size or problem.quantized_kv:
        return not problem.varlen_q
    has_lengths = x.seqused_k is not None or x.leftpad_k is not None
    dense_only = case.backward or case.bias or case.dropout_p > 0 or x.seqused_q is not None
    dense_only = dense_only or x.q_offsets is not None
    return has_lengths and not dense_only


def _slopes(built: Built) -> Tensor | None:
    slopes = built.x.alibi_slopes
    if slopes is None or "b" in built.case.alibi or not len(slopes):
        return slopes
    return slopes[0]


def _leaves(built: Built) -> dict[str, Tensor]:
    """The differentiable inputs, apart from the tensors of the case; the bias unexpanded."""
    x, leaves = built.x, {}
    for name in ("q", "k", "v", "sink", "bias", "rel_bias"):
        tensor = getattr(x, name)
        if tensor is None:
            continue
        if name == "bias":
            own = own_shape(tuple(tensor.shape), tensor.stride())
            tensor = tensor[tuple(slice(0, size) for size in own)]
        has_gradient = built.dout is not None and tensor.is_floating_point()
        leaves[name] = tensor.detach().requires_grad_(has_gradient)
    return leaves


def _gradients(built: Built, leaves: dict[str, Tensor], out: Tensor, lse: Tensor) -> dict:
    outputs, cotangents = [out], [built.dout]
    if built.dlse is not None:
        outputs.append(lse)
        cotangents.append(built.dlse)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents)
    return {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def dense_problem(q: Tensor, k: Tensor, v: Tensor, **facts) -> AttentionProblem:
    """The problem of (B, S, H, D) tensors."""
    dtype = str(q.dtype).removeprefix("torch.")
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], dtype)
    return AttentionProblem.dense(*sizes, head_dim_v=v.shape[-1], **facts)


def assert_agrees(out: Tensor, problem: AttentionProblem, x: Operands, lse: Any = None) -> None:
    """AssertionError unless out (and lse) lie within the error budget of these very operands; the
    twin's error is the worst over draws of q, k and v."""
    truth = oracle.forward(problem, operands_as_numpy(x))
    errors: list[Error] = []
    for draw in range(DRAWS):
        y = x
        if draw:
            drawn = {n: torch.randn(getattr(x, n).shape).to(getattr(x, n).dtype) for n in "qkv"}
            y = x._replace(**drawn) if x.k.dtype == x.q.dtype else y._replace(q=drawn["q"])
        twin_out, twin_lse, _ = eager.forward(problem, y)
        exact_out, exact_lse, _ = oracle.forward(problem, operands_as_numpy(y))
        found = [Error.between(as_numpy(twin_out), exact_out)]
        found.append(Error.between(as_numpy(twin_lse), exact_lse))
        errors = [a.worst(b) for a, b in zip(found, errors or found, strict=True)]
    for name, got, want, error in zip(("out", "lse"), (out, lse), truth, errors, strict=False):
        if got is not None:
            assert_sound(name, as_numpy(got), want)
            complaint = over_budget(name, as_numpy(got), want, error, problem.out_dtype)
            assert not complaint, complaint
