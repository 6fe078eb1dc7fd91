"""Lengths are values, not kinds: a call whose lengths alone are new plans and compiles nothing, and
launches what a call that is planned for its lengths launches."""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful
from heedful.core.planning.plan import plan
from heedful.launch.program import bound
from heedful.torch.eager import backends, calls, execute, saved
from heedful.torch.eager.calls import CALLS, KINDS, LATEST, Call
from support.problems.grids import in_turns
from support.runs import standin

HALF = torch.bfloat16
# Around tiles of rows, few rows, keys of a split, page ends, and 384 keys.
EDGES = (1, 2, 4, 8, 16, 17, 32, 33, 2048)
EDGES += tuple(n + d for n in (64, 128, 192, 256, 384) for d in (-1, 0, 1))


def length(draw: random.Random, most: int = 2300) -> int:
    return draw.choice(EDGES) if draw.random() < 0.4 else draw.randrange(1, most)


def empty(*shape: int, dtype=HALF) -> torch.Tensor:
    """Memory that nobody touches, so that thousands of calls take no time."""
    return torch.empty(shape, dtype=dtype)


def dense(draw: random.Random, **options):
    batch, heads_k = draw.choice((1, 2, 3)), 2
    rows, keys = length(draw), length(draw)
    q = empty(batch, rows, 4, 64)
    k, v = (empty(batch, keys, heads_k, 64) for _ in range(2))
    return heedful.flash_attn_func(q, k, v, **options)


def transposed(draw: random.Random):
    """Heads before rows, whose strides follow from lengths."""
    rows, keys = length(draw), length(draw)
    q, k, v = (empty(2, 4, n, 64).transpose(1, 2) for n in (rows, keys, keys))
    return heedful.flash_attn_func(q, k, v, causal=True)


def packed(draw: random.Random, **options):
    lengths = [length(draw, 700) for _ in range(draw.randrange(1, 6))]
    total, longest = sum(lengths), max(lengths)
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    q, k, v = (empty(total, heads, 64) for heads in (4, 2, 2))
    return heedful.flash_attn_varlen_func(
        q, k, v, bounds, bounds, longest, longest, causal=True, **options
    )


def decode(draw: random.Random):
    batch, keys = draw.choice((1, 2, 5)), length(draw, 9000)
    q, k, v = empty(batch, 1, 8, 128), *(empty(batch, keys, 2, 128) for _ in range(2))
    used = torch.ones(batch, dtype=torch.int32)
    return heedful.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True)


def pages(draw: random.Random):
    batch, many = draw.choice((1, 2, 5)), draw.randrange(1, 300)
    q, k, v = empty(batch, 1, 8, 128), *(empty(many * batch, 16, 2, 128) for _ in range(2))
    table = torch.zeros(batch, many, dtype=torch.int32)
    used = torch.ones(batch, dtype=torch.int32)
    return heedful.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, block_table=table)


def mixed(draw: random.Random):
    lengths = [draw.choice((1, 1, 4, 16, length(draw, 700))) for _ in range(draw.randrange(1, 40))]
    return served(draw, lengths)


def packed_steps(draw: random.Random):
    return served(draw, [draw.choice((1, 1, 2, 8)) for _ in range(draw.randrange(1, 300))])


def served(draw: random.Random, lengths: list[int]):
    many = draw.randrange(1, 300)
    q, k, v = empty(sum(lengths), 8, 128), *(empty(many, 16, 2, 128) for _ in range(2))
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    table = torch.zeros(len(lengths), many, dtype=torch.int32)
    return heedful.flash_attn_varlen_func(
        q,
        k,
        v,
        bounds,
        None,
        max(lengths),
        many * 16,
        causal=True,
        block_table=table,
        seqused_k=bounds[1:],
    )


