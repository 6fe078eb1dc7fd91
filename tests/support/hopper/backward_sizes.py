"""Problems and tiles of the backward whose roles run as threads."""

from dataclasses import dataclass

BLOCK_N = 128


@dataclass(frozen=True)
class Sizes:
    """lengths: queries and keys of each sequence. runs: of each 64 queries of the only sequence,
    the one or two runs of keys that they see by key_ranges. listed: of each key tile of the only
    sequence, the tiles of 128 queries of its list, and how many of them need a mask. used: of each
    sequence how many queries are in use, where its keys begin, and how many of these are."""

    lengths: tuple[tuple[int, int], ...]
    heads_k: int = 2
    left: int | None = None
    right: int | None = None
    packed: bool = False
    l2_heads: int = 1
    runs: tuple[tuple[tuple[int, int], ...], ...] = ()
    listed: tuple[tuple[tuple[int, ...], int], ...] = ()
    used: tuple[tuple[int, int, int], ...] = ()

    def in_use(self, b: int) -> tuple[int, int, int]:
        """`used` of a sequence."""
        rows, keys = self.lengths[b]
        return self.used[b] if self.used else (rows, 0, keys)


@dataclass(frozen=True)
class Tile:
    """A step of the kernel, how many work tiles' keys there is room for, and whether visits go
    through all heads of a query tile first."""

    block_m: int = 64
    dim: int = 128
    k_stages: int = 2
    heads_innermost: bool = False
    block_n: int = BLOCK_N
    dk_in_keys: bool = False
    rotates: bool = False
