"""The manifest of a pack: it says what the files beside it are."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from heedful.core.base.frozen import dataclass
from heedful.core.base.installed import numbers
from heedful.core.base.parsed import parsed

MANIFEST = "manifest.json"
FORMAT = 4


@dataclass(frozen=True)
class WheelFacts:
    """More facts in the manifest of a wheel. heedful: the version that it was made for. arch:
    what its kernels run on. cuda: the first version of CUDA whose drivers load all of them."""

    heedful: str
    arch: str
    cuda: int

    def __post_init__(self) -> None:
        if not isinstance(self.cuda, int):
            raise TypeError(f"cuda must be an int, got {self.cuda!r}")


@dataclass(frozen=True)
class Manifest:
    """digests: the SHA-256 of a kernel's file, by kernel key. backends: by `Variant.packed_as`, the
    Triton that the kernels are planned for. wheel: None for a pack that is no wheel."""

    digests: Mapping[str, str]
    backends: Mapping[str, tuple[int, ...]]
    wheel: WheelFacts | None


def manifest_text(
    kernels: Mapping[str, str],
    backends: Mapping[str, str],
    wheel: WheelFacts | None,
) -> bytes:
    """A manifest: a fact a line, the same for the same kernels. kernels: by key, a file's SHA-256.

    It does not repeat the facts in the files: a first call reads all of it, and thousands of
    objects would set off a collection of garbage.
    """
    content: dict[str, Any] = {"format": FORMAT, "backends": dict(backends), "kernels": kernels}
    if wheel is not None:
        content["wheel"] = asdict(wheel)
    return json.dumps(content, indent=1, sort_keys=True).encode()


def read_manifest(content: bytes) -> Manifest:
    """Raises ValueError saying what is wrong with it."""
    try:
        manifest = parsed(content)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        version = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(
            f"{MANIFEST} has format {version}, wanted {FORMAT}: make it with this version of"
            " heedful"
        )
    try:
        wheel, digests = manifest.get("wheel"), manifest["kernels"]
        if {*map(type, digests.values())} - {str}:
            raise TypeError("digests are text")
        return Manifest(
            digests,
            {str(name): numbers(triton) for name, triton in manifest["backends"].items()},
            None if wheel is None else WheelFacts(**wheel),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} lacks what a pack's has: {error!r}") from None
