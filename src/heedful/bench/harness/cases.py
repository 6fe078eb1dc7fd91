"""The timed problems: shapes as data. The groups forward, backward, splits, shapes and decode are
the tables of docs/benchmarks.md; `cpu` is what a CPU does in seconds."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import ITEM_BITS, AttentionProblem

# Keys of a page of a cache, where a case has pages.
PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One problem to time.

    direction: forward or backward (dq, dk and dv, on a kept forward). host: time what the host does
    for a call instead of what the device does. grad: forward with a graph for a later backward.
    compiled: the call under torch.compile. paged: k and v lie in pages of PAGE keys. lengths: of
    the sequences, where they are packed one after the other; none where each is a row. input_scale:
    q and k are normal values times this; with 4 the running maximum changes often.
    """

    group: str
    problem: AttentionProblem
    direction: str = "forward"
    host: bool = False
    grad: bool = False
    compiled: bool = False
    paged: bool = False
    input_scale: float = 1.0
    lengths: tuple[int, ...] = ()

    @property
    def starts(self) -> tuple[int, ...]:
        """Where packed sequences begin, and the last one ends."""
        return (0, *accumulate(self.lengths))

    @property
    def is_windowed(self) -> bool:
        return self.problem.mask.left >= 0

    @property
    def shape(self) -> str:
        """Sizes and mask in one line."""
        p = self.problem
        size = f"{p.batch}x{p.seqlen_q}x{p.seqlen_k}"
        if self.lengths:
            size = f"{p.batch} packed, {p.total_q} tokens,"
        dim = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim}/{p.head_dim_v}"
        mask = " causal" if p.mask.causal else ""
        if self.is_windowed:
            mask = f" window {p.mask.left + 1}"
        return f"{size} h{p.heads_q}/{p.heads_k} d{dim} {p.dtype}{mask}"

    @property
    def name(self) -> str:
        kind = "backward" if self.direction == "backward" else "forward"
        if self.host:
            grad = " with grad" * (self.grad and kind == "forward")
            kind = f"host {kind}{grad}" + " over pages" * self.paged + " compiled" * self.compiled
        scale = f" inputs x{self.input_scale:g}" if self.input_scale != 1 else ""
        return f"{kind} {self.shape}{scale}"

    def flops(self) -> float:
        """As papers count: 4 b h sq sk d forward, half of it when causal, 2.5 times backward. With
        a window only the pairs inside it count."""
        p = self.problem
        sizes = [(n, n) for n in self.lengths] or [(p.seqlen_q, p.seqlen_k)] * p.batch
        pairs = sum(self._pairs(*size) for size in sizes)
        whole = 2.0 * p.heads_q * pairs * (p.head_dim + p.head_dim_v)
        return whole * (2.5 if self.direction == "backward" else 1)

    def _pairs(self, len_q: int, len_k: int) -> float:
        mask = self.problem.mask
        if self.is_windowed:
            return mask.count_visible(len_q, len_k)
        return len_q * len_k / (2 if mask.causal and len_q == len_k else 1)

    def kv_bytes(self) -> int:
        """Keys and values, read once: what bounds a decode step."""
        p = self.problem
        tokens = sum(self.lengths) or p.batch * p.seqlen_k
        return tokens * p.heads_k * (p.head_dim + p.head_dim_v) * ITEM_BITS[p.kv_dtype] // 8


