"""The implementations that are timed. A peer that is missing or cannot take a case gives its
reason, never an error.

Every peer's forward takes q (B, Sq, H, D), k and v (B, Sk, G, D) and returns (B, Sq, H, D); packed
sequences are one row of (1, T, H, D). A peer that takes heads first gets transposed views, without
a copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from heedful.bench.harness.cases import PAGE, Case
from heedful.core.call.problem import ITEM_BITS, default_out_dtype
from heedful.core.registry.by_hand import forced
from heedful.reference.eager import twin_dtype

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Scores that the math backend may materialise.
_MOST_SCORES_BYTES = 16 * 1024**3


class Inputs(NamedTuple):
    """q, dout (B, Sq, H, D); k, v (B, Sk, G, D). Packed: B is 1, Sq and Sk are all tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


@dataclass(frozen=True)
class Peer:
    """unfit: a reason known beforehand, or None. make: the forward for a case's shapes. pages:
    whether it takes paged caches. packs, windows: whether it takes packed sequences and sliding
    windows. fp8: whether it takes 8-bit inputs."""

    name: str
    words: str
    unfit: Callable[[Case, torch.device], str | None]
    make: Callable[[Case, Inputs], Forward]
    pages: bool = False
    packs: bool = False
    windows: bool = False
    fp8: bool = False

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """The reason why the case cannot be timed, or None."""
        if case.lengths and not self.packs:
            return "does not take packed sequences"
        if case.is_windowed and not self.windows:
            return "does not take sliding windows"
        if case.paged and not self.pages:
            return "is not timed on paged caches"
        if ITEM_BITS[case.problem.dtype] == 8 and not self.fp8:
            return "is not timed on 8-bit inputs"
        return self.unfit(case, device)


