"""What a program for a GPU is given and what it gives back, without its kernels: arrays by name,
the types of results, and gradients of pages."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

from heedful.core.base.arrays import ArraySpec  # noqa: E402
from heedful.core.base.device import by_name  # noqa: E402
from heedful.core.call.operands import Gradients, Operands  # noqa: E402
from heedful.core.call.problem import AttentionProblem  # noqa: E402
from heedful.core.planning.plan import plan  # noqa: E402
from heedful.core.planning.sizes import Workspace  # noqa: E402
from heedful.core.registry.capability import JAX_ON_GPUS, Toolchain  # noqa: E402
from heedful.jax.base import device  # noqa: E402
from heedful.jax.gpu import programs as gpu  # noqa: E402
from heedful.jax.traced import cache_update  # noqa: E402
from heedful.launch.bind import portable_cache  # noqa: E402

BF16 = jnp.bfloat16
H200 = by_name("H200")


@pytest.fixture
def ran(monkeypatch):
    """The arguments of each program that is run; of its results each has another number."""
    seen: list[SimpleNamespace] = []

    def run(made, arch, arrays, results, name):
        seen.append(
            SimpleNamespace(made=made, arch=arch, x=dict(arrays), results=results, name=name)
        )
        return {
            n: jnp.full(spec.shape, i, spec.dtype) for i, (n, spec) in enumerate(results.items())
        }

    monkeypatch.setattr(gpu, "run", run)
    return seen


def filled(*shape: int, value: float = 1.0, dtype: Any = BF16) -> Any:
    return jnp.full(shape, value, dtype)


def operands(
    batch=2, seqlen_q=64, seqlen_k=96, heads=4, heads_k=2, dim=64, **more: Any
) -> Operands:
    k = filled(batch, seqlen_k, heads_k, dim)
    return Operands(filled(batch, seqlen_q, heads, dim), k, k + 1, **more)


def problem_of(**facts: Any) -> AttentionProblem:
    return AttentionProblem.dense(2, 64, 96, 4, 2, 64, **facts)


def types(specs) -> dict[str, tuple]:
    return {name: (spec.shape, spec.dtype) for name, spec in specs.items()}


def test_a_forward_gives_out_lse_and_its_rest_and_begins_the_largest_scores_below_all(ran):
    out, lse, rest, largest = gpu.forward(
        plan(problem_of(return_lse=True, max_scores=True), H200), operands(), None
    )
    (run,) = ran
    names = [*run.results]
    assert (run.arch, run.name) == ("sm_90", "forward")
    assert types(run.results) == {
        "out": ((2, 64, 4, 64), "bfloat16"),
        "lse": ((2, 4, 64), "float32"),
        "max_scores": ((2, 4, 64), "float32"),
    }
    for array, name in ((out, "out"), (lse, "lse"), (largest, "max_scores")):
        assert (array == names.index(name)).all(), name
    assert rest is None
    begun = run.x["max_scores"]
    assert begun.shape == (2, 4, 64) and begun.dtype == jnp.float32 and (begun == -jnp.inf).all()
    assert {*run.x} == {"q", "k", "v", "max_scores"}
    both = gpu.forward(plan(replace(problem_of(), keeps_rest=True), H200), operands(), None)
    assert [array is None for array in both] == [False, False, False, True]
    assert {*ran[1].x} == {"q", "k", "v"}


def test_a_traced_origin_follows_the_seed_as_numbers_of_64_bits(ran):
    seed, origin = jnp.array([7, 8], jnp.uint32), jnp.array([1, 2, 3, 4], jnp.uint32)
    chosen = plan(problem_of(dropout_p=0.5, return_probs=True), H200)
    made = gpu.forward(chosen, operands(seed=seed), origin)
    assert ran[0].x["seed"].tolist() == [7, 8, 1, 0, 2, 0, 3, 0, 4, 0]
    assert made[3].shape == (2, 4, 64, 96) and not ran[0].x["probs"].any()
    _, specs = gpu._operands(chosen.problem, operands(seed=seed), origin)
    assert specs["seed"] == ArraySpec.contiguous((5,), "int64")
    _, specs = gpu._operands(chosen.problem, operands(seed=seed), None)
    assert specs["seed"] == ArraySpec.contiguous((1,), "int64")
    assert types(ran[0].results)["probs"] == ((2, 4, 64, 96), "bfloat16")


def test_a_backward_gives_each_input_that_has_one_its_gradient(ran):
    bias, slopes = filled(1, 4, 64, 1, dtype=jnp.float16), filled(4, 9, dtype=jnp.float32)
    x = operands(bias=bias, sink=filled(4, dtype=jnp.float32), rel_bias=slopes)
    facts = {"bias": True, "sink": True, "rel_bias": True, "needs_grad": True}
    problem = problem_of(**facts, bias_grad=True, rel_bias_grad=True)
    saved: list[Any] = [x.q, filled(2, 4, 64, dtype=jnp.float32), x.q * 2, None]
    grads = gpu.backward(plan(problem, H200), x, None, saved)
    (run,) = ran
    names = {f"d{name}": name for name in ("q", "k", "v", "bias", "sink", "rel_bias")}
    wanted = {n: (getattr(x, name).shape, str(getattr(x, name).dtype)) for n, name in names.items()}
    assert (run.arch, run.name, types(run.results)) == ("sm_90", "backward", wanted)
    # XLA's arrays are dense, also of a bias that kernels see as a whole one.
    assert all(
        spec == ArraySpec.contiguous(spec.shape, spec.dtype) for spec in run.results.values()
    )
    for name, grad in grads._asdict().items():
        assert (grad == [*run.results].index(name)).all(), name
    given = {"q", "k", "v", "bias", "sink", "rel_bias", "out", "lse", "dout"}
    assert {*run.x} == given
    assert run.x["out"] is saved[0] and run.x["lse"] is saved[1] and run.x["dout"] is saved[2]
    dlse = filled(2, 4, 64, dtype=jnp.float32)
    plain = gpu.backward(
        plan(problem_of(needs_grad=True), H200), operands(), None, [*saved[:3], dlse]
    )
    assert [grad is None for grad in plain] == [False] * 3 + [True] * 3
    assert ran[1].x["dlse"] is dlse and {*ran[1].results} == {"dq", "dk", "dv"}


def test_a_backward_over_pages_is_that_of_dense_keys_added_up_in_them(ran):
    """A page that both sequences have gets both gradients."""
    problem = AttentionProblem.dense(
        2, 16, 32, 4, 2, 64, total_q=32, page_size=16, used_k=True, needs_grad=True
    )
    numbers = jnp.array([[2, 0], [2, 1]], jnp.int32)
    pages = jnp.arange(4.0).astype(BF16)[:, None, None, None] * filled(4, 16, 2, 64)
    used, bounds = jnp.array([32, 17], jnp.int32), jnp.array([0, 16, 32], jnp.int32)
    x = Operands(
        filled(32, 4, 64),
        pages,
        pages + 8,
        block_table=numbers,
        seqused_k=used,
        cu_seqlens_q=bounds,
    )
    saved: list[Any] = [x.q, filled(4, 32, dtype=jnp.float32), x.q, None]
    grads = gpu.backward(plan(problem, H200), x, None, saved)
    (run,) = ran
    assert "block_table" not in run.x and run.x["k"].shape == (2, 32, 2, 64)
    assert run.x["k"][:, ::16, 0, 0].tolist() == [[2, 0], [2, 1]]
    assert run.x["v"][:, ::16, 0, 0].tolist() == [[10, 8], [10, 9]]
    # The program gives 1s for dk, and 2s for dv.
    assert isinstance(grads, Gradients) and grads.dq.shape == x.q.shape
    for grad, each in ((grads.dk, 1), (grads.dv, 2)):
        assert grad.shape == pages.shape and grad.dtype == BF16
        assert grad[:, 0, 0, 0].tolist() == [each, each, 2 * each, 0]


def test_a_program_is_run_without_the_launches_that_have_no_work(monkeypatch):
    """What no launch wrote is zeros; names of kernels are told."""
    launched = []

    def launch(memory, launch, name):
        launched.append((launch.grid, name))
        memory._arrays["out"] = memory._operand("x") + 1

    calls = [SimpleNamespace(kernel=SimpleNamespace(function=name)) for name in ("a", "b", "c")]
    launches = [SimpleNamespace(grid=grid) for grid in ((1, 2, 3), (4, 0, 1), (5, 1, 1))]
    asked = []

    def describe(made, arch):
        asked.append((made, arch))
        return SimpleNamespace(launches=launches)

    monkeypatch.setattr(gpu.foreign, "describe", describe)
    monkeypatch.setattr(gpu.Memory, "launch", launch)
    program: Any = SimpleNamespace(workspaces=(), calls=calls)
    results = {
        n: ArraySpec.contiguous((2, 3), dtype) for n, dtype in (("out", "float32"), ("lse", "int8"))
    }
    done = gpu.run(program, "sm_90", {"x": jnp.ones((2, 3))}, results, "forward")
    assert launched == [((1, 2, 3), "a"), ((5, 1, 1), "c")] and asked == [(program, "sm_90")]
    assert (done["out"] == 2).all() and [*done] == ["out", "lse"]
    assert done["lse"].shape == (2, 3) and done["lse"].dtype == jnp.int8 and not done["lse"].any()


def test_scratch_is_allowed_up_to_the_limit(monkeypatch):
    monkeypatch.setenv("HEEDFUL_WORKSPACE_LIMIT_MB", "1")
    most = Workspace.of("one", (1 << 18) - 8), Workspace.of("other", 8)
    gpu.check_scratch(most)
    with pytest.raises(
        ValueError, match=r"allows 1048576 bytes of scratch, this call needs 1048580$"
    ):
        gpu.check_scratch((*most, Workspace.of("more", 1)))
    monkeypatch.delenv("HEEDFUL_WORKSPACE_LIMIT_MB")
    gpu.check_scratch((*most, Workspace.of("more", 1)))


@pytest.mark.parametrize("rotates", [False, True])
def test_an_update_by_itself_names_what_it_writes_and_makes(rotates, ran, monkeypatch):
    """Scales of heads are whole and read alone; those of groups are written."""
    asked = []

    def update(buffers, *facts):
        asked.append((buffers, facts))
        return "a program"

    monkeypatch.setattr(portable_cache, "update", update)
    monkeypatch.setenv("HEEDFUL_DEVICE", "H200")
    new, cache = filled(2, 1, 3, 32), jnp.zeros((5, 16, 3, 32), jnp.int8)
    arrays = {"k_new": new, "v_new": new, "k": cache, "v": cache}
    arrays |= {
        "cache_seqlens": jnp.zeros(2, jnp.int32),
        "block_table": jnp.zeros((2, 2), jnp.int32),
    }
    if rotates:
        arrays |= {n: filled(64, 8) for n in ("rotary_cos", "rotary_sin")}
        arrays |= {"q": filled(2, 1, 6, 32)}
    arrays |= {"k_descale": filled(1, 3, dtype=jnp.float32)}
    arrays |= {"v_descale": filled(5, 16, 3, 2, dtype=jnp.float32)}
    static = cache_update.Static(tuple(arrays), 16, True, rotates, 11)
    made = cache_update._on_gpu("cuda", static, *arrays.values())
    ((buffers, facts),) = asked
    assert facts == (16, True, rotates, 11)
    assert buffers["seqused"] == ArraySpec.contiguous((2,), "int32")
    assert buffers["k_descale"] == ArraySpec((2, 3), (0, 1), "float32")
    assert buffers["v_descale"].shape == (5, 16, 3, 2)
    assert (buffers.get("rotated") == ArraySpec.contiguous((2, 1, 6, 32), "bfloat16")) == rotates
    (run,) = ran
    written = ["k", "v", "v_descale", "seqused", *(["rotated"] if rotates else [])]
    assert (run.made, run.arch, run.name, [*run.results]) == (
        "a program",
        "sm_90",
        "update",
        written,
    )
    assert [int(array.reshape(-1)[0]) for array in made] == [*range(len(written))]
    assert run.x == arrays


@pytest.fixture
def here(monkeypatch):
    """An AMD GPU in this process, the second of its host."""
    from jaxlib import gpu_triton

    asked = []

    def details(ordinal):
        asked.append(ordinal)
        return "gfx942:sramecc+:xnack-"

    monkeypatch.setattr(gpu_triton, "get_arch_details", details, raising=False)
    devices = [SimpleNamespace(local_hardware_id=1)]
    monkeypatch.setattr(device.jax, "local_devices", lambda *, backend: devices)
    monkeypatch.delenv("HEEDFUL_DEVICE", raising=False)
    device._live.cache_clear()
    yield asked
    device._live.cache_clear()


def test_a_gpu_of_amd_is_known_by_its_architecture(here):
    assert device.device_spec("rocm") == by_name("gfx942") and here == [1]


def test_a_named_device_is_the_one_of_its_vendors_platform(here, monkeypatch):
    monkeypatch.setenv("HEEDFUL_DEVICE", "H100")
    assert device.device_spec("cuda") == by_name("H100")
    assert device.device_spec("rocm") == by_name("gfx942")
    assert device.device_spec("cpu").vendor == "cpu"


@pytest.mark.parametrize("triton", [None, SimpleNamespace(numbers=(3, 9))])
def test_a_toolchain_is_of_what_this_process_has(triton, monkeypatch):
    """torch takes no part, whatever version is installed."""
    monkeypatch.setattr(device, "compiler", lambda: triton)
    monkeypatch.setattr(device, "_jax_version", lambda: JAX_ON_GPUS)
    packed, checked = frozenset({("hopper", (3, 9))}), frozenset({"cdna"})
    monkeypatch.setattr(device.packs, "backends", {"sm_90": packed}.__getitem__)
    monkeypatch.setattr(device.validations, "validated", {H200: checked}.__getitem__)
    found = device.toolchain(H200)
    assert found == Toolchain(
        triton=triton and (3, 9),
        torch=None,
        jax=JAX_ON_GPUS,
        packs=packed,
        validated=checked,
        framework="jax",
    )


def test_dims_of_1_are_repeated_and_missing_ones_come_first():
    assert gpu.expanded(ArraySpec.contiguous((3, 1, 5), "int8"), (2, 3, 4, 5)) == ArraySpec(
        (2, 3, 4, 5), (0, 5, 0, 1), "int8"
    )
    assert np.dtype(gpu._type_of(ArraySpec.contiguous((3,), "bfloat16"))[1]) == np.dtype(BF16)
