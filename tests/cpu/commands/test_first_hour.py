"""What somebody new types first: mistakes cost one line and no work, nothing is accepted and
ignored, and what is printed fits a screen."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot
from typer.testing import CliRunner

import heedful
from heedful import integrations
from heedful.bench.harness import machine, report, run
from heedful.bench.harness.cases import cases
from heedful.bench.harness.run import Figure, Outcome
from heedful.bench.harness.timing import Spread
from heedful.cli import app, console
from heedful.cli import doctor as doctor_module
from heedful.cli import validate as validate_module
from heedful.core.base.device import by_name
from heedful.core.base.installed import TESTED
from heedful.core.registry.capability import Toolchain
from heedful.demo import job
from heedful.inspector import command, tables
from heedful.inspector.nvidia import NvidiaInspection, Sass
from heedful.integrations.torch import registry
from heedful.torch.base import device as torch_device
from heedful.validation import run as validation

CPU = torch.device("cpu")
WIDTH = 80


def heed(*arguments: str):
    done = CliRunner().invoke(app(), list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture
def no_work(monkeypatch):
    """Fails a test whose command begins with what it is asked for."""

    def began(*args, **more):
        raise AssertionError("the work began")

    for module, name in ((run, "measure"), (job, "run"), (validation, "verdicts")):
        monkeypatch.setattr(module, name, began)


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 80 columns without colours."""
    for name in ("out", "err"):
        monkeypatch.setattr(getattr(console, name), "_width", WIDTH)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(((name, "--device", "nonsense"), "device") for name in ("bench", "demo", "validate")),
        *(((name, "--device", "meta"), "device") for name in ("bench", "demo", "validate")),
        (("demo", "--device", "cuda:99"), "device"),
        (("explain", "--device", "cuda:99"), "device"),
        (("inspect", "--device", "cuda:99"), "device"),
        (("explain", "--device", "H200", "--page-size", "-1"), "page_size"),
        (("support", "--markdown", "{file}/page.md"), "--markdown"),
        (("validate", "--device", "cpu", "--report", "{file}/report.json"), "--report"),
        (("demo", "--device", "cpu", "--out", "{file}"), "--out"),
        (("bench", "--device", "cpu", "--png", "{file}/a/b.png"), "--png"),
        (("bench", "--device", "cpu", "--json-lines", "{folder}"), "--json-lines"),
        (("inspect", "--device", "H200", "--svg", "{folder}"), "--svg"),
        (("bench", "--device", "cpu", "--base", "nope"), "base"),
        (("bench", "--device", "cpu", "--base", "sdpa"), "base"),
        (("bench", "--device", "cpu", "--peers", "heedful,math", "--base", "flash"), "base"),
        (("bench", "--device", "cpu", "--jobs", "2"), "--jobs"),
    ],
)
def test_a_plain_mistake_is_one_line_before_any_work(arguments, named, no_work, tmp_path):
    file = tmp_path / "file"
    file.touch()
    places = {"file": file, "folder": tmp_path}
    done = heed(*(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert named in done.stderr and not done.stdout
    assert list(tmp_path.iterdir()) == [file]


def test_what_can_be_written_is_left_as_it_was(tmp_path):
    from heedful.cli.given import writable

    kept = tmp_path / "kept"
    kept.write_text("as it was")
    writable(kept, "--png")
    writable(tmp_path / "not" / "there" / "yet.png", "--png")
    assert kept.read_text() == "as it was" and list(tmp_path.iterdir()) == [kept]


def test_a_page_is_written_into_a_folder_that_was_not_there(tmp_path):
    page = tmp_path / "not" / "there" / "page.md"
    assert heed("support", "--markdown", str(page)).exit_code == 0
    assert page.read_text(encoding="utf-8").startswith("#")


def _outcome(group: str, figures: list[Figure], index: int = 0) -> Outcome:
    return Outcome(cases(group)[index], "flash", figures)


PEERS = ("heedful", "flash", "cudnn", "efficient", "math", "flex", "fa4")


def test_a_base_that_is_timed_is_what_ratios_are_over(monkeypatch):
    given = []

    def measure(case, peers, device, rounds, bases):
        given.append((bases[0], [peer.name for peer in peers]))
        return Outcome(case, None, [])

    monkeypatch.setattr(run, "measure", measure)
    words = ("--match", "forward 1x512", "--peers", "heedful,math", "--base", "math")
    assert heed("bench", "--device", "cpu", *words).exit_code == 0
    assert given == [("math", ["heedful", "math"])] * 2


@pytest.mark.parametrize("group", ["forward", "decode", "overhead"])
def test_tables_of_figures_fit_80_columns(group):
    spread = Spread(123456.7, 123000.0, 124000.0)
    figures = [Figure(peer, spread, Spread(1.234, 1.2, 1.3)) for peer in PEERS]
    figures.append(Figure("fa3", None, None, "is outside of its error budget", True))
    outcomes = [_outcome(group, figures, index) for index in (0, 1)]
    text = shown(report.table(group, outcomes, WIDTH), WIDTH)
    assert max(map(len, text.splitlines())) <= WIDTH and "…" not in text
    assert text.count("1.23 (1.20 to 1.30)") == 2 * (len(PEERS) - 1)
    wide = shown(report.table(group, outcomes, 400), 400)
    heads = next(line for line in wide.splitlines() if "case" in line)
    assert all(peer in heads for peer in PEERS)


def shown(table, width: int) -> str:
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor",),
        ("support",),
        ("explain", "--device", "H200", "-g"),
        ("explain", "--device", "H200", "--seqlen", "1", "--seqlen-k", "131072", "--splits", "7"),
        ("explain", "--device", "MI355X", "--page-size", "16", "-s", "1", "--seqlen-k", "8192"),
    ],
)
def test_what_commands_print_fits_80_columns(arguments, screen):
    done = heed(*arguments)
    assert done.exit_code == 0, done.output
    long = [line for line in done.stdout.splitlines() if len(line.rstrip()) > WIDTH]
    assert not long and "…" not in done.stdout


