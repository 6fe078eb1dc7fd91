"""Packages that are installed, as if they were not: for processes of their own."""

import importlib.metadata as metadata
import sys


def hide(*packages: str) -> None:
    """Neither imported nor found among what is installed from now on."""
    find = metadata.version

    def version(name: str) -> str:
        if name in packages:
            raise metadata.PackageNotFoundError(name)
        return find(name)

    metadata.version = version
    hidden: dict = dict.fromkeys(packages)
    sys.modules.update(hidden)
