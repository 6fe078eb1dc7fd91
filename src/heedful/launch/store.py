"""Artifacts as files: the format that the disk cache and packs share.

One file an artifact: a line of magic, a line of JSON (with the SHA-256 of every blob behind it,
itself digested in the first line), then the blobs. Nothing is ever unpickled or executed on
reading; what does not match its digest is not loaded.
"""

import hashlib
import json
import os
import stat
import tempfile
import zlib
from dataclasses import asdict
from pathlib import Path

from heedful.launch.artifact import Artifact, Parameter

MAGIC = "heedful-kernel-1"
SUFFIX = ".kernel"


class CorruptArtifact(ValueError):
    """A file that is not what its digests say."""


def dump(artifact: Artifact) -> bytes:
    """The file of an artifact."""
    facts = asdict(artifact)
    blobs = {"code": facts.pop("code"), "text": zlib.compress(facts.pop("text").encode())}
    facts["blobs"] = [[n, len(b), hashlib.sha256(b).hexdigest()] for n, b in blobs.items()]
    header = json.dumps(facts, sort_keys=True).encode()
    first = f"{MAGIC} {hashlib.sha256(header).hexdigest()}\n".encode()
    return b"".join((first, header, b"\n", *blobs.values()))


def parse(data: bytes) -> Artifact:
    """The artifact of a file. Raises CorruptArtifact."""
    try:
        first, header, rest = data.split(b"\n", 2)
        magic, digest = first.decode().split(" ")
        if magic != MAGIC or hashlib.sha256(header).hexdigest() != digest:
            raise ValueError("header")
        facts, blobs, offset = json.loads(header), {}, 0
        for name, size, expected in facts.pop("blobs"):
            blob = rest[offset : offset + size]
            if len(blob) != size or hashlib.sha256(blob).hexdigest() != expected:
                raise ValueError(name)
            blobs[name], offset = blob, offset + size
        facts["parameters"] = tuple(Parameter(**p) for p in facts["parameters"])
        return Artifact(code=blobs["code"], text=zlib.decompress(blobs["text"]).decode(), **facts)
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise CorruptArtifact(str(error)) from error


def write(path: Path, artifact: Artifact) -> None:
    """Puts the artifact's file in place in one step: readers see all of it or nothing, whenever
    the writer dies."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(dump(artifact))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def why_not_trusted(folder: Path, owners: tuple[int, ...], forbidden: int) -> str | None:
    """Why native code from this folder must not be loaded, None if it may.

    owners: user ids that may own it. forbidden: mode bits that must be off.
    """
    if os.name == "nt":
        return None
    try:
        status = os.stat(folder)
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    if status.st_uid not in owners:
        return f"{folder} belongs to user {status.st_uid}"
    if status.st_mode & forbidden:
        return f"{folder} has mode {stat.S_IMODE(status.st_mode):o}"
    return None
