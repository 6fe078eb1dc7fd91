"""Ambient state changes nothing, and an error leaves nothing behind: every entry gives, in every
state and after every failed call, the bits that it gives in a fresh thread.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import heedful.torch as heedful
from heedful.torch.eager.calls import CALLS

Tensors = list[torch.Tensor]


def randn(*shape: int, grad: bool = False, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def listed(results) -> Tensors:
    results = results if isinstance(results, tuple) else (results,)
    return [part for part in results if part is not None]


def with_gradients(function, leaves: Tensors, **keywords) -> Tensors:
    """The results and, where one is recorded, the gradients of the leaves."""
    results = listed(function(*leaves, **keywords))
    recorded = [part for part in results if part.requires_grad]
    grads = ()
    if recorded:
        grads = torch.autograd.grad(recorded, leaves, [part.detach() for part in recorded])
    return [*results, *grads]


# Each entry makes its tensors, in q's dtype, and returns what runs a call on them: what is made in
# a state is the state's, what is called in it is ours.


def sdpa(dtype):
    q, k, v = (randn(2, 9, 4, 8, dtype=dtype) for _ in range(3))
    return lambda: listed(heedful.flash_attn_func(q, k, v))


def dense(dtype):
    leaves = [randn(2, 9, heads, 8, grad=True, dtype=dtype) for heads in (4, 2, 2)]
    keywords: dict[str, Any] = {"window_size": (4, 1), "return_lse": True}
    return lambda: with_gradients(heedful.flash_attn_func, leaves, **keywords)


def trained(dtype):
    leaves = [randn(2, 9, 4, 8, grad=True, dtype=dtype) for _ in range(3)]
    return lambda: with_gradients(heedful.flash_attn_func, leaves)


def decoded(dtype):
    q, k, v = (randn(2, size, 2, 8, dtype=dtype) for size in (1, 16, 16))
    given: dict[str, Any] = {"cache_seqlens": ints(13, 5), "return_softmax_lse": True}
    return lambda: listed(heedful.flash_attn_with_kvcache(q, k, v, **given))


def with_everything(dtype):
    leaves = [randn(2, 9, 4, 8, grad=True, dtype=dtype) for _ in range(3)]
    leaves += [randn(4, 9, 1, grad=True, dtype=dtype), randn(4, grad=True)]
    slopes = torch.rand(4)

    def function(q, k, v, bias, sink):
        keywords: dict[str, Any] = {"bias": bias, "sink": sink, "alibi_slopes": slopes}
        keywords |= {"dropout_p": 0.3, "dropout_seed": 7, "softcap": 2.0, "causal": True}
        return heedful.flash_attn_func(q, k, v, return_attn_probs=True, **keywords)

    return lambda: with_gradients(function, leaves)


def packed(dtype):
    leaves = [randn(11, 2, 8, grad=True, dtype=dtype) for _ in range(3)]
    places = (ints(0, 4, 11), ints(0, 4, 11), 7, 7)

    keywords: dict[str, Any] = {"seqused_k": ints(3, 7), "causal": True, "return_lse": True}

    def function(q, k, v):
        return heedful.flash_attn_varlen_func(q, k, v, *places, **keywords)

    return lambda: with_gradients(function, leaves)


def one_tensor(dtype):
    leaves = [randn(2, 9, 3, 2, 8, grad=True, dtype=dtype)]
    # By name: without a gradient there is another first choice.
    keywords: dict[str, Any] = {"causal": True, "backend": "cpu"}
    return lambda: with_gradients(heedful.flash_attn_qkvpacked_func, leaves, **keywords)


def paged(dtype):
    q, k, v = randn(2, 3, 4, 8, dtype=dtype), *(randn(8, 4, 2, 8, dtype=dtype) for _ in range(2))
    keywords: dict[str, Any] = {
        "cache_seqlens": ints(13, 5),
        "tree_mask": torch.rand(1, 3, 3) > 0.5,
    }
    keywords |= {"block_table": ints(*range(8)).view(2, 4), "return_softmax_lse": True}
    return lambda: listed(heedful.flash_attn_with_kvcache(q, k, v, **keywords))


def appending(dtype):
    q, k, v = (randn(2, 3, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    caches = [randn(4, 16, 2, 8, dtype=dtype) for _ in range(2)]
    cos, sin = randn(32, 4), randn(32, 4)
    rows = ints(2, 0)

    def run() -> Tensors:
        mine = [cache.clone() for cache in caches]
        given = (q, mine[0], mine[1], k, v, cos, sin, 5, rows)
        return [heedful.flash_attn_with_kvcache(*given, causal=True), *mine]

    return run


def prefixed(dtype):
    q, k, v = randn(2, 3, 4, 8, dtype=dtype), *(randn(2, 6, 2, 8, dtype=dtype) for _ in range(2))
    prefix, sink = (randn(4, 2, 8, dtype=dtype), randn(4, 2, 8, dtype=dtype)), randn(4)
    keywords: dict[str, Any] = {"shared_prefix": prefix, "sink": sink, "cache_seqlens": 5}
    return lambda: listed(
        heedful.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **keywords)
    )


def quantised(dtype):
    q, x = randn(2, 1, 4, 8, dtype=dtype), randn(2, 6, 2, 8, dtype=dtype)

    def run() -> Tensors:
        stored, scale, shift = heedful.quantize_kv(x, "int8", 4, True)
        keywords: dict[str, Any] = dict.fromkeys(("k_descale", "v_descale"), scale)
        keywords |= dict.fromkeys(("k_shift", "v_shift"), shift)
        out = heedful.flash_attn_with_kvcache(q, stored, stored, **keywords)
        assert scale is not None and shift is not None
        return [out, stored, scale, shift, heedful.dequantize_kv(stored, scale, shift)]

    return run


def fp8(dtype):
    q, k, v = (randn(2, 9, 2, 16).to(torch.float8_e4m3fn) for _ in range(3))
    descale = torch.rand(2, 2)
    return lambda: listed(heedful.flash_attn_func(q, k, v, causal=True, k_descale=descale))


def merging(dtype):
    leaves = [randn(3, 2, 5, 4, 8, grad=True, dtype=dtype), randn(3, 2, 4, 5, grad=True)]
    leaves.append(randn(4, grad=True))
    return lambda: with_gradients(heedful.merge_attn_states, leaves)


def operator(dtype):
    leaves = [randn(2, 9, 2, 8, grad=True, dtype=dtype) for _ in range(3)]

    def loss(q, k, v):
        return heedful.flash_attn_func(q, k, v, causal=True).float().square().sum()

    function = torch.func.grad(loss, argnums=(0, 1, 2))
    return lambda: list(function(*(leaf.detach() for leaf in leaves)))


ENTRIES: list[Callable] = [
    *(sdpa, dense, trained, with_everything, packed, one_tensor, decoded, paged, appending),
    *(prefixed, quantised, fp8, merging, operator),
]


@contextlib.contextmanager
def restored(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype):
    return restored(torch.get_default_dtype, torch.set_default_dtype, dtype)


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


class Watching(TorchFunctionMode):
    """A mode that sees every call of torch's and changes none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


