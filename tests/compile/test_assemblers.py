"""What assemblers write into machine code, which the driver is asked by."""

import subprocess

import pytest

pytest.importorskip("triton")

from heedful.core.base import installed
from heedful.launch.driver import cuda


@pytest.mark.parametrize("name", ["ptxas", "ptxas-blackwell"])
def test_machine_code_says_which_cuda_its_assembler_is_of(name, tmp_path):
    compiler = installed.compiler()
    ptxas = compiler and compiler.assemblers.get(name)
    if ptxas is None:
        pytest.skip(f"no Triton with {name} here")
    told = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    source, made = tmp_path / "k.ptx", tmp_path / "k.cubin"
    source.write_text(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() { ret; }"
    )
    subprocess.run([ptxas, "-arch=sm_90a", source, "-o", made], check=True)
    assert f"release {cuda.cuda_of(made.read_bytes())}." in told
