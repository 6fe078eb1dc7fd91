"""What is written beside a figure: device, driver, clocks, versions, commit, as the machine tells
them, or nothing where it does not."""

import builtins
import io
import platform
import shutil
import subprocess
import sys
import types
from datetime import UTC, datetime, timedelta
from importlib import metadata

import pytest
import torch

import heedful
from heedful.bench.harness import machine, run
from heedful.core.registry.capability import Toolchain

CPU = torch.device("cpu")


class Tools:
    """Programs by name: what each prints. Notes the commands."""

    def __init__(self, monkeypatch):
        self.texts: dict[str, str | Exception | int] = {}
        self.asked: list[list[str]] = []
        monkeypatch.setattr(shutil, "which", lambda name: name in self.texts or None)
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command, *, capture_output, text, timeout):
        assert capture_output and text and timeout == 20
        self.asked.append(command)
        found = self.texts[command[0]]
        if isinstance(found, Exception):
            raise found
        code = found if isinstance(found, int) else 0
        return types.SimpleNamespace(returncode=code, stdout=f"  {found}\n")


@pytest.fixture
def tools(monkeypatch):
    machine.driver.cache_clear()
    machine.commit.cache_clear()
    yield Tools(monkeypatch)
    machine.driver.cache_clear()
    machine.commit.cache_clear()


def test_the_driver_is_that_of_the_vendors_tool(tools):
    tools.texts["rocm-smi"] = "device,Driver version\ncard0, 6.12.12"
    assert machine.driver() == "rocm 6.12.12"
    assert tools.asked == [["rocm-smi", "--showdriverversion", "--csv"]]
    machine.driver.cache_clear()
    tools.texts["nvidia-smi"] = "580.65.06\n580.65.06"
    assert machine.driver() == "nvidia 580.65.06"
    assert tools.asked[1:] == [
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    ]
    # It is asked for once.
    assert machine.driver() == "nvidia 580.65.06" and len(tools.asked) == 2


def test_clocks_are_named_by_their_units(tools):
    tools.texts["nvidia-smi"] = "1980, 2619, 312.5, 41\n210, 2619, 70.1, 30"
    want = {"sm_mhz": 1980.0, "mem_mhz": 2619.0, "power_w": 312.5, "temperature_c": 41.0}
    assert machine.clocks() == want
    ((program, query, form),) = tools.asked
    assert program == "nvidia-smi" and form == "--format=csv,noheader,nounits"
    assert query == "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"


@pytest.mark.parametrize("text", ["", "[N/A], 2619, 312.5, 41", 9, OSError("no"), "gone"])
def test_clocks_that_cannot_be_read_are_left_out(tools, text):
    if text != "gone":
        tools.texts["nvidia-smi"] = text
    assert machine.clocks() == {}


@pytest.mark.parametrize(
    "answer", [9, OSError("no"), subprocess.TimeoutExpired("nvidia-smi", 20), ""], ids=repr
)
def test_a_driver_that_cannot_be_asked_is_none(tools, answer):
    assert machine.driver() is None and not tools.asked
    machine.driver.cache_clear()
    tools.texts["nvidia-smi"] = answer
    assert machine.driver() is None


def test_the_commit_is_that_of_the_sources_and_marked_where_they_changed(tools, monkeypatch):
    answers: dict[str, str | None] = {
        "ls-files": "machine.py",
        "rev-parse": "0123456789ab",
        "status": "",
    }
    tools.texts["git"] = ""

    def ask(command):
        tools.asked.append(command)
        return answers[command[3]]

    monkeypatch.setattr(machine, "_output", ask)
    assert machine.commit() == "0123456789ab"
    folder = machine.__file__.rpartition("/")[0]
    assert tools.asked == [
        ["git", "-C", folder, "ls-files", "machine.py"],
        ["git", "-C", folder, "rev-parse", "--short=12", "HEAD"],
        ["git", "-C", folder, "status", "--porcelain", "."],
    ]
    for answers["rev-parse"], answers["status"], want in (
        ("0123456789ab", " M run.py", "0123456789ab+"),
        (None, None, None),
    ):
        machine.commit.cache_clear()
        assert machine.commit() == want
    answers |= {"ls-files": "", "rev-parse": "an environment within another checkout"}
    machine.commit.cache_clear()
    assert machine.commit() is None


