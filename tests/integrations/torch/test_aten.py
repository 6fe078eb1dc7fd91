"""Torch's operators by heedful. Kernels are given to CPU tensors here, which have none of torch's:
what runs them is the dispatcher below autograd, as on a GPU."""

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention

from heedful import flash_attn_func, flash_attn_varlen_func
from heedful.integrations.torch import registry, restore
from heedful.integrations.torch.aten import HANDED_BACK, MASKED, WIDE, Kernels
from heedful.integrations.torch.report import Report
from support.integrations import sdpa_calls

aten = torch.ops.aten
FLASH = "_scaled_dot_product_flash_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


@pytest.fixture
def report():
    """Heedful's kernels for CPU tensors, while the test runs."""
    registry._activate("CPU")
    assert registry._active is not None
    yield registry._active.report
    restore()


def flash(query, key, value, is_causal=False, scale=None, dropout_p=0.0, **_) -> Any:
    return aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )


def cudnn(query, key, value, is_causal=False, scale=None, dropout_p=0.0, **_) -> Any:
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, dropout_p, is_causal, scale=scale
    )


def efficient(query, key, value, is_causal=False, scale=None, dropout_p=0.0, **_) -> Any:
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, dropout_p, is_causal, scale=scale
    )


# As torch's flash attention takes them: of four dims, of one head dim, and causal where rows are as
# many as keys. cuDNN's is causal from the top left, and takes values of another dim.
UNMASKED = [c for c in sdpa_calls.CALLS if c.rank == 4 and c.mask in ("none", "causal")]
UNMASKED = [c for c in UNMASKED if c.heads != "broadcast"]
OF_FLASH = [c for c in UNMASKED if not c.other_dim]
OF_FLASH = [c for c in OF_FLASH if c.mask == "none" or c.lengths == "as_many"]


@pytest.mark.parametrize("name", [c.name for c in OF_FLASH])
def test_flash_and_its_gradients_are_within_their_budgets(report, name):
    call = sdpa_calls.BY_NAME[name]
    sdpa_calls.judge(call, "cpu", torch.float32, 16, lambda **given: flash(**given)[0])
    assert dict(report.ours) == {FLASH: 1, f"{FLASH}_backward": 1} and not report.declined


@pytest.mark.parametrize("name", [c.name for c in UNMASKED])
def test_cudnn_and_its_gradients_are_within_their_budgets(report, name):
    call = sdpa_calls.BY_NAME[name]
    sdpa_calls.judge(call, "cpu", torch.float32, 16, lambda **given: cudnn(**given)[0])
    assert dict(report.ours) == {CUDNN: 1, f"{CUDNN}_backward": 1} and not report.declined


@pytest.mark.parametrize("name", [c.name for c in UNMASKED if c.heads == "equal"])
def test_memory_efficient_attention_and_its_gradients_are_within_their_budgets(report, name):
    call = sdpa_calls.BY_NAME[name]
    sdpa_calls.judge(call, "cpu", torch.bfloat16, 16, lambda **given: efficient(**given)[0])
    assert dict(report.ours) == {EFFICIENT: 1, f"{EFFICIENT}_backward": 1} and not report.declined


@pytest.mark.parametrize("rows, keys", [(5, 9), (9, 5)])
def test_flash_is_causal_from_the_bottom_right(report, rows, keys):
    """As torch.nn.attention.bias.causal_lower_right relies on."""
    q, k, v = (torch.randn(2, 4, n, 16) for n in (rows, keys, keys))
    rows_first: Any = (x.transpose(1, 2) for x in (q, k, v))
    own = flash_attn_func(*rows_first, causal=True)
    assert torch.equal(flash(q, k, v, True)[0], own.transpose(1, 2))


LAYOUTS = {
    "rows first": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "heads first": lambda b, h, s, d: torch.randn(b, h, s, d),
    "of a fused projection": lambda b, h, s, d: torch.randn(b, s, 3, h, d)[:, :, 1].transpose(1, 2),
    "batch inside": lambda b, h, s, d: torch.randn(s, h, b, d).permute(2, 1, 0, 3),
    "one of each": lambda b, h, s, d: torch.randn(1, s, 1, d).transpose(1, 2),
}