def latent(draw: random.Random):
    batch, many = draw.choice((1, 2, 5, 66, 200)), draw.randrange(1, 300)
    q, k = empty(batch, draw.choice((1, 2)), 16, 576), empty(many * 4, 64, 1, 576)
    table = torch.zeros(batch, many, dtype=torch.int32)
    used = torch.ones(batch, dtype=torch.int32)
    return heedful.flash_attn_with_kvcache(
        q, k, k[..., :512], cache_seqlens=used, block_table=table
    )


def eight_bit(draw: random.Random):
    rows, keys = length(draw), length(draw)
    q, k, v = (empty(2, n, 4, 128, dtype=torch.float8_e4m3fn) for n in (rows, keys, keys))
    return heedful.flash_attn_func(q, k, v, causal=True)


def gradients(attend: Callable) -> Callable:
    """The call, and its backward."""

    def call(draw: random.Random):
        with required():
            out = attend(draw)
        out.backward(torch.empty_like(out))

    return call


@contextlib.contextmanager
def required() -> Iterator[None]:
    """`empty` makes tensors that require a gradient."""
    make = globals()["empty"]
    globals()["empty"] = lambda *shape, **facts: make(*shape, **facts).requires_grad_()
    yield
    globals()["empty"] = make


CALLS_OF: dict[str, tuple[str, Callable[..., Any]]] = {
    "dense": ("H200", dense),
    "dense causal": ("H200", lambda draw: dense(draw, causal=True)),
    "dense with lse": ("H200", lambda draw: dense(draw, causal=True, return_lse=True)),
    "window": ("H200", lambda draw: dense(draw, window_size=(100, 0))),
    "heads first": ("H200", transposed),
    "packed": ("H200", packed),
    "decode": ("H200", decode),
    "pages": ("H200", pages),
    "mixed": ("H200", mixed),
    "packed steps": ("H200", packed_steps),
    "latent": ("H200", latent),
    "fp8": ("H200", eight_bit),
    "portable dense": ("B200", dense),
    "portable packed": ("B200", packed),
    "portable decode": ("B200", decode),
    "portable pages": ("B200", pages),
    "dense gradients": ("H200", gradients(lambda draw: dense(draw, causal=True))),
    "packed gradients": ("H200", gradients(packed)),
    "portable gradients": ("B200", gradients(dense)),
    "cdna dense": ("MI300X", lambda draw: dense(draw, backend="cdna")),
}


def forget() -> None:
    """As in a process that has seen no call."""
    for known in (CALLS, KINDS, LATEST, backends.FAMILIES):
        known.clear()


def unlaid(patch) -> None:
    """Outputs and scratch that nobody touches either."""

    def maker(_):
        return lambda shape, _, dtype: torch.empty(shape, dtype=dtype)

    patch.setattr(execute, "maker", maker)


def facts(launch: standin.Launch) -> tuple:
    """All of a launch but where its arrays lie."""
    numbers = {}
    for name, value in launch.arguments.items():
        if isinstance(value, standin.Map):
            numbers[name] = (value.shape, value.strides, value.box)
        elif name not in launch.memory:
            numbers[name] = value
    rest = launch.types, launch.promises, launch.constants, launch.options
    return launch.kernel, launch.grid, numbers, *rest


@pytest.mark.parametrize("name", in_turns(CALLS_OF, each=2))
def test_new_lengths_launch_what_a_plan_of_their_own_launches(name, monkeypatch):
    device, call = CALLS_OF[name]
    with standin.gpu(device) as gpu, monkeypatch.context() as patch:
        unlaid(patch)

        def launched(seed: int) -> list[tuple]:
            before = len(gpu.launches)
            try:
                call(random.Random(seed))
            except ValueError as error:
                return [("refused", str(error))]
            return [facts(launch) for launch in gpu.launches[before:]]

        of_kinds = [launched(seed) for seed in range(60)]
        for seed in range(0, 60, 3):
            forget()
            assert launched(seed) == of_kinds[seed], seed


