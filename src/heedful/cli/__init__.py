"""The `heedful` command. A sub-command is a function in a module of its own, named in COMMANDS;
torch and other frameworks are imported inside these functions only."""

import sys
from importlib import import_module

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
    "prebuild": ("heedful.cli.prebuild", "prebuild"),
}


def main() -> None:
    """Entry point of the `heedful` script."""
    try:
        import rich  # noqa: F401  (asked for here, so that one message covers both)
        import typer
    except ImportError as error:
        sys.exit(f'heedful\'s command line needs {error.name}: pip install "heedful[cli]"')
    app = typer.Typer(
        help="Fused attention kernels: what runs here, why, and how fast.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for name, (module, function) in COMMANDS.items():
        app.command(name)(getattr(import_module(module), function))
    app(prog_name="heedful")


def _common() -> None:
    """Fused attention kernels: what runs here, why, and how fast."""
