"""Output to the screen that the commands share."""

from typing import NoReturn

import typer
from rich.console import Console

from heedful.core.registry.capability import LEVELS

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

TRITON_HELPS = (
    "triton, which compiles GPU kernels, is not installed: pip install triton (on Linux; torch's"
    " GPU wheels bring it)"
)

TOOLCHAIN_HELPS = (
    "the Hopper kernels of decodes, MLA, fp8 and backward need Triton 3.9: `heedful toolchain"
    " install` brings one beside this environment's"
)

ROCM_HELPS = (
    "torch's builds for ROCm are on its own index alone, and bring their Triton: pip install torch"
    " --index-url https://download.pytorch.org/whl/rocm7.2 (docs/amd.md)"
)

_LEVEL_STYLES = {"run": "green", "emulated": "cyan", "compile-only": "yellow", "untested": "red"}


def level_text(level: str) -> str:
    """A support level in its colour."""
    assert level in LEVELS
    return f"[{_LEVEL_STYLES[level]}]{level}[/]"


def fail(message: object, code: int = 2) -> NoReturn:
    """Says what is wrong on stderr and ends the command."""
    err.print(f"[bold red]error:[/] {message}", soft_wrap=True, markup=True)
    raise typer.Exit(code)