@pytest.mark.parametrize("name", in_turns(CALLS_OF, each=2))
def test_lengths_never_seen_before_plan_and_compile_nothing(name, monkeypatch):
    """Of 5,000 of those that matter most, once others have shown which cases there are."""
    device, call = CALLS_OF[name]
    count = 5_000 if name in ("dense causal", "packed") else 300
    planned, variants = [], set()
    with standin.gpu(device) as gpu, monkeypatch.context() as patch:
        unlaid(patch)
        patch.setattr(gpu, "take", lambda *_: None)
        patch.setattr(backends, "plan", lambda *a: planned.append(a) or plan(*a))
        compiled = vars(bound)["compile_call"]
        patch.setattr(
            bound, "compile_call", lambda *a: variants.add(a[0].specialization) or compiled(*a)
        )

        def calls(seeds) -> None:
            for seed in seeds:
                before = len(planned)
                try:
                    call(random.Random(seed))
                except ValueError:
                    # What no kernel takes is said anew each time.
                    del planned[before:]

        calls(range(1000))
        known = len(planned), len(variants)
        calls(range(10_000, 10_000 + count))
    assert (len(planned), len(variants)) == known
    assert known[0] <= 24


def qkv(length: int) -> list[torch.Tensor]:
    return [empty(2, length, 4, 64) for _ in range(3)]


def forward_of(length: int) -> torch.Tensor:
    """Of self-attention whose q, k and v want gradients."""
    q, k, v = (empty(2, length, 4, 64).requires_grad_() for _ in range(3))
    return heedful.flash_attn_func(q, k, v, causal=True)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[standin.Gpu]:
    """On which other lengths than any of a test's were differentiated before."""
    with standin.gpu("H200") as made, monkeypatch.context() as patch:
        unlaid(patch)
        out = forward_of(777)
        out.backward(torch.empty_like(out))
        yield made


def kept_by(run: Callable[[], Any]) -> list[type]:
    """Of what the collector goes through, all that the library made and that outlives a call."""
    gc.collect()
    # Objects that are there are no longer gone through, so that those that are left are new.
    gc.freeze()
    run()
    new = [type(item) for item in gc.get_objects()]
    return [kind for kind in new if kind.__module__.startswith(("heedful", "functools"))]


def test_a_call_of_lengths_that_come_once_keeps_no_object(gpu):
    """Nor does its backward; objects that stay wake the collector, and new ones are memory that no
    cache holds."""

    def both(length: int) -> None:
        out = forward_of(length)
        out.backward(torch.empty_like(out))

    def forward(length: int) -> None:
        q, k, v = qkv(length)
        heedful.flash_attn_func(q, k, v, causal=True)

    for run in (forward, both):
        for length in (778, 779):
            run(length)
        assert kept_by(lambda run=run: run(776)) == []
    # The last of them came twice.
    assert Call in kept_by(lambda: both(776))


def launched_by(gpu: standin.Gpu, run: Callable[[], Any]) -> list[tuple]:
    before = len(gpu.launches)
    run()
    return [facts(launch) for launch in gpu.launches[before:]]


def test_lengths_that_come_again_launch_the_same_backward(gpu):
    outs = [forward_of(500) for _ in range(4)]
    times = [launched_by(gpu, lambda o=o: o.backward(torch.empty_like(o))) for o in outs]
    assert times == times[:1] * 4
    forget()
    out = forward_of(500)
    assert launched_by(gpu, lambda: out.backward(torch.empty_like(out))) == times[0]


def test_gradients_of_log_sum_exps_of_new_lengths_launch_the_same_backward(gpu):
    def backward(length: int) -> list[tuple]:
        q, k, v = (empty(2, length, 4, 64).requires_grad_() for _ in range(3))
        results = heedful.flash_attn_func(q, k, v, causal=True, return_lse=True)
        cotangents = [torch.zeros_like(result) for result in results]
        return launched_by(gpu, lambda: torch.autograd.backward(results, cotangents))

    known = [backward(length) for length in (700, 500, 300)]
    for length, launched in zip((700, 500, 300), known, strict=True):
        forget()
        assert backward(length) == launched