def test_a_validation_of_many_kernels_fits_80_columns():
    names = ["mla_swap_ab", "mla", "hopper_decode", "decode", "hopper_mixed", "mixed", "hopper"]
    found = [
        validation.Verdict(name, f"bfloat16 a problem of long words, {i}", failed="raised")
        for i in range(2)
        for name in names
    ]
    text = shown(validate_module._table(found, names), WIDTH)
    assert max(map(len, text.splitlines())) <= WIDTH and "…" not in text
    assert all(text.count(name) >= 2 for name in names)


def test_a_long_path_is_folded():
    path = "/" + "/".join(["folder"] * 20)
    text = shown(doctor_module._version_table({"heedful": f"1.0 ({path})"}), WIDTH)
    assert "…" not in text and "".join(re.findall(r"[\w/]", text)).count("folder") == 20


def test_kernels_that_do_not_fit_beside_each_other_stand_below():
    rows = [["", *(f"kernel{i}" for i in range(9))], ["registers", *"123456789"]]
    text = tables.align(rows, 40)
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("registers") == 3 and all(f"kernel{i}" in text for i in range(9))
    assert tables.align(rows, 200) == tables.align(rows)


def test_a_failed_case_says_so_in_the_picture():
    wrong = Figure("cudnn", None, None, "dq is outside of its error budget", True)
    absent = Figure("fa4", None, None, "is not installed")
    fine = [Figure("heedful", Spread(9.0, 8.0, 10.0)), Figure("flash", Spread(9.0, 8.0, 10.0))]
    outcomes = [_outcome("forward", [*fine, wrong, absent])]
    _, axis = pyplot.subplots()
    report._bars(axis, "forward", outcomes, ["heedful", "flash", "cudnn"])
    words = [text.get_text() for text in axis.texts]
    pyplot.close()
    assert "cudnn failed" in words and not any("fa4" in word for word in words)
    assert len(axis.patches) == 2


def test_a_picture_of_failures_alone_is_drawn(tmp_path):
    wrong = Figure("heedful", None, None, "out is outside of its error budget", True)
    report.picture(tmp_path / "p.png", [_outcome("forward", [wrong])], "footer")
    assert (tmp_path / "p.png").stat().st_size > 0