def cpuinfo(monkeypatch, text: str | None) -> None:
    """Makes /proc/cpuinfo say so; None: there is none."""
    right = builtins.open

    def opened(path, *args, **more):
        if path != "/proc/cpuinfo":
            return right(path, *args, **more)
        if text is None:
            raise FileNotFoundError(path)
        return io.StringIO(text)

    monkeypatch.setattr(builtins, "open", opened)


def test_the_cpus_name_is_the_models(monkeypatch):
    cpuinfo(monkeypatch, "vendor: X\nmodel name\t: Fast 9000: II\nmodel name\t: Other\n")
    assert machine.cpu_name() == "Fast 9000"
    *_, spec = machine.devices()
    assert spec.name == "Fast 9000"


@pytest.mark.parametrize("text", [None, "processor : 0\n"])
def test_a_cpu_that_does_not_tell_its_name_is_a_cpu(monkeypatch, text):
    cpuinfo(monkeypatch, text)
    assert machine.cpu_name() == "CPU"


def test_gpus_come_before_the_cpu(monkeypatch):
    from heedful.core.base.device import KNOWN
    from heedful.torch.base import device

    asked = []

    def spec(where):
        asked.append(where)
        return KNOWN["CPU"].live(name=str(where))

    cpuinfo(monkeypatch, "model name : Fast\n")
    monkeypatch.setattr(device, "device_spec", spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [found.name for found in machine.devices()] == ["cuda:0", "cuda:1", "Fast"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [found.name for found in machine.devices()] == ["Fast"]


def test_without_torch_there_is_a_cpu_and_no_toolchain(monkeypatch):
    cpuinfo(monkeypatch, "model name : Fast\n")
    monkeypatch.setitem(sys.modules, "heedful.torch.base.device", None)
    assert [found.name for found in machine.devices()] == ["Fast"]
    assert machine.toolchain() == Toolchain(None, None, None)


def test_the_toolchain_is_that_of_the_torch_interface():
    from heedful.torch.base.device import toolchain

    assert machine.toolchain() == toolchain() != Toolchain(None, None, None)


def test_a_version_is_that_of_the_package_that_can_be_imported(monkeypatch):
    assert machine.version("pytest") == pytest.__version__
    assert machine.version("no-such-package-here") is None
    asked = []
    monkeypatch.setattr(metadata, "version", lambda name: asked.append(name) or "1.2")
    # Of a distribution whose module has another name, that module says whether it is there.
    assert machine.version("some-package", "json") == "1.2" and asked == ["some-package"]
    assert machine.version("json", "no_such_module_here") is None


def test_what_lies_beside_a_figure(monkeypatch):
    versions = {"flash-attn": "2.8", "torch": "2.13", "triton": "3.9"}
    modules = {}

    def version(package, module):
        modules[package] = module
        return versions.get(package)

    monkeypatch.setattr(machine, "version", version)
    monkeypatch.setattr(machine, "commit", lambda: "0123456789ab+")
    monkeypatch.setattr(machine, "driver", lambda: "nvidia 580")
    facts = run.surroundings(CPU)
    assert facts["versions"] == {
        "heedful": heedful.__version__,
        "torch": "2.13",
        "triton": "3.9",
        "flash-attn": "2.8",
        "flash-attn-4": None,
        "flashinfer-python": None,
    }
    assert modules["flash-attn"] == modules["flash-attn-4"] == "flash_attn"
    assert modules["flashinfer-python"] == "flashinfer"
    assert (modules["torch"], modules["triton"]) == ("torch", "triton")
    assert (facts["device"], facts["driver"]) == (machine.cpu_name(), "nvidia 580")
    assert facts["cudnn"] is None
    assert facts["commit"] == "0123456789ab+"
    assert facts["python"] == platform.python_version()
    date = datetime.fromisoformat(facts["date"])
    assert date.microsecond == 0 and date.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - date) < timedelta(minutes=5)


def test_a_gpu_is_named_beside_its_figure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: f"Big {where.index}")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    facts = run.surroundings(torch.device("cuda", 1))
    assert (facts["device"], facts["cudnn"]) == ("Big 1", 91002)