@pytest.mark.parametrize("rows, keys", [(9, 9), (5, 9), (9, 5), (32, 32)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("call", [flash, cudnn, efficient])
def test_results_lie_in_memory_as_torch_says(report, call, layout, rows, keys):
    """Code that torch.compile made relies on its formulas for shapes and strides."""
    q, k = (layout(2, 4, n, 16).bfloat16().requires_grad_() for n in (rows, keys))
    dim_v = 16 if call is flash else 8
    v = layout(2, 4, keys, dim_v).bfloat16().requires_grad_()

    def run(q, k, v):
        result = call(q, k, v, True)
        grads = torch.autograd.grad(result[0], (q, k, v), torch.randn_like(result[0]))
        return (*result, *grads)

    on_meta = (x.detach().to("meta").requires_grad_() for x in (q, k, v))
    for got, want in zip(run(q, k, v), run(*on_meta), strict=True):
        if isinstance(want, Tensor):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            moving = [i for i, n in enumerate(got.shape) if n != 1]
            assert [got.stride(i) for i in moving] == [want.stride(i) for i in moving]
        else:
            assert got == want


@pytest.mark.parametrize("rows", [31, 32])
def test_memory_efficient_attention_has_an_lse_where_it_is_asked_for(report, rows):
    q, k, v = (torch.randn(1, 2, rows, 16, dtype=torch.bfloat16) for _ in "qkv")
    op = aten._scaled_dot_product_efficient_attention
    out, lse, *_ = op(q, k, v, None, True)
    bare, none, *_ = op(q, k, v, None, False)
    wanted = flash(q, k, v)[1]
    assert torch.equal(out, bare) and none.shape == (1, 2, 0)
    assert torch.equal(lse[:, :, :rows], wanted) and lse.shape == (1, 2, 32)


def test_kernels_take_the_arguments_of_the_operators():
    for name, kernel in Kernels(Report(), {}).by_operator().items():
        schema = getattr(aten, name).default._schema
        own = inspect.signature(kernel).parameters
        taken = {n for n, p in own.items() if p.kind != inspect.Parameter.VAR_KEYWORD}
        taken -= {"keys"} if name in HANDED_BACK else set()
        asked = [argument.name for argument in schema.arguments]
        rest = {"seqused_k", "alibi_slopes", "block_table", "num_splits"}
        if len(own) > len(taken) + (name in HANDED_BACK):
            assert taken | rest == set(asked)
        else:
            assert taken == set(asked)
        positional = [a.name for a in schema.arguments if not a.kwarg_only]
        assert [n for n in own if n in positional] == positional


def test_autograd_records_one_node(report):
    """What heedful's own call records under torch's would keep tensors alive, and take time."""
    q, k, v = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
    out, lse, *_ = flash(q, k, v)
    assert "ScaledDotProductFlashAttention" in type(out.grad_fn).__name__
    assert all(edge[0].name().endswith("AccumulateGrad") for edge in out.grad_fn.next_functions)
    assert not lse.requires_grad and torch.is_grad_enabled()


@pytest.mark.parametrize("call", [flash, cudnn])
def test_a_second_derivative_raises(report, call):
    q, k, v = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
    out = call(q, k, v)[0]
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("call", [flash, cudnn, efficient])
def test_dropout_draws_one_mask_in_both_directions_and_another_each_time(report, call):
    """With the identity as values the output is the dropped probabilities, and the gradient of the
    values for its cotangent their transpose."""
    q, k = (torch.randn(1, 1, 16, 16, dtype=torch.bfloat16) for _ in "qk")
    eye = torch.eye(16, dtype=torch.bfloat16)[None, None]
    v = eye.clone().requires_grad_()
    first, second = (call(q, k, v, dropout_p=0.5)[0] for _ in range(2))
    for out in (first, second):
        (dv,) = torch.autograd.grad(out, v, eye)
        assert torch.equal(dv == 0, out.mT == 0)
    assert not torch.equal(first == 0, second == 0) and (first == 0).any()


def test_a_call_of_the_generators_state_is_drawn_again(report):
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in "qkv")
    torch.manual_seed(3)
    first = flash(q, k, v, dropout_p=0.5)[0]
    torch.manual_seed(3)
    assert torch.equal(flash(q, k, v, dropout_p=0.5)[0], first)


@pytest.mark.parametrize("call", [flash, cudnn])
def test_autocast_casts_nothing_below_the_operator(report, call):
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=torch.float16) for _ in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        assert call(q, k, v)[0].dtype == torch.float16


def test_a_debug_mask_is_refused(report):
    q = torch.randn(1, 2, 9, 16)
    with pytest.raises(RuntimeError, match="return_debug_mask must be False"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True)
    assert not report.ours


@pytest.fixture
def torchs_cudnn():
    """Kernels of cuDNN's operators on a CPU, which say what they were called with."""
    asked = []
    library = Library("aten", "IMPL", "CPU")

    def forward(query, key, value, bias, *args, **kwargs):
        asked.append(("forward", bias))
        return query + 1, query.new_zeros(1), None, None, 1, 1, query.new_zeros(1), None, None

    def backward(dout, query, key, value, out, lse, seed, offset, bias, *args, **kwargs):
        asked.append(("backward", bias))
        return query * 2, key * 3, value * 4

    library.impl(CUDNN, forward, "CPU")
    library.impl(f"{CUDNN}_backward", backward, "CPU")
    yield asked
    library = None


