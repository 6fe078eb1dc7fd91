"""What a compiler that failed advises: of the machine's faults, and of these alone."""

from errno import EACCES, EAGAIN, EINVAL, ENOENT, ENOMEM, EPERM

import pytest

from heedful.launch.code.artifact import remedy

MEMORY, ASSEMBLER = "where memory is short", "the compiler runs an assembler"
CASES = [
    (None, ""),
    (ValueError("x"), ""),
    (MemoryError(), MEMORY),
    (OSError(ENOMEM, "x"), MEMORY),
    (OSError(ENOMEM, "x", "a file"), MEMORY),
    *((OSError(number, "x"), ASSEMBLER) for number in (EPERM, EACCES, EAGAIN)),
    # Of a file, or of another fault.
    *((OSError(number, "x", "a file"), "of files") for number in (EPERM, EACCES, ENOENT)),
    *((OSError(number, "x"), "of files") for number in (ENOENT, EINVAL)),
]


@pytest.mark.parametrize(("error", "words"), CASES, ids=repr)
def test_a_fault_has_the_advice_that_mends_it(error, words):
    said = remedy(error, "of files")
    assert said.startswith(f": {words}") if words else not said


def test_without_advice_about_files_a_file_that_is_at_fault_has_none():
    assert remedy(OSError(ENOENT, "x", "a file")) == ""