def test_the_footer_names_device_driver_versions_and_commit():
    facts = run.surroundings(CPU)
    assert facts["device"] == machine.cpu_name() and facts["threads"] == torch.get_num_threads()
    words = report.footer(facts | {"driver": "nvidia 580.1", "commit": "0123456789ab"})
    assert "driver nvidia 580.1" in words and "commit 0123456789ab" in words
    bare = report.footer(facts | {"driver": None, "commit": None})
    assert "driver none" in bare and "commit unknown" in bare and "None" not in bare


def test_explain_prints_grids_and_scratch(screen):
    words = ("--device", "MI355X", "--batch", "2", "--seqlen", "4096", "--splits", "3")
    text = heed("explain", *words).stdout
    facts = json.loads(heed("explain", *words, "--json").stdout)
    first, *_ = facts["launches"]["forward"]
    grid = " x ".join(str(n) for n in first["grid"] if n != 1)
    assert re.search(rf"forward +│ {first['kernel']} +│ {grid} ", text)
    partial = next(s for s in facts["scratch"]["forward"] if s["name"] == "partial_out")
    assert partial["shape"][0] == 3
    assert partial["bytes"] == 4 * torch.Size(partial["shape"]).numel()
    assert f"partial_out {partial['bytes'] / 2**20:.3g} MiB" in text


def test_explain_takes_a_device_of_this_machine(monkeypatch):
    from heedful.cli import given

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked = []

    def spec(device):
        asked.append(device)
        return by_name("H100")

    monkeypatch.setattr(torch_device, "device_spec", spec)
    monkeypatch.setattr(torch_device, "toolchain", lambda device: Toolchain((3, 6), (2, 11), None))
    assert given.planned_device("cuda:1") == (by_name("H100"), Toolchain((3, 6), (2, 11), None))
    assert asked == [torch.device("cuda:1")]


def test_inspections_of_nvidia_kernels_are_in_the_json(monkeypatch):
    sass = Sass(instructions=7, mufu=2)
    found = NvidiaInspection("forward", "forward 90", 168, 0, 0, 1024, sass, None)
    monkeypatch.setattr(command, "of_program", lambda program, arch: [found])
    done = heed("inspect", "--device", "H200", "--json")
    (facts,) = json.loads(done.stdout)
    assert facts["label"] == "forward 90" and facts["registers"] == 168
    assert facts["whole"]["instructions"] == 7 and facts["whole"]["mufu_cycles"] == 16
    for words in (("--segments",), ("--svg", "x.svg")):
        done = heed("inspect", "--device", "H200", *words)
        assert done.exit_code == 2 and "AMD" in done.stderr


def test_the_version_is_printed():
    assert heed("--version").stdout == f"heedful {heedful.__version__}\n"


def test_doctor_says_all_as_data(screen):
    facts = json.loads(heed("doctor", "--json").stdout)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["devices"][-1]["arch"] == "cpu"
    kernels = {row["kernel"]: row for rows in facts["kernels"].values() for row in rows}
    assert kernels["cpu forward"]["level"] == "run" and not kernels["cpu forward"]["missing"]


def test_doctor_does_not_miss_a_jax_that_is_there():
    pytest.importorskip("jax")
    facts = json.loads(heed("doctor", "--json").stdout)
    (rows,) = facts["kernels"].values()
    assert not next(row for row in rows if row["kernel"] == "scan forward")["missing"]


@pytest.mark.parametrize("name", TESTED)
def test_doctor_names_a_version_outside_of_those_tested(name):
    oldest, newest = TESTED[name]
    right = dict.fromkeys(TESTED)

    def said(version: str) -> list[str]:
        return list(doctor_module._untested({**right, name: version}))

    for major, minor in (oldest, newest):
        assert not said(f"{major}.{minor}.3+cu130")
    for version in (f"{newest[0]}.{newest[1] + 1}.0", f"{oldest[0]}.{oldest[1] - 1}.9"):
        (line,) = said(version)
        assert name in line and version in line


def frameworks_found(monkeypatch, version: str | None) -> None:
    found = integrations.Framework("transformers", version, "5.17", "5.24", False)
    monkeypatch.setattr(integrations, "installed", lambda: (found,))