_DENSE = (
    *((b, s, s, 32, 32, 64) for b, s in ((16, 1024), (4, 4096), (1, 16384))),
    *((b, s, s, 16, 16, 128) for b, s in ((16, 1024), (4, 4096), (1, 16384))),
    *((b, s, s, 8, 8, 256) for b, s in ((16, 1024), (4, 4096), (1, 16384))),
    (4, 8192, 8192, 64, 8, 128),
)
# Few queries over long keys, head dim 64: the shapes of the native split-K forward.
_SPLITS = (
    (1, 40000, 40000, 2, 2, 64),
    (1, 128, 65535, 16, 16, 64),
    (1, 32768, 32768, 8, 8, 64),
    (8, 8192, 8192, 16, 16, 64),
)
# Few KV heads: work tiles of a causal backward are few and unlike.
_KV_HEADS = ((4, 8192, 8192, 32, 8, 128), (1, 8192, 8192, 32, 8, 128), (1, 8192, 8192, 8, 2, 128))
# Other shapes that models have: (shape, facts).
_SHAPES = (
    ((4, 4096, 4096, 32, 4, 128), {}),
    ((4, 4096, 4096, 16, 16, 96), {}),
    ((4, 4096, 4096, 8, 8, 192), {}),
    ((4, 4096, 4096, 16, 16, 192), {"head_dim_v": 128}),
    ((4, 4096, 4096, 16, 16, 128), {"dtype": "float16"}),
)
_HEADS = {64: 32, 128: 16, 256: 8}
_WINDOW = MaskSpec(left=1023, right=0)
_DECODE = (
    (1, 1, 8192, 32, 8, 128),
    (1, 1, 131072, 32, 8, 128),
    (8, 1, 8192, 32, 8, 128),
    (64, 1, 8192, 32, 8, 128),
    (128, 1, 2048, 32, 8, 128),
)
_CHUNK = (16, 4, 16384, 64, 8, 128)
_HOST = (1, 128, 128, 8, 8, 64)
_HOST_DECODE = (4, 1, 256, 8, 8, 64)
_CPU = ((1, 512, 512, 8, 8, 64), (1, 2048, 2048, 4, 4, 64), (2, 1024, 1024, 8, 2, 128))

GROUPS = {
    "forward": "training and prefill shapes, forward",
    "backward": "the same shapes, backward",
    "kv_heads": "backward with few KV heads",
    "splits": "few queries or heads over long keys",
    "shapes": "other head dims, fp16, a window, packed sequences of unlike length",
    "decode": "one new token, or four, over a KV cache",
    "overhead": "host time of a call, arguments rotated over many tensors",
    "cpu": "forward and backward at sizes that a CPU does in seconds",
}


def cases(group: str, dtype: str = "bfloat16", input_scale: float = 1.0) -> list[Case]:
    """The cases of a group. Raises ValueError for an unknown one."""
    if group not in GROUPS:
        raise ValueError(f"cases must be among {', '.join(GROUPS)}, got {group!r}")
    return list(_cases(group, dtype, input_scale))


def _cases(group: str, dtype: str, scale: float) -> Iterator[Case]:
    def case(shape, causal=False, direction="forward", problem=None, **facts):
        grad = direction == "backward" or facts.get("grad", False)
        usual = {"dtype": dtype, "causal": causal, "needs_grad": grad} | (problem or {})
        made = AttentionProblem.dense(*shape, **usual)
        return Case(group, made, direction, input_scale=scale, **facts)

    match group:
        case "forward" | "backward":
            yield from (case(shape, causal, group) for shape in _DENSE for causal in (False, True))
        case "kv_heads":
            yield from (case(s, causal, "backward") for s in _KV_HEADS for causal in (False, True))
        case "splits":
            yield from (case(shape) for shape in _SPLITS)
        case "shapes":
            for shape, facts in _SHAPES:
                yield from (case(shape, causal, problem=facts) for causal in (False, True))
            for dim, heads in _HEADS.items():
                size = (1, 16384, 16384, heads, heads, dim)
                yield case(size, problem={"mask": _WINDOW})
            lengths = _packed_lengths()
            longest, total = max(lengths), sum(lengths)
            for dim, heads in _HEADS.items():
                size = (len(lengths), longest, longest, heads, heads, dim)
                packed = {"total_q": total, "total_k": total}
                yield case(size, True, problem=packed, lengths=lengths)
        case "decode":
            yield from (case(shape) for shape in _DECODE)
            yield case(_CHUNK, True)
        case "overhead":
            yield case(_HOST, host=True)
            yield case(_HOST, host=True, grad=True)
            yield case(_HOST, direction="backward", host=True, grad=True)
            yield case(_HOST_DECODE, host=True, paged=True)
            yield case(_HOST, host=True, compiled=True)
        case "cpu":
            for direction in ("forward", "backward"):
                yield from (case(s, causal, direction) for s in _CPU for causal in (False, True))


def _packed_lengths() -> tuple[int, ...]:
    """64 lengths from a log-normal distribution, median 512, sigma 1, none over 16384."""
    draw = random.Random(0)
    return tuple(min(int(draw.lognormvariate(math.log(512), 1)) + 1, 16384) for _ in range(64))
