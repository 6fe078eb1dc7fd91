"""Writes the tree that the `kernels` library loads heedful from: hub_tree.py FOLDER, `make hub`.

It holds no kernels: its module imports the heedful that is installed, and says what to install
where there is none. FOLDER has build/torch-universal, so that every torch takes it:

    python -c "from pathlib import Path; from kernels import get_local_kernel
    print(get_local_kernel(Path('.hub')).flash_attn_func)"
"""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST = "0.16.0"  # of the library that reads the tree
VERSION = 1  # of the functions: a tree whose functions take other arguments has the next one

MODULE = '''\
"""heedful's attention, as the `kernels` library loads it: the functions of an installed heedful."""

import re

try:
    import heedful
except ImportError as error:
    if error.name != "heedful":
        raise
    raise ImportError(
        "this kernel is the package heedful, which is not installed: pip install"
        ' "heedful[cuda]>={version}" with an NVIDIA GPU, [rocm] with an AMD GPU, [cpu] without one'
    ) from None

_LEAST = {numbers}
if tuple(map(int, re.findall(r"\\d+", heedful.__version__)[:3])) < _LEAST:
    raise ImportError(
        f"this kernel is of heedful {version}, and {{heedful.__version__}} is installed: pip"
        ' install --upgrade "heedful>={version}"'
    )

from heedful import (  # noqa: E402
{imports}
)

__all__ = [
{names}
]
'''

CARD = """\
---
library_name: kernels
license: mit
tags:
- kernels
- attention
---

# heedful

{description}.

This repository holds no kernels. The `kernels` library gets the functions of an installed heedful:

    pip install "heedful[cuda]"

    from kernels import get_kernel
    flash_attn_func = get_kernel("ORGANISATION/heedful", version={version}).flash_attn_func

In transformers: `attn_implementation="ORGANISATION/heedful"`. The name that
`heedful.integrations.transformers.register()` makes takes more masks and caches.

Sources, documentation and issues: {source}
"""


def functions() -> list[str]:
    """The public functions of PyTorch, which a hub kernel offers."""
    import heedful

    return [name for name, home in heedful._PUBLIC.items() if home == "heedful.torch"]


def tree() -> dict[str, str]:
    """The files' texts by path."""
    import heedful

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version, source = heedful.__version__, project["urls"]["Source"]
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    names = functions()
    metadata = {
        "id": f"_heedful_{version.replace('.', '_')}",
        "name": "heedful",
        "version": VERSION,
        "kernels-minver": LEAST,
        "license": project["license"],
        "upstream": source,
        "python-depends": [],
        # The library knows no word for all of them; CPUs and AMD GPUs load it, too.
        "backend": {"type": "cuda"},
    }
    module = MODULE.format(
        version=version,
        numbers=numbers,
        imports="\n".join(f"    {name}," for name in sorted(names)),
        names="\n".join(f'    "{name}",' for name in sorted(names)),
    )
    card = CARD.format(description=project["description"], version=VERSION, source=source)
    build = "build/torch-universal/"
    return {
        build + "__init__.py": module,
        build + "metadata.json": json.dumps(metadata, indent=2) + "\n",
        "README.md": card,
    }


def write(folder: Path) -> None:
    """Writes the tree; a folder that holds anything else is left alone. Raises FileExistsError."""
    texts = tree()
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if more := sorted(name for name in there - set(texts) if "__pycache__" not in name):
        raise FileExistsError(f"{folder} holds {more[0]}, which is not of this tree")
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1])
    write(folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
