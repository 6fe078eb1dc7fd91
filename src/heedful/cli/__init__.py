"""The `heedful` command. A sub-command is a function in a module of its own, named in COMMANDS;
torch and other frameworks are imported inside these functions only."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

import heedful

if TYPE_CHECKING:
    from typer import Typer

# name: (module, function), in the order that help shows.
COMMANDS = {
    "doctor": ("heedful.cli.doctor", "doctor"),
    "explain": ("heedful.cli.explain", "explain"),
    "bench": ("heedful.cli.bench", "bench"),
    "demo": ("heedful.cli.demo", "demo"),
    "support": ("heedful.cli.support", "support"),
    "inspect": ("heedful.cli.inspect", "inspect"),
    "emulate": ("heedful.cli.emulate", "emulate"),
    "validate": ("heedful.cli.validate", "validate"),
    "toolchain": ("heedful.cli.toolchain", "toolchain"),
    "prebuild": ("heedful.cli.prebuild", "prebuild"),
}

# Commands that hand their options on as they are.
FORWARDS = frozenset({"emulate"})


def main() -> None:
    """Entry point of the `heedful` script."""
    app()(prog_name="heedful")


def app() -> "Typer":
    """The command with all its sub-commands. Ends the process where its libraries are missing."""
    try:
        import rich  # noqa: F401  (asked for here, so that one message covers both)
        import typer
    except ImportError as error:
        sys.exit(f'heedful\'s command line needs {error.name}: pip install "heedful[cli]"')
    made = typer.Typer(
        help="Fused attention kernels: what runs here, why, and how fast.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def print_version(asked: bool) -> None:
        if asked:
            typer.echo(f"heedful {heedful.__version__}")
            raise typer.Exit()

    def common(
        version: bool = typer.Option(
            False, "--version", is_eager=True, callback=print_version, help="print the version"
        ),
    ) -> None:
        """Fused attention kernels: what runs here, why, and how fast."""

    made.callback()(common)
    for name, (module, function) in COMMANDS.items():
        settings = {"ignore_unknown_options": True} if name in FORWARDS else None
        made.command(name, context_settings=settings)(getattr(import_module(module), function))
    return made
