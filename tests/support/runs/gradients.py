"""A built case through `attention_backward`, as a user would call it."""

from dataclasses import replace
from typing import Any

import heedful.torch as heedful
from heedful.reference.convert import as_numpy
from support.problems.budget import Results
from support.problems.cases import Built
from support.runs import api


def keywords_of(built: Built) -> dict[str, Any]:
    """The keywords of a backward of this case, its bias as the caller has it."""
    case, x, problem = built.case, built.x, built.problem
    leaves = api._leaves(replace(built, dout=None))
    given: dict[str, Any] = {
        "softmax_scale": case.scale or None,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "deterministic": case.deterministic,
        "dropout_p": case.dropout_p,
        "dropout_seed": x.seed,
        "alibi_slopes": api._slopes(built),
        "bias": leaves.get("bias"),
        "rel_bias": leaves.get("rel_bias"),
        "sink": leaves.get("sink"),
    }
    if problem.varlen_q:
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table")
        given |= {name: getattr(x, name) for name in names}
        given |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    else:
        given |= {name: getattr(x, name) for name in api.LENGTHS}
    return given


def results(built: Built) -> Results:
    """What the two calls return for a case."""
    x, dout, leaves = built.x, built.dout, api._leaves(replace(built, dout=None))
    assert dout is not None
    out, lse, *_ = api.call(built, leaves)
    grads = heedful.attention_backward(
        dout, x.q, x.k, x.v, out, lse, dlse=built.dlse, **keywords_of(built)
    )
    found = {"out": out, "lse": lse, **grads._asdict()}
    return Results(**{name: as_numpy(value) for name, value in found.items()})
