"""Prints a version's section of CHANGELOG.md, a release's notes: `python tools/notes.py 0.2.0`.

Fails where there is none, where it is said to be unreleased, or where the package has another
version.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(version: str, changelog: str, package: str) -> str:
    """The section's text. Raises ValueError."""
    own = re.search(r'^__version__ = "(.*)"$', package, re.MULTILINE)
    if own is None or own[1] != version:
        raise ValueError(f"the package is {own and own[1]}, not {version}")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, text = section.partition("\n")
        if re.split(r"[, ]", title)[0] == version:
            if "unreleased" in title:
                raise ValueError(f"CHANGELOG.md says that {version} is unreleased")
            return text.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section {version}")


def main() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    package = (ROOT / "src" / "heedful" / "__init__.py").read_text(encoding="utf-8")
    try:
        sys.stdout.write(notes(sys.argv[1].removeprefix("v"), changelog, package))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
