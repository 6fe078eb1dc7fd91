"""The command line runs .s files and Python kernels, and says by its exit status what it found."""

import json

import pytest

from emulated.helpers.snippets import kernel
from heedful.emulator.command import main

TRITON = """
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)
"""
STORE = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    {wait}
    global_store_dword v1, v0, s[4:5]
"""


@pytest.fixture
def store(tmp_path):
    def write(wait):
        path = tmp_path / "k.s"
        path.write_text(kernel(STORE.format(wait=wait)))
        return str(path)

    return write


def test_a_clean_kernel_exits_with_0(store, capsys):
    assert main([store("s_waitcnt lgkmcnt(0)"), "--arg", "f32:64=zeros"]) == 0
    assert "no findings" in capsys.readouterr().out


def test_findings_exit_with_1_and_come_as_json(store, capsys):
    assert main([store("s_nop 0"), "--arg", "f32:64", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["findings"][0]["kind"] == "waitcnt" and facts["target"] == "gfx942"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arg", "q7:64"], "unknown type"),
        (["--arg", "f32:64=noise"], "unknown fill"),
        (["--arg", "f32:64", "--schedule", "sideways"], "schedule must be"),
        (["--arg", "f32:64", "--arg", "i32=4"], "takes 1"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(store, capsys, options, message):
    assert main([store("s_waitcnt lgkmcnt(0)"), *options]) == 2
    assert message in capsys.readouterr().err


def test_several_schedules_must_give_the_same_bits(tmp_path, capsys):
    path = tmp_path / "k.s"
    path.write_text(
        kernel(
            """
            s_load_dwordx2 s[4:5], s[0:1], 0x0
            v_lshrrev_b32_e32 v2, 6, v0
            v_mov_b32_e32 v3, 0
            s_waitcnt lgkmcnt(0)
            global_store_dword v3, v2, s[4:5]
            """,
            threads=256,
        )
    )
    words = [str(path), "--arg", "f32:4", "--check", "order", "--schedule", "lockstep"]
    assert main(words) == 0
    assert main([*words, "--schedule", "delay:each"]) == 1
    assert "order: byte 0 of argument 0" in capsys.readouterr().out


def test_the_facts_beside_a_file_of_triton_s_cache_are_used(tmp_path, capsys):
    write = "v_lshlrev_b32_e32 v1, 2, v0\nds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)"
    path = tmp_path / "k.amdgcn"
    path.write_text(kernel(write, threads=128))
    assert main([str(path), "--arg", "f32:4"]) == 0
    (tmp_path / "k.json").write_text(json.dumps({"shared": 256, "num_warps": 2}))
    assert main([str(path), "--arg", "f32:4"]) == 1
    assert "lds-bounds" in capsys.readouterr().out
    assert main([str(path), "--arg", "f32:4", "--lds", "512"]) == 0
    assert main([str(path), "--arg", "f32:4", "--warps", "1"]) == 0


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_a_python_kernel_is_compiled_and_run(tmp_path, capsys, target):
    path = tmp_path / "kernels.py"
    path.write_text(TRITON)
    words = [f"{path}:double", "--target", target, "--grid", "3", "--constant", "BLOCK=128"]
    words += ["--arg", "f32:300", "--arg", "f32:300=nan", "--arg", "i32=300", "--warps", "2"]
    assert main(words) == 0
    assert "double on " + target in capsys.readouterr().out
    words[words.index("i32=300")] = "i32=301"
    assert main(words) == 1
    assert "global-bounds" in capsys.readouterr().out


def test_a_time_comes_with_its_range_and_a_picture(store, capsys, tmp_path):
    picture = tmp_path / "waves.svg"
    options = ["--grid", "8", "--arg", "f32:64=zeros", "--time", "2", "--svg", str(picture)]
    assert main([store("s_waitcnt lgkmcnt(0)"), *options]) == 0
    text = capsys.readouterr().out
    assert "predicted" in text and "between" in text and "units busy" in text
    assert "wave 0" in picture.read_text()
    assert main([store("s_waitcnt lgkmcnt(0)"), *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["time"]
    assert facts["range"][0] <= facts["seconds"] <= facts["range"][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--time", "2"], "from 1 to 1"),
        (["--time", "1", "--schedule", "random:0"], "lockstep"),
        (["--time", "1", "--save", "folder"], "cannot be compared or saved"),
        (["--svg", "waves.svg"], "--time"),
        (["--window", "0", "--svg", "waves.svg", "--time", "1"], "--window"),
    ],
)
def test_a_time_refuses_what_it_cannot_do(store, capsys, options, message):
    if "--save" in options:
        options = [*options, "--set", "@0=f32:64=zeros"]
    else:
        options = [*options, "--arg", "f32:64=zeros"]
    assert main([store("s_waitcnt lgkmcnt(0)"), *options]) == 2
    assert message in capsys.readouterr().err
