"""Bound programs under threads, streams, capture and changing addresses: each launch has the
arguments of its own call. Through public calls, on the stand-in of a GPU. Calls have more rows than
the decode kernel takes, unless they are of it."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful
from heedful.core.base import settings
from heedful.core.registry.by_hand import forced
from heedful.launch.code.artifact import TENSOR_MAP_BYTES
from heedful.launch.program import bound
from support import launches
from support.runs import standin

HALF = torch.bfloat16
attend: Any = heedful.flash_attn_func


def some(*shape, dtype=HALF):
    return torch.randn(shape).to(dtype)


def addresses(launch) -> dict[str, int]:
    return {name: place.address for name, place in launches.places(launch).items()}


def owned(launch, given: dict[str, torch.Tensor]) -> bool:
    """Whether the launch has exactly these tensors where it has tensors of these names."""
    found = addresses(launch)
    return all(found[name] == tensor.data_ptr() for name, tensor in given.items())


def in_threads(*work) -> None:
    errors: list[BaseException] = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors


@pytest.mark.parametrize("device, options", [("B200", {}), ("H200", {"causal": True})])
def test_a_launch_under_way_keeps_its_buffer_from_other_threads(device, options):
    """One thread stands in the driver while another makes the same kind of call to its end."""
    calls = [
        {"q": some(2, 90, 2, 64), "k": some(2, 90, 2, 64), "v": some(2, 90, 2, 64)}
        for _ in range(3)
    ]
    for given in calls:
        given["out"] = torch.empty_like(given["q"])
    with standin.gpu(device) as gpu:
        attend(**calls[0], **options)
        inside, others = threading.Event(), threading.Event()

        def wait(_):
            if threading.current_thread().name == "first":
                inside.set()
                assert others.wait(30)

        gpu.before_launch = wait
        first = threading.Thread(target=lambda: attend(**calls[1], **options), name="first")
        first.start()
        assert inside.wait(30)
        for _ in range(2):
            attend(**calls[2], **options)
        others.set()
        first.join(30)
    assert len(gpu.launches) == 4
    by_thread = [calls[0], calls[2], calls[2], calls[1]]
    assert [owned(*pair) for pair in zip(gpu.launches, by_thread, strict=True)] == [True] * 4


def test_many_threads_launch_with_their_own_tensors_and_keep_few_buffers():
    """Splits make two launches a call, with scratch between them."""
    made: list[tuple[int, dict]] = []

    def calls():
        for _ in range(40):
            given = {"q": some(1, 90, 2, 64), "k": some(1, 300, 2, 64), "v": some(1, 300, 2, 64)}
            given["out"] = torch.empty_like(given["q"])
            made.append((threading.get_ident(), given))
            attend(**given, num_splits=2)

    with standin.gpu() as gpu:
        in_threads(*[calls] * 6)
    assert len(gpu.launches) == 2 * len(made) == 480
    for thread in {thread for thread, _ in made}:
        mine = [launch for launch in gpu.launches if launch.thread == thread]
        given = [tensors for by, tensors in made if by == thread]
        for (split, merge), tensors in zip(pairs(mine), given, strict=True):
            assert owned(split, {n: tensors[n] for n in "qkv"}) and owned(
                merge, {"out": tensors["out"]}
            )
            assert addresses(merge)["partial_out"] == addresses(split)["out"]
            assert addresses(merge)["partial_lse"] == addresses(split)["lse"]


def test_threads_that_decode_launch_with_their_own_tensors():
    """The decode kernel counts in memory that has to begin at zero."""
    made: list[tuple[int, dict]] = []

    def calls():
        for _ in range(40):
            given = {"q": some(1, 3, 2, 64), "k": some(1, 300, 2, 64), "v": some(1, 300, 2, 64)}
            given["out"] = torch.empty_like(given["q"])
            made.append((threading.get_ident(), given))
            attend(**given)

    with standin.gpu() as gpu:
        in_threads(*[calls] * 6)
    assert len(gpu.launches) == len(made) == 240
    for thread in {thread for thread, _ in made}:
        mine = [launch for launch in gpu.launches if launch.thread == thread]
        given = [tensors for by, tensors in made if by == thread]
        assert all(owned(*pair) for pair in zip(mine, given, strict=True))


def pairs(found: list) -> Iterator[tuple]:
    return zip(found[::2], found[1::2], strict=True)


def test_a_launch_is_queued_as_its_call_says():
    """A driver is told of an MLA decode whose programs wait for each other, and of no other."""
    q, k, lengths = some(1, 1, 16, 576), some(1, 300, 1, 576), torch.tensor([300]).int()
    with standin.gpu("H200") as gpu:
        for merge in (0, 1):
            heedful.flash_attn_with_kvcache(
                q, k, k[..., :512], cache_seqlens=lengths, backend=forced(f"mla+merge={merge}")
            )
        attend(some(1, 90, 2, 64), some(1, 90, 2, 64), some(1, 90, 2, 64))
    queued = [(launch.cooperative, launch.programmatic) for launch in gpu.launches]
    assert queued == [(False, False), (True, False), (False, False)]


def test_a_buffer_is_used_again(monkeypatch):
    slots = []
    with standin.gpu() as gpu:
        make = gpu.Slot
        monkeypatch.setattr(gpu, "Slot", lambda *given: slots.append(make(*given)) or slots[-1])
        for _ in range(5):
            attend(some(1, 90, 2, 64), some(1, 90, 2, 64), some(1, 90, 2, 64))
    assert len(gpu.launches) == 5 and len(slots) == 1


def test_a_call_that_comes_again_writes_addresses_alone(monkeypatch):
    filled, fill = [], bound.BoundProgram._fill
    count = lambda program, *given: filled.append(program) or fill(program, *given)  # noqa: E731
    monkeypatch.setattr(bound.BoundProgram, "_fill", count)
    with standin.gpu("B200") as gpu:
        for _ in range(5):
            attend(some(1, 90, 2, 64), some(1, 90, 2, 64), some(1, 90, 2, 64))
    assert len(gpu.launches) == 5 and len(filled) == 1


@pytest.mark.parametrize("device", ["H200", "B200"])
def test_a_launch_goes_to_the_stream_that_is_current_then(device):
    q = some(2, 130, 2, 64)
    with standin.gpu(device) as gpu:
        for stream in (0, 5, 0xFFFF_FFFF_0000, 5):
            gpu.stream = stream
            attend(q, q, q, causal=True)
    assert [launch.stream for launch in gpu.launches] == [0, 5, 0xFFFF_FFFF_0000, 5]


def test_gradients_are_launched_on_the_stream_of_the_backward():
    q = some(1, 90, 2, 64).requires_grad_()
    with standin.gpu() as gpu:
        gpu.stream = 3
        out = attend(q, q, q)
        gpu.stream = 4
        out.sum().backward()
    assert launches.roles(gpu.launches) == ["forward", "query gradients", "key gradients"]
    assert [launch.stream for launch in gpu.launches] == [3, 4, 4]
    forward, of_queries, of_keys = (addresses(launch) for launch in gpu.launches)
    for name in ("q", "k", "v", "out", "lse"):
        assert of_queries[name] == forward[name]
    assert of_keys["delta"] == of_queries["delta"] != of_keys["lse"] == forward["lse"]
    results = [of_queries["dq"], of_keys["dk"], of_keys["dv"]]
    assert len({*results, forward["q"], forward["out"]}) == 5


def test_tensor_maps_follow_addresses_that_change_and_come_back():
    tensors = [some(2, 70, 2, 64) for _ in range(4)]
    outs = [torch.empty_like(t) for t in tensors]
    turns = [0, 1, 0, 2, 3, 1, 0]
    with standin.gpu("H200") as gpu:
        for i in turns:
            attend(*[tensors[i], tensors[i - 1], tensors[i - 2]], out=outs[i])
    for launch, i in zip(gpu.launches, turns, strict=True):
        want = {"q": tensors[i], "k": tensors[i - 1], "v": tensors[i - 2], "out": outs[i]}
        assert owned(launch, want)
    # The first call keeps nothing. Then q, k, v and out of four addresses each, every one of them
    # encoded once.
    assert len(gpu.encoded) == 4 + 16


def test_tensor_maps_of_many_addresses_are_forgotten_and_made_again(monkeypatch):
    monkeypatch.setattr(bound, "_MOST_MAPS", 3)
    tensors = [some(1, 90, 2, 64) for _ in range(5)]
    out = torch.empty_like(tensors[0])
    turns = [0, 0, 1, 2, 2, 1, 3, 4, 0, 0]
    with standin.gpu("H200") as gpu:
        for i in turns:
            attend(tensors[i], tensors[i], tensors[i], out=out)
    assert all(
        owned(launch, {"q": tensors[i]}) for launch, i in zip(gpu.launches, turns, strict=True)
    )
    # All four of the first call, which keeps nothing. 0 1 2, then 3 empties the three, 4, and 0
    # anew; out is the same throughout.
    assert len(gpu.encoded) == 4 + 3 * 6 + 1


def test_a_kernel_is_loaded_once_however_many_kinds_of_calls_use_it():
    with standin.gpu() as gpu:
        for rows in (80, 90, 100):
            attend(some(1, rows, 2, 64), some(1, 50, 2, 64), some(1, 50, 2, 64))
        assert len(gpu.loads) == 1
        attend(some(1, 80, 2, 64), some(1, 50, 2, 64), some(1, 50, 2, 64), 0, 1.0, True)
        assert len(gpu.loads) == 2
    assert [launches.number(launch, "seqlen_q") for launch in gpu.launches] == [80, 90, 100, 80]


def test_nothing_is_launched_for_an_empty_grid():
    with standin.gpu() as gpu:
        out = attend(some(0, 9, 2, 64), some(0, 9, 2, 64), some(0, 9, 2, 64))
    assert out.shape == (0, 9, 2, 64) and not gpu.launches


def test_kernels_beside_one_with_an_empty_grid_are_launched():
    """Without keys there are gradients of queries alone. Known calls, and between them one with
    keys, whose kernels are the same."""
    q, few, none = some(1, 90, 2, 64).requires_grad_(), some(1, 8, 2, 64), some(1, 0, 2, 64)
    with standin.gpu() as gpu:
        for keys in (few, none) * 4:
            attend(q, keys, keys).sum().backward()
    roles = launches.roles(gpu.launches)
    both = ["forward", "query gradients", "key gradients"]
    assert roles == [*both, *both[:2]] * 4


def test_a_failed_launch_leaves_later_ones_right():
    q, k = some(1, 90, 2, 64), some(1, 90, 2, 64)

    def fail(_):
        raise RuntimeError("out of luck")

    with standin.gpu() as gpu:
        attend(q, q, q)
        gpu.before_launch = fail
        with pytest.raises(RuntimeError, match="out of luck"):
            attend(k, k, k)
        gpu.before_launch = None
        attend(q, k, q)
    assert owned(gpu.launches[-1], {"q": q, "k": k, "v": q})
    assert len(gpu.launches) == 2


def test_launches_are_counted():
    q = some(1, 90, 2, 64)
    with standin.gpu():
        before = heedful.counters["launches"]
        attend(q, q, q)
        attend(q, some(1, 300, 2, 64), some(1, 300, 2, 64), num_splits=3)
        assert heedful.counters["launches"] - before == 3


def test_kernels_with_scratch_of_the_compilers_own_are_refused(monkeypatch):
    q = some(1, 3, 2, 64)
    with standin.gpu() as gpu:
        compiled = gpu.compile

        def with_scratch(call, arch):
            artifact = compiled(call, arch)
            object.__setattr__(artifact, "scratch_bytes", 64)
            return artifact

        monkeypatch.setattr(bound, "compile_call", with_scratch)
        with pytest.raises(RuntimeError, match="scratch"):
            attend(q, q, q)
    assert not gpu.launches


def test_a_kernel_that_is_compiled_for_other_clusters_is_refused(monkeypatch):
    q = some(1, 3, 2, 64)
    with standin.gpu() as gpu:
        monkeypatch.setattr(
            bound,
            "compile_call",
            lambda call, arch: gpu.compile(replace(call, cluster=2), arch),
        )
        with pytest.raises(RuntimeError, match="for clusters of 2, the launch asks for 1"):
            attend(q, q, q)
    assert not gpu.launches


def test_buffers_are_filled_again_with_addresses_and_maps_between_what_they_held():
    """Wherever they were before, and up to their ends: what is behind no launch reads."""
    was = bytes(range(1, 201))
    pointers, maps = [(0, 2), (8, 0), (40, 1)], [64]
    refill, parts = bound._refiller([(196, pointers, maps), (144, [(0, 1)], [16]), (0, [], [])])
    assert parts == [(0, 16, 40), (0, 48, 64), (0, 192, 196), (1, 8, 16)]
    buffers = bytearray(200), bytearray(144), bytearray(0)
    encoded = [letter * TENSOR_MAP_BYTES for letter in (b"m", b"n")]
    refill(buffers, [was[begin:end] for _, begin, end in parts], [5, 6, 7], encoded)
    numbers = [(at).to_bytes(8, "little") for at in (7, 5, 6)]
    wanted = [*numbers[:2], was[16:40], numbers[2], was[48:64], encoded[0], was[192:196], bytes(4)]
    assert buffers[0] == b"".join(wanted)
    assert buffers[1] == numbers[2] + was[8:16] + encoded[1]


def test_the_maps_that_an_argument_keeps_are_half_a_mebibyte():
    assert bound._MOST_MAPS * TENSOR_MAP_BYTES == 1 << 19


def counted(causal_keys: int = 2500):
    """A Hopper call that counts tiles drawn, in memory that has to begin at zero."""
    q = some(4, causal_keys, 8, 64)
    return attend(q, q, q, causal=True, backend="hopper")


def test_each_call_counts_in_bytes_of_its_own_unless_a_graph_is_captured():
    with standin.gpu("H200") as gpu:
        counted()
        counted()
        gpu.capturing = True
        counted()
        gpu.capturing = False
        counted()
        gpu.stream = 9
        counted()
    counters = [addresses(launch)["tile_counter"] for launch in gpu.launches]
    assert len(set(counters)) == 5
    assert counters[1] - counters[0] == counters[3] - counters[1] == 256
    assert all(address % 64 == 0 for address in counters[:2])


def test_scratch_within_its_limit_and_no_more(monkeypatch):
    q, k = some(1, 64, 2, 64), some(1, 600, 2, 64)
    # Four parts of float32 outputs of 64 x 2 rows of 64, and of their log-sum-exps in two numbers:
    # 32,768 and twice 512 bytes each.
    need = 4 * (64 * 2 * 64 * 4 + 2 * 64 * 2 * 4)
    others = settings.get
    for limit, fits in ((need, True), (need - 1, False)):
        limited = {"workspace_limit": limit}
        monkeypatch.setattr(
            settings, "get", lambda name, of=limited: of[name] if name in of else others(name)
        )
        with standin.gpu() as gpu:
            if fits:
                attend(q, k, k, num_splits=4, backend="portable")
                split, merge = gpu.launches
                out, lse = addresses(merge)["partial_out"], addresses(merge)["partial_lse"]
                assert abs(lse - out) >= 512
            else:
                with pytest.raises(ValueError, match="HEEDFUL_WORKSPACE_LIMIT_MB"):
                    attend(q, k, k, num_splits=4, backend="portable")
                assert not gpu.launches


@pytest.mark.parametrize(
    "device, vendor", [("H200", "nvidia"), ("B200", "nvidia"), ("MI355X", "amd")]
)
def test_the_driver_is_the_vendors(device, vendor):
    q = some(1, 3, 2, 64)
    with standin.gpu(device) as gpu:
        attend(q, q, q)
    assert gpu.vendors == {vendor}
