"""Frameworks in which users choose heedful by a name. To import this imports none of them: each has
a module or a folder, which does.
"""

import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from heedful.core.base import installed as tools

# By framework the first and the last version that the tests ran with.
TESTED = {
    "torch": ("{}.{}".format(*tools.TESTED["torch"][0]), "{}.{}".format(*tools.TESTED["torch"][1])),
    "transformers": ("5.17", "5.24"),
    "diffusers": ("0.42", "0.42"),
    "vllm": ("0.33", "0.33"),
}
# For each framework, how a program makes it run heedful, and how it asks whether it does.
CALLS = dict.fromkeys(TESTED, ("register", "is_registered")) | {"torch": ("activate", "is_active")}
_warned: set[str] = set()


class Framework(NamedTuple):
    """A framework that heedful plugs into.

    version: the installed one; None where there is none. first, last: the versions that the tests
    ran with. registered: whether this process has registered heedful with it.
    """

    name: str
    version: str | None
    first: str
    last: str
    registered: bool

    @property
    def is_tested(self) -> bool:
        """Whether the installed version is within the range of the tests."""
        if self.version is None:
            return False
        return _minor(self.first) <= _minor(self.version) <= _minor(self.last)


def installed() -> tuple[Framework, ...]:
    """Each framework that heedful knows, installed or not. Imports none of them."""
    return tuple(_framework(name) for name in TESTED)


def check(name: str) -> None:
    """Warns, once for each framework, if the tests did not run with the installed version. Raises
    ImportError that names the extra if none is installed."""
    framework = _framework(name)
    if framework.version is None:
        raise ImportError(
            f"heedful.integrations.{name} needs {name}, which is not installed: "
            f"pip install 'heedful[{name}]'"
        )
    if not framework.is_tested and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"heedful was tested with {name} {framework.first} to {framework.last}, and this is "
            f"{framework.version}",
            stacklevel=3,
        )


def _framework(name: str) -> Framework:
    try:
        installed_version = version(name)
    except PackageNotFoundError:
        installed_version = None
    ours = sys.modules.get(f"{__name__}.{name}")
    is_registered = getattr(ours, CALLS[name][1], None)
    return Framework(
        name, installed_version, *TESTED[name], bool(is_registered and is_registered())
    )


def _minor(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2])
