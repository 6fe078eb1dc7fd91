"""Files of JSON that say nothing sensible are refused by those who read them."""

import hashlib
import json

import pytest

from heedful.core.base.parsed import parsed
from heedful.launch import record
from heedful.launch.code import manifest, store

DEEP = "[" * 100_000


def test_what_is_nested_too_deep_is_a_value_error():
    for text in (DEEP, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="nested too deep|recursion|depth"):
            parsed(text)
    assert parsed(b'{"a": [1]}') == {"a": [1]}


def test_a_cache_entry_nested_too_deep_is_corrupt():
    header = DEEP.encode()
    first = f"{store.MAGIC} {hashlib.sha256(header).hexdigest()}".encode()
    with pytest.raises(store.CorruptArtifact):
        store.parse("key", b"\n".join((first, header, b"")))


def test_a_manifest_nested_too_deep_is_no_pack():
    with pytest.raises(ValueError, match="is not JSON"):
        manifest.read_manifest(DEEP.encode())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (DEEP, "is not JSON"),
        ("[", "is not JSON"),
        ("\xff", "is not JSON|must be an object"),
        ("5", "must be an object"),
        (json.dumps({"format": 99}), "must be an object with"),
        *(
            (json.dumps({"format": record.FORMAT, "problems": p}), "must have a list of")
            for p in (5, None, {}, "few")
        ),
        *(
            (json.dumps({"format": record.FORMAT, "problems": [p]}), "problem 0: ")
            for p in (5, None, [], {}, "one", [[]])
        ),
    ],
)
def test_a_list_of_problems_says_what_is_wrong_with_it(tmp_path, content, words):
    path = tmp_path / "problems.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=words):
        record.load(path)