def test_masked_calls_of_cudnn_are_torchs_and_counted(torchs_cudnn):
    registry._activate("CPU")
    try:
        q, k, v = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in "qkv")
        bias = torch.zeros(1, 2, 5, 5)
        out = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True)[0]
        assert torch.equal(out, q + 1)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(
            torch.equal(g, n * x) for g, n, x in zip(grads, (2, 3, 4), (q, k, v), strict=True)
        )
        assert [name for name, _ in torchs_cudnn] == ["forward", "backward"]
        assert all(torch.equal(given, bias) for _, given in torchs_cudnn)
        cudnn(q, k, v)
        assert len(torchs_cudnn) == 2
        assert registry._active is not None
        report = registry._active.report
        assert report.declined == {MASKED: 2} and report.ours == {CUDNN: 1}
    finally:
        restore()
    aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    assert len(torchs_cudnn) == 3


@pytest.mark.parametrize("given", ["mask", "float32", "dim"])
def test_calls_of_memory_efficient_attention_that_stay_torchs(given):
    asked = []
    library: Any = Library("aten", "IMPL", "CPU")

    def forward(query, key, value, bias, *args, **kwargs):
        asked.append("forward")
        return query + 1, query.new_zeros(1), query.new_zeros(1), query.new_zeros(1)

    def backward(dout, query, key, value, *args, **kwargs):
        asked.append("backward")
        return query * 2, key * 3, value * 4, None

    library.impl(EFFICIENT, forward, "CPU")
    library.impl(f"{EFFICIENT}_backward", backward, "CPU")
    registry._activate("CPU")
    assert registry._active is not None
    report = registry._active.report
    try:
        dtype = torch.float32 if given == "float32" else torch.bfloat16
        dim = 264 if given == "dim" else 16
        q, k, v = (torch.randn(1, 2, 5, dim, dtype=dtype, requires_grad=True) for _ in "qkv")
        bias = torch.zeros(1, 2, 5, 5, dtype=dtype) if given == "mask" else None
        out = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]
        assert torch.equal(out, q + 1)
        assert torch.equal(torch.autograd.grad(out.sum(), v)[0], v * 4)
    finally:
        restore()
        library = None
    assert asked == ["forward", "backward"] and not report.ours
    assert report.declined == {MASKED if given == "mask" else WIDE: 2}


def test_a_masked_call_without_a_kernel_of_torch_says_so(report):
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(RuntimeError, match="does not run this call.*attn_bias"):
        aten._scaled_dot_product_cudnn_attention(q, q, q, torch.zeros(5, 5), True)


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_varlen_attn_and_its_gradients_are_our_own(report, window):
    from torch.nn.attention.varlen import varlen_attn

    of_q, of_k = bounds(5, 0, 7), bounds(6, 2, 9)
    q, k, v = (torch.randn(n, 4, 16, requires_grad=True) for n in (12, 17, 17))
    dout = torch.randn(12, 4, 16)
    out: Any = varlen_attn(q, k, v, of_q, of_k, 7, 9, window_size=window, scale=0.2)
    own = flash_attn_varlen_func(q, k, v, of_q, of_k, 7, 9, window_size=window, softmax_scale=0.2)
    assert torch.equal(out, own)
    for got, want in zip(
        *(torch.autograd.grad(x, (q, k, v), dout) for x in (out, own)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    names = {"_flash_attention_forward", "_flash_attention_backward"}
    assert dict(report.ours) == dict.fromkeys(names, 1)


@pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="torch 2.12 or newer"
)
def test_varlen_attn_of_pages_and_into_a_given_output_is_our_own(report):
    from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

    q, used = torch.randn(5, 4, 16), torch.tensor([7, 3], dtype=torch.int32)
    k, v = (torch.randn(6, 4, 2, 16) for _ in "kv")
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32)
    how: dict[str, Any] = {"seqused_k": used, "block_table": table}
    given = q, k, v, bounds(3, 2), None, 3, 8
    want = flash_attn_varlen_func(*given, causal=True, **how)
    more = {"window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}
    got: Any = varlen_attn(*given, **more, **how)
    assert torch.equal(got, want)
    out = torch.full_like(q, torch.nan)
    varlen_attn_out(out, *given, **more, **how)
    assert torch.equal(out, want)
    assert report.ours["_flash_attention_forward_no_dropout_inplace"] == 1


def test_flash_attention_of_dense_rows_is_our_own(report):
    q, k, v = (torch.randn(2, n, 4, 16, requires_grad=True) for n in (5, 9, 9))
    slopes = torch.rand(4)
    forward, backward = aten._flash_attention_forward, aten._flash_attention_backward
    out, lse, state, unused, _ = forward(
        q.detach(), k.detach(), v.detach(), None, None, 5, 9, 0.0, True, False,
        window_size_left=4, alibi_slopes=slopes,
    )  # fmt: skip
    own, own_lse = flash_attn_func(
        q, k, v, causal=True, window_size=(4, -1), alibi_slopes=slopes, return_lse=True
    )
    assert torch.equal(out, own) and torch.equal(lse, own_lse)
    out, lse, *_ = forward(q.detach(), k.detach(), v.detach(), None, None, 5, 9, 0.0, False, False)
    dout = torch.randn_like(out)
    args = dout, q.detach(), k.detach(), v.detach(), out, lse, None, None, 5, 9, 0.0, False
    grads = backward(*args, state, unused)
    wanted = torch.autograd.grad(flash_attn_func(q, k, v), (q, k, v), dout)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(RuntimeError, match="cum_seq_q must be given with seqused_k"):
        forward(q, k, v, None, None, 5, 9, 0.0, True, False, seqused_k=torch.ones(2).int())


def test_context_parallels_pieces_add_up_to_the_whole(report):
    """A ring calls the operator on parts of the keys, and its gradient with the whole's output and
    lse."""
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in "qkv")
    dout = torch.randn_like(q)
    out, lse, _, _, rows, keys, state, offset, _ = flash(q, k, v)
    backward = aten._scaled_dot_product_flash_attention_backward
    how = None, None, rows, keys, 0.0, False, state, offset
    whole = backward(dout, q, k, v, out, lse, *how)
    parts = [
        backward(dout, q, k[:, :, s], v[:, :, s], out, lse, *how)
        for s in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts], 2), whole[i])


