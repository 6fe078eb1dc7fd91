"""What JAX has and NumPy has not: random keys, which are told by name where they are no operand,
and devices, of which the one that is named or the one that is there is planned for."""

from types import SimpleNamespace

import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402
from heedful.core.base.device import by_name  # noqa: E402
from heedful.jax.base import device  # noqa: E402
from heedful.launch.driver import cuda  # noqa: E402

ROWS = jnp.ones((1, 8, 2, 8))


@pytest.mark.parametrize(
    "name, call",
    [
        ("q", lambda keys: hj.flash_attn_func(keys, ROWS, ROWS)),
        ("bias", lambda keys: hj.flash_attn_func(ROWS, ROWS, ROWS, bias=keys)),
        ("x", lambda keys: hj.quantize_kv(keys, "int8")),
        ("outs", lambda keys: hj.merge_attn_states(keys[None], ROWS)),
    ],
)
def test_random_keys_in_place_of_numbers_are_refused_by_their_dtype(name, call):
    keys = jax.random.split(jax.random.key(0), ROWS.shape)
    with pytest.raises(TypeError, match=rf"^{name} must be float.*, got key<"):
        call(keys)


@pytest.fixture
def live(monkeypatch):
    """Two GPUs of another size than in the table, of which the second is this process's."""
    found = {"units": 100, "l2_bytes": 7 << 20, "name": "half an H200"}
    asked = []

    def figures(ordinal: int) -> dict:
        asked.append(ordinal)
        return {"arch": "sm_90", **found}

    def devices(*, backend: str):
        if backend == "rocm":
            raise RuntimeError("there is none")
        return [SimpleNamespace(local_hardware_id=1), SimpleNamespace(local_hardware_id=0)]

    monkeypatch.setattr(cuda, "figures", figures)
    monkeypatch.setattr(device.jax, "local_devices", devices)
    monkeypatch.delenv("HEEDFUL_DEVICE", raising=False)
    device._live.cache_clear()
    yield asked
    device._live.cache_clear()


def test_a_live_gpu_has_the_figures_that_its_driver_says_asked_once(live):
    for _ in range(2):
        spec = device.device_spec("cuda")
        assert spec == by_name("H200").live(units=100, l2_bytes=7 << 20, name="half an H200")
    assert live == [1]


def test_a_platform_without_a_device_needs_one_that_is_named(live, monkeypatch):
    with pytest.raises(ValueError, match="HEEDFUL_DEVICE must name .* of platform rocm here, got"):
        device.device_spec("rocm")
    monkeypatch.setenv("HEEDFUL_DEVICE", "MI300X")
    assert device.device_spec("rocm") == by_name("MI300X")
    # A device of another vendor is not the one of this platform.
    assert device.device_spec("cuda").name == "half an H200"


def test_what_is_planned_is_told_once_a_kind(caplog):
    with caplog.at_level("INFO", "heedful"):
        for _ in range(3):
            hj.flash_attn_func(ROWS, ROWS, ROWS, softcap=11.0)
    told = [record.message for record in caplog.records if record.name == "heedful"]
    assert told == ["[1x8x8 h2/2 d8 float32 softcap=11.0] -> scan"]


@pytest.mark.parametrize("older", ["jax", "jaxlib"])
def test_jaxs_version_is_the_lower_one_of_its_two_packages(older, monkeypatch):
    versions = {"jax": "0.12.0", "jaxlib": "0.12.0"} | {older: "0.11.3"}
    monkeypatch.setattr(device.metadata, "version", versions.__getitem__)
    assert device._jax_version.__wrapped__() == (0, 11, 3)