def test_a_backward_of_new_lengths_is_known_without_a_look_at_each_tensor(gpu, monkeypatch):
    """Nor is anything laid out; and lengths that came three times are not looked for."""
    outs = [forward_of(500) for _ in range(4)]

    def refuse(*_):
        raise AssertionError("checked anew")

    for name in ("check_restored", "adapt"):
        monkeypatch.setattr(saved, name, refuse)
    for number, out in enumerate(outs):
        if number == 3:
            monkeypatch.setattr(saved.Backwards, "_find", refuse)
        out.backward(torch.zeros_like(out))


@pytest.mark.parametrize("expanded", [(0,), (1,), (0, 1, 2)])
def test_a_cotangent_of_new_lengths_that_no_map_can_be_made_of_is_copied(gpu, expanded):
    def backward(length: int) -> list[tuple]:
        out = forward_of(length)
        shape = [1 if dim in expanded else size for dim, size in enumerate(out.shape)]
        dout = torch.zeros(shape, dtype=HALF).expand(out.shape)
        return launched_by(gpu, lambda: out.backward(dout))

    again = backward(500)
    forget()
    assert backward(500) == again


@pytest.mark.parametrize("place", range(5))
def test_a_hook_that_restores_other_lengths_of_a_new_call_is_told(gpu, place):
    """Of q, k, v, out and lse."""
    saved = []

    def restore(number: int) -> torch.Tensor:
        tensor = saved[number]
        if number != place:
            return tensor
        longer = 2 if number == 4 else 1
        return tensor.new_empty([n + (dim == longer) for dim, n in enumerate(tensor.shape)])

    def keep(tensor: torch.Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        out = forward_of(500)
    with pytest.raises(ValueError, match="must come back from a saved-tensor hook"):
        out.backward(torch.empty_like(out))


def test_numbers_that_are_one_value_in_a_case_are_packed_once(monkeypatch):
    """Strides of rows are, where arrays are dense; each number that is packed at a call takes its
    time, and kernels of arrays with gaps between rows differ in more."""
    packed, filler = [], vars(bound)["_filler"]

    def filled(image, numbers, addresses):
        packed.append(len(numbers))
        return filler(image, numbers, addresses)

    monkeypatch.setattr(bound, "_filler", filled)
    with standin.gpu("H200") as gpu, monkeypatch.context() as patch:
        unlaid(patch)

        def launched(heads: int) -> tuple[list[int], list[tuple]]:
            forget()
            packed.clear()
            for length in (700, 701):
                q, k, v = (empty(2, length, heads, 64)[:, :, :4] for _ in range(3))
                launched = launched_by(gpu, lambda x=(q, k, v): heedful.flash_attn_func(*x))
            return list(packed), launched

        (of_dense,), one = launched(4)
        (of_strided,), two = launched(8)
    assert of_dense + 3 < of_strided
    maps = [sum(isinstance(x, tuple) for x in launch[2].values()) for launch in (*one, *two)]
    assert maps == [4, 4]


@pytest.mark.parametrize("name", ["dense causal", "packed", "dense gradients", "packed gradients"])
def test_calls_of_lengths_never_seen_are_not_described(name, monkeypatch):
    device, call = CALLS_OF[name]
    described = []
    with standin.gpu(device) as gpu, monkeypatch.context() as patch:
        unlaid(patch)
        patch.setattr(gpu, "take", lambda *_: None)
        describe = vars(calls)["attention_call"]
        patch.setattr(
            calls, "attention_call", lambda *a, **k: described.append(a) or describe(*a, **k)
        )
        for seed in range(1000):
            call(random.Random(seed))
        known = len(described)
        for seed in range(10_000, 10_300):
            call(random.Random(seed))
    assert len(described) == known <= 24
