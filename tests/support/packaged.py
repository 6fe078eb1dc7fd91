"""Packages a model that calls attention for AOTInductor, loads the package and runs it, in its own
process: compiled code that goes wrong takes it along."""

import os
import subprocess
import sys
import tempfile
import warnings

import torch

import heedful


class Model(torch.nn.Module):
    """A projection, and attention of one head over what it gives."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(64, 3 * 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.project(x).view(batch, length, 3, 1, 64).unbind(2)
        return 2 * heedful.flash_attn_func(q, k, v, causal=True)


def main(device: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = Model().to(device, dtype)
    x = torch.randn(2, 33, 64, device=device, dtype=dtype)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        wanted = model(x)
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(model, (x,)), package_path=f"{folder}/model.pt2"
        )
        made = torch._inductor.aoti_load_package(package)(x)
    # One compiler may fuse the projection's product otherwise than another.
    torch.testing.assert_close(made, wanted)


def assert_as_it_was(device: str) -> None:
    """Fails where the package does not compute what the model did, or its process dies."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "support.packaged", device]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr


if __name__ == "__main__":
    main(sys.argv[1])
