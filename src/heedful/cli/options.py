"""The options that describe an attention problem, for every command that takes one."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import ITEM_BITS, AttentionProblem

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def _option(help: str, *names: str):
    return typer.Option(*names, help=help, rich_help_panel="Problem")


@dataclass(frozen=True)
class ProblemOptions:
    """One field per option; `problem()` is what they say together."""

    batch: Annotated[int, _option("sequences", "--batch", "-b")] = 4
    seqlen: Annotated[int, _option("queries of a sequence", "--seqlen", "-s")] = 4096
    seqlen_k: Annotated[int | None, _option("keys of a sequence, if not --seqlen")] = None
    heads: Annotated[int, _option("query heads", "--heads", "-n")] = 16
    heads_k: Annotated[int | None, _option("KV heads, if not --heads")] = None
    head_dim: Annotated[int, _option("head dim of Q and K", "--head-dim", "-d")] = 128
    head_dim_v: Annotated[int | None, _option("head dim of V, if not --head-dim")] = None
    dtype: Annotated[str, _option("bf16, fp16, fp32, fp8 or a full name", "--dtype", "-t")] = "bf16"
    kv_dtype: Annotated[str | None, _option("dtype of a quantised KV cache")] = None
    causal: Annotated[bool, _option("causal mask", "--causal", "-c")] = False
    window: Annotated[str | None, _option("LEFT,RIGHT or LEFT,RIGHT,FIRST; -1 = unbounded")] = None
    top_left: Annotated[
        bool, _option("align the mask to the first query and key", "--top-left")
    ] = False
    softcap: Annotated[float, _option("cap of the scores, 0 = off")] = 0.0
    dropout: Annotated[float, _option("dropout probability")] = 0.0
    alibi: Annotated[bool, _option("with ALiBi slopes", "--alibi")] = False
    bias: Annotated[bool, _option("with an additive bias", "--bias")] = False
    sink: Annotated[bool, _option("with sink logits", "--sink")] = False
    varlen: Annotated[bool, _option("packed sequences", "--varlen")] = False
    seqused: Annotated[bool, _option("with lengths used (cache_seqlens)", "--seqused")] = False
    page_size: Annotated[int, _option("keys of a page of a paged cache, 0 = not paged")] = 0
    splits: Annotated[int, _option("split the keys in so many parts, 0 = choose")] = 0
    backward: Annotated[bool, _option("a backward will follow", "--backward", "-g")] = False
    bias_grad: Annotated[bool, _option("the bias needs a gradient", "--bias-grad")] = False
    deterministic: Annotated[
        bool, _option("bit-equal gradients from run to run", "--deterministic")
    ] = False
    unaligned: Annotated[bool, _option("bases or strides off 16 bytes", "--unaligned")] = False
    uneven_rows: Annotated[
        bool, _option("batch strides of K or V no multiples of row strides", "--uneven-rows")
    ] = False
    far_rows: Annotated[bool, _option("rows 8 MiB apart or more", "--far-rows")] = False
    v_in_k: Annotated[bool, _option("V is a view of K's first columns", "--v-in-k")] = False

    def problem(self) -> AttentionProblem:
        """Raises ValueError naming the option's argument."""
        seqlen_k = self.seqlen if self.seqlen_k is None else self.seqlen_k
        dtype = dtype_name(self.dtype)
        facts = {
            "head_dim_v": self.head_dim if self.head_dim_v is None else self.head_dim_v,
            "kv_dtype": dtype if self.kv_dtype is None else dtype_name(self.kv_dtype),
            "mask": self._mask(),
            "softcap": self.softcap,
            "dropout_p": self.dropout,
            "total_q": self.batch * self.seqlen if self.varlen else None,
            "total_k": self.batch * seqlen_k if self.varlen and not self.page_size else None,
            "used_k": self.seqused,
            "page_size": self.page_size,
            "num_splits": self.splits,
            "needs_grad": self.backward or self.bias_grad,
            "aligned": not self.unaligned,
            "even_rows": not self.uneven_rows,
            "near_rows": not self.far_rows,
            "v_in_k": self.v_in_k,
        }
        same = ("alibi", "bias", "sink", "bias_grad", "deterministic")
        facts.update({name: getattr(self, name) for name in same})
        return AttentionProblem.dense(
            self.batch,
            self.seqlen,
            seqlen_k,
            self.heads,
            self.heads_k,
            self.head_dim,
            dtype,
            **facts,
        )

    def _mask(self) -> MaskSpec:
        try:
            window = tuple(int(w) for w in self.window.split(",")) if self.window else (-1, -1)
        except ValueError:
            raise ValueError(
                f"window must be LEFT,RIGHT or LEFT,RIGHT,FIRST in whole numbers, got {self.window}"
            ) from None
        return MaskSpec.of(self.causal, window, bottom_right=not self.top_left)


def dtype_name(text: str) -> str:
    """The full name of a dtype given in any usual spelling."""
    name = DTYPES.get(text, text)
    if name not in ITEM_BITS:
        raise ValueError(f"dtype must be one of {', '.join([*DTYPES, *ITEM_BITS])}, got {text!r}")
    return name


def with_problem(command: Callable) -> Callable:
    """Gives a command whose first parameter is `options: ProblemOptions` these options."""
    fields = dataclasses.fields(ProblemOptions)
    hints = inspect.get_annotations(ProblemOptions)
    declared = list(inspect.signature(command).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name])
        for f in fields
    ]

    @functools.wraps(command)
    def wrapped(**arguments):
        options = ProblemOptions(**{f.name: arguments.pop(f.name) for f in fields})
        return command(options, **arguments)

    parameters = [*added, *(p.replace(kind=keyword) for p in declared)]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapped.__wrapped__
    return wrapped
