"""Artifacts as files: the format that the disk cache and packs share.

One file an artifact: a line of magic, a line of JSON (with the SHA-256 of every blob after it,
itself digested in the first line), then the blobs, which are compressed. Nothing is ever unpickled
or executed on reading; what does not match its digest is not loaded.
"""

import hashlib
import json
import zlib
from dataclasses import asdict

from heedful.core.base.parsed import parsed
from heedful.launch.code.artifact import Artifact, Parameter

MAGIC = "heedful-kernel-3"
SUFFIX = ".kernel"


class CorruptArtifact(ValueError):
    """A file that is not what its digests say."""


def dump(key: str, artifact: Artifact) -> bytes:
    """The file of an artifact, with its key."""
    facts = asdict(artifact)
    blobs = {"code": facts.pop("code"), "text": facts.pop("text").encode()}
    # At the highest level: wheels of kernels come close to what an index takes.
    blobs = {name: zlib.compress(blob, 9) for name, blob in blobs.items()}
    facts["blobs"] = [[n, len(b), hashlib.sha256(b).hexdigest()] for n, b in blobs.items()]
    header = json.dumps({"key": key, **facts}).encode()
    first = f"{MAGIC} {hashlib.sha256(header).hexdigest()}\n".encode()
    return b"".join((first, header, b"\n", *blobs.values()))


def parse(key: str, data: bytes) -> Artifact:
    """The artifact of a file. Raises CorruptArtifact, also for that of another key."""
    try:
        first, header, rest = data.split(b"\n", 2)
        magic, digest = first.decode().split(" ")
        if magic != MAGIC or hashlib.sha256(header).hexdigest() != digest:
            raise ValueError("header")
        facts, blobs, offset = parsed(header), {}, 0
        if facts.pop("key") != key:
            raise ValueError("it is of another key")
        for name, size, expected in facts.pop("blobs"):
            blob = rest[offset : offset + size]
            if len(blob) != size or hashlib.sha256(blob).hexdigest() != expected:
                raise ValueError(name)
            blobs[name], offset = zlib.decompress(blob), offset + size
        if offset != len(rest):
            raise ValueError("length")
        facts["parameters"] = tuple(Parameter(**p) for p in facts["parameters"])
        return Artifact(code=blobs["code"], text=blobs["text"].decode(), **facts)
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        raise CorruptArtifact(str(error)) from error
