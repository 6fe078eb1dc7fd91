"""The advice that an owner of an AMD GPU gets from `heedful doctor`."""

import json

import pytest
from typer.testing import CliRunner

from heedful.cli import app
from heedful.cli import doctor as doctor_module
from heedful.core.base.device import by_name
from heedful.core.registry.capability import Toolchain
from heedful.validation import sensors

CPU = by_name("CPU")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """The kernel's files of two MI300X and a CPU; no node's properties may be read of a third."""
    for number, version in enumerate((0, 90402, 90402)):
        (tmp_path / str(number)).mkdir()
        lines = f"cpu_cores_count 0\ngfx_target_version {version}\nsimd_count 1216\n"
        (tmp_path / str(number) / "properties").write_text(lines)
    (tmp_path / "3" / "properties").mkdir(parents=True)
    monkeypatch.setattr(sensors.gpus, "__defaults__", (tmp_path,))
    return tmp_path


def test_amd_gpus_are_found_whatever_torch_is_there(nodes):
    assert sensors.gpus() == ["gfx942", "gfx942"]
    (nodes / "1" / "properties").write_text("gfx_target_version 90500\n")
    (nodes / "2" / "properties").write_text("gfx_target_version 90010\n")
    assert sensors.gpus() == ["gfx950", "gfx90a"]
    assert sensors.gpus(nodes / "nothing") == []


@pytest.mark.parametrize(
    ("torch", "says"), [(None, "torch is not installed"), ((2, 13), "cannot use it")]
)
def test_a_torch_that_is_not_for_rocm_is_told_with_the_index_that_has_one(nodes, torch, says):
    (line,) = doctor_module._amd_advice([CPU], Toolchain(None, torch, None))
    assert line.startswith("there is an AMD GPU (gfx942), and torch") and says in line
    assert "--index-url https://download.pytorch.org/whl/rocm" in line
    # No word of CUDA's extra, or of a missing Triton.
    assert not list(doctor_module._advice([CPU], Toolchain(None, torch, None)))


def test_the_command_says_so(nodes):
    done = CliRunner().invoke(app(), ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    advice = json.loads(done.output)["advice"]
    assert any("there is an AMD GPU (gfx942)" in line for line in advice)


def test_a_gpu_that_heedful_has_no_kernels_for_is_not_spoken_of(nodes):
    for number in (1, 2):  # a Ryzen's
        (nodes / str(number) / "properties").write_text("gfx_target_version 100306\n")
    assert sensors.gpus() == ["gfx1036", "gfx1036"]
    assert not list(doctor_module._amd_advice([CPU], Toolchain(None, (2, 13), None)))


@pytest.mark.parametrize("chip", ["MI300X", "MI355X"])
def test_kernels_that_wait_are_named_with_what_they_wait_for(chip, monkeypatch):
    gpu = by_name(chip)
    monkeypatch.setattr(sensors, "gpus", lambda: [gpu.arch])
    (line,) = doctor_module._amd_advice([gpu], Toolchain((3, 6), (2, 11), None))
    assert "cdna" in line and "need Triton 3.9: `heedful toolchain install`" in line
    (line,) = doctor_module._amd_advice([gpu], Toolchain())
    assert "until `heedful validate` has passed here" in line
    validated = Toolchain(validated=frozenset({"cdna"}))
    assert not list(doctor_module._amd_advice([gpu], validated))
    monkeypatch.setattr(sensors, "gpus", lambda: [])
    assert not list(doctor_module._amd_advice([by_name("H200")], Toolchain()))