STATES: dict[str, Callable] = {
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "meta by context": lambda: torch.device("meta"),
    "meta by default": default_device,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast beside float32": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "offloading": lambda: torch.autograd.graph.save_on_cpu(),
    "deterministic": lambda: restored(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomalies detected": torch.autograd.detect_anomaly,
    "a function mode": Watching,
}


PAIRS = [
    (entry, state)
    for entry in ENTRIES
    for state in STATES
    # torch.func takes no saved-tensor hooks.
    if (entry, state) != (operator, "offloading")
    # Queries take the dtype of a cache, and nothing is cast.
    and (state != "autocast beside float32" or entry in (decoded, paged, appending, prefixed))
]
# Of what autocast finds nothing to cast in; float32 in other states.
DTYPES = {"autocast": torch.bfloat16, "autocast to float16": torch.float16}


@pytest.fixture(autouse=True)
def forgetful():
    """Every test plans its calls anew, in scratch of its own thread."""
    CALLS.clear()
    yield
    CALLS.clear()


def assert_same(got: Tensors, want: Tensors):
    for a, b in zip(got, want, strict=False):
        assert a.dtype == b.dtype and a.device == b.device
        assert torch.equal(a, b)


def in_a_thread(work: Callable[[], None]) -> None:
    """Runs it in a thread of its own, whose state is fresh and goes with it."""
    errors: list[BaseException] = []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(("entry", "state"), PAIRS)
def test_a_call_gives_in_any_state_what_it_gives_in_none(entry, state):
    """In a state entered before any call, and after calls outside of it."""
    run = entry(DTYPES.get(state, torch.float32))
    want: list[Tensors] = []
    in_a_thread(lambda: want.append(run()))
    CALLS.clear()

    def first_in_the_state():
        with STATES[state]():
            assert_same(run(), want[0])
        assert_same(run(), want[0])
        with STATES[state]():
            assert_same(run(), want[0])

    in_a_thread(first_in_the_state)


def fails(*_, **__):
    raise RuntimeError("out of luck")


def asks_for_slopes():
    q, slopes = randn(2, 9, 4, 8), torch.rand(4, requires_grad=True)
    heedful.flash_attn_func(q, q, q, causal=True, alibi_slopes=slopes)


def asks_for_slopes_too():
    q, slopes = randn(2, 9, 4, 8, grad=True), torch.rand(4, requires_grad=True)
    heedful.flash_attn_func(q, q, q, causal=True, alibi_slopes=slopes)


def asks_for_slopes_of_packed_sequences():
    q, slopes, bounds = randn(11, 4, 8), torch.rand(4, requires_grad=True), ints(0, 4, 11)
    heedful.flash_attn_varlen_func(q, q, q, bounds, bounds, 7, 7, alibi_slopes=slopes)


def asks_for_a_descale():
    q, descale = randn(2, 9, 4, 16).to(torch.float8_e4m3fn), torch.rand((), requires_grad=True)
    heedful.flash_attn_func(q, q, q, k_descale=descale)


WITHOUT_GRADIENT = {
    asks_for_slopes: "alibi_slopes",
    asks_for_slopes_too: "alibi_slopes",
    asks_for_slopes_of_packed_sequences: "alibi_slopes",
    asks_for_a_descale: "k_descale",
}


@pytest.mark.parametrize("call", WITHOUT_GRADIENT)
def test_a_gradient_that_is_not_computed_is_refused_by_name(call):
    """Again in a known call, and in one that was known without gradients; not without them."""
    message = f"{WITHOUT_GRADIENT[call]} must not require a gradient.*detach"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            call()
    CALLS.clear()
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            call()
        with pytest.raises(ValueError, match=message):
            call()


def test_a_gradient_that_is_not_computed_is_refused_where_torch_compiles():
    q, slopes = randn(2, 9, 4, 8), torch.rand(4, requires_grad=True)
    function = torch.compile(heedful.flash_attn_func, backend="eager")
    with pytest.raises(Exception, match="alibi_slopes must not require a gradient"):
        function(q, q, q, alibi_slopes=slopes)


def test_the_operator_itself_refuses_a_gradient_that_is_not_computed():
    """Called past the public functions, as graphs of others do."""
    q, slopes = randn(2, 9, 4, 8, grad=True), torch.rand(4)
    graphs: list[torch.fx.GraphModule] = []

    def keep(module, _):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(heedful.flash_attn_func, fullgraph=True, backend=keep)(
        q, q, q, alibi_slopes=slopes
    )
    (graph,) = graphs
    tensors = [q, slopes.requires_grad_()]
    given = [
        next(t for t in tensors if t.shape == n.meta["example_value"].shape)
        for n in graph.graph.nodes
        if n.op == "placeholder"
    ]
    with pytest.raises(ValueError, match="alibi_slopes must not require a gradient"):
        graph(*given)


def breaks_inside():
    """A kernel that fails halfway, in a state that its scratch may take on."""
    q = randn(2, 9, 4, 8, grad=True)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.cpu.tiled_forward._add_values", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            heedful.flash_attn_func(q, q, q, causal=True, softcap=9.0)


def breaks_in_the_backward():
    q = randn(2, 9, 4, 8, grad=True)
    out = heedful.flash_attn_func(q, q, q, causal=True, softcap=9.0)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.cpu.tiled_backward._BlockBackward.add_key_tile", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            out.sum().backward()


def is_refused():
    with pytest.raises(ValueError, match="softcap"):
        q = randn(2, 9, 4, 8)
        heedful.flash_attn_func(q, q, q, softcap=-1.0)


def is_refused_in_inference_mode():
    with torch.inference_mode():
        is_refused()


def wants_what_there_is_none_of(call):
    def bad():
        with pytest.raises(ValueError, match="must not require a gradient"):
            call()

    bad.__name__ = call.__name__
    return bad


BAD = [breaks_inside, breaks_in_the_backward, is_refused, is_refused_in_inference_mode]
BAD += [wants_what_there_is_none_of(call) for call in WITHOUT_GRADIENT]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_a_failed_call_leaves_nothing_behind(bad):
    """In its thread: every entry gives afterwards what it gave before."""
    runs = [entry(torch.float32) for entry in ENTRIES]
    want: list[Tensors] = []
    in_a_thread(lambda: want.extend(run() for run in runs))
    CALLS.clear()

    def after_the_failure():
        bad()
        for run, wanted in zip(runs, want, strict=True):
            assert_same(run(), wanted)
        bad()
        for run, wanted in zip(runs, want, strict=True):
            assert_same(run(), wanted)

    in_a_thread(after_the_failure)