def test_doctor_lists_frameworks_that_are_found_and_how_heedful_gets_into_them(screen, monkeypatch):
    frameworks_found(monkeypatch, "5.20.1")
    (row,) = json.loads(heed("doctor", "--json").stdout)["frameworks"]
    assert row["version"] == "5.20.1" and row["tested"] == ["5.17", "5.24"] and row["is_tested"]
    assert row["register"] == "heedful.integrations.transformers.register()"
    text = " ".join(re.sub("[│┃]", " ", heed("doctor").stdout).split())
    assert "transformers 5.20.1 5.17 to 5.24 after transformers.register()" in text
    assert max(map(len, heed("doctor").stdout.splitlines())) <= WIDTH
    frameworks_found(monkeypatch, None)
    assert json.loads(heed("doctor", "--json").stdout)["frameworks"] == []
    assert "Frameworks" not in heed("doctor").stdout


def test_doctor_says_whether_torchs_own_attention_is_heedfuls_in_this_process():
    def said() -> tuple[dict, str]:
        frameworks = json.loads(heed("doctor", "--json").stdout)["frameworks"]
        (row,) = [row for row in frameworks if row["name"] == "torch"]
        table = heed("doctor").stdout.partition("Frameworks")[2].partition("Devices")[0]
        (line,) = [line for line in table.splitlines() if "torch " in line]
        return row, " ".join(re.sub("[│┃]", " ", line).split())

    row, line = said()
    assert row["register"] == "heedful.integrations.torch.activate()" and not row["active"]
    assert row["tested"] == [".".join(map(str, version)) for version in TESTED["torch"]]
    assert line.endswith("after torch.activate()")
    registry._activate("CPU")
    try:
        row, line = said()
    finally:
        registry.restore()
    assert row["active"] and line.endswith("yes")


def test_doctor_names_a_torch_that_was_not_tested_once(monkeypatch):
    monkeypatch.setattr(doctor_module.machine, "version", {"torch": "9.1.0"}.get)
    monkeypatch.setattr(integrations, "version", lambda name: "9.1.0")
    advice = json.loads(heed("doctor", "--json").stdout)["advice"]
    assert len([line for line in advice if "torch 9.1.0 is outside" in line]) == 1


def test_doctor_names_a_framework_outside_of_the_versions_tested(monkeypatch):
    frameworks_found(monkeypatch, "5.25.0")
    (line,) = [a for a in json.loads(heed("doctor", "--json").stdout)["advice"] if "5.25" in a]
    assert line == "transformers 5.25.0 is outside of what heedful was tested with, 5.17 to 5.24"


def test_doctor_names_an_entry_point_of_this_installation(monkeypatch):
    frameworks_found(monkeypatch, "5.20.1")
    point = SimpleNamespace(group="transformers.plugins", value="heedful.integrations.x:y")
    monkeypatch.setattr(
        doctor_module.metadata, "distribution", lambda name: SimpleNamespace(entry_points=[point])
    )
    (row,) = doctor_module._frameworks()
    assert row["registered"] == ["heedful.integrations.x:y"]


def test_doctor_says_install_triton_where_that_helps():
    gpu, cpu = [by_name("H200"), by_name("CPU")], [by_name("CPU")]
    without = Toolchain(None, (2, 13), None)
    (line,) = doctor_module._advice(gpu, without)
    assert "pip install triton" in line
    assert not list(doctor_module._advice(cpu, without))
    assert not list(doctor_module._advice(gpu, Toolchain()))


def test_a_gpu_on_windows_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(torch_device, "sys", SimpleNamespace(platform="win32"))
    with pytest.raises(ValueError, match=r"got cuda:7: GPU kernels run on Linux alone"):
        torch_device.device_spec.__wrapped__(torch.device("cuda:7"))
    monkeypatch.setattr(doctor_module.platform, "system", lambda: "Windows")
    monkeypatch.setattr(machine, "driver", lambda: "nvidia 580")
    (line,) = doctor_module._advice([by_name("CPU")], Toolchain())
    assert "Linux alone" in line