def draw(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Normal inputs in the case's dtype, dout in that of its output; q and k times its
    input_scale."""
    p = case.problem
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, p.dtype)

    def normal(
        rows: int, heads: int, dim: int, scale: float = 1.0, dtype: torch.dtype = dtype
    ) -> torch.Tensor:
        shape = (1, sum(case.lengths), heads, dim) if case.lengths else (p.batch, rows, heads, dim)
        # Nothing draws 8-bit values.
        drawn = torch.randn(shape, generator=generator, device=device, dtype=twin_dtype(dtype))
        return drawn.mul_(scale).to(dtype)

    return Inputs(
        normal(p.seqlen_q, p.heads_q, p.head_dim, case.input_scale),
        normal(p.seqlen_k, p.heads_k, p.head_dim, case.input_scale),
        normal(p.seqlen_k, p.heads_k, p.head_dim_v),
        normal(p.seqlen_q, p.heads_q, p.head_dim_v, dtype=getattr(torch, p.out_dtype)),
    )


def _packing(case: Case, device: torch.device) -> dict[str, Any]:
    """Packed sequences, as the flash-attn packages and heedful name what tells them apart."""
    starts = torch.tensor(case.starts, dtype=torch.int32, device=device)
    facts = {"cu_seqlens": starts, "max_seqlen": max(case.lengths)}
    return {f"{name}_{side}": fact for name, fact in facts.items() for side in "qk"}


# heedful


def chosen_by(name: str) -> str | None:
    """The backend that a peer's name chooses, None for the planner's. Raises ValueError."""
    words = name.partition(":")[2]
    return forced(words) if words else None


def _heedful(name: str = "heedful") -> Peer:
    """name: heedful, or heedful:BACKEND."""
    backend = chosen_by(name)

    def make(case: Case, inputs: Inputs) -> Forward:
        import heedful

        if case.paged:
            return _paged(case, inputs, backend)
        if case.lengths:
            return _packed(heedful.flash_attn_varlen_func, case, inputs, backend=backend)
        mask, function = case.problem.mask, heedful.flash_attn_func
        options: dict[str, Any] = {"causal": mask.causal}
        if case.group == "decode":
            function = heedful.flash_attn_with_kvcache
        elif case.is_windowed:
            options = {"window_size": (mask.left, mask.right)}
        return lambda q, k, v: function(q, k, v, **options, backend=backend)

    def why_not(case: Case, device: torch.device) -> str | None:
        from heedful.core.planning.plan import plan
        from heedful.torch.base.device import device_spec, toolchain

        try:
            plan(case.problem, device_spec(device), toolchain(), backend)
        except ValueError as error:
            return str(error)
        return None

    asked = name.partition(":")[2]
    words = f"the {asked} backend, forced" if asked else "what the planner chooses"
    return Peer(name, words, why_not, make, pages=True, packs=True, windows=True, fp8=True)


def _widened() -> Peer:
    """heedful on 8-bit inputs that were converted to bfloat16 beforehand."""
    ours = _heedful()

    def wide(case: Case) -> Case:
        p = case.problem
        dtype = default_out_dtype(p.dtype)
        return replace(case, problem=replace(p, dtype=dtype, kv_dtype=dtype))

    def make(case: Case, inputs: Inputs) -> Forward:
        dtype = getattr(torch, wide(case).problem.dtype)
        copies = Inputs(*(x.to(dtype) for x in inputs))
        forward = ours.make(wide(case), copies)
        return lambda q, k, v: forward(*copies[:3])

    def why_not(case: Case, device: torch.device) -> str | None:
        if ITEM_BITS[case.problem.dtype] != 8:
            return "is for 8-bit inputs"
        if case.host or case.direction == "backward":
            return "is timed on the device and forward alone"
        return ours.why_not(wide(case), device)

    words = "heedful on the same values in bfloat16, beside 8-bit inputs"
    return Peer("bf16", words, why_not, make, packs=True, windows=True, fp8=True)


def _packed(function, case: Case, inputs: Inputs, **more) -> Forward:
    """The forward of a function that takes packed sequences as flash-attn's does."""
    more |= _packing(case, inputs.q.device) | {"causal": case.problem.mask.causal}

    def forward(q, k, v):
        out = function(q[0], k[0], v[0], **more)
        return (out[0] if isinstance(out, tuple) else out)[None]

    return forward


def _paged(case: Case, inputs: Inputs, backend: str | None) -> Forward:
    import heedful

    p, device = case.problem, inputs.q.device
    pages = torch.arange(p.batch * (p.seqlen_k // PAGE), dtype=torch.int32, device=device)
    table = pages.view(p.batch, -1)
    lengths = torch.full((p.batch,), p.seqlen_k, dtype=torch.int32, device=device)

    # A cache is made of pages once, not in each call.
    pages_of = cache(lambda x: x.view(-1, PAGE, *x.shape[2:]))

    def forward(q, k, v):
        return heedful.flash_attn_with_kvcache(
            q,
            pages_of(k),
            pages_of(v),
            cache_seqlens=lengths,
            block_table=table,
            causal=p.mask.causal,
            backend=backend,
        )

    return forward


# PyTorch


def _sdpa(name: str, backend: str | None, words: str, cpu: bool) -> Peer:
    flash = backend == "FLASH_ATTENTION"

    def why_not(case: Case, device: torch.device) -> str | None:
        p = case.problem
        if device.type == "cpu" and (case.lengths or case.is_windowed or not cpu):
            return "has no CPU kernel"
        scores = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * 4
        if backend == "MATH" and scores > _MOST_SCORES_BYTES:
            return f"would hold {scores / 1024**3:.0f} GiB of scores"
        return None

    def make(case: Case, inputs: Inputs) -> Forward:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        p = case.problem
        if case.lengths or case.is_windowed:
            return _bare_flash(case, inputs)
        kwargs: dict[str, Any] = {"enable_gqa": True} if p.group > 1 else {}
        if p.mask.causal and p.seqlen_q == p.seqlen_k:
            kwargs["is_causal"] = True
        elif p.mask.causal:
            kwargs["attn_mask"] = _lower_right(case, inputs.q.device, backend)

        def attention(q, k, v):
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*heads_first, **kwargs).transpose(1, 2)

        if backend is None:
            return attention
        chosen = getattr(SDPBackend, backend)

        def forced(q, k, v):
            with sdpa_kernel(chosen):
                return attention(q, k, v)

        return forced

    return Peer(name, words, why_not, make, packs=flash, windows=flash)


def _bare_flash(case: Case, inputs: Inputs) -> Forward:
    """SDPA's FlashAttention-2 where SDPA itself has no word for what it can do."""
    p, packed = case.problem, _packing(case, inputs.q.device) if case.lengths else {}
    starts = packed.get("cu_seqlens_q")
    longest = p.seqlen_q, p.seqlen_k
    window = {}
    if case.is_windowed:
        window = {"window_size_left": p.mask.left, "window_size_right": p.mask.right}
    kernel = torch.ops.aten._flash_attention_forward
    causal = p.mask.causal

    def forward(q, k, v):
        rows = (q[0], k[0], v[0]) if packed else (q, k, v)
        out = kernel(*rows, starts, starts, *longest, 0.0, causal, False, **window)[0]
        return out[None] if packed else out

    return forward


def _lower_right(case: Case, device: torch.device, backend: str | None):
    """A causal mask for fewer queries than keys, in the form that the backend takes fastest."""
    from torch.nn.attention.bias import causal_lower_right

    p = case.problem
    if backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", None):
        return causal_lower_right(p.seqlen_q, p.seqlen_k)
    ones = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool, device=device)
    return ones.tril(p.seqlen_k - p.seqlen_q)


def _flex_make(case: Case, inputs: Inputs) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    p = case.problem
    # A timed backward keeps its graph, so its buffers may not be given away.
    autograd_config: Any = import_module("torch._functorch.config")
    autograd_config.donated_buffer = False
    torch._dynamo.reset()  # one compilation a case, and no other case's in its way
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if p.mask.causal:
        shift = p.seqlen_k - p.seqlen_q
        mask = create_block_mask(
            lambda b, h, i, j: j <= i + shift,
            B=None,
            H=None,
            Q_LEN=p.seqlen_q,
            KV_LEN=p.seqlen_k,
            device=str(inputs.q.device),
        )

    def forward(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = compiled(*heads_first, block_mask=mask, enable_gqa=p.group > 1)
        return out.transpose(1, 2)

    return forward


def _flex_why_not(case: Case, device: torch.device) -> str | None:
    if device.type == "cpu" and case.direction == "backward":
        return "has no backward on CPU"
    return None


# Other libraries


def _needs(module: str, attribute: str):
    def why_not(case: Case, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "has no CPU kernel"
        try:
            getattr(import_module(module), attribute)
        except Exception as error:  # a broken binary raises whatever it likes
            return f"{module} does not import: {_first_line(error)}"
        return None

    return why_not


def _flash_like(name: str, module: str, words: str) -> Peer:
    def make(case: Case, inputs: Inputs) -> Forward:
        library, mask = import_module(module), case.problem.mask
        if case.lengths:
            return _packed(library.flash_attn_varlen_func, case, inputs)
        function = library.flash_attn_func
        more = {"window_size": (mask.left, mask.right)} if case.is_windowed else {}

        def forward(q, k, v):
            out = function(q, k, v, causal=mask.causal, **more)
            return out[0] if isinstance(out, tuple) else out

        return forward

    unfit = _needs(module, "flash_attn_func")
    return Peer(name, words, unfit, make, packs=True, windows=True)


def _flashinfer_why_not(case: Case, device: torch.device) -> str | None:
    p = case.problem
    decode = case.group == "decode" or case.paged
    if not decode or p.seqlen_q != 1 or p.seqlen_k % PAGE:
        return f"timed on decode of one token over pages of {PAGE} only"
    return _needs("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")(case, device)


def _flashinfer_make(case: Case, inputs: Inputs) -> Forward:
    flashinfer, p = import_module("flashinfer"), case.problem
    device, pages = inputs.q.device, p.seqlen_k // PAGE
    workspace = torch.empty(256 * 1024 * 1024, dtype=torch.uint8, device=device)
    # Where heads share keys tensor cores are faster: https://docs.flashinfer.ai/api/attention.html
    kind = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    wrapper = kind(workspace, "NHD", use_tensor_cores=p.group > 1)
    steps = torch.arange(p.batch + 1, dtype=torch.int32, device=device) * pages
    wrapper.plan(
        steps,
        torch.arange(p.batch * pages, dtype=torch.int32, device=device),
        torch.full((p.batch,), PAGE, dtype=torch.int32, device=device),
        p.heads_q,
        p.heads_k,
        p.head_dim,
        PAGE,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
    )

    def forward(q, k, v):
        paged = tuple(x.view(p.batch * pages, PAGE, p.heads_k, x.shape[-1]) for x in (k, v))
        return wrapper.run(q.view(p.batch, p.heads_q, p.head_dim), paged).view(q.shape)

    return forward


PEERS = {
    peer.name: peer
    for peer in (
        _heedful(),
        _widened(),
        _sdpa("flash", "FLASH_ATTENTION", "SDPA's FlashAttention-2", cpu=True),
        _sdpa("cudnn", "CUDNN_ATTENTION", "SDPA's cuDNN", cpu=False),
        _sdpa("efficient", "EFFICIENT_ATTENTION", "SDPA's memory-efficient kernel", cpu=False),
        _sdpa("math", "MATH", "SDPA's unfused math", cpu=True),
        _sdpa("sdpa", None, "SDPA as it dispatches by itself", cpu=True),
        Peer("flex", "FlexAttention, compiled for the shape", _flex_why_not, _flex_make),
        _flash_like("flash_attn", "flash_attn", "the flash-attn package"),
        _flash_like("fa3", "flash_attn_interface", "FlashAttention-3"),
        _flash_like("fa4", "flash_attn.cute", "FlashAttention-4, CuTe DSL"),
        Peer("flashinfer", "FlashInfer, paged decode", _flashinfer_why_not, _flashinfer_make, True),
    )
}


def defaults(case: Case, device: torch.device) -> list[Peer]:
    """The peers of a case unless some are named: SDPA's own dispatch only where the host's time is
    asked for (elsewhere it is one of its backends), beside heedful alone where both are compiled,
    and no compilation of minutes on a CPU."""
    if case.compiled:
        return [PEERS["heedful"], PEERS["sdpa"]]
    left_out = set() if case.host else {"sdpa"}
    if device.type == "cpu":
        left_out |= {"flex", "math"}
    return [peer for peer in PEERS.values() if peer.name not in left_out]


def find(name: str) -> Peer:
    """A peer by name; heedful:BACKEND is heedful with that backend, in the form that
    `by_hand.forced` reads. Raises ValueError."""
    if name in PEERS:
        return PEERS[name]
    if name.startswith("heedful:"):
        return _heedful(name)
    raise ValueError(f"peers must be among {', '.join(PEERS)} or heedful:BACKEND, got {name!r}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
