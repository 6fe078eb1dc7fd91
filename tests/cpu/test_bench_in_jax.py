"""The bench of JAX's calls: what it times is checked, and what is wrong gets no figure."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from heedful.bench import in_jax  # noqa: E402
from heedful.bench.cases import cases  # noqa: E402

CPU = torch.device("cpu")
SMALL = [
    replace(case, problem=replace(case.problem, batch=2, seqlen_q=40, seqlen_k=40))
    for case in cases("cpu")[:1]
]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_way_is_checked_and_timed(direction):
    case = replace(SMALL[0], direction=direction)
    found = in_jax.measure(case, CPU, "xla", rounds=2)
    assert not found.missing
    assert list(found.times) == ["PyTorch", "JAX", "xla"]
    for times in found.times.values():
        assert len(times) == 2 and all(time > 0 for time in times)
    assert "xla / JAX" in in_jax._line(case, found, "xla")


def test_a_way_that_computes_wrong_gets_no_figure(monkeypatch):
    right = in_jax.attention

    def wrong(name, causal):
        attend = right(name, causal)
        return (lambda q, k, v: attend(q, k, v) * 1.1) if name == "xla" else attend

    monkeypatch.setattr(in_jax, "attention", wrong)
    found = in_jax.measure(SMALL[0], CPU, "xla", rounds=2)
    assert list(found.missing) == ["xla"] and "out of" in found.missing["xla"]
    assert "JAX" in found.times and "xla" not in found.times
    assert "xla / JAX" not in in_jax._line(SMALL[0], found, "xla")


def test_dispatch_is_timed_with_and_without_gradients():
    found = in_jax.dispatch(CPU, "xla", rounds=2, sets=3)
    assert set(found) == {(name, grad) for name in ("heedful", "xla") for grad in (False, True)}
    assert all(len(times) == 2 for times in found.values())


def test_every_training_shape_is_beside_cudnn_and_so_is_the_host(monkeypatch, capsys):
    gpu = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"device {device.index}")
    asked = []

    def measure(case, device, own):
        asked.append((case.name, device, own))
        alike = in_jax.Spent(0, 2, 1, 0)
        if case.problem.mask.causal:
            times = {"PyTorch": [1.0, 3.0, 2.0], "JAX": [4.0, 4.0, 4.0]}
            launches = {"PyTorch": alike, "JAX": in_jax.Spent(0, 3, 0, 0)}
            return in_jax.Measured(times, launches, {own: "is not for this"})
        times = {"PyTorch": [2.0], "JAX": [4.0 if case.problem.head_dim == 64 else 1.0], own: [2.0]}
        return in_jax.Measured(times, dict.fromkeys(times, alike), {})

    def dispatch(device, own):
        assert (device, own) == (gpu, "cudnn")
        return {("heedful", False): [5.0, 7.0, 6.0], ("cudnn", True): [9.0]}

    monkeypatch.setattr(in_jax, "measure", measure)
    monkeypatch.setattr(in_jax, "dispatch", dispatch)
    in_jax.main("1x16384")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("device 3, torch ")
    assert {(device, own) for _, device, own in asked} == {(gpu, "cudnn")}
    names = [name for name, *_ in asked]
    assert [name.split()[0] for name in names] == ["forward"] * 6 + ["backward"] * 6
    assert all("1x16384" in name for name in names)
    plain, causal = (lines[at].removeprefix(f"{names[at]:52s} ") for at in (0, 1))
    assert plain == (
        "PyTorch 2.0 us; JAX 4.0 us; cudnn 2.0 us; PyTorch / JAX 0.500 cudnn / JAX 0.500"
    )
    assert causal == (
        "PyTorch 2.0 us; JAX 4.0 us (+1 kernels, -1 memsets); cudnn: is not for this;"
        " PyTorch / JAX 0.500"
    )
    # Of 0.5, 2 and 2.
    assert lines[12:] == [
        "forward: 1.260 of cuDNN's speed, least 0.500",
        "dispatch heedful: 6.0 us",
        "dispatch cudnn with gradients: 9.0 us",
    ]