def test_torchs_ring_runs_ours():
    """Torch's context parallelism over two processes: FlashAttention's operators and cuDNN's."""
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    script = Path(__file__).parents[2] / "support" / "runs" / "torchs_ring.py"
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2


def test_a_compiled_call_is_the_eager_one(report):
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 4, 9, 16, requires_grad=True) for _ in "qkv")
    dout = torch.randn(2, 4, 9, 16)

    def step(q, k, v):
        return flash(q, k, v, True)[0]

    want = torch.autograd.grad(step(q, k, v), (q, k, v), dout)
    before = report.ours[FLASH]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v), dout)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert report.ours[FLASH] == before + 1


def test_ranks_that_share_the_heads_run_ours(report):
    """Torch's rules for DTensors call the operators with what each rank has."""
    from torch.distributed.tensor import Shard

    from support.runs.mesh import joined, on_each_rank, shard

    whole = [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in "qkv"]
    dout, places = torch.randn(2, 4, 9, 16), [Shard(1)]

    def step(mesh) -> list[Any]:
        own = [shard(x, mesh, places, grad=True) for x in whole]
        results: list[Any]
        out = flash(*own, is_causal=True)[0]
        grads = torch.autograd.grad(out, own, shard(dout, mesh, places))
        results = [out, *grads]
        return [x.to_local() for x in results]

    parts = on_each_rank((2,), step)
    assert report.ours == {FLASH: 2, f"{FLASH}_backward": 2}
    out = flash(*whole, is_causal=True)[0]
    for own, want in zip(
        zip(*parts, strict=True), (out, *torch.autograd.grad(out, whole, dout)), strict=True
    ):
        torch.testing.assert_close(joined(own, places, (2,)), want)


def test_the_kernels_launch_what_our_own_call_launches():
    pytest.importorskip("triton")
    from support.runs import standin

    shape = 2, 300, 8, 64
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for _ in "qkv")
    with standin.gpu("H200") as gpu:
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        mine = len(gpu.launches)
        assert mine
        registry._activate("CPU")
        try:
            heads_first: Any = (x.transpose(1, 2) for x in (q, k, v))
            found = flash(*heads_first, is_causal=True)
        finally:
            restore()
        assert found[0].shape == out.transpose(1, 2).shape and found[1].shape == lse.shape
        ours, theirs = gpu.launches[:mine], gpu.launches[mine:]
        assert [x.kernel for x in theirs] == [x.kernel for x in ours]
        assert [x.grid for x in theirs] == [x.grid for x in ours]
        assert [x.constants for x in theirs] == [x.constants for x in ours]


def test_threads_call_at_once(report):
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in "qkv")
    want = flash(q, k, v)[0]
    wrong = []

    def calls():
        wrong.extend(i for i in range(50) if not torch.equal(flash(q, k, v)[0], want))

    threads = [threading.Thread(target=calls) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and report.ours[FLASH] == 201


def test_torchs_registry_knows_who_is_active(report):
    assert attention.current_flash_attention_impl() == registry.NAME
    assert registry.NAME in attention.list_flash_attention_impls()
