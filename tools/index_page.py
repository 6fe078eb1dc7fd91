"""The README as a package index shows it: what lies in the repository gets the address that it has
under the version's tag. Hatchling calls this (pyproject.toml) when it builds sdist or wheel.
"""

import re
from pathlib import Path

# Of a link in Markdown, or of a picture in HTML.
RELATIVE = re.compile(r"""(\]\(|\b(?:src|srcset|href)=")(?![a-z+]+:|[#/])([^\s)"]+)""")
PICTURES = (".svg", ".png")


def absolute(page: str, source: str, version: str) -> str:
    """The page with no relative links. source: the repository, https://github.com/OWNER/NAME."""

    def whole(found: re.Match) -> str:
        # GitHub's page about a picture is no picture.
        kind = "raw" if found[2].endswith(PICTURES) else "blob"
        return f"{found[1]}{source}/{kind}/v{version}/{found[2]}"

    parts = re.split(r"(^```.*?^```$)", page, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else RELATIVE.sub(whole, part) for part in parts)


class Readme:
    """What hatchling wants of a metadata hook. It imports nothing that only builds have."""

    def __init__(self, root: str, config: dict):
        self.root = Path(root)

    def update(self, metadata: dict) -> None:
        page = (self.root / "README.md").read_text(encoding="utf-8")
        text = absolute(page, metadata["urls"]["Source"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

    def get_known_classifiers(self) -> list[str]:
        return []


def get_metadata_hook() -> type[Readme]:
    return Readme
