"""A real text that every Python has, as numbers: the documentation behind `help()`."""

from pydoc_data.topics import topics

# The last part is kept from training.
HELD_OUT = 0.1


def numbered() -> tuple[str, list[int]]:
    """The characters that there are, and all help topics in the order of their names as numbers of
    those."""
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    vocabulary = "".join(sorted(set(whole)))
    number = {character: i for i, character in enumerate(vocabulary)}
    return vocabulary, [number[character] for character in whole]
